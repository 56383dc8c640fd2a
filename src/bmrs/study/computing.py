"""A plan computed: settings as tasks, tasks by an engine, and what they found put together again."""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from bmrs.study.energy import measured, total
from bmrs.study.engine import Engine, Task
from bmrs.study.jobs import FORMAT, SHARED, Plan
from bmrs.study.provenance import provenance
from bmrs.study.reuse import Shared, shared
from bmrs.study.screen import Screen
from bmrs.study.store import Store, finite

_LISTS = ("correlations", "posteriors")  # of a part, besides its runs
_MADE = ("date", "commit", "machine")


def compute(plan: Plan, screen: Screen, engine: Engine, note: Callable[[str], None]) -> dict[str, Any]:
    """All parts of a job, those done before from their files, as the content of its JSON file.

    ``note`` is told what is done anew.
    """
    parts: dict[str, dict[str, Any]] = {}

    def done_before(name: str, recipe: Mapping[str, Any]) -> dict[str, Any] | None:
        part = store.done(name)
        if part is not None and part["recipe"] != finite(recipe):
            note(f"'{name}' was done with other epochs or another recipe: it is done anew.")
            return None
        return part

    with Store(plan.parts, plan.key, restart=plan.restart) as store:
        begun: dict[str, _Setting] = {}
        for setting in plan.settings:
            key = setting.key
            if (part := done_before(key, dataclasses.asdict(setting))) is not None:
                parts[key] = part
                screen.end(key, part["seconds"], " (done before)")
            else:
                begun[key] = _Setting(plan, setting, engine)
                if len(plan.blocks) > 1:
                    for task in begun[key].tasks:
                        if (found := done_before(task.name, task.recipe)) is not None:
                            begun[key].found[task.name] = found
                screen.expect(key, len(begun[key].missing()))

        def finish(own: _Setting) -> None:
            parts[own.key] = part = own.part()
            store.finish(own.key, part)
            for task in own.tasks:
                if task.name != own.key:
                    store.drop(task.name)
            screen.end(own.key, part["seconds"])

        for own in begun.values():
            if not own.missing():
                finish(own)
        tasks = [task for own in begun.values() for task in own.missing()]
        with closing(engine.run(tasks, store, screen, one_at_a_time=plan.job.protocol == "timing")) as results:
            for task, content in results:
                own = begun[task.setting]
                own.found[task.name] = content
                if not own.missing():
                    finish(own)
                else:  # recorded whatever becomes of the others
                    store.finish(task.name, content)
                    screen.ended_task(task.setting, task.name)
    return _content(plan, {setting.key: parts[setting.key] for setting in plan.settings}, engine)


def _content(plan: Plan, parts: Mapping[str, dict[str, Any]], engine: Engine) -> dict[str, Any]:
    runs = plan.job.kind if plan.job.kind in _LISTS else "runs"
    places = [part["made"] for part in parts.values()]
    # Where the numbers come from, which need not be where they are put together.
    where = {"device": _joined(place.get("device", plan.device) for place in places),
             "machine": _joined(place["machine"] for place in places)}  # fmt: skip
    how: dict[str, Any] = {}
    if engine.name != "local":
        how = {"engine": engine.name}
    elif engine.slots > 1 and plan.job.protocol != "timing":
        how = {"at_once": engine.slots}
    split = {"seeds_per_task": plan.seeds_per_task} if len(plan.blocks) > 1 else {}
    made = provenance(
        seeds=len(plan.seeds), methods=plan.methods, **where, parts={k: p["made"] for k, p in parts.items()},
        reused=sorted({source for part in parts.values() for source in part.get("reused", ())}), **split, **how,
    )  # fmt: skip
    return {
        "name": plan.job.name,
        "kind": plan.job.kind,
        "provenance": made,
        "settings": {key: {**part["setting"], "seconds": part["seconds"]} for key, part in parts.items()},
        "runs": [
            run for part in parts.values() for run in part[runs]
            if plan.job.name != "figure2" or run["method"] != "gradient"
        ],
        "energy": total(part["energy"] for part in parts.values()),
    }  # fmt: skip


