"""Going on from a saved state, going back to an earlier one, and undoing a removal."""

import copy
import io
import json
import random
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import bmrs

# nn.TransformerEncoderLayer's fused kernel stays switched off after heads came back: slower, and computes the same.
FAST_PATH = "activation_relu_or_gelu"
X = torch.randn(6, 2, 6, 6, dtype=torch.float64)


def network():
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 5, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(5 * 16, 7),
        nn.ReLU(),
        nn.Linear(7, 3),
    ).double()


class Grouped(nn.Module):
    """Grouped and depthwise convolutions, and group norms: with groups that go, and with channels inside them."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, padding=1)
        self.norm = nn.GroupNorm(4, 8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.widen = nn.Conv2d(8, 12, 1)
        self.grouped = nn.Conv2d(12, 12, 3, padding=1, groups=3)
        self.bare = nn.GroupNorm(3, 12, affine=False)
        self.out = nn.Linear(12, 3)

    def forward(self, x):
        x = F.relu(self.depthwise(F.relu(self.norm(self.stem(x)))))
        return self.out(torch.tanh(self.bare(self.grouped(F.relu(self.widen(x))))).mean((2, 3)))


class Residual(nn.Module):
    """A residual branch whose last layer can lose rows, ended by a batch norm."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 8, 3, padding=1)
        self.inner = nn.Conv2d(8, 6, 3, padding=1)
        self.back = nn.Conv2d(6, 8, 1, bias=False)
        self.last = nn.BatchNorm2d(8)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        x = x + self.last(self.back(F.relu(self.inner(x))))
        return self.out(x.mean((2, 3)))


class Heads(nn.Module):
    """Attention that has its number of heads written down."""

    def __init__(self):
        super().__init__()
        self.heads, self.width = 4, 3
        self.q, self.k, self.v = (nn.Linear(8, 12) for _ in range(3))
        self.proj = nn.Linear(12, 8)

    def forward(self, x):
        q, k, v = (
            layer(x).view(*x.shape[:2], self.heads, self.width).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*x.shape[:2], -1))


class Corrected(Heads):
    """Attention that asks for sizes it computes from its input."""

    def forward(self, x):
        batch, length, _ = x.shape
        shape = (batch, length, 4, 3)
        q, k, v = (layer(x).reshape(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, 12))


class Tokens(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 8, 3), nn.LayerNorm(8)
        self.attention = attention
        self.up, self.down = nn.Linear(8, 9), nn.Linear(9, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.stem(x).flatten(2).transpose(1, 2))
        if isinstance(self.attention, nn.MultiheadAttention):
            x = x + self.attention(x, x, x, need_weights=False)[0]
        else:
            x = x + self.attention(x)
        return self.out((x + self.down(F.gelu(self.up(x)))).mean(1))


NETWORKS = {
    "plain": network,
    "groups": Grouped,
    "residual": Residual,
    "heads": lambda: Tokens(Heads()),
    "corrected heads": lambda: Tokens(Corrected()),
    "nn.MultiheadAttention": lambda: Tokens(nn.MultiheadAttention(8, 4, batch_first=True)),
    "transformer layer": lambda: Tokens(nn.Sequential(nn.TransformerEncoderLayer(8, 4, 6, 0.0, batch_first=True))),
}


WRITTEN_DOWN = {
    "plain": [],
    "groups": ["groups"],
    "residual": ["widened"],
    "heads": ["integers", "widened"],
    "corrected heads": ["corrections", "widened"],
    "nn.MultiheadAttention": ["corrections", "widened"],
    "transformer layer": ["corrections", "widened"],
}
"""The parts of a network's record that are about more than its tensors."""


def gated(name, make=lambda p: optim.Adam(p, 1e-2), **options):
    """With gates on all that can have them, rows of branches too."""
    model = NETWORKS[name]().double()
    structures = bmrs.structures(model, X)
    chosen = [structure for structure in structures.everything if not structure.hidden]
    optimizer = make(model.parameters())
    pruner = bmrs.Pruner(model, X, optimizer, structures=chosen, log_sigma=-1.0, **options)
    return model, optimizer, pruner


