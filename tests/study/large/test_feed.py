"""Batches made on the device are what each image would be by itself."""

import pytest
import torch
import torch.nn.functional as F

from bmrs.study.large.feed import MEAN, SD, Feed, boxes
from tests.study.large.made import write_cifar


@pytest.fixture
def folder(tmp_path):
    write_cifar(tmp_path)
    return tmp_path


def feed(folder, **more):
    return Feed("cifar10", folder, **{"resolution": 32, "device": torch.device("cpu"), **more})


def by_hand(x):
    return (x.double() / 255 - torch.tensor(MEAN)[:, None, None].double()) / torch.tensor(SD)[:, None, None].double()


def test_images_are_normalised_and_resized(folder):
    small = feed(folder)
    torch.testing.assert_close(small.prepared(small.train.x).double(), by_hand(small.train.x), atol=1e-5, rtol=1e-5)
    assert small.train.x.dtype == torch.uint8
    large = feed(folder, resolution=48, channels_last=True)
    x = large.prepared(large.train.x[:4])
    wanted = F.interpolate(by_hand(large.train.x[:4]), size=(48, 48), mode="bilinear")
    torch.testing.assert_close(x.double(), wanted, atol=1e-5, rtol=1e-5)
    assert x.is_contiguous(memory_format=torch.channels_last)


def test_an_epoch_has_every_image_of_its_part_once(folder):
    own = feed(folder, augment="crop")
    train, validation = own.split(3)
    assert sorted(torch.cat([train, validation]).tolist()) == list(range(60))
    epoch = own.epoch(3, 1)
    assert sorted(epoch.order.tolist()) == sorted(train.tolist())
    labels = torch.cat([epoch.batch(n, 20)[1] for n in range(epoch.batches(20))])
    assert torch.equal(labels, own.train.y[epoch.order])
    again, other = own.epoch(3, 1), own.epoch(3, 2)
    assert torch.equal(again.batch(1, 20)[0], epoch.batch(1, 20)[0])
    assert not torch.equal(other.order, epoch.order)


def test_only_some_images(folder):
    own = feed(folder, images=40)
    assert (len(own.train), len(own.test)) == (40, 8)


def test_a_shift_moves_by_whole_pixels_and_flips(folder):
    own = feed(folder)
    box = torch.tensor([[1.0, 1.0, 2 * 3 / 32, 0.0, 1.0], [1.0, 1.0, 0.0, -2 * 2 / 32, -1.0]])
    x, moved = own.prepared(own.train.x[:2]), own.prepared(own.train.x[:2], box)
    torch.testing.assert_close(moved[0, :, :, :-3], x[0, :, :, 3:], atol=1e-4, rtol=1e-4)
    assert not moved[0, :, :, -3:].any()  # the mean colour outside
    torch.testing.assert_close(moved[1, :, 2:], x[1].flip(2)[:, :-2], atol=1e-4, rtol=1e-4)


def test_a_crop_is_that_part_of_the_image(folder):
    own = feed(folder)
    box = torch.tensor([[0.5, 0.25, 0.5, -0.75, 1.0]])  # the right half, the top quarter
    found = own.prepared(own.train.x[:1], box)
    part = own.prepared(own.train.x[:1])[:, :, :8, 16:]
    inner = F.interpolate(part, size=(32, 32), mode="bilinear")
    torch.testing.assert_close(found[:, :, 4:-4, 2:-2], inner[:, :, 4:-4, 2:-2], atol=1e-4, rtol=1e-4)


def test_boxes_have_the_usual_sizes():
    chance = torch.Generator().manual_seed(0)
    assert boxes("none", 9, 32, chance) is None
    width, height, across, down, flip = boxes("crop", 20_000, 32, chance).unbind(1)
    area, ratio = width * height, width / height
    assert 0.08 <= area.min() < 0.09 < 0.95 < area.max() <= 1.0
    assert 0.74 < ratio.min() < 0.8 < 1.25 < ratio.max() < 1.34
    assert ((across.abs() + width <= 1.0001) & (down.abs() + height <= 1.0001)).all()
    assert abs(flip.mean()) < 0.05
    shift = boxes("shift", 20_000, 32, chance)
    assert shift[:, 2].abs().max() * 16 == pytest.approx(4)
    assert torch.equal((shift[:, 2] * 16).round(), shift[:, 2] * 16)
