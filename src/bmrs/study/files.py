"""The official files of the data sets: where they lie, fetching what is missing, reading them into tensors."""

import gzip
import hashlib
import io
import os
import tarfile
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from rich.progress import Progress

Labelled = tuple[Tensor, Tensor]  # images, uint8 [n, channels, height, width], and labels, int64 [n]
Pair = tuple[Labelled, Labelled]  # the official training and test parts
DAMAGED = (
    OSError,
    EOFError,
    zlib.error,
    tarfile.TarError,
    zipfile.BadZipFile,
    ValueError,
    SyntaxError,
)  # so say readers


class DataError(ValueError):
    """A data set cannot be had or read; the message says what to do."""


class DownloadError(OSError):
    """A file did not arrive; the message says why in a few words."""


@dataclass(frozen=True)
class Source:
    """An official file: its folder under the data directory, the addresses it lies under, its checksum."""

    name: str
    folder: str
    addresses: tuple[str, ...]
    checksum: str


def _idx_sources(folder: str, addresses: tuple[str, ...], checksums: tuple[str, ...]) -> tuple[Source, ...]:
    names = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    return tuple(Source(n, folder, addresses, f"sha256:{c}") for n, c in zip(names, checksums, strict=True))


SOURCES: dict[str, tuple[Source, ...]] = {
    "mnist": _idx_sources(
        "mnist",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        (
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    "fashion-mnist": _idx_sources(
        "fashion-mnist",
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        (
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
    # Of these two archives MD5 is what is published.
    "cifar10": (
        Source(
            "cifar-10-binary.tar.gz",
            "cifar10",
            ("https://www.cs.toronto.edu/~kriz/",),
            "md5:c32a1d4ab5d03f1284b67883e8d87530",
        ),
    ),
    "tiny-imagenet": (
        Source("tiny-imagenet-200.zip", "", ("http://cs231n.stanford.edu/",), "md5:90528d7ca1a48142e341f4ef8d21d0de"),
    ),
}

# Archives may also lie unpacked, in this folder.
UNPACKED = {"cifar10": "cifar10/cifar-10-batches-bin", "tiny-imagenet": "tiny-imagenet-200"}


def directory(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where data sets lie: ``data_dir``, else the environment variable BMRS_DATA, else the user's cache folder."""
    chosen = data_dir or os.environ.get("BMRS_DATA")
    return Path(chosen).expanduser() if chosen else Path(_pooch().os_cache("bmrs"))


def read(name: str, data_dir: str | os.PathLike[str] | None = None, download: bool = True) -> Pair:
    """The official training and test parts of one of :data:`SOURCES`; what is missing is downloaded, if allowed."""
    root = directory(data_dir)
    if name in UNPACKED:
        path = root / UNPACKED[name]
        if not path.is_dir():
            path = complete(name, root, download)[0]
        return cifar(path) if name == "cifar10" else tiny(path)
    return idx_set(complete(name, root, download)[0].parent)


# Fetching


def complete(name: str, root: Path, download: bool = True) -> list[Path]:
    """Where the official files of a data set lie, all there; those that were not are downloaded and checked."""
    sources = SOURCES[name]
    places = [root / source.folder / source.name for source in sources]
    missing = [source for source, place in zip(sources, places, strict=True) if not place.is_file()]
    if not missing:
        return places
    names = ", ".join(source.name for source in missing)
    by_hand = f"put {names} from {missing[0].addresses[0]} into {places[0].parent}"
    if not download:
        raise DataError(f"{name} is not complete in {root}: {by_hand}, or allow the download.")
    try:
        with _unfinished(root) as waiting:
            for source in missing:
                _fetch(source, root / source.folder / source.name, waiting)
    except OSError as wrong:
        reason = wrong.strerror or wrong
        raise DataError(f"{name} could not be downloaded to {root} ({reason}): {by_hand} by hand.") from wrong
    return places


def _fetch(source: Source, place: Path, waiting: Path) -> None:
    """One official file: gathered in ``waiting``, checked there, and only then put in place."""
    if place.is_file():  # another process fetched it while this one waited
        return
    pooch = _pooch()
    pooch.get_logger().setLevel("WARNING")  # the bar says it all
    addresses, reasons = list(source.addresses), []
    while addresses:
        address = addresses.pop(0)
        downloader = Resuming(waiting / f"{source.name}.part")
        try:
            whole = pooch.retrieve(address + source.name, source.checksum, source.name, waiting, downloader=downloader)
        except (OSError, ValueError) as wrong:
            reasons.append(f"{urlsplit(address).hostname}: {_why(wrong)}")
            if isinstance(wrong, ValueError) and downloader.resumed:
                addresses.insert(0, address)  # what was left from last time may have been the fault: from the start
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(whole, place)
        return
    raise DownloadError("; ".join(dict.fromkeys(reasons)))


def _why(wrong: Exception) -> str:
    """A few words for a failed download."""
    import requests

    if isinstance(wrong, ValueError):
        return "wrong checksum"
    if isinstance(wrong, requests.exceptions.ChunkedEncodingError):
        return "the connection broke off"
    if isinstance(wrong, requests.RequestException):
        return "no connection"
    return getattr(wrong, "strerror", None) or str(wrong)


class Resuming:
    """A downloader for pooch that goes on where an earlier one broke off or was killed.

    Bytes gather in the file ``part``, which becomes the output when all of them are there. As long as each attempt
    brings something new, there is another.
    """

    def __init__(self, part: Path, pause: float = 0.5) -> None:
        self.part, self.pause = part, pause
        self.resumed = self._size() > 0

    def __call__(self, url: str, output_file: str, pooch: object) -> None:
        reached = self._size()
        with _bar() as bar:
            task = bar.add_task(self.part.stem, total=None, visible=False)
            while True:
                try:
                    self._go_on(url, lambda done, total: bar.update(task, completed=done, total=total, visible=True))
                    break
                except OSError:
                    if self._size() <= reached:
                        raise
                    reached = self._size()
                    time.sleep(self.pause)
        os.replace(self.part, output_file)

    def _go_on(self, url: str, tell: Callable[[int, int | None], None]) -> None:
        import requests

        start = self._size()
        # Encoded on the way, a range of bytes would not be one of the file.
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        with requests.get(url, headers=headers, stream=True, timeout=30) as answer:
            said = answer.headers.get("Content-Range", "")
            if answer.status_code == 416:  # nothing beyond what is here: it is all there, or of another file
                if said != f"bytes */{start}":
                    self.part.unlink()
                    self._go_on(url, tell)
                return
            if not answer.ok:
                raise DownloadError(f"the server answers {answer.status_code}")
            if answer.status_code != 206:
                start = 0  # the server does not do ranges
            elif not said.startswith(f"bytes {start}-"):
                raise DownloadError(f"asked for bytes from {start}, got '{said}'")
            length = answer.headers.get("Content-Length")
            total = start + int(length) if length else None
            done = start
            with self.part.open("ab" if start else "wb") as file:
                for block in answer.iter_content(1 << 16):
                    file.write(block)
                    done += len(block)
                    tell(done, total)
        if total is not None and done != total:
            raise DownloadError("the connection broke off")

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0


@contextmanager
def _unfinished(root: Path) -> Iterator[Path]:
    """A folder for what is not whole yet, for one process at a time; what is in it outlives a failure."""
    from filelock import FileLock

    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / ".lock"):
        waiting = root / ".unfinished"
        waiting.mkdir(exist_ok=True)
        for stray in waiting.glob("tmp*"):  # pooch's, when it was killed
            stray.unlink()
        try:
            yield waiting
        finally:
            with suppress(OSError):  # not empty: a download broke off
                waiting.rmdir()


def _pooch():  # type: ignore[no-untyped-def]
    try:
        import pooch  # type: ignore[import-untyped]
    except ImportError as missing:
        what = f"the data directory needs '{missing.name}': install it with  pip install 'bmrs[study]'"
        raise ImportError(what, name=missing.name) from missing
    return pooch


def _bar() -> "Progress":
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    return progress.Progress(*columns, console=Console(stderr=True))


# Reading


def idx_set(folder: Path) -> Pair:
    """MNIST and its likes: four IDX files, images and labels."""
    parts = []
    for part in ("train", "t10k"):
        images = read_idx(folder / f"{part}-images-idx3-ubyte.gz", 3)
        path = folder / f"{part}-labels-idx1-ubyte.gz"
        labels = read_idx(path, 1)
        if len(labels) != len(images):
            raise _damaged(path, f"{len(labels):,} labels for {len(images):,} images")
        parts.append((images[:, None], _labels(labels, 10, path)))
    return parts[0], parts[1]


def read_idx(path: Path, dims: int) -> Tensor:
    """The bytes of one gzipped IDX file, in the shape it states."""
    content = _bytes(path, gzip.decompress)
    if content[:4] != bytes((0, 0, 8, dims)):
        raise _damaged(path, f"it does not start as an IDX file of bytes in {dims} dimensions")
    shape = [int.from_bytes(content[4 + 4 * d : 8 + 4 * d], "big") for d in range(dims)]
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dims) if len(content) >= 4 + 4 * dims else np.empty(0)
    if values.size != np.prod(shape) or not values.size:
        raise _damaged(path, f"it states {' × '.join(map(str, shape))} values and holds {values.size}")
    return torch.from_numpy(values.reshape(shape).copy())


def cifar(path: Path) -> Pair:
    """CIFAR-10's binary version: a folder of six files of records (label, red, green, blue), or the archive."""
    names = [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]
    batches = {name: _bytes(path / name) for name in names} if path.is_dir() else _members(path, names)
    size = max(map(len, batches.values()))
    for name, content in batches.items():
        if not content or len(content) != size or size % 3073:
            raise _damaged(path / name if path.is_dir() else path, f"{name} is {len(content):,} bytes long")
    x = torch.empty(6, size // 3073, 3, 32, 32, dtype=torch.uint8)
    y = torch.empty(6, size // 3073, dtype=torch.uint8)
    for index, content in enumerate(batches.values()):
        records = torch.from_numpy(np.frombuffer(bytearray(content), np.uint8).reshape(-1, 3073))
        y[index] = records[:, 0]
        x[index] = records[:, 1:].view(-1, 3, 32, 32)
    labels = _labels(y, 10, path)
    return (x[:5].flatten(0, 1), labels[:5].flatten()), (x[5], labels[5])


def _members(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Files of these names in a .tar.gz, in the order of the names."""
    found = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                file = archive.extractfile(member) if name in names else None
                if file is not None:
                    found[name] = file.read()
        return {name: found[name] for name in names}
    except KeyError as missing:
        raise _damaged(path, f"it lacks {missing.args[0]}") from missing
    except DAMAGED as wrong:
        raise _damaged(path, "it cannot be unpacked") from wrong


def _bytes(path: Path, decode: Callable[[bytes], bytes] = bytes) -> bytes:
    try:
        return decode(path.read_bytes())
    except FileNotFoundError as missing:
        raise DataError(f"{path} is missing: put it there.") from missing
    except DAMAGED as wrong:
        raise _damaged(path, "it cannot be read to the end") from wrong


def _labels(labels: Tensor, classes: int, path: Path) -> Tensor:
    if int(labels.max()) >= classes:
        raise _damaged(path, f"it has a label {int(labels.max())} where there are {classes} classes")
    return labels.long()


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path} is damaged ({what}): delete it and have it downloaded anew, or put a whole copy there.")


# TinyImageNet: 110,000 small files


class _Tree:
    """The files of tiny-imagenet-200, in a folder or in the official archive, by their path in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.archive: zipfile.ZipFile | None = None
        if path.is_dir():
            files = (file for part in ("train", "val") for file in (path / part).rglob("*.JPEG"))
            self.sizes = {file.relative_to(path).as_posix(): file.stat().st_size for file in files}
        else:
            try:
                self.archive = zipfile.ZipFile(path)
            except DAMAGED as wrong:
                raise _damaged(path, "it cannot be unpacked") from wrong
            entries = ((entry.filename.partition("/")[2], entry.file_size) for entry in self.archive.infolist())
            self.sizes = {name: size for name, size in entries if name.endswith(".JPEG")}

    def read(self, name: str) -> bytes:
        if self.archive is None:
            return _bytes(self.path / name)
        try:
            return self.archive.read(f"tiny-imagenet-200/{name}")
        except KeyError as missing:
            raise _damaged(self.path, f"it lacks {name}") from missing
        except DAMAGED as wrong:
            raise _damaged(self.path, f"{name} in it cannot be unpacked") from wrong

    def close(self) -> None:
        if self.archive is not None:
            self.archive.close()


def tiny(path: Path) -> Pair:
    """TinyImageNet: its training part, and its validation part for a test; classes in the order of their names.

    Decoding takes a while, so the images are kept beside ``path`` in one file, made anew when it does not fit.
    """
    tree = _Tree(path)
    try:
        classes, train, test = _tiny_lists(tree)
        mark = repr((classes, [(name, label, tree.sizes[name]) for name, label in train + test]))
        mark = hashlib.sha256(mark.encode()).hexdigest()
        cache = path.parent / "tiny-imagenet-200.safetensors"
        kept = _kept(cache, mark)
        if kept is None:
            kept = {"images": _decode(tree, [name for name, _ in train + test])}
            kept["labels"] = torch.tensor([label for _, label in train + test])
            _keep(cache, mark, kept)
    finally:
        tree.close()
    x, y = kept["images"], kept["labels"]
    return (x[: len(train)], y[: len(train)]), (x[len(train) :], y[len(train) :])


def _tiny_lists(tree: _Tree) -> tuple[list[str], list[tuple[str, int]], list[tuple[str, int]]]:
    """Classes, and the training and test images with their labels."""
    classes = sorted(tree.read("wnids.txt").decode().split())
    number = {name: index for index, name in enumerate(classes)}
    lines = [line.split("\t") for line in tree.read("val/val_annotations.txt").decode().splitlines() if line]
    train = [(name, name.split("/")[1]) for name in sorted(tree.sizes) if name.startswith("train/")]
    test = [(f"val/images/{line[0]}", line[1]) for line in lines if len(line) > 1]
    for name, of in train + test:
        if of not in number:
            raise _damaged(tree.path, f"the class {of} of {name} is not in wnids.txt")
        if name not in tree.sizes:
            raise _damaged(tree.path, f"it lacks {name}")
    counts = Counter(of for _, of in train)
    most = max(counts.values(), default=0)
    for of in classes:
        if counts[of] != most or not most:
            raise _damaged(tree.path, f"train/{of} holds {counts[of]} images, other classes {most}")
    if not test:
        raise _damaged(tree.path, "val/val_annotations.txt names no images")
    return classes, [(name, number[of]) for name, of in train], [(name, number[of]) for name, of in test]


def _decode(tree: _Tree, names: Sequence[str]) -> Tensor:
    """The images of these names, uint8 [n, 3, 64, 64]."""
    from rich.console import Console
    from rich.progress import track

    images = np.empty((len(names), 3, 64, 64), np.uint8)
    block = 256  # images to a task: few enough to see progress

    def fill(start: int) -> None:
        for index, name in enumerate(names[start : start + block], start):
            images[index] = _jpeg(tree, name)

    starts = range(0, len(names), block)
    with ThreadPoolExecutor() as pool:
        done = pool.map(fill, starts)
        for _ in track(done, "decoding TinyImageNet", len(starts), console=Console(stderr=True)):
            pass
    return torch.from_numpy(images)


def _jpeg(tree: _Tree, name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """One image [3, 64, 64]; the greyscale ones get three equal channels."""
    from PIL import Image

    content = tree.read(name)
    try:
        with Image.open(io.BytesIO(content)) as image:
            pixels = np.asarray(image.convert("RGB"))
    except DAMAGED as wrong:
        raise _damaged(tree.path / name, "it cannot be decoded") from wrong
    if pixels.shape != (64, 64, 3):
        raise _damaged(tree.path / name, f"it is {pixels.shape[1]}×{pixels.shape[0]} pixels, not 64×64")
    return pixels.transpose(2, 0, 1)


def _kept(cache: Path, mark: str) -> dict[str, Tensor] | None:
    """The decoded images, if they are those of the files marked so."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(cache, framework="pt") as file:
            if (file.metadata() or {}).get("source") != mark:
                return None
            return {name: file.get_tensor(name) for name in ("images", "labels")}
    except (OSError, SafetensorError):
        return None


def _keep(cache: Path, mark: str, tensors: dict[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # A folder that cannot be written to, or a full disk, costs the decoding next time and nothing else.
    with suppress(OSError, SafetensorError), _unfinished(cache.parent) as waiting:
        save_file(tensors, waiting / cache.name, {"source": mark})
        os.replace(waiting / cache.name, cache)
