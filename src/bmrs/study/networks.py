"""The study's small networks, as plain chains of layers, and what is left of them after pruning."""

from collections import OrderedDict
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

NAMES = ("lenet5", "mlp")


def build(name: str, input_shape: tuple[int, ...], classes: int) -> nn.Sequential:
    """The network of that name for images of this shape (channels, height, width)."""
    if name not in NAMES:
        raise ValueError(f"unknown network '{name}': choose one of {', '.join(NAMES)}.")
    channels, height, width = input_shape
    if name == "mlp":
        return mlp(channels * height * width, classes)
    if (height, width) != (32, 32):
        raise ValueError(f"lenet5 takes 32×32 images; got {height}×{width}: resize them first.")
    return lenet5(channels, classes)


def lenet5(channels: int, classes: int) -> nn.Sequential:
    """LeNet-5 on 32×32 images; every width grows with the number of input channels."""
    first, second, third, fourth = (channels * width for width in (6, 16, 120, 84))
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, first, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(first, second, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(second * 25, third),
            relu3=nn.ReLU(),
            fc2=nn.Linear(third, fourth),
            relu4=nn.ReLU(),
            out=nn.Linear(fourth, classes),
        )
    )


def mlp(inputs: int, classes: int, hidden: tuple[int, ...] = (100, 100)) -> nn.Sequential:
    """Linear and tanh, repeated, then a linear read-out."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for index, width in enumerate(hidden, start=1):
        layers[f"fc{index}"] = nn.Linear(inputs, width)
        layers[f"tanh{index}"] = nn.Tanh()
        inputs = width
    layers["out"] = nn.Linear(inputs, classes)
    return nn.Sequential(layers)


def gated_outputs(network: nn.Sequential) -> dict[str, int]:
    """Where the paper puts its gates: after every activation. Module name → number of units."""
    outputs = {}
    for (_, layer), (name, follower) in pairwise(network.named_children()):
        if isinstance(follower, nn.ReLU | nn.Tanh):
            outputs[name] = _width(layer)
    return outputs


def layer_names(network: nn.Sequential) -> dict[str, str]:
    """For people: the layer whose units each gate carries. Gate name → layer name."""
    names = list(dict(network.named_children()))
    return {name: names[names.index(name) - 1] for name in gated_outputs(network)}


@torch.no_grad()
def compact(network: nn.Sequential, factors: Mapping[str, Tensor]) -> nn.Sequential:
    """A physically smaller copy: ``factors`` holds E[θ] per gate, 0 for units that are gone.

    Rows of a removed unit go from its layer, columns from the next one, which also takes up E[θ] of the rest.
    """
    children = list(network.named_children())
    smaller: OrderedDict[str, nn.Module] = OrderedDict()
    incoming: Tensor | None = None  # E[θ] of the layer before, all its units
    for index, (name, layer) in enumerate(children):
        if isinstance(layer, nn.Conv2d | nn.Linear):
            weight = layer.weight
            if incoming is not None:
                factor = incoming.repeat_interleave(weight.shape[1] // len(incoming)).to(weight)
                weight = weight * factor.reshape(1, -1, *[1] * (weight.dim() - 2))
                weight = weight[:, factor != 0]
            follower = children[index + 1][0] if index + 1 < len(children) else ""
            incoming = factors.get(follower, torch.ones(len(weight), device=weight.device))
            smaller[name] = _layer_like(layer, weight[incoming != 0], _bias(layer)[incoming != 0])
        else:
            smaller[name] = layer
    return nn.Sequential(smaller)


def _width(layer: nn.Module) -> int:
    if isinstance(layer, nn.Conv2d):
        return layer.out_channels
    if isinstance(layer, nn.Linear):
        return layer.out_features
    raise TypeError(f"a gate must follow a convolution or a linear layer; got {type(layer).__name__}.")


def _bias(layer: nn.Conv2d | nn.Linear) -> Tensor:
    if layer.bias is None:
        raise ValueError("compact() expects layers with a bias, as those built here have.")
    return layer.bias


def _layer_like(layer: nn.Conv2d | nn.Linear, weight: Tensor, bias: Tensor) -> nn.Module:
    outputs, inputs = weight.shape[:2]
    small: nn.Conv2d | nn.Linear
    if isinstance(layer, nn.Conv2d):
        small = nn.Conv2d(inputs, outputs, layer.kernel_size, layer.stride, layer.padding)  # type: ignore[arg-type]
    else:
        small = nn.Linear(inputs, outputs)
    small.weight, small.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
    return small
