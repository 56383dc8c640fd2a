"""Tasks on a Ray cluster of three machines, which are processes here; in the end one of them is killed."""

import functools
import importlib.util
import signal
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from bmrs.study import engine_worker
from bmrs.study.computing import compute
from bmrs.study.engine import Local, Task, TasksError
from bmrs.study.jobs import JOBS, settle
from bmrs.study.screen import Screen
from bmrs.study.settings import SETTINGS
from bmrs.study.store import Store
from bmrs.study.sweep import search, space, sweep_settings
from tests.study import ray_tasks

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
RETRIES = 2


@pytest.fixture(scope="module")
def cluster():
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=1)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def engine(cluster):
    from bmrs.study.engine_ray import Ray

    with Ray(cluster.address, retries=RETRIES, every=0.05) as engine:
        engine.device("cpu")
        yield engine


class Heard(Screen):
    """What the screen is told; ``at(setting, done, task)`` may interfere."""

    def __init__(self, keys, at=lambda *_: None):
        super().__init__(Console(quiet=True), keys)
        self.at, self.notes, self.done = at, [], []

    def progress(self, key, done, total, task=""):
        super().progress(key, done, total, task)
        self.done.append((task, done))
        self.at(done, task)

    def note(self, about, line):
        self.notes.append((about, line))


def task(name, work, *arguments, **more):
    return Task(name, "made", 1, {"of": name}, "cpu", functools.partial(work, *arguments, **more))


def expected(steps):
    return functools.reduce(lambda value, step: (31 * value + step) % 1_000_003, range(1, steps + 1), 0)


class TestTasks:
    def test_what_dies_goes_on_and_what_fails_costs_only_itself(self, engine, tmp_path):
        log = tmp_path / "log"
        log.mkdir()
        tasks = [
            task("steady", ray_tasks.count, log, "steady", 20),
            task("dies", ray_tasks.count, log, "dies", 30, pause=0.05, dies_at=20),
            task("broken", ray_tasks.fails, log, "broken", "bug"),
            task("data-a", ray_tasks.fails, log, "data-a", "data"),
            task("data-b", ray_tasks.fails, log, "data-b", "data"),
            task("talks", ray_tasks.talks),
        ]
        screen, found = Heard(["made"]), []

        def all_of(store):
            for own, content in engine.run(tasks, store, screen):
                found.append((own.name, content))
                store.finish(own.name, content)

        with Store(tmp_path / "store", {}) as store, pytest.raises(TasksError) as failed:
            all_of(store)
        assert sorted(name for name, _ in found) == ["dies", "steady", "talks"]
        results = dict(found)
        assert (results["steady"]["value"], results["steady"]["began"]) == (expected(20), 0)
        assert results["dies"]["value"] == expected(30)
        assert 0 < results["dies"]["began"] <= 20  # from the last state that was kept
        steps = [int(line) for line in (log / "dies").read_text().split()]
        assert steps == [*range(1, 21), *range(results["dies"]["began"] + 1, 31)]
        assert (log / "broken").read_text() == "tried\n" * (1 + RETRIES)
        assert (log / "data-a").read_text() == (log / "data-b").read_text() == "tried\n"
        sentence = str(failed.value)
        assert sentence.startswith("3 tasks failed (")
        assert all(name in sentence for name in ("broken", "data-a", "data-b", "RuntimeError: the same"))
        assert sentence.count("mnist is not complete in /nowhere") == 1
        assert "--data-dir on a disk they share" in sentence
        assert "\n" not in sentence
        assert "every time" in (tmp_path / "store" / "broken.error.txt").read_text()
        assert [line for about, line in screen.notes if about == "talks"] == [
            "take care", "a line of a log", "something printed",
        ]  # fmt: skip
        assert sum("its worker" in line for about, line in screen.notes if about == "dies") == 1
        assert sum("mnist" in line for _, line in screen.notes) == 1

    def test_former_attempts_are_not_listened_to(self, engine, tmp_path):
        import ray

        own = task("slow", ray_tasks.count, tmp_path, "slow", 15, pause=0.1)
        forged = []

        def forge(done, name):
            if not forged:
                word = engine_worker.Word("slow", 0, progress=(999, 999), state=b"nonsense", lines=("late",))
                forged.append(ray.get(engine._mailbox.tell.remote(word)))

        screen = Heard(["made"], forge)
        with Store(tmp_path / "store", {}) as store:
            [(_, content)] = engine.run([own], store, screen)
        assert forged
        assert content["value"] == expected(15)
        assert max(done for _, done in screen.done) == 15
        assert not screen.notes

    def test_other_code_is_refused(self, engine, monkeypatch):
        monkeypatch.setattr(engine, "_machines", None)
        monkeypatch.setattr(engine_worker, "code", lambda: {"bmrs": "0.0.1 (abc)"})
        with pytest.raises(ValueError, match=r"has bmrs .*, the command bmrs 0\.0\.1 \(abc\): install the same"):
            engine.machines()


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1:9", "no Ray cluster at --address 127.0.0.1:9: .*refused"),
        ("nowhere", "no Ray cluster at --address nowhere: it must read host:port, as 10.0.0.1:6379, or auto"),
        ("ray://10.0.0.1:10001", "give the command on a machine of the cluster"),
    ],
)
def test_an_address_where_no_cluster_is(address, sentence, monkeypatch):
    from bmrs.study.engine_ray import Ray

    monkeypatch.setattr("ray.is_initialized", lambda: False)  # the cluster of the other tests is left alone
    with pytest.raises(ValueError, match=sentence):
        Ray(address).__enter__()


