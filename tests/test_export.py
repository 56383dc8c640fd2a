"""What is exported computes what the reduced network computes, at any batch size, and says nothing on the way."""

import logging
import sys
import warnings

import pytest
import torch
from torch import nn

import bmrs

BATCHES = (1, 3, 7)


def images(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Its attention has a forward of its own once heads are gone."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 12)
        self.attention = nn.MultiheadAttention(12, 4, batch_first=True)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        x = self.embed(x)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


class TwoInputs(nn.Module):
    """Takes two tensors and a number, gives a dict."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.out = nn.Linear(4, 8), nn.Linear(5, 8), nn.Linear(8, 2)

    def forward(self, a, b, scale=1.0):
        hidden = torch.relu(self.left(a) + self.right(b)) * scale
        return {"logits": self.out(hidden), "input": a + 1}


class Many(nn.Module):
    """Takes any number of tensors."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, *inputs):
        return self.b(torch.relu(self.a(sum(inputs))))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(8, 3),
    )  # fmt: skip


def reduced(model, example):
    """With a unit or two of every structure gone."""
    model.eval()
    listed = bmrs.structures(model, example)
    assert len(listed)
    return bmrs.remove(model, {structure: [1] if structure.units < 6 else [0, 3] for structure in listed})


def runtime(path):
    return pytest.importorskip("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])


def outputs(path, *tensors):
    session = runtime(path)
    names = [given.name for given in session.get_inputs()]
    return session.run(None, {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True)})


