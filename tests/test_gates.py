"""Gates on structures: where they sit, what they draw, and how they go."""

import copy
import gc
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bmrs
from bmrs.gates import InputGate, OutputGate, WeightGate


class Own(nn.Module):
    """Multiplies by a parameter in its own code."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x):
        return x @ self.matrix


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 12, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(12)
        self.back = nn.Conv2d(12, 8, 1, bias=False)
        self.last = nn.BatchNorm2d(8)
        self.transposed = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.attention = nn.MultiheadAttention(6, 3, batch_first=True)
        self.own = Own(6, 10)
        self.out = nn.Linear(10, 4)

    def forward(self, x):
        x = F.relu(self.stem(x))
        x = x + self.last(self.back(F.relu(self.norm(self.grouped(x)))))
        x = F.relu(self.transposed(x)).flatten(2).transpose(1, 2)
        x = torch.tanh(x + self.attention(x, x, x, need_weights=False)[0])
        return self.out(torch.tanh(self.own(x.mean(1))))


X = torch.randn(4, 3, 6, 6, dtype=torch.float64)


def gated(noise="example", branches=True):
    torch.manual_seed(0)
    model = Residual().double()
    structures = bmrs.structures(model, X)
    chosen = structures.everything if branches else list(structures)
    chosen = [s for s in chosen if not s.hidden]
    bank = bmrs.NoiseBank.attach(model, chosen, noise, log_sigma=-1.0).double()
    with torch.no_grad():
        bank.mu.uniform_(-2, 0)
        model.last.weight.uniform_(0.5, 1.5)
    return model, bank, structures


def test_every_kind_of_consumer_is_gated():
    _, bank, structures = gated()
    kinds = {type(gate) for gate in bank._consumers}
    assert kinds == {InputGate, OutputGate, WeightGate}
    assert "last branch" in bank.layers
    assert {s.name for s in structures} <= set(bank.layers)


def test_gates_multiply_what_is_consumed():
    """Judged by hand: the columns of every consumer multiplied by the gates of its units."""
    model, bank, structures = gated(branches=False)
    model.eval()
    by_hand = copy.deepcopy(model)
    by_hand.bmrs_noise.detach()
    tensors = dict(by_hand.named_parameters())
    for structure in structures:
        theta = bank.theta(structure.name)[0]
        for name, dim in structure.consumers:
            for unit, indices in enumerate(structure.indices((name, dim))):
                tensors[name].data[(slice(None),) * dim + (indices,)] *= theta[unit]
    torch.testing.assert_close(model(X), by_hand(X), rtol=0, atol=1e-12)
    assert (model(X) - Residual().double()(X)).abs().max() > 1e-3


def test_examples_have_gates_of_their_own():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2)).double()
    bank = bmrs.NoiseBank.attach(model, bmrs.structures(model, torch.randn(2, 3)), log_sigma=0.0)
    x = torch.randn(5, 3, dtype=torch.float64)
    got = model(x)
    hidden = torch.tanh(model[0](x)) * bank.current()
    torch.testing.assert_close(got, F.linear(hidden, model[2].weight, model[2].bias))
    assert len(bank.current()) == 5
    assert (bank.current().std(0) > 0).all()


@pytest.mark.parametrize("noise", ["example", "batch"])
def test_training_moves_every_gate_and_weight(noise):
    model, bank, _ = gated(noise)
    model.train()
    (model(X).square().sum() + bank.kl()).backward()
    assert (bank.mu.grad != 0).all()
    assert (bank.log_sigma.grad != 0).all()
    assert all(
        p.grad is not None and bool((p.grad != 0).any())
        for name, p in model.named_parameters()
        if "in_proj_b" not in name
    )


def replaced(model):
    return [name for module in model.modules() for name in module.__dict__ if name in ("weight", "bias")]


@pytest.mark.parametrize("size", [1, 6, 24])  # of images: weights are larger, or what they multiply
def test_gates_that_all_share_compute_what_gates_of_each_would(size):
    x, found = torch.randn(4, 3, size, size, dtype=torch.float64), []
    for noise in ("batch", "example"):
        model, bank, _ = gated(noise)
        if noise == "example":
            bank.draw = lambda number, bank=bank: bank._hold(found[0][0].expand(number, -1).clone().requires_grad_())
        out = model.train()(x)
        assert not replaced(model)
        out.square().sum().backward()
        found.append((bank._pass.theta.detach(), out.detach(), {name: p.grad for name, p in model.named_parameters()}))
    (_, out, grads), (_, want, wanted) = found
    torch.testing.assert_close(out, want, rtol=0, atol=1e-11)
    for name, grad in wanted.items():
        if not name.startswith("bmrs"):
            torch.testing.assert_close(grads[name], grad, rtol=1e-9, atol=1e-9, msg=name)


class Feed(nn.Module):
    """A residual branch whose last layer has gates on its columns and on its rows."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.out = nn.Linear(5, 9), nn.Linear(9, 5), nn.Linear(5, 2)

    def forward(self, x):
        return self.out(x + self.down(torch.relu(self.up(x))))


