"""The main job: train a network, prune it as it trains, and compare it with the same network left whole."""

import json
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
PRICES = ("uniform", "layer", "elbo")


@dataclass(frozen=True)
class Measured:
    """One network: how good it is and what it costs."""

    accuracy: float
    parameters: int
    multiply_adds: int


@dataclass(frozen=True)
class Outcome:
    """What the demo found. ``units`` maps each layer to its width before and after."""

    before: Measured
    after: Measured
    units: dict[str, tuple[int, int]]
    log: GateLog
    layers: dict[str, slice]
    network: nn.Sequential


class Demo:
    """Prepared by the constructor, which refuses what cannot work; done by :meth:`run`."""

    def __init__(self, data_name: str, network_name: str, criterion_name: str, recipe: Recipe) -> None:
        if criterion_name not in CRITERIA:
            raise ValueError(f"unknown criterion '{criterion_name}': choose one of {', '.join(CRITERIA)}.")
        if recipe.price not in PRICES:
            raise ValueError(f"unknown price '{recipe.price}': choose one of {', '.join(PRICES)}.")
        for name in ("epochs", "batch", "learning_rate", "phi_rate"):
            if not getattr(recipe, name) > 0:
                raise ValueError(f"{name} must be above 0; got {getattr(recipe, name)}.")
        if recipe.fine_tune < 0:
            raise ValueError(f"fine_tune must be 0 epochs or more; got {recipe.fine_tune}.")
        self.data = data.load(data_name, recipe.seed)
        self.network_name = network_name
        self.criterion = bmrs.criteria.by_name(criterion_name)
        self.recipe = recipe
        # An unknown name, a network that does not fit the data, or a bad strength is refused here.
        self._network()
        training.gate_prices({"any": 1}, recipe, len(self.data.train))

    def run(self, on_epoch: Callable[[str, Progress], None] = lambda phase, progress: None) -> Outcome:
        """``on_epoch`` is told the phase, "whole", "prune" or "fine-tune", and how far it is."""
        whole = self._network()
        training.train(whole, self.data, self._total(), lambda p: on_epoch("whole", p))
        network = self._network()
        structures = bmrs.structures(network, self.data.train.x[:2])
        bank = bmrs.NoiseBank.attach(network, structures)
        log = training.train_pruning(
            network, bank, self.data, self.recipe, self.criterion, lambda p: on_epoch("prune", p)
        )
        layers, sizes, left = bank.layers, bank.sizes, bank.units_left()
        bmrs.remove(network, {structure: bank.closed(structure.name) for structure in structures})
        bank.fold()
        gentle = replace(self.recipe, epochs=self.recipe.fine_tune, learning_rate=self.recipe.learning_rate / 2)
        training.train(network, self.data, gentle, lambda p: on_epoch("fine-tune", p))
        units = {name: (size, left[name]) for name, size in sizes.items()}
        return Outcome(self._measure(whole), self._measure(network), units, log, layers, network)

    def write(self, outcome: Outcome, folder: Path) -> tuple[Path, Path]:
        """A picture of the posteriors and a JSON file with the numbers and how they were made."""
        picture, result = folder / "posteriors.png", folder / "result.json"
        content = {
            "before": asdict(outcome.before),
            "after": asdict(outcome.after),
            "units": {name: {"before": b, "after": a} for name, (b, a) in outcome.units.items()},
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
        tolerance = self.criterion.tolerance if isinstance(self.criterion, bmrs.BMRS_N) else None
        posterior_figure(outcome.log, outcome.layers, tolerance).savefig(picture, dpi=160)
        return picture, result

    def _network(self) -> nn.Sequential:
        torch.manual_seed(self.recipe.seed)
        return networks.build(self.network_name, self.data.input_shape, self.data.classes)

    def _total(self) -> Recipe:
        """The whole network trains as long as the pruned one, fine-tuning included."""
        return replace(self.recipe, epochs=self.recipe.epochs + self.recipe.fine_tune)

    def _measure(self, network: nn.Sequential) -> Measured:
        return Measured(
            training.accuracy(network, self.data.test),
            bmrs.cost.parameters(network),
            bmrs.cost.multiply_adds(network, self.data.test.x[:1]),
        )
