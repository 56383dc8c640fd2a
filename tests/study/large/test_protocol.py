"""Training that stops anywhere and goes on ends as if it had not stopped; what is left is what is said."""

import io

import pytest
import torch
from safetensors.torch import load_file

import bmrs
from bmrs.study.large import networks, protocol, steps
from bmrs.study.large.deadline import Deadline, TimeUpError
from bmrs.study.large.recipe import SETTINGS, Recipe
from tests.study.large.made import write_cifar, write_resnet, write_vit

RESNET, VIT = SETTINGS["resnet50-cifar10"], SETTINGS["vit-cifar10"]
QUICK = {"resolution": 32, "epochs": 3, "fine_tune": 2, "batch": 16, "phi_lr": 800.0, "log_sigma": -2.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("large")
    write_cifar(made)
    write_resnet(made / "resnet")
    write_vit(made / "vit")
    return made


def recipe(folder, **more):
    return Recipe(**{**QUICK, "weights": str(folder / "resnet"), "vit_weights": str(folder / "vit"), **more})


def told(found):
    """A result without times."""
    (run,) = found["runs"]
    history = [{k: v for k, v in past.items() if k not in ("seconds", "wall")} for past in run["history"]]
    return {**{k: v for k, v in run.items() if k not in ("seconds_per_epoch", "file")}, "history": history}


CASES = {
    "plain": (RESNET, "none", {"schedule": "cosine", "augment": "shift"}),
    "gates": (RESNET, "bmrs_n", {"warmup": 4}),
    "folded before fine-tuning": (RESNET, "snr", {"fold": "before", "gates": "all", "price": "macs"}),
    "l2": (RESNET, "l2", {}),
    "vit": (VIT, "bmrs_u4", {}),
}


@pytest.mark.parametrize("case", CASES)
def test_stopped_after_any_epoch_it_ends_the_same(case, folder, tmp_path):
    setting, method, more = CASES[case]
    states = []

    def keep(state, at_once=False):
        file = io.BytesIO()
        torch.save(state, file)
        states.append(file.getvalue())

    options = {"data_dir": folder, "share": 0.3 if method == "l2" else None}
    whole = protocol.continuous(
        setting, recipe(folder, **more), method, 1, file=tmp_path / "whole.safetensors", checkpoint=keep, **options
    )
    assert len(states) == 5
    if method != "none":
        assert whole["runs"][0]["history"][2]["units"] < sum(whole["setting"]["layers"].values())
    for done in (1, 3, 4):
        state = torch.load(io.BytesIO(states[done - 1]), weights_only=True)
        assert state["done"] == done
        again = protocol.continuous(
            setting, recipe(folder, **more), method, 1, file=tmp_path / "again.safetensors", resume=state, **options
        )
        assert told(again) == told(whole)
        if method != "none":
            first, second = (load_file(tmp_path / f"{name}.safetensors") for name in ("whole", "again"))
            assert first.keys() == second.keys()
            assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_is_left_is_what_is_said(folder, tmp_path):
    file = tmp_path / "nets" / "small.safetensors"
    own = recipe(folder)
    found = protocol.continuous(RESNET, own, "bmrs_n", 0, data_dir=folder, file=file)
    (run,), entry = found["runs"], found["setting"]
    whole = networks.build(RESNET, 10, own, 5, filled=False)
    x = torch.randn(3, 3, 32, 32)
    assert entry["parameters"] == bmrs.cost.parameters(whole)
    assert entry["multiply_adds"] == bmrs.cost.multiply_adds(whole, x[:1])
    small = bmrs.load(whole, file)
    assert run["parameters"] == bmrs.cost.parameters(small) < entry["parameters"]
    assert run["multiply_adds"] == bmrs.cost.multiply_adds(small, x[:1]) < entry["multiply_adds"]
    assert run["compression"]["actual"] == pytest.approx(1 - run["parameters"] / entry["parameters"])
    left, all_units = sum(run["units"].values()), sum(entry["layers"].values())
    assert run["removed_units"] == pytest.approx(1 - left / all_units)
    # As the authors count: zeros in weights of more than one dimension, and two for each removed unit.
    assert 0 < run["compression"]["published"] < 1
    matrices = {n: p.numel() for n, p in networks.build(RESNET, 10, own, 5, filled=False).named_parameters()
                if p.dim() > 1}  # fmt: skip
    zeros = sum(matrices.values()) - sum(p.numel() for p in small.parameters() if p.dim() > 1)
    counted = (zeros + 2 * (all_units - left)) / (entry["parameters"] + 2 * all_units)
    assert run["compression"]["published"] == pytest.approx(counted)
    assert run["finish"]["before"] == run["finish"]["after"] == run["accuracy"]
    data = protocol.Feed("cifar10", folder, resolution=32, device=torch.device("cpu"))
    with torch.no_grad():
        right = small.eval()(data.prepared(data.test.x)).logits.argmax(1) == data.test.y
    assert float(right.float().mean()) == pytest.approx(run["accuracy"])


def test_a_deadline_keeps_the_state_and_stops(folder, monkeypatch):
    kept = []
    deadline = Deadline(1000.0)
    monkeypatch.setattr(deadline, "left", lambda: 1000.0 if len(kept) < 2 else 0.0)
    with pytest.raises(TimeUpError):
        protocol.continuous(
            RESNET, recipe(folder), "none", 0, data_dir=folder, deadline=deadline,
            checkpoint=lambda state, at_once: kept.append((state["done"], at_once)),
        )  # fmt: skip
    assert kept[:-1] == [(1, False)] * (len(kept) - 1)
    assert kept[-1] == (2, True) or kept == [(1, False), (2, False)]


def test_steps_are_those_of_plain_training(folder):
    """Without gates a run is nothing but Adam on the split, batch by batch."""
    own = recipe(folder, epochs=1, fine_tune=0)
    run = protocol.Run(RESNET, own, "none", 2, data_dir=folder)
    by_hand = networks.build(RESNET, 10, own, 2)
    run.epoch()
    optimizer = torch.optim.Adam(by_hand.parameters(), lr=own.learning_rate)
    feed = protocol.Feed("cifar10", folder, resolution=32, device=torch.device("cpu"))
    order = feed.epoch(2, 1).order
    by_hand.train()
    for index in order.split(16):
        optimizer.zero_grad()
        x, y = feed.prepared(feed.train.x[index]), feed.train.y[index]
        torch.nn.functional.cross_entropy(by_hand(x).logits, y).backward()
        optimizer.step()
    ours = run.network.state_dict()
    for name, value in by_hand.state_dict().items():
        torch.testing.assert_close(ours[name], value, msg=name)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_steps_train_the_same(folder, monkeypatch):
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled(model, backend="eager", **options))
    found = {}
    for how in ("eager", "compile"):
        run = protocol.Run(RESNET, recipe(folder, step=how, epochs=2, fine_tune=0), "bmrs_n", 0, data_dir=folder)
        run.epoch()
        run.epoch()
        found[how] = run
    assert [past["units"] for past in found["eager"].history] == [past["units"] for past in found["compile"].history]
    states = [found[how].network.state_dict() for how in found]
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], atol=1e-4, rtol=1e-3, msg=name)


