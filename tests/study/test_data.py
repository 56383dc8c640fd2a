import pytest
import torch

from bmrs.study import data


def test_digits_are_all_there_once():
    digits = data.load("digits", seed=3)
    parts = (digits.train, digits.validation, digits.test)
    assert sum(len(part) for part in parts) == 1797
    assert len(digits.test) == 359
    assert digits.input_shape == (1, 32, 32)
    images = torch.cat([part.x for part in parts]).flatten(1)
    original = data._digits()[0].flatten(1)
    assert torch.equal(images.sum(1).sort().values, original.sum(1).sort().values)
    assert images.min() >= -0.5
    assert images.max() <= 0.5


def test_the_seed_moves_the_split_but_not_the_test_set():
    one, other, again = data.load("digits", 1), data.load("digits", 2), data.load("digits", 1)
    assert torch.equal(one.test.x, other.test.x)
    assert not torch.equal(one.validation.x, other.validation.x)
    assert torch.equal(one.train.x, again.train.x)


def test_unknown_name():
    with pytest.raises(ValueError, match="unknown data set 'imagenet': choose one of digits"):
        data.load("imagenet")
