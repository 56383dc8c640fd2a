"""Hugging Face models: a reduced one as a folder that plain ``from_pretrained`` loads, without bmrs.

``PruningCallback``, for the Trainer, is in :mod:`bmrs.integrations.trainer` and can be imported from here.

A folder holds tensors and a configuration, so this is possible where the configuration can say the smaller shape: the
same number of neurons left in every layer is another ``intermediate_size``, the same number of heads another
``num_attention_heads`` where heads have a width of their own. Which settings say it is found by trying: a change is
right when the class, built with it, has all the shapes, and when the saved folder, loaded again, computes the same.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from bmrs.checkpoint import unwrapped
from bmrs.structure.capture import ExampleInputs, arguments, first_line, mode
from bmrs.structure.record import removed

if TYPE_CHECKING:
    from bmrs.integrations.trainer import PruningCallback as PruningCallback

MOST_BUILDS = 300
Setting = tuple[str, ...]
"""Where a setting is: its name, after those of the configurations it lies in."""
Change = tuple[Setting, int]
Shapes = dict[str, tuple[int, ...]]


def __getattr__(name: str) -> Any:
    if name == "PruningCallback":  # importing it imports transformers, which saving does when it must
        from bmrs.integrations.trainer import PruningCallback

        return PruningCallback
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def save_pretrained(model: nn.Module, folder: str | os.PathLike[str], example_inputs: ExampleInputs) -> dict[str, int]:
    """Write a reduced Hugging Face model for plain ``from_pretrained``; returns the settings that say its shape.

    ``save_pretrained(model, "small", {"input_ids": ids})`` might return ``{"intermediate_size": 1536}``. The model and
    its configuration stay as they are. Where no configuration says the shape, nothing is written: use bmrs.save.
    """
    model = unwrapped(model)
    if not hasattr(model, "save_pretrained") or not hasattr(getattr(model, "config", None), "to_dict"):
        raise TypeError(f"model must be a Hugging Face model; got {type(model).__name__}, which bmrs.save can save.")
    if "bmrs_noise" in model._modules:
        raise ValueError("model has gates on it: take them off with model.bmrs_noise.fold() or .detach() first.")
    if not removed(model).kept:
        model.save_pretrained(folder)  # type: ignore[operator]
        return {}
    search = _Search(model)
    reason = "whole blocks are gone" if removed(model).silenced else search.unequal()
    target = Path(folder)
    for changes in search.solutions() if not reason else ():
        with _folder_beside(target) as made:
            reason = _written(model, search.config(changes), made, example_inputs)
            if not reason:
                _move(made, target)
                return {".".join(setting): value for setting, value in sorted(changes)}
    raise ValueError(
        f"no configuration of {type(model).__name__} says what the reduced model is ({reason or search.left()}): "
        f"save it with bmrs.save(model, path) instead."
    )


class _Search:
    """For changes of the configuration after which the class has the model's shapes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.content: dict[str, Any] = model.config.to_dict()  # type: ignore[union-attr, operator]
        self.wanted = _shapes(model)
        self.builds: dict[frozenset[Change], set[str] | None] = {}
        self.fewest: set[str] | None = None  # tensors that did not fit in the best try so far

    def config(self, changes: frozenset[Change]) -> Any:
        """As it is read back from a file."""
        content = _copied(self.content)
        for (*holders, name), value in changes:
            inner = content
            for holder in holders:
                inner = inner[holder]
            inner[name] = value
        return type(self.model.config).from_dict(content)  # type: ignore[union-attr]

    def wrong(self, changes: frozenset[Change]) -> set[str] | None:
        """The tensors whose shapes do not fit; None if the class cannot be built at all."""
        if changes not in self.builds and len(self.builds) < MOST_BUILDS:
            self.builds[changes] = self._wrong(changes)
        found = self.builds.get(changes)
        if found is not None and (self.fewest is None or len(found) < len(self.fewest)):
            self.fewest = found
        return found

    def _wrong(self, changes: frozenset[Change]) -> set[str] | None:
        try:
            with torch.device("meta"), torch.random.fork_rng(devices=[]):
                shapes = _shapes(type(self.model)(self.config(changes)))
        except Exception:  # configurations check themselves in many ways
            return None
        return {name for name in self.wanted.keys() | shapes.keys() if self.wanted.get(name) != shapes.get(name)}

    def solutions(self, taken: frozenset[Change] = frozenset()) -> Iterator[frozenset[Change]]:
        """Sets of changes after which all shapes fit, the plainest first.

        Several may: half the heads and heads of half the width give the same shapes, so the outputs must decide.
        """
        wrong = self.wrong(taken)
        if wrong is not None and not wrong:
            yield taken
            return
        most = len(self.wanted) if wrong is None else len(wrong)
        settings = {setting for setting, _ in taken}
        open_ = [change for change in self._candidates() if change[0] not in settings]
        for step in (1, 2):  # a pair where neither is right alone, such as fewer heads and their own width
            tried = [taken | set(some) for some in combinations(open_, step) if len({s for s, _ in some}) == step]
            better = {one: len(w) for one in tried if (w := self.wrong(one)) is not None and len(w) < most}
            for one in sorted(better, key=lambda one: (better[one], sorted(one))):
                yield from self.solutions(one)
            if better:
                return

    def _candidates(self) -> list[Change]:
        """Settings times the share that is left of some dimension; those not set yet, to a size or a width per head."""
        sizes = self._sizes()
        shares = {Fraction(new, old) for old, new in sizes}
        found: dict[Change, None] = {}
        unset = []
        for setting, value in _settings(self.content):
            if value is None:
                unset.append(setting)
                continue
            for share in sorted(shares):
                if (value * share).denominator == 1:
                    found[setting, int(value * share)] = None
        widths = {
            old // value for (_, value) in _settings(self.content) if value for old, _ in sizes if not old % value
        }
        for setting in unset:
            for value in sorted({new for _, new in sizes} | {width for width in widths if width > 1}):
                found[setting, value] = None
        return list(found)

    def _sizes(self) -> set[tuple[int, int]]:
        """The original and present size of every dimension that shrank."""
        record = removed(self.model)
        return {
            (record.shapes[name][dim], len(kept)) for name, dims in record.kept.items() for dim, kept in dims.items()
        }

    def unequal(self) -> str:
        """Which layers that were alike are no longer: a configuration has one number for them all."""
        original = removed(self.model).shapes
        alike: dict[Any, dict[tuple[int, ...], str]] = defaultdict(dict)
        for name, shape in self.wanted.items():
            alike[re.sub(r"\d+", "*", name), tuple(original.get(name, shape))].setdefault(shape, name)
        for shapes in alike.values():
            if len(shapes) > 1:
                (one, first), (other, second) = list(shapes.items())[:2]
                return f"layers of unequal width: '{first}' has shape {one}, '{second}' {other}"
        return ""

    def left(self) -> str:
        """What no change made fit."""
        names = sorted(self.fewest or ())
        said = ", ".join(f"'{name}' of shape {self.wanted.get(name)}" for name in names[:2])
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        return f"nothing fits {said}{more}"


