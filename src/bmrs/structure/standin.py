"""What stands in the place of modules that are gone with a whole residual branch.

The code around them runs as it is: it calls a :class:`StandIn`, which computes nothing and returns zeros of the shape
there would be. The module it stands for is kept out of the module tree, with empty tensors, so that it can come back.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from bmrs.structure.capture import first_tensor
from bmrs.structure.mend import no_fast_path_around


@dataclass(frozen=True)
class Silence:
    """What a module that is gone returns.

    ``passes``: what it was given, where only others that are gone read it. ``width``: its number of features or
    channels; None: as many as it was given. ``place``: where in a tuple of how many, if it returned one.
    """

    passes: bool = False
    width: int | None = None
    place: tuple[int, int] | None = None


class StandIn(nn.Module):
    """In the place of a module that is gone."""

    whole: nn.Module
    silence: Silence

    def __init__(self, whole: nn.Module, silence: Silence) -> None:
        super().__init__()
        self.__dict__["whole"] = whole  # not a child: neither its tensors nor its modules are the network's any more
        self.silence = silence
        self.training = whole.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        x = first_tensor((*args, *kwargs.values()))
        if x is None:
            raise ValueError(f"{self} was called without a tensor, so it cannot tell the shape of its zeros.")
        _count_tokens(self.whole, x, (*args, *kwargs.values()), kwargs)
        made = x if self.silence.passes else _zeros(x, self._shape(x))
        if self.silence.place is None:
            return made
        at, count = self.silence.place
        return tuple(made if n == at else None for n in range(count))

    def _shape(self, x: Tensor) -> list[int]:
        shape = list(x.shape)
        whole, width = self.whole, self.silence.width
        at = -1
        if isinstance(whole, nn.modules.conv._ConvNd):
            spatial = len(whole.kernel_size)
            at = -1 - spatial
            shape[-spatial:] = [_convolved(whole, n, size) for n, size in enumerate(shape[-spatial:])]
        elif isinstance(whole, nn.modules.batchnorm._BatchNorm):
            at = 1
        if width is not None:
            shape[at] = width
        return shape

    def __getattr__(self, name: str) -> Any:
        """What the code around asks of the module it stands for, such as ``batch_first``."""
        if "whole" in self.__dict__:
            return getattr(self.__dict__["whole"], name)
        return super().__getattr__(name)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.whole._apply(fn)  # where it comes back it is where the network is
        super()._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        return f"for {type(self.whole).__name__}"


def _zeros(x: Tensor, shape: list[int]) -> Tensor:
    """As a layer would have made them of x: with the channels last where they were."""
    device = x.device.type
    # The narrowest type there would be: added to a stream of another, they take on that.
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if x.dim() > 3 and x.stride(1) == 1:
        batch, channels, *spatial = shape
        return x.new_zeros([batch, *spatial, channels], dtype=dtype).movedim(-1, 1)
    return x.new_zeros(shape, dtype=dtype)


def _count_tokens(whole: nn.Module, x: Tensor, values: Iterable[Any], named: Mapping[str, Any]) -> None:
    """Hugging Face's key-value caches know from the first layer how many tokens there were, though it be gone."""
    cache = next((value for value in values if hasattr(value, "get_seq_length")), None)
    if cache is None or named.get("key_value_states") is not None:  # what attends to other tokens counts none
        return
    nothing = x.new_zeros(len(x), 1, x.shape[1], 1)
    getattr(cache, "self_attention_cache", cache).update(nothing, nothing, getattr(whole, "layer_idx", 0))


def _convolved(layer: nn.modules.conv._ConvNd, dim: int, size: int) -> int:
    reach = layer.dilation[dim] * (layer.kernel_size[dim] - 1)
    padding = layer.padding
    around = {"same": reach, "valid": 0}[padding] if isinstance(padding, str) else 2 * padding[dim]
    return (size + around - reach - 1) // layer.stride[dim] + 1


def stand_in(model: nn.Module, silenced: Mapping[str, Silence]) -> None:
    """Put stand-ins in the places of these modules."""
    for path, silence in silenced.items():
        parent, name = _parent(model, path)
        parent._modules[name] = StandIn(model.get_submodule(path), silence)
        no_fast_path_around(model, path)


def put_back(model: nn.Module) -> None:
    """The modules themselves where there are stand-ins for them."""
    for path, one in _stand_ins(model):
        parent, name = _parent(model, path)
        one.whole.train(one.training)
        parent._modules[name] = one.whole


@contextlib.contextmanager
def as_built(model: nn.Module) -> Iterator[None]:
    """For a while no stand-ins: the modules and tensors there were at first, empty where they are gone."""
    places = [(*_parent(model, path), one) for path, one in _stand_ins(model)]
    try:
        for parent, name, one in places:
            parent._modules[name] = one.whole
        yield
    finally:
        for parent, name, one in places:
            parent._modules[name] = one


def module_at(model: nn.Module, path: str) -> nn.Module:
    """The module the network was built with at this path."""
    module = model
    for name in path.split(".") if path else ():
        module = getattr(module, name)  # a stand-in finds it in the module it stands for
    return module.whole if isinstance(module, StandIn) else module


def _stand_ins(model: nn.Module) -> list[tuple[str, StandIn]]:
    return [(path, module) for path, module in model.named_modules() if isinstance(module, StandIn)]


def _parent(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    above, _, name = path.rpartition(".")
    return model.get_submodule(above), name


def lies_in(name: str, paths: Iterable[str]) -> bool:
    """Whether a tensor or module lies in one of these modules."""
    return any(name == path or name.startswith(f"{path}.") for path in paths)
