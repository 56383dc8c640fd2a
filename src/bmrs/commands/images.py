"""A folder of images in folders of classes, as a dataset."""

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
# What pretrained networks of colour images were trained with; of grey ones there is no custom.
_LOOKS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "RGB": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "L": ((0.5,), (0.5,)),
}


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """The images of ``folder/<class>/*``: resized to cover a square, its middle, normalised.

    ``size``: side of the square, the first image's shorter side unless given; ``like``: another folder's classes,
    size and colours.
    """

    def __init__(self, folder: Path, *, size: int | None = None, like: "ImageFolder | None" = None) -> None:
        if not folder.is_dir():
            raise ValueError(f"--data: there is no folder {folder}: it must hold a folder of images for every class.")
        self.classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")
        self.files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in sorted((folder / name).iterdir())
            if path.suffix.lower() in SUFFIXES
        ]
        counts = Counter(label for _, label in self.files)
        empty = [name for label, name in enumerate(self.classes) if not counts[label]]
        if not self.files or empty:
            raise ValueError(
                f"--data: there are no images in {folder / empty[0] if empty else folder}: a class is a folder with "
                f"files {', '.join(SUFFIXES)}."
            )
        if like is not None and like.classes != self.classes:
            differ = sorted(set(like.classes) ^ set(self.classes))
            raise ValueError(f"--data: {folder} has other classes than train ('{differ[0]}'): make them the same.")
        first = self._open(self.files[0][0])
        self.colours: str = like.colours if like is not None else ("L" if first.mode in ("L", "1") else "RGB")
        self.size: int = like.size if like is not None else size or min(first.size)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.files[index]
        image: Any = self._open(path).convert(self.colours)
        scale = self.size / min(image.size)
        width, height = (max(self.size, round(side * scale)) for side in image.size)
        left, top = (width - self.size) // 2, (height - self.size) // 2
        if (width, height) != image.size:
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        image = image.crop((left, top, left + self.size, top + self.size))
        x = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(self.size, self.size, -1)
        mean, sd = (torch.tensor(value)[:, None, None] for value in _LOOKS[self.colours])
        return (x.permute(2, 0, 1) / 255 - mean) / sd, label

    @staticmethod
    def _open(path: Path) -> Image.Image:
        try:
            image = Image.open(path)
            image.load()
        except (OSError, UnidentifiedImageError, SyntaxError) as problem:
            raise ValueError(f"--data: {path} cannot be read as an image ({problem}): mend or remove it.") from problem
        if image.mode[0] in "IF":
            raise ValueError(f"--data: {path} has more than 8 bits per colour: save it with 8, or return it from a "
                             "function of yours.")  # fmt: skip
        return image
