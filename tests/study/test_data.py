import hashlib
import math

import numpy as np
import pytest
import torch

from bmrs.study import data
from tests.study.test_files import write_cifar, write_idx_set, write_tiny


def test_digits_are_all_there_once():
    digits = data.load("digits", seed=3)
    parts = (digits.train, digits.validation, digits.test)
    assert sum(len(part) for part in parts) == 1797
    assert len(digits.test) == 359
    assert digits.input_shape == (1, 32, 32)
    whole = data.images("digits")
    images = torch.cat([part.x for part in parts]).flatten(1)
    original = whole.prepare(torch.cat([whole.train.x, whole.test.x])).flatten(1)
    assert torch.equal(images.sum(1).sort().values, original.sum(1).sort().values)
    assert images.min() >= -0.5
    assert images.max() <= 0.5


def test_digits_stay_as_they_were():
    """Labels in the order of the first version of this module, so that old results can be made again."""
    digits = data.load("digits", seed=1)
    assert hashlib.sha256(digits.train.y.numpy().tobytes()).hexdigest().startswith("486015a802b7")
    assert digits.train.y[:10].tolist() == [8, 7, 3, 6, 1, 7, 9, 9, 6, 9]


def test_the_seed_moves_the_split_but_not_the_test_set():
    one, other, again = data.load("digits", 1), data.load("digits", 2), data.load("digits", 1)
    assert torch.equal(one.test.x, other.test.x)
    assert not torch.equal(one.validation.x, other.validation.x)
    assert torch.equal(one.train.x, again.train.x)


@pytest.mark.parametrize("n", [5, 23, 1000, 60_000])
def test_split(n):
    train, validation = data.split(n, 7)
    assert len(validation) == n // 5
    assert sorted([*train.tolist(), *validation.tolist()]) == list(range(n))
    again = data.split(n, 7)
    assert torch.equal(train, again[0])
    assert torch.equal(validation, again[1])
    if n > 20:
        other = data.split(n, 8)[1]
        overlap = len(set(validation.tolist()) & set(other.tolist()))
        assert overlap < n / 25 + 5 * math.sqrt(n / 25)  # a fifth of a fifth, by chance


def test_split_refuses_too_few():
    with pytest.raises(ValueError, match="n must be at least 5 images"):
        data.split(4, 0)


def test_unknown_name():
    with pytest.raises(ValueError, match="unknown data set 'imagenet': choose one of digits, mnist"):
        data.load("imagenet")


def test_size_must_be_there():
    with pytest.raises(ValueError, match="size must be 1 pixel or more; got 0"):
        data.images("digits", size=0)


def test_mnist_is_split_centred_and_resized(tmp_path):
    pixels, labels = write_idx_set(tmp_path / "fashion-mnist", 50, 12)["train"]
    loaded = data.load("fashion-mnist", 4, data_dir=tmp_path)
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [40, 10, 12]
    assert (loaded.name, loaded.classes, loaded.input_shape) == ("fashion-mnist", 10, (1, 32, 32))
    index = data.split(50, 4)[0]
    assert loaded.train.y.tolist() == labels[index.numpy()].tolist()
    assert loaded.train.x.dtype == torch.float32
    wanted = np.stack([bilinear((pixels[i] - 127.0) / 255, 32) for i in index.tolist()])
    torch.testing.assert_close(loaded.train.x[:, 0], torch.tensor(wanted, dtype=torch.float32), atol=1e-5, rtol=0)


def bilinear(image, size):
    """Resize up, pixel centres aligned, edges repeated: written down from the definition, without torch."""
    at = (np.arange(size) + 0.5) * image.shape[0] / size - 0.5
    weights = np.maximum(0, 1 - np.abs(at[:, None] - np.arange(image.shape[0])))
    weights /= weights.sum(1, keepdims=True)
    return weights @ image @ weights.T


def test_smaller_images_are_averages(tmp_path):
    """Antialiased: at half the size no pixel of the large image is left out."""
    pixels, _ = write_idx_set(tmp_path / "mnist", 8, 5)["t10k"]
    small = data.load("mnist", data_dir=tmp_path, size=14).test.x
    assert small.shape == (5, 1, 14, 14)
    torch.testing.assert_close(
        small[:, :, 2:-2, 2:-2].mean(),
        torch.tensor((pixels[:, 4:-4, 4:-4] - 127.0).mean() / 255, dtype=torch.float32), atol=0.02, rtol=0,
    )  # fmt: skip
    assert small.std() < 0.75 * pixels.std() / 255


def test_cifar_is_normalised_to_one(tmp_path):
    pixels, labels = write_cifar(tmp_path / "cifar10", 10)
    loaded = data.load("cifar10", data_dir=tmp_path)
    assert [len(part) for part in (loaded.train, loaded.validation, loaded.test)] == [40, 10, 10]
    assert loaded.input_shape == (3, 32, 32)
    torch.testing.assert_close(loaded.test.x, torch.tensor(pixels[50:] / 127.5 - 1, dtype=torch.float32))
    assert loaded.test.y.tolist() == labels[50:].tolist()


def test_tiny_imagenet_has_the_look_of_imagenet(tmp_path):
    write_tiny(tmp_path / "tiny-imagenet-200")
    whole = data.images("tiny-imagenet", tmp_path)
    assert (whole.classes, whole.input_shape, whole.train.x.dtype) == (200, (3, 64, 64), torch.uint8)
    loaded = data.load("tiny-imagenet", data_dir=tmp_path)
    for channel, (mean, sd) in enumerate(((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))):
        wanted = (whole.test.x[:, channel].double() / 255 - mean) / sd
        torch.testing.assert_close(loaded.test.x[:, channel].double(), wanted, atol=1e-5, rtol=0)


def test_whole_images_indexed_are_the_loaded_parts(tmp_path):
    write_idx_set(tmp_path / "mnist", 30, 6)
    whole = data.images("mnist", tmp_path).to("cpu")
    before = whole.train.x.clone()
    x = whole.prepare(whole.train.x)
    assert torch.equal(whole.train.x, before)
    for seed in (0, 1):
        loaded = data.load("mnist", seed, data_dir=tmp_path)
        train, validation = whole.split(seed)
        torch.testing.assert_close(x[train], loaded.train.x)
        torch.testing.assert_close(x[validation], loaded.validation.x)
        assert torch.equal(whole.train.y[validation], loaded.validation.y)
