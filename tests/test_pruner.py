"""From posteriors to closed gates, and the Pruner: what it chooses, what it says, and what it refuses."""

import copy
import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import bmrs


def bank_of(mu, log_sigma, layers):
    bank = bmrs.NoiseBank(layers)
    bank.mu.data, bank.log_sigma.data = torch.tensor(mu), torch.tensor(log_sigma)
    return bank


def test_closes_what_the_criterion_rejects_once():
    bank = bank_of([0.1, -3.0, 0.1, -3.0], [-3.0, 4.0, -3.0, 4.0], {"a": 2, "b": 2})
    assert bmrs.prune(bank).tolist() == [False, True, False, True]
    assert bank.alive.tolist() == [True, False, True, False]
    assert not bmrs.prune(bank).any()
    assert bank.alive.tolist() == [True, False, True, False]


def test_the_best_unit_of_a_hopeless_layer_stays():
    bank = bank_of([-3.0, -3.0, -3.0, 0.1], [4.0, 3.0, 5.0, -3.0], {"a": 3, "b": 1})
    assert bmrs.prune(bank, bmrs.BMRS_N()).tolist() == [True, False, True, False]
    assert bank.units_left() == {"a": 1, "b": 1}


def test_a_fraction_is_taken_of_the_units_still_there():
    class Worth(bmrs.L2):
        def scores(self, units):
            return torch.arange(10.0)

    bank = bmrs.NoiseBank({"a": 10})
    bmrs.prune(bank, Worth(fraction=0.2))
    assert bmrs.prune(bank, Worth(fraction=0.25)).nonzero().flatten().tolist() == [2, 3]


def test_a_gate_gone_wrong_is_kept_and_reported():
    bank = bank_of([math.nan, -3.0, 0.1], [0.0, 4.0, -3.0], {"a": 3})
    with pytest.warns(UserWarning, match="1 of 3 units have a score that is not finite and are kept"):
        closed = bmrs.prune(bank)
    assert closed.tolist() == [False, True, False]


# --- the Pruner -------------------------------------------------------------------------------------------------------

X = torch.randn(8, 2, 6, 6)
UNITS = {"0": 6, "3": 5, "6": 7}
PARAMETERS = 6 * 19 + 12 + 5 * 55 + 7 * 81 + 3 * 8


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
    )


def made(make=lambda p: optim.Adam(p, 1e-2), **options):
    model = network()
    optimizer = make(model.parameters())
    return model, optimizer, bmrs.Pruner(model, X, optimizer, **options)


def spread(pruner):
    """Gates as different as after a training. The last unit of a layer is worth most, so that no layer is emptied."""
    last = [layer.stop - 1 for layer in pruner.bank.layers.values()]
    with torch.no_grad():
        pruner.bank.mu.uniform_(-1.0, 0.2)
        pruner.bank.log_sigma.uniform_(-2.0, 0.0)
        pruner.bank.log_sigma[last] = -5.0 + torch.rand(len(last))


def dead(pruner, *units):
    """Gates that say nothing about their units: the evidence is for removal."""
    with torch.no_grad():
        for name, unit in units:
            at = pruner.bank.layers[name].start + unit
            pruner.bank.mu[at], pruner.bank.log_sigma[at] = -3.0, 4.0


def train(model, optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(8, 2, 6, 6)), torch.randint(3, (8,))).backward()
        optimizer.step()


def snapshot(model, optimizer):
    """Weights, gates, and the optimizer's state, in the order of the parameters."""
    state = [copy.deepcopy(dict(optimizer.state.get(p, {}))) for p in model.parameters()]
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, state


def same(first, second):
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, torch.Tensor):
        return torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
    return first == second


