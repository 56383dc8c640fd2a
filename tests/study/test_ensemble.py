"""A member of an ensemble does what the same network does alone, trained by torch and the library's own gates."""

import math
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bmrs
from bmrs import draws
from bmrs.study.ensemble import Ensemble
from bmrs.study.settings import Setting
from bmrs.study.stack import Stack

F64 = torch.float64
IMAGES = 96


def small_lenet():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 5, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(20, 9), nn.ReLU(), nn.Linear(9, 3),
    )  # fmt: skip


def small_mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 10), nn.Tanh(), nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 3))


def normed():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(6, 8, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 3),
    )  # fmt: skip


def build(make, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make().to(F64)


def images():
    chance = torch.Generator().manual_seed(5)
    x = torch.randn(IMAGES, 1, 12, 12, generator=chance, dtype=F64)
    return x, (x[:, 0, 3:9, 3:9].mean((1, 2)) > 0).long() + (x[:, 0, 0, 0] > 1).long()


def order(seed, epoch):
    return torch.randperm(IMAGES, generator=torch.Generator().manual_seed(100 * seed + epoch))


def prices(structures, kind="uniform", strength=1.0):
    return bmrs.price.of_structures(kind, structures, strength)


def ensemble(make, seeds, strengths, noisy=True):
    x, y = images()
    first = build(make, 0)
    structures = list(bmrs.structures(first, x[:2]).verify())
    own = torch.stack([prices(structures, strength=s) for s in strengths]) if noisy else None
    made = Ensemble(
        [build(make, seed) for seed in seeds], x, y, batch=16, learning_rate=1e-2, structures=structures, seeds=seeds,
        prices=own,
    )  # fmt: skip
    return made, structures


class Alone:
    """One network with the library's own gates, torch's Adam, the KL in the loss; the random numbers are the same."""

    def __init__(self, make, seed, strength):
        self.x, self.y = images()
        self.network, self.seed = build(make, seed), seed
        structures = list(bmrs.structures(self.network, self.x[:2]).verify())
        self.bank = bmrs.NoiseBank.attach(self.network, structures).double()
        self.prices = prices(structures, strength=strength)
        self.optimizer = torch.optim.Adam(self.network.parameters(), 1e-2)
        self.alive = torch.ones(len(self.bank.mu), dtype=torch.bool)
        self.steps = 0

    def epoch(self, number):
        self.network.train()
        for rows in order(self.seed, number).split(16):
            numbers = torch.arange(len(self.alive))[None]
            u = draws.uniforms(torch.tensor([self.seed]), torch.tensor(self.steps), numbers, 16)[0]
            self.bank.alive.copy_(self.alive)
            self.bank._draw_number = lambda number, rows, u=u: self._theta(u)
            loss = F.cross_entropy(self.network(self.x[rows]), self.y[rows]) + self.bank.kl(self.prices)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.steps += 1

    def _theta(self, u):
        q = self.bank.posterior()
        theta = bmrs.posterior._Draw.apply(q.mu, q.log_sigma, u, q.log_a, q.log_b)[0]
        return theta * self.alive


def restored(made, member, make):
    """A member as the network it began as, from whichever rooms its units stand in."""
    network = build(make, 0)
    layout = made.gates.units[member]
    state = {}
    for name, tensor in made._tensors():
        value = tensor.detach()[member]
        for dim in range(value.dim()):
            if (name, dim + 1) in made._places:
                structure, each = made._places[name, dim + 1]
                rooms = layout[made.gates.layers[structure]]
                there = rooms >= 0
                source = (there.nonzero() * each + torch.arange(each)).flatten()
                target = ((rooms[there] - _first(network, structure))[:, None] * each + torch.arange(each)).flatten()
                size = dict(network.state_dict())[name].shape[dim]
                wide = value.new_zeros(*value.shape[:dim], size, *value.shape[dim + 1 :])
                wide.index_copy_(dim, target, value.index_select(dim, source))
                value = wide
        state[name] = value
    network.load_state_dict({**network.state_dict(), **state})
    return network


def _first(network, structure):
    total = 0
    for other in bmrs.structures(network, images()[0][:2]):
        if other.name == structure:
            return total
        total += other.units
    raise KeyError(structure)


@pytest.mark.parametrize("make", [small_lenet, small_mlp, normed])
def test_a_stack_computes_what_its_members_do(make):
    networks = [build(make, seed) for seed in range(3)]
    x = torch.randn(3, 5, 1, 12, 12, dtype=F64)
    stack = Stack(networks)
    want = torch.cat([network(part) for network, part in zip(networks, x, strict=True)])
    torch.testing.assert_close(stack(x.flatten(0, 1)), want, rtol=0, atol=1e-12)
    for network in (*networks, stack):
        network.eval()
    want = torch.cat([network(part) for network, part in zip(networks, x, strict=True)])
    torch.testing.assert_close(stack(x.flatten(0, 1)), want, rtol=0, atol=1e-12)
    for member, network in enumerate(networks):
        for name, value in stack.state_of(member).items():
            torch.testing.assert_close(value, network.state_dict()[name], rtol=0, atol=1e-12)


def test_a_layer_of_any_kind_is_stacked():
    def make():
        return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.PReLU(8))

    networks = [build(make, seed) for seed in range(4)]
    x = torch.randn(4, 5, 6, dtype=F64)
    want = torch.cat([network(part) for network, part in zip(networks, x, strict=True)])
    torch.testing.assert_close(Stack(networks)(x.flatten(0, 1)), want, rtol=0, atol=1e-12)


