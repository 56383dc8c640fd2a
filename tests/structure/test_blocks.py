"""Residual branches as a whole, judged against networks whose branches are multiplied by zero by hand."""

import copy
import io
import json
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.flop_counter import FlopCounterMode

import bmrs
from bmrs.structure.standin import StandIn


class Residual(nn.Module):
    """``off``: the branch counts for nothing, by hand."""

    off = False

    def branch(self, x):
        raise NotImplementedError

    def added(self, x):
        y = self.branch(x)
        return y * 0 if self.off else y


class Basic(Residual):
    """torchvision's, with its ReLU in place and one module for both."""

    def __init__(self, width, out, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(out), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = None
        if stride > 1 or width != out:
            self.downsample = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def branch(self, x):
        return self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))

    def forward(self, x):
        out = self.added(x)
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Bottleneck(Residual):
    def __init__(self, width, out, stride=1):
        super().__init__()
        inner = out // 4
        self.conv1, self.bn1 = nn.Conv2d(width, inner, 1), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, stride, 1), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, out, 1), nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(width, out, 1, stride) if stride > 1 or width != out else nn.Identity()

    def branch(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return self.bn3(self.conv3(F.relu(self.bn2(self.conv2(y)))))

    def forward(self, x):
        return F.relu(self.shortcut(x) + self.added(x))


class Before(Residual):
    """Norms in the branch, and a ReLU that writes to what it is given."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.a, self.b = nn.BatchNorm2d(width), nn.Conv2d(width, width, 3, 1, 1), nn.Conv2d(width, width, 1)

    def branch(self, x):
        return self.b(F.relu_(self.a(F.relu_(self.norm(x)))))

    def forward(self, x):
        return x + self.added(x)


class Scaled(Residual):
    """ConvNeXt's: other dimensions in between, and a layer scale after the last layer."""

    def __init__(self, width):
        super().__init__()
        self.spread = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 20), nn.GELU(), nn.Linear(20, width))
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def branch(self, x):
        return (self.scale * self.inner(self.spread(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)

    def forward(self, x):
        return x + self.added(x)


class Attention(nn.Module):
    """Returns a tuple, as Hugging Face's do."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, *, hidden, mask=None):
        q, k, v = self.qkv(hidden).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1)
        return self.out((weights @ v).transpose(1, 2).flatten(-2)), weights


class Mixing(Residual):
    """Attention; ``first``: norm in the branch, or after the sum."""

    def __init__(self, width, first):
        super().__init__()
        self.first, self.norm, self.attention = first, nn.LayerNorm(width), Attention(width, 4)

    def branch(self, x):
        return self.attention(hidden=self.norm(x) if self.first else x)[0]

    def forward(self, x):
        return x + self.added(x) if self.first else self.norm(x + self.added(x))


class Thinking(Residual):
    """The other half of a transformer's layer."""

    def __init__(self, width, first):
        super().__init__()
        self.first, self.norm, self.up, self.down = (
            first,
            nn.LayerNorm(width),
            nn.Linear(width, 20),
            nn.Linear(20, width),
        )

    def branch(self, x):
        return F.dropout(self.down(F.gelu(self.up(self.norm(x) if self.first else x))), 0.1, self.training)

    def forward(self, x):
        return x + self.added(x) if self.first else self.norm(x + self.added(x))


class Pooled(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


def images(*blocks, width):
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(stem, *blocks, Pooled(), nn.Linear(width, 5)), torch.randn(3, 3, 9, 9)


def tokens(*blocks):
    return nn.Sequential(nn.Linear(5, 16), *blocks, nn.Linear(16, 5)), torch.randn(3, 6, 5)


def resnet(kind=Basic, out=12):
    stages = nn.Sequential(kind(8, 8), kind(8, 8), kind(8, 8)), nn.Sequential(kind(8, out, 2), kind(out, out))
    return images(*stages, width=out)


NETWORKS = {  # and the units of every structure of blocks
    "basic": (resnet, {"1.*.bn2 blocks": 3, "2.*.bn2 blocks": 2}),
    "bottleneck": (lambda: resnet(Bottleneck, 16), {"1.*.bn3 blocks": 3, "2.*.bn3 blocks": 2}),
    "before": (lambda: images(*(Before(8) for _ in range(3)), width=8), {"*.b blocks": 3}),
    "scaled": (lambda: images(*(Scaled(8) for _ in range(3)), width=8), {"*.inner.3 blocks": 3}),
    "pre-norm": (lambda: tokens(*(kind(16, True) for _ in range(2) for kind in (Mixing, Thinking))),
                 {"*.attention.out blocks": 2, "*.down blocks": 2}),
    "post-norm": (lambda: tokens(*(kind(16, False) for _ in range(2) for kind in (Mixing, Thinking))),
                  {"*.attention.out blocks": 2, "*.down blocks": 2}),
}  # fmt: skip


def made(name, seed=0):
    torch.manual_seed(seed)
    model, x = NETWORKS[name][0]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
    return model.double().eval(), x.double()


def residuals(model):
    return {path: module for path, module in model.named_modules() if isinstance(module, Residual)}


def layers_of(structure):
    """The residual modules that the units stand for, by the names of what they occupy."""
    paths = residuals(structure.owner.model)
    return [next(path for path in paths if vacancy[0].startswith(f"{path}.")) for vacancy in _places(structure)]


def _places(structure):
    owned = {own: block for block, own in structure.owner.findings.blocks.items()}
    return [[vacancy.path for vacancy in owned[own].vacancies] for own in structure.variables]


def without(model, paths):
    """The whole network, the branches in these modules multiplied by zero by hand."""
    other = copy.deepcopy(model)
    for path in paths:
        other.get_submodule(path).off = True
    return other


def middle(structures):
    """One unit of each, and whose it is."""
    chosen = {structure: [structure.units // 2] for structure in structures.blocks}
    return chosen, [layers_of(structure)[unit] for structure, (unit,) in chosen.items()]


@pytest.mark.parametrize("name", NETWORKS)
class TestRemoval:
    def test_they_are_listed_by_name_with_what_they_cost(self, name):
        model, x = made(name)
        structures = bmrs.structures(model, x)
        assert {s.name: s.units for s in structures.blocks} == NETWORKS[name][1]
        assert not any(s.kind == "block" for s in structures)
        given = {}
        for path, module in residuals(model).items():
            module.register_forward_pre_hook(lambda module, args, path=path: given.__setitem__(path, args[0]))
        model(x)
        for structure in structures.blocks:
            assert structures[structure.name] is structure
            assert structure.kind == "block"
            paths = layers_of(structure)
            gone = [n for n, _ in model.named_parameters() for vacancy in _places(structure) for p in vacancy
                    if n.startswith(f"{p}.")]  # fmt: skip
            assert structure.params_per_unit == sum(model.get_parameter(n).numel() for n in gone) / len(paths)
            with FlopCounterMode(display=False) as counter:
                for path in paths:
                    model.get_submodule(path).branch(given[path])
            assert structure.macs_per_unit == pytest.approx(counter.get_total_flops() / 2 / len(paths))

    def test_the_network_is_the_one_without_the_branches(self, name):
        model, x = made(name)
        structures = bmrs.structures(model, x).verify()
        chosen, paths = middle(structures)
        quiet = without(model, paths)
        gone = {n for vacancies in (v for s in chosen for v in [_places(s)[chosen[s][0]]]) for p in vacancies
                for n, _ in model.named_parameters() if n.startswith(f"{p}.")}  # fmt: skip
        left = {n for n, _ in model.named_parameters()} - gone
        bmrs.remove(model, chosen)
        assert {s.status for s in structures.blocks} == {"exact"}
        assert {n for n, _ in model.named_parameters()} == left
        assert not gone & set(model.state_dict())
        for batch in (1, 5):
            other = torch.randn(batch, *x.shape[1:], dtype=x.dtype)
            torch.testing.assert_close(model(other), quiet(other), rtol=1e-9, atol=1e-9)
        other = torch.randn(4, *(size + 2 if n else size for n, size in enumerate(x.shape[1:])), dtype=x.dtype)
        if "norm" not in name:  # images may have other sizes
            torch.testing.assert_close(model(other), quiet(other), rtol=1e-9, atol=1e-9)
        for one in (model, quiet):
            one.train()
            torch.manual_seed(3)
        inputs = torch.randn(6, *x.shape[1:], dtype=x.dtype)
        if not any(isinstance(m, Thinking) for m in model.modules()):  # its dropout draws numbers
            results = [one(inputs) for one in (model, quiet)]
            torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)
            for result in results:
                result.square().sum().backward()
            grads = dict(quiet.named_parameters())
            for n, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.grad, grads[n].grad, rtol=1e-9, atol=1e-9)

    def test_with_all_that_can_go_beside(self, name):
        """Units of every structure and blocks at once, also of the streams the blocks were on."""
        for seed in (1, 2):
            model, x = made(name, seed)
            structures = bmrs.structures(model, x)
            everything = [*structures, *structures.branches, *structures.blocks]
            structures.verify(everything)
            assert {s.status for s in everything} == {"exact"}
            blocks, paths = middle(structures)
            generator = torch.Generator().manual_seed(seed)
            others = {
                s: torch.randperm(s.units, generator=generator)[: s.units // 3].tolist()
                for s in (*structures, *structures.branches)
            }  # fmt: skip
            quiet = without(model, paths)
            tensors = dict(quiet.named_parameters())
            with torch.no_grad():
                for structure, units in others.items():
                    for n, dim in structure.consumers:
                        indices = [i for unit in units for i in structure.indices((n, dim))[unit]]
                        tensors[n].index_fill_(dim, torch.tensor(indices, dtype=torch.long), 0.0)
            bmrs.remove(model, {**others, **blocks})
            torch.testing.assert_close(model(x), quiet(x), rtol=1e-8, atol=1e-8)

    def test_saved_loaded_copied_and_exported_it_is_the_same(self, name, tmp_path):
        model, x = made(name)
        structures = bmrs.structures(model, x)
        chosen, _ = middle(structures)
        bmrs.remove(model, {**chosen, structures[0]: [0]})
        expected = model(x)
        bmrs.save(model, tmp_path / "small.safetensors")
        fresh, _ = made(name, seed=9)
        copies = [
            bmrs.load(fresh, tmp_path / "small.safetensors"),
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            bmrs.export_program(model, x).module(),
        ]  # fmt: skip
        for one in copies:
            torch.testing.assert_close(one(x), expected)
        assert fresh.state_dict().keys() == model.state_dict().keys()
        assert str(fresh) == str(model)

    def test_a_network_without_them_can_be_listed_and_pruned_again(self, name):
        model, x = made(name)
        bmrs.remove(model, middle(bmrs.structures(model, x))[0])
        structures = bmrs.structures(model, x).verify()
        assert {s.status for s in structures} == {"exact"}
        before = {s.name: s.units for s in structures}
        expected = copy.deepcopy(model)
        tensors = dict(expected.named_parameters())
        with torch.no_grad():
            for structure in structures:
                for n, dim in structure.consumers:
                    tensors[n].index_fill_(dim, torch.tensor(structure.indices((n, dim))[0]), 0.0)
        bmrs.remove(model, {s: [0] for s in structures})
        assert {s.name: s.units for s in structures} == {n: units - 1 for n, units in before.items()}
        torch.testing.assert_close(model(x), expected(x), rtol=1e-8, atol=1e-8)


def test_blocks_whose_rows_went_before(tmp_path):
    """In two listings, one after the other, and from a file on a fresh network."""
    model, x = made("basic")
    first = bmrs.structures(model, x)
    bmrs.remove(model, {branch: [0, 3] for branch in first.branches})
    structures = bmrs.structures(model, x)
    chosen, paths = middle(structures)
    quiet = without(model, paths)
    bmrs.remove(model, chosen)
    torch.testing.assert_close(model(x), quiet(x), rtol=1e-9, atol=1e-9)
    bmrs.save(model, tmp_path / "small.safetensors")
    fresh, _ = made("basic", seed=9)
    torch.testing.assert_close(bmrs.load(fresh, tmp_path / "small.safetensors")(x), model(x))
    bmrs.remove(fresh, {bmrs.structures(fresh, x)["1.0.conv1"]: [1, 2]})
    assert fresh[1][0].conv1.out_channels == 6
    assert fresh(x).isfinite().all()


def test_a_record_that_contradicts_itself_is_refused():
    model, x = made("basic")
    pruner = bmrs.Pruner(model, x, structures=bmrs.structures(model, x).blocks)
    with torch.no_grad():
        pruner.bank.mu[1], pruner.bank.log_sigma[1] = -3.0, 4.0
    pruner.prune()
    other, _ = made("basic", seed=2)
    fresh = bmrs.Pruner(other, x, structures=bmrs.structures(other, x).blocks)
    for damage, said in (
        (lambda record: record["kept"].pop("1.1.conv1.weight"), "lacks what became of '1.1.conv1.weight'"),
        (lambda record: record["silenced"].pop("1.1.conv1"), "keeps indices of '1.1.conv1.weight'"),
        (lambda record: record["silenced"].update({"1.7": record["silenced"]["1.1.conv1"]}), "module '1.7'"),
        (lambda record: record["silenced"]["1.1.conv1"].pop("width"), "record of what was removed is damaged"),
    ):  # fmt: skip
        state = copy.deepcopy(pruner.state_dict())
        content = json.loads(bytes(state["model"]["bmrs_noise._extra_state"].tolist()))
        damage(content["removed"])
        packed = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
        state["model"]["bmrs_noise._extra_state"] = packed
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(ValueError, match=said):
            fresh.load_state_dict(state)
        assert all(torch.equal(before[n], value) for n, value in other.state_dict().items())
    fresh.load_state_dict(pruner.state_dict())
    torch.testing.assert_close(other(x), model(x))


class TestTraining:
    def pruner(self, name="basic", **options):
        model, x = made(name)
        model.float()
        structures = bmrs.structures(model, x.float())
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        chosen = [*structures, *structures.branches, *structures.blocks]
        return model, x.float(), optimizer, bmrs.Pruner(model, x.float(), optimizer, structures=chosen, **options)

    def train(self, model, x, optimizer, steps=2):
        model.train()
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn_like(x)).square().mean().backward()
            optimizer.step()
        model.eval()

    def close(self, pruner, name, unit):
        with torch.no_grad():
            at = pruner.bank.layers[name].start + unit
            pruner.bank.mu[at], pruner.bank.log_sigma[at] = -3.0, 4.0

    @pytest.mark.parametrize("name", ["basic", "pre-norm"])
    @pytest.mark.parametrize("noise", ["example", "batch"])
    def test_what_lies_in_a_block_goes_with_it(self, name, noise):
        model, x, optimizer, pruner = self.pruner(name, noise=noise)
        self.train(model, x, optimizer)
        block = pruner.structures.blocks[0]
        inner = [s for s in (*pruner.structures, *pruner.structures.branches)
                 if all(n.startswith(f"{layers_of(block)[1]}.") for n, _ in s.places)]  # fmt: skip
        assert len(inner) == 2
        lost = {p for n, p in model.named_parameters() if n.startswith(f"{layers_of(block)[1]}.")}
        self.close(pruner, block.name, 1)
        with torch.no_grad():
            pruner.bank.alive[pruner.bank.layers[block.name].start + 1] = False  # θ = 0
            expected = model(x)
            pruner.bank.alive.fill_(True)
        report = pruner.prune()
        rows = {row.name: row for row in report.structures}
        assert rows[block.name].removed == 1
        assert all(rows[s.name].left == 0 for s in inner)
        assert all(s not in list(pruner.structures) + pruner.structures.branches for s in inner)
        assert not {s.name for s in inner} & pruner.bank.layers.keys()
        assert len(pruner.bank.mu) == sum(pruner.bank.sizes.values()) == report.units
        torch.testing.assert_close(model(x), expected)
        assert all(not p.numel() and p not in optimizer.state for p in lost)
        assert not lost & set(model.parameters())
        self.train(model, x, optimizer)
        assert pruner.prune().removed == 0
        gated = model(x)
        torch.testing.assert_close(pruner.finish()(x), gated)
        assert isinstance(next(m for m in model.modules() if isinstance(m, StandIn)), StandIn)

    def test_gates_of_rows_and_of_their_block_multiply(self):
        plain, _ = made("basic")
        plain.float()
        model, x, _, pruner = self.pruner()
        with torch.no_grad():
            pruner.bank.mu.uniform_(-2.0, 0.0)
            for name, layer in pruner.bank.layers.items():
                structure, own = pruner.structures[name], pruner.bank.mean()[layer]
                if structure.kind == "block":
                    for path, theta in zip(layers_of(structure), own, strict=True):
                        for parameter in plain.get_submodule(path).bn2.parameters():
                            parameter.mul_(theta)
                else:
                    for n, dim in structure.consumers:
                        weight = plain.get_parameter(n)
                        weight.mul_(own.reshape([-1 if d == dim else 1 for d in range(weight.dim())]))
        torch.testing.assert_close(model(x), plain(x))
        model.train()  # one draw for each example, for both kinds of gates
        last = model[1][0].bn2
        seen = []
        handle = last.register_forward_hook(lambda module, args, output: seen.append((args[0].clone(), output.clone())))
        model(x)
        handle.remove()
        (given, output), *_ = seen
        theta = pruner.bank.current()
        rows = [theta[:, pruner.bank.layers[name]] for name in ("1.0.bn2 branch", "1.*.bn2 blocks")]
        expected = F.batch_norm(given, None, None, last.weight, last.bias, training=True)
        expected = expected * (rows[0] * rows[1][:, :1])[:, :, None, None]
        torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)

    def test_it_comes_back_and_a_state_brings_it_anywhere(self):
        model, x, optimizer, pruner = self.pruner()
        ema = AveragedModel(model)
        pruner.follow(ema)
        self.train(model, x, optimizer)
        ema.update_parameters(model)
        before = copy.deepcopy(pruner.state_dict())
        block = pruner.structures.blocks[1]
        self.close(pruner, block.name, 0)  # the one with a stride
        whole, bank = model(x), len(pruner.bank.mu)
        assert pruner.prune(undoable=True).removed > 1
        ema.update_parameters(model)
        assert ema.module(x).isfinite().all()
        assert len(list(ema.parameters())) == len(list(model.parameters()))
        after = copy.deepcopy(pruner.state_dict())
        small = model(x)
        other, _, another, fresh = self.pruner()
        fresh.follow(AveragedModel(other))
        fresh.load_state_dict(after)
        torch.testing.assert_close(other.eval()(x), small)
        assert fresh.bank.layers == pruner.bank.layers
        for one, two in ((model, optimizer), (other, another)):
            torch.manual_seed(5)
            self.train(one, x, two)
        torch.testing.assert_close(other(x), model(x))
        pruner.undo()
        assert len(pruner.bank.mu) == bank
        torch.testing.assert_close(model.eval()(x), whole)
        fresh.load_state_dict(before)
        torch.manual_seed(6)
        self.train(other, x, another)
        torch.manual_seed(6)
        pruner.load_state_dict(before)
        self.train(model, x, optimizer)
        torch.testing.assert_close(other(x), model(x))
        buffer = io.BytesIO()
        torch.save(after, buffer)
        buffer.seek(0)
        fresh.load_state_dict(torch.load(buffer, weights_only=True))
        torch.testing.assert_close(other.eval()(x), small)

    def test_one_of_them_stays(self):
        model, x, optimizer, pruner = self.pruner()
        self.train(model, x, optimizer)
        block = pruner.structures.blocks[0]
        for unit in range(3):
            self.close(pruner, block.name, unit)
        assert {row.name: (row.left, row.spared) for row in pruner.prune().structures}[block.name] == (1, True)
        with pytest.raises(ValueError, match="would remove all 1 units"):
            bmrs.remove(model, {block: [0]})
        assert model(x).isfinite().all()

    @pytest.mark.parametrize("price", ["params", "macs", "uniform"])
    def test_prices_know_what_a_block_costs(self, price):
        _, _, _, pruner = self.pruner(price=price)
        prices = pruner.prices
        costs = {"params": lambda s: s.params_per_unit, "macs": lambda s: s.macs_per_unit, "uniform": lambda s: 1.0}
        own = {name: float(prices[layer][0]) for name, layer in pruner.bank.layers.items()}
        cost = {name: costs[price](pruner.structures[name]) for name in own}
        total = sum(cost[name] * (layer.stop - layer.start) for name, layer in pruner.bank.layers.items())
        for name in own:
            assert own[name] == pytest.approx(cost[name] / total)

    def test_rows_of_weights_rank_blocks_too(self):
        model, x = made("basic")
        pruner = bmrs.Pruner(model, x, criterion=bmrs.L2(0.5), structures=bmrs.structures(model, x).blocks)
        first, *_ = pruner.structures.blocks
        norms = [
            sum(p.square().sum() for n, p in model.named_parameters() if n.startswith(f"{path}.")).sqrt()
            for path in layers_of(first)
        ]  # fmt: skip
        torch.testing.assert_close(pruner.scores()[first.name], torch.stack(norms).detach())
        assert pruner.prune().removed == 2

    def test_channels_stay_where_they_are_in_memory(self):
        for name in ("basic", "bottleneck", "before"):
            model, x = made(name)
            bmrs.remove(model, middle(bmrs.structures(model, x))[0])
            for layout in (torch.contiguous_format, torch.channels_last):
                given = []
                hooks = [
                    m.register_forward_pre_hook(lambda module, args, given=given: given.append(args[0]))
                    for m in model.modules() if isinstance(m, nn.Conv2d)
                ]  # fmt: skip
                model.to(memory_format=layout)(x.to(memory_format=layout))
                assert all(one.is_contiguous(memory_format=layout) for one in given)
                [hook.remove() for hook in hooks]

    def test_in_16_bits_a_stream_stays_in_them(self):
        model, x = made("basic")
        model.float()
        structures = bmrs.structures(model, x.float())
        bmrs.remove(model, middle(structures)[0])
        with torch.autocast("cpu", torch.bfloat16):
            assert model[1](model[0](x.float())).dtype == torch.bfloat16
        half = model.bfloat16()
        assert half(x.bfloat16()).dtype == torch.bfloat16

    def test_compiled_it_computes_the_same(self):
        model, x, optimizer, pruner = self.pruner()
        self.train(model, x, optimizer)
        self.close(pruner, pruner.structures.blocks[0].name, 1)
        pruner.prune()
        pruner.finish()
        expected = model(x)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected)


class TestWhatStays:
    def listed(self, forward, shape=(3, 6), **parts):
        model = nn.Sequential(nn.Linear(5, 6), *(_Net(forward, parts) for _ in range(2)), nn.Linear(6, 2)).eval()
        return bmrs.structures(model, torch.randn(*shape[:-1], 5))

    def test_what_is_read_elsewhere_too(self):
        def forward(m, x):
            inner = torch.relu(m.a(x))
            return x + m.b(inner) + inner.mean(-1, keepdim=True)

        assert self.listed(forward, a=lambda: nn.Linear(6, 7), b=lambda: nn.Linear(7, 6)).blocks == []

    def test_sums_of_what_has_nothing_in_common(self):
        parts = {"a": lambda: nn.Linear(2, 6), "b": lambda: nn.Linear(3, 6)}
        model = nn.Sequential(_Net(lambda m, x: m.a(x[:, :2]) + m.b(x[:, 2:]), parts), nn.Linear(6, 2))
        assert bmrs.structures(model, torch.randn(3, 5)).blocks == []

    def test_work_that_is_written_out_in_the_block(self):
        """What is no module cannot be taken out of it."""

        def forward(m, x):
            q, k, v = m.qkv(x).chunk(3, -1)
            return x + m.out(F.scaled_dot_product_attention(q, k, v))

        found = self.listed(forward, (3, 4, 6), qkv=lambda: nn.Linear(6, 18), out=lambda: nn.Linear(6, 6))
        assert found.blocks == []

    def test_layers_that_blocks_share(self):
        shared = nn.Linear(6, 6)
        model = nn.Sequential(
            nn.Linear(5, 6), *(_Net(lambda m, x: x + m.a(x), {"a": lambda: shared}) for _ in range(2))
        )
        assert bmrs.structures(model, torch.randn(3, 5)).blocks == []

    def test_an_end_that_is_not_proportional(self):
        class Other(nn.Linear):
            def forward(self, x):
                return super().forward(x) + 1.0

        for forward, layer in ((lambda m, x: x + torch.tanh(m.a(x)), nn.Linear), (lambda m, x: x + m.a(x), Other),
                               (lambda m, x: x + F.linear(x, m.a.weight), nn.Linear)):  # fmt: skip
            assert self.listed(forward, a=lambda layer=layer: layer(6, 6)).blocks == []

    def test_what_fails_the_proof_is_kept_with_the_reason(self):
        """The shape that the graph does not show: the code reads a number off the branch."""

        def forward(m, x):
            y = m.a(x)
            return (x + m.b(torch.relu(y))) * float(y.shape[-1])

        found = self.listed(forward, a=lambda: nn.Linear(6, 7), b=lambda: nn.Linear(7, 6))
        (structure,) = found.blocks
        assert structure.verify().status == "kept: the smaller network computes something else"


class _Net(nn.Module):
    def __init__(self, compute, parts):
        super().__init__()
        for name, make in parts.items():
            self.add_module(name, make())
        self.compute = compute

    def forward(self, x):
        return self.compute(self, x)


def hugging_face():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ids = {"input_ids": torch.randint(50, (2, 7))}
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    yield (
        transformers.ResNetForImageClassification(
            transformers.ResNetConfig(embedding_size=8, hidden_sizes=[16, 24], depths=[3, 2], num_labels=3)
        ),
        {"pixel_values": torch.randn(2, 3, 32, 32)},
        {"resnet.encoder.stages.0.layers.*.layer.2.normalization blocks": 3,
         "resnet.encoder.stages.1.layers.*.layer.2.normalization blocks": 2},
    )  # fmt: skip
    yield (
        transformers.ViTForImageClassification(transformers.ViTConfig(**small, image_size=16, patch_size=4)),
        {"pixel_values": torch.randn(2, 3, 16, 16)},
        None,
    )
    yield (
        transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=4,
                                    bos_token_id=0, eos_token_id=0)
        ),
        ids,
        {"transformer.h.*.attn.c_proj blocks": 2, "transformer.h.*.mlp.c_proj blocks": 2},
    )  # fmt: skip