class TestWhatItChooses:
    def test_evidence_decides(self):
        model, optimizer, pruner = made()
        train(model, optimizer)
        dead(pruner, ("0", 1), ("0", 4), ("6", 0))
        values = -torch.cat(list(pruner.scores().values()))
        report = pruner.prune()
        assert [(s.name, s.kept) for s in pruner.structures] == [
            ("0", [0, 2, 3, 5]),
            ("3", [0, 1, 2, 3, 4]),
            ("6", [1, 2, 3, 4, 5, 6]),
        ]
        assert model[0].out_channels == model[1].num_features == model[3].in_channels == 4
        assert model[6].out_features == model[8].in_features == 6
        assert (values[[1, 4, 11]] > -0.919).all()
        gone, kept = values[[1, 4]].tolist(), values[6:11].tolist()
        assert report.structures[0].delta_f_removed == pytest.approx((min(gone), max(gone)))
        assert report.structures[1].delta_f_removed is None
        assert report.structures[1].delta_f_kept == pytest.approx((min(kept), max(kept)))

    def test_scores_are_the_criterion_s_own_by_structure(self):
        for criterion, expected in (
            (bmrs.BMRS_N(), lambda q: -bmrs.evidence.spike(q)),
            (bmrs.BMRS_U(), lambda q: -bmrs.evidence.interval(q, 8, 23)),
            (bmrs.SNR(), lambda q: q.snr()),
            (bmrs.Mean(), lambda q: q.mean()),
        ):
            _, _, pruner = made(criterion=criterion)
            spread(pruner)
            mu, log_sigma = pruner.bank.mu.detach().split([6, 5, 7]), pruner.bank.log_sigma.detach().split([6, 5, 7])
            scores = pruner.scores()
            assert list(scores) == list(UNITS)
            for name, m, s in zip(UNITS, mu, log_sigma, strict=True):
                torch.testing.assert_close(scores[name], expected(bmrs.TruncatedLogNormal(m, s)))

    def test_the_ranking_has_the_least_worth_first_across_structures(self):
        _, _, pruner = made()
        spread(pruner)
        ranked = pruner.rank()
        scores = pruner.scores()
        assert sorted((name, unit) for name, unit, _ in ranked) == [(n, u) for n, k in UNITS.items() for u in range(k)]
        assert [one.worth for one in ranked] == sorted(one.worth for one in ranked)
        assert all(float(scores[one.structure][one.unit]) == one.worth for one in ranked)

    @pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 0.7])
    def test_a_fraction_takes_exactly_the_lowest(self, fraction):
        model, optimizer, pruner = made()
        train(model, optimizer)
        spread(pruner)
        lowest = {(one.structure, one.unit) for one in pruner.rank()[: int(fraction * 18)]}
        report = pruner.prune(fraction=fraction)
        assert {s.name: s.kept for s in pruner.structures} == {
            name: [unit for unit in range(count) if (name, unit) not in lowest] for name, count in UNITS.items()
        }
        assert report.removed == int(fraction * 18)
        train(model, optimizer)

    def test_a_fraction_is_of_the_units_still_there(self):
        _, _, pruner = made()
        spread(pruner)
        counts = [pruner.prune(fraction=0.25).removed for _ in range(3)]
        assert counts == [18 // 4, 14 // 4, 11 // 4]
        assert len(pruner.rank()) == 9

    @pytest.mark.parametrize("fraction", [None, 1.0])
    def test_the_best_unit_of_a_hopeless_layer_stays_and_the_report_says_so(self, fraction):
        model, optimizer, pruner = made()
        train(model, optimizer)
        spread(pruner)
        dead(pruner, *(("3", unit) for unit in range(5)))
        with torch.no_grad():
            pruner.bank.mu[6 + 2] = -2.9  # the best of them
        best = int(pruner.scores()["3"].argmax())
        report = pruner.prune(fraction)
        assert pruner.structures["3"].kept == [best] == [2]
        row = report.structures[1]
        assert (row.before, row.removed, row.left, row.spared) == (5, 4, 1, True)
        lines = str(report).splitlines()
        assert lines[3].split()[:5] == ["3", "filter", "5", "4", "1*"]
        assert lines[-1] == "* all of its units were to go: a layer keeps at least its best one"
        if fraction is None:
            assert [one.spared for one in report.structures] == [False, True, False]
        else:
            assert pruner.bank.units_left() == {"0": 1, "3": 1, "6": 1}
        again = pruner.prune()
        assert again.removed == 0
        train(model, optimizer)
        assert torch.isfinite(model.eval()(X)).all()

    def test_only_structures_asked_for_have_gates(self):
        for wanted in (["6"], "6", None):
            model = network()
            structures = bmrs.structures(model, X)
            pruner = bmrs.Pruner(model, X, structures=wanted or structures["6"])
            assert list(pruner.bank.layers) == ["6"]
            pruner.prune(fraction=0.9)
            assert model[0].out_channels == 6
            assert model[6].out_features == 1

    def test_branches_and_what_they_are_added_to_leave_each_other_an_index(self):
        class Residual(nn.Module):
            def __init__(self):
                super().__init__()
                self.stem, self.inner = nn.Linear(3, 4), nn.Linear(4, 5)
                self.back, self.out = nn.Linear(5, 4), nn.Linear(4, 2)

            def forward(self, x):
                x = torch.tanh(self.stem(x))
                return self.out(x + self.back(torch.relu(self.inner(x))))

        x = torch.randn(6, 3)
        for seed in range(10):
            torch.manual_seed(seed)  # of networks none of which has nothing but dead units
            model = Residual()
            structures = bmrs.structures(model, x)
            pruner = bmrs.Pruner(model, x, structures=structures.everything)
            with torch.no_grad():
                pruner.bank.mu.uniform_(-1.0, 0.2)
            assert set(pruner.bank.layers) == {"stem", "inner", "back branch"}
            report = pruner.prune(fraction=0.75)
            left = {row.name: row.left for row in report.structures}
            assert left == {s.name: s.units for s in structures.everything} == pruner.bank.units_left()
            assert model.back.weight.shape == (left["back branch"], left["inner"])
            assert model.stem.weight.shape[0] == left["stem"] >= left["back branch"] >= 1
            assert set(structures["back branch"].kept) <= set(structures["stem"].kept)
            gated = model.eval()(x)
            torch.testing.assert_close(pruner.finish()(x), gated)

    @pytest.mark.parametrize("fraction", [None, 0.3, 0.8, 1.0])
    def test_widths_are_multiples_and_nothing_goes_that_was_to_stay(self, fraction):
        """On random gates: of what the criterion rejects the best stay, as few as there must."""
        for seed in range(12):
            torch.manual_seed(seed)
            sizes = dict(zip("024", torch.randint(2, 40, (3,)).tolist(), strict=True))
            a, b, c = sizes.values()
            layers = nn.Linear(3, a), nn.ReLU(), nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c), nn.ReLU(), nn.Linear(c, 2)
            pruners = []
            for round_to in (1, 8):
                model = copy.deepcopy(nn.Sequential(*layers))
                pruners.append(bmrs.Pruner(model, torch.randn(4, 3), round_to=round_to))
                torch.manual_seed(seed)
                with torch.no_grad():
                    pruners[-1].bank.mu.uniform_(-4.0, 0.2)
                    pruners[-1].bank.log_sigma.uniform_(-2.0, 3.0)
            worth = pruners[1].scores()
            free, rounded = (pruner.prune(fraction) for pruner in pruners)
            for name, size in sizes.items():
                wanted, kept = (set(pruner.structures[name].kept) for pruner in pruners)
                assert wanted <= kept
                assert len(kept) == (len(wanted) if size < 8 else min(size, 8 * math.ceil(len(wanted) / 8)))
                spared = sorted(kept - wanted, key=worth[name].__getitem__)
                assert not spared or worth[name][list(set(range(size)) - kept)].le(worth[name][spared[0]]).all()
            rows = {row.name: (row.for_width, row.left) for row in rounded.structures}
            more = {row.name: rows[row.name][1] - row.left for row in free.structures}
            assert {name: for_width for name, (for_width, _) in rows.items()} == more
            assert ("multiples of 8" in str(rounded)) == any(more.values())

    def test_widths_of_branches_and_streams_are_multiples_too(self):
        class Residual(nn.Module):
            def __init__(self):
                super().__init__()
                self.stem, self.inner = nn.Linear(3, 24), nn.Linear(24, 30)
                self.back, self.out = nn.Linear(30, 24), nn.Linear(24, 2)

            def forward(self, x):
                x = torch.tanh(self.stem(x))
                return self.out(x + self.back(torch.relu(self.inner(x))))

        x = torch.randn(6, 3)
        for seed in range(6):
            torch.manual_seed(seed)
            model = Residual()
            structures = bmrs.structures(model, x)
            pruner = bmrs.Pruner(model, x, structures=structures.everything, round_to=4)
            with torch.no_grad():
                pruner.bank.mu.uniform_(-1.0, 0.2)
            pruner.prune(fraction=0.6)
            gated = model.eval()(x)
            assert model.stem.out_features % 4 == model.inner.out_features % 4 == 0
            assert model.back.weight.shape == (structures["back branch"].units, model.inner.out_features)
            assert model.back.out_features <= model.stem.out_features
            torch.testing.assert_close(pruner.finish()(x), gated)

    def test_heads_are_no_widths(self):
        model = nn.Sequential(nn.TransformerEncoderLayer(64, 16, 64, batch_first=True))
        pruner = bmrs.Pruner(model, torch.randn(2, 3, 64), round_to=8)
        with torch.no_grad():
            pruner.bank.mu.uniform_(-1.0, 0.2)
        pruner.prune(fraction=0.25)
        left = {s.kind: s.units for s in pruner.structures}
        assert left["neuron"] % 8 == 0
        free = bmrs.Pruner(copy.deepcopy(pruner.finish()), torch.randn(2, 3, 64), structures=["0.self_attn heads"])
        assert free.structures["0.self_attn heads"].rounded(3, 8) == 3

    def test_round_to_must_be_a_number_of_units(self):
        with pytest.raises(ValueError, match="round_to must be a finite number of at least 1, what widths"):
            made(round_to=0)

    def test_the_network_computes_without_the_units_what_it_did_with_their_gates_closed(self):
        model, optimizer, pruner = made()
        train(model, optimizer, 3)
        spread(pruner)
        model.double().eval()
        ranked = pruner.rank()
        with torch.no_grad():
            for one in ranked[:6]:
                pruner.bank.alive[pruner.bank.layers[one.structure].start + one.unit] = False
            expected = model(X.double())
            pruner.bank.alive.fill_(True)
            pruner.prune(fraction=1 / 3)
            torch.testing.assert_close(model(X.double()), expected)


