"""One small network per operation, which sits between layers so that structures run through it."""

import copy
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations


class Net(nn.Module):
    """Layers, parameters and tensors by name, and what is computed with them."""

    def __init__(self, compute, **parts):
        super().__init__()
        for name, part in parts.items():
            if type(part) is Tensor:
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self.compute = compute

    def forward(self, *inputs):
        return self.compute(self, *inputs)


@dataclass
class Case:
    """What is right for a network."""

    name: str
    model: nn.Module
    inputs: tuple
    units: list  # of every structure listed
    stays: dict  # parameter dimension → part of the reason why it stays whole
    kept: list = field(default_factory=list)  # units of structures whose code has literals that do not let them go
    some: bool = False  # literals let some units go and not others


NONE = {}
SOME = {"some": True}


GENERATOR = torch.Generator().manual_seed(0)


def random(*shape):
    return torch.randn(*shape, generator=GENERATOR)


def parameter(*shape):
    return nn.Parameter(random(*shape))


def rows(name, operation, units=None, stays=None, *, wide=6, out=None, tokens=None, flags=NONE, **parts):
    """Linear → operation → Linear; ``tokens`` gives the input a dimension more."""
    inputs = random(6, 5) if tokens is None else random(6, tokens, 5)
    net = Net(lambda m, x: m.b(operation(m, m.a(x))), a=nn.Linear(5, wide), b=nn.Linear(out or wide, 3), **parts)
    return Case(name, net, (inputs,), units or [], stays or {}, **flags)


def maps(name, operation, units=None, stays=None, *, wide=6, out=None, space=2, flags=NONE, **parts):
    """Convolution → operation → convolution, in as many dimensions as ``space``."""
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[space - 1]
    net = Net(lambda m, x: m.b(operation(m, m.a(x))), a=conv(2, wide, 3, padding=1), b=conv(out or wide, 3, 1), **parts)
    return Case(name, net, (random(3, 2, *[4] * space),), units or [], stays or {}, **flags)


def net(name, compute, inputs, units=None, stays=None, *, flags=NONE, **parts):
    return Case(name, Net(compute, **parts), inputs, units or [], stays or {}, **flags)


def stays(reason, *places):
    return dict.fromkeys(places or ("a.weight:0", "a.bias:0", "b.weight:1"), reason)


X, TOKENS, IMAGES, NUMBERS = random(6, 5), random(6, 4, 5), random(3, 2, 4, 4), torch.arange(12).reshape(3, 4) % 7
A6 = [6]


def pointwise():
    yield rows("relu", lambda m, x: F.relu(x), A6)
    yield rows("functions that are not zero at zero", lambda m, x: torch.cos(x) + x.exp() + F.softplus(x) + 1, A6)
    yield rows("activations", lambda m, x: F.gelu(F.silu(F.elu(F.leaky_relu(F.hardswish(F.mish(x)))))), A6)
    yield rows("where and masked_fill", lambda m, x: torch.where(x > 0, x, -x / 3).masked_fill(x > 1, 2.0), A6)
    yield rows("clamp, pow, lerp", lambda m, x: torch.lerp(x.clamp(-1, 1), x**2, 0.3), A6)
    yield rows("dropout that drops nothing", lambda m, x: F.dropout(x, 0.0, m.training), A6)
    yield rows("a vector of weights", lambda m, x: x * m.s + m.t, A6, tokens=4, s=parameter(6), t=parameter(1, 1, 6))
    yield rows("weights along another dimension", lambda m, x: x * m.s, A6, tokens=4, s=parameter(4, 1))
    yield rows("zeros of the same shape", lambda m, x: torch.zeros_like(x) + x + torch.full_like(x, 2), A6)
    yield rows("a number per example", lambda m, x: x * m.s(x), [6], s=nn.Linear(6, 1))
    yield rows("in place", lambda m, x: F.relu(x, inplace=True).mul_(2).add_(1), A6)
    yield rows("in place on a part", lambda m, x: _zeroed(x), A6, flags=SOME)
    both = {"a": nn.Linear(5, 6), "c": nn.Linear(5, 6), "b": nn.Linear(6, 3)}
    yield net("a sum of two", lambda m, x: m.b(m.a(x) + m.c(x)), (X,), A6, **both)
    yield net("a product of two", lambda m, x: m.b(m.a(x) * torch.sigmoid(m.c(x))), (X,), A6, **both)
    yield net("the larger of two", lambda m, x: m.b(torch.maximum(m.a(x), m.c(x))), (X,), A6, **both)
    yield net("every pair", lambda m, x: m.b(m.a(x)[:, :, None] - m.c(x)[:, None]), (TOKENS,), A6, **both)
    yield net("addcmul", lambda m, x: m.b(torch.addcmul(m.a(x), m.c(x), m.a(x))), (X,), A6, **both)
    yield net(
        "a residual network",
        lambda m, x: m.b(m.d(F.relu(m.c(m.a(x)))) + m.a(x)),
        (X,),
        [4, 6],
        a=nn.Linear(5, 6),
        c=nn.Linear(6, 4),
        d=nn.Linear(4, 6),
        b=nn.Linear(6, 3),
    )
    yield rows("prelu with a slope for each", lambda m, x: m.p(x), A6, p=nn.PReLU(6, 0.3))
    yield maps("prelu of channels", lambda m, x: m.p(x), A6, p=nn.PReLU(6, 0.3))
    yield rows("prelu with one slope", lambda m, x: m.p(x), A6, tokens=4, p=nn.PReLU())


