import copy
import io
import pickle
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bmrs import Gate, NoiseBank, TruncatedLogNormal, draws
from bmrs.price import prices as prices_of


def network():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5), nn.ReLU(), nn.Linear(5, 2))


def gated(noise="example"):
    model = network()
    bank = NoiseBank.attach(model, {"1": 4, "4": 5}, noise)
    return model, bank


IMAGES = torch.randn(6, 1, 8, 8)


def by_hand(model, theta):
    """The same network with the gates written out."""
    x = model[1](model[0](IMAGES)) * theta[:, :4, None, None]
    x = torch.relu(torch.nn.functional.linear(x.flatten(1), model[3].weight, model[3].bias)) * theta[:, 4:]
    return torch.nn.functional.linear(x, model[5].weight, model[5].bias)


def plain(model):
    """A copy of the network without gates, to compute with by hand."""
    copied = network()
    copied.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("bmrs")})
    return copied


class TestForward:
    @pytest.mark.parametrize(("noise", "rows"), [("example", 6), ("batch", 1)])
    def test_one_draw_gates_the_whole_network(self, noise, rows):
        model, bank = gated(noise)
        drawn = []
        draw = bank.draw
        bank.draw = lambda batch_size: drawn.append(draw(batch_size))
        output = model(IMAGES)
        assert len(drawn) == 1
        theta = bank._pass.theta
        assert theta.shape == (rows, 9)
        assert torch.allclose(output, by_hand(plain(model), theta), atol=1e-6)

    def test_every_pass_draws_anew(self):
        model, _ = gated()
        assert not torch.equal(model(IMAGES), model(IMAGES))

    def test_draws_follow_the_posterior_of_each_unit(self):
        bank = NoiseBank({"a": 3})
        bank.mu.data = torch.tensor([0.1, -2.0, -20.5])
        bank.log_sigma.data = torch.tensor([-1.0, 0.5, 0.0])
        theta = bank.draw(20000).detach()
        q = bank.posterior()
        standard_error = theta.std(0) / 20000**0.5
        assert ((theta.mean(0) - q.mean()).abs() < 4 * standard_error).all()

    def test_evaluation_uses_the_mean(self):
        model, bank = gated()
        model.eval()
        assert torch.allclose(model(IMAGES), by_hand(plain(model), bank.mean()[None]), atol=1e-6)
        assert torch.equal(model(IMAGES), model(IMAGES))

    def test_gradients_reach_weights_and_gates(self):
        model, bank = gated()
        model(IMAGES).square().sum().backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
        assert bank.mu.grad.abs().sum() > 0

    def test_the_input_keeps_its_type(self):
        bank = NoiseBank({"a": 4})
        bank.draw(2)
        for dtype in (torch.float16, torch.bfloat16, torch.float64):
            assert Gate(bank, "a")(torch.randn(2, 4).to(dtype)).dtype == dtype

    def test_a_gate_can_lie_along_any_dimension(self):
        bank = NoiseBank({"a": 4})
        theta = bank.draw(2)
        x = torch.randn(2, 7, 4)
        assert torch.equal(Gate(bank, "a", dim=-1)(x), x * theta[:, None, :])


class TestNeverStale:
    def moved(self, bank):
        with torch.no_grad():
            bank.mu -= 3.0

    def expected(self, model):
        fresh, bank = gated()
        fresh.load_state_dict(model.state_dict())
        return by_hand(plain(fresh), TruncatedLogNormal(bank.mu, bank.log_sigma).mean()[None])

    def test_after_a_step(self):
        model, bank = gated()
        model.eval()
        before = model(IMAGES)
        self.moved(bank)
        assert not torch.allclose(model(IMAGES), before)
        assert torch.allclose(model(IMAGES), self.expected(model), atol=1e-6)

    def test_after_writing_past_autograd(self):
        model, bank = gated()
        model.eval()
        model(IMAGES)
        bank.mu.data.fill_(-2.0)
        assert torch.allclose(model(IMAGES), self.expected(model), atol=1e-6)

    @pytest.mark.parametrize("which", ["mu", "log_sigma", "alive"])
    def test_after_writing_a_single_number(self, which):
        model, bank = gated()
        model.eval()
        model(IMAGES)
        getattr(bank, which).data[8] = False if which == "alive" else -3.0
        want = TruncatedLogNormal(bank.mu, bank.log_sigma).mean()[None] * bank.alive
        assert torch.allclose(model(IMAGES), by_hand(plain(model), want), atol=1e-6)

    def test_gates_that_stay_are_computed_once(self, monkeypatch):
        model, bank = gated()
        model.eval()
        with torch.inference_mode():
            before = model(IMAGES)
        monkeypatch.setattr(draws, "mean", None)  # whoever calls it fails
        output = model(IMAGES)
        output.sum().backward()
        assert torch.equal(output, before)
        assert copy.deepcopy(bank)._remembered is None

    def test_after_loading(self):
        model, _ = gated()
        model.eval()
        model(IMAGES)
        other, other_bank = gated()
        self.moved(other_bank)
        model.load_state_dict(other.state_dict())
        assert torch.allclose(model(IMAGES), other.eval()(IMAGES), atol=1e-6)

    def test_in_a_part_called_alone(self):
        model, bank = gated()
        model.eval()
        model(IMAGES)
        self.moved(bank)
        x = torch.randn(3, 5)
        assert torch.allclose(model[4](x), torch.relu(x) * bank.mean()[4:])

    def test_after_a_pass_that_failed(self):
        model, bank = gated()
        model.eval()
        with pytest.raises(RuntimeError):
            model(torch.randn(1, 3, 8, 8))
        assert bank._pass.theta is None


