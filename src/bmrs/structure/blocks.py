"""Residual branches as a whole: what computes nothing but what is added to a stream, and could be left out.

In the graph such a branch is what leads only to one operand of a sum, and starts from what leads to the other. It can
go where all its layers lie in modules that compute nothing else: stand-ins take their places. Its gate multiplies the
output of its last layer, from which on everything is proportional to it.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from bmrs.structure.branches import INDICES, PASSED, operation_of, shape_of
from bmrs.structure.capture import Captured, canonical_names, module_of, modules_of, named_tensors
from bmrs.structure.rules import Place
from bmrs.structure.standin import lies_in

Node = torch.fx.Node

SCALED = {"linear": (1, 2), "conv1d": (1, 2), "conv2d": (1, 2), "conv3d": (1, 2), "addmm": (0, 2),
           "batch_norm": (1, 2), "layer_norm": (2, 3)}  # fmt: skip
"""Where the weight and the bias that scale an operation's output are among its arguments."""


PRODUCTS = {*SCALED, "mm", "bmm", "matmul", "baddbmm", "einsum", "convolution", "scaled_dot_product_attention"}


@dataclass(frozen=True)
class Vacancy:
    """A module that goes. ``width``: the dimension that says how wide its zeros are; an integer where that is fixed."""

    path: str
    passes: bool
    width: Place | int | None
    place: tuple[int, int] | None


@dataclass(frozen=True)
class Block:
    """A residual branch. ``family``: those of one family are on the same stream, and alike."""

    name: str  # of its last layer
    family: tuple[str, str]
    vacancies: tuple[Vacancy, ...]
    tensors: tuple[str, ...]
    scale: tuple[Place, ...]  # parameter dimensions whose indices scale its output, all together


@dataclass
class _Candidate:
    end: Node  # the sum
    last: Node  # the operand that is the branch
    other: Node  # what it is added to
    region: set[Node]
    streams: set[Node]  # what it starts from, and the other operand too
    parameters: int


def find_blocks(model: nn.Module, captured: Captured, live: set[Node]) -> list[Block]:
    """All whose removal modules can be named for; whether it is exact is for the proof to say."""
    finder = _Finder(model, captured, live)
    candidates = []
    for node in finder.computed:
        operands = node.all_input_nodes
        if operation_of(node) == "add" and len(operands) == 2:
            sides = [finder.candidate(node, *pair) for pair in (operands, operands[::-1])]
            bodies = sorted(filter(None, sides), key=lambda one: one.parameters, reverse=True)
            # Where both operands have layers, the one with fewer is a projection of the stream, and stays.
            if bodies and (len(bodies) == 1 or bodies[0].parameters > bodies[1].parameters):
                candidates.append(bodies[0])
    ends = {one.end for one in candidates}
    streams: dict[Node, str] = {}  # of each sum the stream it belongs to, by where that begins
    found = []
    for one in candidates:
        streams[one.end] = finder.stream(one, streams)
        if ends.isdisjoint(one.region):  # else others are inside it
            found.append(finder.block(one, streams[one.end]))
    return [block for block in found if block is not None]