def _zeroed(x):
    y = x.clone()
    y[:, :2] = 0
    return y


def shapes():
    yield net(
        "flatten",
        lambda m, x: m.b(m.a(x).flatten(1)),
        (IMAGES,),
        [4],
        a=nn.Conv2d(2, 4, 3, padding=1),
        b=nn.Linear(64, 3),
    )
    yield net(
        "view with the batch's size",
        lambda m, x: m.b(m.a(x).view(x.size(0), -1)),
        (IMAGES,),
        [4],
        a=nn.Conv2d(2, 4, 3),
        b=nn.Linear(16, 3),
    )
    yield rows("unflatten", lambda m, x: x.unflatten(1, (3, 4)), [4], wide=12, out=4)
    yield rows("unflatten and back", lambda m, x: x.unflatten(1, (3, 4)).sin().flatten(1), [3, 4], wide=12)
    yield rows("squeeze and unsqueeze", lambda m, x: x.unsqueeze(1).unsqueeze(-1).squeeze(1).squeeze(-1), A6)
    yield rows("squeeze in place", lambda m, x: x.clone().unsqueeze_(1).squeeze_(1), A6)
    yield rows("permute", lambda m, x: x.permute(2, 0, 1).sin().permute(1, 2, 0), A6, tokens=4)
    yield rows("transpose", lambda m, x: x.transpose(1, 2).transpose(-1, -2).mT.mT, A6, tokens=4)
    yield rows("transpose in place", lambda m, x: x.clone().transpose_(1, 2).sin().transpose(1, 2), A6, tokens=4)
    yield rows("movedim", lambda m, x: x.movedim(-1, 0).movedim(0, 2).movedim((0, 1), (1, 0)), A6, tokens=4)
    yield rows("t", lambda m, x: x.t().t(), A6)
    yield rows("tokens merged with examples", lambda m, x: x.reshape(-1, x.shape[-1]).view(*x.shape), A6, tokens=4)
    yield rows("expand", lambda m, x: x[:, None].expand(-1, 4, -1), A6)
    yield rows("expand and flatten", lambda m, x: x[:, None].expand(-1, 4, -1).flatten(1), A6, out=24)
    yield rows("expand_as", lambda m, x: x[:, :1].expand_as(x) + x, A6, tokens=4)
    yield rows("repeat", lambda m, x: x.repeat(1, 2), A6, out=12)
    yield rows("repeat a new dimension", lambda m, x: x.repeat(3, 1, 1), A6)
    yield rows("repeat_interleave", lambda m, x: x.repeat_interleave(2, dim=1), A6, out=12)
    yield rows("repeat_interleave of tokens", lambda m, x: x.repeat_interleave(2, dim=1), A6, tokens=4)
    yield rows("tile", lambda m, x: torch.tile(x, (2,)), A6, out=12)


