"""One network of the study: trained, pruned while it trains, fine-tuned as what is left, tested.

The state after any epoch is enough to go on as if nothing had happened.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import bmrs
from bmrs.noise import Noise
from bmrs.study.counting import Counting
from bmrs.study.large import networks
from bmrs.study.large.deadline import Deadline, TimeUpError
from bmrs.study.large.feed import Feed
from bmrs.study.large.placement import gated, short
from bmrs.study.large.recipe import Recipe, Setting
from bmrs.study.large.steps import Step, accuracy, optimizer_for, precise, rate, relaid, set_rate
from bmrs.study.settings import criterion

_TEST_BATCH = 1000
Keep = Callable[..., None]


class Run:
    """A network in training. ``share``: of units, for the method that removes as many as another did."""

    def __init__(
        self,
        setting: Setting,
        recipe: Recipe,
        method: str,
        seed: int,
        *,
        device: str = "cpu",
        data_dir: Path | None = None,
        share: float | None = None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.setting, self.recipe, self.method, self.seed = setting, recipe.of(setting), method, seed
        self.device, self.tell = torch.device(device), tell
        recipe = self.recipe
        self.feed = Feed(
            setting.data, data_dir, resolution=recipe.resolution, device=self.device, augment=recipe.augment,
            channels_last=recipe.channels_last, images=recipe.images,
        )  # fmt: skip
        self.validation = self.feed.split(seed)[1]
        network = networks.build(setting, self.feed.classes, recipe, seed).to(self.device)
        relaid(network, None, recipe.channels_last)
        network.eval()
        example = self.feed.example()
        listing = bmrs.structures(network, example)
        self.structures = gated(listing, recipe.gates)
        self.counting = Counting(network, self.structures, example)
        self.whole = bmrs.cost.multiply_adds(network, example[:1])
        self.network: nn.Module = network
        self.optimizer = optimizer_for(network, recipe, self.device)
        self.pruner = self._pruner(example, share) if method != "none" else None
        self.step = Step(network, self.optimizer, recipe, self.pruner, tell)
        self.done = 0
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Any] = {"validation": -1.0, "model": None}
        self.folded: dict[str, Any] | None = None  # where the gates were folded before fine-tuning: the state then
        self.finish: dict[str, float] = {}  # test accuracy before and after the gates were folded

    def _pruner(self, example: Tensor, share: float | None) -> bmrs.Pruner:
        recipe = self.recipe
        if self.method == "l2" and share is None:
            raise ValueError("method l2 removes as many units as bmrs_n does: add bmrs_n to the methods.")
        return bmrs.Pruner(
            self.network, example, self.optimizer, num_examples=len(self.feed.train) - len(self.validation),
            criterion=bmrs.L2(share) if share is not None and self.method == "l2" else criterion(self.method),
            price=recipe.price, strength=recipe.strength, structures=self.structures, phi_lr=recipe.phi_lr,
            log_sigma=recipe.log_sigma, warmup=recipe.warmup, seed=self.seed, noise=cast(Noise, recipe.noise),
            round_to=recipe.round_to or 1,
        )  # fmt: skip

    @property
    def epochs(self) -> int:
        return self.recipe.epochs + self.recipe.fine_tune

    # --- an epoch -----------------------------------------------------------------------------------------------------

    def epoch(self) -> None:
        """The next one: training, what it is followed by, and how well it validates."""
        begun, number, recipe = time.perf_counter(), self.done + 1, self.recipe
        feed = self.feed.epoch(self.seed, number)
        batches = feed.batches(recipe.batch)
        losses = torch.zeros((), device=self.device)
        self.network.train()
        for n in range(batches):
            set_rate(self.optimizer, rate(recipe, self.done * batches + n, self.epochs * batches))
            losses += self.step(*feed.batch(n, recipe.batch))
        loss = float(losses) / batches  # waits for the device, so that the time is that of training
        seconds = time.perf_counter() - begun
        if number <= recipe.epochs:
            self._prune(number)
        tuning = number > recipe.epochs or number == self.epochs
        validation = accuracy(self.network, self._batches(self.feed.train, self.validation), recipe)
        if tuning and validation > self.best["validation"]:
            state = {name: tensor.detach().clone() for name, tensor in self.network.state_dict().items()}
            self.best = {"validation": validation, "model": state, "epoch": number}
        self.done = number
        left = self._alive()
        self.history.append({
            "epoch": number, "units": int(left.sum()), "parameters": self._parameters(), "loss": loss,
            "validation": validation, "seconds": seconds, "wall": time.perf_counter() - begun,
            "published": self._published(left),
        })  # fmt: skip
        last = self.history[-1]
        self.tell(f"epoch {number} of {self.epochs}: loss {loss:.3f}, validation {validation:.2%}, "
                  f"{last['parameters']:,} parameters, {seconds:.3g} s")  # fmt: skip

    def _prune(self, number: int) -> None:
        last = number == self.recipe.epochs
        if self.pruner is None:
            return
        if last if self.method == "l2" else last or number % self.recipe.prune_every == 0:
            self.pruner.prune()
            relaid(self.network, self.optimizer, self.recipe.channels_last)
            self.step.changed()
        if last and self.recipe.fold == "before":
            self.folded = {name: _copied(part) for name, part in self.pruner.state_dict().items()}
            self._fold()

    def _fold(self) -> None:
        """The gates into the weights; the network is a plain one from here on."""
        assert self.pruner is not None
        self.alive = self._alive()
        self.finish = {"before": self._test(), **self.finish}
        self.network = self.pruner.finish()
        relaid(self.network, self.optimizer, self.recipe.channels_last)
        self.finish["after"] = self._test()
        self.step = Step(self.network, self.optimizer, self.recipe, note=self.tell)

    # --- how far it is ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        plain = self.pruner is None or self.pruner.finished
        own = {"model": self.network.state_dict(), "optimizers": [self.optimizer.state_dict()]}
        return {
            "done": self.done, "history": self.history, "best": self.best, "folded": self.folded,
            "network": own if plain else self.pruner.state_dict() if self.pruner is not None else own,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, in a run that has just been made."""
        self.history, self.best, self.folded = list(state["history"]), dict(state["best"]), state["folded"]
        self.done = state["done"]
        if self.pruner is not None:
            self.pruner.load_state_dict(self.folded or state["network"])
            if self.folded is not None:
                self._fold()
        if self.pruner is None or self.pruner.finished:
            self.network.load_state_dict(state["network"]["model"])
            self.optimizer.load_state_dict(state["network"]["optimizers"][0])
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"] = group["lr"].to(self.device)
        relaid(self.network, self.optimizer, self.recipe.channels_last)
        self.step.changed()

    # --- what came of it ----------------------------------------------------------------------------------------------

    def result(self, file: Path | None = None) -> dict[str, Any]:
        """At the epoch of fine-tuning that validated best. The pruned network is left in ``file``."""
        self.network.load_state_dict(self.best["model"])
        if self.pruner is not None and not self.pruner.finished:
            self._fold()
        alive = self._alive()
        parameters = self._parameters()
        units = {short(name): int(alive[0, own].sum()) for name, own in self.counting.layers.items()}
        seconds = [past["seconds"] for past in self.history]
        if file is not None and self.pruner is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            bmrs.save(self.network, file)
        return {
            "setting": self.setting.key, "method": self.method, "price": self.recipe.price if self.pruner else "layer",
            "strength": self.recipe.strength if self.pruner else 1.0, "seed": self.seed,
            "accuracy": self._test(), "validation": self.best["validation"], "best_epoch": self.best["epoch"],
            "compression": {"published": self._published(alive), "actual": 1 - parameters / self.counting.parameters},
            "parameters": parameters, "multiply_adds": bmrs.cost.multiply_adds(self.network, self.feed.example()[:1]),
            "units": units, "removed_units": 1.0 - float(alive.double().mean()), "history": self.history,
            "emptied": [], "finish": self.finish, "seconds_per_epoch": {"first": seconds[0], "last": seconds[-1]},
            "file": file.name if file is not None and self.pruner is not None else None,
        }  # fmt: skip

    def entry(self, seconds: float) -> dict[str, Any]:
        """This setting in a result file."""
        return {
            "network": self.setting.network, "data": self.setting.data,
            "layers": {short(name): own.stop - own.start for name, own in self.counting.layers.items()},
            "parameters": self.counting.parameters, "multiply_adds": self.whole, "seconds": seconds, "networks": 1,
            "made": networks.name_of(self.setting, self.recipe), "train_images": len(self.feed.train),
            "classes": self.feed.classes, **self.recipe.to_json(self.setting),
        }  # fmt: skip

    def _alive(self) -> Tensor:
        """[1, units]: which are still there."""
        if self.pruner is not None and self.pruner.finished:
            return self.alive
        alive = torch.zeros(1, self.counting.units, dtype=torch.bool)
        for structure in self.structures:
            alive[0, self.counting.layers[structure.name].start + torch.tensor(structure.kept, dtype=torch.long)] = True
        return alive

    def _parameters(self) -> int:
        gates = 0 if self.pruner is None or self.pruner.finished else 2 * len(self.pruner.bank.mu)
        return bmrs.cost.parameters(self.network) - gates

    def _published(self, alive: Tensor) -> float | None:
        """The authors count what their own gates remove; there is no such count for others."""
        if self.recipe.gates != "paper":
            return None
        return float(self.counting.left(alive)["published"][0]) if self.pruner is not None else 0.0

    def _test(self) -> float:
        return accuracy(self.network, self._batches(self.feed.test), self.recipe)

    def _batches(self, part: Any, numbers: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        numbers = torch.arange(len(part), device=self.device) if numbers is None else numbers
        for own in numbers.split(_TEST_BATCH):
            yield self.feed.prepared(part.x[own]), part.y[own]


def continuous(
    setting: Setting,
    recipe: Recipe,
    method: str,
    seed: int,
    *,
    device: str = "cpu",
    data_dir: Path | None = None,
    share: float | None = None,
    file: Path | None = None,
    deadline: Deadline | None = None,
    checkpoint: Keep = lambda state, **options: None,
    resume: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Train, prune after epochs, fine-tune what is left, test the epoch of fine-tuning that validates best.

    ``checkpoint`` is given a state after every epoch, ``resume`` takes one; where the ``deadline`` leaves no time for
    another epoch, the state is kept and TimeUpError raised.
    """
    begun, deadline = time.perf_counter(), deadline or Deadline()
    if not deadline.allows(deadline.longest):
        raise TimeUpError
    with precise(recipe):
        run = Run(setting, recipe, method, seed, device=device, data_dir=data_dir, share=share, tell=tell)
        spent = 0.0
        if resume is not None:
            run.load_state_dict(resume)
            spent = resume["spent"]
        while run.done < run.epochs:
            if not deadline.allows(max((past["wall"] for past in run.history[-3:]), default=deadline.longest)):
                raise TimeUpError
            run.epoch()
            deadline.longest = max(deadline.longest, run.history[-1]["wall"])
            progress(run.done, run.epochs)
            last = run.done == run.epochs or not deadline.allows(run.history[-1]["wall"])
            checkpoint({**run.state_dict(), "spent": spent + time.perf_counter() - begun}, at_once=last)
        found = run.result(file)
        return {"setting": run.entry(spent + time.perf_counter() - begun), "runs": [found]}


def _copied(value: Any) -> Any:
    """A state that does not change with what it is of."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value
