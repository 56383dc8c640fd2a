"""A run of one's own training loop, noted as it goes, for a page of its own."""

from collections.abc import Mapping
from typing import Any

from bmrs import cost
from bmrs.criteria import BMRS_N
from bmrs.pruner import Pruner
from bmrs.report.single import history
from bmrs.reporting import PruneReport
from bmrs.structure.capture import ExampleInputs
from bmrs.structure.record import GATES
from bmrs.study.provenance import provenance
from bmrs.study.training import GateLog

_NOTED = ("mean", "snr", "delta_f", "removed_at")  # of a GateLog, one entry per unit


class Recorder:
    """Notes what a Pruner's gates said of every unit, and when it went.

    Make it right after the Pruner, and prune through it:

    >>> import torch
    >>> from torch import nn
    >>> import bmrs, bmrs.report
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> pruner = bmrs.Pruner(model, torch.randn(4, 8), optimizer)
    >>> recorder = bmrs.report.Recorder(pruner, torch.randn(1, 8), network="my network", data="my data")
    >>> for epoch in range(2):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(4, 8)).sum().backward()
    ...     optimizer.step()
    ...     report = recorder.prune()                       # instead of pruner.prune()
    >>> model = pruner.finish()
    >>> page = bmrs.report.write([recorder.result(accuracy=0.97, whole_accuracy=0.98)], "run.html")  # doctest: +SKIP
    """

    def __init__(
        self,
        pruner: Pruner,
        example_inputs: ExampleInputs | None = None,
        *,
        network: str = "network",
        data: str = "data",
        **settings: Any,
    ) -> None:
        """``example_inputs``: one example, to count multiply-adds with. ``network``, ``data``: their names on the page.

        ``settings``: what else to show of how it was trained, such as ``epochs=40, batch=32, price="uniform"``.
        """
        self.pruner = pruner
        self.example_inputs = example_inputs
        self.names = {"network": network, "data": data}
        self.settings = settings
        self.log = GateLog(pruner)
        self.epoch = 0
        self.before = self._cost()

    def prune(self, fraction: float | None = None, *, undoable: bool | None = None) -> PruneReport:
        """``Pruner.prune``, with a note of what the gates were before and which units went."""
        self.log.note(self.pruner)
        report = self.pruner.prune(fraction, undoable=undoable)
        self.epoch += 1
        self.log.note_removed(self.pruner, self.epoch)
        return report

    def result(self, accuracy: float | None = None, whole_accuracy: float | None = None) -> dict[str, Any]:
        """What :func:`bmrs.report.write` shows, and json.dump writes.

        ``accuracy``: of the network that is left, on the test set, as a share of 1. ``whole_accuracy``: of the same
        network trained without pruning. What is not given is shown as not known.
        """
        for name, value in (("accuracy", accuracy), ("whole_accuracy", whole_accuracy)):
            if value is not None and not 0.0 <= value <= 1.0:
                raise ValueError(f"{name} must be a share from 0 to 1; got {value}: divide percentages by 100.")
        criterion = self.pruner.criterion
        there = self.log.removed_at == 0
        return {
            "before": {"accuracy": whole_accuracy, **self.before},
            "after": {"accuracy": accuracy, **self._cost()},
            "units": {
                layer: {"before": own.stop - own.start, "after": int(there[own].sum())}
                for layer, own in self.log.layers.items()
            },
            # ΔF is that of BMRS_N whoever decides, and only its tolerance belongs to it.
            "gates": self.log.to_json(criterion.tolerance if isinstance(criterion, BMRS_N) else None),
            "history": history(self.log.removed_at.tolist(), self.epoch),
            "provenance": provenance(
                **self.names, criterion=repr(criterion), recipe=dict(self.settings), seeds=1,
                device=str(self.log.mean.device),
            ),
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """What was noted so far, to go on from after a stop: beside ``pruner.state_dict()``."""
        log = self.log
        return {"epoch": self.epoch, **{name: getattr(log, name).clone() for name in _NOTED}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there. The Pruner has its own state."""
        self.epoch = state["epoch"]
        for name in _NOTED:
            own = getattr(self.log, name)
            if state[name].shape != own.shape:
                raise ValueError(
                    f"state has notes of {len(state[name])} units, the network has {len(own)}: build it as it was."
                )
            own.copy_(state[name])

    def _cost(self) -> dict[str, int | None]:
        """Of the network as it is now, its gates not counted."""
        model = self.pruner.model
        return {
            "parameters": sum(p.numel() for name, p in model.named_parameters() if not name.startswith(GATES)),
            "multiply_adds": None if self.example_inputs is None else cost.multiply_adds(model, self.example_inputs),
        }
