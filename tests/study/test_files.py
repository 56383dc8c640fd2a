import gzip
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from PIL import Image

from bmrs.study import files
from bmrs.study.files import DataError, Source

RNG = np.random.default_rng(0)


def idx(values, magic=None):
    head = magic or bytes((0, 0, 8, values.ndim))
    return head + b"".join(n.to_bytes(4, "big") for n in values.shape) + values.tobytes()


def write_idx_set(folder, train, test):
    """Made-up images and labels in the four official files; returns what is in them."""
    folder.mkdir(parents=True)
    made = {}
    for part, n in (("train", train), ("t10k", test)):
        images = RNG.integers(0, 256, (n, 28, 28), np.uint8)
        labels = RNG.integers(0, 10, n, np.uint8)
        made[part] = images, labels
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return made


def write_cifar(folder, per_batch):
    """Six made-up batches, unpacked; returns pixels and labels, the test batch's last."""
    folder = folder / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    pixels = RNG.integers(0, 256, (6 * per_batch, 3, 32, 32), np.uint8)
    labels = RNG.integers(0, 10, 6 * per_batch, np.uint8)
    for batch, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        here = range(batch * per_batch, (batch + 1) * per_batch)
        (folder / f"{name}.bin").write_bytes(b"".join(bytes([labels[i]]) + pixels[i].tobytes() for i in here))
    return pixels, labels


def jpeg(colour, mode="RGB", side=64):
    file = io.BytesIO()
    Image.new(mode, (side, side), colour).save(file, "JPEG", quality=95)
    return file.getvalue()


def write_tiny(folder, classes=("n02", "n01", "n03"), per_class=2):
    """Made-up TinyImageNet of one-coloured images; the first of each class is greyscale."""
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "wnids.txt").write_text("\n".join(classes) + "\n")
    lines = []
    for number, name in enumerate(sorted(classes)):
        (folder / "train" / name / "images").mkdir(parents=True)
        for n in range(per_class):
            content = jpeg(40 + number, "L") if n == 0 else jpeg((10 * number, 100 + n, 200))
            (folder / "train" / name / "images" / f"{name}_{n}.JPEG").write_bytes(content)
        lines.append(f"val_{2 - number}.JPEG\t{name}\t0\t0\t62\t62\n")
        (folder / "val" / "images" / f"val_{2 - number}.JPEG").write_bytes(jpeg((250, 5 * number, 60)))
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))