def _shapes(model: nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}


def _copied(content: Any) -> Any:
    return {key: _copied(value) for key, value in content.items()} if isinstance(content, dict) else content


# Heads have the width they are given here in most models, also in those whose configuration does not mention it.
_HEAD_WIDTH = "head_dim"


def _settings(content: Mapping[str, Any], holders: Setting = ()) -> Iterator[tuple[Setting, int | None]]:
    """Whole numbers, and settings that may hold one, here and in the configurations inside."""
    for name, value in content.items():
        if isinstance(value, Mapping) and name.endswith("config"):
            yield from _settings(value, (*holders, name))
        elif name.endswith(("_id", "_ids", "_version")):
            continue
        elif (isinstance(value, int) and not isinstance(value, bool) and value > 1) or _may_be_a_size(name, value):
            yield (*holders, name), value
    if _HEAD_WIDTH not in content and any(name.endswith(("heads", "head")) for name in content):
        yield (*holders, _HEAD_WIDTH), None


def _may_be_a_size(name: str, value: Any) -> bool:
    return value is None and re.search(r"dim|inner|size|width|ff|num|channels", name) is not None


# --- the proof --------------------------------------------------------------------------------------------------------


def _written(model: nn.Module, config: Any, folder: Path, example_inputs: ExampleInputs) -> str:
    """Save the model with this configuration and load it back: why it is not the same, if it is not."""
    own = model.config
    config.architectures = [type(model).__name__]
    with _no_progress_bars():
        try:
            model.config = config
            model.save_pretrained(folder)  # type: ignore[operator]
        finally:
            model.config = own
        try:
            how = getattr(own, "_attn_implementation", None)  # another one adds up in another order
            again = type(model).from_pretrained(folder, attn_implementation=how)  # type: ignore[attr-defined]
            reference = next(model.parameters())
            again.to(reference.device)
            for tensor in (*again.parameters(), *again.buffers()):
                tensor.data = tensor.data.clone()  # at an odd place of a file in memory it may be added up otherwise
            expected, found = (_outputs(one, example_inputs) for one in (model, again))
        except Exception as problem:
            return f"it cannot be loaded with {_said(own, config)}: {first_line(problem)}"
    same = len(expected) == len(found) and all(map(torch.equal, expected, found))
    return "" if same else f"{_said(own, config)} has its shapes but not its outputs"


def _said(before: Any, after: Any) -> str:
    old, new = before.to_dict(), after.to_dict()
    changed = {name: value for name, value in new.items() if old.get(name) != value and isinstance(value, int)}
    return ", ".join(f"{name}={value}" for name, value in changed.items()) or "its configuration"


@torch.no_grad()
def _outputs(model: nn.Module, example_inputs: ExampleInputs) -> list[Tensor]:
    args, kwargs = arguments(example_inputs)
    with mode(model, training=False):
        found = model(*args, **kwargs)
    return [
        leaf
        for leaf in _pytree.tree_leaves(dict(found) if isinstance(found, Mapping) else found)
        if isinstance(leaf, Tensor)
    ]


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging  # a Hugging Face model is here, so transformers is

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


# --- files ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _folder_beside(target: Path) -> Iterator[Path]:
    """A folder on the same disk, gone afterwards."""
    if not target.absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {target.parent} to save in: make it first.")
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.absolute().parent))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _move(made: Path, target: Path) -> None:
    """Into place, over what an earlier save left; weights of that one would be loaded in place of these."""
    target.mkdir(exist_ok=True)
    for stale in target.glob("*model*.safetensors*"):
        if not (made / stale.name).exists():
            stale.unlink()
    for file in made.iterdir():
        os.replace(file, target / file.name)