def test_networks_of_other_shapes_are_refused():
    with pytest.raises(ValueError, match="same parameters and shapes"):
        Stack([nn.Linear(2, 3), nn.Linear(2, 4)])


@pytest.mark.parametrize("make", [small_lenet, small_mlp])
@pytest.mark.parametrize("closing", [False, True], ids=["rooms stay", "ranks closed"])
def test_a_member_is_its_solo_twin(make, closing):
    seeds, strengths = [3, 1, 3], [1.0, 0.3, 4.0]
    made, _ = ensemble(make, seeds, strengths)
    twins = [Alone(make, seed, strength) for seed, strength in zip(seeds, strengths, strict=True)]
    chance = torch.Generator().manual_seed(8)
    for epoch in range(3):
        made.train_epoch(torch.stack([order(seed, epoch) for seed in seeds]))
        for member, twin in enumerate(twins):
            twin.epoch(epoch)
            mu = made.gates.of_units(made.gates.mu, math.nan)[member]
            torch.testing.assert_close(mu[twin.alive], twin.bank.mu[twin.alive].detach(), rtol=0, atol=1e-8)
            sigma = made.gates.of_units(made.gates.log_sigma, math.nan)[member]
            torch.testing.assert_close(sigma[twin.alive], twin.bank.log_sigma[twin.alive].detach(), rtol=0, atol=1e-8)
            twin.alive &= torch.rand(len(twin.alive), generator=chance) > 0.35
        rooms = torch.stack([twin.alive for twin in twins])
        made.gates.alive.copy_(rooms.gather(1, made.gates.units.clamp(min=0)) & (made.gates.units >= 0))
        if closing:
            made.close_ranks(gain=math.inf)
            assert made.gates.mu.shape[1] < made.gates.number or epoch == 0
        assert torch.equal(made.alive(), rooms)
    # And what is tested is the network with the units physically removed and E[θ] in its weights.
    got = made.accuracy(*images())
    for member, twin in enumerate(twins):
        network = restored(made, member, make)
        structures = bmrs.structures(network, images()[0][:2])
        means = made.gates.of_units(made.gates.means(), 0.0)[member]
        assert set(means[~twin.alive].tolist()) == {0.0}
        total = 0
        going = {}
        for structure in structures:
            for place in structure.consumers:
                weight = dict(network.named_parameters())[place[0]]
                each = weight.shape[1] // structure.units
                factor = means[total : total + structure.units].repeat_interleave(each)
                weight.data.mul_(factor.view(1, -1, *(1 for _ in weight.shape[2:])))
            gone = (~twin.alive[total : total + structure.units]).nonzero().flatten().tolist()
            going[structure] = gone
            total += structure.units
        if all(len(gone) < structure.units for structure, gone in going.items()):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # where nothing is left to depend on a layer, it is left alone
                bmrs.remove(network, going)
        x, y = images()
        right = (network.eval()(x).argmax(1) == y).double().mean()
        torch.testing.assert_close(got[member].double(), right, rtol=0, atol=1e-6)


