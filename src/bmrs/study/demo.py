"""The main job: train a network, prune it as it trains, and compare it with the same network left whole."""

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

import bmrs
from bmrs.study import data, networks, training
from bmrs.study.figures import posterior_figure
from bmrs.study.provenance import provenance
from bmrs.study.training import GateLog, Progress, Recipe

CRITERIA = ("bmrs_n", "bmrs_u", "snr", "mean")
SOME = 3  # epochs whose median is taken for a time


@dataclass(frozen=True)
class Measured:
    """One network: how good it is and what it costs."""

    accuracy: float
    parameters: int
    multiply_adds: int
    epoch_seconds: float  # of training it, without gates


@dataclass(frozen=True)
class Outcome:
    """What the demo found. ``units`` maps each layer to its width before and after."""

    before: Measured
    after: Measured
    units: dict[str, tuple[int, int]]
    pruning_seconds: tuple[float, float]  # of an epoch with gates: the first and the last ones
    log: GateLog
    network: nn.Sequential

    @property
    def faster(self) -> float:
        """How many times faster an epoch with gates got as the network shrank."""
        return self.pruning_seconds[0] / self.pruning_seconds[1]


class Demo:
    """Prepared by the constructor, which refuses what cannot work; done by :meth:`run`."""

    def __init__(
        self, data_name: str, network_name: str, criterion_name: str, recipe: Recipe, data_dir: Path | None = None
    ) -> None:
        if criterion_name not in CRITERIA:
            raise ValueError(f"unknown criterion '{criterion_name}': choose one of {', '.join(CRITERIA)}.")
        if recipe.price not in bmrs.price.KINDS:
            raise ValueError(f"unknown price '{recipe.price}': choose one of {', '.join(bmrs.price.KINDS)}.")
        bmrs.price.prices("uniform", [1], strength=recipe.strength)  # refuses a bad strength
        for name in ("epochs", "batch", "learning_rate", "phi_rate"):
            if not getattr(recipe, name) > 0:
                raise ValueError(f"{name} must be above 0; got {getattr(recipe, name)}.")
        if recipe.fine_tune < 0:
            raise ValueError(f"fine_tune must be 0 epochs or more; got {recipe.fine_tune}.")
        self.data = data.load(data_name, recipe.seed, data_dir=data_dir)
        self.network_name = network_name
        self.criterion = bmrs.criteria.by_name(criterion_name)
        self.recipe = recipe
        self._network()  # refuses an unknown name, and a network that does not fit the data

    def run(self, on_epoch: Callable[[str, Progress], None] = lambda phase, progress: None) -> Outcome:
        """``on_epoch`` is told the phase, "whole", "prune" or "fine-tune", and how far it is."""
        seconds: dict[str, list[float]] = {"whole": [], "prune": [], "fine-tune": []}

        def told(phase: str) -> Callable[[Progress], None]:
            def tell(progress: Progress) -> None:
                seconds[phase].append(progress.seconds)
                on_epoch(phase, progress)

            return tell

        whole = self._network()
        training.train(whole, self.data, self._total(), told("whole"))
        network = self._network()
        log = training.train_pruning(network, self.data, self.recipe, self.criterion, told("prune"))
        gentle = replace(self.recipe, epochs=self.recipe.fine_tune, learning_rate=self.recipe.learning_rate / 2)
        training.train(network, self.data, gentle, told("fine-tune"))
        units = {
            name: (layer.stop - layer.start, int((log.removed_at[layer] == 0).sum()))
            for name, layer in log.layers.items()
        }
        return Outcome(
            self._measure(whole, seconds["whole"]),
            self._measure(network, seconds["fine-tune"] or seconds["prune"]),
            units,
            (statistics.median(seconds["prune"][:SOME]), statistics.median(seconds["prune"][-SOME:])),
            log,
            network,
        )

    def reloaded(self, outcome: Outcome, folder: Path) -> list[Path]:
        """Save the small network, export it, load both again, and check that they compute the same."""
        saved, exported = folder / "small.safetensors", folder / "small.pt2"
        network = outcome.network.eval()
        x = self.data.test.x
        bmrs.save(network, saved)
        torch.export.save(bmrs.export_program(network, x[:2]), exported)
        with torch.no_grad():
            wanted = network(x)
            again = bmrs.load(self._network(), saved).eval()(x)
            program = torch.export.load(exported).module()(x)
        if not torch.equal(again, wanted) or float((program - wanted).abs().max()) > 1e-5 * float(wanted.abs().max()):
            raise RuntimeError("the small network computes something else after it was saved and loaded.")
        return [saved, exported]

    def write(self, outcome: Outcome, folder: Path) -> tuple[Path, Path]:
        """A picture of the posteriors and a JSON file with the numbers and how they were made."""
        picture, result = folder / "posteriors.png", folder / "result.json"
        tolerance = self.criterion.tolerance if isinstance(self.criterion, bmrs.BMRS_N) else None
        content = {
            "before": asdict(outcome.before),
            "after": asdict(outcome.after),
            "units": {name: {"before": b, "after": a} for name, (b, a) in outcome.units.items()},
            "pruning_epoch_seconds": {"first": outcome.pruning_seconds[0], "last": outcome.pruning_seconds[1]},
            "gates": outcome.log.to_json(tolerance),
            "provenance": provenance(
                data=self.data.name,
                network=self.network_name,
                criterion=repr(self.criterion),
                recipe=asdict(self.recipe),
                seeds=1,
                device="cpu",
            ),
        }
        result.write_text(json.dumps(content, indent=2) + "\n")
        posterior_figure(outcome.log, tolerance).savefig(picture, dpi=160)
        return picture, result

    def _network(self) -> nn.Sequential:
        torch.manual_seed(self.recipe.seed)
        return networks.build(self.network_name, self.data.input_shape, self.data.classes)

    def _total(self) -> Recipe:
        """The whole network trains as long as the pruned one, fine-tuning included."""
        return replace(self.recipe, epochs=self.recipe.epochs + self.recipe.fine_tune)

    def _measure(self, network: nn.Sequential, seconds: list[float]) -> Measured:
        return Measured(
            training.accuracy(network, self.data.test),
            bmrs.cost.parameters(network),
            bmrs.cost.multiply_adds(network, self.data.test.x[:1]),
            statistics.median(seconds[-SOME:]),
        )