class Server:
    """Serves one file. ``breaks``: after how many bytes each answer in turn breaks off; ``ranges``: what was asked."""

    def __init__(self, content, knows_ranges=True, breaks=(), hold=None, status=None):
        self.ranges, self.breaks = [], list(breaks)
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                asked = self.headers.get("Range")
                server.ranges.append(asked)
                start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and knows_ranges else 0
                if status or start >= len(content):
                    self.send_response(status or 416)
                    self.send_header("Content-Range", f"bytes */{len(content)}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(206 if start else 200)
                self.send_header("Content-Length", str(len(content) - start))
                if start:
                    self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
                self.end_headers()
                stop = server.breaks.pop(0) if server.breaks else len(content)
                self.wfile.write(content[start : start + stop])
                self.wfile.flush()
                if hold is not None:
                    hold.wait(60)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.address = f"http://127.0.0.1:{self.http.server_port}/"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()


CONTENT = RNG.bytes(300_000)
SHA = "sha256:" + hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def offer(monkeypatch):
    """Makes a data set "made" of one file, in DIR/folder/file.bin, to be had at these addresses."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    pause = files.Resuming.__init__.__defaults__
    monkeypatch.setattr(files.Resuming.__init__, "__defaults__", (0.0,) * len(pause))

    def offer(*addresses, checksum=SHA):
        monkeypatch.setitem(files.SOURCES, "made", (Source("file.bin", "folder", addresses, checksum),))

    return offer


def left(root):
    """All files under root but the lock."""
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file() and p.name != ".lock")


class TestFetching:
    def test_a_file_is_fetched_once(self, tmp_path, offer):
        with Server(CONTENT) as server:
            offer(server.address)
            for _ in range(2):
                (place,) = files.complete("made", tmp_path / "new")
                assert place.read_bytes() == CONTENT
            assert server.ranges == [None]
        assert left(tmp_path) == ["new/folder/file.bin"]

    def test_it_goes_on_where_the_connection_broke_off(self, tmp_path, offer):
        with Server(CONTENT, breaks=[150_000, 100_000]) as server:
            offer(server.address)
            (place,) = files.complete("made", tmp_path)
        starts = [int(asked[6:-1]) for asked in server.ranges[1:]]
        assert len(starts) == 2
        assert 150_000 - 2**16 <= starts[0] <= 150_000
        assert starts[0] < starts[1] <= 250_000
        assert place.read_bytes() == CONTENT

    def test_what_broke_off_is_not_in_place_and_goes_on_next_time(self, tmp_path, offer):
        with Server(CONTENT, breaks=[200_000, 0]) as server:
            offer(server.address)
            with pytest.raises(DataError, match="the connection broke off"):
                files.complete("made", tmp_path)
            assert left(tmp_path) == [".unfinished/file.bin.part"]
            got = (tmp_path / ".unfinished" / "file.bin.part").stat().st_size
            assert got > 100_000
            (place,) = files.complete("made", tmp_path)
        assert server.ranges[-1] == f"bytes={got}-"
        assert place.read_bytes() == CONTENT
        assert left(tmp_path) == ["folder/file.bin"]

    def test_a_killed_download_goes_on(self, tmp_path, offer):
        hold = threading.Event()
        part = tmp_path / ".unfinished" / "file.bin.part"
        with Server(CONTENT, breaks=[2**17], hold=hold) as server:
            offer(server.address)
            program = (
                "from bmrs.study import files; from pathlib import Path; "
                f"files.SOURCES['made'] = (files.Source('file.bin', 'folder', ({server.address!r},), {SHA!r}),); "
                f"files.complete('made', Path({str(tmp_path)!r}))"
            )
            child = subprocess.Popen([sys.executable, "-c", program], env=os.environ | {"NO_PROXY": "127.0.0.1"})
            deadline = time.monotonic() + 60
            while not (part.exists() and part.stat().st_size == 2**17):
                assert time.monotonic() < deadline
                assert child.poll() is None
                time.sleep(0.02)
            child.kill()
            child.wait()
            hold.set()
            assert not (tmp_path / "folder").exists()
            (place,) = files.complete("made", tmp_path)
        assert server.ranges == [None, f"bytes={2**17}-"]
        assert place.read_bytes() == CONTENT
        assert left(tmp_path) == ["folder/file.bin"]

    def test_a_server_without_ranges_sends_it_all_again(self, tmp_path, offer):
        part = tmp_path / ".unfinished" / "file.bin.part"
        part.parent.mkdir()
        part.write_bytes(b"x" * 1000)
        with Server(CONTENT, knows_ranges=False) as server:
            offer(server.address)
            assert files.complete("made", tmp_path)[0].read_bytes() == CONTENT
        assert server.ranges == ["bytes=1000-"]

    @pytest.mark.parametrize("before", [CONTENT, CONTENT + b"more"], ids=["all", "too much"])
    def test_nothing_left_to_ask_for(self, tmp_path, offer, before):
        (tmp_path / ".unfinished").mkdir()
        (tmp_path / ".unfinished" / "file.bin.part").write_bytes(before)
        with Server(CONTENT) as server:
            offer(server.address)
            assert files.complete("made", tmp_path)[0].read_bytes() == CONTENT
        assert server.ranges == [f"bytes={len(before)}-", None][: 1 if before is CONTENT else 2]

    def test_a_wrong_beginning_from_last_time_is_thrown_away(self, tmp_path, offer):
        (tmp_path / ".unfinished").mkdir()
        (tmp_path / ".unfinished" / "file.bin.part").write_bytes(b"x" * 1000)
        with Server(CONTENT) as server:
            offer(server.address)
            assert files.complete("made", tmp_path)[0].read_bytes() == CONTENT
        assert server.ranges == ["bytes=1000-", None]

    def test_wrong_checksum(self, tmp_path, offer):
        with Server(CONTENT[:-1] + b"!") as server:
            offer(server.address)
            with pytest.raises(DataError, match=r"made could not be downloaded .*\(127.0.0.1: wrong checksum\)"):
                files.complete("made", tmp_path)
        assert left(tmp_path) == []

    def test_the_second_address_helps(self, tmp_path, offer):
        with Server(CONTENT, status=404) as first, Server(CONTENT) as second:
            offer(first.address, second.address)
            assert files.complete("made", tmp_path)[0].read_bytes() == CONTENT

    def test_without_a_network_it_says_what_to_put_where(self, tmp_path, offer):
        with Server(CONTENT) as server:
            offer(server.address)  # nobody listens there any more
        with pytest.raises(DataError) as caught:
            files.complete("made", tmp_path)
        assert str(caught.value) == (
            f"made could not be downloaded to {tmp_path} (127.0.0.1: no connection): put file.bin from "
            f"{server.address} into {tmp_path / 'folder'} by hand."
        )

    def test_the_servers_refusal_is_told(self, tmp_path, offer):
        with Server(CONTENT, status=403) as server:
            offer(server.address)
            with pytest.raises(DataError, match=r"\(127.0.0.1: the server answers 403\)"):
                files.complete("made", tmp_path)

    def test_download_not_allowed(self, tmp_path):
        write_idx_set(tmp_path / "mnist", 2, 2)
        for name in ("train-labels-idx1-ubyte.gz", "t10k-labels-idx1-ubyte.gz"):
            (tmp_path / "mnist" / name).unlink()
        with pytest.raises(DataError, match=r"put train-labels-idx1-ubyte.gz, t10k-labels-idx1-ubyte.gz from https"):
            files.read("mnist", tmp_path, download=False)
        assert not (tmp_path / ".lock").exists()

    def test_a_folder_that_cannot_be_made(self, tmp_path, offer):
        offer("http://127.0.0.1:9/")
        (tmp_path / "file").write_text("")
        with pytest.raises(DataError, match=r"made could not be downloaded to .*file/sub \(Not a directory\)"):
            files.complete("made", tmp_path / "file" / "sub")


def test_checksums_are_well_formed():
    for sources in files.SOURCES.values():
        for source in sources:
            kind, _, digits = source.checksum.partition(":")
            assert re.fullmatch(r"[0-9a-f]+", digits)
            assert len(digits) == {"md5": 32, "sha256": 64}[kind]
            assert all(address.endswith("/") for address in source.addresses)


def test_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("BMRS_DATA", str(tmp_path / "a"))
    assert files.directory() == tmp_path / "a"
    assert files.directory(tmp_path / "b") == tmp_path / "b"
    monkeypatch.delenv("BMRS_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert files.directory().name == "bmrs"


class TestIdx:
    def test_what_was_written_is_read(self, tmp_path):
        made = write_idx_set(tmp_path / "mnist", 7, 3)
        for (x, y), (images, labels) in zip(files.read("mnist", tmp_path), made.values(), strict=True):
            assert (x.dtype, y.dtype) == (torch.uint8, torch.int64)
            assert np.array_equal(x[:, 0].numpy(), images)
            assert np.array_equal(y.numpy(), labels)

    @pytest.mark.parametrize(
        ("content", "sentence"),
        [
            (lambda whole: whole[:-20], "it cannot be read to the end"),
            (lambda whole: whole[: len(whole) // 2], "it cannot be read to the end"),
            (lambda whole: b"<html>not found</html>", "it cannot be read to the end"),
            (lambda whole: b"", "it does not start as an IDX file"),
            (lambda whole: gzip.compress(b"\0\0\x0d\x03" + gzip.decompress(whole)[4:]), "does not start as an IDX"),
            (lambda whole: gzip.compress(gzip.decompress(whole)[:-1]), "it states 7 × 28 × 28 values and holds 5487"),
            (lambda whole: gzip.compress(gzip.decompress(whole) + b"!"), "it states 7 × 28 × 28 values and holds 5489"),
            (lambda whole: gzip.compress(gzip.decompress(whole)[:9]), "values and holds 0"),
        ],
    )
    def test_damaged(self, tmp_path, content, sentence):
        write_idx_set(tmp_path / "mnist", 7, 3)
        path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
        path.write_bytes(content(path.read_bytes()))
        with pytest.raises(DataError) as caught:
            files.read("mnist", tmp_path)
        assert str(caught.value).startswith(f"{path} is damaged (")
        assert sentence in str(caught.value)
        assert "delete it and have it downloaded anew" in str(caught.value)

    def test_labels_do_not_fit(self, tmp_path):
        write_idx_set(tmp_path / "mnist", 7, 3)
        path = tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz"
        path.write_bytes(gzip.compress(idx(np.zeros(4, np.uint8))))
        with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte.gz is damaged \(4 labels for 3 images\)"):
            files.read("mnist", tmp_path)
        path.write_bytes(gzip.compress(idx(np.full(3, 10, np.uint8))))
        with pytest.raises(DataError, match="it has a label 10 where there are 10 classes"):
            files.read("mnist", tmp_path)

    def test_missing(self, tmp_path):
        with pytest.raises(DataError, match=r"train-images-idx3-ubyte.gz is missing: put it there"):
            files.idx_set(tmp_path)


class TestCifar:
    def test_folder_and_archive_hold_the_same(self, tmp_path):
        pixels, labels = write_cifar(tmp_path / "cifar10", 4)
        unpacked = files.read("cifar10", tmp_path)
        assert np.array_equal(torch.cat([unpacked[0][0], unpacked[1][0]]).numpy(), pixels)
        assert np.array_equal(torch.cat([unpacked[0][1], unpacked[1][1]]).numpy(), labels)
        assert [len(y) for _, y in unpacked] == [20, 4]
        archive = tmp_path / "packed" / "cifar10" / "cifar-10-binary.tar.gz"
        archive.parent.mkdir(parents=True)
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(tmp_path / "cifar10" / "cifar-10-batches-bin", "cifar-10-batches-bin")
        packed = files.read("cifar10", tmp_path / "packed", download=False)
        for (x, y), (x2, y2) in zip(unpacked, packed, strict=True):
            assert torch.equal(x, x2)
            assert torch.equal(y, y2)
        archive.write_bytes(archive.read_bytes()[:-500])
        with pytest.raises(DataError, match=r"cifar-10-binary.tar.gz is damaged \(it cannot be unpacked\)"):
            files.read("cifar10", tmp_path / "packed", download=False)

    def test_an_archive_without_the_last_batch(self, tmp_path):
        write_cifar(tmp_path, 1)
        (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").unlink()
        with tarfile.open(tmp_path / "some.tar.gz", "w:gz") as tar:
            tar.add(tmp_path / "cifar-10-batches-bin", "cifar-10-batches-bin")
        with pytest.raises(DataError, match=r"some.tar.gz is damaged \(it lacks test_batch.bin\)"):
            files.cifar(tmp_path / "some.tar.gz")

    @pytest.mark.parametrize("cut", [100, 3073, 4 * 3073])
    def test_a_short_batch(self, tmp_path, cut):
        write_cifar(tmp_path / "cifar10", 4)
        path = tmp_path / "cifar10" / "cifar-10-batches-bin" / "data_batch_3.bin"
        path.write_bytes(path.read_bytes()[:-cut])
        with pytest.raises(DataError, match=r"data_batch_3.bin is damaged \(data_batch_3.bin is [\d,]+ bytes long\)"):
            files.read("cifar10", tmp_path)

    def test_a_batch_is_missing_or_not_cifar(self, tmp_path):
        write_cifar(tmp_path / "cifar10", 4)
        path = tmp_path / "cifar10" / "cifar-10-batches-bin" / "data_batch_2.bin"
        path.write_bytes(b"\x0b" * 4 * 3073)
        with pytest.raises(DataError, match="it has a label 11 where there are 10 classes"):
            files.read("cifar10", tmp_path)
        path.unlink()
        with pytest.raises(DataError, match=r"data_batch_2.bin is missing: put it there"):
            files.read("cifar10", tmp_path)


class TestTiny:
    def test_labels_follow_the_names_and_grey_gets_three_channels(self, tmp_path):
        write_tiny(tmp_path / "tiny-imagenet-200")
        (x, y), (test_x, test_y) = files.read("tiny-imagenet", tmp_path)
        assert y.tolist() == [0, 0, 1, 1, 2, 2]
        assert x.shape == (6, 3, 64, 64)
        assert x.dtype == torch.uint8
        for number in range(3):
            near(x[2 * number], (40 + number,) * 3)
            near(x[2 * number + 1], (10 * number, 101, 200))
            near(test_x[number], (250, 5 * number, 60))  # in the order of the annotations
        assert torch.equal(x[0, 0], x[0, 1])
        assert test_y.tolist() == [0, 1, 2]

    def test_the_archive_holds_the_same(self, tmp_path):
        write_tiny(tmp_path / "tiny-imagenet-200")
        unpacked = files.read("tiny-imagenet", tmp_path)
        (tmp_path / "packed").mkdir()
        with zipfile.ZipFile(tmp_path / "packed" / "tiny-imagenet-200.zip", "w") as archive:
            for path in sorted(tmp_path.glob("tiny-imagenet-200/**/*"), reverse=True):
                archive.write(path, path.relative_to(tmp_path))
        packed = files.read("tiny-imagenet", tmp_path / "packed", download=False)
        for (x, y), (x2, y2) in zip(unpacked, packed, strict=True):
            assert torch.equal(x, x2)
            assert torch.equal(y, y2)

    def test_decoded_images_are_kept_and_made_anew_when_they_do_not_fit(self, tmp_path, monkeypatch):
        folder, cache = tmp_path / "tiny-imagenet-200", tmp_path / "tiny-imagenet-200.safetensors"
        write_tiny(folder)
        decoded = []
        decode = files._decode
        monkeypatch.setattr(files, "_decode", lambda tree, names: decoded.append(1) or decode(tree, names))

        def first_test_image():
            return files.read("tiny-imagenet", tmp_path)[1][0][0]

        near(first_test_image(), (250, 0, 60))
        assert cache.is_file()
        near(first_test_image(), (250, 0, 60))
        assert len(decoded) == 1
        cache.write_bytes(cache.read_bytes()[:-1000])
        near(first_test_image(), (250, 0, 60))
        assert len(decoded) == 2
        stripes = Image.fromarray(RNG.integers(0, 256, (64, 64, 3), np.uint8))
        stripes.save(folder / "val" / "images" / "val_2.JPEG")
        assert first_test_image().float().std() > 20
        assert len(decoded) == 3
        assert first_test_image().float().std() > 20
        assert len(decoded) == 3
        assert not (tmp_path / ".unfinished").exists()

    def test_a_folder_that_cannot_be_written_to_is_read_all_the_same(self, tmp_path):
        write_tiny(tmp_path / "tiny-imagenet-200")
        (tmp_path / ".lock").mkdir()  # so that it cannot be locked, for root either
        assert len(files.read("tiny-imagenet", tmp_path)[0][1]) == 6
        assert not (tmp_path / "tiny-imagenet-200.safetensors").exists()

    @pytest.mark.parametrize(
        ("harm", "sentence"),
        [
            (lambda f: (f / "wnids.txt").unlink(), r"wnids.txt is missing: put it there"),
            (
                lambda f: (f / "wnids.txt").write_text("n01\nn02\n"),
                r"class n03 of train/n03/images/n03_0.JPEG is not in",
            ),
            (lambda f: (f / "train/n02/images/n02_1.JPEG").unlink(), r"train/n02 holds 1 images, other classes 2"),
            (lambda f: (f / "val/images/val_1.JPEG").unlink(), r"it lacks val/images/val_1.JPEG"),
            (lambda f: (f / "val/val_annotations.txt").write_text(""), r"val_annotations.txt names no images"),
            (lambda f: (f / "val/images/val_1.JPEG").write_bytes(b"no"), r"val_1.JPEG is damaged \(it cannot be dec"),
            (lambda f: (f / "val/images/val_1.JPEG").write_bytes(jpeg(5, "L", 63)), r"it is 63×63 pixels, not 64×64"),
        ],
    )
    def test_damaged(self, tmp_path, harm, sentence):
        write_tiny(tmp_path / "tiny-imagenet-200")
        harm(tmp_path / "tiny-imagenet-200")
        with pytest.raises(DataError, match=sentence):
            files.read("tiny-imagenet", tmp_path)
        assert not (tmp_path / "tiny-imagenet-200.safetensors").exists()

    def test_a_damaged_archive(self, tmp_path):
        (tmp_path / "tiny-imagenet-200.zip").write_bytes(b"PK nothing")
        with pytest.raises(DataError, match=r"tiny-imagenet-200.zip is damaged \(it cannot be unpacked\)"):
            files.read("tiny-imagenet", tmp_path)


def near(image, colour):
    """One colour, up to what JPEG does to it."""
    torch.testing.assert_close(image.float().mean((1, 2)), torch.tensor(colour, dtype=torch.float32), atol=3, rtol=0)
