"""The gates of a network: every θ in one flat posterior, one draw per forward pass.

A :class:`NoiseBank` holds μ and log σ of all units in two vectors. Attached to a network it draws all gates at
once when the network is called, per example or per batch, and multiplies what the consumers of the gated structures
read, or the outputs of named modules. In evaluation the gates are E[θ], computed anew from the current parameters in
every pass.
"""

import contextlib
import json
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from bmrs import _checks, chance, draws, parallel
from bmrs.gates import Again, ConsumerGate, Gate, InputGate, OutputGate, WeightGate, consumer_gates
from bmrs.posterior import LOG_A, LOG_B, TruncatedLogNormal
from bmrs.structure.listing import Structure, Structures
from bmrs.structure.record import GATES, Removed, check_record, removed
from bmrs.structure.removal import become, resize

Noise = Literal["example", "batch"]
_PER_UNIT = ("mu", "log_sigma", "alive")
_DAMAGED = "the state dict's record of what was removed is damaged: load another."


class Pass:
    """The gates of a pass. Not among a module's attributes, since to set one of those takes a microsecond or two."""

    def __init__(self) -> None:
        self.theta: Tensor | None = None
        self.parts: dict[str, Tensor] = {}  # of θ, one for each layer
        self.again = False  # a part of it runs again, with gradients: activation checkpointing of the reentrant kind
        self.inside = 0  # passes of the network that are running


