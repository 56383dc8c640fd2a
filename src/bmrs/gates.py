"""Where gates sit: those of a network's structures at the inputs of whatever consumes their units.

A unit's share of the network's output passes through its consumers, so a gate of zero there removes the unit whatever
lies between, and a gate's mean can be multiplied into the consumer's weights in the end.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from bmrs.scaling import scale
from bmrs.structure.capture import canonical_names, named_tensors
from bmrs.structure.listing import Structure
from bmrs.structure.multihead import MultiheadForward

if TYPE_CHECKING:
    from bmrs.noise import NoiseBank


_FORGETS = TorchVersion(torch.__version__) >= "2.13"  # torch.compile can take something out of a __dict__


class ConsumerGate:
    """Multiplies what one weight consumes by the gates of its columns.

    ``columns`` has a row per structure: the bank's number of the unit each column belongs to, or -1 for none.
    """

    def __init__(self, bank: "NoiseBank", module: nn.Module, name: str, dim: int, columns: Tensor) -> None:
        self.bank, self.module, self.name, self.dim, self.columns = bank, module, name, dim, columns
        self.layer, self.each = _one_layer(columns, bank.layers)

    def gates(self) -> tuple[Tensor, int]:
        """The gates of this pass, [rows, ...], and how many columns in a row each of them has."""
        if self.layer is not None:
            return self.bank.theta(self.layer), self.each
        return self.factors(self.bank.current()), 1

    def factors(self, theta: Tensor) -> Tensor:
        """θ of every column, [rows, columns]; a column of several structures has the product of their gates."""
        if self.columns.device != theta.device:
            self.columns = self.columns.to(theta.device)
        padded = torch.cat([theta, torch.ones_like(theta[:, :1])], dim=1)  # -1 finds the one at the end
        result = padded[:, self.columns[0]]
        for units in self.columns[1:]:
            result = result * padded[:, units]
        return result

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.module._parameters[self.name]  # type: ignore[assignment]
        return weight

    def multiplied(self, theta: Tensor, each: int = 1) -> Tensor:
        """The weight times the gates of its columns, [1, units], each of which has so many columns in a row; and times
        those of its rows, if it is already.
        """
        return scale(getattr(self.module, self.name), theta, self.dim, each)

    def replace(self, product: Tensor) -> None:
        """The module sees this in place of its parameter: its __dict__ is looked at before its parameters."""
        self.module.__dict__[self.name] = product

    def stand_in(self, theta: Tensor) -> None:
        """The weight times gates, [1, units], from now until it is told to leave."""
        self.replace(self.multiplied(self.factors(theta)))

    @property
    def replaced(self) -> bool:
        return self.name in self.module.__dict__ and self.module.__dict__[self.name] is not self.weight

    def leave(self) -> None:
        """And now its parameter again."""
        if self.name not in self.module.__dict__:
            return
        if _FORGETS or not torch.compiler.is_compiling():
            del self.module.__dict__[self.name]
        elif self.replaced:
            self.module.__dict__[self.name] = self.weight  # until there is a pass that is not compiled

    @torch.no_grad()
    def fold(self, theta: Tensor) -> None:
        """Multiply gates, [1, units], into the weight for good."""
        shape = [-1 if d == self.dim else 1 for d in range(self.weight.dim())]
        self.weight.mul_(self.factors(theta)[0].to(self.weight).reshape(shape))


class InputGate(ConsumerGate):
    """On a layer that is called with what it consumes: gates per example multiply that.

    Gates that all examples share multiply what is smaller, the input or, for the length of the call, the weight.
    """

    def __init__(self, bank: "NoiseBank", module: nn.Module, name: str, dim: int, columns: Tensor) -> None:
        super().__init__(bank, module, name, dim, columns)
        self.behind, self.groups = 0, 1  # dimensions after that of the channels
        if isinstance(module, nn.modules.conv._ConvNd):
            self.behind = len(module.kernel_size)
            self.groups = 1 if module.transposed else module.groups

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """As a forward pre-hook."""
        if self.bank.paused:
            return args
        x = args[0]
        theta, each = self.gates()
        if len(theta) == 1 and x.numel() > self.weight.numel():
            self.replace(self.multiplied(theta, each))
            return args
        at = x.dim() - 1 - self.behind
        if self.groups > 1:  # a column stands for the same place in every one
            theta, each = theta.repeat_interleave(each, dim=1).repeat(1, self.groups), 1
        return (scale(x, _per_row(theta, x, at), at, each), *args[1:])

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """As a forward hook."""
        if not self.bank.paused:
            self.leave()


class OutputGate(ConsumerGate):
    """On the last layer of a residual branch, whose output it multiplies; it folds into the rows of that layer.

    Gates that all examples share multiply those rows, for the length of the call.
    """

    shared: tuple["OutputGate", ...] = ()  # those of the layer's parameters, this one's among them

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """As a forward pre-hook."""
        if self.bank.paused:
            return
        theta, each = self.gates()
        if len(theta) == 1:
            for gate in self.shared:
                gate.replace(gate.multiplied(theta, each))

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor | None) -> Tensor | None:
        """As a forward hook, also of a call that failed. A narrow layer's own hook, which puts its output back at its
        indices, runs after this.
        """
        if self.bank.paused:
            return output
        for gate in self.shared:
            gate.leave()
        if output is None:
            return output
        theta, each = self.gates()
        if len(theta) == 1:
            return output
        at = 1 if isinstance(module, nn.modules.conv._ConvNd | nn.modules.batchnorm._BatchNorm) else output.dim() - 1
        return scale(output, _per_row(theta, output, at), at, each, module)


def _shared(theta: Tensor) -> Tensor:
    """The one set of gates of a batch; a slice that takes everything would cost a copy on the way back."""
    return theta if len(theta) == 1 else theta[:1]


def _per_row(theta: Tensor, x: Tensor, at: int) -> Tensor:
    """Gates for the rows of a tensor. Windows or patches of one example lie one after the other, and share its gates;
    what belongs to no example, such as a table of positions, has one set of gates for the batch.
    """
    rows = x.shape[0] if at else 1  # an input without a batch has one row
    if len(theta) in (1, rows):
        return theta
    return theta[:1] if rows % len(theta) else theta.repeat_interleave(rows // len(theta), dim=0)


def _one_layer(columns: Tensor, layers: Mapping[str, slice]) -> tuple[str | None, int]:
    """The layer of which the columns are all the units in their order, each so many times in a row; None if not so."""
    if len(columns) == 1:
        first, last = int(columns.min()), int(columns.max())
        name = next((n for n, layer in layers.items() if (layer.start, layer.stop - 1) == (first, last)), None)
        each = columns.shape[1] // (last - first + 1)
        if name is not None and torch.equal(columns[0], torch.arange(first, last + 1).repeat_interleave(each)):
            return name, each
    return None, 1


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
        if self.follows or self.replaced:
            return False
        theta = self.bank.current()
        # The very same tensor again: checkpointing counts what is computed inside the part.
        known = part and self._product is not None and self._product[0] is theta
        product = self._product[1] if known and self._product is not None else self._multiplied(theta)
        if not part:
            self._product = theta, product
        self.replace(product)
        return True

    def _multiplied(self, theta: Tensor) -> Tensor:
        product = self.weight
        for gate in (self, *self.beside):
            if theta is self.bank._pass.theta and gate.layer is not None:
                product = scale(product, _shared(self.bank.theta(gate.layer)), gate.dim, gate.each)
            else:
                product = scale(product, gate.factors(_shared(theta)), gate.dim)
        return product

    def forget(self) -> None:
        """The last product, with its graph."""
        self._product = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_product": None}

    def leave(self) -> None:
        if not self.follows:
            super().leave()

    def stand_in(self, theta: Tensor) -> None:
        if not self.follows:
            self.replace(self._multiplied(theta))


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
        return scale(x, theta, self.dim)

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
        if self.bank._pass.inside:
            self.bank.current()  # notes a part that runs without gradients
        # Inside a pass only those are not there yet that were parted when it began.
        self.entered = [gate for gate in self.gates if not gate.parted and gate.enter(part=True)]

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """As a forward hook."""
        for gate in self.entered:
            gate.leave()
        self.entered = []


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
