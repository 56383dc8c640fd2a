"""A training step, run as it is written, compiled, or captured as a CUDA graph; and what surrounds it."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bmrs
from bmrs.study.large.recipe import Recipe

WARM_UP, DECAY = 200, 1e-2  # steps, and AdamW's weight decay: the ViT's
_EAGER_FIRST = 3  # steps before one is captured: libraries choose their kernels in the first ones


def optimizer_for(network: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    """Adam; with the schedule of the ViT AdamW. What is captured needs its learning rate on the device."""
    options: dict[str, Any] = {"lr": recipe.learning_rate}
    if device.type == "cuda":
        options["fused"] = True
        if recipe.step == "graph":
            options |= {"lr": torch.tensor(recipe.learning_rate, device=device), "capturable": True}
    if recipe.schedule == "linear":
        return torch.optim.AdamW(network.parameters(), weight_decay=DECAY, **options)
    return torch.optim.Adam(network.parameters(), **options)


def rate(recipe: Recipe, step: int, steps: int) -> float:
    """The learning rate of a step, of so many."""
    top = recipe.learning_rate
    if recipe.schedule == "constant":
        return top
    warm = min(1.0, (step + 1) / min(WARM_UP, max(1, steps // 10)))
    part = step / max(1, steps)
    return top * warm * (1.0 - part if recipe.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * part)))


def set_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Of the weights; a Pruner makes the gates' a multiple of it."""
    group = optimizer.param_groups[0]
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(value)
    else:
        group["lr"] = value


def logits(network: Any, x: Tensor, recipe: Recipe, *, cached: bool = True) -> Tensor:
    """What the network says, in float32 whatever it computes in."""
    with torch.autocast(x.device.type, torch.bfloat16, enabled=recipe.precision == "bf16", cache_enabled=cached):
        found: Tensor = network(x).logits
    return found.float()


@contextlib.contextmanager
def precise(recipe: Recipe, *, search: bool = False) -> Iterator[None]:
    """Products of float32 as exact as the recipe says. ``search`` for the fastest convolutions: worth it where shapes
    stay, and not where every removal would search anew.
    """
    flags = [(torch.backends.cuda.matmul, "allow_tf32"), (torch.backends.cudnn, "allow_tf32"),
             (torch.backends.cudnn, "benchmark")]  # fmt: skip
    before = [getattr(owner, name) for owner, name in flags]
    try:
        for (owner, name), value in zip(flags, [*[recipe.precision != "fp32"] * 2, search], strict=True):
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name), value in zip(flags, before, strict=True):
            setattr(owner, name, value)


class Step:
    """One step of training: ``step(x, y)``, however it runs.

    Tell it with :meth:`changed` when the network has other shapes, or is in training mode again.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        pruner: bmrs.Pruner | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.network, self.optimizer, self.recipe, self.pruner, self.note = network, optimizer, recipe, pruner, note
        self.how = recipe.step
        if self.how == "graph" and next(network.parameters()).device.type != "cuda":
            raise ValueError("--step graph: only a GPU has CUDA graphs: choose eager or compile.")
        self.called: Any = network
        if self.how == "graph":
            self._stream = torch.cuda.Stream()
        if self.how == "compile":
            self.called = torch.compile(network, dynamic=False)
        self.changed()

    def changed(self) -> None:
        """What was captured no longer holds."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._held: tuple[Tensor, Tensor, Tensor] | None = None  # what the graph reads, and the loss it leaves
        self._drawn: tuple[Tensor, Tensor] | None = None  # the gates it draws, and what they were
        self._eager = 0

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss, before the step."""
        if self.how != "graph":
            return self.run(x, y)
        if not self._captured(x, y):
            return self._beside(x, y)
        assert self._graph is not None
        assert self._held is not None
        self._held[0].copy_(x)
        self._held[1].copy_(y)
        self._graph.replay()
        self._check_draws()
        return self._held[2]

    def run(self, x: Tensor, y: Tensor) -> Tensor:
        """All there is to a step."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(logits(self.called, x, self.recipe, cached=self.how != "graph"), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _beside(self, x: Tensor, y: Tensor) -> Tensor:
        """An eager step on the stream that a graph is captured on, where autograd keeps what it accumulates into."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss = self.run(x, y)
        current.wait_stream(self._stream)
        return loss

    def _captured(self, x: Tensor, y: Tensor) -> bool:
        """Whether there is a graph for batches like this one; after the first steps there may be."""
        if self._graph is not None:
            return self._held is not None and self._held[0].shape == x.shape
        if self._eager < _EAGER_FIRST:
            self._eager += 1
            return False
        graph, held, current = torch.cuda.CUDAGraph(), (x.clone(), y.clone()), torch.cuda.current_stream()
        try:
            self.optimizer.zero_grad()
            with torch.cuda.graph(graph, stream=self._stream):
                loss = self.run(*held)
            if self.pruner is not None and not self.pruner.finished:
                drawn = self.pruner.bank.current()
                self._drawn = (drawn, drawn.detach().clone())
        except RuntimeError as problem:
            torch.cuda.set_stream(current)  # a capture that broke off leaves its own
            self._give_up(f"a step cannot be captured ({str(problem).splitlines()[0]})")
            return False
        self._graph, self._held = graph, (*held, loss)
        return True

    def _check_draws(self) -> None:
        """A graph that draws the same gates again and again would prune by chance: see that they differ."""
        if self._drawn is None:
            return
        now, before = self._drawn
        seen, self._drawn = now.detach().clone(), None
        if self._eager == _EAGER_FIRST:  # the first replay filled them
            self._drawn, self._eager = (now, seen), self._eager + 1
        elif torch.equal(seen, before):
            self._give_up("its graph draws the same gates in every step")

    def _give_up(self, why: str) -> None:
        self.note(f"{why}: steps run one by one from here on.")
        torch.cuda.synchronize()
        self.how = "eager"
        self.changed()


@torch.no_grad()
def accuracy(network: nn.Module, batches: Iterator[tuple[Tensor, Tensor]], recipe: Recipe) -> float:
    """Share of right answers in evaluation mode, in which the network is left."""
    network.eval()
    right, n = torch.zeros(()), 0
    for x, y in batches:
        right, n = right.to(x.device) + (logits(network, x, recipe).argmax(1) == y).sum(), n + len(y)
    return float(right) / max(1, n)


def relaid(network: nn.Module, optimizer: torch.optim.Optimizer | None, channels_last: bool) -> None:
    """After tensors were cut: all of them, the optimizer's too, in the order the convolutions read best."""
    if not channels_last:
        return
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for parameter, state in optimizer.state.items() if optimizer is not None else ():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() == 4 and value.shape == parameter.shape:
                state[name] = value.contiguous(memory_format=torch.channels_last)
