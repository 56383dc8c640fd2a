"""Many networks of one kind as one: every layer holds the weights of all members, [members, ...].

A stack is a copy of the network in which each layer with parameters is replaced by one that has them stacked. The
network's own code runs as it is, on the examples of all members one after the other, [members · examples, ...]: what
treats examples separately (activations, pooling, flattening, residual sums) does not notice.
"""

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from bmrs.study.operations import conv2d, linear, max_pool2d


class Stack(nn.Module):
    """Networks with the same shapes, computed at once; ``members`` of them.

    >>> stack = Stack([nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(5)])
    >>> stack(torch.randn(5 * 8, 3)).shape
    torch.Size([40, 2])
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        if not networks:
            raise ValueError("networks must hold at least one network.")
        names = [{name: p.shape for name, p in network.state_dict().items()} for network in networks]
        if any(other != names[0] for other in names):
            raise ValueError("networks must have the same parameters and shapes to be stacked.")
        self.members = len(networks)
        self.network = _stacked(list(networks))

    def forward(self, x: Tensor) -> Tensor:
        """``x``: the examples of the first member, then those of the second, and so on."""
        output: Tensor = self.network(x)
        return output

    def layer(self, path: str) -> nn.Module:
        """The stacked layer at this place of the network."""
        return self.network.get_submodule(path)

    def tensor(self, name: str) -> Tensor:
        """A parameter or buffer of the network by its name, of all members."""
        path, _, leaf = name.rpartition(".")
        found: Tensor = getattr(self.network.get_submodule(path), leaf)
        return found

    def state_of(self, member: int) -> dict[str, Tensor]:
        """The state dict of one member, for the network it is a copy of."""
        return {name: tensor[member].clone() for name, tensor in self.network.state_dict().items()}


class StackedLinear(nn.Module):
    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.weight = _parameter([layer.weight for layer in layers])
        self.bias = None if layers[0].bias is None else _parameter([layer.bias for layer in layers])

    def forward(self, x: Tensor) -> Tensor:
        members, outputs, inputs = self.weight.shape
        rows = x.reshape(members, -1, inputs)
        result = torch.bmm(rows, self.weight.mT) if self.bias is None else linear(rows, self.weight, self.bias)
        return result.reshape(*x.shape[:-1], outputs)


class StackedConv2d(nn.Module):
    def __init__(self, layers: Sequence[nn.Conv2d]) -> None:
        super().__init__()
        self.weight = _parameter([layer.weight for layer in layers])
        self.bias = None if layers[0].bias is None else _parameter([layer.bias for layer in layers])
        self.stride, self.padding, self.dilation = layers[0].stride, layers[0].padding, layers[0].dilation

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        return isinstance(layer, nn.Conv2d) and layer.groups == 1 and layer.padding_mode == "zeros"

    def forward(self, x: Tensor) -> Tensor:
        return conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation)


class StackedMaxPool2d(nn.Module):
    """Over windows that do not overlap; it has no weights, but the library's own is slow on many small images."""

    def __init__(self, layer: nn.MaxPool2d) -> None:
        super().__init__()
        self.size = int(layer.kernel_size)  # type: ignore[arg-type]
        self.rectified = False  # the layer before it, a ReLU, is left to this one

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        if not isinstance(layer, nn.MaxPool2d) or layer.return_indices or layer.ceil_mode:
            return False
        plain = layer.padding == 0 and layer.dilation == 1
        return plain and isinstance(layer.kernel_size, int) and layer.stride == layer.kernel_size

    def forward(self, x: Tensor) -> Tensor:
        return max_pool2d(x, self.size, rectified=self.rectified)


