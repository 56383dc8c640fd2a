"""``MultiheadForward`` is the module's own forward on a whole attention, and exact on one with fewer heads."""

import copy
import pickle
from itertools import product

import pytest
import torch
from torch import nn

import bmrs
from bmrs.structure.multihead import MultiheadForward

WIDTH, HEADS, BATCH, LONG, SHORT = 12, 4, 2, 5, 4


def attention(**options):
    """With numbers also where it starts with zeros."""
    module = nn.MultiheadAttention(WIDTH, HEADS, **options).double().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return module


def arranged(module, x, batched=True):
    """A batch [B, L, width] as the module wants it."""
    if not batched:
        return x[0]
    return x if module.batch_first else x.transpose(0, 1)


def inputs(module, batched=True):
    """Query, key and value; the last two of another length, and of another width where the module has one."""
    sizes = ((LONG, WIDTH), (SHORT, module.kdim), (SHORT, module.vdim))
    return [arranged(module, torch.randn(BATCH, *size, dtype=torch.float64), batched) for size in sizes]


def masks(batched=True):
    """Every kind of attention mask and padding mask, by name. No row is masked altogether."""
    barred = torch.rand(BATCH * HEADS, LONG, SHORT) < 0.4
    padded = torch.rand(BATCH, SHORT) < 0.3
    barred[..., 0] = padded[:, 0] = False
    many = barred if batched else barred[:HEADS]
    few = padded if batched else padded[0]
    added = torch.randn(many.shape, dtype=torch.float64)
    attn = {"none": None, "2-D bool": many[0], "3-D bool": many, "2-D float": added[0], "3-D float": added}
    return attn, {"none": None, "bool": few, "float": torch.randn(few.shape, dtype=torch.float64)}


def same(first, second):
    return all(
        (a is None and b is None) or torch.allclose(a, b, rtol=0, atol=1e-12)
        for a, b in zip(first, second, strict=True)
    )


def agrees(module, arguments, **options):
    return same(MultiheadForward(module)(*arguments, **options), module(*arguments, **options))


OPTIONS = [
    {},
    {"bias": False},
    {"kdim": 7, "vdim": 9},
    {"kdim": 7, "bias": False},
    {"add_bias_kv": True},
    {"add_zero_attn": True},
    {"add_bias_kv": True, "add_zero_attn": True, "kdim": 7},
]


class TestWhole:
    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("batched", [True, False])
    def test_it_equals_the_module(self, options, batch_first, batched):
        module = attention(batch_first=batch_first, **options)
        arguments = inputs(module, batched)
        attn, padding = masks(batched)
        for (kind, mask), (other, pad), need in product(attn.items(), padding.items(), (True, False)):
            if kind != "none" and other != "none" and ("bool" in kind) != ("bool" in other):
                continue  # masks of two kinds are deprecated
            assert agrees(module, arguments, attn_mask=mask, key_padding_mask=pad, need_weights=need), (
                kind,
                other,
                need,
            )

    @pytest.mark.parametrize("batched", [True, False])
    def test_weights_of_single_heads(self, batched):
        module = attention(batch_first=True)
        assert agrees(module, inputs(module, batched), average_attn_weights=False)
        _, weights = MultiheadForward(module)(*inputs(module, batched), average_attn_weights=False)
        assert weights.shape[-3:] == (HEADS, LONG, SHORT)

    def test_a_causal_mask(self):
        module = attention(batch_first=True)
        x = torch.randn(BATCH, LONG, WIDTH, dtype=torch.float64)
        mask = nn.Transformer.generate_square_subsequent_mask(LONG, dtype=torch.float64)
        for need in (True, False):
            assert agrees(module, (x, x, x), attn_mask=mask, is_causal=True, need_weights=need)
            assert agrees(module, (x, x, x), attn_mask=mask.bool(), is_causal=True, need_weights=need)
        for call in (module, MultiheadForward(module)):
            with pytest.raises(RuntimeError, match="attn_mask"):
                call(x, x, x, is_causal=True)

    def test_gradients(self):
        module = attention(batch_first=True)
        arguments = inputs(module)
        gradients = []
        for call in (module, MultiheadForward(module)):
            module.zero_grad()
            call(*arguments)[0].square().sum().backward()
            gradients.append([parameter.grad.clone() for parameter in module.parameters()])
        assert same(*gradients)

    def test_dropout_only_as_it_trains(self):
        module = attention(batch_first=True, dropout=0.5)
        arguments = inputs(module)
        assert agrees(module, arguments)
        module.train()
        for need in (True, False):
            first, second = (MultiheadForward(module)(*arguments, need_weights=need)[0] for _ in range(2))
            assert not torch.allclose(first, second)


class Attending(nn.Module):
    """One attention, called as its user likes."""

    def __init__(self, cross=False, **options):
        super().__init__()
        self.attention, self.cross = attention(**options), cross

    def forward(self, query, key=None, value=None, **options):
        if not self.cross:
            key = value = query
        return self.attention(query, key, value, **{"need_weights": False, **options})[0]


def encoder_layer(**options):
    return nn.TransformerEncoderLayer(WIDTH, HEADS, 7, dropout=0.0, batch_first=True, dtype=torch.float64, **options)


