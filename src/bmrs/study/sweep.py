"""The search for hyper-parameters: optuna's TPE over a small space, kept on disk so that it goes on after a kill.

>>> print(space("lenet5"))
{'batch': Choice(options=(16, 32, 64, 128)), 'learning_rate': LogRange(low=0.0001, high=0.1)}
"""

import contextlib
import functools
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bmrs.study.energy import total
from bmrs.study.engine import Engine, Local, Task
from bmrs.study.provenance import provenance
from bmrs.study.screen import Screen
from bmrs.study.store import Store

if TYPE_CHECKING:
    import optuna

    from bmrs.study.settings import Setting

NETWORKS = ("mlp", "lenet5")
_NAME, _OUTCOME = "sweep", "outcome"


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


def space(network: str) -> dict[str, Choice | LogRange]:
    """What the paper searched: the shape of an MLP, and batch and learning rate of any network."""
    if network not in NETWORKS:
        raise ValueError(f"unknown network '{network}': choose one of {', '.join(NETWORKS)}.")
    shape = {"layers": Choice((1, 3, 5, 7, 9)), "width": Choice((10, 30, 50, 100, 150))} if network == "mlp" else {}
    return {**shape, "batch": Choice((16, 32, 64, 128)), "learning_rate": LogRange(1e-4, 0.1)}


@dataclass(frozen=True)
class Proposal:
    """Parameters to try."""

    number: int  # of the trial, among those that count
    parameters: dict[str, Any]


Objective = Callable[[dict[str, Any]], float]
Outcome = Mapping[str, Any]  # "value" or None, "error" or None, "seconds"
OnTrial = Callable[[dict[str, Any], int], None]  # is told a trial, and how many are done
Evaluate = Callable[[Iterator[Proposal | None]], Iterator[tuple[Proposal, Outcome]]]


def sweep(
    objective: Objective,
    space: Space,
    trials: int,
    seed: int,
    storage: Path,
    on_trial: OnTrial = lambda trial, done: None,
) -> dict[str, Any]:
    """Maximise ``objective(parameters)`` over ``trials`` trials, counting those a former call left in ``storage``.

    A trial that raises or returns no finite number has failed: it is recorded, and the search goes on. The same seed
    gives the same trials, interrupted or not. Returns {"trials": [...], "best": {...} or None, "space", "seed"};
    a trial is {"number", "parameters", "value", "state": "done" or "failed", "error", "seconds"}.
    """
    return search(functools.partial(_in_turn, objective), space, trials, seed, storage, on_trial)


def search(
    evaluate: Evaluate,
    space: Space,
    trials: int,
    seed: int,
    storage: Path,
    on_trial: OnTrial = lambda trial, done: None,
    ahead: int = 1,
) -> dict[str, Any]:
    """:func:`sweep`, whoever tries the proposals.

    ``evaluate`` may hand back outcomes in any order; None among its proposals means that there is none before another
    outcome. Each trial is proposed from the outcomes of all but the ``ahead`` - 1 trials before it, whatever else is
    known by then: the order of outcomes changes nothing.
    """
    if trials < 1:
        raise ValueError(f"trials must be 1 or more; got {trials}.")
    described = {"space": {name: asdict(item) for name, item in space.items()}, "seed": seed}
    storage.mkdir(parents=True, exist_ok=True)
    with _study(storage / "sweep.db") as study:
        _same(study, json.loads(json.dumps(described)), storage)
        order = _Order(study, space, trials, seed, ahead)
        for proposal, outcome in evaluate(order.proposals()):
            order.record(proposal, outcome)
            on_trial(_described(proposal.number, proposal.parameters, outcome), order.told + len(order.known))
        found = _trials(study)[:trials]
    done = [trial for trial in found if trial["state"] == "done"]
    return {"trials": found, "best": max(done, key=lambda trial: float(trial["value"]), default=None), **described}


