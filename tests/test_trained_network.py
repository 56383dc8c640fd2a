"""What the mathematics promises, on networks that were really trained."""

import pytest
import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from torch import nn

import bmrs
from bmrs.study import data, networks, training

DEAD = slice(0, 8)  # hidden units whose output reaches nothing


@pytest.fixture(scope="module")
def trained():
    """An MLP on the digits with gates on 40 hidden units, eight of which the loss cannot see."""
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16 - 0.5
    y = torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 10))
    bank = bmrs.NoiseBank.attach(model, {"1": 40})
    with torch.no_grad():
        model[2].weight[:, DEAD] = 0.0
    model[2].weight.register_hook(lambda grad: grad.index_fill(1, torch.arange(8), 0.0))
    weights = [*model[0].parameters(), *model[2].parameters()]
    optimizer = torch.optim.Adam([{"params": weights}, {"params": [bank.mu, bank.log_sigma], "lr": 3e-2}], lr=3e-3)
    prices = bmrs.price.prices("uniform", [40], strength=0.2)
    for _ in range(40):
        for index in torch.randperm(len(y)).split(64):
            optimizer.zero_grad()
            (F.cross_entropy(model(x[index]), y[index]) + bank.kl(prices)).backward()
            optimizer.step()
    model.eval()

    def loss_without(units):
        alive = bank.alive.clone()
        bank.alive &= ~units
        with torch.no_grad():
            loss = F.cross_entropy(model(x), y).item()
        bank.alive.copy_(alive)
        return loss

    return bank, loss_without


class TestTolerance:
    def test_the_rule_as_printed_removes_nothing(self, trained):
        criterion = bmrs.BMRS_N(tolerance=0.0)
        assert int(criterion.remove(criterion.scores(bmrs.Units(trained[0].posterior()))).sum()) == 0

    def test_half_log_two_pi_removes_the_dead_units(self, trained):
        bank, loss_without = trained
        criterion = bmrs.BMRS_N()
        gone = criterion.remove(criterion.scores(bmrs.Units(bank.posterior())))
        assert gone[DEAD].all()
        assert int((~gone).sum()) >= 5
        # Judged by ablation: the least useful unit that stays is worth many that go.
        whole, reduced = loss_without(torch.zeros_like(gone)), loss_without(gone)
        cost_of_one_gone = (reduced - whole) / int(gone.sum())
        one_more = [loss_without(gone | (torch.arange(40) == unit)) for unit in (~gone).nonzero()]
        assert min(one_more) - reduced > 5 * cost_of_one_gone
        assert reduced - whole < 0.02

    def test_dead_gates_lie_just_below_zero_evidence(self, trained):
        delta_f = bmrs.evidence.spike(trained[0].posterior())[DEAD]
        assert (delta_f < 0).all()
        assert (delta_f > -0.919).all()


class TestRankings:
    def test_bmrs_n_ranks_as_the_signal_to_noise_ratio_does(self, trained):
        q = trained[0].posterior()
        assert spearmanr(-bmrs.evidence.spike(q).detach(), q.snr()).statistic > 0.99

    def test_bmrs_u_splits_but_does_not_rank(self, trained):
        q = trained[0].posterior()
        by_u, by_n = bmrs.BMRS_U(), bmrs.BMRS_N()
        u, n = by_u.scores(bmrs.Units(q)), by_n.scores(bmrs.Units(q))
        # Nearly the same units go ...
        assert int((by_u.remove(u) ^ by_n.remove(n)).sum()) <= 4
        # ... but among those the order differs: the emptier the gate, the smaller the evidence for the interval.
        gone = by_u.remove(u) & by_n.remove(n)
        assert spearmanr(u[gone], n[gone]).statistic < 0


def test_the_exact_bound_does_not_collapse():
    """LeNet-5 at KL weight 1/N, pruned every epoch: textbook formulas empty every layer here."""
    drops = []
    for seed in range(2):
        digits = data.load("digits", seed)
        recipe = training.Recipe(epochs=15, price="elbo", seed=seed)
        torch.manual_seed(seed)
        plain = networks.build("lenet5", digits.input_shape, 10)
        training.train(plain, digits, recipe)
        torch.manual_seed(seed)
        network = networks.build("lenet5", digits.input_shape, 10)
        log = training.train_pruning(network, digits, recipe, bmrs.BMRS_N())
        for scores in (log.mean, log.snr, log.delta_f):
            assert torch.isfinite(scores).all()
        assert 20 < int((log.removed_at == 0).sum()) < 226
        drops.append(training.accuracy(plain, digits.test) - training.accuracy(network, digits.test))
    assert sum(drops) / len(drops) < 0.02
