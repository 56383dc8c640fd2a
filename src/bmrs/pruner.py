"""The two lines in a training loop: gates that learn while the network trains, units that go when evidence says so."""

import copy
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bmrs import _checks, parallel
from bmrs.checkpoint import unwrapped
from bmrs.criteria import BMRS_N, Criterion, Units
from bmrs.decision import chosen_by, norms, spare, spare_widths, uncross
from bmrs.draws import kl_gradient
from bmrs.evidence import spike
from bmrs.noise import Noise, NoiseBank
from bmrs.price import KINDS, Price, of_structures
from bmrs.reporting import PruneReport, Range, StructureReport
from bmrs.states import VERSION, check_state
from bmrs.steps import GateSteps, holds_any, raw, takes_vectors
from bmrs.structure import Structure, Structures, remove
from bmrs.structure.branches import INDICES
from bmrs.structure.capture import ExampleInputs, named_tensors
from bmrs.structure.record import GATES, removed
from bmrs.structure.removal import become

log = logging.getLogger("bmrs")

# Where structures cross, what stays for one's width may go with another's unit: looked at again so often at most.
_ROUNDS = 8


class Ranked(NamedTuple):
    """A unit's place in the order of worth."""

    structure: str
    unit: int
    worth: float


class Pruner:
    """Gates on a network, their training, and the removal of what is not worth keeping.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> pruner = Pruner(model, torch.randn(4, 8), optimizer)
    >>> for epoch in range(2):
    ...     optimizer.zero_grad()
    ...     model(torch.randn(4, 8)).sum().backward()
    ...     optimizer.step()                                # the loop as it was
    ...     report = pruner.prune()                         # evidence says what goes
    >>> model = pruner.finish()                             # gates folded in: an ordinary nn.Module
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: ExampleInputs,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        *,
        num_examples: int | None = None,
        criterion: Criterion | None = None,
        price: Price = "uniform",
        strength: float = 1.0,
        noise: Noise = "example",
        structures: Iterable[Structure | str] | None = None,
        phi_lr: float = 10.0,
        warmup: int = 0,
        round_to: int = 1,
        add_kl: bool = True,
        log_sigma: float = -5.0,
        seed: int | None = None,
    ) -> None:
        """Put gates on a network and tell its optimizers.

        ``model``: may be wrapped by DistributedDataParallel or torch.compile. ``example_inputs``: a tensor, a tuple
        (positional) or a mapping (keyword). ``optimizer``: one or several; those made later join with :meth:`follow`.
        ``num_examples``: in the training set, for the price "elbo". ``criterion``: what decides, BMRS_N() by default.
        ``price``: each unit's share of the KL, see :mod:`bmrs.price`; or a function of a structure that returns one
        number, or one per unit. ``strength``: a factor on every price. ``noise``: one draw per "example" or per
        "batch". ``structures``: those that get gates, or their names; default all of ``bmrs.structures(model, ...)``.
        ``phi_lr``: learning rate of the gates, times that of the weights. ``warmup``: optimizer steps over which the KL
        grows to its full weight. ``round_to``: keep the best of the units that are to go where else a layer's width
        would be no multiple of this number, as hardware wants 8; ``pruner.round_to`` can be set at any time.
        ``add_kl=False``: the loop adds ``pruner.kl()`` to its loss itself. ``log_sigma``:
        where the gates begin; higher for short fine-tuning. ``seed``: of the gates' draws.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}.")
        self.model = unwrapped(model)
        _checks.in_one_piece(self.model, "model", "make the Pruner first, and shard with bmrs.sharded.Sharded")
        optimizers = _several(optimizer)
        self.criterion = BMRS_N() if criterion is None else criterion
        if not isinstance(self.criterion, Criterion):
            raise TypeError(f"criterion must be a bmrs criterion such as BMRS_N(); got {type(criterion).__name__}.")
        self.phi_lr = _checks.number(phi_lr, "phi_lr", 0.0, math.inf, "a factor on the weights' learning rate")
        self.warmup = _checks.whole(warmup, "warmup", 0, "a number of optimizer steps")
        self.round_to = _checks.whole(round_to, "round_to", 1, "what widths are multiples of")
        if seed is not None:
            seed = _checks.whole(seed, "seed", -math.inf, "of the gates' draws")
        strength = _checks.number(strength, "strength", 0.0, math.inf, "a factor on every price")
        log_sigma = _checks.number(log_sigma, "log_sigma", -20.0, 5.0, "where every gate's log σ begins")
        if not callable(price) and price not in KINDS:
            raise ValueError(f"unknown price '{price}': choose one of {', '.join(KINDS)}, or give a function.")
        if price == "elbo" and num_examples is None:
            raise ValueError("price 'elbo' needs num_examples, the number of training examples: give num_examples=...")
        if num_examples is not None:
            num_examples = _checks.whole(num_examples, "num_examples", 0, "those of the training set")
        for one in optimizers:
            self._check_optimizer(one)
        if optimizers and not any(map(takes_vectors, optimizers)):
            raise ValueError("optimizer trains matrices alone: give that of the other parameters too, for the gates.")
        parallel.wrappers(self.model)  # refuses those that cannot be made anew
        self.add_kl = bool(add_kl)
        self.structures, chosen = _chosen(self.model, example_inputs, structures)
        device = next(self.model.parameters()).device
        seed = parallel.shared_number(torch.initial_seed() if seed is None else seed, self.model, device)
        self.bank = NoiseBank.attach(self.model, chosen, noise, log_sigma=log_sigma, seed=seed)
        self._start = log_sigma
        self._all_gated = [s for s in chosen if s.name in self.bank.layers]
        gated = {variable for structure in self._all_gated for variable in structure.variables}
        everywhere = self.structures.findings.places.values()
        self._crossing = any(len(label & gated) > 1 for labels in everywhere for label in labels)
        try:
            self._prices = of_structures(price, self._gated, strength, num_examples).to(device)
        except Exception:
            self._take_off()
            raise
        self._paid: tuple[Sequence[int], Tensor] = [], self._prices  # of the units that are left
        self._steps: GateSteps | None = None
        self._copies: list[nn.Module] = []
        self._snapshot: dict[str, Any] | None = None
        self.finished = False
        self._remember()
        self.follow(*optimizers)
        parallel.rewrap(self.model)
        log.info("gates on %d units of %d structures", len(self.bank.mu), len(self._gated))

    @property
    def _gated(self) -> list[Structure]:
        """Those that did not go with a block."""
        return [structure for structure in self._all_gated if structure.name in self.bank.layers]

    # --- what trains along --------------------------------------------------------------------------------------------

    def follow(self, *others: Any) -> None:
        """Tell of what is to shrink along: optimizers, and copies of the network made after this Pruner (an EMA).
        DistributedDataParallel is found by itself, and torch.compile needs no telling.
        """
        for other in others:
            if isinstance(getattr(other, "optimizer", other), torch.optim.Optimizer):
                self._follow_optimizer(raw(other))
            elif not isinstance(other, nn.Module):
                raise TypeError(f"only optimizers and networks can be followed; got {type(other).__name__}.")
            elif all(module is not self.model for module in other.modules()) and all(
                other is not known for known in self._copies
            ):
                self._check_copy(other)
                self._copies.append(other)

    def forget(self, *others: Any) -> None:
        """Follow these optimizers and copies no longer, as when another training begins with new ones."""
        for other in others:
            gone = raw(other) if isinstance(getattr(other, "optimizer", other), torch.optim.Optimizer) else other
            if self._steps is not None and self._steps.optimizer is gone:
                self._steps.end()
                self._steps = None
            self.bank.optimizers[:] = [known for known in self.bank.optimizers if known is not gone]
            self._copies = [known for known in self._copies if known is not gone]

    def followed(self) -> list[Any]:
        """The optimizers and copies that shrink along."""
        return [*self.bank.optimizers, *self._copies]

    def _follow_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._check_optimizer(optimizer)
        if any(optimizer is known for known in self.bank.optimizers):
            return
        self.bank.optimizers.append(optimizer)
        phi = [self.bank.mu, self.bank.log_sigma]
        if holds_any(optimizer, phi) or (self._steps is None and takes_vectors(optimizer)):
            if self._steps is not None:
                self._steps.end()
            gradient = self._kl_gradient if self.add_kl else None
            self._steps = GateSteps(optimizer, phi, self.phi_lr, gradient, self._after_step)

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        own = [p for name, p in self.model.named_parameters() if not name.startswith(GATES)]
        if not holds_any(optimizer, own):
            raise ValueError(
                "optimizer holds none of the model's parameters: build it from model.parameters(), of this model."
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("optimizer must keep its state per parameter, which LBFGS does not: use another one.")

    def _check_copy(self, copied: nn.Module) -> None:
        network = next((module for module in copied.modules() if GATES in module._modules), None)
        if network is None or _bank(network)._units != self.bank._units:
            raise ValueError(
                "a copy of the network must have its gates to shrink with it: make the copy (EMA) after the Pruner."
            )
        _bank(network)._owner = self.bank._owner
        if removed(network) != removed(self.model):  # units went, or a state was loaded, since it was made
            become(network, removed(self.model))
            _bank(network).place_anew()

    def _copied(self) -> list[nn.Module]:
        """The networks inside the copies."""
        return [next(m for m in copied.modules() if GATES in m._modules) for copied in self._copies]

    def _after_step(self) -> None:
        self.bank._steps.add_(1)

    # --- the KL -------------------------------------------------------------------------------------------------------

    @property
    def prices(self) -> Tensor:
        """Of the units still there: each one's share of the KL, set once for the whole network."""
        if self._paid[0] is not self.bank._kept or self._paid[1].device != self.bank.mu.device:
            kept = torch.tensor(self.bank._kept, device=self._prices.device)
            self._paid = self.bank._kept, self._prices[kept].to(self.bank.mu.device)
        return self._paid[1]

    def kl(self) -> Tensor:
        """Σᵢ priceᵢ·KLᵢ, with the weight the warm-up gives it now. Its gradient is added at every optimizer step; with
        ``add_kl=False`` add this to the loss.
        """
        return self._weight() * self.bank.kl(self.prices)

    def _weight(self) -> Tensor | float:
        """The share of the KL's weight that the warm-up gives it now."""
        return ((self.bank._steps + 1) / self.warmup).clamp(max=1.0) if self.warmup else 1.0

    def _kl_gradient(self) -> Sequence[Tensor]:
        """Of :meth:`kl`."""
        bank = self.bank
        if hasattr(bank.mu, "full_tensor"):  # parted among processes
            with torch.enable_grad():
                return torch.autograd.grad(self.kl(), [bank.mu, bank.log_sigma])
        with torch.no_grad():  # in closed form
            weights = self.prices * bank.alive
            weights = weights * self._weight() if self.warmup else weights
            return kl_gradient(bank.mu, bank.log_sigma, weights, bank.log_a, bank.log_b)

    # --- what units are worth -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def scores(self) -> dict[str, Tensor]:
        """What each unit is worth to the criterion, by structure: for BMRS -ΔF, in nats."""
        worth = self._worth()
        return {name: worth[layer] for name, layer in self.bank.layers.items()}

    def rank(self) -> list[Ranked]:
        """All units, the least worth first."""
        worth = self._worth()
        where = [(name, unit) for name, layer in self.bank.layers.items() for unit in range(layer.stop - layer.start)]
        values = worth.tolist()
        order = self.criterion.rank(worth).tolist()
        return [Ranked(where[index][0], where[index][1], values[index]) for index in order]

    @torch.no_grad()
    def _worth(self, in_one_piece: bool = False) -> Tensor:
        needs = self.criterion.needs
        if in_one_piece or {"weight_norm", "gradient_norm"} & set(needs) or not _checks.in_shards(self.model):
            self._check_unchanged()
        weight = norms(self.bank, self.model, self._gated) if "weight_norm" in needs else None
        gradient = norms(self.bank, self.model, self._gated, gradients=True) if "gradient_norm" in needs else None
        return self.criterion.scores(Units(self.bank.posterior(), weight, gradient))

    # --- removal ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def prune(self, fraction: float | None = None, *, undoable: bool | None = None) -> PruneReport:
        """Remove what the criterion rejects, from the network, its optimizers and its copies; returns what was done.

        ``fraction``: remove this share of all units there are, the least worth first, whatever the criterion's own
        boundary. ``undoable``: keep a copy of everything for :meth:`undo`; by default with a fraction only.
        """
        worth = self._worth(in_one_piece=True)
        chosen = chosen_by(self.criterion, worth, fraction)
        if not self._sound():
            warnings.warn(
                "the network has parameters that are NaN or infinite, so nothing is removed: go back to a checkpoint "
                "from before the loss was, and lower the learning rate.",
                stacklevel=2,
            )
            chosen.zero_()
        elif fraction is None and self._untouched() and ("posterior" in self.criterion.needs or not bool(chosen.any())):
            warnings.warn(
                "prune() was called before any optimizer step has moved the gates, so nothing is removed: call it "
                "after training, with the optimizer that was given to the Pruner.",
                stacklevel=2,
            )
            chosen.zero_()
        spared, for_width = self._settle(chosen, worth)
        chosen = parallel.agreed(chosen, self.model)
        going = {s: chosen[self.bank.layers[s.name]].nonzero().flatten().tolist() for s in self._gated}
        made = self._report(chosen, spared, for_width & ~chosen)
        if any(going.values()):
            if undoable or (undoable is None and fraction is not None):
                self._snapshot = copy.deepcopy(self.state_dict())
            with torch.autocast(self.bank.mu.device.type, enabled=False):
                remove(self.model, going, self.bank.optimizers)
            self._shrink_copies()
            self._changed()
        return self._counted(made)

    def _settle(self, chosen: Tensor, worth: Tensor) -> tuple[set[str], Tensor]:
        """Bring a choice to one that can be: every structure keeps a unit, and a width that is a multiple of
        ``round_to``. Changes the choice; returns the structures that were spared, and a mask of what stays for a width.
        """
        spared, for_width = spare(chosen, worth, self.bank.layers), torch.zeros_like(chosen)
        for _ in range(_ROUNDS if self._crossing else 1):
            before = chosen.clone()
            if self.round_to > 1:
                for_width |= spare_widths(chosen, worth, self._gated, self.bank.layers, self.round_to)
            if self._crossing:
                spared |= uncross(chosen, worth, self._gated, self.bank.layers)
            if torch.equal(chosen, before):
                break
        return spared, for_width

    def undo(self) -> None:
        """Back to the moment before the last undoable :meth:`prune`: weights, gates, optimizers and copies."""
        if self._snapshot is None:
            raise ValueError("there is nothing to undo: call prune(fraction=...), or prune(undoable=True), first.")
        self.load_state_dict(self._snapshot)
        self._snapshot = None

    def folded(self) -> AbstractContextManager[None]:
        """While this lasts the network, in evaluation, has E[θ] in its weights, and costs what it does without gates:
        see :meth:`NoiseBank.folded`.
        """
        return self.bank.folded()

    def finish(self, fine_tune: Callable[[nn.Module], Any] | None = None) -> nn.Module:
        """Multiply the gates' means into the weights and take the gates off; returns the network, smaller and plain.

        ``fine_tune``: a function that trains the plain network on, called with it in the end.
        """
        if not self.finished:
            self._check_unchanged()
            if self._steps is not None:
                self._steps.end()
            for network in (*self._copied(), self.model):
                _bank(network).fold()
            self._take_off()
            self.finished = True
            self._changed()
        if fine_tune is not None:
            fine_tune(self.model)
        return self.model

    def _take_off(self) -> None:
        if GATES in self.model._modules:
            self.bank.detach()
        self.structures.followers.remove(self.bank)

    def _shrink_copies(self) -> None:
        for network in self._copied():
            become(network, removed(self.model))
            _bank(network).place_anew()

    def _changed(self) -> None:
        """After the network changed: whatever took stock of it must do so again."""
        torch.compiler.reset()
        torch.clear_autocast_cache()  # which has weights in 16 bits until its context ends
        parallel.rewrap(self.model)
        self._remember()

    def _remember(self) -> None:
        """Every tensor, with the shape it had when the network was whole."""
        whole = removed(self.model).shapes
        self._known = {
            name: (tensor, tuple(whole.get(name, tensor.shape)))
            for name, tensor in named_tensors(self.model)
            if not name.endswith(INDICES)  # which comes and goes with the rows of a branch
        }

    def _check_unchanged(self, in_one_piece: bool = True) -> None:
        """That nobody else changed the network; and that no process holds but a share of it."""
        if self.finished:
            raise ValueError("the Pruner has finished and its gates are gone: make a new one to prune on.")
        self.bank.check_unfolded()
        if in_one_piece:
            _checks.in_one_piece(
                self.model,
                "the network",
                "shard it with bmrs.sharded.Sharded, use its own prune(), finish(), save() and load(), and the "
                "Pruner's inside its gathered()",
            )
        now, record = dict(named_tensors(self.model)), removed(self.model)
        for name, (tensor, whole) in self._known.items():
            what = ""
            shape = record.reduced(name, whole)
            if name not in now:
                what = "" if record.gone(name) else f"'{name}' is gone"
            elif isinstance(tensor, nn.Parameter) and now[name] is not tensor:
                what = f"'{name}' is another parameter"
            elif tuple(now[name].shape) != shape:
                what = f"'{name}' has shape {tuple(now[name].shape)}, no longer {shape}"
            if what:
                raise RuntimeError(
                    f"the model was changed behind the Pruner's back ({what}), so nothing is done: undo that, or take "
                    f"the gates off with model.{GATES}.detach() and make a new Pruner."
                )

    def _sound(self) -> bool:
        return all(bool(torch.isfinite(p).all()) for name, p in self.model.named_parameters() if GATES not in name)

    def _untouched(self) -> bool:
        return bool((self.bank.mu == 0).all()) and bool((self.bank.log_sigma == self._start).all())

    def _parameters(self) -> int:
        return sum(p.numel() for name, p in self.model.named_parameters() if not name.startswith(GATES))

    def _report(self, chosen: Tensor, spared: set[str], for_width: Tensor) -> PruneReport:
        delta_f = spike(self.bank.posterior())
        rows = []
        for structure in self._gated:
            layer = self.bank.layers[structure.name]
            out, values = chosen[layer], delta_f[layer]
            rows.append(
                StructureReport(
                    structure.name,
                    structure.kind,
                    structure.units,
                    int(out.sum()),
                    structure.name in spared and not bool(out.all()),
                    _range(values[out]),
                    _range(values[~out]),
                    int(for_width[layer].sum()),
                )
            )
        now = self._parameters()
        return PruneReport(tuple(rows), now, now, repr(self.criterion), self.round_to)

    def _counted(self, made: PruneReport) -> PruneReport:
        made = replace(made, parameters=self._parameters())
        log.info("%s", made)
        return made

    # --- resuming -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All there is to go on from: the network and what was removed from it, gates and their random numbers,
        optimizers, copies. References, like every state dict; schedulers and the order of the data are the loop's own.
        """
        self._check_unchanged()
        return {
            "version": VERSION,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.bank.optimizers],
            "copies": [copied.state_dict() for copied in self._copies],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: the network, freshly built or not, takes its shapes, and all else follows.

        What does not fit is refused with everything left as it was.
        """
        self._check_unchanged()
        networks = dict(zip((self.model, *self._copies), (self.model, *self._copied()), strict=True))
        check_state(state, self.bank, networks)
        self.model.load_state_dict(state["model"])
        for copied, content in zip(self._copies, state["copies"], strict=True):
            copied.load_state_dict(content)
        for optimizer, content in zip(self.bank.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(copy.deepcopy(content))  # else it would go on writing into the state
        self._changed()

    def __repr__(self) -> str:
        if self.finished:
            return "Pruner(finished)"
        return f"Pruner({len(self.bank.mu)} units in {len(self.bank.layers)} structures, {self.criterion})"


def _bank(network: nn.Module) -> NoiseBank:
    bank = network._modules[GATES]
    assert isinstance(bank, NoiseBank)
    return bank


def _several(optimizer: Any) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    if isinstance(optimizer, Iterable) and not isinstance(optimizer, torch.optim.Optimizer):
        return [raw(one) for one in optimizer]
    return [raw(optimizer)]


def _chosen(
    model: nn.Module, example_inputs: ExampleInputs, wanted: Iterable[Structure | str] | None
) -> tuple[Structures, list[Structure]]:
    """A listing and those of its structures that get gates."""
    if wanted is None:
        listing = Structures(model, example_inputs)
        return listing, list(listing)
    wanted = [wanted] if isinstance(wanted, str | Structure) else list(wanted)
    owners = {id(one.owner): one.owner for one in wanted if isinstance(one, Structure)}
    if len(owners) > 1:
        raise ValueError("structures must be of one listing: call bmrs.structures(model, ...) once and use its own.")
    listing = next(iter(owners.values()), None) or Structures(model, example_inputs)
    return listing, [listing[one] if isinstance(one, str) else one for one in wanted]


def _range(values: Tensor) -> Range | None:
    values = values[values.isfinite()]
    return (float(values.min()), float(values.max())) if values.numel() else None
