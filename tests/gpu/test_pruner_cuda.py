"""Pruning while training, on a GPU. Skipped where there is none."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bmrs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 32), nn.ReLU(), nn.Linear(32, 5),
    ).cuda()  # fmt: skip


def batch(seed, dtype=torch.float32):
    chance = torch.Generator().manual_seed(seed)
    x, y = torch.randn(16, 3, 12, 12, generator=chance), torch.randint(5, (16,), generator=chance)
    return x.to("cuda", dtype), y.cuda()


OPTIMIZERS = [
    pytest.param(lambda p: torch.optim.Adam(p, lr=1e-2), id="adam"),
    pytest.param(lambda p: torch.optim.Adam(p, lr=1e-2, fused=True), id="fused"),
    pytest.param(lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True), id="foreach"),
    pytest.param(lambda p: torch.optim.AdamW(p, lr=1e-2, capturable=True), id="capturable"),
    pytest.param(lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), id="sgd"),
]


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaler"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_the_kl_at_the_step_is_the_kl_in_the_loss(make, scaled):
    trajectories = []
    for in_loss in (False, True):
        model = network()
        optimizer = make(model.parameters())
        pruner = bmrs.Pruner(model, batch(0)[0][:2], optimizer, add_kl=not in_loss, phi_lr=2.0, seed=3)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, enabled=scaled)
        for step in range(12):
            x, y = batch(step)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss + pruner.kl() if in_loss else loss).backward()
            scaler.step(optimizer)
            scaler.update()
        trajectories.append(torch.stack([pruner.bank.mu, pruner.bank.log_sigma]).detach())
    torch.testing.assert_close(trajectories[0], trajectories[1], rtol=0, atol=2e-5)
    assert (trajectories[0][1] > -5.0 + 1e-3).any()


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_training_goes_on_after_a_removal_and_from_a_checkpoint(make, tmp_path):
    def run(stop, resume=None):
        model = network()
        optimizer = make(model.parameters())
        pruner = bmrs.Pruner(model, batch(0)[0][:2], optimizer)
        if resume is not None:
            pruner.load_state_dict(torch.load(resume, map_location="cuda", weights_only=True))
        for step in range(pruner.bank.steps, stop):
            x, y = batch(step)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if step in (5, 11):
                pruner.prune(fraction=0.3)
        return model, pruner

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole, _ = run(18)
            _, pruner = run(8)
            torch.save(pruner.state_dict(), tmp_path / "state.pt")
            again, _ = run(18, tmp_path / "state.pt")
    finally:
        torch.use_deterministic_algorithms(False)
    assert whole[0].out_channels < 16
    for (name, a), (_, b) in zip(whole.named_parameters(), again.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


def test_mixed_precision_and_channels_last():
    model = network().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    pruner = bmrs.Pruner(model, batch(0)[0][:2], optimizer)
    for step in range(20):
        x, y = batch(step % 4)
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x.to(memory_format=torch.channels_last)), y)
        loss.backward()
        optimizer.step()
        if step == 9:
            before = loss.item()
            with torch.autocast("cuda", dtype=torch.bfloat16):  # also where it is called inside
                assert pruner.prune(fraction=0.3).removed == 21
    assert loss.item() < 1.5 * before
    assert pruner.bank.mu.dtype == torch.float32
    small = pruner.finish()
    assert torch.isfinite(small.eval()(batch(9)[0])).all()


def test_a_compiled_network_is_pruned():
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        compiled = torch.compile(model)
        pruner = bmrs.Pruner(compiled, batch(0)[0][:2], optimizer)
        for round in range(3):
            model.train()
            for step in range(4):
                x, y = batch(step)
                optimizer.zero_grad()
                F.cross_entropy(compiled(x), y).backward()
                optimizer.step()
            assert pruner.prune(fraction=0.2).removed > 0
            model.eval()
            x = batch(round)[0]
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-3)
        torch.compiler.reset()


def test_a_copy_and_an_undo_on_the_gpu():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    pruner = bmrs.Pruner(model, batch(0)[0][:2], optimizer)
    average = torch.optim.swa_utils.AveragedModel(model)
    pruner.follow(average)
    for step in range(3):
        x, y = batch(step)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
    before = copy.deepcopy(model.state_dict())
    pruner.prune(fraction=0.5)
    average.update_parameters(model)
    assert average.module[0].out_channels == model[0].out_channels < 16
    pruner.undo()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert average.module[0].out_channels == 16
