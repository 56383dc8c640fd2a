"""Removal on real kinds of networks, judged against the same network with the units silenced."""

import contextlib
import copy
import pickle
import re
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import bmrs
from benchmarks.architectures import ARCHITECTURES
from bmrs.structure.capture import no_fast_path


class Block(nn.Module):
    """Convolution, batch norm, depthwise convolution, squeeze-and-excitation, and a residual sum."""

    def __init__(self, width, inner):
        super().__init__()
        self.expand = nn.Conv2d(width, inner, 1)
        self.norm = nn.BatchNorm2d(inner)
        self.depthwise = nn.Conv2d(inner, inner, 3, padding=1, groups=inner)
        self.squeeze = nn.Linear(inner, 6)
        self.excite = nn.Linear(6, inner)
        self.project = nn.Conv2d(inner, width, 1)

    def forward(self, x):
        y = F.silu(self.depthwise(F.relu(self.norm(self.expand(x)))))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3))))))
        return x + self.project(y * gate[:, :, None, None])


@dataclass
class Answer:
    logits: torch.Tensor
    features: dict


torch.utils._pytree.register_dataclass(Answer)


class TwoInputs(nn.Module):
    """An image and a sentence, by keyword; a data class comes back."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block = Block(8, 20)
        self.words = nn.Embedding(30, 16)
        self.layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        self.head = nn.Sequential(nn.Linear(24, 18), nn.GELU(), nn.Linear(18, 5))

    def forward(self, image, tokens, *, scale=None):
        seen = self.block(self.stem(image)).mean((2, 3))
        read = self.layer(self.words(tokens)).mean(1)
        logits = self.head(torch.cat([seen, read], 1))
        return Answer(logits if scale is None else logits * scale, {"read": read})


def two_inputs(batch=2, length=7, side=9):
    generator = torch.Generator().manual_seed(batch * length)
    return {
        "image": torch.randn(batch, 3, side, side, generator=generator, dtype=torch.float64),
        "tokens": torch.randint(30, (batch, length), generator=generator),
        "scale": torch.full((batch, 1), 1.5, dtype=torch.float64),
    }


def network(seed=0):
    torch.manual_seed(seed)
    model = TwoInputs().double().eval()
    with torch.no_grad():
        model.block.norm.running_mean.normal_()
        model.block.norm.running_var.uniform_(0.5, 2.0)
    return model


def some(structures, share=0.4):
    generator = torch.Generator().manual_seed(1)
    return {
        s: torch.randperm(s.units, generator=generator)[: min(s.units - 1, max(1, round(share * s.units)))].tolist()
        for s in structures
    }


@torch.no_grad()
def silenced(model, chosen):
    """A copy whose weights do not read the chosen units."""
    quiet = copy.deepcopy(model)
    tensors = dict(quiet.named_parameters(remove_duplicate=False))
    for structure, units in chosen.items():
        for name, dim in structure.consumers:
            indices = structure.indices((name, dim))
            tensors[name].index_fill_(dim, torch.tensor([i for unit in units for i in indices[unit]]), 0.0)
    return quiet


def reduced(share=0.4, model=None):
    """A network with units silenced, and the same with the units removed."""
    model = model or network()
    structures = bmrs.structures(model, two_inputs())
    chosen = some(structures, share)
    quiet = silenced(model, chosen)
    bmrs.remove(model, chosen)
    return quiet, model, structures


def logits(model, **sizes):
    with torch.no_grad():
        return model(**two_inputs(**sizes)).logits


@contextlib.contextmanager
def plain_kernels():
    """Some machines announce instructions for 16-bit types that they do not let programs use."""
    enabled = torch.backends.mkldnn.set_flags(_enabled=False)[0]
    try:
        with no_fast_path():
            yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=enabled)


def test_the_listing_names_kinds_units_and_costs():
    structures = bmrs.structures(network(), two_inputs())
    listed = {s.name: (s.kind, s.units, s.params_per_unit) for s in structures}
    assert listed == {
        "stem": ("filter", 8, 3 * 9 + 1 + 20 + 20 + 1 + 18),
        # 1×1 convolution and batch norm, depthwise, both sides of the excitation, projection
        "block.expand": ("filter", 20, 8 + 1 + 2 + 9 + 1 + 6 + 6 + 1 + 8),
        "block.squeeze": ("neuron", 6, 20 + 1 + 20),
        "layer.self_attn heads": ("head", 4, 3 * 4 * 17 + 4 * 16),
        "layer.linear1": ("neuron", 24, 16 + 1 + 16),
        "head.0": ("neuron", 18, 24 + 1 + 5),
    }
    assert structures["head.0"].macs_per_unit == 2 * (24 + 5)
    assert ("block.norm.running_var", 0) in structures["block.expand"].places
    assert "layer_norm over it in layer.norm1" in structures.frozen
    assert 0 < structures.share < 1
    assert "layer_norm over it" in structures.table()


def test_removal_is_exact_for_other_batch_sizes_lengths_and_images():
    quiet, model, structures = reduced()
    assert all(s.status == "exact" for s in structures)
    for sizes in ({}, {"batch": 1}, {"batch": 5, "length": 3}, {"batch": 4, "length": 16, "side": 12}):
        torch.testing.assert_close(logits(model, **sizes), logits(quiet, **sizes), rtol=0, atol=1e-12)
    assert (logits(model) - logits(network())).abs().max() > 1e-2


def test_it_is_exact_while_training_too():
    quiet, model, _ = reduced()
    for each in (quiet, model):
        each.train()
        each(**two_inputs(batch=6)).logits.square().sum().backward()
    torch.testing.assert_close(logits(model), logits(quiet), rtol=0, atol=1e-12)
    left = bmrs.structure.removed(model).kept["block.norm.running_mean"][0]
    torch.testing.assert_close(model.block.norm.running_mean, quiet.block.norm.running_mean[left])
    torch.testing.assert_close(model.block.norm.weight.grad, quiet.block.norm.weight.grad[left])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_after_a_change_of_type_it_agrees_within_rounding(dtype, tolerance):
    quiet, model, _ = reduced()
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in two_inputs().items()}
    with torch.no_grad(), plain_kernels():
        want, got = (each.to(dtype)(**inputs).logits.float() for each in (quiet, model))
    assert (got - want).abs().max() < tolerance * want.abs().max()


def test_a_network_of_another_type_can_be_reduced():
    model = network().bfloat16()
    inputs = {k: v.bfloat16() if v.is_floating_point() else v for k, v in two_inputs().items()}
    structures = bmrs.structures(model, inputs)
    chosen = some(structures)
    quiet = silenced(model, chosen)
    bmrs.remove(model, chosen)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with torch.no_grad(), plain_kernels():
        torch.testing.assert_close(model(**inputs).logits, quiet(**inputs).logits, rtol=0.05, atol=0.02)


def test_compiled_networks_agree():
    quiet, model, _ = reduced()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        torch.compiler.reset()
        compiled = torch.compile(model, backend="aot_eager")
        for sizes in ({}, {"batch": 5}):
            torch.testing.assert_close(logits(compiled, **sizes), logits(quiet, **sizes), rtol=0, atol=1e-12)


def test_tensors_stay_the_same_objects():
    model = network()
    model.stem.weight.data = model.stem.weight.data.contiguous(memory_format=torch.channels_last)
    model.head[0].weight.requires_grad_(False)
    model.head.tied = model.layer.linear1.weight
    objects = dict(model.named_parameters(remove_duplicate=False))
    held = model.block.norm.running_var
    _, model, _ = reduced(model=model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert parameter is objects[name]
    assert model.block.norm.running_var is held
    assert model.head.tied is model.layer.linear1.weight
    assert not model.head[0].weight.requires_grad
    assert model.stem.weight.is_contiguous(memory_format=torch.channels_last)
    assert not model.stem.weight.is_contiguous()
    assert model.stem.weight.dtype == torch.float64
    assert (model.block.depthwise.groups, model.block.expand.out_channels) == (12, 12)


def test_a_decoder_with_a_mask_can_be_reduced():
    """torch's own decoder looks into the mask it is given."""

    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Transformer(16, 4, 1, 1, 20, dropout=0.1, batch_first=True)

        def forward(self, source, target):
            mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1]).to(source.dtype)
            return self.layers(source, target, tgt_mask=mask)

    torch.manual_seed(0)
    model = Translator().double().eval()
    inputs = torch.randn(2, 6, 16, dtype=torch.float64), torch.randn(2, 4, 16, dtype=torch.float64)
    structures = bmrs.structures(model, inputs)
    assert sorted(s.kind for s in structures) == ["head", "head", "head", "neuron", "neuron"]
    chosen = some(structures)
    quiet = silenced(model, chosen)
    bmrs.remove(model, chosen)
    with torch.no_grad():
        torch.testing.assert_close(model(*inputs), quiet(*inputs), rtol=0, atol=1e-12)