class NoiseBank(nn.Module):
    """Every gate of a network.

    >>> import bmrs
    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    >>> bank = NoiseBank.attach(model, bmrs.structures(model, torch.randn(4, 8)))
    >>> loss = model(torch.randn(4, 8)).sum() + bank.kl()   # the network is called as before
    >>> bank.fold()                                         # E[θ] into the weights, the gates gone
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
        seed: int | None = None,
    ) -> None:
        """``sizes``: units per gated layer. ``noise``: one draw per "example" or per "batch".

        ``seed``: of the draws, which are the bank's own; torch's (``torch.manual_seed``) if not given.
        """
        super().__init__()
        if noise not in ("example", "batch"):
            raise ValueError(f"noise must be 'example' or 'batch', one draw for each; got {noise!r}.")
        if not sizes:
            raise ValueError("sizes must name at least one layer and its number of units.")
        for name, size in sizes.items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"sizes['{name}'] must be a whole number of units, at least 1; got {size!r}.")
        self.noise = noise
        self.paused = False  # gates that stand aside: the network computes as if there were none
        self._folded = False  # for a time: see folded()
        self.log_a, self.log_b = log_a, log_b
        self.layers: dict[str, slice] = {}
        total = 0
        for name, size in sizes.items():
            self.layers[name] = slice(total, total + size)
            total += size
        self.mu = nn.Parameter(torch.full((total,), float(mu)))
        self.log_sigma = nn.Parameter(torch.full((total,), float(log_sigma)))
        self.register_buffer("alive", torch.ones(total, dtype=torch.bool))
        self.seed = torch.initial_seed() if seed is None else int(seed)
        self.rank: int | None = None  # of the process, where it is not the one torch.distributed says
        # Draws made, and optimizer steps a Pruner has seen: on the device, where a recorded graph can count them.
        self._draws, self._steps = torch.zeros((), dtype=torch.long), torch.zeros((), dtype=torch.long)
        self._known: tuple[Any, ...] = ()  # what the two below were made for
        self._seeds, self._numbers = torch.zeros(1, dtype=torch.long), torch.arange(total)
        self._remembered: tuple[Tensor, Tensor] | None = None  # gates, and their means
        self._pass = Pass()
        self._root: nn.Module | None = None
        self._hooks: list[Any] = []
        self._gate_hooks: list[Any] = []
        self.optimizers: list[torch.optim.Optimizer] = []  # whose state goes along when a state dict is loaded
        self._consumers: list[ConsumerGate] = []
        self._weights: list[WeightGate] = []  # those of them
        # As it was when attached: units of each structure, where its gates began, and how many there were in all.
        self._units: dict[str, list[int]] = {}
        self._first = {name: layer.start for name, layer in self.layers.items()}
        self._whole, self._kept = total, list(range(total))
        self._owner: weakref.ref[Structures] | None = None  # a network does not carry its listing about

    @classmethod
    def attach(
        cls,
        model: nn.Module,
        gated: Iterable[Structure] | Mapping[str, int],
        noise: Noise = "example",
        **options: Any,
    ) -> Self:
        """Gate structures where their units are consumed, or the outputs of modules.

        ``gated``: structures of this model, or names of modules with their number of units along dimension 1. The
        bank becomes the submodule ``bmrs_noise`` of the model, so that it moves, saves and trains with it. Structures
        are verified first; those whose units cannot be removed exactly get no gates, and a warning says so.
        """
        modules = dict(model.named_modules())
        if GATES in modules:
            raise ValueError(f"the model has gates already: call model.{GATES}.detach() first.")
        structures: list[Structure] = []
        if isinstance(gated, Mapping):
            for name in gated:
                if name not in modules:
                    raise ValueError(f"gated names the module '{name}', which the model does not have.")
            sizes = dict(gated)
        else:
            structures = _gateable(model, gated)
            sizes = {structure.name: structure.units for structure in structures}
        bank = cls(sizes, noise, **options)
        reference = next(model.parameters(), None)
        if reference is not None:
            bank.to(reference.device)
        bank.train(model.training)
        bank._ready()
        model.add_module(GATES, bank)
        # Kept out of the module tree: the bank is the model's child, not its parent.
        object.__setattr__(bank, "_root", model)
        bank._hooks.append(model.register_forward_pre_hook(bank._before_forward, with_kwargs=True))
        bank._hooks.append(model.register_forward_hook(bank._after_forward, always_call=True))
        bank._hooks.append(model.register_load_state_dict_pre_hook(bank._before_load))
        if structures:
            bank._units = {structure.name: structure.kept for structure in structures}
            bank._place(structures)
            bank._owner = weakref.ref(structures[0].owner)
            structures[0].owner.followers.append(bank)
        else:
            for name in sizes:
                bank._hooks.append(modules[name].register_forward_hook(Gate(bank, name).after))
        return bank

    def _place(self, structures: list[Structure]) -> None:
        """Put gates where the structures are consumed now."""
        for hook in self._gate_hooks:
            hook.remove()
        assert self._root is not None
        self._consumers = consumer_gates(self, self._root, structures, self.layers)
        self._weights = [gate for gate in self._consumers if isinstance(gate, WeightGate)]
        self._gate_hooks = []
        rows: dict[nn.Module, list[OutputGate]] = {}
        for gate in self._consumers:
            if isinstance(gate, InputGate):
                self._gate_hooks.append(gate.module.register_forward_pre_hook(gate.before))
                self._gate_hooks.append(gate.module.register_forward_hook(gate.after, always_call=True))
            elif isinstance(gate, OutputGate):
                rows.setdefault(gate.module, []).append(gate)
        for module, outputs in rows.items():  # weight and bias fold alike, the output is multiplied once
            outputs[0].shared = tuple(outputs)
            self._gate_hooks.append(module.register_forward_pre_hook(outputs[0].before))
            self._gate_hooks.append(module.register_forward_hook(outputs[0].after, prepend=True, always_call=True))
        # Activation checkpointing runs a part of the network again: a part that holds a gated weight puts it in place.
        paths = {id(module): path for path, module in self._root.named_modules()}
        parts: dict[nn.Module, list[WeightGate]] = {}
        for gate in self._weights:
            names = paths[id(gate.module)].split(".")
            for end in range(1, len(names) + 1):
                parts.setdefault(self._root.get_submodule(".".join(names[:end])), []).append(gate)
        for module, gates in parts.items():
            again = Again(self, gates)
            self._gate_hooks.append(module.register_forward_pre_hook(again.before))
            self._gate_hooks.append(module.register_forward_hook(again.after, always_call=True))

    def detach(self) -> None:
        """Take all gates off; the network computes without θ from now on."""
        for hook in (*self._hooks, *self._gate_hooks):
            hook.remove()
        for gate in self._consumers:
            gate.leave()
        self._hooks, self._gate_hooks, self._consumers, self._weights = [], [], [], []
        self.paused = True  # whoever still holds it as a follower
        if self._root is not None:
            delattr(self._root, GATES)
            for name in _PER_UNIT:
                removed(self._root).kept.pop(f"{GATES}.{name}", None)
                removed(self._root).shapes.pop(f"{GATES}.{name}", None)
            object.__setattr__(self, "_root", None)

    def fold(self) -> None:
        """Multiply E[θ] into the weights that consume the units and take the gates off: the network stays what it is in
        evaluation.
        """
        self._check_foldable("fold its gates with Sharded.finish()")
        theta = self.mean()[None].detach()
        folded = set()
        for gate in self._consumers:
            if (id(gate.weight), gate.dim) not in folded:  # a weight of two modules is gated in both, and folded once
                gate.fold(theta)
                folded.add((id(gate.weight), gate.dim))
        self.detach()

    def _check_foldable(self, remedy: str) -> None:
        if not self._consumers:
            raise ValueError("only gates on structures can be folded: attach the bank to bmrs.structures(model, ...).")
        assert self._root is not None
        _checks.in_one_piece(self._root, "the network", remedy)
        self.check_unfolded()

    def check_unfolded(self) -> None:
        """An error inside of :meth:`folded`, where nothing may change."""
        if self._folded:
            raise ValueError("the gates are folded for evaluation: leave the block of folded() first.")

    @contextlib.contextmanager
    def folded(self) -> Iterator[None]:
        """For evaluation at the cost of a network without gates: while this lasts, E[θ] is in the weights modules see.

        Parameters and state dicts are as ever, and stay so; nothing can be trained or removed meanwhile.

        >>> import bmrs
        >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
        >>> bank = NoiseBank.attach(model, bmrs.structures(model, torch.randn(4, 8)))
        >>> with model.eval().bmrs_noise.folded():
        ...     output = model(torch.randn(4, 8))
        """
        self._check_foldable("evaluate it with its gates, outside of folded()")
        if self.training:
            raise ValueError("only a network in evaluation can be folded for a time: call model.eval() first.")
        before = self.paused
        try:
            with torch.no_grad():
                theta = self.mean()[None]
                for gate in self._consumers:
                    gate.stand_in(theta)
            self.paused = self._folded = True
            yield
        finally:
            self.paused, self._folded = before, False
            for gate in self._consumers:
                gate.leave()

    @torch.no_grad()
    def shrink(self, structures: Iterable[Structure], optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """After units were removed from the network: keep the gates of those that are left.

        ``structures``: all of the network. Called by :func:`bmrs.remove`.
        """
        if self._root is None:
            return
        mine = [structure for structure in structures if structure.name in self._units]
        before = self._kept
        kept = self._follow(mine)
        at = {unit: place for place, unit in enumerate(before)}
        resize(self, {name: {0: [at[unit] for unit in kept]} for name in _PER_UNIT}, optimizers)
        # Part of the network's record, so that a checkpoint of a network with gates loads on a whole one with gates.
        record = removed(self._root)
        for name in _PER_UNIT:
            record.shapes[f"{GATES}.{name}"] = [self._whole]
            record.kept[f"{GATES}.{name}"] = {0: kept}

    def check_followed(self) -> Structures:
        """The listing whose structures these gates are on; an error where there is none to go by."""
        owner = self._owner() if self._owner is not None else None
        if owner is None:
            raise ValueError(
                "the gates on the model are not on structures that still exist: attach them to "
                "structures = bmrs.structures(model, ...) and keep that listing."
            )
        return owner

    def adopt(self, record: Removed) -> None:
        """Place the gates anew after the network and this bank's tensors were brought to a record."""
        owner = self.check_followed()
        if owner.model is self._root:
            owner.adopt(record)
        self.place_anew()

    def place_anew(self) -> None:
        """Gates where the structures are consumed now, in the network or in a copy of it."""
        owner = self.check_followed()
        self._follow([structure for structure in owner.everything if structure.name in self._units])

    def get_extra_state(self) -> Tensor:
        """What a state dict needs beside the tensors: what was removed, and where the random numbers are."""
        content: dict[str, Any] = {"seed": self.seed, "draws": self.draws, "steps": self.steps}
        if self._root is not None:
            content["removed"] = removed(self._root).to_json()
        # As a tensor, which every format can store.
        return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        content = _extra(state)
        self.seed, self.draws, self.steps = content["seed"], content["draws"], content["steps"]

    @staticmethod
    def record_in(state: Tensor) -> Removed:
        """What was removed, as a state dict's extra state says."""
        try:
            return Removed.from_json(_extra(state).get("removed", Removed().to_json()))
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise ValueError(_DAMAGED) from problem

    def _before_load(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Bring the network to the shapes of a state dict that is about to be loaded, smaller or larger."""
        state = state_dict.get(f"{prefix}{GATES}._extra_state")
        if state is None:
            return
        self.check_unfolded()
        record = self.record_in(state)
        check_record(module, record, "the state dict")
        if record != removed(module):
            owner = self.check_followed()
            if owner.model is not module and record != removed(owner.model):
                raise ValueError("a copy of the network has the shapes of the network: load the network's state first.")
            become(module, record, self.optimizers)
            self.adopt(record)

    def _follow(self, mine: list[Structure]) -> list[int]:
        """Layers and gates for the units these structures have now; returns their original numbers."""
        kept: list[int] = []
        layers = {}
        mine = [structure for structure in mine if structure.units]  # the others went with a block
        mine.sort(key=lambda structure: self._first[structure.name])
        for structure in mine:
            layers[structure.name] = slice(len(kept), len(kept) + structure.units)
            first = self._first[structure.name]
            at = {unit: place for place, unit in enumerate(self._units[structure.name])}
            kept += [first + at[unit] for unit in structure.kept]
        self.layers, self._kept = layers, kept
        self._hold(None)
        self._place(mine)
        return kept

    def forward(self, x: Any) -> Any:
        """The identity, so that containers which run their children, such as nn.Sequential, can hold a bank."""
        return x

    def posterior(self) -> TruncatedLogNormal:
        """q of all units, layer after layer. Not searched for NaN: a NaN score keeps its unit."""
        mu, log_sigma = map(parallel.everyones, (self.mu, self.log_sigma))
        return TruncatedLogNormal(mu, log_sigma, self.log_a, self.log_b, validate=False)

    def kl(self, prices: Tensor | None = None) -> Tensor:
        """Σᵢ priceᵢ·KLᵢ over the units still there, to be added to a mean loss.

        Without prices every unit pays alike, 1/(all units there were at first): the price "uniform" of
        :mod:`bmrs.price`.
        """
        kl = self.posterior().kl()
        if prices is None:
            kl = kl / self._whole
        else:
            _checks.same_shape(prices, "prices", kl, "the gates")
            kl = kl * prices.to(kl)
        return torch.where(self.alive, kl, 0.0).sum()

    def draw(self, batch_size: int) -> Tensor:
        """One draw of every gate: [batch_size, units], or [1, units] for noise per batch."""
        self._ready()
        self._pass.again = False
        self._hold(None)  # with its graph: what sums φ's gradients there belongs to the stream that pass ran on
        theta = self._draw_number(self._draws, batch_size if self.noise == "example" else 1)
        self._draws.add_(1)
        self._hold(theta)
        return theta

    def _draw_number(self, number: Tensor, rows: int) -> Tensor:
        mu, log_sigma = parallel.everyones(self.mu), parallel.everyones(self.log_sigma)
        return draws.draw(mu, log_sigma, self.alive, self._seeds, number, self._numbers, rows, self.log_a, self.log_b)

    def _hold(self, theta: Tensor | None) -> None:
        """The gates from now on; one split and not many slices, since its gradient is one concatenation."""
        now = self._pass
        now.theta, now.parts = theta, {}
        for gate in self._weights:
            gate.forget()
        if theta is not None:
            now.parts = dict(zip(self.layers, theta.split(list(self.sizes.values()), dim=1), strict=True))

    def _ready(self) -> None:
        """What every draw needs beside φ, where φ is."""
        device, rank = self.mu.device, chance.rank() if self.rank is None else self.rank
        wanted = (self.seed, rank, len(self.mu), device)
        if self._known == wanted:
            return
        with torch.inference_mode(False):
            self._seeds = torch.tensor([chance.key(self.seed, rank)], device=device)
            self._numbers = torch.arange(len(self.mu), device=device)
            self._draws, self._steps = self._draws.to(device), self._steps.to(device)
        self._known = wanted

    @property
    def draws(self) -> int:
        """How many were made."""
        return int(self._draws)

    @draws.setter
    def draws(self, number: int) -> None:
        self._draws.fill_(number)

    @property
    def steps(self) -> int:
        """How many optimizer steps a Pruner has seen."""
        return int(self._steps)

    @steps.setter
    def steps(self, number: int) -> None:
        self._steps.fill_(number)

    def mean(self) -> Tensor:
        """E[θ] of every unit, 0 for those removed."""
        mu, log_sigma = (parallel.everyones(own.detach()) for own in (self.mu, self.log_sigma))
        return self._mean(mu, log_sigma) * self.alive

    def _mean(self, mu: Tensor, log_sigma: Tensor) -> Tensor:
        """A processor remembers it for as long as the gates hold the same numbers: to see that they do costs little."""
        if mu.device.type != "cpu" or type(mu) is not Tensor or torch.compiler.is_compiling():
            return draws.mean(mu, log_sigma, self.log_a, self.log_b)
        of = torch.stack((mu, log_sigma))
        if (
            self._remembered is None
            or self._remembered[0].dtype != of.dtype
            or not torch.equal(self._remembered[0], of)
        ):
            self._remembered = of, draws.mean(mu, log_sigma, self.log_a, self.log_b)
        return self._remembered[1]

    def current(self) -> Tensor:
        """The gates of this pass, all layers: [batch_size or 1, units]."""
        theta = self._pass.theta
        if theta is not None:
            if not theta.requires_grad or torch.compiler.is_compiling():
                return theta
            if not torch.is_grad_enabled():
                self._pass.again = True
            # What runs again inside a backward pass has a backward pass of its own, and needs a graph of its own.
            return self._draw_number(self._draws - 1, len(theta)) if self.recomputing else theta
        if self.training:
            raise RuntimeError(
                "no gates have been drawn: call the model the NoiseBank is attached to, or draw(batch_size) first."
            )
        return self.mean()[None]

    @property
    def recomputing(self) -> bool:
        """Whether a part of the last pass runs again, to be differentiated by itself."""
        return self._pass.again and not self._pass.inside and torch.is_grad_enabled()

    def theta(self, name: str) -> Tensor:
        """The current gates of one layer: [batch_size or 1, units]."""
        theta = self.current()
        return self._pass.parts[name] if theta is self._pass.theta else theta[:, self.layers[name]]

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

    def closed(self, name: str) -> list[int]:
        """The units of a layer whose gates are closed, by their present numbers."""
        return (~self.alive[self.layers[name]]).nonzero().flatten().tolist()

    def units_left(self) -> dict[str, int]:
        return {name: int(self.alive[layer].sum()) for name, layer in self.layers.items()}

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.paused:
            return
        if not torch.compiler.is_compiling():
            self._pass.inside += 1
        if self.training:
            self.draw(_batch_size(args, kwargs))
        else:
            self._hold(self.mean()[None])
        for gate in self._weights:
            gate.leave()  # gates of a pass around this one, as Lightning makes them: this one has its own
            if not gate.parted:
                gate.enter()

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._pass.inside = max(0, self._pass.inside - 1)
        for gate in () if self.paused else self._weights:
            gate.leave()
        # A training draw stays until the next one: activation checkpointing recomputes with it. An evaluation
        # mean goes, so that whoever calls a part of the network later does not meet a stale one.
        if not self.training:
            self._hold(None)

    def train(self, mode: bool = True) -> Self:
        if mode:
            self.check_unfolded()
        self._hold(None)
        return super().train(mode)

    def __getstate__(self) -> dict[str, Any]:
        # A draw belongs to one pass and carries its graph: copies and pickles start without.
        left: dict[str, Any] = {"_pass": Pass(), "_owner": None, "_remembered": None, "optimizers": []}
        return {**self.__dict__, **left}

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        # Steps of log σ are lost in 16 bits: where the network is converted, the gates only move.
        def moved(tensor: Tensor) -> Tensor:
            result: Tensor = fn(tensor)
            rounded = tensor.is_floating_point() and result.itemsize < 4
            return tensor.to(result.device) if rounded else result

        super()._apply(moved, recurse)
        return self

    def extra_repr(self) -> str:
        return f"{int(self.alive.sum())} of {self.alive.numel()} units in {len(self.layers)} layers, per {self.noise}"


def _gateable(model: nn.Module, structures: Iterable[Structure]) -> list[Structure]:
    chosen = []
    for structure in structures:
        if not isinstance(structure, Structure):
            raise TypeError(f"gated must hold structures of the model; got {type(structure).__name__}.")
        if structure.owner.model is not model:
            raise ValueError(
                f"'{structure.name}' belongs to another model: list this one with bmrs.structures(model, ...)."
            )
        chosen.append(structure)
    if chosen:
        chosen[0].owner.verify(chosen)
    for structure in list(chosen):
        reason = "" if structure.foldable else "its weights are tied, and produce what they consume"
        reason = reason or ("" if structure.status == "exact" else structure.status)
        if reason:
            chosen.remove(structure)
            warnings.warn(f"'{structure.name}' gets no gates: {reason}.", stacklevel=3)
    if not chosen:
        raise ValueError(
            "gated holds no structure that can have gates: see bmrs.structures(model, ...).table() for why."
        )
    return chosen


def _extra(state: Tensor) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(bytes(state.cpu().tolist()))
        complete = all(isinstance(content[key], int) for key in ("seed", "draws", "steps"))
    except (ValueError, AttributeError, TypeError, KeyError) as problem:
        raise ValueError(_DAMAGED) from problem
    if not complete:
        raise ValueError(_DAMAGED)
    return content


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
