"""The gates of a stack: φ of every member, which units are alive, and where gates multiply what is computed."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bmrs.draws import draw, mean
from bmrs.structure import Structure
from bmrs.study.stack import Stack

START = -5.0  # where every gate's log σ begins


class Gates(nn.Module):
    """Without prices there is no noise: a gate is 1, or 0 where its unit is gone.

    Units stand in rooms, one after the other, of which a stack may have fewer than the whole network has units, or a
    few more: ``units`` says which of the network's units stands in each member's room, -1 for none.
    """

    alive: Tensor
    units: Tensor
    prices: Tensor
    seeds: Tensor

    def __init__(
        self, stack: Stack, structures: Sequence[Structure], seeds: Sequence[int], prices: Tensor | None
    ) -> None:
        """``prices``: of every unit's KL, [members, units]."""
        super().__init__()
        self.rooms = {structure.name: structure.units for structure in structures}
        self.number = sum(self.rooms.values())  # of units in the whole network
        shape = (stack.members, self.number)
        # Not the default's precision, which the check of a network in another thread may change for a while.
        starts = (torch.full(shape, value, dtype=torch.float32) for value in (0.0, START))
        self.mu, self.log_sigma = (nn.Parameter(start) for start in starts)
        self.noisy = prices is not None
        self.requires_grad_(self.noisy)
        self.register_buffer("alive", torch.ones(shape, dtype=torch.bool))
        self.register_buffer("units", torch.arange(self.number).expand(shape).clone())
        self.register_buffer("prices", (torch.zeros(shape) if prices is None else prices).to(torch.float32, copy=True))
        self.register_buffer("seeds", torch.tensor(list(seeds)))
        self._theta: dict[str, Tensor] = {}  # of the pass that runs: [members, examples or 1, rooms] of each layer
        for structure in structures:
            for place in structure.consumers:
                layer = stack.layer(place[0].rpartition(".")[0])
                layer.register_forward_pre_hook(self._gate(structure.name, columns_each(structure, place)))

    @property
    def layers(self) -> dict[str, slice]:
        """The rooms of each structure."""
        found, total = {}, 0
        for name, size in self.rooms.items():
            found[name] = slice(total, total + size)
            total += size
        return found

    def use(self, theta: Tensor) -> None:
        """The gates of the pass that comes: [members, examples, rooms], or one example for all."""
        # One split and not many slices: its gradient is one concatenation.
        self._theta = dict(zip(self.rooms, theta.split(list(self.rooms.values()), dim=2), strict=True))

    def _gate(self, name: str, each: int) -> Callable[[nn.Module, tuple[Tensor, ...]], Any]:
        """Multiplies a layer's input, of whose columns each unit has so many."""

        def multiply(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            theta, x = self._theta[name], args[0]
            split = x.reshape(len(theta), -1, theta.shape[2], each, *x.shape[2:])
            shape = (*theta.shape, 1, *(1 for _ in x.shape[2:]))
            return ((split * theta.reshape(shape)).reshape(x.shape), *args[1:])

        return multiply

    def means(self) -> Tensor:
        """E[θ] in every room, 0 where a unit is gone."""
        if not self.noisy:
            return self.alive.to(self.mu.dtype)
        return mean(self.mu, self.log_sigma) * self.alive

    def draw(self, step: Tensor, examples: int) -> Tensor:
        """θ for a batch of every member."""
        if not self.noisy:
            return self.means()[:, None]
        return draw(self.mu, self.log_sigma, self.alive, self.seeds, step, self.units, examples)

    @torch.no_grad()
    def keep(self, alive: Tensor) -> None:
        """Close all gates but these. ``alive``: of the network's units, [members, units]."""
        self.alive.copy_(alive.to(self.units.device).gather(1, self.units.clamp(min=0)) & (self.units >= 0))

    def of_units(self, values: Tensor, missing: float | bool) -> Tensor:
        """Values of rooms, [members, rooms], as those of the network's units, [members, units], on the CPU."""
        values, units = values.detach().cpu(), self.units.cpu()
        result = torch.full((len(values), self.number + 1), missing, dtype=values.dtype)
        result.scatter_(1, units % (self.number + 1), values)  # -1 is the last, which is dropped
        return result[:, :-1]


def columns_each(structure: Structure, place: tuple[str, int]) -> int:
    """How many indices of a tensor's dimension each unit has: side by side, and the units in order."""
    indices = structure.indices(place)
    each = len(indices[0])
    if indices != [list(range(n * each, (n + 1) * each)) for n in range(len(indices))]:
        raise ValueError(
            f"the units of '{structure.name}' must lie in order along '{place[0]}' for networks to be stacked."
        )
    return each