def parts():
    yield rows("a slice", lambda m, x: x[:, :4], [4], out=4, flags={"kept": [4]})
    yield rows("a slice of tokens", lambda m, x: x[:, 1:3], A6, tokens=4)
    yield rows("narrow", lambda m, x: x.narrow(1, 1, 4), [4], out=4, flags={"kept": [4]})
    yield rows("every other index", lambda m, x: x[:, ::2], out=3, stays=stays("every other index", "a.weight:0"))
    two = {"b": nn.Linear(2, 3), "c": nn.Linear(4, 3)}
    yield net("two slices", lambda m, x: m.b((y := m.a(x))[:, :2]) + m.c(y[:, 2:]), (X,), [2, 4],
              a=nn.Linear(5, 6), flags={"kept": [2]}, **copy.deepcopy(two))  # fmt: skip
    yield net("an unequal split", lambda m, x: (y := m.a(x).split([2, 4], 1)) and m.b(y[0]) + m.c(y[1]), (X,),
              [2, 4], a=nn.Linear(5, 6), **copy.deepcopy(two))  # fmt: skip
    yield rows("an equal split", lambda m, x: torch.mul(*x.split(3, 1)), [3], out=3)
    yield rows("a split of tokens", lambda m, x: torch.mul(*x.split(2, 1)), A6, tokens=4)
    yield rows("slices put together", lambda m, x: torch.cat([x[:, :2].relu(), x[:, 2:]], 1), A6, flags=SOME)
    yield rows("chunk", lambda m, x: torch.mul(*x.chunk(2, -1)), [3], out=3)
    yield rows("chunk in three", lambda m, x: (y := x.chunk(3, -1)) and y[0] * y[1] + y[2], [2], out=2)
    yield rows("chunks that are not equal", lambda m, x: x.chunk(2, 1)[0], [4], wide=7, out=4, flags=SOME)
    yield rows("glu", lambda m, x: F.glu(x), [3], out=3)
    yield maps("glu of channels", lambda m, x: F.glu(x, 1), [3], out=3)
    yield rows("glu of tokens", lambda m, x: F.glu(x, 1), A6, tokens=4)
    both = {"a": nn.Linear(5, 6), "c": nn.Linear(5, 4)}
    yield net("cat", lambda m, x: m.b(torch.cat([m.a(x), m.c(x).tanh()], 1)), (X,), [4, 6], b=nn.Linear(10, 3),
              **copy.deepcopy(both))  # fmt: skip
    yield net(
        "cat with the input",
        lambda m, x: m.b(torch.cat([x, m.a(x)], -1)),
        (X,),
        A6,
        a=nn.Linear(5, 6),
        b=nn.Linear(11, 3),
    )
    yield net("cat of one with itself", lambda m, x: m.b(torch.cat([y := m.a(x), y.sin()], -1)), (X,), A6,
              a=nn.Linear(5, 6), b=nn.Linear(12, 3))  # fmt: skip
    yield net("cat with a token", lambda m, x: m.b(torch.cat([m.t.expand(len(x), -1, -1), m.a(x)], 1)), (TOKENS,), [6],
              t=parameter(1, 1, 6), a=nn.Linear(5, 6), b=nn.Linear(6, 3))  # fmt: skip
    same = {"a": nn.Linear(5, 6), "c": nn.Linear(5, 6), "b": nn.Linear(6, 3)}
    yield net("stack", lambda m, x: m.b(torch.stack([m.a(x), m.c(x)], 1).sin()), (X,), A6, **copy.deepcopy(same))
    yield net(
        "stack and sum", lambda m, x: m.b(torch.stack([m.a(x), m.c(x)], -1).sum(-1)), (X,), A6, **copy.deepcopy(same)
    )
    yield net("stack and interleave", lambda m, x: m.b(torch.stack([m.a(x), m.c(x)], -1).flatten(1)), (X,), A6,
              a=nn.Linear(5, 6), c=nn.Linear(5, 6), b=nn.Linear(12, 3))  # fmt: skip
    yield rows("one token", lambda m, x: x[:, 0], A6, tokens=4)
    yield rows(
        "one index",
        lambda m, x: x[:, 2:3] * x.select(1, 2)[:, None],
        wide=6,
        out=1,
        stays=stays("by its number", "a.weight:0"),
    )
    yield rows("unbind tokens", lambda m, x: (y := x.unbind(1)) and y[0] * y[3], A6, tokens=4)
    yield rows(
        "unbind", lambda m, x: torch.stack(x.unbind(1)[:3], 1), out=3, stays=stays("by its number", "a.weight:0")
    )
    yield rows("three in one", lambda m, x: (y := x.reshape(len(x), 3, -1).unbind(1)) and y[0] * y[1] + y[2], [4],
               wide=12, out=4)  # fmt: skip
    yield rows(
        "index by a list", lambda m, x: x[:, [0, 2, 3]], out=3, stays=stays("indexing by a tensor", "a.weight:0")
    )
    yield rows("index of tokens", lambda m, x: x[:, [0, 2, 3, 1]], A6, tokens=4)
    yield rows("index of two dimensions", lambda m, x: x[[0, 1, 1], [0, 2, 3]], A6, tokens=4)
    yield rows(
        "index_select", lambda m, x: x.index_select(1, m.i), stays=stays("index_select"), i=torch.arange(6).flip(0)
    )
    yield rows(
        "index_select of tokens", lambda m, x: x.index_select(1, m.i), A6, tokens=4, i=torch.tensor([1, 0, 3, 2])
    )
    yield rows("gather", lambda m, x: x.gather(1, x.sort(1).indices), stays=stays(""))
    yield rows("gather of tokens", lambda m, x: x.gather(1, x.sort(1).indices), A6, tokens=4)
    yield rows("flip", lambda m, x: x.flip(-1), A6)
    yield rows("flip and add", lambda m, x: x.flip(-1) + x, [3])
    yield rows("roll", lambda m, x: x.roll(1, -1), stays=stays("rolled"))
    yield rows("roll of tokens", lambda m, x: x.roll(1, 1), A6, tokens=4)
    yield rows("pad", lambda m, x: F.pad(x, (1, 2)), A6, out=9)
    yield rows(
        "pad with less than nothing", lambda m, x: F.pad(x, (-1, 0)), out=5, stays=stays("padding", "a.weight:0")
    )
    yield maps("pad positions", lambda m, x: F.pad(x, (1, 0, 2, 1)), A6)
    yield maps("pad positions by reflection", lambda m, x: F.pad(x, (1, 1, 1, 1), mode="reflect"), A6)
    yield maps("pad positions by wrapping", lambda m, x: F.pad(x, (1, 1, 1, 1), mode="circular"), A6)
    yield maps("pad channels", lambda m, x: F.pad(x, (0, 0, 0, 0, 1, 1)), A6, out=8)
    yield rows("tril of positions and channels", lambda m, x: x.tril(), tokens=6, stays=stays("triangle"))


