"""Integers in attributes and in code: corrected where they no longer fit, left alone where they do."""

import copy
import pickle
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bmrs
from bmrs.structure.mend import Correction, Reshaping, integers_of, set_integer

WIDTH, HEADS = 12, 4
SIZES = st.integers(1, 13)


def corrected(call, *corrections):
    with Reshaping(corrections):
        return call()


def correction(kind, count, position, old, new, sure=True):
    return Correction(kind, count, position, old, new, sure)


class TestView:
    to_width = correction("view", 3, 2, WIDTH, 9)

    @settings(deadline=None)
    @given(SIZES, SIZES)
    def test_what_does_not_fit_is_corrected_for_any_batch_and_length(self, batch, length):
        x = torch.randn(batch, length, 3, 3)
        for call in (
            lambda: x.reshape(batch, length, WIDTH),
            lambda: x.view((batch, length, WIDTH)),
            lambda: torch.reshape(x, [batch, length, WIDTH]),
            lambda: torch.reshape(x, shape=(batch, length, WIDTH)),
        ):
            assert torch.equal(corrected(call, self.to_width), x.flatten(2))

    @settings(deadline=None)
    @given(SIZES, SIZES, SIZES)
    def test_what_fits_is_left_alone(self, batch, length, width):
        x = torch.randn(batch, length, width)
        made = corrected(lambda: x.view(batch, length, width), self.to_width, correction("view", 3, 1, WIDTH, 9))
        assert torch.equal(made, x)

    @settings(deadline=None)
    @given(SIZES, SIZES, st.integers(2, 6), st.integers(2, 6), st.data())
    def test_only_the_one_way_that_fits_is_taken(self, batch, length, heads, width, data):
        """Requests for the old sizes get the new ones, or fail as they would: never something else."""
        left = data.draw(st.integers(1, heads)), data.draw(st.integers(1, width))
        known = [correction("view", 4, 2, heads, left[0]), correction("view", 4, 3, width, left[1])]
        x = torch.randn(batch, length, left[0] * left[1])
        ways = {(a, b) for a in (heads, left[0]) for b in (width, left[1]) if a * b == left[0] * left[1]}
        try:
            made = corrected(lambda: x.view(batch, length, heads, width), *known)
        except RuntimeError:
            assert len(ways) > 1
        else:
            assert made.shape[:2] == (batch, length)
            assert (heads, width) == tuple(made.shape[2:]) if (heads, width) in ways else made.shape[2:] in ways

    def test_two_ways_that_fit_equally_well_are_refused(self):
        known = [correction("view", 2, 0, 4, 2), correction("view", 2, 1, 4, 2)]
        with pytest.raises(RuntimeError, match="invalid for input of size 8"):
            corrected(lambda: torch.zeros(8).view(4, 4), *known)

    @settings(deadline=None)
    @given(SIZES, SIZES)
    def test_examples_may_be_merged_into_a_size(self, batch, length):
        x = torch.randn(batch * 3, length, 2)
        known = correction("view", 3, 0, 2 * 4, 2 * 3)  # four heads of two examples
        assert torch.equal(corrected(lambda: x.view(batch * 4, length, 2), known), x)

    def test_requests_of_another_form_are_none_of_its_business(self):
        x = torch.zeros(2, 9)
        for ask in (lambda: x.view(2, WIDTH), lambda: x.view(2, 1, 1, WIDTH), lambda: x.view(WIDTH, 2, 1)):
            with pytest.raises(RuntimeError, match="invalid for input"):
                corrected(ask, self.to_width)

    def test_other_views_pass(self):
        x = torch.randn(2, 3)
        assert torch.equal(corrected(lambda: x.view(torch.int32), self.to_width), x.view(torch.int32))
        assert corrected(lambda: x.view(torch.Size([3, 2])), self.to_width).shape == (3, 2)


