import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import types

import numpy as np
import pytest
import torch

from bmrs.study.store import SAVING, FolderError, Store, StoreWarning, attempt, finite, state, write_json

KEY = {"epochs": 50, "methods": ("none", "snr")}


@pytest.fixture
def store(tmp_path):
    with Store(tmp_path, KEY) as store:
        yield store


def again(folder, key=KEY, **options):
    """What a later process would find."""
    return Store(folder, key, **options)


class TestParts:
    def test_a_finished_part_is_found_later(self, tmp_path):
        content = {"layers": {"fc10": 1, "fc2": 0.1 + 0.2}, "runs": [{"seed": 0}], "name": "θ"}
        with again(tmp_path) as store:
            assert store.done("mlp-mnist") is None
            store.finish("mlp-mnist", content)
        with again(tmp_path) as store:
            assert store.done("mlp-mnist") == content
            assert list(store.done("mlp-mnist")["layers"]) == ["fc10", "fc2"]  # in order

    @pytest.mark.parametrize("damage", [b"", b'{"sha256": ', b"[]", b"null", b"\xff\xfe", b'{"content": 3}'])
    def test_a_corrupt_part_is_done_anew(self, store, damage):
        store.finish("a", {"x": 1})
        (store.folder / "a.part.json").write_bytes(damage)
        with pytest.warns(StoreWarning, match=r"a\.part\.json cannot be used .* 'a' is done anew"):
            assert store.done("a") is None

    def test_a_changed_number_is_noticed(self, store):
        store.finish("a", {"accuracy": 0.97})
        path = store.folder / "a.part.json"
        path.write_text(path.read_text().replace("0.97", "0.98"))
        with pytest.warns(StoreWarning, match="checksum"):
            assert store.done("a") is None

    def test_a_failed_write_leaves_the_old_file(self, store, monkeypatch):
        store.finish("a", {"x": 1})
        monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            store.finish("a", {"x": 2})
        assert store.done("a") == {"x": 1}
        assert not list(store.folder.glob("*.partial"))

    def test_names_stay_inside_the_folder(self, store):
        with pytest.raises(ValueError, match="part must be letters"):
            store.finish("../a", {})


class TestCheckpoints:
    def test_come_back_and_go_when_the_part_is_finished(self, store):
        assert store.load_checkpoint("a") is None
        store.save_checkpoint("a", {"weights": torch.arange(3.0), "epoch": 7, "rng": torch.get_rng_state()})
        loaded = store.load_checkpoint("a", "cpu")
        assert loaded["epoch"] == 7
        assert torch.equal(loaded["weights"], torch.arange(3.0))
        assert state(store.folder, "a") == "begun"
        store.finish("a", {})
        assert not store.checkpoint("a").exists()
        assert (state(store.folder, "a"), state(store.folder, "b")) == ("done", "to do")

    @pytest.mark.parametrize("keep", [0, 10, 500])
    def test_a_damaged_one_is_ignored(self, store, keep):
        store.save_checkpoint("a", {"weights": torch.arange(300.0)})
        store.checkpoint("a").write_bytes(store.checkpoint("a").read_bytes()[:keep])
        with pytest.warns(StoreWarning, match="'a' begins anew"):
            assert store.load_checkpoint("a") is None

    def test_no_code_is_run(self, store):
        class Bad:
            def __reduce__(self):
                return os.mkdir, (str(store.folder / "harm"),)

        torch.save({"state": Bad()}, store.checkpoint("a"))
        with pytest.warns(StoreWarning, match="begins anew"):
            assert store.load_checkpoint("a") is None
        assert not (store.folder / "harm").exists()