def test_a_network_with_everything_frozen_can_be_reduced():
    quiet, model, _ = reduced(model=network().requires_grad_(False))
    torch.testing.assert_close(logits(model), logits(quiet), rtol=0, atol=1e-12)


def test_gradients_and_optimizer_state_shrink_along():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    alive = model(**two_inputs()).logits.square().sum()
    alive.backward(retain_graph=True)
    optimizer.step()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    structures = bmrs.structures(model, two_inputs())
    bmrs.remove(model, some(structures), optimizer)
    kept = bmrs.structure.removed(model).kept
    for name, parameter in model.named_parameters():
        want = before[name]
        for dim, indices in kept.get(name, {}).items():
            want = want[(slice(None),) * dim + (indices,)]
        assert torch.equal(parameter.grad, want)
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
    # The graph of the old shapes is still alive; the next step does not mind.
    optimizer.zero_grad()
    model(**two_inputs()).logits.square().sum().backward()
    optimizer.step()


def test_removing_in_rounds_equals_removing_at_once():
    at_once, in_rounds = network(), network()
    first, second = (bmrs.structures(model, two_inputs()) for model in (at_once, in_rounds))
    bmrs.remove(at_once, {first["head.0"]: [0, 3, 7, 17], first["layer.self_attn heads"]: [1, 2]})
    bmrs.remove(in_rounds, {second["head.0"]: [3, 17]})
    bmrs.remove(in_rounds, {second["head.0"]: [0, 6], second["layer.self_attn heads"]: [2]})
    bmrs.remove(in_rounds, {second["layer.self_attn heads"]: [1]})
    assert second["head.0"].kept == first["head.0"].kept
    assert torch.equal(logits(at_once), logits(in_rounds))
    again = bmrs.structures(in_rounds, two_inputs())  # listed anew, on the smaller network
    assert again["head.0"].units == 14
    bmrs.remove(in_rounds, {again["head.0"]: [0], again["layer.self_attn heads"]: [0]})
    bmrs.remove(at_once, {first["head.0"]: [0], first["layer.self_attn heads"]: [0]})
    assert torch.equal(logits(at_once), logits(in_rounds))
    assert bmrs.structure.removed(in_rounds).kept == bmrs.structure.removed(at_once).kept


