import json
import math
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bmrs
from bmrs.inspection import make_model
from tests.commands.made import answer, data, run, user_files

RECIPE = ("--epochs", "14", "--fine-tune", "2", "--learning-rate", "0.01", "--phi-rate", "7", "--strength", "0.1",
          "--seed", "3")  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return user_files(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def trained(place):
    """The command's answer, and its folder."""
    return answer(run(*command(place, place / "run"), "--json")), place / "run"


def command(place, out, network="make", **options):
    return ("train", f"{place / 'net.py'}:{network}", "--data", place / "data.npz", *RECIPE, "--out", out)


def small(place, out, network="make"):
    """The command's file on a fresh original."""
    return bmrs.load(make_model(f"{place / 'net.py'}:{network}"), out / "small.safetensors").requires_grad_(False)


def by_hand():
    """The same training, as one would write it."""
    x, y = data()
    x, y, tests = x[:384], y[:384], (x[384:], y[384:])
    torch.manual_seed(3)
    model = nn.Sequential(nn.Identity(), nn.Linear(20, 24), nn.Dropout(0.1), nn.ReLU(), nn.Linear(24, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    pruner = bmrs.Pruner(model, x[:2], optimizer, strength=0.1, phi_lr=7.0, warmup=14 * 12 // 4, seed=3)
    for epoch in range(16):
        if epoch == 14:
            pruner.finish()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
        torch.manual_seed(random.Random(f"3 {epoch} 0").getrandbits(32))  # of dropout
        torch.empty((), dtype=torch.int64).random_()  # every DataLoader draws a number when it begins
        model.train()
        for batch in torch.randperm(384, generator=torch.Generator().manual_seed(3 + epoch)).split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        if epoch < 14:
            pruner.prune()
    accuracy = (model.eval()(tests[0]).argmax(1) == tests[1]).double().mean()
    return model, float(accuracy)


class TestTraining:
    def test_it_is_the_loop_one_would_write(self, place, trained):
        result, folder = trained
        model, accuracy = by_hand()
        assert 2 <= result["units"]["1"]["after"] <= 12 < result["units"]["1"]["before"]
        for ours, theirs in zip(small(place, folder).parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        assert result["judged"]["pruned"] == {"test": accuracy}
        assert result["after"]["parameters"] == sum(p.numel() for p in model.parameters())

    def test_it_leaves_numbers_and_a_page(self, trained):
        result, folder = trained
        content = json.loads((folder / "result.json").read_text())
        assert content["provenance"]["recipe"]["phi_rate"] == 7.0
        assert content["provenance"]["criterion"].startswith("BMRS_N")
        assert [entry["epoch"] for entry in content["epochs"]] == [*range(1, 15), 1, 2]
        assert content["before"]["multiply_adds"] == 20 * 24 + 24 * 2
        assert "How it shrank" in (folder / "report.html").read_text()
        assert set(result["files"]) == {"network", "numbers", "report"}

    def test_given_again_it_says_the_same_without_training(self, place, trained):
        result, folder = trained
        (folder / "small.safetensors").unlink()
        again = run(*command(place, folder), INTERRUPTED_AT="1")  # which no pass reaches
        assert again.exit_code == 0, again.output
        assert "Done before: 14 of 14 epochs (pruning), 2 of 2 epochs (fine-tuning)." in again.output
        assert f'model = bmrs.load(make(), "{folder / "small.safetensors"}")' in again.output
        assert f"bmrs bench {place / 'net.py'}:make --input 1x20 --small {folder}/small.safetensors" in again.output
        assert json.loads((folder / "result.json").read_text())["after"]["parameters"] == result["after"]["parameters"]

    def test_killed_and_interrupted_it_ends_as_if_nothing_had_happened(self, place, trained, tmp_path):
        environment = {**os.environ, "KILLED_AT": str(12 * 5 + 7), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
        arguments = [str(argument) for argument in command(place, tmp_path)]
        killed = subprocess.run([sys.executable, "-m", "bmrs", *arguments], env=environment, capture_output=True)
        assert killed.returncode == -9, killed.stderr
        # In the first epoch of fine-tuning, of which nothing is kept yet.
        stopped = run(*arguments, INTERRUPTED_AT=str(12 * 9 + 3))
        assert stopped.exit_code == 130
        assert "5 of 14 epochs" in stopped.output
        assert "bmrs: stopped; give the same command again" in stopped.output
        # In its second one, with an epoch to go on from.
        assert run(*arguments, INTERRUPTED_AT=str(12 + 5)).exit_code == 130
        last = answer(run(*arguments, "--json"))
        result, folder = trained
        for name in ("before", "after", "units", "judged"):
            assert last[name] == result[name]
        for a, b in zip(small(place, tmp_path).parameters(), small(place, folder).parameters(), strict=True):
            assert torch.equal(a, b)
        gates = [json.loads((f / "result.json").read_text())["gates"] for f in (tmp_path, folder)]
        assert gates[0] == gates[1]

    def test_it_goes_on_with_the_same_options_only(self, place, trained):
        refused = run(*command(place, trained[1]), "--strength", "2")
        assert refused.exit_code == 2
        assert "results of another kind (strength 0.1 there, 2.0 now)" in refused.output
        assert "or throw them away with --restart" in refused.output

    def test_restart_begins_anew(self, place, tmp_path):
        short = ("--epochs", "1", "--fine-tune", "0")
        for extra in ((), ("--restart", "--strength", "2")):
            result = run(*command(place, tmp_path), *short, *extra)
            assert result.exit_code == 0, result.output
            assert "Going on" not in result.output
        assert json.loads((tmp_path / "parts" / "key.json").read_text())["strength"] == 2.0

    def test_compared_with_the_network_trained_whole(self, place, tmp_path):
        arguments = (*command(place, tmp_path, "plain"), "--epochs", "2", "--fine-tune", "1", "--compare")
        stopped = run(*arguments, "--learning-rate", "0.02")
        assert stopped.exit_code == 0, stopped.output
        assert "trained whole" in stopped.output
        assert re_line(stopped.output, "1/3  whole network", "epoch   3/3")
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        x, y = data()
        for epoch in range(3):
            for batch in torch.randperm(384, generator=torch.Generator().manual_seed(3 + epoch)).split(32):
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
        right = float((model(x[384:]).argmax(1) == y[384:]).double().mean())
        assert json.loads((tmp_path / "result.json").read_text())["judged"]["whole"] == {"test": right}

    def test_stopped_while_the_whole_network_trains(self, place, tmp_path):
        short = ("--epochs", "2", "--fine-tune", "1", "--compare")
        whole = answer(run(*command(place, tmp_path / "whole"), *short, "--json"))
        arguments = (*command(place, tmp_path / "stopped"), *short)
        stopped = run(*arguments, INTERRUPTED_AT=str(12 + 3))
        assert stopped.exit_code == 130
        assert "pruning  " not in stopped.output
        again = run(*arguments, INTERRUPTED_AT=str(2 * 12 + 3))  # once more, when that is done and the other begun
        assert "Going on where it stopped: 1 of 3 epochs (whole network)." in again.output
        assert again.exit_code == 130
        last = answer(run(*arguments, "--json"))
        assert (last["judged"], last["units"]) == (whole["judged"], whole["units"])

    def test_regression(self, place, tmp_path):
        x, _ = data()
        path = tmp_path / "numbers.npz"
        np.savez(path, x_train=x[:384], y_train=x[:384, 0], x_test=x[384:], y_test=x[384:, 0])
        result = answer(run("train", f"{place / 'net.py'}:one", "--data", path, "--loss", "mse", "--epochs", "6",
                            "--fine-tune", "1", "--out", tmp_path / "out", "--json"))  # fmt: skip
        model = small(place, tmp_path / "out", "one")
        wanted = float((model(x[384:])[:, 0] - x[384:, 0]).square().mean())
        assert result["metric"] == "loss"
        assert result["judged"]["pruned"]["test"] == pytest.approx(wanted, rel=1e-6)
        assert wanted < 0.7 * result["judged"]["start"]["test"]

    def test_keywords_and_a_loss_of_ones_own(self, place, tmp_path):
        net = place / "net.py"
        result = run("train", f"{net}:Named", "--data", f"{net}:sentences", "--loss", f"{net}:labels_loss", "--epochs",
                     "1", "--fine-tune", "0", "--batch", "8", "--out", tmp_path / "out")  # fmt: skip
        assert result.exit_code == 0, result.output
        assert "--integer-input tokens=1x5 --input scale=1x1" in result.output

    def test_half_precision_trains_with_autocast(self, place, tmp_path):
        result = answer(run(*command(place, tmp_path), "--epochs", "1", "--precision", "bf16", "--json"))
        assert 0.3 < result["judged"]["pruned"]["test"] <= 1.0
        first = json.loads((tmp_path / "result.json").read_text())["epochs"][0]["loss"]
        assert math.isfinite(first)

    def test_it_begins_with_weights(self, place, trained, tmp_path):
        """Here those of a network that was pruned before: the file still loads on the original."""
        weights = trained[1] / "small.safetensors"
        result = answer(run(*command(place, tmp_path), "--epochs", "1", "--fine-tune", "0", "--weights", weights,
                            "--json"))  # fmt: skip
        assert result["judged"]["start"] == trained[0]["judged"]["pruned"]
        assert result["before"]["parameters"] == trained[0]["after"]["parameters"]
        assert small(place, tmp_path)[1].out_features == result["units"]["1"]["after"]

    def test_what_is_left_is_trained_without_pruning(self, place, trained, tmp_path):
        weights = trained[1] / "small.safetensors"
        command = ("train", f"{place / 'net.py'}:plain", "--data", place / "data.npz", "--epochs", "0", "--fine-tune",
                   "3", "--learning-rate", "0.02", "--out", tmp_path / "out")  # fmt: skip
        done = run(*command)
        assert done.exit_code == 0, done.output
        assert "fine-tuned without pruning" in done.output
        assert "1/1  fine-tuning" in done.output
        assert "what the gates know" not in done.output
        assert not (tmp_path / "out" / "report.html").exists()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 2))
        optimizer, (x, y) = torch.optim.Adam(model.parameters(), lr=0.01), data()
        for epoch in range(3):
            for batch in torch.randperm(384, generator=torch.Generator().manual_seed(epoch)).split(32):
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
        for ours, theirs in zip(small(place, tmp_path / "out", "plain").parameters(), model.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        tuned = answer(run(*command[:1], f"{place / 'net.py'}:make", *command[2:-1], tmp_path / "tuned", "--weights",
                           weights, "--json"))  # fmt: skip
        left = trained[0]["units"]["1"]["after"]
        assert tuned["units"] == {"1": {"before": left, "after": left}}
        refused = run("prune", f"{place / 'net.py'}:make", "--checkpoint", tmp_path / "tuned")
        assert (refused.exit_code, "no epoch of pruning" in refused.stderr) == (2, True)

    def test_onnx(self, place, tmp_path):
        onnxruntime = pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
        assert run(*command(place, tmp_path, "plain"), "--epochs", "1", "--onnx").exit_code == 0
        session = onnxruntime.InferenceSession(tmp_path / "small.onnx")
        x = data()[0][:5]
        (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(output), small(place, tmp_path, "plain")(x), rtol=0, atol=1e-5)


def re_line(text, *parts):
    return any(all(part in line for part in parts) for line in text.splitlines())


class TestDryRun:
    def test_it_says_what_would_be_done_and_does_nothing(self, place, tmp_path):
        about = answer(run(*command(place, tmp_path / "out"), "--dry-run", "--json"))
        assert about["units"] == 24
        assert about["parameters"] == 20 * 24 + 24 + 24 * 2 + 2
        assert (about["examples"], about["steps"], about["warmup"]) == (384, 16 * 12, 42)
        assert str(tmp_path / "out" / "small.safetensors") in about["files"]
        said = run(*command(place, tmp_path / "out"), "--dry-run").output
        assert "24 units in 1 structures may go." in said or "24 units in 1 structure may go." in said
        assert "384 examples: 14 epochs of pruning, then 2 epochs of fine-tuning; 12 steps each, 192 in all" in said
        assert "Nothing was done: leave out --dry-run to begin." in said
        assert list(tmp_path.iterdir()) == []

    def test_a_training_too_short_to_prune_is_announced(self, place, tmp_path):
        said = run(*command(place, tmp_path), "--epochs", "3", "--dry-run").stderr
        assert "no unit can go: learning rate × phi rate × steps is 2.5, and about 8 is needed; give more" in said


class TestData:
    @pytest.mark.parametrize("function", ["datasets", "loaders"])
    def test_a_function(self, place, function, tmp_path):
        net = place / "net.py"
        about = answer(run("train", "--model", f"{net}:plain", "--data", f"{net}:{function}", "--batch", "16",
                           "--epochs", "2", "--fine-tune", "1", "--out", tmp_path, "--json"))  # fmt: skip
        assert set(about["judged"]["pruned"]) == ({"validation", "test"} if function == "datasets" else {"validation"})

    def test_a_file_of_safetensors(self, place, trained, tmp_path):
        from safetensors.torch import save_file

        x, y = data()
        parts = {"x_train": x[:384], "y_train": y[:384], "x_test": x[384:], "y_test": y[384:]}
        save_file({name: part.contiguous() for name, part in parts.items()}, tmp_path / "data.safetensors")
        result = answer(run("train", f"{place / 'net.py'}:make", "--data", tmp_path / "data.safetensors", *RECIPE,
                            "--out", tmp_path / "out", "--json"))  # fmt: skip
        assert result["judged"] == trained[0]["judged"]

    def test_a_name(self, place):
        about = answer(run("train", f"{place / 'net.py'}:lenet", "--data", "digits", "--dry-run", "--json"))
        assert (about["examples"], about["held_out"], about["parameters"]) == (1151, ["validation", "test"], 61_706)
        assert [(s["name"], s["units"]) for s in about["structures"]][:2] == [("conv1", 6), ("conv2", 16)]

    def test_a_folder_of_images(self, place, tmp_path):
        image_folder(tmp_path)
        result = answer(run("train", f"{place / 'net.py'}:image", "--data", tmp_path, "--batch", "8", "--epochs", "20",
                            "--fine-tune", "1", "--learning-rate", "0.02", "--out", tmp_path / "out",
                            "--json"))  # fmt: skip
        assert result["judged"]["pruned"] == {"validation": 1.0}

    def test_images_are_covered_cut_and_normalised(self, tmp_path):
        from PIL import Image

        from bmrs.commands.images import ImageFolder

        image_folder(tmp_path)
        part = ImageFolder(tmp_path / "train", size=8)
        x, label = part[0]
        assert (x.shape, label, part.classes) == ((3, 8, 8), 0, ["dark", "light"])
        # Wide images lose both ends: 24×12 shrinks to 16×8, of which the columns 4 to 12 are left.
        path, _ = part.files[0]
        small = Image.open(path).convert("RGB").resize((16, 8), Image.Resampling.BILINEAR).crop((4, 0, 12, 8))
        wanted = torch.tensor(np.asarray(small), dtype=torch.float32).permute(2, 0, 1) / 255
        mean, sd = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        torch.testing.assert_close(x, (wanted - mean[:, None, None]) / sd[:, None, None])


def image_folder(folder):
    from PIL import Image

    chance = np.random.default_rng(0)
    for part, number in (("train", 12), ("val", 4)):
        for name, level in (("dark", 40), ("light", 200)):
            (folder / part / name).mkdir(parents=True)
            for n in range(number):
                pixels = chance.integers(level, level + 30, (12, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{n}.png")


NET = "{place}/net.py"
ERRORS = [
    ((), "MODEL must be given once"),
    ((f"{NET}:plain", "--model", f"{NET}:plain"), "MODEL must be given once"),
    ((f"{NET}:plain",), "--data must say what to train on"),
    ((f"{NET}:plain", "--data", "nowhere"), "'nowhere' is no data set (digits, mnist,"),
    ((f"{NET}:plain", "--data", "nowhere.npz"), "there is no file nowhere.npz"),
    ((f"{NET}:plain", "--data", "x.pt"), "may hold pickled code"),
    ((f"{NET}:plain", "--data", NET + ":one_part"), "must return (train, validation)"),
    ((f"{NET}:plain", "--data", NET + ":triples"), "must give pairs (x, y)"),
    ((f"{NET}:plain", "--data", NET + ":failing"), "failed when it was called (RuntimeError: The size of tensor"),
    ((f"{NET}:plain", "--data", "{place}/torn.npz"), "torn.npz cannot be read"),
    ((f"{NET}:plain", "--data", "{place}/bytes.npz"), "x_train of {place}/bytes.npz holds bytes"),
    ((f"{NET}:plain", "--data", "{place}/labels.npz"), "training labels reach from 0 to 5, but the network has 2"),
    ((f"{NET}:plain", "--data", "{place}/short.npz"), "x_test and y_test of {place}/short.npz must have as many"),
    ((f"{NET}:plain", "--data", "{place}/lacking.npz"), "lacks y_test: it must hold x_train, y_train"),
    ((f"{NET}:plain", "--data", "{place}"), "there is no folder {place}/train"),
    ((f"{NET}:nothing", "--data", NET + ":datasets"), "nothing can be removed from this network"),
    ((f"{NET}:nothing", "--data", NET + ":datasets", "--dry-run"), "nothing can be removed from this network"),
    ((f"{NET}:image", "--data", NET + ":datasets"), "does not take the data's training inputs, of shape (32, 20)"),
    ((f"{NET}:one", "--data", NET + ":datasets", "--loss", "luck"), "unknown loss 'luck': choose one of"),
    ((f"{NET}:plain", "--data", NET + ":datasets", "--loss", "mse"), "outputs have shape (32, 2), the targets (32,)"),
    ((f"{NET}:Named", "--data", NET + ":sentences"), "the network returns a dict, and not a tensor"),
    ((f"{NET}:plain", "--data", NET + ":datasets", "--optimizer", "lion"), "unknown optimizer 'lion': choose one of"),
    ((f"{NET}:plain", "--data", NET + ":datasets", "--criterion", "l2"), "unknown criterion 'l2': choose one of"),
    ((f"{NET}:plain", "--data", NET + ":datasets", "--price", "free"), "unknown price 'free': choose one of"),
    ((f"{NET}:plain", "--data", NET + ":datasets", "--precision", "fp8"), "unknown precision 'fp8'"),
    ((f"{NET}:plain", "--data", NET + ":datasets", "--track", "paper"), "unknown tracker 'paper'"),
    ((f"{NET}:plain", "--data", NET + ":datasets", "--epochs", "-1"), "epochs must be 0 epochs or more; got -1."),
    ((f"{NET}:plain", "--data", NET + ":datasets", "--epochs", "0", "--fine-tune", "0"), "nothing would be trained"),
    ((f"{NET}:plain", "--data", NET + ":datasets", "--seed", str(1 << 64)), "seed must be a whole number from 0 to"),
    ((f"{NET}:plain", "--data", "{place}/nan.npz"), "NaN or infinite numbers in the inputs of 3 examples of the test"),
    ((f"{NET}:plain", "--data", "{place}/classes.npz"), "test labels reach from 7 to 8, but the network has 2 outputs"),
    ((f"{NET}:plain", "--data", "{place}/wide.npz"), "the data's test inputs, of shape (32, 21)"),
    ((f"{NET}:nan", "--data", "{place}/data.npz"), "the network's weights hold NaN or infinite numbers"),
    ((":plain", "--data", "{place}/data.npz"), "model must read my.module:make_model"),
    ((f"{NET}:plain", "--data", NET + ":datasets", "--warmup", "-1"), "warmup must be 0 steps or more; got -1."),
    ((f"{NET}:plain", "--data", NET + ":datasets", "--strength", "-1"), "strength must be"),
    ((f"{NET}:plain", "--data", NET + ":datasets", "--device", "abacus"), "unknown device 'abacus'"),
    ((f"{NET}:plain", "--data", NET + ":datasets", "--device", "mps"), "'mps' cannot be used"),
    ((f"{NET}:plain", "--data", NET + ":datasets", "--out", NET), "--out names a folder that cannot be made"),
    ((f"{NET}:plain", "--data", NET + ":datasets", "--weights", "no.pt"), "--weights: there is no file no.pt"),
    ((f"{NET}:plain", "--data", NET + ":datasets", "--weights", NET), "net.py cannot be read"),
    ((f"{NET}:plain", "--data", NET + ":datasets", "--weights", "{place}/other.pt"), "does not fit the model (Missing"),
    (("{place}/broken.py:make", "--data", "digits"), "fails when it is imported (ModuleNotFoundError: No module"),
    (("{place}/syntax.py:make", "--data", "digits"), "fails when it is imported (SyntaxError: invalid syntax"),
]


@pytest.fixture(scope="module")
def spoilt(place):
    x, y = (part.numpy() for part in data())
    good = {"x_train": x, "y_train": y, "x_test": x, "y_test": y}
    np.savez(place / "bytes.npz", **{**good, "x_train": (x > 0).astype("uint8")})
    np.savez(place / "labels.npz", **{**good, "y_train": np.arange(512) // 100})
    np.savez(place / "short.npz", **{**good, "y_test": y[:5]})
    np.savez(place / "lacking.npz", **{name: part for name, part in good.items() if name != "y_test"})
    np.savez(place / "nan.npz", **{**good, "x_test": np.where(np.arange(512)[:, None] < 3, np.nan, x)})
    np.savez(place / "classes.npz", **{**good, "y_test": y + 7})
    np.savez(place / "wide.npz", **{**good, "x_test": np.pad(x, ((0, 0), (0, 1)))})
    (place / "torn.npz").write_bytes((place / "data.npz").read_bytes()[:3000])
    torch.save(nn.Linear(2, 2).state_dict(), place / "other.pt")
    return place


@pytest.mark.parametrize(("arguments", "sentence"), ERRORS, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_input_gives_one_sentence_and_leaves_nothing(spoilt, tmp_path, arguments, sentence, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("train", *(argument.format(place=spoilt) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert sentence.format(place=spoilt) in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_asked_for_and_absent(place, tmp_path):
    result = run(*command(place, tmp_path / "out"), "--device", "cuda")
    assert result.exit_code == 2
    assert "--device: there is no GPU that torch can use: give cpu or auto." in result.output


def test_what_is_tracked(place, tmp_path, monkeypatch):
    from bmrs.integrations import trackers

    logged, closed = [], []

    class Tracker:
        def log(self, values, step):
            logged.append((step, values))

        def close(self):
            closed.append(True)

    def tracker(name, folder, config):
        assert (name, folder, config["epochs"]) == ("tensorboard", tmp_path, 2)
        return Tracker()

    monkeypatch.setattr(trackers, "tracker", tracker)
    short = ("--epochs", "2", "--fine-tune", "1", "--track", "tensorboard")
    result = run(*command(place, tmp_path), *short)
    assert result.exit_code == 0, result.output
    assert [step for step, _ in logged] == [1, 2, 3]
    assert set(logged[0][1]) == {
        "prune/loss", "prune/test accuracy", "prune/parameters", "prune/units", "prune/seconds",
    }  # fmt: skip
    assert logged[2][1]["fine-tune/parameters"] == 554
    assert closed == [True]


def test_what_is_missing_is_said_before_training(place, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = run(*command(place, tmp_path), "--onnx")
    assert result.exit_code == 2
    assert "--onnx needs 'onnxscript': install it with  pip install 'bmrs[onnx]'" in result.stderr
    assert list(tmp_path.iterdir()) == []


class TestFailing:
    def test_data_that_are_spoilt_further_on(self, place, tmp_path):
        result = run("train", f"{place / 'net.py'}:plain", "--data", f"{place / 'net.py'}:spoilt", "--batch", "2",
                     "--out", tmp_path)  # fmt: skip
        assert result.exit_code == 1
        assert "the loss became nan in epoch 1 of phase 'prune': the data have NaN or infinite" in result.stderr
        assert "in the inputs of 1 examples of a batch; mend them." in result.stderr

    def test_a_loss_that_becomes_nan(self, place, tmp_path):
        result = run(*command(place, tmp_path, "plain"), "--loss", f"{place / 'net.py'}:nan_loss")
        assert result.exit_code == 1
        assert "the loss became nan in epoch 1 of phase 'prune': give a lower --learning-rate" in result.stderr

    def test_the_users_own_error_says_where(self, place, tmp_path, monkeypatch):
        module = make_model(f"{place / 'net.py'}:make")
        passes = type(module[0]).forward

        def forward(self, x):
            if self.training and self.passes == 3:
                raise KeyError("what the user forgot")
            return passes(self, x)

        monkeypatch.setattr(type(module[0]), "forward", forward)
        result = run(*command(place, tmp_path))
        assert result.exit_code == 1
        assert "bmrs: the training failed (KeyError: 'what the user forgot' at" in result.stderr
        assert "Traceback" not in result.output
        assert "Traceback" in run(*command(place, tmp_path), BMRS_DEBUG="1").stderr

    def test_a_disk_that_is_full(self, place, tmp_path, monkeypatch):
        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(torch, "save", full)
        result = run(*command(place, tmp_path))
        assert result.exit_code == 1
        assert "the training failed ([Errno 28] No space left on device): make room" in result.stderr

    def test_another_process_in_the_folder(self, place, tmp_path):
        from bmrs.study.store import Store

        with Store(tmp_path / "parts", {}):
            result = run(*command(place, tmp_path))
        assert result.exit_code == 2
        assert f"is working in {tmp_path / 'parts'}" in result.stderr


def test_two_processes_train_one_network(place, tmp_path):
    arguments = [str(argument) for argument in (*command(place, tmp_path, "plain"), "--epochs", "3", "--json")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "bmrs"]
    done = subprocess.run([*torchrun, *arguments], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)  # of one process
    content = json.loads((tmp_path / "result.json").read_text())
    assert content["processes"] == 2
    assert done.stderr.count("Before and after") == 1
    for ours, theirs in zip(small(place, tmp_path, "plain").parameters(), both_by_one(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert result["judged"]["pruned"]["test"] > 0.4


def both_by_one():
    """What two processes do in three epochs of pruning and two of fine-tuning, done by one."""
    x, y = data()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    pruner = bmrs.Pruner(model, x[:2], optimizer, strength=0.1, phi_lr=7.0, warmup=3 * 6 // 4, seed=3)
    bank = pruner.bank
    for epoch in range(5):
        if epoch == 3:
            pruner.finish()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
        order = torch.randperm(384, generator=torch.Generator().manual_seed(3 + epoch))
        for first in range(0, 192, 32):
            optimizer.zero_grad()
            draws = bank.draws
            for rank in range(2):
                own = order[rank::2][first : first + 32]
                bank.rank, bank.draws = rank, draws
                (F.cross_entropy(model(x[own]), y[own]) / 2).backward()
            optimizer.step()
        bank.rank = None
        if epoch < 3:
            pruner.prune()
    return list(model.parameters())
