"""The study's protocols: what all share, pruning while training, and what a search for hyper-parameters maximises.

All members of a setting train side by side (:mod:`bmrs.study.ensemble`), on images that stay on the device. A long
protocol hands out its state after every epoch and goes on from it.
"""

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bmrs
from bmrs.criteria import spare_best
from bmrs.price import of_structures
from bmrs.structure import Structure
from bmrs.study import data
from bmrs.study.counting import Counting
from bmrs.study.ensemble import Ensemble
from bmrs.study.settings import Setting, building, criterion

Save = Callable[[dict[str, Any]], None]
Tell = Callable[[int, int], None]
PUBLISHED_PRICE = (("layer", 1.0),)


@dataclass(frozen=True)
class Member:
    """One network of a setting."""

    method: str
    seed: int
    price: str = "layer"
    strength: float = 1.0

    @property
    def gated(self) -> bool:
        return self.method != "none"


class Stage:
    """What all members of a setting share: images on the device, splits, the network's structures and their count."""

    def __init__(
        self, setting: Setting, device: str, data_dir: Path | None, dtype: torch.dtype = torch.float32
    ) -> None:
        with building:  # the first to need images downloads them
            images = data.images(setting.data, data_dir).to(device)
        self.setting, self.device = setting, torch.device(device)
        self.x, self.test_x = (images.prepare(part.x).to(dtype) for part in (images.train, images.test))
        self.y, self.test_y = images.train.y, images.test.y
        self.shape, self.classes = images.input_shape, images.classes
        self._splits: dict[int, tuple[Tensor, Tensor]] = {}
        self._look()

    def _look(self) -> None:
        """At the network: what can be removed from it, and what that counts."""
        example = self.test_x[:2].cpu()
        with building:
            network: nn.Module = self.setting.build(self.shape, self.classes, 0).to(example.dtype)
            self.structures = list(bmrs.structures(network, example).verify())
            self.counting = Counting(network, self.structures, example)

    def of(self, setting: Setting) -> "Stage":
        """The same images for another network."""
        other = copy.copy(self)
        other.setting = setting
        other._look()
        return other

    def split(self, seed: int) -> tuple[Tensor, Tensor]:
        """Numbers of the images to train and to validate on."""
        if seed not in self._splits:
            self._splits[seed] = data.split(len(self.y), seed)
        return self._splits[seed]

    def order(self, seeds: Sequence[int], epoch: int) -> Tensor:
        """In which order each member sees its training images in this epoch."""
        orders: dict[int, Tensor] = {}
        for seed in set(seeds):
            own = self.split(seed)[0]
            shuffle = torch.Generator().manual_seed(1_000_003 * seed + epoch)
            orders[seed] = own[torch.randperm(len(own), generator=shuffle)]
        return torch.stack([orders[seed] for seed in seeds])

    def validation(self, seeds: Sequence[int]) -> Tensor:
        return torch.stack([self.split(seed)[1] for seed in seeds])

    def prices(self, price: str, strength: float) -> Tensor:
        examples = len(self.split(0)[0])
        with building:
            return of_structures(price, self.structures, strength, examples)

    def ensemble(self, members: Sequence[Member], *, noisy: bool) -> Ensemble:
        built = {seed: self.setting.build(self.shape, self.classes, seed) for seed in {m.seed for m in members}}
        prices = {(m.price, m.strength): self.prices(m.price, m.strength) for m in members if noisy}
        made = Ensemble(
            [built[member.seed] for member in members],
            self.x,
            self.y,
            batch=self.setting.batch,
            learning_rate=self.setting.learning_rate,
            structures=self.structures,
            seeds=[member.seed for member in members],
            prices=torch.stack([prices[m.price, m.strength] for m in members]) if noisy else None,
        )
        made.close_ranks(gain=math.inf)
        return made

    def entry(self, seconds: float, networks: int) -> dict[str, Any]:
        """This setting in a result file."""
        return self.setting.entry(self.counting, seconds, networks)


# --- pruning while training -------------------------------------------------------------------------------------------


