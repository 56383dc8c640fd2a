"""The study's settings: which network learns which data, and how; and the methods and prices compared."""

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import bmrs
from bmrs.study import networks
from bmrs.study.counting import Counting

# Held by whoever makes or checks a network: random numbers are one sequence for the whole process, and so is the
# precision that tensors have unless told, which a check changes.
building = threading.RLock()
METHODS = ("none", "l2", "mean", "snr", "bmrs_n", "bmrs_u8", "bmrs_u4")
RANKINGS = ("l2", "mean", "snr", "bmrs_n", "bmrs_u8", "bmrs_u4")
PRICES = (("layer", 1.0), ("uniform", 1.0), ("params", 0.5), ("elbo", 1.0))


@dataclass(frozen=True)
class Setting:
    """One network on one data set. ``widths``: of a multi-layer perceptron's hidden layers."""

    key: str
    network: str
    data: str
    batch: int
    learning_rate: float
    widths: tuple[int, ...] = ()
    epochs: int = 50
    fine_tune: int = 10

    def build(self, input_shape: tuple[int, ...], classes: int, seed: int) -> nn.Sequential:
        """The network with the weights of this seed."""
        with building, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if self.network == "mlp":
                return networks.mlp(input_shape[0] * input_shape[1] * input_shape[2], classes, self.widths)
            return networks.build(self.network, input_shape, classes)

    def entry(self, counting: Counting, seconds: float, networks: int) -> dict[str, Any]:
        """This setting in a result file."""
        whole = counting.left(torch.ones(1, counting.units, dtype=torch.bool))
        return {
            "network": self.network,
            "data": self.data,
            "layers": {name: own.stop - own.start for name, own in counting.layers.items()},
            "batch": self.batch,
            "learning_rate": self.learning_rate,
            "epochs": self.epochs,
            "fine_tune": self.fine_tune,
            "parameters": counting.parameters,
            "multiply_adds": int(whole["multiply_adds"][0]),
            "seconds": seconds,
            "networks": networks,
        }


def _settings(*settings: Setting) -> dict[str, Setting]:
    return {setting.key: setting for setting in settings}


# As published. The paper counts one hidden layer fewer than there are.
PAPER = _settings(
    Setting("mlp-mnist", "mlp", "mnist", 128, 8.5e-4, (100,) * 8),
    Setting("mlp-fashion-mnist", "mlp", "fashion-mnist", 128, 1.5e-3, (150,) * 2),
    Setting("mlp-cifar10", "mlp", "cifar10", 32, 6.8e-4, (150,) * 6),
    Setting("lenet5-mnist", "lenet5", "mnist", 128, 1.4e-3),
    Setting("lenet5-fashion-mnist", "lenet5", "fashion-mnist", 32, 1.4e-3),
    Setting("lenet5-cifar10", "lenet5", "cifar10", 64, 1e-3),
)
# Small enough for a laptop: the embedded digits, gates that move faster because there are few steps.
SMALL = _settings(
    Setting("mlp-digits", "mlp", "digits", 32, 1e-2, (50,) * 2, epochs=40, fine_tune=5),
    Setting("lenet5-digits", "lenet5", "digits", 32, 8e-3, epochs=40, fine_tune=5),
)
SETTINGS = {**PAPER, **SMALL}


def criterion(method: str) -> bmrs.Criterion:
    """The rule a method prunes by while it trains; bmrs_u8 is BMRS_U with p1 = 8."""
    if method.startswith("bmrs_u"):
        try:
            return bmrs.BMRS_U(p1=float(method.removeprefix("bmrs_u") or 8))
        except ValueError as wrong:
            raise ValueError(f"unknown method '{method}': bmrs_u is followed by its p1, as in bmrs_u8.") from wrong
    if method not in ("mean", "snr", "bmrs_n"):
        raise ValueError(f"unknown method '{method}': choose from {', '.join(METHODS)}.")
    return bmrs.criteria.by_name(method)
