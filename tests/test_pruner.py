import math

import pytest
import torch

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
