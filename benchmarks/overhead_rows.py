"""The rows of the overhead benchmark: a network, how it is trained, and what is to be reached."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import bmrs
from bmrs import draws
from bmrs.study.networks import lenet5, mlp


@dataclass(frozen=True)
class Row:
    name: str
    build: Callable[[], nn.Module]
    image: tuple[int, ...]
    batch: int
    mode: str  # eager, graph (a CUDA graph of the whole step), compile
    target: float  # how many times the plain step's time at the most
    memory: float | None = None  # GB at the most, where one is asked for
    half: bool = False  # autocast to bfloat16
    last: bool = False  # channels-last
    places: str = "all"  # of the gates: all structures, or where the paper has them
    small: bool = False  # starting its kernels takes longer than what they do


class Logits(nn.Module):
    """A network of transformers that takes and returns plain tensors."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.network(pixel_values=x).logits
        return logits


def _mlp() -> nn.Module:
    return mlp(1024, 10, (100,) * 8)


def _lenet() -> nn.Module:
    return lenet5(3, 10)


def _resnet(depths: tuple[int, ...], kind: str, widths: tuple[int, ...]) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(depths=list(depths), layer_type=kind, hidden_sizes=list(widths), num_labels=1000)
    return Logits(ResNetForImageClassification(config))


class ByHand(nn.Module):
    """The MLP with the same gates in its own code: what its operations cost in torch, without a hook anywhere."""

    def __init__(self) -> None:
        super().__init__()
        layers = list(_mlp().children())[1:]
        self.layers, self.out = nn.ModuleList(layers[:-1:2]), layers[-1]
        self.widths = [layer.out_features for layer in self.layers]
        units = sum(self.widths)
        self.mu, self.log_sigma = nn.Parameter(torch.zeros(units)), nn.Parameter(torch.full((units,), -5.0))
        self.register_buffer("alive", torch.ones(units, dtype=torch.bool))
        self.register_buffer("numbers", torch.arange(units))
        self.register_buffer("prices", torch.full((units,), 1.0 / units))
        self.register_buffer("seeds", torch.zeros(1, dtype=torch.long))
        self.register_buffer("drawn", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        theta = draws.draw(self.mu, self.log_sigma, self.alive, self.seeds, self.drawn, self.numbers, len(x))
        self.drawn.add_(1)
        x = x.flatten(1)
        for layer, own in zip(self.layers, theta.split(self.widths, dim=1), strict=True):
            x = torch.tanh(layer(x)) * own
        return self.out(x)

    def groups(self) -> list[dict[str, Any]]:
        """For the optimizer: the gates learn at a rate of their own."""
        gates = [self.mu, self.log_sigma]
        weights = [p for p in self.parameters() if all(p is not own for own in gates)]
        return [{"params": weights}, {"params": gates, "lr": 1e-4}]

    @torch.no_grad()
    def add_kl(self) -> None:
        for own, slope in zip(
            (self.mu, self.log_sigma), draws.kl_gradient(self.mu, self.log_sigma, self.prices), strict=True
        ):
            own.grad.add_(slope)


def resnet50() -> nn.Module:
    return _resnet((3, 4, 6, 3), "bottleneck", (256, 512, 1024, 2048))


def resnet18() -> nn.Module:
    return _resnet((2, 2, 2, 2), "basic", (64, 128, 256, 512))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return Logits(ViTForImageClassification(ViTConfig(num_labels=1000)))


def gated(row: Row, network: nn.Module, x: Tensor) -> list[bmrs.Structure]:
    """The structures that get gates."""
    structures = bmrs.structures(network, x[:2])
    if row.places == "all":
        return list(structures)
    branches = list(structures.branches)
    if "vit" in row.name:  # the output projections of attention and of the MLP
        return branches
    # After every batch norm: what lies on the residual stream is gated before it is added to it.
    stream = {s.name.removesuffix(" branch").rpartition(".")[0] for s in branches}
    return [s for s in structures if s.name.rpartition(".")[0] not in stream] + branches


_SMALL = (3, 32, 32)
_LARGE = (3, 224, 224)

GPU = (
    Row("mlp", _mlp, (1, 32, 32), 32, "eager", 1.4, small=True),
    Row("mlp", _mlp, (1, 32, 32), 32, "graph", 1.2, small=True),
    Row("lenet5", _lenet, _SMALL, 32, "eager", 1.4, small=True),
    Row("lenet5", _lenet, _SMALL, 32, "graph", 1.15, small=True),
    Row("resnet50", resnet50, _LARGE, 32, "eager", 1.03, 4.8, places="paper"),
    Row("resnet50", resnet50, _LARGE, 128, "eager", 1.15, 8.5, half=True, last=True, places="paper"),
    Row("resnet50", resnet50, _LARGE, 128, "compile", 1.05, half=True, last=True, places="paper"),
    Row("vit", vit, _LARGE, 32, "eager", 1.0, half=True, places="paper"),
    Row("vit", vit, _LARGE, 128, "compile", 1.0, half=True, places="paper"),
    Row("resnet50, all structures", resnet50, _LARGE, 128, "eager", 1.15, half=True, last=True),
    Row("vit, all structures", vit, _LARGE, 32, "eager", 1.0, half=True),
)

CPU = (
    Row("mlp", _mlp, (1, 32, 32), 32, "eager", 1.3, small=True),
    Row("lenet5", _lenet, _SMALL, 32, "eager", 1.3, small=True),
    Row("resnet18", resnet18, (3, 64, 64), 32, "eager", 1.3),
    Row("resnet18", resnet18, (3, 64, 64), 32, "eager", 1.3, half=True, last=True),
)


def rows(device: torch.device) -> tuple[Row, ...]:
    return GPU if device.type == "cuda" else CPU
