"""Ensembles that train in threads of their own on one GPU. Skipped where there is none."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from bmrs.study.engine import Local, Task
from bmrs.study.post_training import post_training
from bmrs.study.protocols import continuous
from bmrs.study.settings import Setting
from bmrs.study.store import Store
from tests.study.test_threads import Screen

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),
]

MLP = Setting("mlp", "mlp", "digits", 32, 3e-2, (40, 30), epochs=6, fine_tune=2)
LENET = Setting("lenet", "lenet5", "digits", 32, 8e-3, epochs=5, fine_tune=2)


def tasks():
    for number, setting in enumerate((MLP, LENET, replace(MLP, batch=16), replace(LENET, learning_rate=2e-2))):
        own = replace(setting, key=f"{setting.key}{number}")
        work = partial(continuous, own, ("none", "l2", "bmrs_n", "bmrs_u8"), (0, 1, 2), device="cuda")
        yield Task(own.key, own.key, 12, {}, "cuda", work)
        after = partial(post_training, own, ("snr", "bmrs_n"), (0, 1), fractions=(0.3, 0.6), device="cuda", together=7)
        yield Task(f"after-{own.key}", own.key, 2, {}, "cuda", after)


def numbers(found):
    return {**found, "setting": {**found["setting"], "seconds": 0}, "seconds": 0, "energy": 0}


def test_beside_others_as_alone(tmp_path):
    results = []
    for name, workers in (("alone", 1), ("beside", 8), ("again", 8)):
        with Store(tmp_path / name, {}) as store:
            run = Local(workers).run(tasks(), store, Screen())
            results.append({task.name: numbers(found) for task, found in run})
    assert results[0] == results[1]
    assert results[0] == results[2]