class _Order:
    """Trials in the order of their numbers: proposed, then known, and told to the sampler when it is their turn."""

    def __init__(self, study: "optuna.Study", space: Space, trials: int, seed: int, ahead: int) -> None:
        self.study, self.space, self.trials, self.seed, self.ahead = study, space, trials, seed, ahead
        self.told = 0
        self.open: dict[int, optuna.Trial] = {}  # by our number: optuna's trials that are not told
        self.known: dict[int, Outcome] = {}  # outcomes of some of them
        for trial in study.get_trials(deepcopy=False):
            if _told(trial):
                self.told += 1
            elif not trial.state.is_finished():
                self._find(trial)

    def _find(self, trial: "optuna.trial.FrozenTrial") -> None:
        import optuna

        if trial.params.keys() != self.space.keys():  # cut off while it was proposed: it does not count
            self.study.tell(trial.number, state=_state("FAIL"))
            return
        number = self.told + len(self.open)
        self.open[number] = optuna.trial.Trial(self.study, trial._trial_id)
        if _OUTCOME in trial.user_attrs:
            self.known[number] = trial.user_attrs[_OUTCOME]

    def proposals(self) -> Iterator[Proposal | None]:
        """Those a kill cut off, then new ones."""
        for number, trial in sorted(self.open.items()):
            if number < self.trials and number not in self.known:
                yield Proposal(number, dict(trial.params))
        while (number := self.told + len(self.open)) < self.trials:
            yield self._propose(number) if self._tell(number - self.ahead + 1) else None

    def _propose(self, number: int) -> Proposal:
        import optuna

        # A seed of its own for every trial: a sampler made anew after a kill would repeat its first proposals.
        self.study.sampler = optuna.samplers.TPESampler(seed=self.seed * 1_000_003 + number)
        self.open[number] = trial = self.study.ask()
        return Proposal(number, {name: item.suggest(name, trial) for name, item in self.space.items()})

    def record(self, proposal: Proposal, outcome: Outcome) -> None:
        """Keep an outcome on the disk."""
        plain = {name: outcome[name] for name in ("value", "error", "seconds")}
        self.open[proposal.number].set_user_attr(_OUTCOME, plain)
        self.known[proposal.number] = plain

    def _tell(self, number: int) -> bool:
        """So many trials and no more, or none that is not known; returns whether they are."""
        while self.told < number and (outcome := self.known.pop(self.told, None)) is not None:
            trial = self.open.pop(self.told)
            trial.set_user_attr("seconds", outcome["seconds"])
            if outcome["error"] is None:
                self.study.tell(trial, outcome["value"])
            else:
                trial.set_user_attr("error", outcome["error"])
                self.study.tell(trial, state=_state("FAIL"))
            self.told += 1
        return self.told >= number


def _in_turn(
    objective: Objective, proposals: Iterator[Proposal | None]
) -> Iterator[tuple[Proposal, Outcome]]:  # fmt: skip
    for proposal in proposals:
        if proposal is not None:
            start = time.perf_counter()
            outcome = _tried(objective, proposal.parameters)
            yield proposal, {**outcome, "seconds": time.perf_counter() - start}


def _tried(objective: Objective, parameters: dict[str, Any]) -> dict[str, Any]:
    from bmrs.study.files import DataError

    try:
        value = float(objective(parameters))
    except (OSError, ImportError, DataError):  # what is missing is missing in every trial
        raise
    except Exception as wrong:  # one bad corner of the space must not end the search
        return {"value": None, "error": f"{type(wrong).__name__}: {wrong}"}
    if not math.isfinite(value):
        return {"value": None, "error": f"the objective is {value}"}
    return {"value": value, "error": None}


# --- settings ---------------------------------------------------------------------------------------------------------


def sweep_settings(
    settings: Iterable["Setting"],
    objective: Callable[..., Objective],
    trials: int,
    seed: int,
    store: Store,
    device: str,
    screen: Screen,
    *,
    data_dir: Path | None = None,
    engine: Engine | None = None,
) -> dict[str, Any]:
    """A sweep for each setting, with its trials in the store's folder: the content of a result file.

    ``objective(setting, device=..., data_dir=...)``, a function of a module, gives what is to be maximised. Trials are
    the ``engine``'s tasks. Times and energy of all attempts add up.
    """
    engine = engine or Local()
    found: dict[str, dict[str, Any]] = {}
    for setting in settings:
        key = setting.key
        screen.begin(key, 1)
        make = functools.partial(_trial, objective, setting, device, data_dir)
        found[key] = _part(store, setting, make, trials, seed, device, screen, engine)
        screen.end(key, found[key]["seconds"])
    _objective.cache_clear()
    elsewhere = {} if engine.name == "local" else {
        "engine": engine.name, "workers": engine.slots, "machine": "; ".join(sorted(engine.machines())),
    }  # fmt: skip
    return {
        "name": "sweep",
        "kind": "sweep",
        "provenance": provenance(seed=seed, device=device, trials=trials, **elsewhere),
        "settings": {key: {n: v for n, v in one.items() if n != "trials"} for key, one in found.items()},
        "runs": [{"setting": key, **trial} for key, one in found.items() for trial in one["trials"]],
        "energy": total(one["energy"] for one in found.values()),
    }


