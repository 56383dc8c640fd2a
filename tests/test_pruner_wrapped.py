"""Training with a Pruner where the network's passes are not plain: run again inside a backward pass, or compiled."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

import bmrs
from bmrs.gates import WeightGate
from tests.test_pruner_training import PHI, ROWS, batches, cloned, small_network, spread, tensors, train


class Parts(nn.Module):
    """Two parts that run again, between layers that do not."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 5)
        self.first = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
        self.last = nn.Linear(6, 3)
        self.reentrant = None

    def forward(self, x):
        x = self.stem(x)
        for part in (self.first, self.second):
            x = part(x) if self.reentrant is None else checkpoint(part, x, use_reentrant=self.reentrant)
        return self.last(x)


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(6, 3, 8, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.last = nn.Linear(6, 3)
        self.reentrant = None

    def forward(self, x):
        x = self.stem(x[:, None] * torch.arange(1, 4, dtype=x.dtype)[:, None])
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.last(x).mean(1)


class Inner(nn.Module):
    """What runs again is inside of a layer that does not."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.attention = nn.MultiheadAttention(6, 3, batch_first=True)
        self.middle, self.last = nn.Linear(6, 5), nn.Linear(5, 3)
        self.reentrant = None

    def part(self, x):
        return torch.tanh(self.middle(self.attention(x, x, x, need_weights=False)[0]))

    def forward(self, x):
        x = self.stem(x[:, None] * torch.arange(1, 4, dtype=x.dtype)[:, None])
        x = self.part(x) if self.reentrant is None else checkpoint(self.part, x, use_reentrant=self.reentrant)
        return self.last(x).mean(1)


class TestActivationCheckpointing:
    @pytest.mark.parametrize("build", [Parts, Transformer, Inner])
    @pytest.mark.parametrize("noise", ["example", "batch"])
    def test_gives_the_gradients_of_the_same_draw(self, build, noise):
        model = build().double()
        pruner = bmrs.Pruner(model, ROWS, log_sigma=0.0, noise=noise)
        assert build is Parts or any(isinstance(gate, WeightGate) for gate in pruner.bank._consumers)
        for removal in (0.0, 0.3):
            pruner.prune(fraction=removal)
            (x, y) = batches(1, 4)[0]
            draws, gradients = pruner.bank.draws, []
            for model.reentrant in (None, False, True):
                pruner.bank.draws = draws
                model.zero_grad()
                F.cross_entropy(model(x), y).backward()
                assert pruner.bank.draws == draws + 1
                gradients.append({name: p.grad for name, p in model.named_parameters()})
            model.reentrant = None
            assert all(gradients[0][name].abs().sum() > 0 for name in PHI)
            for name, want in gradients[0].items():
                for got in gradients[1:]:
                    torch.testing.assert_close(got[name], want, rtol=0, atol=1e-6 if name in PHI else 1e-13)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_trains_and_prunes(self, reentrant):
        ends, data = [], batches(8, 4)
        for kind in (None, reentrant):
            torch.manual_seed(0)
            model = Transformer().double()
            optimizer = optim.SGD(model.parameters(), 0.05)
            pruner = bmrs.Pruner(model, ROWS, optimizer, log_sigma=-1.0)
            pruner.bank.double()
            spread(pruner.bank)
            model.reentrant = kind
            train(model, optimizer, data[:4])
            model.reentrant = None
            pruner.prune(fraction=0.3)
            model.reentrant = kind
            train(model, optimizer, data[4:])
            ends.append(tensors(model))
        for name, want in ends[0].items():
            torch.testing.assert_close(ends[1][name], want, rtol=0, atol=1e-12)

    def test_a_network_that_ran_so_can_be_copied(self):
        model = Transformer().double()
        bmrs.Pruner(model, ROWS, log_sigma=0.0)
        model(ROWS).sum().backward()
        copied = copy.deepcopy(model)
        assert torch.equal(copied.eval()(ROWS), model.eval()(ROWS))


# --- torch.compile ----------------------------------------------------------------------------------------------------


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(12, 16), nn.Linear(20, 4)
        self.attention, self.hidden = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 20)
        self.double()

    def forward(self, x):
        h = self.inner(x)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        return self.out(torch.relu(self.hidden(h))).mean(1)


class TestCompiled:
    # torch looks at every tensor's .grad when it compiles, and hides the warning in a way that makes it an error here.
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
    @pytest.mark.parametrize("order", ["compiled first", "compiled after"])
    def test_computes_trains_and_shrinks_as_the_network(self, order):
        model = small_network()
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = optim.Adam(model.parameters(), 1e-2)
        if order == "compiled first":
            pruner = bmrs.Pruner(compiled, ROWS, optimizer, log_sigma=-1.0)
        else:
            pruner = bmrs.Pruner(model, ROWS, optimizer, log_sigma=-1.0)
            compiled = torch.compile(model, backend="aot_eager")
            pruner.follow(compiled)
        spread(pruner.bank)
        for _ in range(2):
            start = cloned(tensors(model))
            train(compiled, optimizer, batches(2, 4))
            assert all(not torch.equal(tensor, start[name]) for name, tensor in model.named_parameters())
            draws = pruner.bank.draws
            first, second = compiled(ROWS), compiled(ROWS)
            assert not torch.equal(first, second)
            assert pruner.bank.draws == draws + 2
            pruner.bank.draws = draws
            torch.testing.assert_close(model(ROWS), first, rtol=0, atol=1e-12)  # the very same draw
            assert pruner.prune(fraction=0.2).removed > 0
            compiled.eval()
            torch.testing.assert_close(compiled(ROWS), model(ROWS), rtol=0, atol=1e-12)
            compiled.train()
        compiled.eval()
        gated = model(ROWS)
        assert pruner.finish() is model
        torch.testing.assert_close(compiled(ROWS), gated, rtol=0, atol=1e-6)

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
    @pytest.mark.parametrize("noise", ["example", "batch"])
    def test_passes_that_are_compiled_and_not_take_turns(self, noise):
        """Gates in place of weights, as attention has them, leave nothing behind."""
        weights, x, y = cloned(Attends().state_dict()), torch.randn(8, 5, 12).double(), torch.randint(4, (8,))
        ends = []
        for turns in (("model",), ("compiled",), ("compiled", "model")):
            torch.compiler.reset()
            model = Attends()
            model.load_state_dict(weights)
            optimizer = optim.SGD(model.parameters(), 0.1)
            pruner = bmrs.Pruner(model, x, optimizer, noise=noise, seed=1, log_sigma=-1.0)
            called = {"model": model, "compiled": torch.compile(model, backend="aot_eager")}
            for number in range(6):
                optimizer.zero_grad()
                F.cross_entropy(called[turns[number % len(turns)]](x), y).backward()
                optimizer.step()
            model.eval()
            outputs = [one(x).detach() for one in called.values()]
            torch.testing.assert_close(*outputs, rtol=0, atol=1e-12)
            pruner.finish()
            assert not [name for module in model.modules() for name in module._parameters if name in module.__dict__]
            ends.append([*outputs, model(x).detach()])
        for end in ends[1:]:
            torch.testing.assert_close(end, ends[0], rtol=0, atol=1e-9)

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
    @pytest.mark.parametrize("how", ["wrapped", "in place", "in place, before the gates"])
    def test_unknown_to_the_pruner_it_trains_with_the_draws_of_the_network_alone(self, how):
        weights, data = cloned(small_network().state_dict()), batches(6, 4)
        ends = []
        for compiles in (False, True):
            torch.compiler.reset()
            called = model = small_network()
            model.load_state_dict(weights)
            optimizer = optim.Adam(model.parameters(), 1e-2)
            if compiles and "before" in how:
                model.compile(backend="aot_eager")
                model(ROWS)
            pruner = bmrs.Pruner(model, ROWS, optimizer, log_sigma=-1.0, seed=3)
            if compiles and how == "wrapped":
                called = torch.compile(model, backend="aot_eager", fullgraph=True)  # the draw is part of the graph
            elif compiles and how == "in place":
                model.compile(backend="aot_eager")
            assert not torch.equal(called(ROWS), called(ROWS))
            train(called, optimizer, data[:3])
            assert pruner.prune(fraction=0.3).removed == 3
            train(called, optimizer, data[3:])
            assert pruner.bank.draws == 8
            ends.append(cloned(tensors(model)))
        for name, want in ends[0].items():
            torch.testing.assert_close(ends[1][name], want, rtol=0, atol=1e-6 if name in PHI else 1e-12)