def encoder():
    return nn.TransformerEncoder(encoder_layer(), 2)


def decoder_layer():
    return nn.TransformerDecoderLayer(WIDTH, HEADS, 7, dropout=0.0, batch_first=True, dtype=torch.float64)


def sequence(length=LONG, batch=BATCH):
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


def without_heads(model, example, gone=(1,)):
    """The network with heads masked, and the one without them; gone from every attention."""
    model.eval()
    masked, reduced = copy.deepcopy(model), copy.deepcopy(model)
    structures = bmrs.structures(reduced, example)
    heads = [structure for structure in structures if structure.kind == "head"]
    parameters = dict(masked.named_parameters())
    with torch.no_grad():
        for structure in heads:
            for name, dim in structure.consumers:
                indices = structure.indices((name, dim))
                parameters[name].index_fill_(dim, torch.tensor([i for unit in gone for i in indices[unit]]), 0.0)
    bmrs.remove(reduced, dict.fromkeys(heads, gone))
    assert heads
    assert {structure.units for structure in heads} == {HEADS - len(gone)}
    return masked, reduced


def equal_everywhere(masked, reduced, *arguments, **options):
    """With gradients, without them (where torch takes a faster path), and as it trains."""
    results = []
    for model in (masked, reduced):
        made = [model.eval()(*arguments, **options), model.train()(*arguments, **options)]
        with torch.no_grad():
            made.append(model.eval()(*arguments, **options))
        results.append(made)
    return same(*results)


class TestFewerHeads:
    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    @pytest.mark.parametrize("batch_first", [True, False])
    def test_a_lone_attention_equals_the_masked_one(self, options, batch_first):
        model = Attending(cross=True, batch_first=batch_first, **options)
        arguments = inputs(model.attention)
        masked, reduced = without_heads(model, tuple(arguments), gone=(0, 2))
        assert sum(p.numel() for p in reduced.parameters()) < sum(p.numel() for p in masked.parameters())
        attn, padding = masks()
        for kind, need in product(("bool", "float"), (True, False)):
            settings = {"attn_mask": attn[f"2-D {kind}"], "key_padding_mask": padding[kind], "need_weights": need}
            assert equal_everywhere(masked, reduced, *arguments, **settings)
        assert equal_everywhere(masked, reduced, *inputs(model.attention, batched=False))

    def test_self_attention_equals_the_masked_one(self):
        masked, reduced = without_heads(Attending(batch_first=True), sequence())
        for length, batch in ((LONG, BATCH), (WIDTH, 1), (8, 3), (1, 1)):
            assert equal_everywhere(masked, reduced, sequence(length, batch))

    def test_masks_for_single_heads_are_refused(self):
        _, reduced = without_heads(Attending(batch_first=True), sequence(SHORT))
        with pytest.raises(ValueError, match="attn_mask has 4 heads, but 3 are left: give one mask for all heads"):
            reduced(sequence(SHORT), attn_mask=torch.zeros(BATCH * HEADS, SHORT, SHORT, dtype=torch.float64))

    @pytest.mark.parametrize("norm_first", [True, False])
    @pytest.mark.parametrize("activation", ["relu", "gelu"])
    def test_an_encoder_layer(self, norm_first, activation):
        masked, reduced = without_heads(encoder_layer(norm_first=norm_first, activation=activation), sequence())
        assert equal_everywhere(masked, reduced, sequence(7, 3))
        mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
        assert equal_everywhere(masked, reduced, sequence(7, 3), src_mask=mask, is_causal=True)

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
    def test_an_encoder_with_padding(self):
        masked, reduced = without_heads(encoder(), sequence())
        x = sequence(7, 3)
        assert equal_everywhere(masked, reduced, x)
        padding = torch.arange(7) >= torch.tensor([7, 5, 2])[:, None]
        for gradients in (True, False):  # what is at padded places is of no account: the fast path leaves zeros there
            with torch.set_grad_enabled(gradients):
                made = [model.eval()(x, src_key_padding_mask=padding)[~padding] for model in (masked, reduced)]
            assert same(made[:1], made[1:])

    def test_a_decoder_layer(self):
        masked, reduced = without_heads(decoder_layer(), (sequence(), sequence(SHORT)))
        mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
        assert equal_everywhere(masked, reduced, sequence(6, 3), sequence(8, 3), tgt_mask=mask, tgt_is_causal=True)

    @pytest.mark.parametrize(
        "again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
    )
    def test_a_copy_computes_the_same_and_is_independent(self, again):
        _, reduced = without_heads(encoder_layer(), sequence())
        x = sequence(7, 3)
        expected = reduced(x)
        copied = again(reduced)
        assert torch.equal(copied(x), expected)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        assert torch.equal(reduced(x), expected)
        assert not torch.allclose(copied(x), expected)

    def test_more_heads_can_go_later(self):
        model = Attending(batch_first=True)
        masked, reduced = without_heads(model, sequence(), gone=(0, 2))
        structures = bmrs.structures(once := copy.deepcopy(model), sequence())
        bmrs.remove(once, {structures[0]: [0]})
        bmrs.remove(once, {structures[0]: [1]})
        x = sequence(7, 3)
        assert same([masked(x)] * 2, [reduced(x), once(x)])
