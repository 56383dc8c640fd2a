"""A network in shards (FSDP2, ``fully_shard``): gathered where it is pruned, shrunk, and sharded again.

Not imported with bmrs, since it needs torch.distributed.

The gates' parameters φ are few. Every process has all of them, as replicated distributed tensors, so that they are
clipped, counted and stepped with the others; their gradients are averaged as they arise. ``fully_shard`` never sees
them, so its mixed precision leaves them float32.
"""

import contextlib
import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import _composable_state
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from bmrs.parallel import placed_as, whole
from bmrs.pruner import Pruner
from bmrs.reporting import PruneReport
from bmrs.states import VERSION, check_state
from bmrs.structure.capture import first_line
from bmrs.structure.record import GATES, removed

_PHI = ("mu", "log_sigma")
_EXTRA = f"{GATES}._extra_state"
_REST = "rest"  # of a checkpoint: all that is no distributed tensor, as the bytes of torch.save


class Sharded:
    """A Pruner's network in shards, on all processes of this group.

        def shard(model):                                     # as without bmrs, and with all settings
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
        pruner = bmrs.Pruner(model, x[:2], optimizer)         # of the plain network, on every process
        sharded = Sharded(pruner, shard)
        for epoch in range(epochs):
            train(model, optimizer)                           # the loop as it was
            report = sharded.prune()
        model = sharded.finish()                              # whole and plain, on every process

    The network is gathered to the device where it was built: build it on the CPU if one GPU cannot hold it.
    """

    def __init__(self, pruner: Pruner, shard: Callable[[nn.Module], Any]) -> None:
        """``shard``: calls ``fully_shard`` on parts of the network and on the network, now and after every removal.

        Optimizers made before and given to the Pruner go on with the shards; those made later are given to
        ``pruner.follow``.
        """
        if not isinstance(pruner, Pruner):
            raise TypeError(f"pruner must be a bmrs.Pruner of the plain network; got {type(pruner).__name__}.")
        if not (distributed.is_available() and distributed.is_initialized()):
            raise RuntimeError("there is no group of processes: call torch.distributed.init_process_group() first.")
        pruner._check_unchanged()
        self.pruner, self.model = pruner, pruner.model
        self._shard = shard
        self._home = next(self.model.parameters()).device
        self._split()

    # --- what people call ---------------------------------------------------------------------------------------------

    def prune(self, fraction: float | None = None) -> PruneReport:
        """As :meth:`bmrs.Pruner.prune`, after an optimizer step; on every process.

        The network is whole on each for the moment, with its gradients. Optimizer state is gathered one tensor after
        the other.
        """
        with self._gathered():
            return self.pruner.prune(fraction, undoable=False)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[nn.Module]:
        """The network and its optimizers' state whole and plain on every process, and in shards again afterwards.

        Inside, the Pruner does all it does with a network that never was in shards.
        """
        with self._gathered():
            _place_states(self.pruner.bank.optimizers)
            yield self.model

    def finish(self, fine_tune: Callable[[nn.Module], Any] | None = None) -> nn.Module:
        """As :meth:`bmrs.Pruner.finish`; the network stays whole and plain, on every process."""
        with self.gathered():
            return self.pruner.finish(fine_tune)

    def save(self, folder: str | os.PathLike[str], extra: Any = None) -> None:
        """All there is to go on from, into a new folder that all processes can reach; each writes its shards.

        ``extra``: what else to keep, such as the epoch or a scheduler's state. The folder has its name when it is
        complete, and not before.
        """
        self._check_savable()
        folder, first = Path(folder), distributed.get_rank() == 0
        _unpacked(_packed(extra), "extra", "give numbers, text, tensors, and lists and dicts of them")
        part = folder.with_name(f"{folder.name}.part")
        if self._any(first and folder.exists()):
            raise FileExistsError(f"{folder} exists already: give every checkpoint a folder of its own.")
        if first:
            shutil.rmtree(part, ignore_errors=True)
        distributed.barrier()
        model = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        tensors: dict[str, Tensor] = {name: value for name, value in model.items() if isinstance(value, DTensor)}
        optimizers = [_apart(optimizer.state_dict()) for optimizer in self.pruner.bank.optimizers]
        for name, parameter, state, key in self._states(optimizers):
            value: Tensor = state[key]
            if isinstance(value, DTensor) and value.shape == parameter.shape:
                tensors[name] = value
                value = torch.empty(value.shape, dtype=value.dtype, device="meta")
            state[key] = whole(value)
        if first:
            plain = {name: value for name, value in model.items() if name not in tensors}
            rest = {"version": VERSION, "plain": plain, "optimizers": optimizers, "extra": extra}
            tensors[_REST] = _packed(rest)
        save(tensors, checkpoint_id=part)
        if first:
            os.replace(part, folder)
        distributed.barrier()

    def load(self, folder: str | os.PathLike[str]) -> Any:
        """Go on from a folder that :meth:`save` wrote, on as many processes as there are now; returns its ``extra``.

        The network, freshly built or not, takes the shapes of the saved one. What does not fit is refused with
        everything left as it was.
        """
        self._check_savable()
        sizes = _sizes(Path(folder))
        packed = torch.empty(sizes[_REST], dtype=torch.uint8)
        load({_REST: packed}, checkpoint_id=folder)
        rest = _unpacked(packed, folder, "load another checkpoint")
        optimizers = rest["optimizers"]
        state = {name: torch.empty(size, device="meta") for name, size in sizes.items()} | rest["plain"]
        model = {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
        about = {"version": rest["version"], "model": model, "optimizers": optimizers, "copies": []}
        check_state(about, self.pruner.bank, {self.model: self.model})
        if self.pruner.bank.record_in(model[_EXTRA]) != removed(self.model):
            with self._gathered():
                self.model.load_state_dict({_EXTRA: model[_EXTRA]}, strict=False)  # brings it to these shapes
                self.pruner._changed()
        tensors = {name: value for name, value in self.model.state_dict().items() if f"model.{name}" in sizes}
        wanted = {f"model.{name}": value for name, value in tensors.items()}
        for name, parameter, one, key in self._states(optimizers):
            if isinstance(one[key], Tensor) and one[key].is_meta:
                one[key] = wanted[name] = torch.zeros_like(parameter, dtype=one[key].dtype, requires_grad=False)
        load(wanted, checkpoint_id=folder)
        self.model.load_state_dict(model | tensors)
        for optimizer, content in zip(self.pruner.bank.optimizers, optimizers, strict=True):
            optimizer.load_state_dict(content)
        return rest["extra"]

    def _states(self, contents: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, nn.Parameter, dict[str, Any], str]]:
        """Of the optimizers' state dicts every tensor: a name, its parameter, and where it is."""
        for number, (optimizer, content) in enumerate(zip(self.pruner.bank.optimizers, contents, strict=True)):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for index, state in content["state"].items():
                for key in [key for key, value in state.items() if isinstance(value, Tensor)]:
                    yield f"optimizers.{number}.{index}.{key}", parameters[index], state, key

    # --- whole and in shards ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[None]:
        """The network whole; the optimizers' state in shards still."""
        self._join()
        try:
            yield
        finally:
            if not self.pruner.finished:
                self._split()

    def _split(self) -> None:
        """From whole to shards."""
        model, bank = self.model, self.pruner.bank
        before = dict(model.named_parameters())
        self._unsharded = _Modules(model)
        gates = model._modules.pop(GATES)
        try:
            self._shard(model)
            mesh = self._mesh()
        except Exception:
            self._unsharded.restore()
            _put(model, {p: before[name] for name, p in model.named_parameters()})
            _place_states(bank.optimizers)
            raise
        finally:
            model._modules[GATES] = gates
        self._unsharded.end()
        for name in _PHI:
            own = before[f"{GATES}.{name}"]
            setattr(bank, name, nn.Parameter(_everywhere(own.detach(), mesh), own.requires_grad))
        bank.alive = bank.alive.to(mesh.device_type)
        after = dict(model.named_parameters())
        self._exchange({before[name]: p for name, p in after.items() if p is not before[name]})
        _place_states(bank.optimizers)

    def _join(self) -> None:
        """From shards to whole, but for the optimizers' state."""
        self._check_in_shards()
        self._unsharded.restore()
        exchanged: dict[nn.Parameter, nn.Parameter] = {}
        for parameter in self.model.parameters():
            if isinstance(parameter, DTensor):
                full = whole(parameter.detach()).to(self._home)
                exchanged[parameter] = nn.Parameter(full.clone(), parameter.requires_grad)
        _put(self.model, exchanged)
        for buffer in self.model.buffers():
            _share(buffer)
            buffer.data = buffer.data.to(self._home)
        self._exchange(exchanged)

    def _mesh(self) -> DeviceMesh:
        """The processes among which the network is parted."""
        meshes = {parameter.device_mesh for parameter in self.model.parameters() if isinstance(parameter, DTensor)}
        if not meshes:
            raise ValueError("shard sharded nothing: call fully_shard on the network it is given.")
        mesh: DeviceMesh = meshes.pop()
        if meshes or mesh.size() != distributed.get_world_size():
            raise ValueError("shard must use one mesh of all processes: call fully_shard with that, or with none.")
        return mesh

    def _exchange(self, parameters: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """New parameters for old: gradients, optimizers and the Pruner follow."""
        for old, new in parameters.items():
            if old.grad is not None:
                new.grad = placed_as(old.grad, new).to(new.device)
                old.grad = None
        for optimizer in self.pruner.bank.optimizers:
            for group in optimizer.param_groups:
                group["params"][:] = [parameters.get(p, p) for p in group["params"]]
            for old, new in parameters.items():
                if old in optimizer.state:
                    optimizer.state[new] = optimizer.state.pop(old)
        if self.pruner._steps is not None:
            self.pruner._steps.phi[:] = [parameters.get(p, p) for p in self.pruner._steps.phi]
        self.pruner._remember()

    def _check_in_shards(self) -> None:
        """That the network is as this left it."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # parts stay whole after a forward pass without a backward pass
        self.pruner._check_unchanged(in_one_piece=False)

    def _check_savable(self) -> None:
        self._check_in_shards()
        if self.pruner._copies:
            raise ValueError("copies of the network (EMA) cannot be saved along: let the Pruner forget() them.")

    @staticmethod
    def _any(here: bool) -> bool:
        """Whether it is so on any process: an error on one alone would leave the others waiting."""
        answers: list[Any] = [None] * distributed.get_world_size()
        distributed.all_gather_object(answers, here)
        return any(answers)


class _Modules:
    """What modules were before ``fully_shard``, which has no way back: their classes, attributes and hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.before = [(module, type(module), dict(vars(module))) for module in model.modules()]
        self.after: list[dict[str, Any]] = []

    def end(self) -> None:
        """What comes later is others' and stays."""
        self.after = [dict(vars(module)) for module, _, _ in self.before]

    def restore(self) -> None:
        if not self.after:
            self.end()
        for (module, kind, before), after in zip(self.before, self.after, strict=True):
            module.__class__ = kind
            values = vars(module)
            for key in after.keys() - before.keys():
                values.pop(key, None)
            for key in after.keys() & before.keys():
                if after[key] is not before[key] and values.get(key) is after[key]:
                    values[key] = before[key]
            _composable_state._module_state_mapping.pop(module, None)
            hooks = [value for key, value in values.items() if "_hooks" in key and isinstance(value, dict)]
            theirs = {number for entries in hooks for number, hook in entries.items() if _is_fsdp_s(hook)}
            for entries in hooks:  # some of them say of a hook, by its number, how it is called
                for number in theirs & entries.keys():
                    del entries[number]


def _is_fsdp_s(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


def _put(model: nn.Module, parameters: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """In the place of others, wherever a module has them."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter in parameters:
                module._parameters[name] = parameters[parameter]


@torch.no_grad()
def _share(buffer: Tensor) -> None:
    """Process 0's for all, as under DistributedDataParallel: running means are not shared in a network in shards."""
    shared = buffer.to(torch.uint8 if buffer.dtype == torch.bool else buffer.dtype, copy=True).contiguous()
    distributed.broadcast(shared, 0)
    shared = shared.to(buffer.dtype)
    if not torch.equal(shared, buffer):
        buffer.copy_(shared)


def _everywhere(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """A distributed tensor that every process has the whole of."""
    return DTensor.from_local(tensor.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim, run_check=False)


def _place_states(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Optimizers' state parted as their parameters are; whole where those are."""
    for parameter, state in (item for optimizer in optimizers for item in optimizer.state.items()):
        for key, value in state.items():
            if not isinstance(value, Tensor) or not value.dim():
                continue
            if not isinstance(parameter, DTensor):
                state[key] = whole(value).to(parameter.device)
            elif value.shape == parameter.shape:
                state[key] = placed_as(value, parameter)
            elif not isinstance(value, DTensor):  # factors, as Adafactor's
                state[key] = _everywhere(value, parameter.device_mesh)


def _apart(content: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict that can be written to: torch's has the optimizer's own dicts in it."""
    return {**content, "state": {index: dict(state) for index, state in content["state"].items()}}


def _packed(content: Any) -> Tensor:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def _unpacked(packed: Tensor, source: Any, remedy: str) -> Any:
    try:
        return torch.load(io.BytesIO(packed.numpy().tobytes()), map_location="cpu", weights_only=True)
    except Exception as problem:
        raise ValueError(f"{source} cannot be read again: {remedy}.") from problem


def _sizes(folder: Path) -> dict[str, torch.Size]:
    """Of every tensor in a checkpoint."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}: give the one that Sharded.save wrote.")
    try:
        known: dict[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata
        sizes = {name: one.size for name, one in known.items()}
    except Exception as problem:
        raise ValueError(f"{folder} is damaged or no checkpoint ({first_line(problem)}): load another.") from problem
    if _REST not in sizes:
        raise ValueError(f"{folder} was not written by Sharded.save: load it with what wrote it.")
    return sizes
