"""Tasks side by side in this process."""

import dataclasses
import sys
import threading
import time
from functools import partial

import pytest
import torch

from bmrs.study import computing, recording
from bmrs.study.engine import Local, Task
from bmrs.study.jobs import JOBS, settle
from bmrs.study.protocols import continuous
from bmrs.study.settings import Setting
from bmrs.study.shares import Share
from bmrs.study.store import Store
from bmrs.study.threads import side_by_side
from tests.study.ray_tasks import count
from tests.study.test_protocols import without_time

SMALL = Setting("made", "mlp", "digits", 32, 3e-2, (14, 10), epochs=6, fine_tune=2)
SETTINGS = [
    SMALL,
    dataclasses.replace(SMALL, key="wide", widths=(30,)),
    dataclasses.replace(SMALL, key="late", batch=64),
]


class Screen:
    """Nobody looks."""

    def __getattr__(self, name):
        return lambda *_, **__: None


def task(name, work):
    return Task(name, name, 1, {"name": name}, "cpu", work)


def train(setting):
    methods, seeds = ("none", "l2", "bmrs_n"), (0, 3)
    return task(setting.key, partial(continuous, setting, methods, seeds))


def all_of(engine, tasks, folder):
    with Store(folder, {}) as store:
        return {task.name: found for task, found in engine.run(tasks, store, Screen())}


def test_side_by_side_as_one_after_the_other(tmp_path):
    results = [
        all_of(Local(workers), [train(setting) for setting in SETTINGS], tmp_path / str(workers)) for workers in (1, 3)
    ]
    for name in ("made", "wide", "late"):
        alone, beside = ({**without_time(result[name]), "seconds": 0, "energy": 0} for result in results)
        assert alone == beside
    assert not [thread for thread in threading.enumerate() if thread.name == "bmrs-task"]


def test_so_many_at_once_and_the_next_when_there_is_room():
    lock, now, most, asked = threading.Lock(), 0, 0, []

    def tasks():
        for number in range(7):
            asked.append(number)
            yield number
            if number == 3:
                yield None  # until there is another result

    def work(number, go_on):
        nonlocal now, most
        with lock:
            now, most = now + 1, max(most, now + 1)
        time.sleep(0.03 * (number % 3))
        with lock:
            now -= 1
        return {"square": number**2}

    found = dict(side_by_side(tasks(), 3, lambda _: "cpu", work))
    assert found == {number: {"square": number**2} for number in range(7)}
    assert most == 3
    assert asked == list(range(7))


def test_what_goes_wrong_ends_the_others_and_is_raised(tmp_path):
    def wrong(**_):
        raise ZeroDivisionError("here")

    interval = sys.getswitchinterval()
    long = task("long", partial(count, str(tmp_path), "lines", 1000, pause=0.02))
    with pytest.raises(ZeroDivisionError, match="here"):
        all_of(Local(2), [long, task("wrong", wrong)], tmp_path / "store")
    assert len((tmp_path / "lines").read_text().split()) < 500
    assert not [thread for thread in threading.enumerate() if thread.name == "bmrs-task"]
    assert sys.getswitchinterval() == pytest.approx(interval)


def test_a_task_without_memory_beside_others_has_another_chance():
    lock, now, most, tried = threading.Lock(), 0, 0, []

    def work(number, go_on):
        nonlocal now, most
        with lock:
            now, most = now + 1, max(most, now + 1)
            beside = now
        tried.append(number)
        time.sleep(0.05 * (number + 1))
        with lock:
            now -= 1
        if number == 0 and beside > 1:
            raise torch.OutOfMemoryError("no room beside others")
        return {"number": number}

    put_off = []
    found = [task for task, _ in side_by_side([2, 1, 0, 3], 3, lambda _: "cpu", work, put_off.append)]
    assert sorted(found) == [0, 1, 2, 3]
    assert most == 3
    assert tried.count(0) == 1 + len(put_off) > 1
    assert set(put_off) == {0}


def test_a_task_without_memory_for_itself_is_an_error():
    def work(number, go_on):
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        list(side_by_side([1, 2, 3], 3, lambda _: "cpu", work))


def test_whoever_leaves_finds_the_states_later(tmp_path):
    tasks = [task(name, partial(count, str(tmp_path), name, 60, pause=0.01)) for name in ("a", "b")]
    quick = task("quick", lambda **_: time.sleep(0.15) or {})
    with Store(tmp_path / "store", {}) as store:
        run = Local(3).run([*tasks, quick], store, Screen())
        assert next(run)[0] is quick
        run.close()
        assert {store.load_checkpoint(name) is not None for name in ("a", "b")} == {True}
    found = all_of(Local(2), tasks, tmp_path / "store")
    whole = all_of(Local(1), [task("c", partial(count, str(tmp_path), "c", 60))], tmp_path / "other")["c"]
    for name in ("a", "b"):
        assert found[name]["began"] > 0
        assert found[name]["value"] == whole["value"]


def test_shares_add_up_to_what_was_used():
    used = 0.0
    first = Share("test", lambda: None, lambda _: used)
    used = 3.0
    second = Share("test", lambda: None, lambda _: pytest.fail("made twice"))
    used = 7.0
    assert (first.used(), second.used()) == (5.0, 2.0)
    assert first.divided
    assert second.divided
    assert first.close() == 5.0
    used = 8.0
    assert (first.used(), second.close()) == (5.0, 3.0)
    used = 100.0
    assert (first.close(), second.used()) == (5.0, 3.0)
    alone = Share("test", lambda: None, lambda _: used - 100.0)
    used = 104.0
    assert alone.close() == 4.0
    assert not alone.divided


def test_seconds_are_divided_among_tasks(tmp_path):
    tasks = [task(name, lambda **_: time.sleep(0.4) or {}) for name in ("a", "b", "c")]
    begun = time.perf_counter()
    found = all_of(Local(3), tasks, tmp_path)
    wall = time.perf_counter() - begun
    assert 0.4 <= sum(result["seconds"] for result in found.values()) <= wall


def test_fast_products_as_long_as_any_thread_needs_them():
    before = torch.get_float32_matmul_precision()
    inside, leave = threading.Event(), threading.Event()

    def other():
        with recording.fast_products(True):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with recording.fast_products(True):
        thread.start()
        assert inside.wait(10)
    assert torch.get_float32_matmul_precision() == "high"
    leave.set()
    thread.join()
    assert torch.get_float32_matmul_precision() == before
    with recording.fast_products(False):
        assert torch.get_float32_matmul_precision() == before


def test_a_result_that_cannot_be_kept_ends_what_is_under_way(tmp_path, monkeypatch):
    """While the error is told, nothing goes on behind it."""
    options = {"settings": "mlp-digits", "seeds": 4, "seeds_per_task": 2, "device": "cpu"}
    plan = settle(JOBS["table1"], out=tmp_path, **options)

    def full(*_):
        raise OSError(28, "No space left on device")

    tasks = iter(({}, {"setting": {"seconds": 0.0, "networks": 1}}))

    def quick_and_slow(*_, checkpoint, resume, progress):
        if next(tasks):
            return {"setting": {}, "runs": [], "made": {}}
        for step in range(1000):
            time.sleep(0.01)
            progress(step, 1000)
        return {}

    monkeypatch.setattr(computing, "perform", quick_and_slow)
    monkeypatch.setattr(Store, "finish", full)
    with pytest.raises(OSError, match="No space left") as caught:
        computing.compute(plan, Screen(), Local(2), lambda _: None)
    assert not [thread for thread in threading.enumerate() if thread.name == "bmrs-task"]
    assert caught.value.errno == 28