def test_verifying_leaves_no_trace():
    model = network()
    model.stem.weight.grad = torch.ones_like(model.stem.weight)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    modes = [module.training for module in model.train().modules()]
    model.block.eval()
    modes = [module.training for module in model.modules()]
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    bmrs.structures(model, two_inputs()).verify()
    assert all(torch.equal(a, state[name]) for name, a in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert torch.equal(model.stem.weight.grad, torch.ones_like(model.stem.weight))
    assert torch.get_default_dtype() == torch.float32


class TestWhatCannotBeProved:
    class Divides(nn.Module):
        """Its output depends on its width, which no graph shows."""

        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 10), nn.Linear(10, 3)
            self.c, self.d = nn.Linear(3, 8), nn.Linear(8, 2)

        def forward(self, x):
            h = torch.tanh(self.a(x))
            return self.d(torch.relu(self.c(self.b(h) / h.shape[-1] ** 0.5)))

    def test_is_left_alone_and_reported(self):
        model = self.Divides()
        structures = bmrs.structures(model, torch.randn(3, 4))
        structures.verify()
        assert structures["a"].status == "kept: the smaller network computes something else"
        assert structures["c"].status == "exact"
        state = copy.deepcopy(model.state_dict())
        with pytest.warns(UserWarning, match="'a' is left alone: kept: the smaller network computes something else"):
            bmrs.remove(model, {structures["a"]: [0], structures["c"]: [1, 2]})
        assert model.c.out_features == 6
        assert model.a.weight.shape == state["a.weight"].shape

    def test_gets_no_gates(self):
        model = self.Divides()
        with pytest.warns(UserWarning, match="'a' gets no gates"):
            bank = bmrs.NoiseBank.attach(model, bmrs.structures(model, torch.randn(3, 4)))
        assert list(bank.layers) == ["b", "c"]

    def test_nothing_is_proved_by_an_output_that_does_not_depend_on_it(self):
        class Unused(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b, self.c = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(4, 3)

            def forward(self, x):
                return self.c(x) + torch.relu(self.b(torch.relu(self.a(x))).detach() * 0)

        structures = bmrs.structures(Unused(), torch.randn(3, 4)).verify()
        assert structures["a"].status == "kept: the output does not depend on it, so nothing is proved"

    def test_an_unknown_operation_freezes_what_it_touches(self):
        class Sorts(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b, self.c = nn.Linear(4, 10), nn.Linear(10, 6), nn.Linear(6, 3)

            def forward(self, x):
                return self.c(torch.relu(self.b(torch.cummax(self.a(x), -1).values)))

        structures = bmrs.structures(Sorts(), torch.randn(2, 4))
        assert [s.name for s in structures] == ["b"]
        assert "cummax" in structures.findings.unknown
        assert any("'cummax' has no rule" in reason for reason in structures.frozen)


def linear_pair():
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


class ByValue(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        return self.a(x) if x.sum().item() > 0 else x


def test_bad_input_gives_one_sentence():
    model = linear_pair()
    structures = bmrs.structures(model, torch.randn(2, 4))
    other = bmrs.structures(linear_pair(), torch.randn(2, 4))
    cases = [
        (lambda: bmrs.structures(model, torch.randn(2, 5)), ValueError, "example_inputs do not fit the model"),
        (lambda: bmrs.structures(model, {"y": torch.randn(2, 4)}), ValueError, "example_inputs do not fit the model"),
        (lambda: bmrs.structures(ByValue(), torch.ones(2, 4)), RuntimeError, "if x.sum().item() > 0 else x'"),
        (lambda: bmrs.remove(model, {structures[0]: range(6)}), ValueError, "would remove all 6 units: one must stay"),
        (lambda: bmrs.remove(model, {structures[0]: [6]}), ValueError, "must be between 0 and 5"),
        (lambda: bmrs.remove(model, {structures[0]: [-1]}), ValueError, "must be between 0 and 5"),
        (lambda: bmrs.remove(model, {other[0]: [1]}), ValueError, "belongs to another model"),
        (lambda: bmrs.remove(model, {"0": [1]}), TypeError, "units must map structures to indices"),
        (
            lambda: bmrs.remove(model, {structures[0]: [1]}, torch.optim.LBFGS(model.parameters())),
            ValueError,
            "which LBFGS does not",
        ),
        (lambda: structures["x"], KeyError, "no structure is called 'x'"),
        (lambda: bmrs.NoiseBank.attach(model, []), ValueError, "holds no structure that can have gates"),
    ]
    for call, error, sentence in cases:
        with pytest.raises(error, match=re.escape(sentence)):
            call()
    assert structures[0].units == 6


def test_a_network_without_anything_removable_says_so():
    structures = bmrs.structures(nn.Sequential(nn.Linear(4, 2)), torch.randn(3, 4))
    assert len(structures) == 0
    assert structures.share == 0
    assert "nothing can be removed" in structures.table()
    assert structures.verify() is structures


class TestRealArchitectures:
    """Small networks as Hugging Face defines them, 40 % of every structure removed."""

    @pytest.mark.parametrize(
        ("name", "kinds"),
        [
            ("bert", {"head": 2, "neuron": 3}),
            ("gpt2", {"head": 2, "neuron": 2}),
            ("llama", {"group": 2, "neuron": 2}),
            ("phi3", {"group": 2, "neuron": 2}),
            ("t5", {"head": 3, "neuron": 4}),
            ("whisper", None),
            ("swin", None),
            ("clip", None),
        ],
    )
    def test_are_exact(self, name, kinds):
        model, inputs = ARCHITECTURES[f"transformers/{name}"].build()
        model.double()
        inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        structures = bmrs.structures(model, inputs)
        if kinds is not None:
            assert {kind: sum(s.kind == kind for s in structures) for kind in kinds} == kinds
        chosen = some(structures)
        quiet = silenced(model, chosen)
        names = {name for name, _ in model.named_parameters()}
        bmrs.remove(model, chosen)
        assert all(s.status == "exact" for s in structures)
        assert {name for name, _ in model.named_parameters()} == names  # tied tensors stay tied
        with torch.no_grad():
            want, got = (torch.utils._pytree.tree_leaves(each(**inputs)) for each in (quiet, model))
        for a, b in zip(want, got, strict=True):
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(b, a, rtol=1e-8, atol=1e-8)

    def test_a_decoder_with_its_cache_goes_on_generating(self):
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=50)).eval()
        tokens = torch.randint(50, (2, 7))
        structures = bmrs.structures(model, tokens)
        assert model.config.use_cache
        chosen = some(structures)
        quiet = silenced(model, chosen)
        bmrs.remove(model, chosen)
        mask = torch.ones_like(tokens)
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
        assert torch.equal(model.generate(tokens, **options), quiet.generate(tokens, **options))

    def test_a_resnet_50_shows_no_trace_of_it(self, tmp_path):
        from transformers import ResNetConfig, ResNetForImageClassification

        torch.manual_seed(0)
        model = ResNetForImageClassification(
            ResNetConfig(depths=[3, 4, 6, 3], hidden_sizes=[256, 512, 1024, 2048])
        ).eval()
        x = torch.randn(2, 3, 64, 64)
        structures = bmrs.structures(model, x)
        assert len(structures) == 37
        before = bmrs.cost.parameters(model)
        bmrs.remove(model, some(structures))
        assert bmrs.cost.parameters(model) < 0.45 * before
        with torch.no_grad():
            want = model(x).logits
        text = repr(model)
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv2d):
                assert module.weight.shape[:2] == (module.out_channels, module.in_channels)
                assert f"Conv2d({module.in_channels}, {module.out_channels}" in text
            assert type(module).__module__.startswith(("torch.", "transformers.")), name
            assert not module._forward_hooks
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with torch.no_grad():
                assert torch.equal(again(x).logits, want)
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            wrapped = nn.parallel.DistributedDataParallel(model.train())
            wrapped(x).logits.sum().backward()
        finally:
            dist.destroy_process_group()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
