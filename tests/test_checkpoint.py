"""What is saved comes back bit for bit on a fresh original, and what cannot be loaded changes nothing."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import bmrs
from bmrs import checkpoint
from bmrs.structure import removed


class Convolutions(nn.Module):
    """Batch norm, a depthwise convolution, and a residual branch."""

    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, groups=width), nn.BatchNorm2d(width))
        self.inner = nn.Conv2d(width, 6, 1)
        self.last = nn.Conv2d(6, width, 1)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.deep(self.stem(x))
        x = x + self.last(torch.relu(self.inner(x)))
        return self.head(x.mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 12)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 4, 20, 0.0, batch_first=True), 2)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.layers(self.embed(x)))


class Tied(nn.Module):
    """One table for reading and writing."""

    def __init__(self):
        super().__init__()
        self.read = nn.Embedding(11, 8)
        self.a, self.b = nn.Linear(8, 10), nn.Linear(10, 8)
        self.write = nn.Linear(8, 11, bias=False)
        self.write.weight = self.read.weight

    def forward(self, x):
        x = self.read(x)
        return self.write(x + self.b(torch.tanh(self.a(x))))


class Buffers(nn.Module):
    """One that is saved, one that the model makes itself; both have a number per unit."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 9), nn.Linear(9, 2)
        self.register_buffer("scale", torch.ones(9))
        self.register_buffer("shift", torch.arange(9) / 3, persistent=False)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)) * self.scale + self.shift)


