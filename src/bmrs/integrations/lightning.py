"""Lightning: a callback that prunes while ``Trainer.fit`` trains.

The gates are put on before Lightning asks for the optimizers, so that these hold the gates' parameters and checkpoints
hold everything. Units go when the last batch of an epoch is done, before validation: what is measured and what
``ModelCheckpoint`` saves is the smaller network.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from bmrs.integrations.epochs import PruningEpochs
from bmrs.pruner import Pruner
from bmrs.steps import holds_any
from bmrs.structure.capture import ExampleInputs, arguments, forked_rng, mode
from bmrs.structure.record import GATES

_SHARDED = ("fsdp", "deepspeed", "modelparallel")  # in the names of strategies that split parameters


class PruningCallback(PruningEpochs, Callback):
    """Gates on a LightningModule, or on a part of it, that learn while it is fitted; units that go after epochs.

    >>> from lightning.pytorch import Trainer
    >>> callback = PruningCallback(torch.randn(4, 8), every_n_epochs=2, phi_lr=10)
    >>> trainer = Trainer(callbacks=[callback], max_epochs=10, logger=False)  # doctest: +SKIP
    >>> trainer.fit(module, data)                                             # doctest: +SKIP
    >>> print(callback.reports[-1])                                           # doctest: +SKIP
    >>> network = callback.finish()                                           # doctest: +SKIP

    Give it before callbacks that average weights. Checkpoints hold the gates: to load one without fitting, call
    ``callback.attach(module)`` first.
    """

    def __init__(
        self,
        example_inputs: ExampleInputs | None = None,
        *,
        module: str | None = None,
        every_n_epochs: int = 1,
        start_epoch: int = 0,
        stop_epoch: int | None = None,
        **pruner_options: Any,
    ) -> None:
        """``example_inputs``: of ``module``, or of the LightningModule; by default its ``example_input_array``.

        ``module``: name of the part to prune. By default the LightningModule, or, where a single submodule has all
        its parameters, that one: ``training_step`` may then call either. ``every_n_epochs``: prune after so many.
        ``start_epoch``, ``stop_epoch``: only in these epochs, as in ``range``. ``pruner_options``: of
        :class:`bmrs.Pruner`, such as ``phi_lr``, ``strength``, ``price`` or ``criterion``.

        ``callback.pruner`` is the Pruner, ``callback.reports`` says what was removed each time. ``bmrs_units`` and
        ``bmrs_parameters``, what is left, are logged after every epoch, with the name of ``module`` before them.
        """
        super().__init__(every_n_epochs, start_epoch, stop_epoch, pruner_options)
        self.example_inputs, self.module = example_inputs, module
        self._heard = True  # the gates had a gradient from the loss in this fit

    # --- before training ----------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or (self.pruner is not None and self.pruner.finished):
            return
        strategy = type(trainer.strategy).__name__
        if any(name in strategy.lower() for name in _SHARDED):
            raise ValueError(
                f"{strategy} splits parameters, which then cannot shrink: use strategy='ddp', or one device."
            )
        if "MultiProcessing" in type(trainer.strategy.launcher).__name__:
            raise ValueError(
                f"{strategy} trains copies in other processes, and the module here would stay as it was: use "
                f"strategy='ddp', or one device."
            )
        self.last_epoch = -1
        callbacks = _callbacks(trainer)
        for callback in callbacks[: callbacks.index(self)]:
            if hasattr(callback, "_average_model"):
                raise ValueError(
                    f"{type(callback).__name__} copies the network before it has gates: put PruningCallback before it "
                    f"in the list of callbacks."
                )
        if is_overridden("configure_model", pl_module):
            pl_module.configure_model()
        # Lightning does so a moment later; processes that share a GPU's backend cannot agree on anything before.
        pl_module.to(trainer.strategy.root_device)
        self.attach(pl_module)

    def attach(self, pl_module: LightningModule) -> Pruner:
        """Put the gates on now, if they are not yet. ``Trainer.fit`` does so by itself."""
        if self.pruner is not None and any(part is self.pruner.model for part in pl_module.modules()):
            return self.pruner
        target, inputs = self._target(pl_module)
        self.pruner = Pruner(target, inputs, **self.pruner_options)
        return self.pruner

    def _target(self, pl_module: LightningModule) -> tuple[nn.Module, ExampleInputs]:
        """The network that gets gates, and what it is called with."""
        whole = is_overridden("forward", pl_module)
        if self.module is not None:
            try:
                target = pl_module.get_submodule(self.module)
            except AttributeError:
                names = ", ".join(name for name, _ in pl_module.named_children())
                raise ValueError(
                    f"module='{self.module}' is no submodule of the LightningModule: {names} are."
                ) from None
            if self.example_inputs is not None:
                return target, _on_device(self.example_inputs, target)
            inputs = _reaching(target, pl_module, self._examples(pl_module))
            if inputs is None:
                raise ValueError(
                    f"'{self.module}' is not called when the LightningModule is: give example_inputs=..., what it is "
                    f"called with."
                )
            return target, inputs
        examples = self._examples(pl_module)
        only = _only_part(pl_module)
        if only is not None:
            reaching = _reaching(only, pl_module, examples) if whole else examples
            if reaching is not None:
                return only, reaching
        if not whole:
            raise ValueError("the LightningModule has no forward: name the part to prune with module='...'.")
        return pl_module, examples

    def _examples(self, pl_module: LightningModule) -> ExampleInputs:
        examples = pl_module.example_input_array if self.example_inputs is None else self.example_inputs
        if examples is None:
            raise ValueError(
                "example_inputs are needed to see what can be removed: give PruningCallback(example_inputs), or set "
                "example_input_array in the LightningModule."
            )
        return _on_device(examples, pl_module)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # An average is loaded next, and is to take the shapes of the network.
        if self.active:
            self.attached.follow(*_averages(trainer))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.active:
            return
        pruner = self.attached
        own = [p for name, p in pruner.model.named_parameters() if not name.startswith(GATES)]
        followed = [optimizer for optimizer in trainer.optimizers if holds_any(optimizer, own)]
        if not followed:
            raise ValueError("no optimizer of configure_optimizers holds parameters of the network that has the gates.")
        present = [*followed, *_averages(trainer)]
        pruner.forget(*(one for one in pruner.followed() if all(one is not other for other in present)))
        pruner.follow(*present)
        self._heard = False
        self._listen(pruner)

    # --- training -----------------------------------------------------------------------------------------------------

    def _listen(self, pruner: Pruner) -> None:
        """For the first gradient from the loss: gates without would all close under the KL alone."""

        def heard(_: Tensor) -> None:
            self._heard = True
            hook.remove()

        self._steps = pruner.bank.steps
        hook = pruner.bank.mu.register_post_accumulate_grad_hook(heard)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.active:
            return
        if not self._heard and self.attached.bank.steps > self._steps:
            raise RuntimeError(
                f"training_step does not use the {type(self.attached.model).__name__} that has the gates: name the "
                f"part it uses with PruningCallback(module='...')."
            )
        if trainer.is_last_batch:
            self.prune_after(trainer.current_epoch)
            part = "" if self.module is None else f"{self.module}."
            left = {part + name: float(number) for name, number in self.left().items()}
            pl_module.log_dict(left, on_step=False, on_epoch=True, batch_size=1, sync_dist=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.prune_after(trainer.current_epoch)  # where an epoch ended early

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if "no gates have been drawn" in str(exception):
            exception.add_note(
                "PruningCallback: training_step must call self(...), or the part named with "
                "PruningCallback(module='...'), not parts of it one by one."
            )

    # --- resuming -----------------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        return self._generate_state_key(module=self.module)  # there may be one for each of several parts

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_epoch = state_dict["last_epoch"]


def _callbacks(trainer: Trainer) -> list[Callback]:
    return trainer.callbacks  # type: ignore[attr-defined, no-any-return]


def _averages(trainer: Trainer) -> list[nn.Module]:
    found = [getattr(callback, "_average_model", None) for callback in _callbacks(trainer)]
    return [average for average in found if average is not None]


def _only_part(pl_module: LightningModule) -> nn.Module | None:
    """The one submodule that has all the parameters, if there is one."""
    if any(True for _ in pl_module.parameters(recurse=False)):
        return None
    parts = [part for part in pl_module.children() if any(True for _ in part.parameters())]
    return parts[0] if len(parts) == 1 else None


def _reaching(part: nn.Module, whole: nn.Module, examples: ExampleInputs) -> ExampleInputs | None:
    """What a part of a network is called with when the network is; None if it is not called."""
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args, kwargs))

    hook = part.register_forward_pre_hook(look, with_kwargs=True)
    args, kwargs = arguments(examples)
    try:
        with torch.no_grad(), forked_rng(whole), mode(whole, training=False):
            whole(*args, **kwargs)
    finally:
        hook.remove()
    if not seen:
        return None
    args, kwargs = seen[0]
    if not kwargs:
        return args
    return {**dict(zip(inspect.signature(part.forward).parameters, args, strict=False)), **kwargs}


def _on_device(examples: ExampleInputs, model: nn.Module) -> ExampleInputs:
    device = next(model.parameters(), torch.empty(0)).device
    examples = dict(examples) if isinstance(examples, Mapping) else examples
    moved: ExampleInputs = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, examples)
    return moved