def _part(
    store: Store,
    setting: "Setting",
    make: Callable[..., dict[str, Any]],
    trials: int,
    seed: int,
    device: str,
    screen: Screen,
    engine: Engine,
) -> dict[str, Any]:
    key = setting.key

    def evaluate(proposals: Iterator[Proposal | None]) -> Iterator[tuple[Proposal, Outcome]]:
        under_way: dict[str, Proposal] = {}

        def tasks() -> Iterator[Task | None]:
            for proposal in proposals:
                if proposal is None:
                    yield None
                    continue
                name = f"{key}.trial{proposal.number}"
                under_way[name] = proposal
                yield Task(name, key, 1, proposal.parameters, device, functools.partial(make, proposal.parameters))

        with contextlib.closing(engine.run(tasks(), store, _Trials(screen))) as results:
            for task, content in results:
                before = (store.done(key) or {}).get("energy")
                store.finish(key, {"energy": total([before, content["energy"]])})
                yield under_way.pop(task.name), content

    found = search(
        evaluate, space(setting.network), trials, seed, store.folder / f"{key}.trials",
        lambda trial, done: screen.progress(key, done, trials), ahead=2 * engine.slots - 1,
    )  # fmt: skip
    seconds = math.fsum(trial["seconds"] or 0.0 for trial in found["trials"])
    return {**found, "seconds": seconds, "energy": (store.done(key) or {}).get("energy")}


def _trial(
    objective: Callable[..., Objective],
    setting: "Setting",
    device: str,
    data_dir: Path | None,
    parameters: dict[str, Any],
    **states: Any,
) -> dict[str, Any]:
    """A trial in whatever process; one that is cut off begins anew."""
    return _tried(_objective(objective, setting, device, data_dir), parameters)


@functools.lru_cache(maxsize=1)  # it holds the images
def _objective(
    objective: Callable[..., Objective], setting: "Setting", device: str, data_dir: Path | None
) -> Objective:  # fmt: skip
    return objective(setting, device=device, data_dir=data_dir)


class _Trials:
    """What an engine says about tasks, where a setting's line counts trials."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen

    def begin(self, key: str, networks: int, task: str = "") -> None: ...
    def progress(self, key: str, done: int, total: int, task: str = "") -> None: ...
    def ended_task(self, key: str, task: str, *, done: bool = True) -> None: ...
    def note(self, about: str, line: str) -> None:
        self.screen.note(about, line)

    def status(self, line: str) -> None:
        self.screen.status(line)


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


def _told(trial: "optuna.trial.FrozenTrial") -> bool:
    return trial.state == _state("COMPLETE") or "error" in trial.user_attrs


def _trials(study: "optuna.Study") -> list[dict[str, Any]]:
    """Every trial that came to an end, in order; those a kill cut off do not count."""
    ended = [
        (trial.params, trial.user_attrs.get(_OUTCOME) or {**trial.user_attrs, "value": trial.value})
        for trial in study.get_trials(deepcopy=False)
        if _told(trial) or _OUTCOME in trial.user_attrs
    ]
    return [_described(number, parameters, outcome) for number, (parameters, outcome) in enumerate(ended)]


def _described(number: int, parameters: Mapping[str, Any], outcome: Outcome) -> dict[str, Any]:
    return {
        "number": number,
        "parameters": dict(parameters),
        "value": outcome["value"],
        "state": "done" if outcome.get("error") is None else "failed",
        "error": outcome.get("error"),
        "seconds": outcome.get("seconds"),
    }


def _state(name: str) -> "optuna.trial.TrialState":
    from optuna.trial import TrialState

    return TrialState[name]
