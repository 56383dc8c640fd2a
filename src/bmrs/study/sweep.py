"""The search for hyper-parameters: optuna's TPE over a small space, kept on disk so that it goes on after a kill.

>>> print(space("lenet5"))
{'batch': Choice(options=(16, 32, 64, 128)), 'learning_rate': LogRange(low=0.0001, high=0.1)}
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bmrs.study.energy import measured, total
from bmrs.study.provenance import provenance
from bmrs.study.store import Store

if TYPE_CHECKING:
    import optuna

    from bmrs.study.settings import Setting

NETWORKS = ("mlp", "lenet5")
_NAME = "sweep"


@dataclass(frozen=True)
class Choice:
    """One of a few values."""

    options: tuple[int, ...]

    def suggest(self, name: str, trial: "optuna.trial.Trial") -> int:
        return int(trial.suggest_categorical(name, self.options))


@dataclass(frozen=True)
class LogRange:
    """Any value between two, even on a logarithmic scale."""

    low: float
    high: float

    def suggest(self, name: str, trial: "optuna.trial.Trial") -> float:
        return trial.suggest_float(name, self.low, self.high, log=True)


Space = Mapping[str, Choice | LogRange]


class Screen(Protocol):
    """Told how far the sweep of a setting is."""

    def begin(self, key: str, networks: int) -> None: ...
    def progress(self, done: int, total: int) -> None: ...
    def end(self, key: str, seconds: float) -> None: ...


def space(network: str) -> dict[str, Choice | LogRange]:
    """What the paper searched: the shape of an MLP, and batch and learning rate of any network."""
    if network not in NETWORKS:
        raise ValueError(f"unknown network '{network}': choose one of {', '.join(NETWORKS)}.")
    shape = {"layers": Choice((1, 3, 5, 7, 9)), "width": Choice((10, 30, 50, 100, 150))} if network == "mlp" else {}
    return {**shape, "batch": Choice((16, 32, 64, 128)), "learning_rate": LogRange(1e-4, 0.1)}


def sweep(
    objective: Callable[[dict[str, Any]], float],
    space: Space,
    trials: int,
    seed: int,
    storage: Path,
    on_trial: Callable[[dict[str, Any]], None] = lambda trial: None,
) -> dict[str, Any]:
    """Maximise ``objective(parameters)`` over ``trials`` trials, counting those a former call left in ``storage``.

    A trial that raises or returns no finite number has failed: it is recorded, and the search goes on. The same seed
    gives the same trials, interrupted or not. Returns {"trials": [...], "best": {...} or None, "space", "seed"};
    a trial is {"number", "parameters", "value", "state": "done" or "failed", "error", "seconds"}.
    """
    if trials < 1:
        raise ValueError(f"trials must be 1 or more; got {trials}.")
    described = {"space": {name: asdict(item) for name, item in space.items()}, "seed": seed}
    storage.mkdir(parents=True, exist_ok=True)
    with _study(storage / "sweep.db") as study:
        _same(study, json.loads(json.dumps(described)), storage)
        for trial in study.get_trials(deepcopy=False):
            if not trial.state.is_finished():
                study.tell(trial.number, state=_state("FAIL"))  # without an error: cut off by a kill
        while (number := len(_trials(study))) < trials:
            _one(study, objective, space, seed, number)
            on_trial(_trials(study)[-1])
        found = _trials(study)[:trials]
    done = [trial for trial in found if trial["state"] == "done"]
    return {"trials": found, "best": max(done, key=lambda trial: float(trial["value"]), default=None), **described}


def sweep_settings(
    settings: Iterable["Setting"],
    objective: Callable[["Setting"], Callable[[dict[str, Any]], float]],
    trials: int,
    seed: int,
    store: Store,
    device: str,
    screen: Screen,
) -> dict[str, Any]:
    """A sweep for each setting, with its trials in the store's folder: the content of a result file.

    ``objective(setting)`` gives what is to be maximised. Times and energy of all attempts add up.
    """
    found: dict[str, dict[str, Any]] = {}
    for setting in settings:
        key = setting.key
        screen.begin(key, 1)
        found[key] = _part(store, key, objective(setting), space(setting.network), trials, seed, device, screen)
        screen.end(key, found[key]["seconds"])
    return {
        "name": "sweep",
        "kind": "sweep",
        "provenance": provenance(seed=seed, device=device, trials=trials),
        "settings": {key: {n: v for n, v in one.items() if n != "trials"} for key, one in found.items()},
        "runs": [{"setting": key, **trial} for key, one in found.items() for trial in one["trials"]],
        "energy": total(one["energy"] for one in found.values()),
    }


def _part(
    store: Store,
    key: str,
    objective: Callable[[dict[str, Any]], float],
    space: Space,
    trials: int,
    seed: int,
    device: str,
    screen: Screen,
) -> dict[str, Any]:
    before = (store.done(key) or {}).get("energy")
    with measured(device) as energy:

        def on_trial(trial: dict[str, Any]) -> None:
            store.finish(key, {"energy": total([before, energy.result()])})
            screen.progress(trial["number"] + 1, trials)

        found = sweep(objective, space, trials, seed, store.folder / f"{key}.trials", on_trial)
    seconds = math.fsum(trial["seconds"] or 0.0 for trial in found["trials"])
    return {**found, "seconds": seconds, "energy": (store.done(key) or {}).get("energy")}


def _one(
    study: "optuna.Study", objective: Callable[[dict[str, Any]], float], space: Space, seed: int, number: int
) -> None:
    import optuna

    # A seed of its own for every trial: a sampler made anew after a kill would repeat its first proposals.
    study.sampler = optuna.samplers.TPESampler(seed=seed * 1_000_003 + number)
    trial = study.ask()
    parameters = {name: item.suggest(name, trial) for name, item in space.items()}
    start = time.perf_counter()
    value, error = math.nan, None
    try:
        value = float(objective(parameters))
        if not math.isfinite(value):
            error = f"the objective is {value}"
    except Exception as wrong:  # one bad corner of the space must not end the search
        error = f"{type(wrong).__name__}: {wrong}"
    trial.set_user_attr("seconds", time.perf_counter() - start)
    if error is None:
        study.tell(trial, value)
    else:
        trial.set_user_attr("error", error)
        study.tell(trial, state=_state("FAIL"))


@contextlib.contextmanager
def _study(path: Path) -> Iterator["optuna.Study"]:
    import optuna

    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
    try:
        yield optuna.create_study(storage=storage, study_name=_NAME, direction="maximize", load_if_exists=True)
    finally:
        storage.remove_session()
        storage.engine.dispose()
        optuna.logging.set_verbosity(verbosity)


def _same(study: "optuna.Study", described: dict[str, Any], storage: Path) -> None:
    for name, value in described.items():
        if study.user_attrs.setdefault(name, value) != value:
            raise ValueError(f"{storage} holds a sweep with another {name}: choose another --out, or use --restart.")
        study.set_user_attr(name, value)


def _trials(study: "optuna.Study") -> list[dict[str, Any]]:
    """Every trial that came to an end, in order; those a kill cut off do not count."""
    ended = [
        trial
        for trial in study.get_trials(deepcopy=False)
        if trial.state == _state("COMPLETE") or "error" in trial.user_attrs
    ]
    return [
        {
            "number": number,
            "parameters": dict(trial.params),
            "value": trial.value if trial.state == _state("COMPLETE") else None,
            "state": "done" if trial.state == _state("COMPLETE") else "failed",
            "error": trial.user_attrs.get("error"),
            "seconds": trial.user_attrs.get("seconds"),
        }
        for number, trial in enumerate(ended)
    ]


def _state(name: str) -> "optuna.trial.TrialState":
    from optuna.trial import TrialState

    return TrialState[name]
