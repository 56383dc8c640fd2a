"""What was removed from a network, in terms of the original: written on the model, and stored in its checkpoints."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from bmrs.structure.branches import INDICES
from bmrs.structure.capture import canonical_names, named_tensors
from bmrs.structure.mend import Correction, integers_of
from bmrs.structure.standin import Silence, as_built, lies_in

RECORD = "bmrs_removed"  # the attribute of a network that says what was removed
GATES = "bmrs_noise"  # the submodule that holds its gates


@dataclass
class Removed:
    """Enough to shrink a fresh copy of the original, and to bring a smaller network back to its shapes."""

    shapes: dict[str, list[int]] = field(default_factory=dict)  # the original ones, of tensors that shrank
    kept: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)  # module → groups left
    integers: dict[str, dict[str, Any]] = field(default_factory=dict)  # module → attribute → value
    corrections: dict[str, list[Correction]] = field(default_factory=dict)  # module → sizes its code asks for
    widened: dict[str, tuple[int, int, list[int]]] = field(default_factory=dict)  # branch → dimension, size, indices
    silenced: dict[str, Silence] = field(default_factory=dict)  # modules that are gone with whole branches
    originals: dict[str, dict[str, Any]] = field(default_factory=dict, compare=False)  # module → attribute → value

    def to_json(self) -> dict[str, Any]:
        """Kept indices as ranges: short to store, and still readable."""
        content = asdict(self)
        content["kept"] = {name: {dim: _ranges(kept) for dim, kept in dims.items()} for name, dims in self.kept.items()}
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Removed":
        return cls(
            {name: list(shape) for name, shape in content["shapes"].items()},
            {name: {int(d): _indices(text) for d, text in dims.items()} for name, dims in content["kept"].items()},
            dict(content["groups"]),
            {path: dict(values) for path, values in content["integers"].items()},
            {path: [Correction(**c) for c in cs] for path, cs in content["corrections"].items()},
            {path: (dim, size, list(indices)) for path, (dim, size, indices) in content["widened"].items()},
            {path: _silence(**how) for path, how in content.get("silenced", {}).items()},
            {path: dict(values) for path, values in content.get("originals", {}).items()},
        )

    def gone(self, name: str) -> bool:
        """Whether a tensor of the original is no longer in the network."""
        return lies_in(name, self.silenced)

    def within(self, other: "Removed") -> bool:
        """Whether everything that was removed here was removed there too."""
        for name, dims in self.kept.items():
            for dim, kept in dims.items():
                there = other.kept.get(name, {}).get(dim)
                if there is None or not set(there) <= set(kept):
                    return False
        return True

    def shape(self, name: str, tensor: Tensor, now: "Removed") -> tuple[int, ...]:
        """What a network's tensor has when it was reduced as this record says; ``now``: the network's own."""
        return self.reduced(name, self.shapes.get(name, now.shapes.get(name, list(tensor.shape))))

    def reduced(self, name: str, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of a tensor that had this one in the original."""
        kept = self.kept.get(name, {})
        return tuple(len(kept[dim]) if dim in kept else size for dim, size in enumerate(whole))


def removed(model: nn.Module) -> Removed:
    """The record a network carries; an empty one for a network that is whole."""
    return model.__dict__.get(RECORD) or Removed()


def check_record(model: nn.Module, record: Removed, source: str) -> None:
    """That the record speaks of this model. ``source``: where it comes from, for the message."""
    with as_built(model):
        modules, tensors, names = dict(model.named_modules()), dict(named_tensors(model)), canonical_names(model)
    for place in (*record.groups, *record.integers, *record.corrections, *record.widened, *record.silenced):
        if place not in modules:
            raise ValueError(
                f"{source} speaks of module '{place}', which the model does not have: build the model it was saved "
                f"from."
            )
    for values in (record.integers, record.originals):
        for place, integers in values.items():
            for attribute, value in integers.items():
                if isinstance(integers_of(modules[place]).get(attribute), tuple):  # a file knows lists only
                    integers[attribute] = tuple(value)
    for name, dims in record.kept.items():
        shape = record.shapes.get(name, [])
        for dim, kept in dims.items():
            ordered = all(first < second for first, second in pairwise([-1, *kept]))
            none = record.gone(name) and not kept
            if not (0 <= dim < len(shape) and (none or (kept and ordered and kept[-1] < shape[dim]))):
                raise ValueError(
                    f"{source} is damaged, since it keeps indices of '{name}' that there are not: load another."
                )
    for name, tensor in tensors.items():
        held = tensor.dim() > 0 and name == names[name] and not name.endswith(INDICES)
        emptied = any(not kept for kept in record.kept.get(name, {}).values())
        if held and record.gone(name) and not emptied:
            raise ValueError(f"{source} is damaged, since it lacks what became of '{name}': load another.")
    own = removed(model)
    for name, shape in record.shapes.items():
        if name not in tensors:
            raise ValueError(
                f"{source} speaks of '{name}', which the model does not have: build the model it was saved from."
            )
        original = own.shapes.get(name, list(tensors[name].shape))
        if list(original) != shape:
            raise ValueError(
                f"{source} was saved from a model whose '{name}' had shape {tuple(shape)} at first; this one has "
                f"{tuple(original)}: build the model with the same settings."
            )


def _silence(passes: bool, width: int | None, place: Sequence[int] | None) -> Silence:
    return Silence(passes, width, None if place is None else (place[0], place[1]))


def _ranges(kept: list[int]) -> str:
    parts: list[list[int]] = []
    for index in kept:
        if parts and index == parts[-1][1] + 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _indices(text: str) -> list[int]:
    indices: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        indices.extend(range(int(first), int(last or first) + 1))
    return indices