def test_bf16_and_channels_last_train(folder):
    run = protocol.Run(
        RESNET, recipe(folder, precision="bf16", channels_last=True, epochs=2, fine_tune=0), "bmrs_n", 0,
        data_dir=folder,
    )  # fmt: skip
    run.epoch()
    run.epoch()
    weights = [p for p in run.network.parameters() if p.dim() == 4]
    assert all(p.dtype == torch.float32 and p.is_contiguous(memory_format=torch.channels_last) for p in weights)
    moments = [run.optimizer.state[p]["exp_avg"] for p in weights]
    assert all(m.is_contiguous(memory_format=torch.channels_last) for m in moments)


def test_rates():
    constant, linear = Recipe().of(RESNET), Recipe().of(VIT)
    assert {steps.rate(constant, n, 100) for n in range(100)} == {6.8e-4}
    values = [steps.rate(linear, n, 10_000) / 6.8e-4 for n in range(10_000)]
    assert values[0] == pytest.approx(1 / 200)
    assert values[199] == pytest.approx(1 - 199 / 10_000)
    assert values[-1] == pytest.approx(1e-4)
    cosine = Recipe(schedule="cosine").of(RESNET)
    assert steps.rate(cosine, 5_000, 10_000) == pytest.approx(3.4e-4)


def test_errors_in_one_sentence(folder):
    with pytest.raises(ValueError, match="add bmrs_n to the methods"):
        protocol.Run(RESNET, recipe(folder), "l2", 0, data_dir=folder)
    with pytest.raises(ValueError, match="--step graph: only a GPU"):
        protocol.Run(RESNET, recipe(folder, step="graph"), "none", 0, data_dir=folder)
