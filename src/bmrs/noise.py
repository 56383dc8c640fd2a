"""The gates of a network: every θ in one flat posterior, one draw per forward pass.

A :class:`NoiseBank` holds μ and log σ of all units in two vectors. Attached to a network it draws all gates at
once when the network is called, per example or per batch, and multiplies the outputs of the gated modules. In
evaluation the gates are E[θ], computed anew from the current parameters in every pass.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from bmrs import _checks
from bmrs.posterior import LOG_A, LOG_B, TruncatedLogNormal

Noise = Literal["example", "batch"]
MODULE_NAME = "bmrs_noise"


class NoiseBank(nn.Module):
    """Every gate of a network.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> bank = NoiseBank.attach(model, {"1": 16})           # gate the 16 outputs of the ReLU
    >>> loss = model(torch.randn(4, 8)).sum() + bank.kl()   # the network is called as before
    >>> bank.detach()
    """

    mu: nn.Parameter
    log_sigma: nn.Parameter
    alive: Tensor

    def __init__(
        self,
        sizes: Mapping[str, int],
        noise: Noise = "example",
        *,
        mu: float = 0.0,
        log_sigma: float = -5.0,
        log_a: float = LOG_A,
        log_b: float = LOG_B,
    ) -> None:
        """``sizes``: units per gated layer. ``noise``: one draw per "example" or per "batch"."""
        super().__init__()
        if noise not in ("example", "batch"):
            raise ValueError(f"noise must be 'example' or 'batch', one draw for each; got {noise!r}.")
        if not sizes:
            raise ValueError("sizes must name at least one layer and its number of units.")
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"sizes['{name}'] must be a whole number of units, at least 1; got {size!r}.")
        self.noise = noise
        self.log_a, self.log_b = log_a, log_b
        self.layers: dict[str, slice] = {}
        total = 0
        for name, size in sizes.items():
            self.layers[name] = slice(total, total + size)
            total += size
        self.mu = nn.Parameter(torch.full((total,), float(mu)))
        self.log_sigma = nn.Parameter(torch.full((total,), float(log_sigma)))
        self.register_buffer("alive", torch.ones(total, dtype=torch.bool))
        self._theta: Tensor | None = None
        self._root: nn.Module | None = None
        self._hooks: list[Any] = []

    @classmethod
    def attach(cls, model: nn.Module, outputs: Mapping[str, int], noise: Noise = "example", **options: Any) -> Self:
        """Gate the outputs of the named modules, given their number of units along dimension 1.

        The bank becomes the submodule ``bmrs_noise`` of the model, so that it moves, saves and trains with it.
        """
        modules = dict(model.named_modules())
        for name in outputs:
            if name not in modules:
                raise ValueError(f"outputs names the module '{name}', which the model does not have.")
        if MODULE_NAME in modules:
            raise ValueError(f"the model has gates already: call model.{MODULE_NAME}.detach() first.")
        bank = cls(outputs, noise, **options)
        reference = next(model.parameters(), None)
        if reference is not None:
            bank.to(reference.device)
        bank.train(model.training)
        model.add_module(MODULE_NAME, bank)
        bank._hooks.append(model.register_forward_pre_hook(bank._before_forward, with_kwargs=True))
        bank._hooks.append(model.register_forward_hook(bank._after_forward, always_call=True))
        for name in outputs:
            bank._hooks.append(modules[name].register_forward_hook(Gate(bank, name).after))
        # Kept out of the module tree: the bank is the model's child, not its parent.
        object.__setattr__(bank, "_root", model)
        return bank

    def detach(self) -> None:
        """Take all gates off; the network computes without θ from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._root is not None:
            delattr(self._root, MODULE_NAME)
            object.__setattr__(self, "_root", None)

    def forward(self, x: Any) -> Any:
        """The identity, so that containers which run their children, such as nn.Sequential, can hold a bank."""
        return x

    def posterior(self) -> TruncatedLogNormal:
        """q of all units, layer after layer. Not searched for NaN: a NaN score keeps its unit."""
        return TruncatedLogNormal(self.mu, self.log_sigma, self.log_a, self.log_b, validate=False)

    def kl(self, prices: Tensor | None = None) -> Tensor:
        """Σᵢ priceᵢ·KLᵢ over the units still there, to be added to a mean loss.

        Without prices every unit pays alike, 1/(all units): the price "uniform" of :mod:`bmrs.price`.
        """
        kl = self.posterior().kl()
        if prices is None:
            kl = kl / kl.numel()
        else:
            _checks.same_shape(prices, "prices", kl, "the gates")
            kl = kl * prices.to(kl)
        return torch.where(self.alive, kl, 0.0).sum()

    def draw(self, batch_size: int) -> Tensor:
        """One draw of every gate: [batch_size, units], or [1, units] for noise per batch."""
        rows = batch_size if self.noise == "example" else 1
        self._theta = self.posterior().rsample((rows,)) * self.alive
        return self._theta

    def mean(self) -> Tensor:
        """E[θ] of every unit, 0 for those removed."""
        return self.posterior().mean() * self.alive

    def theta(self, name: str) -> Tensor:
        """The current gates of one layer: [batch_size or 1, units]."""
        if self._theta is not None:
            return self._theta[:, self.layers[name]]
        if self.training:
            raise RuntimeError(
                "no gates have been drawn: call the model the NoiseBank is attached to, or draw(batch_size) first."
            )
        return self.mean()[None, self.layers[name]]

    @torch.no_grad()
    def remove(self, units: Tensor) -> None:
        """Close these gates for good: θ = 0, no KL. ``units`` is a mask over all units."""
        if units.shape != self.alive.shape or units.dtype != torch.bool:
            raise ValueError(
                f"units must be a boolean mask of shape {tuple(self.alive.shape)}, one entry per unit; "
                f"got {units.dtype} of shape {tuple(units.shape)}."
            )
        left = self.alive & ~units
        for name, layer in self.layers.items():
            if not bool(left[layer].any()):
                raise ValueError(f"units would remove all of layer '{name}': at least one unit must stay.")
        self.alive.copy_(left)

    @property
    def sizes(self) -> dict[str, int]:
        """Units per layer, the removed ones included."""
        return {name: layer.stop - layer.start for name, layer in self.layers.items()}

    def units_left(self) -> dict[str, int]:
        return {name: int(self.alive[layer].sum()) for name, layer in self.layers.items()}

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.training:
            self.draw(_batch_size(args, kwargs))
        else:
            self._theta = self.mean()[None]

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        # A training draw stays until the next one: activation checkpointing recomputes with it. An evaluation
        # mean goes, so that whoever calls a part of the network later does not meet a stale one.
        if not self.training:
            self._theta = None

    def train(self, mode: bool = True) -> Self:
        self._theta = None
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        # A draw belongs to one pass and carries its graph: copies and pickles start without.
        return {**self.__dict__, "_theta": None}

    def extra_repr(self) -> str:
        return f"{int(self.alive.sum())} of {self.alive.numel()} units in {len(self.layers)} layers, per {self.noise}"


class Gate:
    """Multiplies a tensor by the gates of one layer, which lie along one of its dimensions."""

    def __init__(self, bank: NoiseBank, name: str, dim: int = 1) -> None:
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
        return self(output)


def _batch_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    for value in _tensors((*args, *kwargs.values())):
        if value.dim():
            return value.shape[0]
    raise ValueError("the model was called without a tensor input, so the gates cannot tell the batch size.")


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from _tensors(tuple(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