class TestNorms:
    """By hand: a filter's weights, its bias, and what a batch norm scales it by."""

    @staticmethod
    def norms(model, of):
        conv, norm, second, linear = model[0], model[1], model[3], model[6]
        first = of(conv.weight).square().sum((1, 2, 3)) + of(conv.bias).square()
        first = first + of(norm.weight).square() + of(norm.bias).square()
        middle = of(second.weight).square().sum((1, 2, 3)) + of(second.bias).square()
        last = of(linear.weight).square().sum(1) + of(linear.bias).square()
        return {"0": first.sqrt(), "3": middle.sqrt(), "6": last.sqrt()}

    def test_l2(self):
        model, optimizer, pruner = made(criterion=bmrs.L2(fraction=0.3))
        train(model, optimizer)
        expected = self.norms(model, lambda p: p.detach().double())
        scores = pruner.scores()
        for name in UNITS:
            torch.testing.assert_close(scores[name], expected[name])
        order = torch.cat(list(expected.values())).argsort()
        kept = sorted(order[5:].tolist())
        assert pruner.prune().removed == 5
        assert pruner.bank._kept == kept
        again = self.norms(model, lambda p: p.detach().double())
        for name, norm in pruner.scores().items():
            torch.testing.assert_close(norm, again[name])

    def test_gradient(self):
        model, optimizer, pruner = made(criterion=bmrs.Gradient(1.0, 1.0))
        train(model, optimizer)
        weight = torch.cat(list(self.norms(model, lambda p: p.detach().double()).values()))
        slope = torch.cat(list(self.norms(model, lambda p: p.grad.double()).values()))
        high, steep = float(weight.quantile(0.7)), float(slope.quantile(0.7))
        pruner.criterion = bmrs.Gradient(high, steep)
        scores = torch.cat(list(pruner.scores().values()))
        torch.testing.assert_close(scores, torch.maximum(weight / high, slope / steep))
        low = ((weight < high) & (slope < steep)).split([6, 5, 7])
        assert sum(int(gone.sum()) for gone in low) >= 6
        report = pruner.prune()
        for row, gone in zip(report.structures, low, strict=True):
            assert row.removed == min(int(gone.sum()), len(gone) - 1)
        optimizer.zero_grad()
        with pytest.raises(ValueError, match="the L2 norm of each unit's gradients"):
            pruner.prune()

    def test_a_branch_s_own_rows_count(self):
        class Residual(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.back, self.out = nn.Linear(4, 5), nn.Linear(5, 4), nn.Linear(4, 2)

            def forward(self, x):
                return self.out(x + self.back(torch.relu(self.inner(x))))

        model, x = Residual(), torch.randn(6, 4)
        chosen = ["inner", "back branch"]
        scores = bmrs.Pruner(model, x, criterion=bmrs.L2(0.1), structures=chosen).scores()
        for name, layer in (("inner", model.inner), ("back branch", model.back)):
            rows = torch.cat([layer.weight, layer.bias[:, None]], 1).detach().double()
            torch.testing.assert_close(scores[name], rows.norm(dim=1))


class TestPrices:
    """Parameters and multiply-adds of a unit, counted by hand from the layers."""

    PARAMS = (19 + 2 + 45, 55 + 7 * 16, 81 + 3)
    MACS = (8 * (36 * 18 + 16 * 45), 8 * (16 * 54 + 7 * 16), 8 * (80 + 3))

    @pytest.mark.parametrize(
        ("price", "per_unit"),
        [
            ("uniform", [2 / 18] * 3),
            ("layer", [2 / (3 * 6), 2 / (3 * 5), 2 / (3 * 7)]),
            ("elbo", [2 / 500] * 3),
            (lambda s: {"0": 0.5, "3": 1.5, "6": 0.0}[s.name], [1.0, 3.0, 0.0]),
        ],
    )
    def test_each_unit_pays_what_the_formula_says(self, price, per_unit):
        _, _, pruner = made(price=price, strength=2.0, num_examples=500)
        want = torch.tensor([p for p, count in zip(per_unit, UNITS.values(), strict=True) for _ in range(count)])
        torch.testing.assert_close(pruner.prices, want.double(), rtol=1e-6, atol=0)

    @pytest.mark.parametrize(("price", "cost"), [("params", PARAMS), ("macs", MACS)])
    def test_each_unit_pays_for_what_it_costs(self, price, cost):
        _, _, pruner = made(price=price, strength=2.0)
        each = torch.tensor([c for c, count in zip(cost, UNITS.values(), strict=True) for _ in range(count)]).double()
        torch.testing.assert_close(pruner.prices, 2 * each / each.sum())

    def test_a_price_for_every_unit(self):
        own = {name: torch.rand(count) for name, count in UNITS.items()}
        _, _, pruner = made(price=lambda s: own[s.name], strength=3.0)
        torch.testing.assert_close(pruner.prices, 3 * torch.cat(list(own.values())).double())

    @pytest.mark.parametrize("price", ["uniform", "layer", "params", "macs", "time"])
    def test_those_that_are_left_keep_their_price(self, price):
        model, optimizer, pruner = made(price=price)
        spread(pruner)
        whole = pruner.prices
        for _ in range(3):
            pruner.prune(fraction=0.2)
            train(model, optimizer, 1)
            kept = [f + u for f, s in zip((0, 6, 11), pruner.structures, strict=True) for u in s.kept]
            assert torch.equal(pruner.prices, whole[kept])
            expected = (whole[kept] * bmrs.TruncatedLogNormal(pruner.bank.mu, pruner.bank.log_sigma).kl()).sum()
            torch.testing.assert_close(pruner.kl().detach(), expected.detach().float(), check_dtype=False)


class TestReport:
    def test_counts_and_columns(self):
        model, _, pruner = made()
        dead(pruner, ("0", 3), ("6", 1), ("6", 5))
        report = pruner.prune()
        after = PARAMETERS - 66 - 2 * 84
        assert (report.removed, report.units) == (3, 15)
        assert (report.parameters_before, report.parameters) == (PARAMETERS, after)
        assert after == sum(p.numel() for n, p in model.named_parameters() if not n.startswith("bmrs_noise"))
        lines = str(report).splitlines()
        assert lines[0] == (
            f"3 units removed by BMRS_N(tolerance=0.9189), 15 left; {PARAMETERS} parameters → {after}, "
            f"{1 - after / PARAMETERS:.1%} fewer"
        )
        columns = ["structure", "kind", "before", "removed", "left", "ΔF of removed", "ΔF of kept"]
        assert re.split(r"\s{2,}", lines[1]) == columns
        assert lines[2].split()[:5] == ["0", "filter", "6", "1", "5"]
        assert lines[3].split()[:5] == ["3", "filter", "5", "0", "5"]
        assert lines[4].split()[:5] == ["6", "neuron", "7", "2", "5"]
        assert len(lines) == 5
        ends = {line.rindex(" … ") for line in (lines[2], lines[3], lines[4])}
        assert max(ends) < len(lines[1])
        assert len({len(line) for line in lines[1:]}) == 1  # the last column ends in line

    def test_one_unit_is_one_unit(self):
        _, _, pruner = made()
        dead(pruner, ("0", 3))
        assert str(pruner.prune()).startswith("1 unit removed by")

    def test_as_json_it_says_the_same(self):
        _, _, pruner = made()
        dead(pruner, ("0", 3), *(("3", unit) for unit in range(5)))
        report = pruner.prune()
        content = json.loads(json.dumps(report.to_json(), allow_nan=False))
        assert (content["removed"], content["units"], content["parameters"]) == (5, 13, report.parameters)
        first, second, third = content["structures"]
        assert (first["name"], first["before"], first["removed"], first["left"]) == ("0", 6, 1, 5)
        assert (second["spared"], first["spared"], second["left"]) == (True, False, 1)
        assert third["delta_f_removed"] is None
        assert third["delta_f_kept"] == list(report.structures[2].delta_f_kept)

    def test_nothing_to_say_where_nothing_was_removed(self):
        model, optimizer, pruner = made()
        train(model, optimizer)
        report = pruner.prune()
        assert (report.removed, report.units, report.parameters) == (0, 18, PARAMETERS)
        assert "fewer" not in str(report)


class TestFinish:
    @pytest.mark.parametrize("when", ["no scheduler", "scheduler before", "scheduler after", "named"])
    def test_the_optimizer_goes_on_without_gates(self, when):
        model = network()
        optimizer = optim.Adam(model.named_parameters() if when == "named" else model.parameters(), 1e-2)
        scheduler = optim.lr_scheduler.StepLR(optimizer, 2) if when == "scheduler before" else None
        pruner = bmrs.Pruner(model, X, optimizer)
        phi = [pruner.bank.mu, pruner.bank.log_sigma]
        if when == "scheduler after":
            scheduler = optim.lr_scheduler.StepLR(optimizer, 2)
        train(model, optimizer)
        pruner.prune(fraction=0.3)
        with torch.no_grad():
            gated = model.eval()(X)
        assert pruner.finish() is model
        torch.testing.assert_close(model(X).detach(), gated, rtol=1e-5, atol=1e-6)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert [id(p) for p in held] == [id(p) for p in model.parameters()]
        assert not any(p is own for p in optimizer.state for own in phi)
        assert not any(name.startswith("bmrs") for name in model.state_dict())
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
        if when == "named":
            assert optimizer.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
        model.train()
        before, steps, draws = snapshot(model, optimizer), pruner.bank.steps, pruner.bank.draws
        for _ in range(4):
            train(model, optimizer, 1)
            if scheduler is not None:
                scheduler.step()
        assert not same(snapshot(model, optimizer)[0], before[0])
        assert (pruner.bank.steps, pruner.bank.draws) == (steps, draws)
        if scheduler is not None:
            assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-4)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, optimizer, 1)

    def test_fine_tuning_is_called_with_the_plain_network(self):
        model, _, pruner = made()
        seen = []
        result = pruner.finish(fine_tune=lambda m: seen.append((m, "bmrs_noise" in dict(m.named_modules()))))
        assert seen == [(model, False)]
        assert result is model
        assert pruner.finish(fine_tune=seen.append) is model  # again: the gates are gone already
        assert seen[1] is model

    def test_all_else_is_refused_afterwards(self):
        _, _, pruner = made()
        spread(pruner)
        pruner.prune(fraction=0.2)
        pruner.finish()
        calls = (pruner.prune, pruner.rank, pruner.scores, pruner.state_dict, pruner.undo)
        for call in (*calls, lambda: pruner.load_state_dict({})):
            with pytest.raises(ValueError, match="the Pruner has finished and its gates are gone"):
                call()
        assert repr(pruner) == "Pruner(finished)"

    def test_a_new_pruner_can_follow(self):
        model, optimizer, pruner = made()
        spread(pruner)
        pruner.prune(fraction=0.3)
        pruner.finish()
        again = bmrs.Pruner(model, X, optimizer)
        assert len(again.bank.mu) == 13
        train(model, optimizer)
        spread(again)
        again.prune(fraction=0.3)
        assert len(again.bank.mu) == 10
        plain = again.finish().eval()(X)
        fresh = network()
        assert torch.isfinite(plain).all()
        assert sum(p.numel() for p in model.parameters()) < sum(p.numel() for p in fresh.parameters())

    def test_the_smaller_network_is_saved_and_loaded(self, tmp_path):
        model, optimizer, pruner = made()
        train(model, optimizer)
        spread(pruner)
        pruner.prune(fraction=0.4)
        bmrs.save(pruner.finish(), tmp_path / "small.safetensors")
        small = bmrs.load(network(), tmp_path / "small.safetensors")
        assert torch.equal(small.eval()(X), model.eval()(X))