def continuous(
    setting: Setting,
    methods: Sequence[str],
    seeds: Sequence[int],
    *,
    prices: Sequence[tuple[str, float]] = PUBLISHED_PRICE,
    spare: bool = False,
    device: str = "cpu",
    data_dir: Path | None = None,
    checkpoint: Save | None = None,
    resume: dict[str, Any] | None = None,
    progress: Tell = lambda done, total: None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Train, prune after every epoch, fine-tune what is left, test the epoch of fine-tuning that validates best.

    ``prices``: with their strengths; each gives a network of every method and seed. ``spare``: a layer keeps its best
    unit, as it does in :class:`bmrs.Pruner`; the paper's protocol empties layers. ``checkpoint`` is given a state after
    every epoch, ``resume`` takes one; ``progress`` is told epochs done and in all.
    """
    begun = time.perf_counter()
    stage = Stage(setting, device, data_dir, dtype)
    gated = [Member(m, seed, *price) for m, price, seed in product(methods, prices, seeds) if m != "none"]
    pruned, whole = ([member for member in gated if (member.method == "l2") == late] for late in (False, True))
    plain = [Member("none", seed) for seed in seeds if "none" in methods]
    if "l2" in methods and "bmrs_n" not in methods:
        raise ValueError("method l2 removes as many units as bmrs_n does: add bmrs_n to the methods.")
    every = (_Pruning(stage, pruned, spare), _Afterwards(stage, whole), _Plain(stage, plain))
    phases = [phase for phase in every if phase.members]
    total = len(phases) * (setting.epochs + setting.fine_tune)
    state = resume or {"done": 0, "phase": None, "finished": [], "seconds": 0.0}
    results: list[dict[str, Any]] = list(state["finished"])
    done = state["done"]
    for number, phase in enumerate(phases):
        first = number * (setting.epochs + setting.fine_tune)
        if done >= first + setting.epochs + setting.fine_tune:
            continue
        if done > first:
            phase.load_state_dict(state["phase"])
        if isinstance(phase, _Afterwards):
            phase.shares = {_trained(r): r["removed_units"] for r in results if r["method"] == "bmrs_n"}
        for epoch in range(done - first + 1, setting.epochs + setting.fine_tune + 1):
            phase.epoch(epoch)
            done += 1
            progress(done, total)
            if checkpoint is not None:
                spent = state["seconds"] + time.perf_counter() - begun
                checkpoint({"done": done, "phase": phase.state_dict(), "finished": results, "seconds": spent})
        results += phase.results()
    wanted = [result for result in results if result["method"] in methods]
    order = {method: n for n, method in enumerate(methods)}
    wanted.sort(key=lambda run: (order[run["method"]], run["price"], run["strength"], run["seed"]))
    seconds = state["seconds"] + time.perf_counter() - begun
    runs = [{key: value for key, value in run.items() if key != "removed_units"} for run in wanted]
    return {"setting": stage.entry(seconds, len(runs)), "runs": runs}


def _trained(run: Mapping[str, Any]) -> tuple[str, float, int]:
    """What a network with gates was trained with, whatever prunes it."""
    return run["price"], run["strength"], run["seed"]


class _Phase:
    """Members that train together for all epochs."""

    noisy = True

    def __init__(self, stage: Stage, members: Sequence[Member]) -> None:
        self.stage, self.members = stage, list(members)
        self.alive = torch.ones(len(members), stage.counting.units, dtype=torch.bool)
        self.history: list[dict[str, Any]] = []  # what was left after each epoch
        self.best = torch.full((len(members),), -1.0, dtype=torch.float32)
        self.test = torch.zeros(len(members), dtype=torch.float32)
        if members:
            self.ensemble = stage.ensemble(members, noisy=self.noisy)

    def epoch(self, number: int) -> None:
        setting = self.stage.setting
        seeds = [member.seed for member in self.members]
        self.ensemble.train_epoch(self.stage.order(seeds, number))
        if number <= setting.epochs:
            self.prune(number)
        else:
            validation = self.ensemble.accuracy(self.stage.x, self.stage.y, self.stage.validation(seeds)).cpu()
            test = self.ensemble.accuracy(self.stage.test_x, self.stage.test_y).cpu()
            better = validation > self.best
            self.best, self.test = torch.where(better, validation, self.best), torch.where(better, test, self.test)

    def prune(self, number: int) -> None:
        """After this epoch of training."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {
            "ensemble": self.ensemble.state_dict(),
            "alive": self.alive,
            "history": self.history,
            "best": self.best,
            "test": self.test,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ensemble.load_state_dict(state["ensemble"])
        self.alive, self.history = state["alive"].cpu(), list(state["history"])
        self.best, self.test = state["best"].cpu(), state["test"].cpu()

    def results(self) -> list[dict[str, Any]]:
        counting = self.stage.counting
        left = counting.left(self.alive)
        runs = []
        for n, member in enumerate(self.members):
            units = {layer: int(self.alive[n, own].sum()) for layer, own in counting.layers.items()}
            published = left["published" if member.gated else "published_plain"][n]
            runs.append(
                {
                    "setting": self.stage.setting.key,
                    "method": member.method,
                    "price": member.price,
                    "strength": member.strength,
                    "seed": member.seed,
                    "accuracy": float(self.test[n]),
                    "validation": float(self.best[n]),
                    "compression": {"published": float(published), "actual": float(left["actual"][n])},
                    "parameters": int(left["parameters"][n]),
                    "multiply_adds": int(left["multiply_adds"][n]),
                    "units": units,
                    "removed_units": 1.0 - float(self.alive[n].double().mean()),
                    "history": [
                        {"epoch": past["epoch"], "units": past["units"][n], "published": past["published"][n]}
                        for past in self.history
                    ],
                    "emptied": [layer for layer, number in units.items() if not number],
                }
            )
        return runs


class _Pruning(_Phase):
    """Gates, and the criterion of each member after every epoch."""

    def __init__(self, stage: Stage, members: Sequence[Member], spare: bool) -> None:
        super().__init__(stage, members)
        self.spare = spare

    def prune(self, number: int) -> None:
        gates = self.ensemble.gates
        mu, log_sigma, alive = (part.detach().cpu() for part in (gates.mu, gates.log_sigma, gates.alive))
        for method in dict.fromkeys(member.method for member in self.members):
            own = [n for n, member in enumerate(self.members) if member.method == method]
            rule = criterion(method)
            scores = rule.scores(bmrs.TruncatedLogNormal(mu[own], log_sigma[own], validate=False))
            going = rule.remove(scores) & alive[own]
            if self.spare:
                for row, layer in product(range(len(own)), gates.layers.values()):
                    there = alive[own[row], layer]
                    kept = spare_best(going[row, layer][there], scores[row, layer][there])
                    going[row, layer] = torch.zeros_like(there).masked_scatter(there, kept)
            alive[own] &= ~going
        gates.alive.copy_(alive)
        self.alive = self.ensemble.alive()
        self.ensemble.close_ranks()
        left = self.stage.counting.left(self.alive)["published"].tolist()
        self.history.append({"epoch": number, "units": self.alive.sum(1).tolist(), "published": left})


class _Afterwards(_Phase):
    """Gates, and nothing goes until training is over: then by the norm of weights, as many units as BMRS_N removed."""

    shares: dict[tuple[str, float, int], float]  # of units, from networks that were trained alike

    def prune(self, number: int) -> None:
        if number < self.stage.setting.epochs:
            return
        for n, norm in enumerate(row_norms(self.ensemble, self.stage.structures)):
            self.alive[n] = ~bmrs.L2(self.shares[_trained(vars(self.members[n]))]).remove(norm)
        self.ensemble.gates.keep(self.alive)
        self.ensemble.close_ranks()


class _Plain(_Phase):
    """No noise, and nothing goes."""

    noisy = False

    def prune(self, number: int) -> None:
        pass


@torch.no_grad()
def row_norms(ensemble: Ensemble, structures: Sequence[Structure], *, gradients: bool = False) -> Tensor:
    """L2 norm of the weights at each unit's input, or of their gradients: [members, units]."""
    parts = []
    for structure in structures:
        name = next(n for n, dim in structure.places if dim == 0 and n.endswith("weight"))
        weight = ensemble.stack.tensor(name)
        value = weight.grad if gradients else weight
        assert value is not None
        parts.append(value.flatten(2).norm(dim=2))
    return ensemble.gates.of_units(torch.cat(parts, 1), missing=0.0)


# --- the search for hyper-parameters ----------------------------------------------------------------------------------


def objective(setting: Setting, *, device: str, data_dir: Path | None) -> Callable[[dict[str, Any]], float]:
    """What a sweep maximises: the best validation accuracy of the network without gates, over the epochs of training.

    A trial's parameters are "batch", "learning_rate" and, of a multi-layer perceptron, "layers" and "width", where
    the paper counts one hidden layer fewer than there are.
    """
    stage: Stage | None = None

    def trained(parameters: dict[str, Any]) -> float:
        nonlocal stage
        with building:
            if stage is None:  # when it is first needed: it loads the images
                stage = Stage(setting, device, data_dir)
                if stage.device.type == "cuda":
                    torch.cuda.current_stream(stage.device).synchronize()  # threads on other streams use it too
        shape = {"widths": (parameters["width"],) * (parameters["layers"] + 1)} if "layers" in parameters else {}
        own = replace(setting, batch=parameters["batch"], learning_rate=parameters["learning_rate"], **shape)
        seeds = [0]
        ensemble = stage.of(own).ensemble([Member("none", seed) for seed in seeds], noisy=False)
        best = 0.0
        for epoch in range(1, own.epochs + 1):
            ensemble.train_epoch(stage.order(seeds, epoch))
            best = max(best, float(ensemble.accuracy(stage.x, stage.y, stage.validation(seeds))))
        return best

    return trained