class TestOpenView:
    """Beside a -1 any number may seem to fit."""

    @settings(deadline=None)
    @given(SIZES, SIZES)
    def test_what_it_always_means_is_corrected(self, batch, length):
        x = torch.randn(batch, length, 9)
        known = correction("view, 1 open", 4, 2, 4, 3)
        assert torch.equal(corrected(lambda: x.view(batch, -1, 4, 3), known), x.view(batch, length, 3, 3))

    def test_what_is_not_clear_is_refused(self):
        known = correction("view, 1 open", 3, 2, 4, 2, sure=False)
        with pytest.raises(RuntimeError, match="it is not clear what"):
            corrected(lambda: torch.zeros(2, 8).view(2, -1, 4), known)

    def test_what_can_only_mean_one_thing_is_taken(self):
        known = correction("view, 1 open", 3, 2, 4, 3, sure=False)
        assert corrected(lambda: torch.zeros(2, 9).view(2, -1, 4), known).shape == (2, 3, 3)
        assert corrected(lambda: torch.zeros(2, 8).view(2, -1, 4), known).shape == (2, 2, 4)
        assert corrected(lambda: torch.zeros(2, 10).view(2, -1, 5), known).shape == (2, 2, 5)

    def test_another_open_number_is_another_form(self):
        known = correction("view, 1 open", 3, 2, 4, 2)
        assert corrected(lambda: torch.zeros(8, 2).view(-1, 2, 4), known).shape == (2, 2, 4)


class TestOtherRequests:
    def test_unflatten(self):
        known = [correction("unflatten", 2, 0, 4, 3), correction("unflatten, 1 open", 2, 0, 4, 3)]
        x = torch.randn(5, 9)
        for call in (
            lambda: x.unflatten(1, (4, 3)),
            lambda: x.unflatten(-1, sizes=(4, 3)),
            lambda: torch.unflatten(x, 1, (4, -1)),
        ):
            assert torch.equal(corrected(call, *known), x.view(5, 3, 3))
        assert corrected(lambda: torch.zeros(5, 12).unflatten(1, (4, 3)), known[0]).shape == (5, 4, 3)

    def test_expand(self):
        known = correction("expand", 3, 2, 4, 3)
        x = torch.randn(2, 1, 3)
        assert torch.equal(corrected(lambda: x.expand(2, 5, 4), known), x.expand(2, 5, 3))
        assert torch.equal(corrected(lambda: x.expand((-1, 5, -1)), known), x.expand(2, 5, 3))
        assert corrected(lambda: torch.zeros(2, 1, 4).expand(2, 5, 4), known).shape == (2, 5, 4)
        assert corrected(lambda: torch.zeros(2, 1, 1).expand(2, 5, 4), known).shape == (2, 5, 4)

    @settings(deadline=None)
    @given(SIZES)
    def test_equal_parts(self, batch):
        known = correction("split along -1", 1, 0, 4, 3)
        x = torch.randn(batch, 9)
        for call in (lambda: x.split(4, dim=1), lambda: x.split(4, 1), lambda: torch.split(x, 4, -1)):
            assert [part.shape[1] for part in corrected(call, known)] == [3, 3, 3]

    def test_unequal_parts(self):
        known = [
            correction("split along -1", 3, 0, 8, 6),
            correction("split along -1", 3, 1, 4, 3),
            correction("split along -1", 3, 2, 4, 3),
        ]
        for given_x, sizes in ((12, [6, 3, 3]), (16, [8, 4, 4])):
            parts = corrected(lambda width=given_x: torch.zeros(2, width).split([8, 4, 4], dim=-1), *known)
            assert [part.shape[1] for part in parts] == sizes

    def test_parts_that_could_be_either_are_refused(self):
        known = [correction("split along -1", 2, 0, 4, 3), correction("split along -1", 2, 1, 4, 3)]
        with pytest.raises(RuntimeError, match="not clear what a split"):
            corrected(lambda: torch.zeros(7).split([4, 4]), *known)


class TestIntegers:
    def module(self):
        module = nn.Module()
        module.heads, module.sizes, module.flag, module.rate, module.names = 4, (8, 4), True, 0.5, ["a"]
        module.config = SimpleNamespace(num_heads=4, name="x", layers=[1, 2])
        module._hidden = 3
        return module

    def test_they_are_found_in_attributes_sequences_and_configurations(self):
        found = {name: value for name, value in integers_of(self.module()).items() if name != "training"}
        assert found == {"heads": 4, "sizes": (8, 4), "config.num_heads": 4, "config.layers": [1, 2]}

    def test_a_configuration_is_copied_before_it_is_changed(self):
        first, second = self.module(), self.module()
        first.config = second.config
        set_integer(first, "config.num_heads", 3)
        set_integer(first, "heads", 3)
        assert (first.config.num_heads, second.config.num_heads) == (3, 4)
        assert (first.config.name, first.heads, second.heads) == ("x", 3, 4)


# --- attention as it is written -----------------------------------------------------------------------------------


