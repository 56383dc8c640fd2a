"""Training with a Pruner: what happens at a step, and that a removal does not show in the steps that follow it."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import bmrs

SIZES = {"0": 6, "3": 5, "6": 7}
UNITS = sum(SIZES.values())
PHI = ("bmrs_noise.mu", "bmrs_noise.log_sigma")


def network(first=6, second=5, hidden=7):
    return nn.Sequential(
        nn.Conv2d(2, first, 3, padding=1),
        nn.BatchNorm2d(first),
        nn.ReLU(),
        nn.Conv2d(first, second, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(second * 16, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 3),
    ).double()


def small_network():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batches(count, *shape):
    shape = shape or (2, 6, 6)
    return [(torch.randn(8, *shape, dtype=torch.float64), torch.randint(3, (8,))) for _ in range(count)]


IMAGES, ROWS = batches(1)[0][0], batches(1, 4)[0][0]


def spread(bank):
    """Gates as different as after a training. The last unit of a layer is worth most, so that no layer is emptied."""
    last = [layer.stop - 1 for layer in bank.layers.values()]
    with torch.no_grad():
        bank.mu.uniform_(-1.0, 0.2)
        bank.log_sigma.uniform_(-2.0, 0.0)
        bank.log_sigma[last] = -5.0 + torch.rand(len(last), dtype=bank.mu.dtype)


def train(model, optimizer, data, scheduler=None):
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.detach())
    return losses


def tensors(model):
    return {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("_extra_state")}


def cloned(named):
    return {name: tensor.detach().clone() for name, tensor in named.items()}


def states(model, optimizer):
    """The optimizer's state by the parameter's name."""
    return {name: dict(optimizer.state[p]) for name, p in model.named_parameters() if p in optimizer.state}


def same(first, second):
    """To the bit, in whatever mappings and lists they lie."""
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return first == second


# --- surgery by hand --------------------------------------------------------------------------------------------------


def kept_places(kept):
    """Which indices of every tensor of `network` stay, for these units of its three structures."""
    a, b, c = kept["0"], kept["3"], kept["6"]
    pixels = [16 * channel + place for channel in b for place in range(16)]
    units = [*a, *(6 + unit for unit in b), *(11 + unit for unit in c)]
    places = {
        f"{layer}.{name}": {0: own} for layer, own in (("0", a), ("3", b), ("6", c)) for name in ("weight", "bias")
    }
    places |= {f"1.{name}": {0: a} for name in ("weight", "bias", "running_mean", "running_var")}
    places |= {f"bmrs_noise.{name}": {0: units} for name in ("mu", "log_sigma", "alive")}
    places["3.weight"][1], places["6.weight"][1], places["8.weight"] = a, pixels, {1: c}
    return places


def cut(tensor, places, shape):
    """``shape``: of the parameter; a factored state has size 1 along some of its dimensions."""
    if isinstance(tensor, torch.Tensor) and tensor.dim() == len(shape):
        for dim, kept in places.items():
            if tensor.shape[dim] == shape[dim]:
                tensor = tensor.transpose(0, dim)[kept].transpose(0, dim).contiguous()
    return copy.deepcopy(tensor)


def cut_by_hand(whole, state, kept):
    """Tensors and optimizer state of the whole network, reduced."""
    places = kept_places(kept)
    small = {name: cut(tensor, places.get(name, {}), tensor.shape) for name, tensor in whole.items()}
    small_state = {
        name: {key: cut(value, places.get(name, {}), whole[name].shape) for key, value in content.items()}
        for name, content in state.items()
    }
    return small, small_state


def kept_units(pruner):
    return {structure.name: structure.kept for structure in pruner.structures}


OPTIMIZERS = {
    "Adam": lambda p: optim.Adam(p, 1e-2),
    "Adam, plain loop": lambda p: optim.Adam(p, 1e-2, foreach=False),
    "Adam, foreach": lambda p: optim.Adam(p, 1e-2, foreach=True),
    "Adam, fused": lambda p: optim.Adam(p, 1e-2, fused=True),
    "Adam, amsgrad": lambda p: optim.Adam(p, 1e-2, amsgrad=True),
    "Adam, amsgrad, fused": lambda p: optim.Adam(p, 1e-2, amsgrad=True, fused=True),
    "AdamW": lambda p: optim.AdamW(p, 1e-2, weight_decay=0.1),
    "AdamW, foreach": lambda p: optim.AdamW(p, 1e-2, weight_decay=0.1, foreach=True),
    "AdamW, fused": lambda p: optim.AdamW(p, 1e-2, weight_decay=0.1, fused=True),
    "SGD": lambda p: optim.SGD(p, 1e-2),
    "SGD, momentum": lambda p: optim.SGD(p, 1e-2, momentum=0.9, weight_decay=0.01),
    "SGD, momentum, foreach": lambda p: optim.SGD(p, 1e-2, momentum=0.9, foreach=True),
    "SGD, nesterov": lambda p: optim.SGD(p, 1e-2, momentum=0.9, nesterov=True),
    "SGD, momentum, fused": lambda p: optim.SGD(p, 1e-2, momentum=0.9, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, 1e-3, momentum=0.9, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p, 1e-2),
    "Adagrad, fused": lambda p: optim.Adagrad(p, 1e-2, fused=True),
    "Adadelta": lambda p: optim.Adadelta(p, 0.1),
    "NAdam": lambda p: optim.NAdam(p, 1e-3),
    "RAdam": lambda p: optim.RAdam(p, 1e-2),
    "Adamax": lambda p: optim.Adamax(p, 1e-2),
    "Adafactor": lambda p: optim.Adafactor(p, 1e-2),
    "ASGD": lambda p: optim.ASGD(p, 1e-2),
    "Rprop": lambda p: optim.Rprop(p, 1e-3),
}


def trained(make, dtype=torch.float32, **options):
    model = network()
    optimizer = make(model.parameters())
    pruner = bmrs.Pruner(model, IMAGES, optimizer, log_sigma=-1.0, **options)
    pruner.bank.to(dtype)
    spread(pruner.bank)
    train(model, optimizer, batches(5))
    return model, optimizer, pruner


class TestSurgeryIsInvisibleToTraining:
    @pytest.mark.parametrize(
        ("name", "dtype"),
        [*((name, torch.float32) for name in OPTIMIZERS), ("Adam", torch.float64), ("SGD, momentum", torch.float64)],
    )
    def test_training_goes_on_as_in_a_network_built_small(self, name, dtype):
        model, optimizer, pruner = trained(OPTIMIZERS[name], dtype)
        whole, state = cloned(tensors(model)), copy.deepcopy(states(model, optimizer))
        assert pruner.prune(fraction=0.3).removed == 5
        kept = kept_units(pruner)
        weights, state = cut_by_hand(whole, state, kept)
        small = network(*map(len, kept.values()))
        own = OPTIMIZERS[name](small.parameters())
        # So few units may all be dead, and a proof would find nothing to prove: these have had theirs.
        structures = bmrs.structures(small, IMAGES)
        structures.status.update(dict.fromkeys(structures, "exact"))
        other = bmrs.Pruner(
            small, IMAGES, own, log_sigma=-1.0, seed=pruner.bank.seed, price=lambda s: 1 / UNITS, structures=structures
        )
        other.bank.to(dtype)
        with torch.no_grad():
            for key, tensor in tensors(small).items():
                tensor.copy_(weights[key])
        own.state.update({p: state[key] for key, p in small.named_parameters() if key in state})
        other.bank.draws = pruner.bank.draws
        assert same(states(model, optimizer), states(small, own))
        for batch in batches(20):
            assert same(train(model, optimizer, [batch]), train(small, own, [batch]))
            assert same(tensors(model), tensors(small))
            assert same(states(model, optimizer), states(small, own))

    @pytest.mark.parametrize("name", ["Adam", "AdamW, fused", "SGD, momentum", "Adafactor"])
    def test_training_goes_on_after_finishing_as_in_a_plain_network_built_small(self, name):
        model, optimizer, pruner = trained(OPTIMIZERS[name])
        whole, state = cloned(tensors(model)), copy.deepcopy(states(model, optimizer))
        pruner.prune(fraction=0.3)
        kept = kept_units(pruner)
        assert pruner.finish() is model
        weights, state = cut_by_hand(whole, state, kept)
        mu, log_sigma = (weights.pop(name) for name in PHI)
        theta = bmrs.TruncatedLogNormal(mu, log_sigma).mean().double().split([len(units) for units in kept.values()])
        weights["3.weight"] = weights["3.weight"] * theta[0][:, None, None]
        weights["6.weight"] = weights["6.weight"] * theta[1].repeat_interleave(16)
        weights["8.weight"] = weights["8.weight"] * theta[2]
        del weights["bmrs_noise.alive"]
        small = network(*map(len, kept.values()))
        small.load_state_dict(weights)
        own = OPTIMIZERS[name](small.parameters())
        own.state.update({p: state[name] for name, p in small.named_parameters() if name in state})
        for batch in batches(20):
            assert same(train(model, optimizer, [batch]), train(small, own, [batch]))
        assert same(tensors(model), tensors(small))
        assert same(states(model, optimizer), states(small, own))
        assert len(optimizer.state) == len(own.state)

    def test_gradients_shrink_along_so_that_a_step_may_follow_at_once(self):
        model, optimizer, pruner = trained(OPTIMIZERS["SGD"])
        optimizer.zero_grad()
        (x, y) = batches(1)[0]
        F.cross_entropy(model(x), y).backward()
        whole = {name: p.grad.clone() for name, p in model.named_parameters()}
        pruner.prune(fraction=0.3)
        small, _ = cut_by_hand(whole, {}, kept_units(pruner))
        assert same({name: p.grad for name, p in model.named_parameters()}, small)
        optimizer.step()

    def test_a_backward_pass_may_follow_the_removal_of_units_of_another_pass(self):
        model, optimizer, pruner = trained(OPTIMIZERS["Adam"])
        (x, _), (again, target) = batches(2)
        _old = model(x)  # its graph is alive while the network shrinks
        pruner.prune(fraction=0.3)
        optimizer.zero_grad()
        F.cross_entropy(model(again), target).backward()
        assert all(p.grad.shape == p.shape for p in model.parameters())


# --- the KL at the step -----------------------------------------------------------------------------------------------


def plainly(model, optimizer, pruner, data):
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        (loss if pruner.add_kl else loss + pruner.kl()).backward()
        optimizer.step()
        yield


def accumulated(model, optimizer, pruner, data):
    for first in range(0, len(data), 4):
        optimizer.zero_grad()
        for x, y in data[first : first + 4]:
            loss = F.cross_entropy(model(x), y)
            ((loss if pruner.add_kl else loss + pruner.kl()) / 4).backward()
        optimizer.step()
        yield


def scaled(model, optimizer, pruner, data, unscaled=False):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=5)
    for x, y in data:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss if pruner.add_kl else loss + pruner.kl()).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        yield


def by_closure(model, optimizer, pruner, data, keyword=False):
    for x, y in data:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss = loss if pruner.add_kl else loss + pruner.kl()
            loss.backward()
            return loss

        loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
        assert loss > 0
        yield


def maximised(model, optimizer, pruner, data):
    for x, y in data:
        optimizer.zero_grad()
        gain = -F.cross_entropy(model(x), y)
        (gain if pruner.add_kl else gain - pruner.kl()).backward()
        optimizer.step()
        yield


WAYS = {
    "plain": (plainly, lambda p: optim.Adam(p, 1e-2), {}),
    "with weight decay": (plainly, lambda p: optim.AdamW(p, 1e-2, weight_decay=0.3), {}),
    "over four micro-batches": (accumulated, lambda p: optim.Adam(p, 1e-2), {}),
    "scaled": (scaled, lambda p: optim.Adam(p, 1e-2), {}),
    "scaled and fused": (scaled, lambda p: optim.Adam(p, 1e-2, fused=True), {}),
    "scaled, fused and unscaled for clipping": (
        lambda *a: scaled(*a, unscaled=True),
        lambda p: optim.Adam(p, 1e-2, fused=True),
        {},
    ),
    "by a closure": (by_closure, lambda p: optim.Adam(p, 1e-2), {}),
    "by a closure given by its name": (lambda *a: by_closure(*a, keyword=True), lambda p: optim.SGD(p, 1e-2), {}),
    "warmed up": (plainly, lambda p: optim.SGD(p, 1e-2), {"warmup": 12}),
    "maximised": (maximised, lambda p: optim.Adam(p, 1e-2, maximize=True), {}),
    "noise per batch": (plainly, lambda p: optim.SGD(p, 1e-2, momentum=0.9), {"noise": "batch"}),
}


def gated_small(make, dtype=torch.float64, **options):
    model = small_network()
    optimizer = make(model.parameters())
    pruner = bmrs.Pruner(model, ROWS, optimizer, **{"log_sigma": -1.0, "strength": 3.0, "seed": 1, **options})
    pruner.bank.to(dtype)
    return model, optimizer, pruner


class TestTheKL:
    @pytest.mark.parametrize("way", WAYS)
    def test_added_at_the_step_moves_the_gates_as_in_the_loss(self, way):
        loop, make, options = WAYS[way]
        data = batches(120 if loop is accumulated else 30, 4)
        weights = cloned(small_network().state_dict())
        trajectories = []
        for add_kl in (True, False):
            model, optimizer, pruner = gated_small(make, add_kl=add_kl, **options)
            model.load_state_dict(weights, strict=False)
            phi = [pruner.bank.mu, pruner.bank.log_sigma]
            trajectories.append(torch.stack([torch.stack(phi).detach() for _ in loop(model, optimizer, pruner, data)]))
        at_the_step, in_the_loss = trajectories
        assert at_the_step.shape == (30, 2, 11)
        assert (at_the_step[-1] - at_the_step[0]).abs().min() > 1e-6
        torch.testing.assert_close(at_the_step, in_the_loss, rtol=0, atol=1e-12)

    def test_in_float32_too(self):
        data = batches(30, 4)
        weights = cloned(small_network().state_dict())
        ends = []
        for add_kl in (True, False):
            model, optimizer, pruner = gated_small(lambda p: optim.SGD(p, 0.05), torch.float32, add_kl=add_kl)
            model.load_state_dict(weights, strict=False)
            list(plainly(model, optimizer, pruner, data))
            ends.append(torch.stack([pruner.bank.mu, pruner.bank.log_sigma]).detach())
        torch.testing.assert_close(*ends, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("warmup", [0, 1, 4])
    def test_its_gradient_is_that_of_prices_times_kl_and_grows_over_the_warm_up(self, warmup):
        """Against differences of the KL; without data the gates feel nothing else."""
        price = {"0": 0.3, "2": 0.7}
        _, optimizer, pruner = gated_small(
            lambda p: optim.SGD(p, 1e-3), warmup=warmup, price=lambda s: price[s.name], strength=2.0, phi_lr=5.0
        )
        spread(pruner.bank)
        share = torch.tensor([0.3] * 6 + [0.7] * 5, dtype=torch.float64)

        def kl(mu, log_sigma):
            return 2.0 * share * bmrs.TruncatedLogNormal(mu, log_sigma).kl()

        for step in range(6):
            mu, log_sigma = pruner.bank.mu.detach().clone(), pruner.bank.log_sigma.detach().clone()
            weight = min(1.0, (step + 1) / warmup) if warmup else 1.0
            assert math.isclose(float(pruner.kl().detach()), weight * float(kl(mu, log_sigma).sum()), rel_tol=1e-12)
            optimizer.zero_grad()
            optimizer.step()
            h = 1e-5
            slopes = (kl(mu + h, log_sigma) - kl(mu - h, log_sigma)) / (2 * h)
            spread_slopes = (kl(mu, log_sigma + h) - kl(mu, log_sigma - h)) / (2 * h)
            torch.testing.assert_close((mu - pruner.bank.mu.detach()) / 5e-3, weight * slopes, rtol=1e-6, atol=1e-8)
            torch.testing.assert_close(
                (log_sigma - pruner.bank.log_sigma.detach()) / 5e-3, weight * spread_slopes, rtol=1e-6, atol=1e-8
            )

    def test_a_step_the_scaler_skips_leaves_the_gates_alone(self):
        for fused in (False, True):
            model, optimizer, pruner = gated_small(lambda p, fused=fused: optim.Adam(p, 1e-2, fused=fused))
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            before = cloned(tensors(model))
            loss = model(ROWS).sum() * math.inf
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            assert same(cloned(tensors(model)), before)
            optimizer.zero_grad()
            scaler.scale(model(ROWS).sum()).backward()
            scaler.step(optimizer)
            assert not torch.equal(pruner.bank.mu, before[PHI[0]])
            assert torch.isfinite(pruner.bank.mu).all()

    def test_clipping_before_the_step_reaches_the_data_s_share_alone(self):
        model, optimizer, pruner = gated_small(lambda p: optim.SGD(p, 1e-2), phi_lr=4.0)
        spread(pruner.bank)
        before = cloned(tensors(model))
        by_kl = torch.autograd.grad(pruner.kl(), pruner.bank.mu)[0]
        optimizer.zero_grad()
        (100 * model(ROWS)).square().sum().backward()
        whole = pruner.bank.mu.grad.clone()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm > 1
        optimizer.step()
        want = before[PHI[0]] - 4e-2 * (whole * 0.5 / (norm + 1e-6) + by_kl)
        torch.testing.assert_close(pruner.bank.mu.detach(), want, rtol=0, atol=1e-12)


# --- the gates' own learning rate -------------------------------------------------------------------------------------


def _sequential(o):
    return lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.8)], [4]
    )


SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.95),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=6),
    "SequentialLR": _sequential,
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.3, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.3),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
}


def tell(scheduler):
    scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))


def rates_alone(name, make):
    """The learning rates of an ordinary optimizer with this scheduler."""
    optimizer = make(small_network().parameters())
    scheduler = SCHEDULERS[name](optimizer)
    rates = []
    for _ in range(10):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        tell(scheduler)
    return rates


def check_rates(model, optimizer, pruner, scheduler, rates):
    """By plain SGD with weight decay 0.1: what each parameter moved by tells its rate and decay."""
    seen = {}

    def look(optimizer, args, kwargs):
        seen.update({name: p.grad.clone() for name, p in model.named_parameters()})

    optimizer.register_step_pre_hook(look)
    for rate, (x, y) in zip(rates, batches(10, 4), strict=True):
        before = cloned(dict(model.named_parameters()))
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        assert optimizer.param_groups[0]["lr"] == rate
        optimizer.step()
        for name, parameter in model.named_parameters():
            if name in PHI:
                want = before[name] - 7.0 * rate * seen[name]
            else:
                want = before[name] - rate * (seen[name] + 0.1 * before[name])
            torch.testing.assert_close(parameter.detach(), want, rtol=0, atol=1e-13)
        if scheduler is not None:
            tell(scheduler)
    assert pruner.bank.steps == 10


def decaying(parameters):
    return optim.SGD(parameters, 0.05, weight_decay=0.1)


class TestTheGatesLearningRate:
    @pytest.mark.parametrize("order", ["before", "after"])
    @pytest.mark.parametrize("name", SCHEDULERS)
    def test_is_a_multiple_of_the_weights_with_any_scheduler_made_before_or_after(self, name, order):
        model = small_network()
        optimizer = decaying(model.parameters())
        scheduler = SCHEDULERS[name](optimizer) if order == "before" else None
        pruner = bmrs.Pruner(model, ROWS, optimizer, log_sigma=-1.0, phi_lr=7.0)
        pruner.bank.double()
        scheduler = scheduler or SCHEDULERS[name](optimizer)
        check_rates(model, optimizer, pruner, scheduler, rates_alone(name, decaying))

    @pytest.mark.parametrize("layout", ["first", "late", "named", "late and named", "gates in a group of their own"])
    def test_however_the_optimizer_was_built(self, layout):
        model = small_network()
        optimizer = decaying(model.named_parameters() if layout == "named" else model.parameters())
        pruner = bmrs.Pruner(model, ROWS, optimizer if layout in ("first", "named") else None, log_sigma=-1.0, phi_lr=7)
        pruner.bank.double()
        if "late" in layout:
            optimizer = decaying(model.named_parameters() if "named" in layout else model.parameters())
        if "group" in layout:
            gates = list(pruner.bank.parameters())
            weights = [p for p in model.parameters() if all(p is not gate for gate in gates)]
            optimizer = decaying([{"params": gates, "weight_decay": 0.0}, {"params": weights, "lr": 0.05}])
            optimizer.param_groups.reverse()
        pruner.follow(optimizer)
        check_rates(model, optimizer, pruner, None, [0.05] * 10)

    @pytest.mark.parametrize("order", ["before", "after"])
    @pytest.mark.parametrize("named", [False, True])
    def test_a_scheduler_of_betas_too(self, order, named):
        def made(parameters):
            return optim.Adam(parameters, 1e-2)

        def schedule(optimizer):
            return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)

        alone = made(small_network().parameters())
        its = schedule(alone)
        model = small_network()
        optimizer = made(model.named_parameters() if named else model.parameters())
        scheduler = schedule(optimizer) if order == "before" else None
        pruner = bmrs.Pruner(model, ROWS, optimizer)
        scheduler = scheduler or schedule(optimizer)
        for batch in batches(10, 4):
            for key in ("lr", "betas"):
                assert optimizer.param_groups[0][key] == alone.param_groups[0][key]
            train(model, optimizer, [batch], scheduler)
            alone.step()
            its.step()
        pruner.prune(fraction=0.2)
        train(model, optimizer, batches(1, 4), scheduler)

    @pytest.mark.parametrize("layout", ["first", "scheduled", "late", "named", "late and named", "scheduled and named"])
    def test_an_optimizer_s_state_goes_and_comes_back_in_every_layout(self, layout):
        model = small_network()
        named = "named" in layout

        def made():
            return optim.Adam(model.named_parameters() if named else model.parameters(), 1e-2)

        optimizer = made()
        if "scheduled" in layout:
            lr_scheduler.StepLR(optimizer, 100)
        pruner = bmrs.Pruner(model, ROWS, None if "late" in layout else optimizer, log_sigma=-1.0)
        if "late" in layout:
            optimizer = made()
            pruner.follow(optimizer)
        train(model, optimizer, batches(3, 4))
        groups = [list(map(id, group["params"])) for group in optimizer.param_groups]
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        data = batches(4, 4)
        train(model, optimizer, data)
        want = cloned(tensors(model)), copy.deepcopy(states(model, optimizer))
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        assert [list(map(id, group["params"])) for group in optimizer.param_groups] == groups
        train(model, optimizer, data)
        assert same(tensors(model), want[0])
        assert same(states(model, optimizer), want[1])
        if named:
            names = [name for group in optimizer.param_groups for name in group["param_names"]]
            assert names == [n for g in groups for p in g for n, q in model.named_parameters() if id(q) == p]

    def test_an_optimizer_s_state_of_other_shapes_is_refused(self):
        model, optimizer, pruner = gated_small(lambda p: optim.Adam(p, 1e-2))
        train(model, optimizer, batches(2, 4))
        whole = copy.deepcopy(optimizer.state_dict())
        pruner.prune(fraction=0.3)
        with pytest.raises(ValueError, match=r"does not fit a parameter of shape .*load the model of the same moment"):
            optimizer.load_state_dict(whole)

    def test_a_step_that_fails_leaves_the_groups_as_they_were(self):
        model = small_network()
        optimizer = optim.Adam(model.parameters(), 1e-2)
        lr_scheduler.StepLR(optimizer, 100)
        pruner = bmrs.Pruner(model, ROWS, optimizer)
        groups = [list(map(id, group["params"])) for group in optimizer.param_groups]

        def failing():
            raise RuntimeError("out of memory")

        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step(failing)
        train(model, optimizer, batches(1, 4))
        assert [list(map(id, group["params"])) for group in optimizer.param_groups] == groups
        assert pruner.bank.steps == 1

    def test_a_learning_rate_that_is_a_tensor(self):
        model, optimizer, pruner = gated_small(
            lambda p: optim.SGD(p, torch.tensor(0.05), foreach=False), phi_lr=7.0, add_kl=False
        )
        optimizer.zero_grad()
        before = pruner.bank.mu.detach().clone()
        model(ROWS).square().sum().backward()
        optimizer.step()
        torch.testing.assert_close(pruner.bank.mu.detach(), before - 0.35 * pruner.bank.mu.grad, rtol=1e-6, atol=1e-9)
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)


# --- what else goes on in a training ----------------------------------------------------------------------------------


@pytest.fixture
def plain_kernels():
    """Without oneDNN, whose 16-bit kernels need instructions that not every CPU has."""
    torch.backends.mkldnn.set_flags(False)
    yield
    torch.backends.mkldnn.set_flags(True)


class TestOtherThingsInALoop:
    def test_an_evaluation_in_between_changes_no_draw(self):
        weights, data = cloned(network().state_dict()), batches(6)
        ends = []
        for evaluates in (False, True):
            model = network()
            model.load_state_dict(weights)
            optimizer = optim.Adam(model.parameters(), 1e-2)
            bmrs.Pruner(model, IMAGES, optimizer, seed=3)
            for number, batch in enumerate(data):
                train(model, optimizer, [batch])
                if evaluates and number % 2:
                    torch.rand(5)
                    model.eval()
                    assert torch.equal(model(IMAGES), model(IMAGES))
                    model.train()
            ends.append(cloned(tensors(model)))
        assert same(*ends)

    def test_several_optimizers_train_as_one(self):
        weights, data = cloned(network().state_dict()), batches(6)
        ends = []
        for several in (False, True):
            model = network()
            model.load_state_dict(weights)
            parameters = list(model.parameters())
            parts = [parameters[:5], parameters[5:]] if several else [parameters]
            optimizers = [optim.Adam(part, 1e-2) for part in parts]
            pruner = bmrs.Pruner(model, IMAGES, optimizers, seed=3, log_sigma=-1.0)
            for number, (x, y) in enumerate(data):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                for optimizer in optimizers:
                    optimizer.step()
                if number == 2:
                    assert pruner.prune(fraction=0.2).removed == 3
            assert pruner.bank.steps == 6
            state = {}
            for optimizer in optimizers:
                state |= states(model, optimizer)
            ends.append((cloned(tensors(model)), state))
        assert same(*ends)
        assert set(ends[1][1]) == {name for name, _ in model.named_parameters()}

    @pytest.mark.parametrize("first", ["matrices", "vectors"])
    def test_beside_an_optimizer_of_matrices_the_gates_learn_in_the_other(self, first):
        model = small_network()
        matrices, vectors = ([p for p in model.parameters() if p.dim() == dim] for dim in (2, 1))
        optimizers = [optim.Muon(matrices, 1e-2), optim.AdamW(vectors, 1e-2)]
        given = optimizers if first == "matrices" else optimizers[::-1]
        pruner = bmrs.Pruner(model, ROWS, given, log_sigma=-1.0)
        start = cloned(tensors(model))
        for removed in (3, 2):
            for x, y in batches(3, 4):
                model.zero_grad()
                F.cross_entropy(model(x), y).backward()
                for optimizer in given:
                    optimizer.step()
            assert all((tensors(model)[name] != start[name]).any() for name in start if "alive" not in name)
            assert pruner.prune(fraction=0.3).removed == removed
            start = cloned(tensors(model))
        assert pruner.bank.steps == 6
        assert all(optimizers[0].state[p]["momentum_buffer"].shape == p.shape for p in matrices)

    @pytest.mark.parametrize("given", ["all", "those that train"])
    def test_frozen_layers_are_cut_and_not_trained(self, given):
        model = network()
        for layer in (model[0], model[1], model[6]):
            layer.requires_grad_(False)
        chosen = [p for p in model.parameters() if p.requires_grad or given == "all"]
        optimizer = optim.AdamW(chosen, 1e-2, weight_decay=0.1)
        pruner = bmrs.Pruner(model, IMAGES, optimizer, log_sigma=-1.0)
        spread(pruner.bank)
        start = cloned(tensors(model))
        train(model, optimizer, batches(4))
        frozen = [f"{layer}.{name}" for layer in (0, 1, 6) for name in ("weight", "bias")]
        assert all(torch.equal(tensors(model)[name], start[name]) for name in frozen)
        assert (pruner.bank.log_sigma != start[PHI[1]]).all()  # the KL reaches every one
        pruner.prune(fraction=0.3)
        cut_start, _ = cut_by_hand(start, {}, kept_units(pruner))
        train(model, optimizer, batches(4))
        assert all(torch.equal(tensors(model)[name], cut_start[name]) for name in frozen)
        assert [name for name, p in model.named_parameters() if not p.requires_grad] == frozen

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_sixteen_bits_leave_the_gates_in_float32(self, dtype, plain_kernels):
        model = small_network().float()
        optimizer = optim.SGD(model.parameters(), 1e-3)
        pruner = bmrs.Pruner(model, ROWS.float(), optimizer, strength=5.0)
        model.to(dtype)
        assert {p.dtype for p in model.parameters()} == {dtype, torch.float32}
        assert pruner.bank.mu.dtype == pruner.bank.log_sigma.dtype == torch.float32
        before = pruner.bank.log_sigma.detach().clone()
        model(ROWS.to(dtype)).float().square().sum().backward()
        optimizer.step()
        assert (pruner.bank.log_sigma != before).all()
        pruner.prune(fraction=0.3)
        assert model.eval()(ROWS.to(dtype)).dtype == dtype

    def test_in_autocast_the_gates_learn_in_float32_and_units_go_as_outside(self, plain_kernels):
        model = small_network().float()
        optimizer = optim.Adam(model.parameters(), 1e-2)
        pruner = bmrs.Pruner(model, ROWS.float(), optimizer, log_sigma=-1.0)
        spread(pruner.bank)
        for x, y in batches(4, 4):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                output = model(x.float())
                assert output.dtype == torch.bfloat16
                loss = F.cross_entropy(output.float(), y)
            loss.backward()
            assert pruner.bank.mu.grad.dtype == torch.float32
            optimizer.step()
        with torch.autocast("cpu", torch.bfloat16):
            model(ROWS.float())  # leaves weights in 16 bits behind until the context ends
            worth = torch.cat(list(pruner.scores().values()))
            pruner.prune(fraction=0.3)
            assert pruner.bank._kept == worth.argsort(stable=True)[3:].sort().values.tolist()
            rounded = model.eval()(ROWS.float())
        torch.testing.assert_close(rounded.float(), model(ROWS.float()), rtol=0.05, atol=0.05)

    def test_channels_last_stays_channels_last(self):
        model = network().to(memory_format=torch.channels_last)
        optimizer = optim.Adam(model.parameters(), 1e-2)
        pruner = bmrs.Pruner(model, IMAGES, optimizer)
        train(model, optimizer, batches(2))
        pruner.prune(fraction=0.3)
        for tensor in (model[3].weight, optimizer.state[model[3].weight]["exp_avg"]):
            assert tensor.is_contiguous(memory_format=torch.channels_last)
            assert not tensor.is_contiguous()


class TestAnAverageOfTheNetwork:
    @pytest.mark.parametrize("buffers", [False, True])
    def test_shrinks_along_and_goes_on_averaging(self, buffers):
        model = network()
        optimizer = optim.Adam(model.parameters(), 1e-2)
        pruner = bmrs.Pruner(model, IMAGES, optimizer, log_sigma=-1.0)
        spread(pruner.bank)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=buffers)
        pruner.follow(average)
        for batch in batches(4):
            train(model, optimizer, [batch])
            average.update_parameters(model)
        whole = cloned(tensors(average.module))
        assert not torch.equal(whole["0.weight"], model[0].weight)
        pruner.prune(fraction=0.3)
        small, _ = cut_by_hand(whole, {}, kept_units(pruner))
        assert same(tensors(average.module), small)
        train(model, optimizer, batches(1))
        average.update_parameters(model)
        for name, parameter in model.named_parameters():
            want = 0.9 * small[name] + 0.1 * parameter.detach()
            torch.testing.assert_close(tensors(average.module)[name], want, rtol=0, atol=1e-6 if name in PHI else 1e-13)
        counts = [len(units) for units in kept_units(pruner).values()]
        own = cloned(tensors(average.module))
        plain = network(*counts)
        mu, log_sigma = (own.pop(name) for name in PHI)
        del own["bmrs_noise.alive"]
        theta = bmrs.TruncatedLogNormal(mu, log_sigma).mean().double().split(counts)
        own["3.weight"] *= theta[0][:, None, None]
        own["6.weight"] *= theta[1].repeat_interleave(16)
        own["8.weight"] *= theta[2]
        plain.load_state_dict(own)
        with torch.no_grad():
            got, want = average.eval()(IMAGES), plain.eval()(IMAGES)
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
        pruner.finish()
        with torch.no_grad():
            torch.testing.assert_close(average(IMAGES), want, rtol=0, atol=1e-12)
        assert not any(name.startswith("module.bmrs_noise") for name in average.state_dict())

    def test_comes_back_when_a_removal_is_undone(self):
        model = network()
        optimizer = optim.Adam(model.parameters(), 1e-2)
        pruner = bmrs.Pruner(model, IMAGES, optimizer)
        average = AveragedModel(model)
        pruner.follow(average)
        train(model, optimizer, batches(2))
        average.update_parameters(model)
        train(model, optimizer, batches(2))
        whole, output = cloned(tensors(average)), average.eval()(IMAGES)
        pruner.prune(fraction=0.3)
        pruner.undo()
        assert same(tensors(average), whole)
        assert torch.equal(average(IMAGES), output)
        pruner.prune(fraction=0.2)
        average.train()
        average.update_parameters(model)

    def test_that_was_made_before_the_gates_is_refused(self):
        model = network()
        average = AveragedModel(model)
        pruner = bmrs.Pruner(model, IMAGES)
        with pytest.raises(ValueError, match=r"make the copy \(EMA\) after the Pruner"):
            pruner.follow(average)
        with pytest.raises(ValueError, match=r"make the copy \(EMA\) after the Pruner"):
            pruner.follow(network())


# --- activation checkpointing -----------------------------------------------------------------------------------------