def close(found, expected):
    return torch.allclose(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def onnx():
    pytest.importorskip("onnxscript")


class TestOnnx:
    @pytest.mark.parametrize(("make", "shape"), [(convolutions, (2, 6, 6)), (Attention, (5, 6))])
    @torch.no_grad()
    def test_any_batch_size_gives_the_outputs_of_the_network(self, make, shape, tmp_path):
        model = reduced(make(), images(2, *shape))
        path = bmrs.export_onnx(model, images(1, *shape), tmp_path / "small.onnx")
        for size in BATCHES:
            x = images(size, *shape)
            assert close(outputs(path, x)[0], model(x))

    @torch.no_grad()
    def test_keyword_inputs_and_dict_outputs(self, tmp_path):
        example = {"a": images(2, 4), "b": images(2, 5)}
        model = reduced(TwoInputs(), example)
        path = bmrs.export_onnx(model, example, tmp_path / "small.onnx")
        assert [given.name for given in runtime(path).get_inputs()] == ["a", "b"]
        for size in BATCHES:
            a, b = images(size, 4), images(size, 5)
            expected = model(a=a, b=b)
            logits, given = outputs(path, a, b)
            assert close(logits, expected["logits"])
            assert close(given, expected["input"])

    @torch.no_grad()
    def test_tuple_inputs(self, tmp_path):
        model = reduced(TwoInputs(), (images(2, 4), images(2, 5), 0.5))
        path = bmrs.export_onnx(model, (images(1, 4), images(1, 5), 0.5), tmp_path / "small.onnx")
        for size in BATCHES:
            a, b = images(size, 4), images(size, 5)
            assert close(outputs(path, a, b)[0], model(a, b, 0.5)["logits"])

    @torch.no_grad()
    def test_the_batch_size_can_be_fixed(self, tmp_path):
        model = reduced(convolutions(), images(2, 2, 6, 6))
        path = bmrs.export_onnx(model, images(3, 2, 6, 6), tmp_path / "small.onnx", dynamic_batch=False)
        assert runtime(path).get_inputs()[0].shape == [3, 2, 6, 6]

    def test_nothing_is_said_and_nothing_else_written(self, tmp_path, capfd, caplog):
        model = reduced(Attention(), images(2, 5, 6))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            bmrs.export_onnx(model, images(2, 5, 6), str(tmp_path / "small.onnx"))
        assert not said
        assert capfd.readouterr() == ("", "")
        assert not [record for record in caplog.records if record.levelno >= logging.INFO]
        assert logging.root.manager.disable == logging.NOTSET
        assert [path.name for path in tmp_path.iterdir()] == ["small.onnx"]

    def test_without_the_extra_the_error_says_how_to_install_it(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "onnxscript", None)
        with pytest.raises(ImportError, match=r"needs 'onnxscript': install it with  pip install 'bmrs\[onnx\]'$"):
            bmrs.export_onnx(convolutions(), images(2, 2, 6, 6), tmp_path / "small.onnx")

    def test_a_folder_that_is_not_there(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"no folder .*elsewhere to export to: make it first"):
            bmrs.export_onnx(convolutions(), images(2, 2, 6, 6), tmp_path / "elsewhere" / "small.onnx")

    def test_an_operation_onnx_does_not_have(self, tmp_path):
        class Odd(nn.Module):
            def forward(self, x):
                return torch.special.bessel_j0(x)

        with pytest.raises(RuntimeError, match=r"cannot be exported to ONNX \(.*bessel_j0.*\): replace that operation"):
            bmrs.export_onnx(Odd(), images(2, 4), tmp_path / "small.onnx")
        assert not list(tmp_path.iterdir())


class TestProgram:
    @pytest.mark.parametrize("batch", [1, 2])
    @pytest.mark.parametrize(("make", "shape"), [(convolutions, (2, 6, 6)), (Attention, (5, 6)), (Many, (4,))])
    @torch.no_grad()
    def test_any_batch_size_gives_the_outputs_of_the_network(self, make, shape, batch):
        model = reduced(make(), images(2, *shape))
        program = bmrs.export_program(model, images(batch, *shape)).module()
        for size in BATCHES:
            x = images(size, *shape)
            assert torch.allclose(program(x), model(x), atol=1e-6)

    @torch.no_grad()
    def test_a_network_that_is_an_attention_itself(self):
        x = images(2, 5, 12)
        inputs = {"query": x, "key": x, "value": x, "need_weights": False}
        model = reduced(nn.MultiheadAttention(12, 4, batch_first=True), inputs)
        program = bmrs.export_program(model, inputs).module()
        inputs |= dict.fromkeys(("query", "key", "value"), images(7, 5, 12))
        assert torch.allclose(program(**inputs)[0], model(**inputs)[0], atol=1e-6)

    @torch.no_grad()
    def test_a_fused_transformer_layer_is_exported_by_its_parts(self):
        model = nn.TransformerEncoderLayer(12, 4, 20, batch_first=True).eval()
        program = bmrs.export_program(model, images(2, 5, 12))
        assert "_transformer_encoder_layer_fwd" not in str(program.graph)

    def test_dict_outputs_keep_their_names(self):
        example = {"a": images(2, 4), "b": images(2, 5)}
        found = bmrs.export_program(reduced(TwoInputs(), example), example).module()(**example)
        assert list(found) == ["logits", "input"]

    def test_the_network_keeps_its_mode(self):
        model = convolutions().train()
        model[1].eval()
        before = [module.training for module in model.modules()]
        bmrs.export_program(model, images(2, 2, 6, 6))
        assert [module.training for module in model.modules()] == before

    def test_inputs_that_do_not_fit(self):
        with pytest.raises(
            ValueError, match=r"example_inputs do not fit the model, which fails on them \(RuntimeError"
        ):
            bmrs.export_program(convolutions(), images(2, 5, 6, 6))

    def test_a_network_that_fixes_its_batch_size(self):
        class Fixed(nn.Module):
            def forward(self, x):
                return x.reshape(4, 2, 3)

        with pytest.raises(RuntimeError, match=r"cannot be exported to torch.export .* with dynamic_batch=False.$"):
            bmrs.export_program(Fixed(), images(4, 6))
        program = bmrs.export_program(Fixed(), images(4, 6), dynamic_batch=False)
        assert program.module()(images(4, 6)).shape == (4, 2, 3)

    def test_a_network_that_looks_at_numbers(self):
        class Looks(nn.Module):
            def forward(self, x):
                return x if x.sum() > 0 else -x

        with pytest.raises(RuntimeError) as caught:
            bmrs.export_program(Looks(), images(2, 4))
        assert "\n" not in str(caught.value)