class _Setting:
    """A setting that is not done yet: its tasks, and what those that are done found."""

    def __init__(self, plan: Plan, setting: Any, engine: Engine) -> None:
        self.plan, self.key, self.recipe = plan, setting.key, dataclasses.asdict(setting)
        self.there = self._there(engine) if plan.job.protocol == "continuous" else None
        self.tasks = [self._task(setting, block) for block in plan.blocks] if self._left() else []
        self.found: dict[str, dict[str, Any]] = {}

    def missing(self) -> list[Task]:
        return [task for task in self.tasks if task.name not in self.found]

    def part(self) -> dict[str, Any]:
        """What all tasks found, and what another command had, as one."""
        found = [self.found[task.name] for task in self.tasks]
        runs = [run for part in found for run in part["runs"]]
        there = {}
        if self.there is not None:
            runs = [run for run in (*runs, *self.there.runs) if run["method"] in self.plan.methods]
            there = {"reused": self.there.sources}
        if not found:
            assert self.there is not None
            with measured(self.plan.device) as nothing:
                pass
            entry, made = dict(self.there.setting or {}), _made()
            energy: dict[str, Any] | None = nothing.result()
        else:
            entry, made = found[0]["setting"], _together([part["made"] for part in found])
            energy = total(part["energy"] for part in found)
        if self.plan.job.protocol != "timing":
            order = self.plan.methods.index
            runs.sort(key=lambda r: (order(r["method"]), r.get("price", ""), r.get("strength", 0.0), r["seed"]))
        of_tasks = [part["setting"] for part in found]
        return {
            "setting": {
                **entry,
                "seconds": math.fsum(one["seconds"] for one in of_tasks),
                "networks": sum(one["networks"] for one in of_tasks),
            },
            "runs": runs,
            **{name: [one for part in found for one in part[name]] for name in _LISTS if found and name in found[0]},
            **there,
            "made": made,
            "recipe": self.recipe,
            "seconds": math.fsum(part["seconds"] for part in found),
            "energy": energy,
        }

    def _there(self, engine: Engine) -> Shared:
        """What other commands of this study trained already, by this code and on such machines."""
        made = {**_made(), "machine": _joined(engine.machines())}
        plan = self.plan
        return shared(plan.others, self.key, self.recipe, FORMAT, made, plan.methods, plan.prices, plan.seeds)

    def _left(self) -> bool:
        return self.there is None or bool(self.there.methods)

    def _task(self, setting: Any, block: tuple[int, ...]) -> Task:
        plan = self.plan
        options: dict[str, Any] = {}
        if self.there is not None:
            options = {"methods": self.there.methods, "seeds": block, "prices": self.there.prices}
        elif plan.job.protocol == SHARED:
            options = {"methods": plan.methods, "seeds": block, "fractions": plan.fractions}
        place = {"device": plan.device, "data_dir": plan.data_dir}
        return Task(
            name=plan.task_name(self.key, block),
            setting=self.key,
            networks=plan.networks(len(block)),
            recipe={**self.recipe, **options},
            device=plan.device,
            work=functools.partial(perform, plan.job.protocol, setting, {**options, **place}),
        )


def perform(
    protocol: str, setting: Any, options: Mapping[str, Any], *, checkpoint: Any, resume: Any, progress: Any
) -> dict[str, Any]:
    """The work of a task, in whatever process."""
    states = {"checkpoint": checkpoint, "resume": resume}
    if protocol == "timing":
        found = _module("timing").measure(setting, progress=progress, **options)
    elif protocol == SHARED:
        found = _module("post_training").post_training(setting, progress=progress, **states, **options)
    else:
        found = _module("protocols").continuous(setting, progress=progress, **states, **options)
    return {**found, "made": {**_made(), "device": options["device"]}}


def _made() -> dict[str, str]:
    made = provenance()
    return {name: made[name] for name in _MADE}


def _together(made: Sequence[Mapping[str, str]]) -> dict[str, str]:
    devices = {"device": _joined(one["device"] for one in made)} if all("device" in one for one in made) else {}
    rest = {name: _joined(one[name] for one in made) for name in _MADE[1:]}
    return {"date": max(one["date"] for one in made), **rest, **devices}


def _joined(names: Any) -> str:
    """Each once; a name may be several already."""
    return "; ".join(sorted({one for name in names for one in name.split("; ")}))


def _module(name: str) -> Any:
    """A module of the study, imported when it is needed: some are slow to load."""
    return importlib.import_module(f"bmrs.study.{name}")