class ToInputWidth(nn.Module):
    """The width of the input stands for that of all heads together."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), HEADS

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv.unbind(0))
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


class Apart(nn.Module):
    """Three layers for query, key and value."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.heads, self.width = HEADS, WIDTH // HEADS

    def forward(self, x):
        q, k, v = (self.divided(layer(x)) for layer in (self.q, self.k, self.v))
        return self.out(self.joined(torch.softmax(q @ k.mT / self.width**0.5, -1) @ v, x))

    def divided(self, x):
        return x.view(x.shape[0], -1, self.heads, self.width).transpose(1, 2)

    def joined(self, attended, x):
        return attended.transpose(1, 2).flatten(2)


class HeadsOpen(Apart):
    def divided(self, x):
        return x.view(*x.shape[:-1], -1, self.width).transpose(1, 2)


class JoinedToWidth(Apart):
    def joined(self, attended, x):
        return attended.transpose(1, 2).contiguous().view(*x.shape)


class JoinedToAttribute(Apart):
    def __init__(self):
        super().__init__()
        self.all_heads = WIDTH

    def joined(self, attended, x):
        return attended.permute(0, 2, 1, 3).reshape((*x.shape[:-1], self.all_heads))


class Merged(Apart):
    """Heads are merged into the batch."""

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (self.merged(layer(x), batch) for layer in (self.q, self.k, self.v))
        attended = torch.bmm(torch.softmax(torch.bmm(q, k.mT), -1), v)
        attended = attended.view(batch, self.heads, length, self.width).transpose(1, 2)
        return self.out(attended.reshape(batch, length, width))

    def merged(self, x, batch):
        split = x.view(batch, -1, self.heads, self.width).transpose(1, 2).contiguous()
        return split.view(batch * self.heads, -1, self.width)


class Chunked(ToInputWidth):
    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class SplitByAttribute(ToInputWidth):
    def __init__(self):
        super().__init__()
        self.width = WIDTH

    def forward(self, x):
        batch, length, width = x.size()
        divided = (y.view(batch, length, self.heads, width // self.heads) for y in self.qkv(x).split(self.width, dim=2))
        q, k, v = (y.transpose(1, 2) for y in divided)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).contiguous().view(batch, length, width))


class SplitInSections(ToInputWidth):
    """Sizes in a tuple; two queries for each key and value."""

    def __init__(self):
        super().__init__()
        self.qkv, self.sizes, self.width = nn.Linear(WIDTH, 2 * WIDTH), (WIDTH, WIDTH // 2, WIDTH // 2), WIDTH // HEADS

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (-1, self.width)).transpose(1, 2) for y in self.qkv(x).split(self.sizes, -1))
        k, v = (y.repeat_interleave(2, dim=1) for y in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Configured(Apart):
    def __init__(self, config=None):
        super().__init__()
        self.config = config or SimpleNamespace(num_heads=HEADS, hidden=WIDTH)

    def divided(self, x):
        batch, length, _ = x.shape
        return x.view(batch, length, self.config.num_heads, self.width).transpose(1, 2)


class Sliced(ToInputWidth):
    """Literals that nothing but the code knows."""

    def forward(self, x):
        qkv = self.qkv(x)
        parts = qkv[..., :12], qkv[..., 12:24], qkv[..., 24:]
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in parts)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


MENDABLE = [
    ToInputWidth,
    Apart,
    HeadsOpen,
    JoinedToWidth,
    JoinedToAttribute,
    Merged,
    Chunked,
    SplitByAttribute,
    SplitInSections,
    Configured,
]
every_style = pytest.mark.parametrize("style", MENDABLE)


def sequences(batch=2, length=5):
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


def other_sequences():
    """Of sizes unlike the example's, and of sizes that agree with a width by coincidence."""
    return [sequences(*sizes) for sizes in product((1, 3, HEADS, WIDTH), (1, 3, 7, HEADS, WIDTH, 2 * WIDTH))]


def prepared(style, count=1):
    model = nn.Sequential(*(style() for _ in range(count))).double()
    return model, bmrs.structures(model, sequences())


def heads_of(structures):
    return [structure for structure in structures if structure.kind in ("head", "group")]


def mask(model, structure, units):
    """Nothing takes up what these heads produce."""
    parameters = dict(model.named_parameters())
    for name, dim in structure.consumers:
        at = [index for unit in units for index in structure.indices((name, dim))[unit]]
        parameters[name].data.index_fill_(dim, torch.tensor(at), 0.0)


def same_on(inputs, first, second):
    with torch.no_grad():
        return all(torch.allclose(first(x), second(x), rtol=0, atol=1e-11) for x in inputs)