@pytest.mark.parametrize("number", [2, 50])
def test_columns_and_rows_of_one_weight_have_shared_gates(number):
    x = torch.randn(number, 5, dtype=torch.float64)
    model = Feed().double()
    structures = bmrs.structures(model, x[:2])
    chosen = [*structures, *structures.branches]
    assert {place for s in chosen for place in s.consumers} >= {("down.weight", 1), ("down.weight", 0)}
    bank = bmrs.NoiseBank.attach(model, chosen, "batch", log_sigma=-1.0).double()
    out, theta = model.train()(x), bank._pass.theta[0]
    inner, outer = (next(bank.layers[s.name] for s in chosen if ("down.weight", dim) in s.consumers) for dim in (1, 0))
    hidden = torch.relu(model.up(x)) * theta[inner]
    branch = F.linear(hidden, model.down.weight, model.down.bias) * theta[outer]
    torch.testing.assert_close(out, F.linear(x + branch, model.out.weight, model.out.bias))


def test_a_pass_that_fails_leaves_the_weights_as_they_were():
    model, _, _ = gated("batch")
    model.last.register_forward_hook(lambda *_: 1 / 0)
    model.back.register_forward_hook(lambda *_: None)
    with pytest.raises(ZeroDivisionError):
        model(torch.randn(4, 3, 24, 24, dtype=torch.float64))
    assert not replaced(model)
    assert isinstance(model.last.weight, nn.Parameter)


def test_removing_closed_units_changes_nothing_and_folding_neither():
    model, bank, structures = gated()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    units = len(bank.mu)
    model.train()
    (model(X).square().sum() + bank.kl()).backward()
    optimizer.step()
    model.eval()
    for _ in range(2):
        closing = torch.rand(bank.alive.shape) < 0.3
        for layer in bank.layers.values():
            closing[layer.start] = False
        bank.remove(closing)
        want = model(X)
        bmrs.remove(model, {s: bank.closed(s.name) for s in structures.everything if s.name in bank.layers}, optimizer)
        assert bank.alive.all()
        assert len(bank.mu) == sum(s.units for s in structures.everything if s.name in bank.layers)
        assert optimizer.state[bank.mu]["exp_avg"].shape == bank.mu.shape
        torch.testing.assert_close(model(X), want, rtol=0, atol=1e-12)
        # The pressure on a unit does not grow when others go.
        torch.testing.assert_close(bank.kl(), bank.posterior().kl().sum() / units)
        model.train()
        (model(X).square().sum() + bank.kl()).backward()
        optimizer.step()
        model.eval()
    want = model(X)
    bank.fold()
    assert not hasattr(model, "bmrs_noise")
    torch.testing.assert_close(model(X), want, rtol=0, atol=1e-12)
    assert not any("bmrs_noise" in name for name in bmrs.structure.removed(model).kept)


def test_folded_for_an_evaluation():
    model, bank, structures = gated()
    with torch.no_grad():
        bank.mu.uniform_(-2, 0)
    model.eval()
    want, state = model(X), copy.deepcopy(model.state_dict())
    with bank.folded():
        for _ in range(2):
            torch.testing.assert_close(model(X), want, rtol=0, atol=1e-12)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, state[name]), name
        # Gates stand aside: whatever they are now, the weights have what they were.
        before = bank.mu.detach().clone()
        with torch.no_grad():
            bank.mu.sub_(1.0)
        torch.testing.assert_close(model(X), want, rtol=0, atol=1e-12)
        with torch.no_grad():
            bank.mu.copy_(before)
        structure = next(s for s in structures if s.name in bank.layers)
        for change in (model.train, bank.fold, lambda: bmrs.remove(model, {structure: [0]}),
                       lambda: model.load_state_dict(state)):  # fmt: skip
            with pytest.raises(ValueError, match="folded for evaluation"):
                change()
    assert "matrix" not in vars(model.own)
    model.eval()
    torch.testing.assert_close(model(X), want, rtol=0, atol=0)
    with torch.no_grad():
        bank.mu.sub_(1.0)
    assert not torch.allclose(model(X), want)
    with pytest.raises(RuntimeError, match="given up"), bank.folded():
        raise RuntimeError("given up")
    model.train()
    with pytest.raises(ValueError, match="in evaluation can be folded"), bank.folded():
        pass
    (model(X).square().sum() + bank.kl()).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_an_output_that_is_gated_cannot_be_folded_for_an_evaluation():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    bank = bmrs.NoiseBank.attach(model, {"1": 4})
    with pytest.raises(ValueError, match="only gates on structures"), bank.folded():
        pass


