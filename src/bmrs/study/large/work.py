"""A plan of large networks: one task for each setting, method and seed, each a part of the folder."""

import dataclasses
import functools
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

import bmrs
from bmrs.study.energy import total
from bmrs.study.engine import Local, Task
from bmrs.study.jobs import ROOT, device_named
from bmrs.study.large.deadline import Deadline, TimeUpError
from bmrs.study.large.recipe import METHODS, SETTINGS, Recipe, Setting
from bmrs.study.provenance import provenance
from bmrs.study.screen import Screen
from bmrs.study.store import Store, state
from bmrs.study.summary import ordered_methods

FORMAT = 1  # of the parts: raise it when old ones can no longer be used


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a command was asked for, settled. ``ways``: of measuring; none leaves it for later."""

    name: str
    settings: tuple[Setting, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    recipe: Recipe
    device: str
    data_dir: Path | None
    out: Path
    restart: bool
    ways: tuple[str, ...]

    @property
    def parts(self) -> Path:
        return self.out / "parts"

    @property
    def key(self) -> dict[str, Any]:
        """What the parts of a folder have in common."""
        recipes = {setting.network: self.recipe.to_json(setting) for setting in SETTINGS.values()}
        facts = {f"{network} {name}": value for network, facts in recipes.items() for name, value in facts.items()}
        return {"format": FORMAT, "protocol": "large", **facts}

    def tasks(self) -> Iterator[tuple[str, Setting, str, int]]:
        """Name, setting, method and seed; l2 comes last, since it asks what bmrs_n removed."""
        for setting in self.settings:
            for seed in self.seeds:
                for method in sorted(self.methods, key=lambda m: (m == "l2", self.methods.index(m))):
                    yield f"{setting.key}.{method}.seed{seed}", setting, method, seed

    def file(self, name: str) -> Path:
        """Where the pruned network of a task is kept."""
        return self.out / "networks" / f"{name}.safetensors"

    def to_json(self) -> dict[str, Any]:
        recipes = {setting.key: self.recipe.to_json(setting) for setting in self.settings}
        tasks = [
            {"name": name, "setting": setting.key, "method": method, "seed": seed,
             "state": "to do" if self.restart else state(self.parts, name)}
            for name, setting, method, seed in self.tasks()
        ]  # fmt: skip
        return {"name": self.name, "out": str(self.out), "device": self.device, "measured": list(self.ways),
                "recipes": recipes, "tasks": tasks}  # fmt: skip


def settle(
    name: str, recipe: Recipe, *, settings: str = "", methods: str = "", seeds: int = 3, device: str = "auto",
    data_dir: Path | None = None, out: Path | None = None, restart: bool = False, ways: str = "",
    known_ways: tuple[str, ...] = (),
) -> Plan:  # fmt: skip
    """Settle the options; refuses what cannot work before anything is done."""
    keys = _chosen("--settings", settings, tuple(SETTINGS))
    chosen = _chosen("--methods", methods, METHODS, also=r"bmrs_u\d+(\.\d+)?")
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"--name must be letters, digits, '.', '_' or '-', to name files; got '{name}'.")
    return Plan(
        name, tuple(SETTINGS[key] for key in keys), chosen, tuple(range(seeds)), recipe, device_named(device),
        data_dir and data_dir.absolute(), out or ROOT / name, restart,
        () if ways == "none" else _chosen("--measure", ways, known_ways),
    )  # fmt: skip


def _chosen(option: str, text: str, known: tuple[str, ...], also: str = "$^") -> tuple[str, ...]:
    found = tuple(dict.fromkeys(text.replace(",", " ").split())) or known
    for one in found:
        if one not in known and not re.fullmatch(also, one):
            raise ValueError(f"{option}: '{one}' is unknown: choose from {', '.join(known)}.")
    return found


def compute(
    plan: Plan, store: Store, screen: Screen, deadline: Deadline, tell: Callable[[str], None]
) -> tuple[list[dict[str, Any]], bool]:
    """All parts in the folder, those done now included, and whether the time was up before the plan was done."""
    for setting in plan.settings:
        screen.expect(setting.key, len(plan.methods) * len(plan.seeds))
    left = {setting.key: len(plan.methods) * len(plan.seeds) for setting in plan.settings}

    def ended(setting: str, task: str) -> None:
        screen.ended_task(setting, task)
        left[setting] -= 1
        if not left[setting]:
            screen.end(setting, sum(part["seconds"] for part in parts(store) if part["runs"][0]["setting"] == setting))

    try:
        for task, content in Local().run(_tasks(plan, store, screen, ended, deadline, tell), store, screen):
            store.finish(task.name, content)
            ended(task.setting, task.name)
    except TimeUpError:
        return parts(store), True
    return parts(store), False


def parts(store: Store) -> list[dict[str, Any]]:
    """Of all tasks in the folder that are done, in the order of the tables."""
    names = sorted(path.name.removesuffix(".part.json") for path in store.folder.glob("*.part.json"))
    found = [part for name in names if (part := store.done(name)) is not None]
    methods = ordered_methods(part["runs"][0]["method"] for part in found)

    def place(part: Mapping[str, Any]) -> tuple[int, int, int]:
        run = part["runs"][0]
        return list(SETTINGS).index(run["setting"]), methods.index(run["method"]), run["seed"]

    return sorted(found, key=place)


def _tasks(
    plan: Plan, store: Store, screen: Screen, ended: Callable[[str, str], None], deadline: Deadline,
    tell: Callable[[str], None],
) -> Iterator[Task]:  # fmt: skip
    for name, setting, method, seed in plan.tasks():
        if (part := store.done(name)) is not None:
            epochs = len(part["runs"][0]["history"])
            screen.begin(setting.key, 1, f"{name}, done before")
            screen.progress(setting.key, epochs, epochs, f"{name}, done before")
            ended(setting.key, f"{name}, done before")
            continue
        share = None
        if method == "l2":
            beside = store.done(f"{setting.key}.bmrs_n.seed{seed}")
            if beside is None:
                raise ValueError("method l2 removes as many units as bmrs_n does: add bmrs_n to the methods.")
            share = beside["runs"][0]["removed_units"]
        yield Task(
            name=name, setting=setting.key, networks=1, recipe=plan.recipe.to_json(setting), device=plan.device,
            work=functools.partial(perform, plan, name, setting, method, seed, share, deadline, tell),
        )  # fmt: skip


def perform(
    plan: Plan, name: str, setting: Setting, method: str, seed: int, share: float | None, deadline: Deadline,
    tell: Callable[[str], None], *, checkpoint: Any, resume: Any, progress: Any,
) -> dict[str, Any]:  # fmt: skip
    """The work of a task: training, and what came of it measured."""
    found = _module("protocol").continuous(
        setting, plan.recipe, method, seed, device=plan.device, data_dir=plan.data_dir, share=share,
        file=plan.file(name), deadline=deadline, checkpoint=checkpoint, resume=resume, progress=progress, tell=tell,
    )  # fmt: skip
    physical = measured(plan, setting, found, deadline, tell) if plan.ways else None
    return {**found, "physical": physical, "made": _made()}


def measured(
    plan: Plan, setting: Setting, part: Mapping[str, Any], deadline: Deadline, tell: Callable[[str], None]
) -> dict[str, Any]:
    """The pruned network of a part beside the whole one, both as they are made anew."""
    run, entry = part["runs"][0], part["setting"]
    recipe = plan.recipe.of(setting)
    make = {"whole": lambda: _whole(setting, entry["classes"], recipe)}
    if run["file"] is not None:
        make["pruned"] = lambda: bmrs.load(make["whole"](), plan.out / "networks" / run["file"])
    shape = (3, recipe.resolution, recipe.resolution)
    found: dict[str, Any] = _module("measuring").measure(
        make, shape, recipe, device=plan.device, ways=plan.ways, deadline=deadline, tell=tell
    )
    return found


def measure_again(
    plan: Plan, store: Store, deadline: Deadline, tell: Callable[[str], None]
) -> tuple[list[dict[str, Any]], bool]:
    """Measure what the plan's tasks left, in these ways; what was measured in others stays."""
    up = False
    for name, setting, _, _ in plan.tasks():
        part = store.done(name)
        if part is None:
            continue
        if not (up := up or deadline.left() < 0):
            tell(f"{name}: measuring")
            physical = measured(plan, setting, part, deadline, tell)
            together = _module("measuring").merged(part["physical"], physical)
            store.finish(name, {**part, "physical": together, "measured": _made()})  # fmt: skip
    return parts(store), up


