"""Training many networks at once: all seeds and methods of a setting as one stack, with gates or without.

On a GPU a whole training step is captured once as a CUDA graph and replayed: nothing but one launch is left to do for
the processor. Each member has its own weights, order of the data and gates, and does what it would do alone. As units
go, the stack closes ranks: it keeps room for as many as the member that has most.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmrs.draws import kl_gradient
from bmrs.structure import Structure
from bmrs.study.recording import Recording, fast_products, launching
from bmrs.study.stack import Stack
from bmrs.study.stacked_gates import START, Gates, columns_each

_ROWS = 1 << 15  # of all members together, tested at a time
_GAIN = 0.85  # closing ranks must leave at most this share of the weights to be worth it
_PHI = ("mu", "log_sigma")
_PER_ROOM = {"mu": 0.0, "log_sigma": START, "alive": False, "units": -1, "prices": 0.0}  # and what an empty one has


class Ensemble:
    """Members that train side by side on images that stay on the device."""

    def __init__(
        self,
        networks: Sequence[nn.Module],
        x: Tensor,
        y: Tensor,
        *,
        batch: int,
        learning_rate: float,
        structures: Sequence[Structure],
        seeds: Sequence[int],
        prices: Tensor | None = None,
    ) -> None:
        """``x``, ``y``: all images there are and their classes, on the device to train on.

        ``structures``: whose units can go, of one of the networks. ``seeds``: of each member's draws. ``prices``: of
        the units' KL, [members, units]; without them the networks have no noise.
        """
        self.x, self.y, self.batch, self.learning_rate = x, y, batch, learning_rate
        self.stack = Stack(networks)
        self.members = self.stack.members
        if len(seeds) != self.members:
            raise ValueError(f"seeds must hold one for each of the {self.members} networks; got {len(seeds)}.")
        self.gates = Gates(self.stack, structures, seeds, prices).to(x.device, x.dtype)
        self.stack.to(x.device, x.dtype)
        names = {name for name, _ in self._tensors()}
        self._places = {
            (place[0], place[1] + 1): (structure.name, columns_each(structure, place))
            for structure in structures
            for place in structure.places
            if place[0] in names
        }
        self.at = torch.zeros((), dtype=torch.long, device=x.device)  # batches of this epoch
        self.steps = torch.zeros((), dtype=torch.long, device=x.device)  # and of all
        self._order: Tensor | None = None
        self._recording = Recording()
        self.optimizer: Any = None  # torch.optim.Adam
        self._replace(lambda name, tensor: tensor, {})

    def parameters(self) -> dict[str, nn.Parameter]:
        """That are trained, by name."""
        own = dict(self.stack.network.named_parameters())
        return {**own, **{name: getattr(self.gates, name) for name in (_PHI if self.gates.noisy else ())}}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.stack.network.named_parameters()
        yield from self.stack.network.named_buffers()

    # --- training -----------------------------------------------------------------------------------------------------

    def train_epoch(self, order: Tensor) -> None:
        """``order``: [members, examples], which images each member sees, one batch after the other."""
        order = order.to(self.x.device)
        self.stack.train()
        if self._order is None or self._order.shape != order.shape:
            self._order = order.clone()
            self._recording.forget()
        else:
            self._order.copy_(order)
        self.at.zero_()
        steps = order.shape[1] // self.batch
        with fast_products(self.x.is_cuda):
            if self.x.is_cuda:
                self._recording.run(self._step, steps, self.x.device)
            else:
                for _ in range(steps):
                    self._step()

    def _step(self) -> None:
        self.optimizer.zero_grad()
        assert self._order is not None
        now = self.at * self.batch + torch.arange(self.batch, device=self.x.device)
        rows = self._order.index_select(1, now).flatten()
        self.gates.use(self.gates.draw(self.steps, self.batch))
        logits = self.stack(self.x.index_select(0, rows))
        (F.cross_entropy(logits, self.y.index_select(0, rows), reduction="sum") / self.batch).backward()
        if self.gates.noisy:
            self._add_kl()
        self.optimizer.step()
        self.at += 1
        self.steps += 1

    @torch.no_grad()
    def _add_kl(self) -> None:
        """The analytic gradient of Σ price·KL over the units that are alive."""
        phi = (self.gates.mu, self.gates.log_sigma)
        weights = self.gates.prices * self.gates.alive
        for parameter, gradient in zip(phi, kl_gradient(*phi, weights), strict=True):
            assert parameter.grad is not None
            parameter.grad.add_(gradient)

    def differentiate(self, rows: Tensor) -> None:
        """Leave the gradients of the mean loss over each member's images, [members, examples], with gates at E[θ]."""
        self.stack.eval()
        self._recording.forget()  # its gradients lie elsewhere
        rows = rows.to(self.x.device)
        with launching, fast_products(self.x.is_cuda):
            self.optimizer.zero_grad()
            self.gates.use(self.gates.means().detach()[:, None])
            for part in rows.split(max(1, _ROWS // self.members), dim=1):
                own = part.flatten()
                loss = F.cross_entropy(self.stack(self.x[own]), self.y[own], reduction="sum") / rows.shape[1]
                loss.backward()

    # --- testing ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def accuracy(self, x: Tensor, y: Tensor, rows: Tensor | None = None) -> Tensor:
        """The share each member gets right. ``rows``: [members, images], those it is tested on; all if not given."""
        self.stack.eval()
        number = len(y) if rows is None else rows.shape[1]
        rows = None if rows is None else rows.to(x.device)
        right = torch.zeros(self.members, dtype=torch.float32, device=x.device)
        with launching, fast_products(x.is_cuda):
            self.gates.use(self.gates.means()[:, None])
            for part in torch.arange(number, device=x.device).split(max(1, _ROWS // self.members)):
                own = (part.expand(self.members, -1) if rows is None else rows[:, part]).flatten()
                right += (self.stack(x[own]).argmax(1) == y[own]).view(self.members, -1).sum(1)
        return right / number

    # --- units that go ------------------------------------------------------------------------------------------------

    def alive(self) -> Tensor:
        """Which of the network's units each member has, [members, units]."""
        return self.gates.of_units(self.gates.alive, missing=False)

    @torch.no_grad()
    def close_ranks(self, gain: float = _GAIN) -> bool:
        """Keep room for as many units as the member that has most, in fours, as GPUs like it; returns whether it did.

        ``gain``: the share of the weights that may be left at most for it to be done.
        """
        gates = self.gates
        rooms = {name: max(4, -4 * (-int(gates.alive[:, own].sum(1).max()) // 4)) for name, own in gates.layers.items()}
        if rooms == gates.rooms or self._weights(rooms) > gain * self._weights(gates.rooms):
            return False
        # The living first, in their order, then others, then, past the end, nobody.
        chosen = {}
        for name, own in gates.layers.items():
            order = torch.argsort(gates.alive[:, own].to(torch.int8), dim=1, descending=True, stable=True)
            chosen[name] = F.pad(order, (0, max(0, rooms[name] - order.shape[1])), value=order.shape[1])[
                :, : rooms[name]
            ]
        parts = [own.start + chosen[name] for name, own in gates.layers.items()]
        empty = [chosen[name] == own.stop - own.start for name, own in gates.layers.items()]
        everyone = torch.cat(parts, 1).masked_fill(torch.cat(empty, 1), gates.mu.shape[1])

        def moved(name: str, tensor: Tensor, fill: float | None = None) -> Tensor:
            if name in _PER_ROOM:
                return F.pad(tensor, (0, 1), value=_PER_ROOM[name] if fill is None else fill).gather(1, everyone)
            for dim in range(1, tensor.dim()):
                if (name, dim) in self._places:
                    structure, each = self._places[name, dim]
                    tensor = _chosen(tensor, dim, chosen[structure], each)
            return tensor

        self._replace(moved, rooms)
        return True

    def _weights(self, rooms: dict[str, int]) -> float:
        """How many numbers the stack would hold with these rooms."""
        total = 0.0
        for name, tensor in self.stack.network.named_parameters():
            size = 1.0
            for dim in range(1, tensor.dim()):
                structure, each = self._places.get((name, dim), (None, 0))
                size *= tensor.shape[dim] if structure is None else rooms[structure] * each
            total += size
        return total

    def _replace(self, changed: Callable[..., Tensor], rooms: dict[str, int], other: "Ensemble | None" = None) -> None:
        """New tensors in place of all there are, and an optimizer that goes on with them.

        ``changed``: makes them of those of ``other``, or of this one, by name.
        """
        source = other or self
        moments = {} if source.optimizer is None else dict(source.optimizer.state)
        state: dict[str, dict[str, Tensor]] = {}
        for name, parameter in source.parameters().items():
            state[name] = {
                key: changed(name, value, 0.0) if value.dim() == parameter.dim() else value.clone()
                for key, value in moments.get(parameter, {}).items()
            } if moments else {}  # fmt: skip
        for name, tensor in list(source._tensors()):
            _set(self.stack.network, name, changed(name, tensor.detach()))
        for name in _PER_ROOM:
            _set(self.gates, name, changed(name, getattr(source.gates, name).detach()))
        self.gates.rooms.update(rooms)
        parameters = self.parameters()
        self.optimizer = torch.optim.Adam(
            parameters.values(), lr=self.learning_rate, fused=True, capturable=self.x.is_cuda
        )
        for name, parameter in parameters.items():
            if state.get(name):
                self.optimizer.state[parameter] = state[name]
        self.gates._theta.clear()  # the last pass held on to tensors of before
        self._recording.forget()

    # --- states -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Tensors by name; references, like every state dict."""
        parameters = self.parameters()
        return {
            "tensors": {name: tensor.detach() for name, tensor in self._tensors()},
            "gates": {name: getattr(self.gates, name).detach() for name in (*_PER_ROOM, "seeds")},
            "rooms": dict(self.gates.rooms),
            "moments": {name: dict(self.optimizer.state.get(p, {})) for name, p in parameters.items()},
            "steps": self.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, _ in list(self._tensors()):
            _set(self.stack.network, name, state["tensors"][name].to(self.x.device))
        for name in (*_PER_ROOM, "seeds"):
            _set(self.gates, name, state["gates"][name].to(self.x.device))
        self._replace(lambda name, tensor, fill=None: tensor.clone(), state["rooms"])
        for name, parameter in self.parameters().items():
            if state["moments"].get(name):
                moments = state["moments"][name]
                self.optimizer.state[parameter] = {key: value.to(self.x.device) for key, value in moments.items()}
        self.steps.copy_(state["steps"])

    @torch.no_grad()
    def take(self, other: "Ensemble", members: Sequence[int]) -> None:
        """Become these members of another ensemble: weights, gates and the optimizer's state."""
        at = torch.tensor(list(members), device=self.x.device)
        self._replace(lambda name, tensor, fill=None: tensor[at].clone(), other.gates.rooms, other)
        self.gates.seeds.copy_(other.gates.seeds[at])
        self.steps.copy_(other.steps)


def _chosen(tensor: Tensor, dim: int, rooms: Tensor, each: int) -> Tensor:
    """Each member's own choice along a dimension; past its end there are zeros."""
    padding = [0, 0] * (tensor.dim() - 1 - dim) + [0, each]
    tensor = F.pad(tensor, padding)
    index = (rooms[:, :, None] * each + torch.arange(each, device=rooms.device)).flatten(1)
    shape = [len(index), *(-1 if d == dim else 1 for d in range(1, tensor.dim()))]
    return tensor.gather(dim, index.view(shape).expand(-1, *(
        index.shape[1] if d == dim else tensor.shape[d] for d in range(1, tensor.dim())
    )))  # fmt: skip


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    """In place of the parameter or buffer of this name."""
    path, _, leaf = name.rpartition(".")
    module = module.get_submodule(path)
    old = getattr(module, leaf)
    # A new parameter, since what is left of a backward pass would remember the old one's shape.
    setattr(module, leaf, nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value)