def statistics():
    across = ("mean", "sum", "amax", "std", "logsumexp", "norm", "prod")
    for which in across:
        reduce = getattr(torch, which)
        yield rows(f"{which} of tokens", lambda m, x, r=reduce: r(x, dim=1), A6, tokens=4)
        yield rows(f"{which} across", lambda m, x, r=reduce: x * r(x, dim=-1, keepdim=True), stays=stays("over it"))
    yield maps("global mean", lambda m, x: x.mean((2, 3), keepdim=True), A6)
    yield maps("mean without its dimensions", lambda m, x: x.mean((-1, -2))[..., None, None], A6)
    yield rows("mean of everything", lambda m, x: x * x.mean(), stays=stays("mean over it"))
    yield rows("variance and mean", lambda m, x: (y := torch.var_mean(x, 1)) and y[0] + y[1], A6, tokens=4)
    yield rows("largest token", lambda m, x: x.max(1).values, A6, tokens=4)
    yield rows("largest index", lambda m, x: x * x.max(1, keepdim=True).values, stays=stays("max over it"))
    yield rows("cumsum", lambda m, x: x.cumsum(-1), stays=stays("cumsum along it"))
    yield rows("cumsum of tokens", lambda m, x: x.cumsum(1), A6, tokens=4)
    yield rows("softmax", lambda m, x: x.softmax(-1), stays=stays("softmax along it"))
    yield rows("softmax of tokens", lambda m, x: x.softmax(1), A6, tokens=4)
    yield rows("log_softmax", lambda m, x: F.log_softmax(x, 1), stays=stays("log_softmax along it"))
    yield rows("normalize", lambda m, x: F.normalize(x, dim=-1), stays=stays("over it"))
    yield rows("normalize tokens", lambda m, x: F.normalize(x, dim=1), A6, tokens=4)
    yield rows("sort", lambda m, x: x.sort(-1).values, stays=stays("sort along it"))
    yield rows("sort of tokens", lambda m, x: x.sort(1).values, A6, tokens=4)
    yield rows("topk", lambda m, x: x.topk(3).values, out=3, stays=stays("topk along it", "a.weight:0"))
    yield rows("topk of tokens", lambda m, x: x.topk(2, 1).values, A6, tokens=4)
    yield rows("layer_norm", lambda m, x: m.n(x), stays=stays("layer_norm over it"), n=nn.LayerNorm(6))
    yield rows("layer_norm of tokens", lambda m, x: m.n(x.mT).mT, A6, tokens=4, n=nn.LayerNorm(4))
    yield rows("rms_norm", lambda m, x: m.n(x), stays=stays("rms_norm over it"), n=nn.RMSNorm(6))
    yield rows("rms_norm of tokens", lambda m, x: m.n(x.mT).mT, A6, tokens=4, n=nn.RMSNorm(4))
    yield maps("batch_norm", lambda m, x: m.n(x), A6, n=nn.BatchNorm2d(6))
    yield rows("batch_norm of rows", lambda m, x: m.n(x), A6, n=nn.BatchNorm1d(6))
    yield maps("batch_norm without weights", lambda m, x: m.n(x), A6, n=nn.BatchNorm2d(6, affine=False))
    yield maps("batch_norm without memory", lambda m, x: m.n(x), A6, n=nn.BatchNorm2d(6, track_running_stats=False))
    yield rows(
        "batch_norm of tokens", lambda m, x: m.n(x), stays=stays("statistics over it"), tokens=4, n=nn.BatchNorm1d(4)
    )
    yield maps("instance_norm", lambda m, x: m.n(x), A6, n=nn.InstanceNorm2d(6, affine=True))
    yield maps("instance_norm with memory", lambda m, x: m.n(x), A6, n=nn.InstanceNorm2d(6, track_running_stats=True))
    yield maps("group_norm", lambda m, x: m.n(x), [3], n=nn.GroupNorm(3, 6))
    yield maps("group_norm of one group", lambda m, x: m.n(x), stays=stays("group_norm over it"), n=nn.GroupNorm(1, 6))
    yield maps("group_norm of single channels", lambda m, x: m.n(x), A6, n=nn.GroupNorm(6, 6))
    yield maps("local response norm", lambda m, x: F.local_response_norm(x, 3), stays=stays("avg_pool3d"))


