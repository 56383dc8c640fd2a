"""A loop with Accelerate: the Pruner is made before ``prepare``, and saved states hold everything."""

import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import bmrs
from tests.integrations.toy import EPOCHS, OPTIONS, RATE, X, accuracy, loader, network, same, train_by_hand

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    accelerate = pytest.importorskip("accelerate")

ROOT = Path(__file__).parents[2]
ACCUMULATE, CLIP, PHI = 2, 0.5, {"phi_lr": 10}


class Loop:
    """Freshly built objects of one training."""

    def __init__(self, wrapped_optimizer=False):
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
        self.network = network()
        optimizer = torch.optim.AdamW(self.network.parameters(), lr=RATE)
        options = {**OPTIONS, **PHI}
        self.pruner = bmrs.Pruner(self.network, X[:4], None if wrapped_optimizer else optimizer, **options)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        made = self.accelerator.prepare(self.network, optimizer, loader(), scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = made
        if wrapped_optimizer:
            self.pruner.follow(self.optimizer)

    def train(self, epochs, folder=None):
        """Returns the units left after each epoch."""
        left = []
        for _ in range(epochs):
            self.model.train()
            for x, y in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.accelerator.backward(F.cross_entropy(self.model(x), y))
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
            left.append(self.pruner.prune().units)
            if folder is not None:
                self.accelerator.save_state(folder / str(len(left)))
        return left


def rate(step):
    return 1 / (1 + step / 200)


def test_units_go_and_the_task_is_still_solved():
    loop = Loop()
    left = loop.train(EPOCHS)
    assert left[-1] < 16 < 24 == left[0]
    assert accuracy(loop.network) > 0.97
    before = loop.network(X)
    assert loop.pruner.finish() is loop.network
    assert loop.network[0].out_features == left[-1]
    assert torch.allclose(loop.network(X), before, atol=1e-5)


@pytest.mark.parametrize("wrapped_optimizer", [False, True])
def test_it_is_the_plain_loop(wrapped_optimizer):
    loop = Loop(wrapped_optimizer)
    loop.train(EPOCHS)
    expected = network()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=RATE)
    pruner = bmrs.Pruner(expected, X[:4], optimizer, **{**OPTIONS, **PHI})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    train_by_hand(expected, pruner, optimizer, EPOCHS, accumulate=ACCUMULATE, clip=CLIP, scheduler=scheduler)
    assert len(pruner.bank.mu) < 24
    assert [p.shape for p in loop.network.parameters()] == [p.shape for p in expected.parameters()]
    for one, other in zip(loop.network.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_a_fresh_start_from_a_saved_state_ends_as_if_nothing_had_happened(tmp_path):
    undisturbed = Loop()
    left = undisturbed.train(EPOCHS, tmp_path)
    for after in (7, 9):
        again = Loop()
        again.accelerator.load_state(tmp_path / str(after))
        assert len(again.pruner.bank.mu) == left[after - 1] < 24
        assert again.train(EPOCHS - after) == left[after:]
        assert same(again.network.state_dict(), undisturbed.network.state_dict())


def test_a_saved_state_of_a_larger_network_is_loaded_back(tmp_path):
    loop = Loop()
    left = loop.train(EPOCHS, tmp_path)
    loop.accelerator.load_state(tmp_path / "5")
    assert len(loop.pruner.bank.mu) == left[4] > left[-1]
    assert loop.train(EPOCHS - 5) == left[5:]


def test_the_example_goes_on_where_it_was(capsys, monkeypatch, tmp_path):
    """Shuffled data, in two parts and in one."""

    def printed(epochs, folder):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        monkeypatch.setattr(sys, "argv", ["accelerate_digits.py", "--epochs", str(epochs), "--folder", str(folder)])
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'pin_memory' argument is set as true but no accelerator is found")
            runpy.run_path(str(ROOT / "examples" / "accelerate_digits.py"), run_name="__main__")
        return capsys.readouterr().out

    whole = printed(7, tmp_path / "whole")
    parts = printed(5, tmp_path / "parts") + printed(7, tmp_path / "parts")
    epochs = re.compile(r"epoch \d+: .*")
    assert epochs.findall(parts) == epochs.findall(whole)
    assert len(set(re.findall(r": (\d+) units", whole))) > 1
    assert float(re.findall(r"7 epochs: (.*)% right", whole)[0]) > 90
    assert parts.endswith(whole.splitlines()[-1] + "\n")