def content(plan: Plan, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the JSON file: all parts of the folder, whatever this command was asked for."""
    entries: dict[str, dict[str, Any]] = {}
    for part in found:
        own = entries.setdefault(part["runs"][0]["setting"], {**part["setting"], "seconds": 0.0, "networks": 0})
        own["seconds"] += part["seconds"]
        own["networks"] += 1
    made = provenance(
        device=plan.device, seeds=len({part["runs"][0]["seed"] for part in found}),
        methods=ordered_methods(part["runs"][0]["method"] for part in found),
        parts={_name(part): part["made"] for part in found},
    )  # fmt: skip
    return {
        "name": plan.name, "kind": "continuous", "provenance": made, "settings": entries,
        "runs": [{**run, "physical": part["physical"]} for part in found for run in part["runs"]],
        "energy": total(part["energy"] for part in found),
    }  # fmt: skip


# --- times alone ------------------------------------------------------------------------------------------------------


def time_all(plan: Plan, store: Store, screen: Screen) -> None:
    """The settings that are not timed yet, one after the other."""

    def tasks() -> Iterator[Task]:
        for setting in plan.settings:
            if (part := store.done(setting.key)) is not None:
                screen.end(setting.key, part["seconds"], " (done before)")
            else:
                yield Task(
                    name=setting.key, setting=setting.key, networks=3, recipe=plan.recipe.to_json(setting),
                    device=plan.device, work=functools.partial(_timed, plan, setting),
                )  # fmt: skip

    for task, found in Local().run(tasks(), store, screen):
        store.finish(task.name, found)
        screen.end(task.setting, found["seconds"])


def _timed(plan: Plan, setting: Setting, *, checkpoint: Any, resume: Any, progress: Any) -> dict[str, Any]:
    found = _module("timing").measure(setting, plan.recipe, device=plan.device, progress=progress)
    return {**found, "made": _made()}


def timing_content(plan: Plan, store: Store) -> dict[str, Any]:
    """Of the JSON file: all settings in the folder."""
    found = {key: part for key in SETTINGS if (part := store.done(key)) is not None}
    made = provenance(device=plan.device, seeds=1, parts={key: part["made"] for key, part in found.items()})
    return {
        "name": plan.name, "kind": "timing", "provenance": made,
        "settings": {key: {**part["setting"], "seconds": part["seconds"]} for key, part in found.items()},
        "runs": [run for part in found.values() for run in part["runs"]],
        "energy": total(part["energy"] for part in found.values()),
    }  # fmt: skip


def _name(part: Mapping[str, Any]) -> str:
    run = part["runs"][0]
    return f"{run['setting']}.{run['method']}.seed{run['seed']}"


def _whole(setting: Setting, classes: int, recipe: Recipe) -> nn.Module:
    network: nn.Module = _module("networks").build(setting, classes, recipe, 0, filled=False)
    return network


def _made() -> dict[str, str]:
    made = provenance()
    return {name: made[name] for name in ("date", "commit", "machine")}


def _module(name: str) -> Any:
    """A module that is slow to load, imported when it is needed."""
    return importlib.import_module(f"bmrs.study.large.{name}")