def test_other_members_make_no_difference():
    alone, _ = ensemble(small_lenet, [4], [1.0])
    many, _ = ensemble(small_lenet, [2, 4, 9], [3.0, 1.0, 0.1])
    for epoch in range(2):
        alone.train_epoch(order(4, epoch)[None])
        many.train_epoch(torch.stack([order(seed, epoch) for seed in (2, 4, 9)]))
    for name, tensor in alone.state_dict()["tensors"].items():
        torch.testing.assert_close(many.state_dict()["tensors"][name][1], tensor[0], rtol=0, atol=1e-10)


def test_without_noise_it_is_plain_training_and_closed_gates_are_zeros():
    made, _ = ensemble(small_mlp, [0, 1], [1.0, 1.0], noisy=False)
    plain = build(small_mlp, 1)
    optimizer = torch.optim.Adam(plain.parameters(), 1e-2)
    x, y = images()
    made.train_epoch(torch.stack([order(0, 0), order(1, 0)]))
    for rows in order(1, 0).split(16):
        optimizer.zero_grad()
        F.cross_entropy(plain(x[rows]), y[rows]).backward()
        optimizer.step()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(made.stack.state_of(1)[name], value, rtol=0, atol=1e-12)
    assert float(made.accuracy(x, y)[1]) == pytest.approx(float((plain(x).argmax(1) == y).double().mean()))


@pytest.mark.parametrize("closing", [False, True])
def test_states_and_branches_go_on_the_same(closing):
    def run(interrupted):
        made, _ = ensemble(small_lenet, [1, 2], [1.0, 2.0])
        for epoch in range(4):
            if interrupted and epoch == 2:
                saved = made.state_dict()
                other, _ = ensemble(small_lenet, [1, 2], [1.0, 2.0])
                if interrupted == "taken":
                    third, _ = ensemble(small_lenet, [7, 1, 2], [1.0, 1.0, 1.0])
                    third.take(made, [0, 0, 1])
                    other.take(third, [1, 2])
                else:
                    other.load_state_dict(saved)
                made = other
            made.train_epoch(torch.stack([order(seed, epoch) for seed in (1, 2)]))
            if epoch == 1:
                made.gates.alive[:, ::2] = False
                if closing:
                    assert made.close_ranks()
        return made.state_dict()["tensors"]

    whole = run(False)
    for how in ("loaded", "taken"):
        for name, tensor in run(how).items():
            assert torch.equal(tensor, whole[name]), name


def test_uniforms_are_uniform_and_unrelated():
    u = draws.uniforms(torch.arange(20), torch.tensor(3), torch.arange(200).expand(20, 200), 50)
    assert 0.0 < float(u.min()) < 1e-4
    assert 1 - 1e-4 < float(u.max()) < 1.0
    counts = torch.histc(u, 50, 0, 1)
    expected = u.numel() / 50
    assert float(((counts - expected) ** 2 / expected).sum()) < 100  # χ² of 49 degrees: 1 in 10⁵
    for dim in range(3):
        first, second = u.narrow(dim, 0, u.shape[dim] - 1).flatten(), u.narrow(dim, 1, u.shape[dim] - 1).flatten()
        assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 0.015
    again = draws.uniforms(torch.arange(20), torch.tensor(4), torch.arange(200).expand(20, 200), 50)
    assert float((again == u).double().mean()) < 1e-3


def test_a_setting_builds_the_same_network_for_a_seed():
    setting = Setting("made", "mlp", "digits", 8, 0.1, (5, 4))
    one, same, other = (setting.build((1, 4, 4), 3, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    assert [tuple(value.shape) for value in one.values()] == [(5, 16), (5,), (4, 5), (4,), (3, 4), (3,)]
    assert replace(setting, widths=(2,)).build((1, 4, 4), 3, 0)[1].out_features == 2