class TestWarnings:
    def test_before_any_step_nothing_is_removed_and_it_says_why(self):
        model, optimizer, pruner = made()
        before = snapshot(model, optimizer)
        with pytest.warns(UserWarning, match="before any optimizer step has moved the gates"):
            report = pruner.prune()
        assert report.removed == 0
        assert same(snapshot(model, optimizer), before)

    @pytest.mark.parametrize("criterion", [bmrs.BMRS_N(), bmrs.BMRS_U(), bmrs.SNR()])
    def test_gates_that_begin_where_they_would_let_go_have_learned_nothing_either(self, criterion):
        model, optimizer, pruner = made(log_sigma=4.0, criterion=criterion)
        before = snapshot(model, optimizer)
        with pytest.warns(UserWarning, match="before any optimizer step has moved the gates"):
            assert pruner.prune().removed == 0
        assert same(snapshot(model, optimizer), before)
        assert pruner.prune(fraction=0.4).removed > 0  # which does not ask what they learned

    def test_weights_can_be_judged_before_any_step(self):
        torch.manual_seed(1)  # no layer has all of the smallest weights
        _, _, pruner = made(criterion=bmrs.L2(fraction=0.5))
        assert pruner.prune().removed == 9

    def test_an_optimizer_that_is_not_the_one_given_is_noticed(self):
        model, _, pruner = made()
        other = optim.SGD([p for name, p in model.named_parameters() if not name.startswith("bmrs")], 0.01)
        train(model, other)
        with pytest.warns(UserWarning, match="with the optimizer that was given to the Pruner"):
            pruner.prune()

    @pytest.mark.parametrize("fraction", [None, 0.5])
    def test_a_network_gone_wrong_loses_nothing(self, fraction):
        model, optimizer, pruner = made()
        train(model, optimizer)
        spread(pruner)
        dead(pruner, ("0", 1))
        with torch.no_grad():
            model[3].weight[0, 0, 0, 0] = math.nan
        before = snapshot(model, optimizer)
        with pytest.warns(UserWarning, match="parameters that are NaN or infinite, so nothing is removed"):
            report = pruner.prune(fraction)
        assert report.removed == 0
        assert same(snapshot(model, optimizer), before)
        with torch.no_grad():
            model[3].weight[0, 0, 0, 0] = 0.1
        assert pruner.prune(fraction).removed > 0

    def test_after_a_loss_that_was_nan_all_stays_and_a_checkpoint_helps(self):
        model, optimizer, pruner = made()
        train(model, optimizer)
        state = copy.deepcopy(pruner.state_dict())
        optimizer.zero_grad()
        (model(X).sum() * math.nan).backward()
        optimizer.step()
        assert torch.isnan(pruner.bank.mu).all()
        with pytest.warns(UserWarning, match=r"is not finite|are NaN") as caught:
            report = pruner.prune()
        scores, parameters = (str(one.message) for one in caught)
        assert scores.startswith("18 of 18 units have a score that is not finite and are kept")
        assert parameters.startswith("the network has parameters that are NaN or infinite, so nothing is removed")
        json.dumps(report.to_json(), allow_nan=False)
        assert report.removed == 0
        assert [s.units for s in pruner.structures] == [6, 5, 7]
        pruner.load_state_dict(state)
        train(model, optimizer)
        assert all(torch.isfinite(p).all() for p in model.parameters())
        assert pruner.prune(fraction=0.3).removed == 5

    def test_gates_gone_wrong_are_kept_and_others_go(self):
        _, _, pruner = made()
        dead(pruner, ("0", 1), ("0", 2))
        with torch.no_grad():
            pruner.bank.mu[0] = math.nan
        with pytest.warns(UserWarning, match="1 of 18 units have a score that is not finite and are kept"):
            report = pruner.prune()
        assert pruner.structures["0"].kept == [0, 3, 4, 5]
        assert "nan" not in json.dumps(report.to_json(), allow_nan=False)
        assert "nan" not in str(report)


