"""What happens to the gates when an optimizer steps: their share of the KL, and a learning rate of their own.

A hook on the optimizer adds the KL's gradient once per step, however many backward passes there were and after they
were clipped. The gates' parameters φ have a group of their own: for good where they come last to an optimizer without a
scheduler, and otherwise, where the number of groups is known to others already, for the length of each step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Gradient = Callable[[], Sequence[Tensor]]


def raw(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer itself, inside what Accelerate or Lightning wrap it in."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer, or several; got {type(optimizer).__name__}.")
    return optimizer


def holds_any(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> bool:
    wanted = {id(p) for p in parameters}
    return any(id(p) in wanted for group in optimizer.param_groups for p in group["params"])


def takes_vectors(optimizer: torch.optim.Optimizer) -> bool:
    """Muon, torch's or another, orthogonalises matrices and fails on φ: that trains in the optimizer beside it."""
    return all(kind.__name__ != "Muon" for kind in type(optimizer).__mro__)


class GateSteps:
    """φ in one optimizer, until :meth:`end`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        phi: Sequence[nn.Parameter],
        rate: float,
        gradient: Gradient | None,
        after: Callable[[], None],
    ) -> None:
        """``rate``: φ's learning rate, times that of the weights. ``gradient``: of the KL; None: the loss has it."""
        self.optimizer, self.phi, self.rate, self.gradient, self.after = optimizer, list(phi), rate, gradient, after
        groups = optimizer.param_groups
        own = {id(p) for p in phi}
        # The weights' learning rate is that of the first group that has any. Groups are known by number: loading
        # an optimizer's state makes new ones.
        self._weights = next(n for n, group in enumerate(groups) if any(id(p) not in own for p in group["params"]))
        home = next((n for n, g in enumerate(groups) if any(id(p) in own for p in g["params"])), None)
        self._passing: dict[str, Any] | None = None
        if home is None:
            home = self._join()
        self._home = home
        self._alone = all(id(p) in own for p in groups[home]["params"])
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(check_state),
        ]

    def _join(self) -> int:
        """Put φ into the optimizer; returns the number of its group."""
        groups = self.optimizer.param_groups
        weights = groups[self._weights]
        if isinstance(self.optimizer, torch.optim.Adagrad):
            # Before torch 2.13 it makes all state when it is made itself, and none for parameters that come later.
            same = {key: weights[key] for key in ("initial_accumulator_value", "foreach", "fused")}
            self.optimizer.state.update(torch.optim.Adagrad(self.phi, **same).state)
        if "initial_lr" in weights:  # a scheduler has counted the groups
            weights["params"].extend(self.phi)
            if "param_names" in weights:
                weights["param_names"].extend(self._names())
            return self._weights
        options = {key: value for key, value in weights.items() if key not in ("params", "param_names")}
        params: list[Any] = list(self.phi)
        if "param_names" in weights:
            params = list(zip(self._names(), self.phi, strict=True))
        self.optimizer.add_param_group(self._as_own({**options, "params": params}))
        return len(groups) - 1

    @staticmethod
    def _names() -> list[str]:
        return ["bmrs_noise.mu", "bmrs_noise.log_sigma"]

    def _as_own(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "lr": self.rate * group["lr"], "weight_decay": 0.0}

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        groups = optimizer.param_groups
        self._return()  # after a step that failed
        if self._alone:
            # Whatever a scheduler made of it, φ's rate is a multiple of the weights'.
            groups[self._home]["lr"] = self.rate * groups[self._weights]["lr"]
        else:
            home = groups[self._home]
            self._passing = self._as_own({**home, "params": self.phi})
            self._places = [next(n for n, p in enumerate(home["params"]) if p is own) for own in self.phi]
            home["params"] = [p for p in home["params"] if all(p is not own for own in self.phi)]
            groups.append(self._passing)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._add_gradient()
            return None

        def and_kl(*arguments: Any, **options: Any) -> Any:
            result = closure(*arguments, **options)
            self._add_gradient()
            return result

        return (args[0], and_kl, *args[2:]) if len(args) > 1 else args, {
            **kwargs,
            **({} if len(args) > 1 else {"closure": and_kl}),
        }

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._return()
        self.after()

    def _return(self) -> None:
        """φ back in the group it shares."""
        if self._passing is None:
            return
        groups = self.optimizer.param_groups
        groups[:] = [group for group in groups if group is not self._passing]
        params = groups[self._home]["params"]
        for place, own in sorted(zip(self._places, self.phi, strict=True), key=lambda pair: pair[0]):
            params.insert(place, own)
        self._passing = None

    @torch.no_grad()
    def _add_gradient(self) -> None:
        if self.gradient is None or not all(p.requires_grad for p in self.phi):
            return
        # Fused optimizers undo the scaling of a GradScaler themselves, and see scaled gradients until then.
        scale = getattr(self.optimizer, "grad_scale", None)
        down = not self.optimizer.param_groups[self._home].get("maximize")
        for own, gradient in zip(self.phi, self.gradient(), strict=True):
            gradient = gradient.to(own) if down else -gradient.to(own)
            if scale is not None:
                gradient = gradient * scale.to(own)
            own.grad = gradient if own.grad is None else own.grad.add_(gradient)

    def end(self) -> None:
        """φ and its state leave the optimizer."""
        for hook in self._hooks:
            hook.remove()
        self._return()
        groups = self.optimizer.param_groups
        home = groups[self._home]
        stays = [n for n, p in enumerate(home["params"]) if all(p is not own for own in self.phi)]
        for key in ("params", "param_names"):
            if key in home:
                home[key] = [home[key][n] for n in stays]
        if not home["params"] and "initial_lr" not in home:  # else a scheduler counts on it: an empty group is no harm
            groups.remove(home)
        for own in self.phi:
            self.optimizer.state.pop(own, None)


def check_state(optimizer: torch.optim.Optimizer) -> None:
    """Loading an optimizer's state does not look at shapes: it would fail, or not, many steps later."""
    for parameter, state in optimizer.state.items():
        check_fits(state, parameter.shape)


def check_fits(state: Mapping[str, Any], shape: Sequence[int]) -> None:
    """That an optimizer's state is that of a parameter of this shape."""
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.dim() != len(shape):
            continue
        # Factored states, as Adafactor's, have size 1 along some dimensions.
        if any(size not in (1, there) for size, there in zip(value.shape, shape, strict=True)):
            raise ValueError(
                f"optimizer state '{key}' of shape {tuple(value.shape)} does not fit a parameter of shape "
                f"{tuple(shape)}: load the model of the same moment first, then its optimizer."
            )