def test_a_sweep_does_not_depend_on_who_is_first(engine, tmp_path):
    trials, setting = 8, SETTINGS["lenet5-digits"]
    with Store(tmp_path / "store", {}) as store:
        made = sweep_settings(
            [setting], ray_tasks.peak, trials, 3, store, "cpu", Heard([setting.key]), engine=engine
        )  # fmt: skip
    objective = ray_tasks.peak(None, device="cpu", data_dir=None)

    def in_order(proposals):
        """As many as may wait wait, and come back in order."""
        waiting = []
        for proposal in proposals:
            if proposal is not None:
                waiting.append(proposal)
                continue
            yield waiting[0], {"value": objective(waiting[0].parameters), "error": None, "seconds": 0.0}
            del waiting[0]
        for proposal in waiting:
            yield proposal, {"value": objective(proposal.parameters), "error": None, "seconds": 0.0}

    alone = search(in_order, space("lenet5"), trials, 3, tmp_path / "alone", ahead=2 * engine.slots - 1)
    assert [(r["parameters"], r["value"]) for r in made["runs"]] == [
        (trial["parameters"], trial["value"]) for trial in alone["trials"]
    ]  # fmt: skip
    assert made["provenance"]["workers"] == engine.slots


class TestStudy:
    """The same numbers as in this process, whatever happens on the way."""

    @staticmethod
    def plan(out):
        plan = settle(
            JOBS["table1"], settings="mlp-digits", methods="none,l2,bmrs_n", seeds=2, epochs=8, fine_tune=1,
            seeds_per_task=1, device="cpu", out=out,
        )  # fmt: skip
        hasty = replace(plan.settings[0], learning_rate=3e-2)  # so that units go in so few epochs
        return replace(plan, settings=(hasty,))

    @pytest.fixture(scope="class")
    @classmethod
    def undisturbed(cls, tmp_path_factory):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return compute(cls.plan(tmp_path_factory.mktemp("local")), Heard(["mlp-digits"]), Local(), pytest.fail)
        finally:
            torch.set_num_threads(threads)

    def check(self, content, undisturbed):
        assert content["runs"] == undisturbed["runs"]
        assert len(content["runs"]) == 3 * 2
        assert all(run["compression"]["actual"] > 0.3 for run in content["runs"] if run["method"] == "bmrs_n")
        assert content["settings"]["mlp-digits"]["networks"] == 3 * 2
        assert content["provenance"]["engine"] == "ray"

    def test_ctrl_c_and_going_on(self, engine, undisturbed, tmp_path):
        begun = []

        def interrupt(done, task):
            if done > 2 and not begun and (tmp_path / "parts" / f"{task}.checkpoint.pt").exists():
                begun.append(task)
                signal.raise_signal(signal.SIGINT)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                compute(self.plan(tmp_path), Heard(["mlp-digits"], interrupt), engine, pytest.fail)
        finally:
            signal.signal(signal.SIGINT, before)
        assert not engine.running
        states = sorted(row["state"] for row in self.plan(tmp_path).to_json()["tasks"])
        assert "begun" in states
        assert self.plan(tmp_path).to_json()["settings"]["mlp-digits"]["state"] == "begun"
        screen = Heard(["mlp-digits"])
        self.check(compute(self.plan(tmp_path), screen, engine, pytest.fail), undisturbed)
        assert next(done for task, done in screen.done if task == begun[0]) > 1  # not from the beginning
        assert {path.name for path in (tmp_path / "parts").glob("mlp*")} == {"mlp-digits.part.json"}

    def test_a_machine_is_killed(self, engine, cluster, undisturbed, tmp_path):
        killed = []

        def kill(done, task):
            [node] = [n for n in cluster.worker_nodes if n.node_id == engine.running[task].node] or [None]
            if node is not None and not killed:
                cluster.remove_node(node, allow_graceful=False)
                killed.append(task)

        screen = Heard(["mlp-digits"], kill)
        self.check(compute(self.plan(tmp_path), screen, engine, pytest.fail), undisturbed)
        assert [about for about, line in screen.notes if "its worker" in line] == killed
        assert len(killed) == 1