def spread(bank):
    """Gates as different as after a training. The last unit of a layer is worth most, so that no layer is emptied."""
    last = [layer.stop - 1 for layer in bank.layers.values()]
    with torch.no_grad():
        bank.mu.uniform_(-1.0, 0.2)
        bank.log_sigma.uniform_(-2.0, 0.0)
        bank.log_sigma[last] = -5.0 + torch.rand(len(last), dtype=bank.mu.dtype)


def batches(count):
    return [(torch.randn(6, 2, 6, 6, dtype=torch.float64), torch.randint(3, (6,))) for _ in range(count)]


def train(model, optimizers, data):
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    for x, y in data:
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()


def through_a_file(state):
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def everything(model, *optimizers):
    """Deep copies of all numbers and integers there are, and of what is computed."""
    was = model.training
    model.eval()
    with torch.no_grad():
        output = model(X)
    model.train(was)
    integers = {
        name: {k: v for k, v in vars(module).items() if isinstance(v, int | tuple) and k != FAST_PATH}
        for name, module in model.named_modules()
        if name != "bmrs_noise"
    }
    state = [{name: optimizer.state.get(p) for name, p in model.named_parameters()} for optimizer in optimizers]
    groups = [
        [{**group, "params": [p.shape for p in group["params"]]} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]
    return copy.deepcopy((dict(model.state_dict()), output, integers, state, groups))


def same(first, second):
    """To the bit."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return first == second


# --- a run that was interrupted ---------------------------------------------------------------------------------------


class Run:
    """A training with all that goes with it."""

    def __init__(self, kind):
        self.model = network()
        parameters = list(self.model.parameters())
        self.schedulers = []
        if kind == "two optimizers":
            self.optimizers = [optim.Adam(parameters[:5], 1e-2), optim.SGD(parameters[5:], 1e-2, momentum=0.9)]
        elif kind == "Adafactor":
            self.optimizers = [optim.Adafactor(parameters, 1e-2)]
        elif kind == "SGD":
            self.optimizers = [optim.SGD(parameters, 1e-2, momentum=0.9)]
        else:
            self.optimizers = [optim.AdamW(parameters, 1e-2, weight_decay=0.1, fused=kind == "fused")]
        if kind == "scheduler before":
            self.schedulers = [lr_scheduler.OneCycleLR(self.optimizers[0], 0.05, total_steps=30)]
        options = {"noise": "batch"} if kind == "noise per batch" else {}
        self.pruner = bmrs.Pruner(
            self.model, X, self.optimizers, log_sigma=-1.0, warmup=7 if kind == "warm-up" else 0, **options
        )
        if kind == "scheduler after":
            self.schedulers = [lr_scheduler.OneCycleLR(self.optimizers[0], 0.05, total_steps=30)]
        self.average = None
        if kind == "average":
            self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
            self.pruner.follow(self.average)

    def epoch(self, data):
        for batch in data:
            train(self.model, self.optimizers, [batch])
            for scheduler in self.schedulers:
                scheduler.step()
            if self.average is not None:
                self.average.update_parameters(self.model)
        self.pruner.prune(fraction=0.12)

    def state(self):
        return {"pruner": self.pruner.state_dict(), "schedulers": [s.state_dict() for s in self.schedulers]}

    def load(self, state):
        self.pruner.load_state_dict(state["pruner"])
        for scheduler, content in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(content)

    def all(self):
        average = {} if self.average is None else dict(self.average.state_dict())
        return everything(self.model, *self.optimizers), copy.deepcopy(average)


KINDS = ["Adam", "SGD", "Adafactor", "fused", "two optimizers", "scheduler before", "scheduler after", "average",
         "noise per batch", "warm-up"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_was_interrupted_goes_on_exactly(kind):
    data = [batches(3) for _ in range(5)]
    undisturbed = Run(kind)
    for epoch in data[:2]:
        undisturbed.epoch(epoch)
    state = through_a_file(undisturbed.state())
    for epoch in data[2:]:
        undisturbed.epoch(epoch)
    torch.manual_seed(random.randrange(10**6))  # another start: all that matters is in the state
    resumed = Run(kind)
    resumed.load(state)
    for epoch in data[2:]:
        resumed.epoch(epoch)
    assert undisturbed.pruner.bank.draws == 15
    assert same(resumed.all(), undisturbed.all())
    assert resumed.pruner.prices.tolist() == undisturbed.pruner.prices.tolist()
    assert resumed.pruner.rank() == undisturbed.pruner.rank()


def test_a_resumed_residual_network_keeps_the_record_of_an_undisturbed_one():
    """Rows of a branch that go with the channel they are added to are not missing from the branch."""

    def made():
        model = Residual().double()
        return model, bmrs.Pruner(model, X, seed=3)

    (model, pruner), (again, resumed) = made(), made()
    spread(pruner.bank)
    assert min(row.removed for row in pruner.prune(fraction=0.4).structures) > 0
    resumed.load_state_dict(through_a_file(pruner.state_dict()))
    assert {s.name: s.kept for s in resumed.structures.everything} == {
        s.name: s.kept for s in pruner.structures.everything
    }
    for one in (pruner, resumed):
        assert one.prune(fraction=0.3).removed > 0
    assert again.bmrs_removed == model.bmrs_removed
    assert model.bmrs_removed.widened == {}
    assert not any("indices" in name for name, _ in again.named_buffers())
    assert torch.equal(resumed.finish().eval()(X), pruner.finish().eval()(X))


def test_a_state_is_loaded_into_the_run_it_came_from_after_more_epochs():
    run = Run("Adam")
    run.epoch(batches(3))
    state, then = copy.deepcopy(run.state()), run.all()
    data = [batches(3) for _ in range(2)]
    for epoch in data:
        run.epoch(epoch)
    ends = run.all()
    run.load(state)
    assert same(run.all(), then)
    for epoch in data:
        run.epoch(epoch)
    assert same(run.all(), ends)


# --- shapes that shrink and grow --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETWORKS)
class TestShapesOfAState:
    def test_an_earlier_state_brings_back_what_was_removed_since(self, name):
        model, optimizer, pruner = gated(name)
        spread(pruner.bank)
        moments = []
        for _ in range(4):
            train(model, optimizer, batches(2))
            moments.append((copy.deepcopy(pruner.state_dict()), everything(model, optimizer)))
            assert pruner.prune(fraction=0.15).removed > 0
        sizes = [sum(t.numel() for key, t in state["model"].items() if "_extra" not in key) for state, _ in moments]
        assert sizes == sorted(sizes, reverse=True)
        assert len(set(sizes)) == 4
        for number in (1, 0, 3, 2, 0):
            state, then = moments[number]
            pruner.load_state_dict(state)
            assert same(everything(model, optimizer), then)
        data = batches(2)
        train(model, optimizer, data)
        pruner.prune(fraction=0.15)
        went_on = everything(model, optimizer)
        pruner.load_state_dict(moments[0][0])
        train(model, optimizer, data)
        pruner.prune(fraction=0.15)
        assert same(everything(model, optimizer), went_on)

    def test_what_the_network_had_written_down_comes_back_too(self, name):
        """One unit of each structure goes, so that groups, numbers of heads and narrow branches all change."""
        model, optimizer, pruner = gated(name)
        before = everything(model, optimizer)
        first = [layer.start for layer in pruner.bank.layers.values()]
        with torch.no_grad():
            pruner.bank.mu[first], pruner.bank.log_sigma[first] = -3.0, 4.0
        after = everything(model, optimizer)
        report = pruner.prune(undoable=True)
        assert [row.removed for row in report.structures] == [1] * len(first)
        record = model.bmrs_removed
        assert all(getattr(record, part) for part in WRITTEN_DOWN[name])
        assert not same(everything(model, optimizer)[2], before[2])
        pruner.undo()
        assert same(everything(model, optimizer), after)
        assert same(everything(model, optimizer)[2], before[2])

    def test_a_fresh_network_with_gates_takes_the_shapes_of_a_plain_state_dict(self, name):
        model, optimizer, pruner = gated(name)
        spread(pruner.bank)
        train(model, optimizer, batches(2))
        pruner.prune(fraction=0.3)
        fresh, own, other = gated(name)
        whole = sum(p.numel() for p in fresh.parameters())
        fresh.load_state_dict(through_a_file(model.state_dict()))
        assert sum(p.numel() for p in fresh.parameters()) == sum(p.numel() for p in model.parameters()) < whole
        assert torch.equal(fresh.eval()(X), model.eval()(X))
        fresh.train()
        model.train()
        assert torch.equal(fresh(X), model(X))
        train(fresh, own, batches(2))
        assert other.prune(fraction=0.2).removed > 0
        plain = other.finish().eval()(X)
        assert torch.isfinite(plain).all()

    def test_finishing_after_going_back_gives_the_plain_network_of_that_moment(self, name):
        model, optimizer, pruner = gated(name)
        spread(pruner.bank)
        train(model, optimizer, batches(2))
        pruner.prune(fraction=0.2)
        pruner.prune(fraction=0.2)
        pruner.undo()
        with torch.no_grad():
            expected = model.eval()(X)
            finished = pruner.finish()(X)
        torch.testing.assert_close(finished, expected, rtol=1e-6, atol=1e-6)


# --- undo -------------------------------------------------------------------------------------------------------------


def test_undo_restores_all_numbers_and_another_removal_works():
    model, optimizer, pruner = gated("plain")
    spread(pruner.bank)
    train(model, optimizer, batches(3))
    before = everything(model, optimizer)
    first = pruner.prune(fraction=0.4)
    assert first.removed == 7
    assert not same(everything(model, optimizer), before)
    train(model, optimizer, batches(2))
    pruner.undo()
    assert same(everything(model, optimizer), before)
    again = pruner.prune(fraction=0.4)
    assert again == first
    with_undo = everything(model, optimizer)
    pruner.undo()
    pruner.prune(fraction=0.4, undoable=False)
    assert same(everything(model, optimizer), with_undo)
    train(model, optimizer, batches(2))


@pytest.mark.parametrize("name", ["plain", "groups", "residual", "heads"])
def test_twenty_random_removals_and_undoings_leave_no_trace(name):
    model, optimizer, pruner = gated(name)
    spread(pruner.bank)
    train(model, optimizer, batches(2))
    before, data = everything(model, optimizer), batches(1)
    for _ in range(20):
        report = pruner.prune(fraction=random.uniform(0.1, 0.95))
        assert report.removed > 0
        train(model, optimizer, data)
        pruner.undo()
        assert same(everything(model, optimizer), before)


def test_undo_goes_back_past_removals_that_keep_no_copy_to_the_last_that_does():
    model, optimizer, pruner = gated("plain")
    spread(pruner.bank)
    before = everything(model, optimizer)
    pruner.prune(fraction=0.2)
    pruner.prune(fraction=0.2, undoable=False)
    pruner.undo()
    assert same(everything(model, optimizer), before)
    with pytest.raises(ValueError, match="there is nothing to undo"):
        pruner.undo()


def test_a_removal_by_evidence_can_be_undone_if_asked_for():
    model, optimizer, pruner = gated("plain")
    with torch.no_grad():
        pruner.bank.mu[::3] = -3.0
        pruner.bank.log_sigma[::3] = 4.0
    before = everything(model, optimizer)
    assert pruner.prune(undoable=True).removed == 6
    pruner.undo()
    assert same(everything(model, optimizer), before)
    assert pruner.prune().removed == 6
    with pytest.raises(ValueError, match="there is nothing to undo"):
        pruner.undo()


# --- refusals ---------------------------------------------------------------------------------------------------------


def changed_extra(change):
    """The state with its record, read as JSON, changed."""

    def apply(state):
        content = json.loads(bytes(state["model"]["bmrs_noise._extra_state"].tolist()))
        change(content)
        raw = bytearray(json.dumps(content).encode())
        state["model"]["bmrs_noise._extra_state"] = torch.frombuffer(raw, dtype=torch.uint8)

    return apply


def cut_extra(state):
    state["model"]["bmrs_noise._extra_state"] = state["model"]["bmrs_noise._extra_state"][:-20]


def wrong_moment(state):
    """An optimizer's state of a larger network."""
    for content in state["optimizers"][0]["state"].values():
        content["exp_avg"] = torch.zeros([size + 1 for size in content["exp_avg"].shape], dtype=torch.float64)


REFUSALS = {
    "another version": (lambda s: s.update(version=99), "state has format 99, this version of bmrs reads 1"),
    "no state at all": (lambda s: s.clear(), "state must be what Pruner.state_dict() returned"),
    "a record cut short": (cut_extra, "the state dict's record of what was removed is damaged"),
    "a record without its parts": (
        changed_extra(lambda c: c["removed"].pop("kept")),
        "the state dict's record of what was removed is damaged",
    ),
    "a record of another type": (
        changed_extra(lambda c: c.update(removed=[1, 2])),
        "the state dict's record of what was removed is damaged",
    ),
    "indices that are no numbers": (
        changed_extra(lambda c: c["removed"]["kept"].update({"0.weight": {"0": "one"}})),
        "the state dict's record of what was removed is damaged",
    ),
    "no count of the draws": (
        changed_extra(lambda c: c.pop("draws")),
        "the state dict's record of what was removed is damaged",
    ),
    "indices there are not": (
        changed_extra(lambda c: c["removed"]["kept"].update({"0.weight": {"0": "2-7"}})),
        "the state is damaged, since it keeps indices of '0.weight' that there are not",
    ),
    "dimensions there are not": (
        changed_extra(lambda c: c["removed"]["kept"].update({"0.weight": {"7": "0-1"}})),
        "the state is damaged, since it keeps indices of '0.weight' that there are not",
    ),
    "indices out of order": (
        changed_extra(lambda c: c["removed"]["kept"].update({"0.weight": {"0": "3,1"}})),
        "the state is damaged, since it keeps indices of '0.weight' that there are not",
    ),
    "a module that is not there": (
        changed_extra(lambda c: c["removed"]["groups"].update(attention=2)),
        "the state speaks of module 'attention', which the model does not have",
    ),
    "a tensor that is missing": (lambda s: s["model"].pop("3.bias"), "'3.bias' is missing in the state"),
    "a tensor too many": (lambda s: s["model"].update(extra=torch.ones(1)), "'extra' is missing in the model"),
    "a tensor of another shape": (
        lambda s: s["model"].update({"8.bias": torch.ones(9)}),
        "state holds '8.bias' with shape (9,), but this model's would have (3,)",
    ),
    "fewer optimizers": (lambda s: s["optimizers"].clear(), "state holds 0 optimizers, the Pruner has 1"),
    "more optimizers": (lambda s: s["optimizers"].extend(s["optimizers"]), "state holds 2 optimizers"),
    "other groups": (
        lambda s: s["optimizers"][0]["param_groups"][0]["params"].pop(),
        "state comes from an optimizer with other parameter groups",
    ),
    "an optimizer of another moment": (wrong_moment, "does not fit a parameter of shape"),
    "fewer copies": (lambda s: s["copies"].clear(), "state holds 0 copies, the Pruner has 1"),
    "a copy of another network": (
        lambda s: s["copies"][0].pop("module.3.bias"),
        "'module.3.bias' is missing in the state",
    ),
    "a copy of other shapes": (
        lambda s: s["copies"][0].update({"module.0.bias": torch.ones(9)}),
        "state holds 'module.0.bias' with shape (9,)",
    ),
}


@pytest.mark.parametrize("reason", REFUSALS)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(reason):
    change, sentence = REFUSALS[reason]
    model, optimizer, pruner = gated("plain")
    average = AveragedModel(model)
    pruner.follow(average)
    spread(pruner.bank)
    train(model, optimizer, batches(2))
    average.update_parameters(model)
    pruner.prune(fraction=0.3)
    state = copy.deepcopy(pruner.state_dict())
    pruner.undo()
    train(model, optimizer, batches(2))
    pruner.prune(fraction=0.1)
    pruner.prune(fraction=0.1)
    before, copied = everything(model, optimizer), copy.deepcopy(dict(average.state_dict()))
    damaged = copy.deepcopy(state)
    change(damaged)
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        pruner.load_state_dict(damaged)
    assert "\n" not in str(caught.value)
    assert same(everything(model, optimizer), before)
    assert same(dict(average.state_dict()), copied)
    train(model, optimizer, batches(1))
    pruner.load_state_dict(state)
    assert same(copy.deepcopy(pruner.state_dict()["model"]), state["model"])


def test_a_state_of_another_network_is_refused():
    _, _, pruner = gated("plain")
    model, optimizer, other = gated("groups")
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match="build"):
        other.load_state_dict(pruner.state_dict())
    assert same(everything(model, optimizer), before)
    wider = network()
    wider[6], wider[8] = nn.Linear(80, 9), nn.Linear(9, 3)
    pruner.prune(fraction=0.4)
    wide = bmrs.Pruner(wider.double(), X, optim.Adam(wider.parameters()))
    before = everything(wider)
    with pytest.raises(ValueError, match="build the model"):
        wide.load_state_dict(pruner.state_dict())
    assert same(everything(wider), before)
