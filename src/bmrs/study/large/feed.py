"""Images that stay on the device as bytes, at the size their files have, and become batches there."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bmrs.study import data

MEAN, SD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as the pretrained networks know them
_SCALES, _RATIOS = (0.08, 1.0), (3 / 4, 4 / 3)  # of a random crop, as usual for ImageNet
_TRIES = 10
_SHIFT = 8  # a shifted image moves by up to one part in so many of its size


class Feed:
    """A data set on a device, and what a network is fed from it."""

    def __init__(
        self,
        name: str,
        data_dir: Path | None,
        *,
        resolution: int,
        device: torch.device,
        augment: str = "none",
        channels_last: bool = False,
        images: int | None = None,
    ) -> None:
        """``images``: so many training images, and a fifth as many test images; all unless given."""
        whole = data.images(name, data_dir)
        train, test = whole.train, whole.test
        if images is not None:
            train, test = (data.Part(part.x[:n], part.y[:n]) for part, n in ((train, images), (test, images // 5)))
        self.classes, self.resolution, self.device, self.augment = whole.classes, resolution, device, augment
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.train, self.test = train.to(device), test.to(device)
        self._look = [torch.tensor(value, device=device)[:, None, None] for value in (MEAN, SD)]

    def split(self, seed: int) -> tuple[Tensor, Tensor]:
        """Numbers of the images to train and to validate on."""
        train, validation = data.split(len(self.train), seed)
        return train.to(self.device), validation.to(self.device)

    def example(self) -> Tensor:
        """Two images as a network takes them."""
        return self.prepared(self.train.x[:2])

    def epoch(self, seed: int, number: int) -> "Epoch":
        """The training images of a seed in the order of this epoch, each with its own crop."""
        chance = torch.Generator().manual_seed(1_000_003 * seed + number)
        own = self.split(seed)[0]
        order = own[torch.randperm(len(own), generator=chance).to(self.device)]
        return Epoch(self, order, boxes(self.augment, len(own), self.train.x.shape[-1], chance))

    def prepared(self, x: Tensor, box: Tensor | None = None) -> Tensor:
        """Bytes as normalised numbers at the network's resolution; of each image the part in its box."""
        mean, sd = self._look
        x = x.float().div_(255).sub_(mean).div_(sd)
        size = self.resolution
        if box is not None:
            width, height, across, down, flip = box.to(x.device).unbind(1)
            zero = torch.zeros_like(width)
            rows = [width * flip, zero, across, zero, height, down]
            grid = F.affine_grid(torch.stack(rows, 1).reshape(-1, 2, 3), [len(x), 3, size, size], align_corners=False)
            x = F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
        elif x.shape[-1] != size:
            x = F.interpolate(x, size=(size, size), mode="bilinear", antialias=size < x.shape[-1])
        return x.contiguous(memory_format=self.format)


class Epoch:
    """Batches of one pass over the training images."""

    def __init__(self, feed: Feed, order: Tensor, box: Tensor | None) -> None:
        self.feed, self.order = feed, order
        self.box = None if box is None else box.to(feed.device)

    def batches(self, size: int) -> int:
        return -(-len(self.order) // size)

    def batch(self, number: int, size: int) -> tuple[Tensor, Tensor]:
        own = slice(number * size, (number + 1) * size)
        index = self.order[own]
        box = None if self.box is None else self.box[own]
        return self.feed.prepared(self.feed.train.x[index], box), self.feed.train.y[index]


def boxes(kind: str, n: int, size: int, chance: torch.Generator) -> Tensor | None:
    """[n, (width, height, across, down, flip)] in units of the image, whose middle is 0 and whose edges are ±1.

    "crop": a random part, resized, and flipped every other time; "shift": all of it moved by whole pixels, and flipped.
    """
    if kind == "none":
        return None
    flip = 1.0 - 2.0 * torch.randint(2, (n,), generator=chance)
    if kind == "shift":
        most = size // _SHIFT
        moved = torch.randint(-most, most + 1, (2, n), generator=chance) * (2.0 / size)
        return torch.stack([torch.ones(n), torch.ones(n), moved[0], moved[1], flip], 1)
    area = torch.empty(_TRIES, n).uniform_(*_SCALES, generator=chance)
    low, high = (float(torch.tensor(ratio).log()) for ratio in _RATIOS)
    ratio = torch.empty(_TRIES, n).uniform_(low, high, generator=chance).exp()
    width, height = (area * ratio).sqrt(), (area / ratio).sqrt()
    fits = (width <= 1) & (height <= 1)
    first = fits.to(torch.uint8).argmax(0)  # of those tried; the whole image where none fits
    width, height = (
        torch.where(fits.any(0), tried.gather(0, first[None])[0], torch.ones(n)) for tried in (width, height)
    )
    across, down = ((2 * torch.rand(n, generator=chance) - 1) * (1 - part) for part in (width, height))
    return torch.stack([width, height, across, down, flip], 1)
