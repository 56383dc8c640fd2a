"""Where gates sit: those of a network's structures at the inputs of whatever consumes their units.

A unit's share of the network's output passes through its consumers, so a gate of zero there removes the unit whatever
lies between, and a gate's mean can be multiplied into the consumer's weights in the end.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bmrs.structure.capture import canonical_names, named_tensors
from bmrs.structure.listing import Structure
from bmrs.structure.multihead import MultiheadForward

if TYPE_CHECKING:
    from bmrs.noise import NoiseBank


class ConsumerGate:
    """Multiplies what one weight consumes by the gates of its columns.

    ``columns`` has a row per structure: the bank's number of the unit each column belongs to, or -1 for none.
    """

    def __init__(self, bank: "NoiseBank", module: nn.Module, name: str, dim: int, columns: Tensor) -> None:
        self.bank, self.module, self.name, self.dim, self.columns = bank, module, name, dim, columns

    def factors(self, theta: Tensor) -> Tensor:
        """θ of every column, [rows, columns]; a column of several structures has the product of their gates."""
        padded = torch.cat([theta, torch.ones_like(theta[:, :1])], dim=1)  # -1 finds the one at the end
        result = padded[:, self.columns[0].to(theta.device)]
        for units in self.columns[1:]:
            result = result * padded[:, units.to(theta.device)]
        return result

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.module._parameters[self.name]  # type: ignore[assignment]
        return weight

    @torch.no_grad()
    def fold(self, theta: Tensor) -> None:
        """Multiply gates, [1, units], into the weight for good."""
        shape = [-1 if d == self.dim else 1 for d in range(self.weight.dim())]
        self.weight.mul_(self.factors(theta)[0].to(self.weight).reshape(shape))


class InputGate(ConsumerGate):
    """On a layer that is called with what it consumes: gates per example are possible."""

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """As a forward pre-hook."""
        if self.bank.paused:
            return args
        x = args[0]
        theta = self.factors(self.bank.current())
        at = _channel_dim(module, x)
        if isinstance(module, nn.modules.conv._ConvNd) and not module.transposed:
            theta = theta.repeat(1, module.groups)  # a column stands for the same place in every group
        if len(theta) > 1 and len(theta) != x.shape[0]:
            theta = self._per_row(theta, x.shape[0])
        shape = [1] * x.dim()
        shape[0], shape[at] = len(theta), theta.shape[1]  # an input without a batch has one row of gates
        return (x * theta.reshape(shape).to(x.dtype), *args[1:])

    @staticmethod
    def _per_row(theta: Tensor, rows: int) -> Tensor:
        """Windows or patches of one example lie one after the other, and share its gates; what belongs to no example,
        such as a table of positions, has one set of gates for the batch.
        """
        return theta[:1] if rows % len(theta) else theta.repeat_interleave(rows // len(theta), dim=0)


class OutputGate(ConsumerGate):
    """On the last layer of a residual branch, whose output it multiplies; it folds into the rows of that layer."""

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """As a forward hook. A narrow layer's own hook, which puts its output back at its indices, runs after this."""
        if self.bank.paused:
            return output
        theta = self.factors(self.bank.current())
        at = 1 if isinstance(module, nn.modules.conv._ConvNd | nn.modules.batchnorm._BatchNorm) else output.dim() - 1
        if len(theta) > 1 and len(theta) != output.shape[0]:
            theta = InputGate._per_row(theta, output.shape[0])
        shape = [1] * output.dim()
        shape[0], shape[at] = len(theta), theta.shape[1]
        return output * theta.reshape(shape).to(output.dtype)


class WeightGate(ConsumerGate):
    """On a weight that a module's own code uses: one set of gates for the whole batch, multiplied into the weight.

    During a forward pass the module sees the product in place of its parameter.
    """

    _product: tuple[Tensor, Tensor] | None = None  # the last one, and the gates it was made with
    beside: "tuple[WeightGate, ...]" = ()  # gates of the same weight along other dimensions: multiplied here too
    follows = False  # is such a gate

    @property
    def parted(self) -> bool:
        """Whether each process holds but a share of the weight now: under FSDP it is whole while its part runs."""
        return hasattr(self.weight, "full_tensor")

    def enter(self, part: bool = False) -> bool:
        """Whether it was not there already. ``part``: when a part of the network is called, not the whole."""
        if self.follows or self.name in self.module.__dict__:
            return False
        theta = self.bank.current()
        # The very same tensor again: checkpointing counts what is computed inside the part.
        known = part and self._product is not None and self._product[0] is theta
        product = self._product[1] if known and self._product is not None else self._multiplied(theta)
        if not part:
            self._product = theta, product
        # The module's __dict__ is looked at before its parameters.
        self.module.__dict__[self.name] = product
        return True

    def _multiplied(self, theta: Tensor) -> Tensor:
        product = self.weight
        for gate in (self, *self.beside):
            shape = [-1 if d == gate.dim else 1 for d in range(product.dim())]
            product = product * gate.factors(theta[:1])[0].to(product.dtype).reshape(shape)
        return product

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_product": None}

    def leave(self) -> None:
        if not self.follows:
            self.module.__dict__.pop(self.name, None)