def replaced(model):
    model[3] = nn.Conv2d(6, 5, 3)


def other_weight(model):
    model[3].weight = nn.Parameter(model[3].weight.detach().clone())


def resized(model):
    model[6].weight.data = model[6].weight.data[:4]


def deleted(model):
    del model[8]


class TestBehindItsBack:
    @pytest.mark.parametrize(
        ("change", "what"),
        [
            (replaced, "'3.weight' is another parameter"),
            (other_weight, "'3.weight' is another parameter"),
            (resized, "'6.weight' has shape (4, 80), no longer (7, 80)"),
            (deleted, "'8.weight' is gone"),
            (lambda model: model.bmrs_noise.detach(), "'bmrs_noise.mu' is gone"),
        ],
    )
    def test_a_change_of_the_network_is_noticed_and_nothing_is_done(self, change, what):
        model, optimizer, pruner = made()
        train(model, optimizer)
        spread(pruner)
        change(model)
        before = snapshot(model, optimizer)
        for call in (lambda: pruner.prune(fraction=0.5), pruner.prune, pruner.rank, pruner.state_dict, pruner.finish):
            with pytest.raises(RuntimeError, match=re.escape(f"behind the Pruner's back ({what})")):
                call()
        assert same(snapshot(model, optimizer), before)
        assert not pruner.finished

    def test_a_new_pruner_can_be_made_as_the_message_says(self):
        model, _, pruner = made()
        model[3] = nn.Conv2d(6, 5, 3)
        with pytest.raises(RuntimeError, match=r"model\.bmrs_noise\.detach\(\) and make a new Pruner"):
            pruner.prune(fraction=0.5)
        model.bmrs_noise.detach()
        again = bmrs.Pruner(model, X, optim.Adam(model.parameters()))
        spread(again)
        assert again.prune(fraction=0.5).removed == 9

    def test_moving_and_converting_are_no_changes(self):
        model, _, pruner = made()
        spread(pruner)
        model.double().to("cpu").train().requires_grad_(True)
        assert pruner.prune(fraction=0.5).removed == 9

    def test_units_removed_by_hand_are_no_change_either(self):
        model, optimizer, pruner = made()
        train(model, optimizer)
        spread(pruner)
        bmrs.remove(model, {pruner.structures["6"]: [0, 2]}, optimizer)
        train(model, optimizer)
        assert pruner.prune(fraction=0.25).removed == 4
        train(model, optimizer)


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.only = nn.Linear(4, 3)

    def forward(self, x):
        return self.only(x)


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"price": "gold"}, ValueError, "unknown price 'gold': choose one of layer, uniform, params, macs, time, elbo"),
        ({"price": "elbo"}, ValueError, "price 'elbo' needs num_examples"),
        ({"price": "elbo", "num_examples": 0}, ValueError, "price 'elbo' needs num_examples"),
        ({"price": lambda s: -1.0}, ValueError, "price must return one number of at least 0, or one for each of the 6"),
        ({"price": lambda s: torch.ones(4)}, ValueError, "for '0'; got [1.0, 1.0, 1.0, 1.0]"),
        ({"price": lambda s: torch.ones(2, 3)}, ValueError, "price must return one number"),
        ({"price": lambda s: math.nan}, ValueError, "price must return one number of at least 0"),
        ({"price": lambda s: 1 / 0}, ZeroDivisionError, "division by zero"),
        ({"price": lambda s: "much"}, ValueError, "price must return one number of at least 0, or one for each"),
        ({"num_examples": "many"}, TypeError, "num_examples must be a number"),
        ({"strength": -1}, ValueError, "strength must be a finite number of at least 0"),
        ({"phi_lr": -1}, ValueError, "phi_lr must be a finite number of at least 0"),
        ({"warmup": -1}, ValueError, "warmup must be a finite number of at least 0"),
        ({"warmup": 2.5}, ValueError, "warmup must be a whole number, a number of optimizer steps; got 2.5: round it."),
        ({"seed": 1.5}, ValueError, "seed must be a whole number, of the gates' draws; got 1.5"),
        ({"log_sigma": 9}, ValueError, "log_sigma must be in [-20, 5]"),
        ({"noise": "pixel"}, ValueError, "noise must be 'example' or 'batch'"),
        ({"criterion": "bmrs_n"}, TypeError, "criterion must be a bmrs criterion such as BMRS_N(); got str"),
        ({"structures": ["7"]}, KeyError, "no structure is called '7'"),
        ({"structures": []}, ValueError, "gated holds no structure that can have gates"),
        ({"optimizer": "adam"}, TypeError, "optimizer must be a torch.optim.Optimizer, or several; got str"),
        ({"optimizer": [nn.Linear(2, 2)]}, TypeError, "optimizer must be a torch.optim.Optimizer, or several"),
    ],
)
def test_bad_arguments_give_one_sentence_and_leave_the_network_without_gates(options, error, sentence):
    model = network()
    with pytest.raises(error, match=re.escape(sentence)) as caught:
        bmrs.Pruner(model, X, **options)
    assert "\n" not in str(caught.value)
    assert not any(name.startswith("bmrs") for name, _ in model.named_modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert len(bmrs.Pruner(model, X).bank.mu) == 18


@pytest.mark.parametrize("fraction", [-0.1, 1.1, math.nan, "half", True])
def test_a_bad_fraction_removes_nothing(fraction):
    model, optimizer, pruner = made()
    before = snapshot(model, optimizer)
    with pytest.raises((ValueError, TypeError), match="fraction must be"):
        pruner.prune(fraction)
    assert same(snapshot(model, optimizer), before)


def test_an_optimizer_of_another_network_is_refused_and_the_network_has_no_gates():
    model, stranger = network(), optim.Adam(network().parameters())
    for given in (stranger, [optim.Adam(model.parameters()), stranger]):
        with pytest.raises(ValueError, match="optimizer holds none of the model's parameters"):
            bmrs.Pruner(model, X, given)
        assert not any(name.startswith("bmrs") for name in model.state_dict())
    pruner = bmrs.Pruner(model, X)
    with pytest.raises(ValueError, match="optimizer holds none of the model's parameters"):
        pruner.follow(stranger)
    with pytest.raises(TypeError, match="only optimizers and networks can be followed; got int"):
        pruner.follow(3)
    assert pruner.bank.optimizers == []


def test_what_is_no_network_is_refused():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module; got NoneType"):
        bmrs.Pruner(None, X)


def test_an_optimizer_of_matrices_alone_is_refused():
    model = network()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    with pytest.raises(ValueError, match="optimizer trains matrices alone: give that of the other parameters too"):
        bmrs.Pruner(model, X, optim.Muon(matrices))
    assert not any(name.startswith("bmrs") for name in model.state_dict())


def test_lbfgs_is_refused():
    model = network()
    with pytest.raises(ValueError, match="keep its state per parameter, which LBFGS does not"):
        bmrs.Pruner(model, X, optim.LBFGS(model.parameters()))
    assert not any(name.startswith("bmrs") for name in model.state_dict())


def test_a_network_without_structures_is_refused():
    model = Linear()
    with pytest.raises(ValueError, match="no structure that can have gates"):
        bmrs.Pruner(model, torch.randn(5, 4))
    assert list(model.state_dict()) == ["only.weight", "only.bias"]


def test_structures_of_two_listings_are_refused():
    model = network()
    mixed = [bmrs.structures(model, X)["0"], bmrs.structures(model, X)["3"]]
    with pytest.raises(ValueError, match="structures must be of one listing"):
        bmrs.Pruner(model, X, structures=mixed)


def test_a_second_pruner_on_the_same_network_is_refused():
    model, optimizer, _ = made()
    with pytest.raises(ValueError, match="model has gates on it"):
        bmrs.Pruner(model, X, optimizer)


def test_an_optimizer_told_of_twice_is_known_once():
    model, optimizer, pruner = made()
    pruner.follow(optimizer)
    assert len(pruner.bank.optimizers) == 1
    train(model, optimizer, 1)
    assert pruner.bank.steps == 1


def test_it_says_what_it_is():
    _, _, pruner = made()
    assert repr(pruner) == "Pruner(18 units in 3 structures, BMRS_N(tolerance=0.9189))"
