"""What is left of networks of which units were removed, from which units are alive.

``actual``: the parameters of the physically smaller network. ``published``: as the paper's authors count, zeros in
weight matrices plus two for each removed unit over all that is trained, the gates' parameters included; it misses
biases, norms and the columns behind a flattened convolution.
"""

from collections.abc import Sequence
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn

from bmrs.structure import Structure
from bmrs.structure.capture import named_tensors


class Counting:
    """Of one kind of network, whose gated units are those of ``structures``, one after the other."""

    def __init__(self, network: nn.Module, structures: Sequence[Structure], example: Tensor) -> None:
        self.layers: dict[str, slice] = {}
        total = 0
        for structure in structures:
            self.layers[structure.name] = slice(total, total + structure.units)
            total += structure.units
        self.units = total
        self.shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
        self.parameters = sum(prod(shape) for shape in self.shapes.values())
        # Of those still there: the listing may change before they are asked for.
        self._places = {s.name: {place: s.indices(place) for place in s.places} for s in structures}
        self._positions = _positions(network, example)

    @cached_property
    def _per_unit(self) -> dict[tuple[str, int], list[tuple[slice, int]]]:
        """For each dimension of a weight the units that lie along it, and how many indices one of them has."""
        found: dict[tuple[str, int], list[tuple[slice, int]]] = {}
        for structure, places in self._places.items():
            for place, indices in places.items():
                if place[0] in self.shapes:
                    each = {len(own) for own in indices}
                    if len(each) != 1:  # as whole blocks do
                        raise ValueError(f"the units of '{structure}' occupy '{place[0]}' unequally.")
                    found.setdefault(place, []).append((self.layers[structure], each.pop()))
        return found

    def left(self, alive: Tensor) -> dict[str, Tensor]:
        """``alive``: [members, units]. Each member's parameters and multiply-adds left, and its compression."""
        alive = alive.cpu()
        counts = {layer: alive[:, own].sum(1).double() for layer, own in self.layers.items()}
        by_slice = {(own.start, own.stop): counts[layer] for layer, own in self.layers.items()}
        members = len(alive)
        parameters, multiply_adds, zeros = (torch.zeros(members, dtype=torch.float64) for _ in range(3))
        for name, shape in self.shapes.items():
            physical, seen = (torch.ones(members, dtype=torch.float64) for _ in range(2))
            for dim, size in enumerate(shape):
                kept = seen_kept = torch.full((members,), float(size), dtype=torch.float64)
                for own, each in self._per_unit.get((name, dim), []):
                    gone = each * (own.stop - own.start - by_slice[own.start, own.stop])
                    kept = kept - gone
                    if each == 1:
                        seen_kept = seen_kept - gone
                physical, seen = physical * kept, seen * seen_kept
            parameters += physical
            if len(shape) > 1:
                zeros += prod(shape) - seen
                multiply_adds += physical * self._positions.get(name, 0)
        removed = self.units - alive.sum(1).double()
        return {
            "parameters": parameters,
            "multiply_adds": multiply_adds,
            "published": (zeros + 2 * removed) / (self.parameters + 2 * self.units),
            "published_plain": zeros / self.parameters,
            "actual": 1.0 - parameters / self.parameters,
        }


@torch.no_grad()
def _positions(network: nn.Module, example: Tensor) -> dict[str, int]:
    """How often each weight is used for one example: 1 in a linear layer, the pixels put out in a convolution."""
    found: dict[str, int] = {}
    names = {id(tensor): name for name, tensor in named_tensors(network)}
    hooks = []

    def note(module: nn.Module, args: object, output: Tensor) -> None:
        weight = module._parameters["weight"]
        channels = weight.shape[0] if weight is not None else 1
        found[names[id(weight)]] = output[0].numel() // channels

    for module in network.modules():
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            hooks.append(module.register_forward_hook(note))
    try:
        network(example[:1])
    finally:
        for hook in hooks:
            hook.remove()
    return found