def images():
    yield maps("max_pool", lambda m, x: F.max_pool2d(x, 2), A6)
    yield maps("max_pool in one dimension", lambda m, x: F.max_pool1d(x, 2), A6, space=1)
    yield maps("max_pool in three dimensions", lambda m, x: F.max_pool3d(x, 2), A6, space=3)
    yield maps("avg_pool", lambda m, x: F.avg_pool2d(x, 2), A6)
    yield maps("adaptive_avg_pool", lambda m, x: F.adaptive_avg_pool2d(x, 1), A6)
    yield maps("adaptive_max_pool", lambda m, x: F.adaptive_max_pool2d(x, 2), A6)
    yield rows("pool across", lambda m, x: F.max_pool1d(x, 2), out=3, tokens=4, stays=stays("max_pool1d", "a.weight:0"))
    for how in ("nearest", "bilinear", "bicubic", "area"):
        yield maps(f"interpolate {how}", lambda m, x, how=how: F.interpolate(x, scale_factor=2, mode=how), A6)
    yield maps("interpolate linear", lambda m, x: F.interpolate(x, size=7, mode="linear"), A6, space=1)
    yield maps("pixel_shuffle", lambda m, x: F.pixel_shuffle(x, 2), [3], wide=12, out=3)
    yield maps("pixel_unshuffle", lambda m, x: F.pixel_unshuffle(x, 2), [3], wide=3, out=12)
    yield maps("channel_shuffle", lambda m, x: m.s(x), [2, 4], wide=8, flags={"kept": [2]}, s=nn.ChannelShuffle(2))
    yield maps("channel shuffle by hand", lambda m, x: x.unflatten(1, (2, 3)).transpose(1, 2).flatten(1, 2), [2, 3])
    yield net("unfold", lambda m, x: m.b(F.unfold(m.a(x), 3, padding=1).mT), (IMAGES,), [4],
              a=nn.Conv2d(2, 4, 1), b=nn.Linear(36, 3))  # fmt: skip
    yield net("fold", lambda m, x: m.b(F.fold(m.a(x).mT, (4, 4), 2, stride=2)), (TOKENS,), [3],
              a=nn.Linear(5, 12), b=nn.Conv2d(3, 2, 1))  # fmt: skip