class TestKey:
    def test_a_folder_with_nothing_in_it_takes_another_key(self, tmp_path):
        again(tmp_path).close()
        Store(tmp_path, {**KEY, "epochs": 7}).close()
        with Store(tmp_path, {**KEY, "epochs": 8}) as store:
            store.save_checkpoint("begun", {"done": 1})
        with pytest.raises(FolderError, match="epochs 8 there, 7 now"):
            Store(tmp_path, {**KEY, "epochs": 7})

    def test_another_key_is_refused_with_what_differs(self, tmp_path):
        with again(tmp_path) as store:
            store.finish("part", {})
        with pytest.raises(FolderError) as refused:
            again(tmp_path, {"epochs": 3, "methods": ["none", "snr"], "seeds": 10})
        sentence = str(refused.value)
        assert "epochs 50 there, 3 now; seeds nothing there, 10 now" in sentence
        assert "methods" not in sentence
        assert "another --out" in sentence
        assert "--restart" in sentence
        again(tmp_path).close()  # and the lock is free

    def test_restart_throws_away_only_what_is_ours(self, tmp_path):
        (tmp_path / "notes.json").write_text("{}")
        with again(tmp_path) as store:
            store.finish("a", {})
            store.save_checkpoint("b", {})
        with again(tmp_path, {"epochs": 3}, restart=True) as store:
            assert store.done("a") is None
            assert store.load_checkpoint("b") is None
        assert (tmp_path / "notes.json").exists()
        again(tmp_path, {"epochs": 3}).close()

    @pytest.mark.parametrize("damage", ["{", "3", None])
    def test_results_of_nobody_knows_what_are_refused(self, tmp_path, damage):
        with again(tmp_path) as store:
            store.finish("a", {})
        key = tmp_path / "key.json"
        key.unlink() if damage is None else key.write_text(damage)
        with pytest.raises(FolderError, match="--restart"):
            again(tmp_path)


WORKER = """
    import sys, time
    from bmrs.study.store import Store
    store = Store(sys.argv[1], {"epochs": 50})
    print("working", flush=True)
    while True:
        store.save_checkpoint("a", {"text": "x" * 100_000})
"""


def test_two_processes_and_a_lock_whose_owner_was_killed(tmp_path):
    worker = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WORKER), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert worker.stdout.readline() == "working\n"
        with pytest.raises(FolderError, match=rf"another process \({worker.pid} on .*\) is working in"):
            again(tmp_path, {"epochs": 50})
        while not (tmp_path / "a.checkpoint.pt").exists():
            time.sleep(0.01)
    finally:
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
    with again(tmp_path, {"epochs": 50}) as store:  # killed while writing: the last whole one is there
        assert store.load_checkpoint("a") == {"text": "x" * 100_000}
        assert not list(tmp_path.glob("*.partial"))


class TestAttempt:
    def test_goes_on_and_adds_up(self, monkeypatch):
        used = {"kwh": 0.25, "co2_g": 100.0, "how": "measured", "note": "Counter."}
        meter = types.SimpleNamespace(result=lambda: used)
        monkeypatch.setattr(
            sys.modules[Store.__module__], "measured", lambda device, alone: contextlib.nullcontext(meter)
        )
        kept = []

        def broken(keep, resume):
            assert resume is None
            time.sleep(0.02)
            keep({"epoch": 1})
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            attempt(None, {"epochs": 2}, "cpu", kept.append, broken)
        [before] = kept
        assert before["seconds"] >= 0.02
        part = attempt(before, {"epochs": 2}, "cpu", pytest.fail, lambda keep, resume: {"resumed": resume})
        assert part["resumed"] == {"epoch": 1}
        assert part["seconds"] > before["seconds"]
        assert part["energy"] == {**used, "kwh": 0.5, "co2_g": 200.0}

    def test_a_state_of_another_recipe_is_not_used(self):
        saved = {"state": {"epoch": 1}, "recipe": {"epochs": 3}, "seconds": 100.0}
        part = attempt(saved, {"epochs": 2}, "cpu", pytest.fail, lambda keep, resume: {"resumed": resume})
        assert part["resumed"] is None
        assert part["seconds"] < 100

    def test_slow_checkpoints_are_written_less_often(self, monkeypatch):
        clock = iter(range(10_000))
        written = []
        monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
        attempt(None, {}, "cpu", lambda saved: written.append(saved["state"]["n"]),
                lambda keep, resume: [keep({"n": n}) for n in range(400)] and {})  # fmt: skip
        assert written[0] == 0  # the first at once
        assert 0.7 < len(written) * 2 / (SAVING * 400) < 1.5  # each costs two ticks, each look one


def test_what_is_not_finite_is_null(tmp_path):
    content = {"a": float("nan"), "b": [1, float("-inf"), True, None], "c": torch.tensor([1.5, torch.inf])}
    content |= {"d": np.float64("nan"), "e": np.int64(3), 5: (1, "x")}
    write_json(tmp_path / "r.json", content)
    wanted = {"a": None, "b": [1, None, True, None], "c": [1.5, None], "d": None, "e": 3, "5": [1, "x"]}
    assert json.loads((tmp_path / "r.json").read_text(), parse_constant=pytest.fail) == wanted
    assert finite(content) == wanted
