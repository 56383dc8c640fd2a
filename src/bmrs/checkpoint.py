"""A network on disk: one safetensors file with its tensors and what was removed, and no pickled class.

The file loads on a freshly built original: its metadata says which units were kept, the original is shrunk to fit, and
the tensors are filled in. Everything is checked before anything changes.
"""

import ctypes
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bmrs import _checks
from bmrs.noise import NoiseBank
from bmrs.structure.capture import canonical_names, named_tensors
from bmrs.structure.record import GATES, Removed, check_record, removed
from bmrs.structure.removal import apply
from bmrs.structure.standin import as_built

_KEY = "bmrs"
_SUM = "bmrs_checksum"
_VERSION = 1


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the network's tensors and the record of what was removed to one safetensors file.

    A file that is already there is replaced only when the new one is complete.

    >>> import tempfile
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, f"{folder}/small.safetensors")
    ...     fresh = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    ...     model = load(fresh, f"{folder}/small.safetensors")
    """
    model = unwrapped(model)
    _check_numbers(model)
    names = canonical_names(model)
    tensors = _apart({name: tensor.detach().contiguous() for name, tensor in _kept_tensors(model).items()})
    aliases = {name: first for name, first in names.items() if name != first}
    content = {
        "version": _VERSION,
        "class": _class_name(model),
        "aliases": aliases,
        "removed": removed(model).to_json(),
    }
    text = json.dumps(content)
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} to save in: make it first.")
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        save_file(tensors, partial, metadata={_KEY: text, _SUM: _checksum(text, tensors), "format": "pt"})
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def load(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Shrink a freshly built original network in place to what the file holds, fill it in, and return it.

    Anything that does not fit is refused with the network left as it was. Numbers take the network's own type
    and device.
    """
    model = unwrapped(model)
    _check_numbers(model)
    tensors, content = _read(Path(path))
    record = _record_in(content, path)
    with as_built(model):
        present = {name: tensor for name, tensor in _kept_tensors(model).items() if not record.gone(name)}
    missing, foreign = sorted(present.keys() - tensors.keys()), sorted(tensors.keys() - present.keys())
    if any(name.startswith(GATES) for name in foreign):
        raise ValueError(
            f"{path} holds gates: attach them to the model first, as before it was saved, with NoiseBank.attach."
        )
    if missing or foreign:
        found = f"it lacks {_some(missing)}" if missing else f"it has {_some(foreign)}, which the model does not"
        raise ValueError(
            f"{path} was saved from another model ({content['class']}; {found}): build the one it came from."
        )
    _check_record(model, record, path)
    for name, tensor in tensors.items():
        expected = record.shape(name, present[name], removed(model))
        if tuple(tensor.shape) != expected:
            raise ValueError(
                f"{path} holds '{name}' with shape {tuple(tensor.shape)}, but this model's would have {expected}: "
                f"build the original model with the settings it was built with when the file was saved."
            )
    gates = model._modules.get(GATES)
    follower = gates if isinstance(gates, NoiseBank) and record != removed(model) else None
    if follower is not None:
        follower.check_followed()
    apply(model, record)
    if follower is not None:
        follower.adopt(record)
    with torch.no_grad():
        for name, tensor in _kept_tensors(model).items():
            tensor.copy_(tensors[name])
    return model


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside DistributedDataParallel, DataParallel or torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def _class_name(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def _kept_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a state dict has, each tensor once. Buffers that are not persistent are made by the model."""
    first = canonical_names(model)
    saved = set(model.state_dict(keep_vars=True))
    return {name: tensor for name, tensor in named_tensors(model) if first[name] == name and _saved(name, first, saved)}


def _saved(name: str, first: dict[str, str], saved: set[str]) -> bool:
    return name in saved or any(other in saved for other, origin in first.items() if origin == name)


def _check_numbers(model: nn.Module) -> None:
    if any(tensor.is_meta for tensor in _kept_tensors(model).values()):
        raise ValueError(
            "model is on the meta device, which holds no numbers: put it on a real one with to_empty first."
        )
    _checks.in_one_piece(model, "model", "save and load the whole network, inside Sharded.gathered()")


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each in memory of its own: a file has no place for a tensor that is a part of another."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return result


def _checksum(text: str, tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 of the description and of every tensor: safetensors itself does not notice a changed number."""
    total = zlib.crc32(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].cpu().contiguous()
        total = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), total)
        if tensor.numel():
            total = zlib.crc32((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()), total)
    return f"{total:08x}"


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}: give the path that bmrs.save wrote.")
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as problem:
        raise ValueError(f"{path} is damaged or no safetensors file ({problem}): save it again.") from problem
    content = about.get(_KEY)
    if content is None:
        raise ValueError(f"{path} was not written by bmrs.save: load it with safetensors or the library that wrote it.")
    try:
        known = json.loads(content)
        version = known["version"]
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"{path} has a damaged description of what was removed: save it again.") from problem
    if version != _VERSION:
        raise ValueError(f"{path} has format {version}, this version of bmrs reads {_VERSION}: update bmrs.")
    if about.get(_SUM) != _checksum(content, tensors):
        raise ValueError(f"{path} is damaged, since its checksum does not agree with what it holds: save it again.")
    return tensors, known


def _record_in(content: Mapping[str, Any], path: Any) -> Removed:
    try:
        return Removed.from_json(content["removed"])
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise ValueError(f"{path} has a damaged description of what was removed: save it again.") from problem


def _check_record(model: nn.Module, record: Removed, path: Any) -> None:
    """That the model is the original the record speaks of, or has been shrunk the same way already."""
    check_record(model, record, str(path))
    own = removed(model)
    if own.kept and own != record:
        raise ValueError("model has already been reduced, in another way: build the original again and load into that.")


def _some(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