@pytest.mark.parametrize("number", range(3))
def test_hugging_face_s_networks(number):
    model, inputs, units = list(hugging_face())[number]
    model.eval()
    structures = bmrs.structures(model, inputs)
    assert len(structures.blocks) == 2
    assert units in (None, {s.name: s.units for s in structures.blocks})
    quiet = copy.deepcopy(model)
    tensors = dict(quiet.named_parameters())
    with torch.no_grad():
        for structure in structures.blocks:
            last = sorted({n.rpartition(".")[0] for n, _ in structure.consumers})[1]
            for n, own in tensors.items():  # by hand: the last layer says nothing
                if n.startswith(f"{last}."):
                    own.zero_()
    before = sum(p.numel() for p in model.parameters())
    per_unit = sum(s.params_per_unit for s in structures.blocks)
    bmrs.remove(model, {s: [1] for s in structures.blocks})
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, quiet(**inputs).logits)
    assert sum(p.numel() for p in model.parameters()) < before - 0.7 * per_unit
    model.train()
    model(**inputs).logits.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_decoder_without_its_first_attention_counts_its_tokens_still():
    """The cache of keys and values knows from that one how many there were."""
    model, inputs, _ = list(hugging_face())[2]
    model.eval()
    structures = bmrs.structures(model, inputs)
    bmrs.remove(model, {structures["transformer.h.*.attn.c_proj blocks"]: [0]})
    ids, more = inputs["input_ids"], torch.randint(50, (2, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
        cache = model(ids, use_cache=True).past_key_values
        found = model(more, past_key_values=cache, use_cache=True).logits
        expected = model(torch.cat([ids, more], 1), use_cache=False).logits[:, -3:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", [True, False])
def test_torch_s_own_transformer(first):
    """Its attention is a module whose weights are read, not called; its layers have a fast path of their own."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, norm_first=first)
    model = nn.Sequential(nn.Linear(5, 16), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)).eval()
    x = torch.randn(3, 4, 5)
    structures = bmrs.structures(model, x)
    assert {s.name: s.units for s in structures.blocks} == {
        "1.layers.*.self_attn.out_proj blocks": 3, "1.layers.*.linear2 blocks": 3,
    }  # fmt: skip
    quiet = copy.deepcopy(model)
    for path in ("1.layers.1.self_attn.out_proj", "1.layers.2.linear2"):
        for own in quiet.get_submodule(path).parameters():
            own.data.zero_()
    pruner = bmrs.Pruner(model, x, structures=[*structures, *structures.blocks])
    with torch.no_grad():
        pruner.bank.mu.uniform_(-1.0, 0.0)
    gated = model(x)
    torch.testing.assert_close(pruner.finish()(x), gated)
    assert not torch.allclose(gated, quiet(x))
    model, structures = _again(quiet, x)
    attention, thinking = structures.blocks
    bmrs.remove(model, {attention: [1], thinking: [2]})
    for grad in (True, False):  # without gradients torch takes its fast path where it can
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(model(x), quiet(x))


def _again(model, x):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for path in ("1.layers.1.self_attn.out_proj", "1.layers.2.linear2"):
            for own in other.get_submodule(path).parameters():
                own.normal_()
    return other, bmrs.structures(other, x)


def test_onnx(tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model, x = made("basic")
    model.float()
    bmrs.remove(model, middle(bmrs.structures(model, x.float()))[0])
    session = onnxruntime.InferenceSession(bmrs.export_onnx(model, x[:1].float(), tmp_path / "small.onnx"))
    other = torch.randn(5, 3, 9, 9)
    found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: other.numpy()})[0])
    torch.testing.assert_close(found, model(other), rtol=1e-4, atol=1e-5)