def products():
    yield rows("linear without bias", lambda m, x: F.linear(x, m.w), [4, 6], out=4, w=parameter(4, 6))
    yield rows("matmul with weights", lambda m, x: x @ m.w, [4, 6], out=4, tokens=4, w=parameter(6, 4))
    yield rows("weights on the left", lambda m, x: (m.w @ x.mT).mT, [4, 6], out=4, tokens=4, w=parameter(4, 6))
    yield rows("addmm", lambda m, x: torch.addmm(m.v, x, m.w), [4, 6], out=4, v=parameter(4), w=parameter(6, 4))
    yield rows("bmm", lambda m, x: torch.bmm(x, m.w.expand(len(x), -1, -1)), [4],
               stays("computed from parameters", "a.weight:0"), out=4, tokens=4, w=parameter(1, 6, 4))  # fmt: skip
    yield rows(
        "matmul of stacked weights", lambda m, x: x[:, None] @ m.w, [4, 6], out=4, tokens=4, w=parameter(3, 6, 4)
    )
    yield rows("a product with a vector", lambda m, x: (x @ m.w)[..., None], A6, out=1, tokens=4, w=parameter(6))
    yield rows(
        "activations that meet",
        lambda m, x: x @ x.mT,
        tokens=4,
        out=4,
        stays=stays("product of activations", "a.weight:0"),
    )
    yield rows("einsum with weights", lambda m, x: torch.einsum("bti,io->bto", x, m.w), [4, 6], out=4, tokens=4,
               w=parameter(6, 4))  # fmt: skip
    yield rows("einsum without an arrow", lambda m, x: torch.einsum("bi,io", x, m.w), [4, 6], out=4, w=parameter(6, 4))
    yield rows("einsum with dots", lambda m, x: torch.einsum("...i,oi->...o", x, m.w), [4, 6], out=4, tokens=4,
               w=parameter(4, 6))  # fmt: skip
    yield rows("einsum of three", lambda m, x: torch.einsum("bi,io,i->bo", x, m.w, m.v), stays=stays("", "a.weight:0"),
               units=[4], out=4, w=parameter(6, 4), v=parameter(6))  # fmt: skip
    yield rows("einsum that transposes", lambda m, x: torch.einsum("bti->bit", x).mT, A6, tokens=4)
    yield rows("einsum that sums", lambda m, x: x * torch.einsum("bi->b", x)[:, None], stays=stays("over it"))
    yield net("embedding", lambda m, i: m.b(m.e(i)), (NUMBERS,), [6], stays("looked up by number", "e.weight:0"),
              e=nn.Embedding(7, 6), b=nn.Linear(6, 3))  # fmt: skip
    yield net("embeddings of words and positions", lambda m, i: m.b(m.e(i) + m.p(torch.arange(4)) + m.q),
              (NUMBERS,), [6], e=nn.Embedding(7, 6), p=nn.Embedding(4, 6), q=parameter(4, 6),
              b=nn.Linear(6, 3))  # fmt: skip
    yield net("a tied embedding", lambda m, i: F.linear(m.e(i).sin() + m.p, m.e.weight), (NUMBERS,), [6],
              stays("", "e.weight:0"), e=nn.Embedding(7, 6), p=parameter(6))  # fmt: skip
    yield net("one layer twice", lambda m, x: m.b(m.r(m.r(m.a(x)).tanh()).tanh()), (X,), [6], a=nn.Linear(5, 6),
              r=nn.Linear(6, 6), b=nn.Linear(6, 3))  # fmt: skip
    yield net("one layer at two ends", lambda m, x: m.b(m.r(F.relu(m.a(x)))) + m.c(m.r(m.d(x))), (X,), [4, 6],
              a=nn.Linear(5, 4), d=nn.Linear(5, 4), r=nn.Linear(4, 6), b=nn.Linear(6, 3),
              c=nn.Linear(6, 3))  # fmt: skip
    yield rows("weights of low rank added", lambda m, x: F.linear(x, m.w + 0.5 * (m.u @ m.v)), [2, 4, 6], out=4,
               w=parameter(4, 6), u=parameter(4, 2), v=parameter(2, 6))  # fmt: skip
    yield rows("a path of low rank beside", lambda m, x: m.w(x) + m.u(m.v(x)), [2, 4, 6], out=4,
               w=nn.Linear(6, 4), u=nn.Linear(2, 4), v=nn.Linear(6, 2))  # fmt: skip
    yield rows("scaled weights", lambda m, x: F.linear(x, m.w * 0.5), [4, 6], out=4, w=parameter(4, 6))
    yield rows("squared weights", lambda m, x: F.linear(x, m.w**2), [4],
               stays("computed from parameters", "a.weight:0"), out=4, w=parameter(4, 6))  # fmt: skip
    yield rows("standardised weights", lambda m, x: F.linear(x, m.w - m.w.mean(1, keepdim=True)), [4],
               stays("mean over it", "a.weight:0"), out=4, w=parameter(4, 6))  # fmt: skip
    yield rows(
        "weights plus a row", lambda m, x: F.linear(x, m.w + m.v), [4, 6], out=4, w=parameter(4, 6), v=parameter(1, 6)
    )
    yield rows("a long row of weights", lambda m, x: F.linear(x, m.w.view(4, 6)), [4, 6], out=4, w=parameter(24))
    yield rows("weights for every token", lambda m, x: F.linear(x.flatten(1), m.w.flatten(1)), [4, 6], out=4, tokens=3,
               w=parameter(4, 3, 6))  # fmt: skip
    yield rows("weights for every part", lambda m, x: torch.einsum("bhi,hio->bho", x.view(-1, 3, 4), m.w).flatten(1),
               [3, 4, 5], wide=12, out=15, w=parameter(3, 4, 5))  # fmt: skip
    yield net("weights put together", lambda m, x: F.linear(torch.cat([m.a(x), m.c(x)], 1), torch.cat([m.w, m.v], 1)),
              (X,), [4, 6], a=nn.Linear(5, 6), c=nn.Linear(5, 4), w=parameter(3, 6), v=parameter(3, 4))  # fmt: skip
    yield rows("all products of two", lambda m, x: (x[:, :, None] * x[:, None, :]).flatten(1), A6, out=36)
    a_stays = stays("", "a.weight:0")
    yield rows("shifted weights", lambda m, x: F.linear(x, m.w + 1), [4], a_stays, out=4, w=parameter(4, 6))
    yield rows("weights plus a number", lambda m, x: F.linear(x, m.w + m.s), [4], a_stays, out=4, w=parameter(4, 6),
               s=parameter(1))  # fmt: skip
    yield rows("weights plus a column", lambda m, x: F.linear(x, m.w + m.v), [4], a_stays, out=4, w=parameter(4, 6),
               v=parameter(4, 1))  # fmt: skip
    yield rows("generated weights", lambda m, x: F.linear(x, m.g(m.u)), [2, 4], a_stays, out=4, g=nn.Linear(2, 6),
               u=parameter(4, 2))  # fmt: skip
    yield net("a weight-normed producer", lambda m, x: m.b(m.a(x).relu()), (X,), [6],
              a=parametrizations.weight_norm(nn.Linear(5, 6)), b=nn.Linear(6, 3))  # fmt: skip
    yield net("a weight-normed consumer", lambda m, x: m.b(m.a(x).relu()), (X,), [], stays("", "a.weight:0"),
              a=nn.Linear(5, 6), b=parametrizations.weight_norm(nn.Linear(6, 3)))  # fmt: skip