class _Finder:
    def __init__(self, model: nn.Module, captured: Captured, live: set[Node]) -> None:
        self.model, self.captured, self.live = model, captured, live
        self.modules = dict(model.named_modules())
        self.computed = [node for node in captured.graph.nodes if node.op == "call_function" and node in live]
        self.inside: dict[str, set[Node]] = defaultdict(set)  # module → what is computed in it
        for node in self.computed:
            for path in modules_of(node):
                self.inside[path].add(node)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model)}
        self.trainable = {name for name, _ in model.named_parameters()}
        self.aliases = canonical_names(model)
        self.users: dict[str, set[Node]] = defaultdict(set)  # tensor → where it is used
        for node in captured.graph.find_nodes(op="placeholder"):
            name = captured.tensors.get(node.name)
            if name is not None:
                self.users[name].update(user for user in node.users if user in live)
        self.order = {node: number for number, node in enumerate(captured.graph.nodes)}

    # --- the branch in the graph --------------------------------------------------------------------------------------

    def candidate(self, end: Node, last: Node, other: Node) -> _Candidate | None:
        if shape_of(last) != shape_of(end):
            return None
        region = self._leading_to(last, end)
        parameters = sum(prod(self.shapes[name]) for name in self._tensors_of(region) if name in self.trainable)
        if not parameters:
            return None
        streams = self._starts(region) & (self._starts(self._leading_to(other, end)) or {other})
        return _Candidate(end, last, other, region, streams, parameters) if streams else None

    def _leading_to(self, last: Node, end: Node) -> set[Node]:
        """What is computed for this operand of the sum alone."""
        region: set[Node] = set()
        waiting = [last]
        while waiting:
            node = waiting.pop()
            users = {user for user in node.users if user in self.live}
            if node.op == "call_function" and node not in region and users <= (region or {end}):
                region.add(node)
                waiting.extend(node.all_input_nodes)
        return region

    def _starts(self, region: set[Node]) -> set[Node]:
        """What is computed elsewhere, or given to the network, and read here."""
        read = {one for node in region for one in node.all_input_nodes} - region
        return {one for one in read if one.name not in self.captured.tensors}

    def _tensors_of(self, region: set[Node]) -> set[str]:
        read = {one.name for node in region for one in node.all_input_nodes}
        return {self.captured.tensors[name] for name in read if name in self.captured.tensors}

    def stream(self, one: _Candidate, known: Mapping[Node, str]) -> str:
        """Where the stream begins that a branch is added to."""
        node = one.other
        if node not in one.streams:  # it has layers too: another branch beside this one, or a projection of the stream
            node = max(one.streams, key=self.order.__getitem__)
            if shape_of(node) != shape_of(one.end):
                return one.end.name
        while node not in known:
            inputs = [i for i in node.all_input_nodes if i.name not in self.captured.tensors]
            if len(inputs) != 1 or operation_of(node) in SCALED.keys() - {"batch_norm", "layer_norm"}:
                return node.name
            if shape_of(inputs[0]) != shape_of(node) and operation_of(node) not in PASSED:
                return node.name
            node = inputs[0]
        return known[node]

    # --- the modules it lies in ---------------------------------------------------------------------------------------

    def block(self, one: _Candidate, stream: str) -> Block | None:
        scale = self._scale(self._last_layer(one))
        if not scale:
            return None
        name = scale[0][0].rpartition(".")[0]
        known = {path: nodes for path, nodes in self.inside.items() if path and path in self.modules}
        owned = {path for path, nodes in known.items() if all(_same(n) for n in nodes - one.region)}
        outermost = [path for path in owned if not lies_in(path.rpartition(".")[0], owned)]
        paths = [inner for path in sorted(outermost, key=self._when) for inner in self._parts(path)]
        if any(path is None for path in paths):
            return None
        vacant = [path for path in paths if path is not None]
        tensors = {tensor for tensor in self.shapes if lies_in(tensor, vacant)}
        alone = all(self.users[self.aliases[tensor]] <= one.region for tensor in tensors)
        whole = all((self.aliases[tensor] in tensors) == (tensor in tensors) for tensor in self.shapes)
        left = one.region.difference(*(self.inside[path] for path in vacant))
        if any(operation_of(node) in PRODUCTS for node in left):
            return None  # the work would not be gone, nor its shapes right
        if not alone or not whole or not tensors.issuperset(tensor for tensor, _ in scale):
            return None
        vacancies = tuple(self._vacancy(path, vacant, scale, one.region) for path in vacant)
        own = tuple(
            tensor for tensor in self.shapes
            if tensor in tensors and self.aliases[tensor] == tensor and not tensor.endswith(INDICES)
        )  # fmt: skip
        return Block(name, (stream, re.sub(r"\d+", "*", name)), vacancies, own, scale)

    def _last_layer(self, one: _Candidate) -> Node | None:
        """From which on everything is proportional to what it computes."""
        node = one.last
        while node in one.region and sum(user in self.live for user in node.users) == 1:
            if operation_of(node) in SCALED:
                return node
            if operation_of(node) not in {*PASSED, "relu"}:
                return None
            node = max(node.all_input_nodes, key=lambda i: prod(shape_of(i) or ()))  # not the scale it is multiplied by
        return None

    def _scale(self, node: Node | None) -> tuple[Place, ...]:
        """Where a gate on this layer's output can be multiplied into its parameters; nothing where it cannot."""
        if node is None:
            return ()
        given = [
            node.args[at] for at in SCALED[operation_of(node)] if at < len(node.args) and node.args[at] is not None
        ]
        tensors = [self.captured.tensors.get(one.name) for one in given if isinstance(one, Node)]
        names = [name for name in tensors if name in self.trainable and name is not None]
        if not names or len(names) < len(given):
            return ()
        if operation_of(node) == "addmm":
            names.reverse()  # the bias comes first
        path = names[0].rpartition(".")[0]
        module, around = self.model.get_submodule(path), self.model.get_submodule(path.rpartition(".")[0])
        plain = type(module) is nn.LayerNorm or isinstance(module, nn.modules.batchnorm._BatchNorm) or _is_layer(module)
        # nn.MultiheadAttention reads the weights of its last layer without calling it.
        if not (plain and module_of(node) == path) and not isinstance(around, nn.MultiheadAttention):
            return ()
        if type(module) is nn.LayerNorm and len(self.shapes[names[0]]) > 1:
            return ()
        along = int(operation_of(node) == "addmm")
        return (names[0], along), *((name, 0) for name in names[1:])

    def _parts(self, path: str) -> list[str | None]:
        """The modules to replace for this one to be gone: itself, or those in it whose shapes can be told; None where
        they cannot.
        """
        module, call = self.model.get_submodule(path), self.captured.calls.get(path)
        if not any(True for _ in module.parameters()) and not any(True for _ in module.buffers()):
            return []
        if call is not None and (_is_layer(module) or call.given == call.made):
            return [path]
        if call is None or any(True for _ in module.parameters(recurse=False)):
            return [None]
        children = [f"{path}.{name}" for name, _ in module.named_children() if f"{path}.{name}" in self.inside]
        return [inner for child in sorted(children, key=self._when) for inner in self._parts(child)]

    def _when(self, path: str) -> int:
        return min(self.order[node] for node in self.inside[path])

    def _vacancy(self, path: str, vacant: Iterable[str], scale: tuple[Place, ...], region: set[Node]) -> Vacancy:
        module, call = self.model.get_submodule(path), self.captured.calls[path]
        assert call is not None
        if lies_in(scale[0][0], [path]):
            fixed = _is_layer(module) or isinstance(module, _NORMS)
            return Vacancy(path, False, scale[0] if fixed else None, call.place)
        if _is_layer(module):
            return Vacancy(path, False, 1, call.place)  # in between one channel will do
        nodes = self.inside[path] & region
        readers = {user for node in nodes for user in node.users if user in self.live} - nodes
        elsewhere = [self.inside[other] for other in vacant if other != path]
        return Vacancy(path, all(any(user in one for one in elsewhere) for user in readers), None, call.place)


def _same(node: Node) -> bool:
    """A conversion that converts nothing returns what it was given, and others read that from it."""
    (first, *_) = node.all_input_nodes or [node]
    before, after = first.meta.get("val"), node.meta.get("val")
    alike = isinstance(before, Tensor) and isinstance(after, Tensor) and before.dtype == after.dtype
    return operation_of(node) in ("to", "contiguous", "type_as") and alike and shape_of(first) == shape_of(node)


_NORMS = (nn.modules.batchnorm._BatchNorm, nn.LayerNorm)


def _is_layer(module: nn.Module) -> bool:
    """Whether the shape of what it computes can be told from what it is given."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return not module.transposed
    return type(module) is nn.Linear or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))