class Gate:
    """Multiplies a tensor by the gates of one layer, which lie along one of its dimensions."""

    def __init__(self, bank: "NoiseBank", name: str, dim: int = 1) -> None:
        if name not in bank.layers:
            raise ValueError(f"name must be one of the bank's layers ({', '.join(bank.layers)}); got '{name}'.")
        self.bank, self.name, self.dim = bank, name, dim

    def __call__(self, x: Tensor) -> Tensor:
        if not isinstance(x, Tensor):
            raise TypeError(f"the output of '{self.name}' must be one tensor to be gated; got {type(x).__name__}.")
        theta = self.bank.theta(self.name)
        rows, units = theta.shape
        if x.shape[self.dim] != units or rows not in (1, x.shape[0]):
            raise ValueError(
                f"the gates of '{self.name}' have {units} units for {rows} examples and do not fit an output of "
                f"shape {tuple(x.shape)} along dimension {self.dim}."
            )
        shape = [1] * x.dim()
        shape[0], shape[self.dim] = rows, units
        return x * theta.reshape(shape).to(x.dtype)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """As a forward hook."""
        return output if self.bank.paused else self(output)


class Again:
    """Puts gated weights in place in a part of the network that is called by itself."""

    def __init__(self, bank: "NoiseBank", gates: list[WeightGate]) -> None:
        self.bank, self.gates = bank, gates
        self.entered: list[WeightGate] = []

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """As a forward pre-hook."""
        if torch.compiler.is_compiling() or self.bank.paused:
            return
        if self.bank._inside:
            self.bank.current()  # notes a part that runs without gradients
        # Inside a pass only those are not there yet that were parted when it began.
        self.entered = [gate for gate in self.gates if not gate.parted and gate.enter(part=True)]

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """As a forward hook."""
        for gate in self.entered:
            gate.leave()
        self.entered = []


def _channel_dim(module: nn.Module, x: Tensor) -> int:
    if isinstance(module, nn.modules.conv._ConvNd):
        return x.dim() - 1 - len(module.kernel_size)
    return x.dim() - 1


def _takes_input(module: nn.Module, leaf: str, dim: int) -> bool:
    """Whether the layer's first argument is what this dimension of its weight consumes."""
    if leaf != "weight":
        return False
    if isinstance(module, nn.modules.conv._ConvNd):
        return dim == (0 if module.transposed else 1)
    if isinstance(module, nn.Linear):
        return dim == 1
    return type(module).__name__ == "Conv1D" and dim == 0 and hasattr(module, "nf")


def consumer_gates(
    bank: "NoiseBank", model: nn.Module, structures: Iterable[Structure], layers: Mapping[str, slice]
) -> list[ConsumerGate]:
    """One gate per weight that consumes units of these structures."""
    structures = list(structures)
    tensors = dict(named_tensors(model))
    names: dict[str, list[str]] = {}
    for name, first in canonical_names(model).items():
        names.setdefault(first, []).append(name)
    gates: list[ConsumerGate] = []
    seen: set[tuple[int, str, int]] = set()
    for place in dict.fromkeys(place for structure in structures for place in structure.consumers):
        first, dim = place
        if first not in tensors:
            continue  # gone with a block
        rows = []
        for structure in structures:
            if place in structure.consumers:
                rows.append(units_of_columns(structure, place, tensors[first].shape[dim], layers[structure.name].start))
        columns = torch.tensor(rows)
        at_output = any(structure.at_output and place in structure.consumers for structure in structures)
        for name in names[first]:  # a tied weight is consumed under each of its names
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            if isinstance(module, nn.Embedding) or (id(module), leaf, dim) in seen:
                continue  # looked up, not summed over; or one module under two names
            seen.add((id(module), leaf, dim))
            kind: type[ConsumerGate]
            if at_output:
                kind = OutputGate if _is_called(model, path) else WeightGate
            else:
                kind = InputGate if _takes_input(module, leaf, dim) and _is_called(model, path) else WeightGate
            gates.append(kind(bank, module, leaf, dim, columns))
    leaders: dict[tuple[nn.Module, str], WeightGate] = {}
    for gate in gates:
        if isinstance(gate, WeightGate):
            leader = leaders.setdefault((gate.module, gate.name), gate)
            if leader is not gate:
                leader.beside, gate.follows = (*leader.beside, gate), True
    return gates


def _is_called(model: nn.Module, path: str) -> bool:
    """nn.MultiheadAttention reads its projection's weight without calling it, unless its forward is ours."""
    above, _, own = path.rpartition(".")
    around = model.get_submodule(above)
    if isinstance(around, nn.MultiheadAttention) and own == "out_proj":
        return isinstance(around.__dict__.get("forward"), MultiheadForward)
    return True


def units_of_columns(structure: Structure, place: tuple[str, int], size: int, first: int) -> list[int]:
    """The number of the unit each present column belongs to."""
    labels = structure.owner.findings.places[place]
    number = {v: first + unit for unit, v in enumerate(v for v in structure.variables if v not in structure.owner.gone)}
    columns = []
    for label in labels:
        if structure.owner.gone.isdisjoint(label):
            columns.append(next((number[v] for v in label if v in number), -1))
    assert len(columns) == size, f"{place} has {size} indices, {len(columns)} are known"
    return columns