def attention():
    def heads(x, n=3):
        return x.view(x.shape[0], x.shape[1], n, -1).transpose(1, 2)

    def qkv(wide=12, small=None, **parts):
        layers = {"q": nn.Linear(5, wide), "k": nn.Linear(5, small or wide), "v": nn.Linear(5, small or wide)}
        return {**layers, "o": nn.Linear(wide, 3), **parts}

    def merged(x):
        return x.transpose(1, 2).flatten(2)

    def attend(m, x, n=3, groups=None, **options):
        q, k, v = heads(m.q(x), n), heads(m.k(x), groups or n), heads(m.v(x), groups or n)
        return m.o(merged(F.scaled_dot_product_attention(q, k, v, **options)))

    def eager(m, x):
        q, k, v = heads(m.q(x)), heads(m.k(x)), heads(m.v(x))
        return m.o(merged(torch.softmax(q @ k.mT * 0.5, -1) @ v))

    def repeated(m, x):
        q, k, v = heads(m.q(x), 4), *(heads(y, 2).repeat_interleave(2, dim=1) for y in (m.k(x), m.v(x)))
        return m.o(merged(torch.softmax(q @ k.mT, -1) @ v))

    def written_out(m, x):
        q, k, v = (y(x).view(len(x), 4, 3, 4) for y in (m.q, m.k, m.v))
        return m.o(torch.einsum("bhij,bjhd->bihd", torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1), v).flatten(2))

    def one_head(m, x):
        return m.o(F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x)))

    inner = stays("", "q.weight:1")
    yield net("attention", lambda m, x: attend(m, x), (TOKENS,), [3], inner, **qkv())
    yield net("causal attention", lambda m, x: attend(m, x, is_causal=True), (TOKENS,), [3], inner, **qkv())
    yield net("attention with a bias for each head", lambda m, x: attend(m, x, attn_mask=m.r), (TOKENS,), [3], inner,
              **qkv(r=parameter(3, 4, 4)))  # fmt: skip
    yield net(
        "grouped attention", lambda m, x: attend(m, x, 4, 2, enable_gqa=True), (TOKENS,), [2], inner, **qkv(12, 6)
    )
    yield net("attention written out", eager, (TOKENS,), [3], inner, **qkv())
    yield net("attention by einsum", written_out, (TOKENS,), [3], inner, **qkv())
    yield net("grouped attention written out", repeated, (TOKENS,), [2], inner, **qkv(12, 6))
    yield net(
        "attention of one head", one_head, (TOKENS,), [12], stays("inner product", "q.weight:0", "k.weight:0"), **qkv()
    )