class Sizes(nn.Module):
    """Which has its sizes written down as a tuple, and adds another to it."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.sizes = nn.Linear(5, 12), nn.Linear(4, 2), (3, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)).reshape((len(x),) + self.sizes))  # noqa: RUF005


def sizes():
    return nn.Sequential(Sizes())


IMAGES, ROWS, TOKENS, WORDS = (
    torch.randn(3, 2, 6, 6),
    torch.randn(3, 5),
    torch.randn(3, 4, 5),
    torch.arange(12).view(3, 4) % 11,
)
CASES = [(Convolutions, IMAGES), (Transformer, TOKENS), (Tied, WORDS), (Buffers, ROWS), (sizes, ROWS)]


def trained(make, seed=0):
    """With numbers everywhere, also in running means."""
    torch.manual_seed(seed)
    model = make().eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.1)
    return model


def fewer(model, x, start=0):
    """A part of every structure gone, unequal ones."""
    listed = bmrs.structures(model, x)
    bmrs.remove(model, {s: range(min(1 + start + n % 2, s.units - 1)) for n, s in enumerate(listed)})
    return model


def state(model):
    """Everything about a network that a failed load might have touched."""
    tensors = {name: tensor.clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    attributes = {
        name: {key: repr(value) for key, value in vars(module).items() if not key.startswith("_")}
        for name, module in model.named_modules()
    }
    hooks = {name: len(module._forward_hooks) for name, module in model.named_modules()}
    return tensors, attributes, hooks, repr(model), removed(model)


def same(first, second):
    tensors, others = first[0], second[0]
    return (
        tensors.keys() == others.keys()
        and all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
        and first[1:] == second[1:]
    )


@torch.no_grad()
def equal(first, second, *inputs):
    return torch.equal(first(*inputs), second(*inputs))


class TestRoundTrip:
    @pytest.mark.parametrize(("make", "x"), CASES)
    def test_outputs_are_the_same_to_the_bit(self, make, x, tmp_path):
        model = fewer(trained(make), x)
        bmrs.save(model, tmp_path / "small.safetensors")
        fresh = trained(make, seed=1)
        assert bmrs.load(fresh, tmp_path / "small.safetensors") is fresh
        assert equal(fresh, model, x)
        assert same(state(fresh)[::3], state(model)[::3])  # attributes may be other objects with the same content

    @pytest.mark.parametrize(("make", "x"), CASES)
    def test_a_whole_network(self, make, x, tmp_path):
        model, fresh = trained(make), trained(make, seed=1)
        bmrs.save(model, tmp_path / "whole.safetensors")
        assert equal(bmrs.load(fresh, tmp_path / "whole.safetensors"), model, x)

    @pytest.mark.parametrize(("make", "x"), CASES)
    def test_after_several_rounds_and_once_more(self, make, x, tmp_path):
        path = tmp_path / "small.safetensors"
        model = fewer(fewer(trained(make), x), x, start=1)
        bmrs.save(model, path)
        again = fewer(bmrs.load(trained(make, seed=1), path), x)
        assert equal(again, fewer(model, x), x)
        bmrs.save(again, path)
        assert equal(bmrs.load(trained(make, seed=2), path), model, x)

    def test_a_new_process_computes_the_same(self, tmp_path):
        model = fewer(trained(Transformer), TOKENS)
        bmrs.save(model, tmp_path / "small.safetensors")
        script = (
            "import sys, torch, bmrs\n"
            "from tests.test_checkpoint import Transformer, digest\n"
            "print(digest(bmrs.load(Transformer().eval(), sys.argv[1])))"
        )
        found = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "small.safetensors")],
            cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert found.stdout.split() == [digest(model)]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_other_types_of_numbers(self, dtype, tmp_path):
        model = fewer(trained(Buffers), ROWS).to(dtype)
        bmrs.save(model, tmp_path / "small.safetensors")
        fresh = bmrs.load(trained(Buffers, seed=1).to(dtype), tmp_path / "small.safetensors")
        assert fresh.a.weight.dtype == dtype
        assert same(state(fresh), state(model))

    def test_channels_last(self, tmp_path):
        model = fewer(trained(Convolutions).to(memory_format=torch.channels_last), IMAGES)
        bmrs.save(model, tmp_path / "small.safetensors")
        fresh = trained(Convolutions, seed=1).to(memory_format=torch.channels_last)
        bmrs.load(fresh, tmp_path / "small.safetensors")
        assert fresh.stem[0].weight.is_contiguous(memory_format=torch.channels_last)
        assert equal(fresh, model, IMAGES)

    def test_rows_of_residual_branches(self, tmp_path):
        model = trained(Convolutions)
        listed = bmrs.structures(model, IMAGES)
        branch = next(s for s in listed.branches if "last" in s.name)
        bmrs.remove(model, {branch: [0, 5], listed[0]: [1]})
        bmrs.save(model, tmp_path / "small.safetensors")
        fresh = bmrs.load(trained(Convolutions, seed=1), tmp_path / "small.safetensors")
        assert fresh.last.out_channels < fresh.stem[0].out_channels
        assert equal(fresh, model, IMAGES)

    def test_a_tensor_that_is_part_of_another(self, tmp_path):
        class Part(nn.Linear):
            def __init__(self):
                super().__init__(3, 4)
                self.register_buffer("part", self.weight.data[:2])

        model, fresh = Part(), Part()
        bmrs.save(model, tmp_path / "small.safetensors")
        bmrs.load(fresh, tmp_path / "small.safetensors")
        assert torch.equal(fresh.part, model.part)
        assert torch.equal(fresh.weight, model.weight)

    def test_loading_twice_is_loading_once(self, tmp_path):
        model = fewer(trained(Convolutions), IMAGES)
        bmrs.save(model, tmp_path / "small.safetensors")
        fresh = bmrs.load(trained(Convolutions, seed=1), tmp_path / "small.safetensors")
        bmrs.load(fresh, tmp_path / "small.safetensors")
        assert equal(fresh, model, IMAGES)

    def test_training_goes_on(self, tmp_path):
        bmrs.save(fewer(trained(Transformer), TOKENS), tmp_path / "small.safetensors")
        model = bmrs.load(trained(Transformer, seed=1), tmp_path / "small.safetensors").train()
        optimizer = torch.optim.Adam(model.parameters())
        model(TOKENS).square().sum().backward()
        optimizer.step()
        assert all(parameter.grad is not None for parameter in model.parameters())

    def test_the_file_is_an_ordinary_one(self, tmp_path):
        model = fewer(trained(Tied), WORDS)
        bmrs.save(model, tmp_path / "small.safetensors")
        with safe_open(tmp_path / "small.safetensors", framework="pt") as file:
            assert set(file.keys()) == {"read.weight", "a.weight", "a.bias", "b.weight", "b.bias"}
            about = json.loads(file.metadata()["bmrs"])
        assert about["aliases"] == {"write.weight": "read.weight"}
        assert about["class"].endswith("Tied")


def digest(model):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        numbers = model(torch.randn(3, 4, 5, generator=generator)).flatten().tolist()
    return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()


class TestWrapped:
    def test_compiled(self, tmp_path):
        model = fewer(trained(Buffers), ROWS)
        bmrs.save(torch.compile(model, backend="eager"), tmp_path / "small.safetensors")
        fresh = trained(Buffers, seed=1)
        assert bmrs.load(torch.compile(fresh, backend="eager"), tmp_path / "small.safetensors") is fresh
        assert equal(fresh, model, ROWS)

    def test_distributed(self, tmp_path):
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            model = fewer(trained(Buffers), ROWS)
            bmrs.save(nn.parallel.DistributedDataParallel(model), tmp_path / "small.safetensors")
        finally:
            torch.distributed.destroy_process_group()
        assert equal(bmrs.load(trained(Buffers, seed=1), tmp_path / "small.safetensors"), model, ROWS)

    def test_data_parallel(self, tmp_path):
        model = fewer(trained(Buffers), ROWS)
        bmrs.save(nn.DataParallel(model), tmp_path / "small.safetensors")
        model.cpu()  # where there is a GPU, the wrapper moved it
        assert equal(bmrs.load(trained(Buffers, seed=1), tmp_path / "small.safetensors"), model, ROWS)


class TestGates:
    def gated(self, seed):
        model = trained(Convolutions, seed)
        listed = bmrs.structures(model, IMAGES)
        return model, listed, bmrs.NoiseBank.attach(model, listed)

    def half_pruned(self, path):
        model, listed, bank = self.gated(0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        (model.train()(IMAGES).square().mean() + bank.kl()).backward()
        optimizer.step()
        bmrs.remove(model.eval(), {structure: [0, 2] for structure in listed}, optimizer)
        bmrs.save(model, path)
        return model, listed

    def test_half_pruned_goes_on_with_its_gates(self, tmp_path):
        model, listed = self.half_pruned(tmp_path / "half.safetensors")
        fresh, fresh_listed, bank = self.gated(1)
        bmrs.load(fresh, tmp_path / "half.safetensors")
        assert bank.units_left() == model.bmrs_noise.units_left()
        assert equal(fresh, model, IMAGES)
        for network, structures in ((model, listed), (fresh, fresh_listed)):
            bmrs.remove(network, {structure: [1] for structure in structures})
            network.bmrs_noise.fold()
        assert equal(fresh, model, IMAGES)

    def test_without_gates_it_is_refused(self, tmp_path):
        self.half_pruned(tmp_path / "half.safetensors")
        unchanged(trained(Convolutions), tmp_path / "half.safetensors", "holds gates: attach them to the model first")

    def test_gates_on_modules(self, tmp_path):
        models = [trained(Buffers, seed) for seed in (0, 1)]
        for model in models:
            bmrs.NoiseBank.attach(model, {"a": 9})
        with torch.no_grad():
            models[0].bmrs_noise.mu -= 1
        bmrs.save(models[0], tmp_path / "gated.safetensors")
        assert equal(bmrs.load(models[1], tmp_path / "gated.safetensors"), models[0], ROWS)


def unchanged(model, path, match, error=ValueError):
    before = state(model)
    with pytest.raises(error, match=match) as caught:
        bmrs.load(model, path)
    assert same(state(model), before)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "small.safetensors"
    model = trained(Convolutions)
    listed = bmrs.structures(model, IMAGES)
    branch = next(s for s in listed.branches if "last" in s.name)
    bmrs.remove(model, {branch: [0], **{s: [0, 2] for s in listed}})
    bmrs.save(model, path)
    return path


def flipped(path, place, bits):
    content = bytearray(path.read_bytes())
    content[place] ^= bits
    made = path.with_name("flipped.safetensors")
    made.write_bytes(content)
    return made


@pytest.fixture(scope="module")
def whole():
    return trained(Convolutions, seed=1)


class TestDamaged:
    def test_cut_off_anywhere(self, saved, whole, tmp_path):
        content = saved.read_bytes()
        path = tmp_path / "cut.safetensors"
        for length in [*range(12), *range(12, len(content), len(content) // 40), len(content) - 1]:
            path.write_bytes(content[:length])
            unchanged(whole, path, "damaged")

    def test_more_than_there_should_be(self, saved, whole, tmp_path):
        path = tmp_path / "long.safetensors"
        path.write_bytes(saved.read_bytes() + b"more")
        unchanged(whole, path, "damaged")

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(data=st.data())
    def test_any_byte_of_the_tensors_changed(self, saved, whole, data):
        content = bytearray(saved.read_bytes())
        place = data.draw(st.integers(8 + int.from_bytes(content[:8], "little"), len(content) - 1))
        unchanged(whole, flipped(saved, place, data.draw(st.integers(1, 255))), "is damaged, since its checksum")

    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(data=st.data())
    def test_any_byte_of_the_header_changed(self, saved, data):
        """Refused, or loaded in full where the header still says the same: a tab for a space, a note for others."""
        header = 8 + int.from_bytes(saved.read_bytes()[:8], "little")
        path = flipped(saved, data.draw(st.integers(0, header - 1)), data.draw(st.integers(1, 255)))
        fresh, expected = trained(Convolutions, seed=1), trained(Convolutions, seed=1)
        try:
            bmrs.load(fresh, path)
        except ValueError:
            pass
        else:
            bmrs.load(expected, saved)
        assert same(state(fresh), state(expected))

    @pytest.mark.parametrize("content", [b"", b"tensors", b"{}", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0{}"])
    def test_not_such_a_file(self, content, whole, tmp_path):
        path = tmp_path / "other.safetensors"
        path.write_bytes(content)
        unchanged(whole, path, "damaged or no safetensors file|was not written by bmrs.save")

    def test_a_file_of_another_library(self, whole, tmp_path):
        save_file(whole.state_dict(), tmp_path / "other.safetensors")
        unchanged(whole, tmp_path / "other.safetensors", r"was not written by bmrs\.save: load it with")

    @pytest.mark.parametrize("path", ["nowhere.safetensors", "."])
    def test_no_file(self, path, whole, tmp_path):
        unchanged(whole, tmp_path / path, "there is no file", FileNotFoundError)

    @pytest.mark.parametrize("text", ["", "[]", "3", "{}", '{"version": 1}', "null"])
    def test_a_description_that_says_nothing(self, text, whole, tmp_path):
        save_file(whole.state_dict(), tmp_path / "odd.safetensors", metadata={"bmrs": text})
        unchanged(whole, tmp_path / "odd.safetensors", "damaged")

    def test_a_newer_format(self, whole, tmp_path, monkeypatch):
        monkeypatch.setattr(checkpoint, "_VERSION", 2)
        bmrs.save(whole, tmp_path / "new.safetensors")
        monkeypatch.undo()
        unchanged(whole, tmp_path / "new.safetensors", "has format 2, this version of bmrs reads 1: update bmrs")


class TestAnotherNetwork:
    def test_another_architecture(self, saved):
        unchanged(
            trained(Transformer),
            saved,
            r"was saved from another model \(.*Convolutions; it lacks 'embed.bias'.*: build the one it came from",
        )

    def test_another_width(self, saved):
        unchanged(trained(lambda: Convolutions(10)), saved, r"had shape \(8, .*this one has \(10, .*same settings")

    def test_another_architecture_without_anything_removed(self, tmp_path, whole):
        bmrs.save(trained(Buffers), tmp_path / "whole.safetensors")
        unchanged(whole, tmp_path / "whole.safetensors", r"was saved from another model \(.*Buffers; it lacks 'deep")

    def test_more_than_the_model_has(self, tmp_path):
        bmrs.save(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), tmp_path / "two.safetensors")
        unchanged(
            nn.Sequential(nn.Linear(3, 4)), tmp_path / "two.safetensors", r"it has '1.bias', '1.weight', which the"
        )

    def test_another_width_without_anything_removed(self, tmp_path):
        bmrs.save(nn.Linear(3, 4), tmp_path / "four.safetensors")
        unchanged(nn.Linear(3, 5), tmp_path / "four.safetensors", r"shape \(4,?.*this model's would have \(5")

    def test_a_model_that_was_reduced_in_another_way(self, saved, tmp_path):
        model = fewer(trained(Convolutions), IMAGES)
        unchanged(model, saved, "already been reduced, in another way: build the original again")
        bmrs.save(trained(Convolutions), tmp_path / "whole.safetensors")
        unchanged(model, tmp_path / "whole.safetensors", "already been reduced")

    def test_tied_or_not(self, tmp_path):
        class Apart(Tied):
            def __init__(self):
                super().__init__()
                self.write.weight = nn.Parameter(self.read.weight.detach().clone())

        bmrs.save(Tied(), tmp_path / "tied.safetensors")
        bmrs.save(Apart(), tmp_path / "apart.safetensors")
        unchanged(Apart(), tmp_path / "tied.safetensors", "it lacks 'write.weight'")
        unchanged(Tied(), tmp_path / "apart.safetensors", "it has 'write.weight', which the model does not")

    def test_a_model_without_numbers(self, tmp_path, whole):
        with torch.device("meta"):
            empty = Buffers()
        with pytest.raises(ValueError, match="model is on the meta device"):
            bmrs.save(empty, tmp_path / "empty.safetensors")
        bmrs.save(Buffers(), tmp_path / "whole.safetensors")
        with pytest.raises(ValueError, match="model is on the meta device"):
            bmrs.load(empty, tmp_path / "whole.safetensors")


class TestWriting:
    def test_a_failure_half_way_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "small.safetensors"
        bmrs.save(trained(Buffers), path)
        before = path.read_bytes()

        def fails(tensors, name, metadata):
            Path(name).write_bytes(before[:100])
            raise OSError("no space left on device")

        monkeypatch.setattr(checkpoint, "save_file", fails)
        with pytest.raises(OSError, match="no space left"):
            bmrs.save(fewer(trained(Buffers), ROWS), path)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]

    def test_an_old_file_is_replaced(self, tmp_path):
        path = tmp_path / "small.safetensors"
        bmrs.save(trained(Convolutions), path)
        bmrs.save(trained(Buffers), str(path))
        assert equal(bmrs.load(trained(Buffers, seed=1), str(path)), trained(Buffers), ROWS)
        assert list(tmp_path.iterdir()) == [path]

    def test_a_folder_that_is_not_there(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"there is no folder .*: make it first"):
            bmrs.save(trained(Buffers), tmp_path / "nowhere" / "small.safetensors")

    def test_saving_changes_nothing(self, tmp_path):
        model = fewer(trained(Convolutions), IMAGES)
        before = state(model)
        bmrs.save(model, tmp_path / "small.safetensors")
        assert same(state(model), before)