def test_a_gated_network_can_be_copied_and_pickled():
    model, _, _ = gated()
    model.eval()
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(again(X), model(X), rtol=0, atol=0)
        assert again.bmrs_noise is not model.bmrs_noise


def test_a_weight_is_itself_again_after_a_pass_that_fails():
    model, _, _ = gated()
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 5, 6, 6, dtype=torch.float64))
    assert "matrix" not in vars(model.own)
    assert isinstance(model.own.matrix, nn.Parameter)


def test_tied_weights_that_produce_what_they_consume_get_no_gates():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 6)
            self.hidden = nn.Linear(6, 5)
            self.back = nn.Linear(5, 6)

        def forward(self, tokens):
            x = self.embed(tokens)
            x = x + self.back(torch.relu(self.hidden(x)))
            return F.linear(x, self.embed.weight)

    model = Tied()
    structures = bmrs.structures(model, torch.randint(9, (2, 4)))
    stream = next(s for s in structures if not s.foldable)
    with pytest.warns(UserWarning, match="gets no gates: its weights are tied"):
        bank = bmrs.NoiseBank.attach(model, structures)
    assert stream.name not in bank.layers


def test_a_layer_used_twice_has_its_gates_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(3, 5)
            self.second = nn.Linear(5, 5)
            self.again = self.second
            self.other = nn.Linear(5, 2)
            self.tied = nn.Linear(5, 2)
            self.tied.weight = self.other.weight

        def forward(self, x):
            y = torch.tanh(self.again(torch.tanh(self.second(torch.tanh(self.first(x))))))
            return self.other(y) + self.tied(y)

    model = Twice().double()
    x = torch.randn(4, 3, dtype=torch.float64)
    bank = bmrs.NoiseBank.attach(model, bmrs.structures(model, x)).double()
    with torch.no_grad():
        bank.mu.uniform_(-2, 0)
    model.eval()
    want = model(x)
    bank.fold()
    torch.testing.assert_close(model(x), want, rtol=0, atol=1e-12)


def test_the_listing_can_be_read_with_gates_on():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    structures = bmrs.structures(model, torch.randn(2, 3))
    bmrs.NoiseBank.attach(model, structures)
    assert structures.parameters == 3 * 4 + 4 + 4 * 2 + 2
    assert "1 structure holds 92.3% of 26 parameters" in structures.table()


def test_the_graph_of_a_pass_ends_with_the_next():
    """A whole step can then be recorded on another stream than the one that steps ran on before."""
    model, bank, _ = gated()
    model.train()

    def marks():
        (model(X).square().sum() + bank.kl()).backward()
        edges = {edge[0] for edge in bank._pass.theta.grad_fn.next_functions if edge[0] is not None}
        found = [edge.metadata.get("seen") for edge in edges]
        for edge in edges:
            edge.metadata["seen"] = True
        return found

    assert marks() == [None, None]
    gc.collect()
    assert marks() == [None, None]


def test_structures_cannot_be_listed_through_gates():
    model, _, _ = gated()
    with pytest.raises(ValueError, match="model has gates on it"):
        bmrs.structures(model, X)


def test_a_checkpoint_cannot_follow_a_listing_that_is_gone(tmp_path):
    model, _, structures = gated()
    bmrs.remove(model, {structures[0]: [0]})
    bmrs.save(model, tmp_path / "half.safetensors")
    model, _, structures = gated()
    del structures
    gc.collect()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="not on structures that still exist"):
        bmrs.load(model, tmp_path / "half.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_only_gates_on_structures_can_be_folded():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    bank = bmrs.NoiseBank.attach(model, {"1": 4})
    with pytest.raises(ValueError, match="only gates on structures can be folded"):
        bank.fold()