class StackedAny(nn.Module):
    """Any other layer, by torch's own vectorisation."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        parameters, buffers = stack_module_state(list(layers))
        self._names = [name for name, _ in layers[0].named_parameters()]
        for name, value in parameters.items():
            _register(self, name, nn.Parameter(value.detach(), layers[0].get_parameter(name).requires_grad))
        for name, value in buffers.items():
            _register(self, name, value)
        # Kept out of the module tree: it has the code, not the numbers.
        self._code: nn.Module
        object.__setattr__(self, "_code", copy.deepcopy(layers[0]))
        self._members = len(layers)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._code.train(self.training)
        parameters: dict[str, Tensor] = dict(self.named_parameters())
        buffers = dict(self.named_buffers())

        def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
            called: Tensor = functional_call(self._code, (parameters, buffers), (x, *args), kwargs)
            return called

        split = x.reshape(self._members, -1, *x.shape[1:])
        result: Tensor = vmap(one, randomness="different")(parameters, buffers, split)
        return result.flatten(0, 1)


class StackedBatchNorm(nn.Module):
    """Batch norm over each member's own examples: the members' channels side by side are one wide norm."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        first = layers[0]
        self.weight = None if first.weight is None else _parameter([layer.weight for layer in layers])
        self.bias = None if first.bias is None else _parameter([layer.bias for layer in layers])
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, torch.stack([getattr(layer, name) for layer in layers]))
        self.eps, self.momentum = first.eps, first.momentum

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        plain = isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d) and layer.momentum is not None
        return plain and bool(layer.track_running_stats)

    def forward(self, x: Tensor) -> Tensor:
        members, channels = self.running_mean.shape
        side_by_side = x.reshape(members, -1, *x.shape[1:]).transpose(0, 1).flatten(1, 2)
        if self.training:
            self.num_batches_tracked += 1
        result: Tensor = F.batch_norm(
            side_by_side, self.running_mean.view(-1), self.running_var.view(-1),
            None if self.weight is None else self.weight.view(-1), None if self.bias is None else self.bias.view(-1),
            self.training, self.momentum, self.eps,
        )  # fmt: skip
        split: Tensor = result.unflatten(1, (members, channels))
        return split.transpose(0, 1).flatten(0, 1)


def _stacked(networks: list[nn.Module]) -> nn.Module:
    first = networks[0]
    if isinstance(first, nn.Linear):
        return StackedLinear(networks)  # type: ignore[arg-type]
    if StackedConv2d.fits(first):
        return StackedConv2d(networks)  # type: ignore[arg-type]
    if StackedBatchNorm.fits(first):
        return StackedBatchNorm(networks)
    if StackedMaxPool2d.fits(first):
        return StackedMaxPool2d(first)  # type: ignore[arg-type]
    children = list(first.named_children())
    own = [*first.parameters(recurse=False), *first.buffers(recurse=False)]
    if own:  # whatever its code does with them and with its parts, do it as a whole
        return StackedAny(networks)
    made = copy.copy(first)
    made._modules = dict(first._modules)
    for name, _ in children:
        made._modules[name] = _stacked([network.get_submodule(name) for network in networks])
    if type(first) is nn.Sequential:
        _rectify_in_pools(made)
    return made


def _rectify_in_pools(chain: nn.Module) -> None:
    """A ReLU right before a max pooling commutes with it, and is less work after it."""
    for name, (layer, after) in zip(chain._modules, pairwise(list(chain._modules.values())), strict=False):
        if type(layer) is nn.ReLU and isinstance(after, StackedMaxPool2d):
            chain._modules[name], after.rectified = nn.Identity(), True


def _parameter(tensors: Sequence[Tensor | None]) -> nn.Parameter:
    there = [tensor for tensor in tensors if tensor is not None]
    return nn.Parameter(torch.stack([tensor.detach() for tensor in there]), there[0].requires_grad)


def _register(module: nn.Module, name: str, value: Tensor) -> None:
    """Under the name it has in the network, also where that has dots."""
    *path, leaf = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    if isinstance(value, nn.Parameter):
        module.register_parameter(leaf, value)
    else:
        module.register_buffer(leaf, value)
