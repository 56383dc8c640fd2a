"""Hugging Face Trainer: a callback that prunes while it trains.

The gates are put on before the Trainer is made, so that its optimizer holds their parameters and its checkpoints hold
everything. Units go after the last step of an epoch, before the Trainer evaluates and saves.
"""

import gc
import math
from typing import Any

from torch import nn
from transformers.trainer_callback import CallbackHandler, TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from bmrs.checkpoint import unwrapped
from bmrs.integrations.epochs import PruningEpochs
from bmrs.pruner import Pruner
from bmrs.structure.capture import ExampleInputs


class PruningCallback(PruningEpochs, TrainerCallback):
    """Gates on a model that learn while a Trainer trains it; units that go after epochs.

    >>> callback = PruningCallback(model, {"input_ids": ids}, phi_lr=100)    # doctest: +SKIP
    >>> trainer = transformers.Trainer(model, args, callbacks=[callback])    # doctest: +SKIP
    >>> trainer.train()                                                      # doctest: +SKIP
    >>> print(callback.reports[-1])                                          # doctest: +SKIP
    >>> model = callback.finish()                                            # doctest: +SKIP

    To resume, build the model and the callback as they were and call ``trainer.train(resume_from_checkpoint=True)``.
    The Trainer's checkpoints hold the gates; save the finished model with ``save_pretrained`` of
    :mod:`bmrs.integrations.transformers` or with :func:`bmrs.save`.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: ExampleInputs,
        *,
        every_n_epochs: int = 1,
        start_epoch: int = 0,
        stop_epoch: int | None = None,
        **pruner_options: Any,
    ) -> None:
        """Puts the gates on at once: make the Trainer afterwards.

        ``model``: the one the Trainer gets. ``example_inputs``: what it is called with, such as
        ``{"input_ids": ..., "attention_mask": ...}``. ``every_n_epochs``: prune after so many. ``start_epoch``,
        ``stop_epoch``: only in these epochs, as in ``range``. ``pruner_options``: of :class:`bmrs.Pruner`.

        ``callback.pruner`` is the Pruner, ``callback.reports`` says what was removed each time. ``bmrs_units`` and
        ``bmrs_parameters``, what is left, join every entry of the Trainer's log: of ``trainer.state.log_history``, of
        what it prints, and of what it reports to TensorBoard, W&B and the like (``report_to``).
        """
        super().__init__(every_n_epochs, start_epoch, stop_epoch, pruner_options)
        self.pruner = Pruner(model, example_inputs, **self.pruner_options)

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        self._come_first()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if not self.active:
            return
        self._come_first()  # where it was added to a Trainer that was there already
        if unwrapped(given["model"]) is not self.attached.model:
            raise ValueError("model is not the one the Trainer trains: give PruningCallback and the Trainer the same.")
        self.last_epoch = -1
        self.attached.follow(given["optimizer"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        # Here and not when the epoch has ended: a checkpoint of its last step is saved in between.
        if state.epoch is not None and float(state.epoch).is_integer():
            self.prune_after(int(state.epoch) - 1)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        self.prune_after(math.ceil(state.epoch or 0) - 1)  # where an epoch ended early

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **given: Any
    ) -> None:
        if self.active and logs is not None:
            logs.update(self.left())
            if state.log_history:
                state.log_history[-1].update(self.left())

    def _come_first(self) -> None:
        """Before the reporters, which the Trainer puts ahead of all callbacks it is given: they pass on what is in an
        entry of the log when their turn comes. A Trainer does not tell its callbacks where it holds them.
        """
        for one in gc.get_objects():
            if issubclass(type(one), CallbackHandler) and any(callback is self for callback in one.callbacks):
                one.callbacks.sort(key=lambda callback: callback is not self)