def convolutions():
    yield maps("conv1d", lambda m, x: x.relu(), A6, space=1)
    yield maps("conv2d", lambda m, x: x.relu(), A6)
    yield maps("conv3d", lambda m, x: x.relu(), A6, space=3)
    yield net(
        "conv of an unbatched image",
        lambda m, x: m.b(m.a(x)),
        (IMAGES[0],),
        A6,
        a=nn.Conv2d(2, 6, 3),
        b=nn.Conv2d(6, 3, 1),
    )
    yield maps("positions as tokens", lambda m, x: m.c(x.flatten(2).mT).mT.unflatten(2, (4, 4)), [5, 6], out=5,
               c=nn.Linear(6, 5))  # fmt: skip
    yield maps("squeeze and excitation", lambda m, x: x * m.d(m.c(x.mean((2, 3), keepdim=True)).tanh()).sigmoid(),
               [2, 6], c=nn.Conv2d(6, 2, 1), d=nn.Conv2d(2, 6, 1))  # fmt: skip
    yield maps("depthwise", lambda m, x: m.g(x), A6, g=nn.Conv2d(6, 6, 3, groups=6))
    yield maps("depthwise, two each", lambda m, x: m.g(x), [2, 6], out=12, g=nn.Conv2d(6, 12, 3, groups=6))
    yield maps("grouped", lambda m, x: m.g(x), [2, 3, 4], out=8, g=nn.Conv2d(6, 8, 3, groups=2))
    yield maps("grouped in one dimension", lambda m, x: m.g(x), [2, 3, 4], out=8, space=1,
               g=nn.Conv1d(6, 8, 3, groups=2))  # fmt: skip
    yield maps("transposed", lambda m, x: m.g(x), [4, 6], out=4, g=nn.ConvTranspose2d(6, 4, 2, stride=2))
    yield maps(
        "transposed in three dimensions", lambda m, x: m.g(x), [4, 6], out=4, space=3, g=nn.ConvTranspose3d(6, 4, 2)
    )
    yield maps("transposed and grouped", lambda m, x: m.g(x), [2, 3, 4], out=8,
               g=nn.ConvTranspose2d(6, 8, 2, groups=2))  # fmt: skip
    yield maps("transposed depthwise", lambda m, x: m.g(x), A6, g=nn.ConvTranspose2d(6, 6, 2, groups=6))


def constants():
    yield rows("a buffer", lambda m, x: x * m.s, A6, s=random(6))
    yield rows("a number", lambda m, x: x * m.s, A6, s=torch.tensor(0.5))
    yield rows("numbers made on the way", lambda m, x: x * torch.arange(6), stays=stays("made in the forward pass"))
    yield rows("a tensor that is no buffer", lambda m, x: x * m.plain[0], stays=stays(""), plain=[random(6)])
    yield rows("positions made on the way", lambda m, x: x * torch.arange(4)[:, None], A6, tokens=4)
    yield net(
        "the model's input", lambda m, x: m.a(x), (X,), [], stays("the model's input", "a.weight:1"), a=nn.Linear(5, 6)
    )
    yield net(
        "the model's output",
        lambda m, x: m.a(x),
        (X,),
        [],
        stays("the model's output", "a.weight:0"),
        a=nn.Linear(5, 6),
    )
    yield net("an output on the way", lambda m, x: (y := m.a(x), m.b(y)), (X,), [],
              stays("the model's output", "a.weight:0"), a=nn.Linear(5, 6), b=nn.Linear(6, 3))  # fmt: skip


def without_rules():
    """Nothing is known of them, so nothing goes that they touch."""
    yield rows("bessel", lambda m, x: torch.special.bessel_j0(x), stays=stays("'special_bessel_j0' has no rule"))
    yield rows("fft", lambda m, x: torch.fft.rfft(x, dim=-1).abs(), stays=stays("has no rule", "a.weight:0"), out=4)
    yield rows("cdist", lambda m, x: torch.cdist(x, x), stays=stays("has no rule", "a.weight:0"), tokens=4, out=4)
    yield rows("diagonal", lambda m, x: x.diagonal(dim1=1, dim2=2), stays=stays("has no rule"), tokens=6)
    yield rows("windows", lambda m, x: x.unfold(1, 2, 1).mean(-1), stays=stays("has no rule", "a.weight:0"), out=5)
    yield rows("scatter_add", lambda m, x: torch.zeros_like(x).scatter_add(1, m.i, x), stays=stays("has no rule"),
               i=torch.zeros(6, 6, dtype=torch.long))  # fmt: skip
    yield rows("as many as are true", lambda m, x: x[x[:, 0] > -9], stays=stays(""))


FAMILIES = (pointwise, shapes, parts, statistics, images, products, attention, convolutions, constants)
with torch.random.fork_rng():
    torch.manual_seed(0)
    CASES = [case for family in (*FAMILIES, without_rules) for case in family()]
for case in CASES:
    case.model.double()
    case.inputs = tuple(x.double() if x.is_floating_point() else x for x in case.inputs)
