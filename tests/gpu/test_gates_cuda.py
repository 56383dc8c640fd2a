"""Training with gates on a GPU: fused against plain, graphs against eager. Skipped where there is no GPU."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bmrs
from bmrs import fused, native, scaling

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # torch's own, at the first product of a thread
]


class Block(nn.Module):
    """A residual branch that ends in a batch norm, as in ResNet."""

    def __init__(self, width, inner):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x):
        return torch.relu(x + self.body(x))


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), Block(16, 9), Block(16, 12), nn.MaxPool2d(4), nn.Flatten(),
        nn.Linear(16 * 16, 33), nn.Tanh(), nn.Linear(33, 5),
    ).cuda()  # fmt: skip


def batch(seed, size=16):
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(size, 3, 16, 16, generator=chance).cuda(), torch.randint(5, (size,), generator=chance).cuda()


def made(noise="example", **options):
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, **options)
    structures = bmrs.structures(model, batch(0)[0][:2])
    chosen = [*structures, *structures.branches]
    pruner = bmrs.Pruner(model, batch(0)[0][:2], optimizer, structures=chosen, noise=noise, phi_lr=1.0, seed=3)
    with torch.no_grad():
        pruner.bank.mu.uniform_(-1.0, 0.2, generator=torch.Generator("cuda").manual_seed(1))
        pruner.bank.log_sigma.uniform_(-5.0, 1.0, generator=torch.Generator("cuda").manual_seed(2))
    return model, optimizer, pruner


@pytest.fixture
def plainly(monkeypatch):
    """Turns the kernels off."""

    def turn(off):
        monkeypatch.setenv("BMRS_FUSED", "0" if off else "1")
        for found in (native.available, fused.kernels):
            found.cache_clear()
        monkeypatch.setattr(scaling, "FEW", {})

    yield turn
    monkeypatch.undo()
    for found in (native.available, fused.kernels):
        found.cache_clear()


def exactly():
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("noise", ["example", "batch"])
def test_a_pass_and_its_gradients_are_those_of_plain_torch(plainly, noise, layout):
    exactly()
    found = []
    for off in (False, True):
        plainly(off)
        assert (fused.kernels("_draw_kernels") is None) == off
        model, _, pruner = made(noise)
        model = model.to(memory_format=layout)
        x, y = batch(1, 13)
        F.cross_entropy(model(x.to(memory_format=layout)), y).backward()
        found.append({"theta": pruner.bank._pass.theta.detach(), **{n: p.grad for n, p in model.named_parameters()}})
    for name, want in found[1].items():
        torch.testing.assert_close(found[0][name], want, rtol=1e-2, atol=2e-3 * float(want.abs().max()), msg=name)


def test_means_are_those_of_plain_torch(plainly):
    found = []
    for off in (False, True):
        plainly(off)
        model, _, pruner = made()
        found.append((pruner.bank.mean(), model.eval()(batch(1)[0])))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=0)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-3)


def step(model, optimizer, x, y, half=False):
    optimizer.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")  # torch's own
@pytest.mark.parametrize("half", [False, True])
def test_nothing_waits_for_the_device(half):
    model, optimizer, _ = made()
    x, y = batch(0)
    for _ in range(2):
        step(model, optimizer, x, y, half)
    try:
        torch.cuda.set_sync_debug_mode("error")
        step(model, optimizer, x, y, half)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("noise", ["example", "batch"])
@pytest.mark.parametrize("warmup", [0, 20])
def test_a_recorded_step_is_a_step(noise, warmup):
    """A CUDA graph of the whole step, with another draw in every replay."""
    exactly()
    torch.use_deterministic_algorithms(True, warn_only=True)
    ends = []
    try:
        for recorded in (False, True):
            model, optimizer, pruner = made(noise, fused=True, capturable=True)
            pruner.warmup = warmup
            x, y = batch(0)
            if recorded:
                step(model, optimizer, x, y)  # as trained so far, where there was no other stream
                aside = torch.cuda.Stream()
                aside.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(aside):
                    for _ in range(2):
                        step(model, optimizer, x, y)
                torch.cuda.current_stream().wait_stream(aside)
                graph = torch.cuda.CUDAGraph()
                optimizer.zero_grad()
                with torch.cuda.graph(graph, stream=aside):
                    step(model, optimizer, x, y)
            else:
                for _ in range(3):
                    step(model, optimizer, x, y)
            for seed in range(1, 6):
                fresh = batch(seed)
                x.copy_(fresh[0])
                y.copy_(fresh[1])
                graph.replay() if recorded else step(model, optimizer, x, y)
            assert pruner.bank.draws == pruner.bank.steps == 8
            ends.append(copy.deepcopy(dict(model.named_parameters())))
    finally:
        torch.use_deterministic_algorithms(False)
    for name, want in ends[0].items():
        torch.testing.assert_close(ends[1][name], want, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.filterwarnings("ignore")  # the compiler's advice, and its empty graphs
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_network_in_one_graph(mode):
    exactly()
    ends = []
    for compiled in (False, True):
        torch.compiler.reset()
        model, optimizer, pruner = made()
        called = torch.compile(model, fullgraph=True, mode=mode) if compiled else model
        for seed in range(4):
            step(called, optimizer, *batch(seed))
        assert pruner.bank.draws == 4
        ends.append(copy.deepcopy(dict(model.named_parameters())))
    for name, want in ends[0].items():
        torch.testing.assert_close(ends[1][name], want, rtol=1e-2, atol=1e-3, msg=name)


def test_what_a_batch_norm_computed_is_not_kept():
    def kept(gated):
        torch.manual_seed(0)
        model = nn.Sequential(Block(64, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 5)).cuda()
        x = torch.randn(32, 64, 32, 32, device="cuda")
        if gated:
            structures = bmrs.structures(model, x[:2])
            bmrs.Pruner(model, x[:2], structures=list(structures.branches))
        before = torch.cuda.memory_allocated()
        out = model(x).sum()
        taken = torch.cuda.memory_allocated() - before
        out.backward()
        return taken

    image = 32 * 64 * 32 * 32 * 4
    assert kept(True) - kept(False) < 0.1 * image
