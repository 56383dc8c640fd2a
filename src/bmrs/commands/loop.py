"""The training ``bmrs train`` does: whole for comparison if asked, then pruning, then fine-tuning what is left.

Without epochs of pruning there are gates to list the units by, and none while it trains.

Each epoch's order and random numbers follow from the seed and its number alone, and its end leaves a state to go on
from: a run that is stopped ends with the numbers of an undisturbed one.
"""

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

import bmrs
from bmrs.commands import fitting, losses
from bmrs.commands.data import Batches, Data, applied, moved, some
from bmrs.commands.errors import RunError
from bmrs.commands.processes import Processes
from bmrs.commands.proof import proved
from bmrs.commands.recipe import Recipe
from bmrs.report import Recorder

VERSION = 1
WHOLE, PRUNE, FINE_TUNE = "whole", "prune", "fine-tune"
State = dict[str, Any]


@dataclass
class Step:
    """How far a training is. ``value``: of the held-out data, after the epochs that are done."""

    phase: str
    epoch: int  # done
    epochs: int
    step: int = 0  # of the epoch that runs
    steps: int = 0
    value: float | None = None
    units: dict[str, int] = field(default_factory=dict)
    parameters: int = 0


class Training:
    """The constructor and :meth:`prepare` refuse what cannot work; :meth:`run` does it."""

    def __init__(
        self, make: Callable[[], nn.Module], data: Data, recipe: Recipe, processes: Processes, workers: int = 0,
        name: str = "network", trained: bool = False,
    ) -> None:  # fmt: skip
        """``name``: of the network, in reports. ``trained``: it begins as what the pruned one is compared with."""
        self.make, self.data, self.recipe, self.processes, self.trained = make, data, recipe, processes, trained
        self.name = name
        self.loss, self.device = losses.find(recipe.loss), processes.device
        self.criterion = bmrs.criteria.by_name(recipe.criterion)
        self.network = self.built()
        share: dict[str, Any] = {"seed": recipe.seed, "workers": workers, "rank": processes.rank,
                                 "world": processes.world}  # fmt: skip
        self.batches = Batches(data.train, recipe.batch, shuffle=True, **share)
        self.held_out = {
            name: Batches(part, recipe.batch, shuffle=False, **share) for name, part in data.held_out.items()
        }
        first = fitting.first_batch("training", self.batches, self.device)
        if first is None:
            raise ValueError("--data has no batch to train on: give a smaller --batch.")
        self.examples = some(first[0], 2)
        fitting.check(self.network, self.loss, "training", data.train, *first)
        for name, batches in self.held_out.items():
            if held := fitting.first_batch(name, batches, self.device):
                fitting.check(self.network, self.loss, name, data.held_out[name], *held)
        self.state: State = {}

    @property
    def steps(self) -> int:
        """Optimizer steps of an epoch."""
        return len(self.batches)

    @property
    def phases(self) -> dict[str, int]:
        """Epochs of each."""
        recipe = self.recipe
        whole = {WHOLE: recipe.epochs + recipe.fine_tune} if recipe.compare else {}
        return {**whole, **{phase: epochs for phase, epochs in ((PRUNE, recipe.epochs), (FINE_TUNE, recipe.fine_tune))
                            if epochs}}  # fmt: skip

    def built(self) -> nn.Module:
        """The network as it is before any training."""
        torch.manual_seed(self.recipe.seed)
        return self.make().to(self.device)

    def prepare(self) -> None:
        """Put gates on the network; refuses one of which nothing can go."""
        recipe, network = self.recipe, self.network
        found = proved(network, self.examples)
        self.optimizer = recipe.make_optimizer(network.parameters())
        self.pruner = bmrs.Pruner(
            network, self.examples, self.optimizer, num_examples=self.data.examples, criterion=self.criterion,
            price=recipe.price, strength=recipe.strength, noise="batch" if recipe.noise == "batch" else "example",
            structures=found, phi_lr=recipe.phi_rate, warmup=recipe.steps_to_warm(self.steps),
            round_to=recipe.round_to, seed=recipe.seed,
        )  # fmt: skip
        self.recorder = Recorder(self.pruner, some(self.examples, 1), data=self.data.name,
                                 network=self.name, **asdict(recipe))  # fmt: skip
        if not recipe.epochs:
            self.pruner.bank.detach()  # untouched gates: their means are no part of the network
        self.wrapper = self.processes.wrapped(network)

    # --- the training -------------------------------------------------------------------------------------------------

    def run(
        self,
        saved: Mapping[str, Any] | None = None,
        keep: Callable[[State], None] = lambda state: None,
        tell: Callable[[Step], None] = lambda step: None,
        log: Callable[[dict[str, float], int], None] = lambda values, step: None,
    ) -> dict[str, Any]:
        """Train from the state of an earlier run, if there is one; returns the result a report is made of.

        ``keep`` is given the state after every epoch, ``tell`` how far it is after every step, and ``log`` numbers.
        """
        self.keep, self.tell, self.log = keep, tell, log
        self.since = time.perf_counter()
        if saved and saved.get("version") != VERSION:
            raise ValueError("the checkpoint comes from another version of bmrs: begin anew with --restart.")
        self.state = {"version": VERSION, "done": {}, "history": [], "seconds": 0.0,
                      "examples": moved(self.examples, torch.device("cpu")), **(saved or {})}  # fmt: skip
        if "start" not in self.state:
            self.pruner.bank.paused = True  # as it came, without gates
            self.state["start"] = self._judged(self.network)
            self.pruner.bank.paused = not self.recipe.epochs
        if self.recipe.compare:
            self._whole()
        self._prune()
        if self.recipe.fine_tune:
            self._fine_tune()
        return self._result()

    def _whole(self) -> None:
        """The same network without gates, for as long."""
        if "whole" in self.state:
            return
        network = self.built()
        optimizer = self.recipe.make_optimizer(network.parameters())
        self._plain(WHOLE, network, self.processes.wrapped(network), optimizer, self.phases[WHOLE])
        self.state["whole"] = self._judged(network)
        for name in ("network", "optimizer"):
            self.state.pop(name, None)

    def _prune(self) -> None:
        network, pruner, recorder, epochs = self.network, self.pruner, self.recorder, self.recipe.epochs
        if not epochs:
            return
        if "pruner" in self.state:
            pruner.load_state_dict(self.state["pruner"])
            recorder.load_state_dict(self.state["recorder"])
        for epoch in range(self._done(PRUNE), epochs):
            loss, seconds = self._epoch(PRUNE, network, self.wrapper, self.optimizer, epoch, epoch, epochs)
            recorder.prune()
            self.state["recorder"] = recorder.state_dict()
            self._after(PRUNE, network, epoch, loss, seconds, {"pruner": pruner.state_dict()})
        # What the gates know stays in the checkpoint: bmrs prune can ask them again.
        self.state["pruner"] = copy.deepcopy(pruner.state_dict())
        pruner.finish()

    def _fine_tune(self) -> None:
        optimizer = self.recipe.make_optimizer(self.network.parameters(), gentle=True)
        self._plain(FINE_TUNE, self.network, self.wrapper, optimizer, self.recipe.fine_tune, self.recipe.epochs)

    def _plain(
        self, phase: str, network: nn.Module, called: nn.Module, optimizer: torch.optim.Optimizer, epochs: int,
        before: int = 0,
    ) -> None:  # fmt: skip
        """Without gates. ``before``: epochs this network was trained for already."""
        done = self._done(phase)
        if done:
            network.load_state_dict(self.state["network"])
            optimizer.load_state_dict(self.state["optimizer"])
        for epoch in range(done, epochs):
            loss, seconds = self._epoch(phase, network, called, optimizer, before + epoch, epoch, epochs)
            parts = {"network": network.state_dict(), "optimizer": optimizer.state_dict()}
            self._after(phase, network, epoch, loss, seconds, parts)

    def _epoch(
        self, phase: str, network: nn.Module, called: nn.Module, optimizer: torch.optim.Optimizer, number: int,
        epoch: int, epochs: int,
    ) -> tuple[float, float]:  # fmt: skip
        """One pass over the data; returns the mean loss and the seconds it took."""
        self.processes.seed(self.recipe.seed, number)
        begun = time.perf_counter()
        network.train()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for step, (x, y) in enumerate(self.batches.of_epoch(number), start=1):
            x, y = moved(x, self.device), moved(y, self.device)
            optimizer.zero_grad()
            with self._precision():
                loss = self.loss.function(applied(called, x), y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            self.tell(Step(phase, epoch, epochs, step, self.steps))
        mean = float(self.processes.summed(total / self.steps)) / self.processes.world
        if not math.isfinite(mean):
            spoilt = fitting.not_finite(self.batches.of_epoch(number))
            raise RunError(
                f"the loss became {mean:g} in epoch {epoch + 1} of phase '{phase}': "
                + (f"the data have {spoilt} of a batch; mend them." if spoilt else
                   "give a lower --learning-rate and --restart.")
            )  # fmt: skip
        return mean, time.perf_counter() - begun

    def _after(
        self, phase: str, network: nn.Module, epoch: int, loss: float, seconds: float, parts: Mapping[str, Any]
    ) -> None:
        """Judge the network, and leave a state to go on from."""
        name, batches = next(iter(self.held_out.items()))
        value = self.judge(network, batches)
        units = {s.name: s.units for s in self.pruner.structures if s.name in self.pruner.bank.layers} if (
            phase == PRUNE) else {}  # fmt: skip
        parameters = sum(p.numel() for n, p in network.named_parameters() if not n.startswith("bmrs_noise"))
        numbers = {"loss": loss, f"{name} {self.loss.metric}": value, "parameters": parameters, "seconds": seconds}
        if units:
            numbers["units"] = sum(units.values())
        self.state["history"].append({"phase": phase, "epoch": epoch + 1, **numbers})
        self.state["done"][phase] = epoch + 1
        now = time.perf_counter()
        self.state["seconds"], self.since = self.state["seconds"] + now - self.since, now
        self.state.update(parts)
        self.keep(self.state)
        self.log({f"{phase}/{what}": number for what, number in numbers.items()}, len(self.state["history"]))
        self.tell(Step(phase, epoch + 1, self.phases[phase], 0, self.steps, value, units, parameters))

    def _done(self, phase: str) -> int:
        return int(self.state["done"].get(phase, 0))

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.precision == "bf16")

    # --- what came of it ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def judge(self, network: nn.Module, batches: Batches) -> float:
        """The metric on held-out data."""
        network.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for x, y in batches.of_epoch(0):
            with self._precision():
                output = applied(network, moved(x, self.device))
                sums += self.loss.sums(output, moved(y, self.device))
        if batches.shared:
            sums = self.processes.summed(sums)
        return float(sums[0] / sums[1])

    def _judged(self, network: nn.Module) -> dict[str, float]:
        return {name: self.judge(network, batches) for name, batches in self.held_out.items()}

    def _result(self) -> dict[str, Any]:
        judged = {"start": self.state["start"], "pruned": self._judged(self.network)}
        if "whole" in self.state or self.trained:
            judged["whole"] = self.state.get("whole", self.state["start"])
        counted = self.loss.metric == "accuracy"
        last = list(self.held_out)[-1]  # the test set, where there is one
        found = self.recorder.result(
            judged["pruned"][last] if counted else None,
            judged["whole"][last] if counted and "whole" in judged else None,
        )
        if not self.recipe.epochs:  # gates that nothing was learned of
            for name in ("gates", "history"):
                del found[name]
        return {
            **found, "metric": self.loss.metric, "judged": judged, "epochs": self.state["history"],
            "seconds": self.state["seconds"], "examples": self.data.examples, "processes": self.processes.world,
        }  # fmt: skip


def units_of(result: Mapping[str, Any]) -> tuple[int, int]:
    """All units before and after."""
    pairs = result["units"].values()
    return sum(pair["before"] for pair in pairs), sum(pair["after"] for pair in pairs)


def inputs_as_options(examples: Any) -> str:
    """``--input`` options that give inputs of the same shapes, for the next command."""
    pairs = examples.items() if isinstance(examples, Mapping) else [
        ("", one) for one in (examples if isinstance(examples, tuple | list) else [examples])
    ]  # fmt: skip
    texts = []
    for name, tensor in pairs:
        shape = "x".join(map(str, (1, *tensor.shape[1:])))
        option = "--input" if tensor.is_floating_point() else "--integer-input"
        texts.append(f"{option} {name}={shape}" if name else f"{option} {shape}")
    return " ".join(texts)