class TestCopies:
    def test_a_deep_copy_is_independent(self):
        model, bank = gated()
        model(IMAGES)  # leaves a draw with a graph behind
        copied = copy.deepcopy(model).eval()
        with torch.no_grad():
            bank.mu.fill_(-10.0)
        assert torch.allclose(copied(IMAGES), by_hand(plain(copied), copied.bmrs_noise.mean()[None]), atol=1e-6)
        assert copied.bmrs_noise is not bank
        copied.bmrs_noise.detach()
        assert torch.allclose(copied(IMAGES), plain(copied)(IMAGES))

    def test_a_pickle_computes_the_same(self):
        model, _ = gated()
        model(IMAGES)
        again = pickle.loads(pickle.dumps(model))
        assert torch.equal(again.eval()(IMAGES), model.eval()(IMAGES))

    def test_saved_state_holds_the_gates_and_what_was_removed(self):
        model, bank = gated()
        bank.remove(torch.arange(9) == 2)
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        other, other_bank = gated()
        other.load_state_dict(torch.load(buffer, weights_only=True))
        assert other_bank.units_left() == {"1": 3, "4": 5}
        assert torch.equal(other.eval()(IMAGES), model.eval()(IMAGES))


class TestRemoval:
    def test_removed_units_are_zero_and_pay_nothing(self):
        model, bank = gated()
        with torch.no_grad():
            bank.mu.copy_(torch.linspace(-1, 0.2, 9))
        gone = torch.zeros(9, dtype=torch.bool)
        gone[[1, 7]] = True
        whole = bank.posterior().kl()
        bank.remove(gone)
        assert torch.allclose(bank.kl(), whole[~gone].sum() / 9)
        assert (bank.draw(5)[:, gone] == 0).all()
        (model(IMAGES).sum() + bank.kl()).backward()
        for gate in (bank.mu, bank.log_sigma):
            assert (gate.grad[gone] == 0).all()
        assert (bank.log_sigma.grad[~gone] != 0).all()  # the KL alone sees to that; a dead ReLU has no other

    def test_prices_weigh_the_sum(self):
        _, bank = gated()
        assert torch.allclose(bank.kl(), bank.kl(prices_of("uniform", [4, 5])))
        prices = torch.rand(9, dtype=torch.float64)
        assert torch.allclose(bank.kl(prices), (bank.posterior().kl() * prices.float()).sum())

    def test_a_layer_is_never_emptied(self):
        _, bank = gated()
        with pytest.raises(ValueError, match="units would remove all of layer '1': at least one unit must stay"):
            bank.remove(torch.arange(9) < 4)
        assert bank.units_left() == {"1": 4, "4": 5}


def test_detaching_leaves_the_plain_network():
    model, bank = gated()
    keys = set(network().state_dict())
    bank.detach()
    assert set(model.state_dict()) == keys
    assert torch.equal(model(IMAGES), plain(model)(IMAGES))
    NoiseBank.attach(model, {"1": 4})  # and it can be gated again


def test_activation_checkpointing_recomputes_with_the_same_draw():
    class Checkpointed(nn.Module):
        def __init__(self, recompute):
            super().__init__()
            self.first, self.act, self.last = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)
            self.recompute = recompute

        def forward(self, x):
            body = lambda x: self.act(self.first(x))  # noqa: E731
            return self.last(checkpoint(body, x, use_reentrant=False) if self.recompute else body(x))

    grads = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = Checkpointed(recompute)
        bank = NoiseBank.attach(model, {"act": 4}, log_sigma=0.0)
        model(torch.randn(5, 3)).sum().backward()
        grads.append((bank.mu.grad, model.first.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda: NoiseBank({"a": 2}, noise="pixel"), ValueError, "noise must be 'example' or 'batch'"),
        (lambda: NoiseBank({}), ValueError, "sizes must name at least one layer"),
        (lambda: NoiseBank({"a": 0}), ValueError, "sizes['a'] must be a whole number of units, at least 1; got 0"),
        (lambda: NoiseBank({"a": 2}).theta("a"), RuntimeError, "no gates have been drawn"),
        (lambda: NoiseBank({"a": 2}).kl(torch.ones(3)), ValueError, "prices and the gates must have the same shape"),
        (lambda: NoiseBank({"a": 2}).remove(torch.zeros(2)), ValueError, "units must be a boolean mask"),
        (lambda: NoiseBank.attach(network(), {"head": 2}), ValueError, "gated names the module 'head'"),
        (lambda: NoiseBank.attach(gated()[0], {"1": 4}), ValueError, "the model has gates already"),
        (
            lambda: NoiseBank.attach(m := nn.LSTM(3, 4), {"": 4}) and m(torch.randn(2, 5, 3)),
            TypeError,
            "the output of '' must be one tensor to be gated; got tuple",
        ),
        (lambda: Gate(NoiseBank({"a": 2}), "b"), ValueError, "name must be one of the bank's layers (a); got 'b'"),
        (lambda: NoiseBank.attach(m := network(), {"1": 7}) and m(IMAGES), ValueError, "do not fit an output of shape"),
    ],
)
def test_bad_input_gives_one_sentence(call, error, sentence):
    with pytest.raises(error, match=re.escape(sentence)) as caught:
        call()
    assert "\n" not in str(caught.value)