class TestAttention:
    @every_style
    def test_fewer_heads_equal_masked_heads_on_other_sizes_too(self, style):
        model, structures = prepared(style)
        (heads,) = heads_of(structures)
        masked = copy.deepcopy(model)
        mask(masked, heads, [1])
        bmrs.remove(model, {heads: [1]})
        assert heads.status == "exact"
        assert model[0].out.in_features == WIDTH - WIDTH // len(heads.variables)
        assert same_on(other_sequences(), model, masked)

    @pytest.mark.parametrize("style", [style for style in MENDABLE if style is not SplitInSections])
    def test_heads_may_go_one_after_the_other_and_after_listing_again(self, style):
        model, structures = prepared(style)
        (heads,) = heads_of(structures)
        masked = copy.deepcopy(model)
        mask(masked, heads, [0, 2, 3])
        bmrs.remove(model, {heads: [0]})
        bmrs.remove(model, {heads: [2]})
        (heads,) = heads_of(bmrs.structures(model, sequences()))
        bmrs.remove(model, {heads: [1]})
        assert model[0].out.in_features == WIDTH // HEADS
        assert same_on(other_sequences(), model, masked)

    @every_style
    def test_one_layer_of_two_may_shrink(self, style):
        model, structures = prepared(style, count=2)
        first, second = heads_of(structures)
        masked = copy.deepcopy(model)
        mask(masked, second, [0])
        bmrs.remove(model, {second: [0]})
        assert model[0].out.in_features == WIDTH > model[1].out.in_features
        assert same_on(other_sequences()[::5], model, masked)
        mask(masked, first, [1])
        bmrs.remove(model, {first: [1]})
        assert same_on(other_sequences()[::5], model, masked)

    @every_style
    def test_copies_and_pickles_compute_the_same(self, style):
        model, structures = prepared(style)
        bmrs.remove(model, dict.fromkeys(heads_of(structures), (0,)))
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert same_on([sequences(3, 7)], model, again)
            again[0].out.weight.data.zero_()
            assert not same_on([sequences(3, 7)], model, again)

    def test_most_heads_may_go_at_once_for_every_batch_size(self):
        model, structures = prepared(Merged)
        (heads,) = heads_of(structures)
        masked = copy.deepcopy(model)
        mask(masked, heads, [0, 1, 2])
        bmrs.remove(model, {heads: [0, 1, 2]})
        assert same_on([sequences(batch) for batch in range(1, 13)], model, masked)

    def test_a_split_along_another_dimension_is_left_alone(self):
        class Windows(SplitByAttribute):
            def __init__(self):
                super().__init__()
                self.window = WIDTH

            def forward(self, x):
                return super().forward(torch.cat([w - w.mean(1, keepdim=True) for w in x.split(self.window, 1)], 1))

        model, structures = prepared(Windows)
        (heads,) = heads_of(structures)
        masked = copy.deepcopy(model)
        mask(masked, heads, [0, 1])
        bmrs.remove(model, {heads: [0, 1]})
        assert same_on([sequences(2, length) for length in (5, 12, 18, 24, 30, 36)], model, masked)

    def test_an_attribute_that_says_it_all_is_set(self):
        model, structures = prepared(Apart)
        bmrs.remove(model, dict.fromkeys(heads_of(structures), (0,)))
        assert (model[0].heads, model[0].width) == (HEADS - 1, WIDTH // HEADS)
        assert "forward" not in vars(model[0])

    def test_others_who_share_a_configuration_are_unaffected(self):
        config = SimpleNamespace(num_heads=HEADS, hidden=WIDTH)
        model = nn.Sequential(Configured(config), Configured(config)).double()
        model[0].other = [config]  # whoever else has it
        structures = bmrs.structures(model, sequences())
        first, _ = heads_of(structures)
        masked = copy.deepcopy(model)
        mask(masked, first, [0, 1])
        bmrs.remove(model, {first: [0, 1]})
        assert same_on(other_sequences()[::5], model, masked)
        assert config == SimpleNamespace(num_heads=HEADS, hidden=WIDTH)
        assert model[1].config.num_heads == HEADS

    def test_literals_in_slices_keep_all_heads_and_it_is_said(self):
        model, structures = prepared(Sliced)
        (heads,) = heads_of(structures)
        before = copy.deepcopy(model)
        with pytest.warns(UserWarning, match="is left alone: kept: "):
            bmrs.remove(model, {heads: [1]})
        assert heads.status.startswith("kept: ")
        assert heads.units == HEADS
        assert vars(model[0]).keys() == vars(before[0]).keys()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
        assert same_on([sequences(3, 7)], model, before)
