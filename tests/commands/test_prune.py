import json
import math

import pytest
import torch
from torch import nn

import bmrs
from bmrs.inspection import make_model
from tests.commands.made import answer, data, run, user_files


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = user_files(tmp_path_factory.mktemp("place"))
    torch.manual_seed(1)
    network = make_model(f"{folder / 'net.py'}:plain")
    torch.save(network.state_dict(), folder / "net.pt")
    from safetensors.torch import save_file

    save_file(network.state_dict(), folder / "net.safetensors")
    return folder


@pytest.fixture(scope="module")
def trained(place):
    out = place / "run"
    result = run("train", f"{place / 'net.py'}:plain", "--data", place / "data.npz", "--epochs", "10", "--fine-tune",
                 "2", "--learning-rate", "0.01", "--phi-rate", "7", "--strength", "0.1", "--out", out)  # fmt: skip
    assert result.exit_code == 0, result.output
    return out


def prune(place, *arguments, network="plain"):
    return run("prune", f"{place / 'net.py'}:{network}", *arguments)


def original(place, file):
    """The network these weights are of."""
    network = make_model(f"{place / 'net.py'}:plain")
    network.load_state_dict(torch.load(place / file))
    return network


def loaded(place, out):
    return bmrs.load(make_model(f"{place / 'net.py'}:plain"), out / "small.safetensors").requires_grad_(False)


@torch.no_grad()
def without(network, gone):
    """What the network computes when these hidden units say nothing."""
    hidden = torch.relu(network[0](data()[0]))
    hidden[:, gone] = 0.0
    return network[2](hidden)


class TestByWeights:
    @pytest.mark.parametrize("file", ["net.pt", "net.safetensors"])
    def test_the_units_with_the_smallest_weights_go(self, place, file, tmp_path):
        arguments = ("--weights", place / file, "--input", "1x20", "--fraction", "0.5", "--out", tmp_path, "--json")
        result = answer(prune(place, *arguments))
        network = original(place, "net.pt")
        norms = (network[0].weight.square().sum(1) + network[0].bias.square()).sqrt()
        gone = sorted(norms.argsort()[:12].tolist())
        assert result["removed"] == {"0": gone}
        assert result["after"]["parameters"] == 12 * 20 + 12 + 2 * 12 + 2
        torch.testing.assert_close(loaded(place, tmp_path)(data()[0]), without(network, gone), rtol=0, atol=1e-6)

    def test_a_fraction_of_every_structure(self, place, tmp_path):
        """Two layers, of which one has much larger weights: together all that go are of the other one."""
        path = tmp_path / "two.py"
        path.write_text(
            "import torch\nfrom torch import nn\n\n\ndef make():\n"
            "    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))\n"
            "    torch.nn.init.normal_(net[0].weight, std=20.0)\n    return net\n"
        )
        common = ("prune", f"{path}:make", "--input", "1x6", "--fraction", "0.25", "--dry-run", "--json")
        counts = [
            {name: len(entry["gone"]) for name, entry in answer(run(*common, *extra))["units"].items()}
            for extra in ((), ("--per-structure",))
        ]
        assert counts == [{"0": 0, "2": 4}, {"0": 2, "2": 2}]

    @pytest.mark.parametrize("extra", [(), ("--per-structure",)])
    def test_widths_are_multiples_of_round_to(self, place, extra):
        common = ("--weights", place / "net.pt", "--input", "1x20", "--fraction", "0.5", "--dry-run", "--json", *extra)
        free = answer(prune(place, *common))["units"]["0"]["gone"]
        even = answer(prune(place, *common, "--round-to", "5"))["units"]["0"]["gone"]
        assert (len(free), len(even)) == (12, 9)  # 24 units: 15 stay rather than 12
        assert set(even) < set(free)

    def test_what_is_left_can_be_trained_on(self, place, tmp_path):
        prune(place, "--weights", place / "net.pt", "--input", "1x20", "--fraction", "0.5", "--out", tmp_path / "half")
        weights = tmp_path / "half" / "small.safetensors"
        done = run("train", f"{place / 'net.py'}:plain", "--weights", weights, "--data", place / "data.npz", "--epochs",
                   "1", "--fine-tune", "0", "--out", tmp_path / "tuned")  # fmt: skip
        assert done.exit_code == 0, done.output
        assert loaded(place, tmp_path / "tuned")[0].out_features == 12

    def test_it_says_where_all_is_and_what_comes_next(self, place, tmp_path):
        said = prune(place, "--input", "1x20", "--fraction", "0.5", "--out", tmp_path, "--onnx").output
        assert "Without --weights the units were ranked by the weights MODEL is made with." in said
        assert f"bmrs bench {place / 'net.py'}:plain --input 1x20 --small {tmp_path}/small.safetensors" in said
        assert f"bmrs train {place / 'net.py'}:plain --weights {tmp_path}/small.safetensors --data ..." in said
        assert {path.name for path in tmp_path.iterdir()} == {
            "small.safetensors", "small.onnx", "result.json",
        }  # fmt: skip

    def test_dry_run_names_the_units_and_writes_nothing(self, place, tmp_path):
        common = ("--weights", place / "net.pt", "--input", "1x20", "--fraction", "0.25", "--out", tmp_path / "out")
        gone = answer(prune(place, *common, "--dry-run", "--json"))["units"]["0"]["gone"]
        said = prune(place, *common, "--dry-run").output
        assert all(str(unit) in said for unit in gone)
        assert "Nothing was done: leave out --dry-run to begin." in said
        assert list(tmp_path.iterdir()) == []
        assert answer(prune(place, *common, "--json"))["removed"]["0"] == gone


class TestByGates:
    def test_the_units_worth_least_go_from_the_fine_tuned_network(self, place, trained, tmp_path):
        result = answer(prune(place, "--checkpoint", trained, "--fraction", "0.5", "--out", tmp_path, "--json"))
        state = torch.load(trained / "parts" / "train.checkpoint.pt", weights_only=True)
        gates = state["pruner"]["model"]
        q = bmrs.TruncatedLogNormal(gates["bmrs_noise.mu"], gates["bmrs_noise.log_sigma"])
        places = bmrs.evidence.spike(q).argsort(descending=True)[: math.floor(len(q.mu) / 2)]
        network = loaded(place, trained)
        kept = bmrs.structures(network, data()[0][:1])[0].units
        assert (result["units"]["0"]["before"], len(q.mu)) == (kept, kept)
        assert result["units"]["0"]["after"] == kept - len(places) < kept
        wanted = without(network, places.tolist())
        torch.testing.assert_close(loaded(place, tmp_path)(data()[0]), wanted, rtol=0, atol=1e-6)

    def test_another_criterion_by_its_own_boundary(self, place, trained, tmp_path):
        result = answer(prune(place, "--checkpoint", trained / "parts" / "train.checkpoint.pt", "--criterion", "mean",
                              "--dry-run", "--json"))  # fmt: skip
        assert result["criterion"] == "Mean(threshold=0.1)"
        unchanged = prune(place, "--checkpoint", trained, "--out", tmp_path)
        assert "No unit was removed: all are worth keeping; --fraction removes regardless." in unchanged.output
        x = data()[0]
        assert torch.equal(loaded(place, tmp_path)(x), loaded(place, trained)(x))

    def test_of_a_training_that_is_not_finished(self, place, tmp_path):
        common = ("--data", place / "data.npz", "--epochs", "3", "--fine-tune", "0", "--out", tmp_path / "run")
        stopped = run("train", f"{place / 'net.py'}:make", *common, INTERRUPTED_AT=str(12 + 4))
        assert stopped.exit_code == 130
        result = answer(prune(place, "--checkpoint", tmp_path / "run", "--fraction", "0.5", "--out", tmp_path / "half",
                              "--json", network="make"))  # fmt: skip
        assert result["units"]["1"] == {"before": 24, "after": 12}


ERRORS = [
    (("--fraction", "0.5"), "--input must give the shape of at least one input"),
    (("--input", "1x20"), "--criterion l2 needs --fraction"),
    (("--input", "1x20", "--fraction", "2"), "--fraction must be between 0 and 1"),
    (("--input", "1x20", "--criterion", "luck"), "unknown criterion 'luck': choose one of bmrs_n,"),
    (("--input", "1x20", "--criterion", "snr"), "--criterion snr asks gates, which only training gives"),
    (("--input", "1x7", "--fraction", "0.5"), "example_inputs do not fit the model"),
    (("--input", "1x20", "--fraction", "0.5", "--weights", "none.pt"), "--weights: there is no file none.pt"),
    (("--input", "1x20", "--fraction", "0.5", "--weights", "{place}/torn.pt"), "torn.pt cannot be read"),
    (("--input", "1x20", "--fraction", "0.5", "--weights", "{place}/torn.safetensors"), "torn.safetensors cannot be"),
    (("--input", "1x20", "--fraction", "0.5", "--weights", "{place}/code.pt"), "code.pt cannot be read"),
    (("--input", "1x20", "--fraction", "0.5", "--out", "{place}/net.py"), "--out names a folder that cannot be made"),
    (("--checkpoint", "nowhere"), "--checkpoint: there is no checkpoint nowhere"),
    (("--checkpoint", "{place}/torn.pt"), "torn.pt cannot be read"),
    (("--checkpoint", "{place}/net.pt"), "net.pt is no checkpoint"),
]


@pytest.mark.parametrize(("arguments", "sentence"), ERRORS, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_input_gives_one_sentence_and_leaves_nothing(place, tmp_path, arguments, sentence, monkeypatch):
    for name in ("net.pt", "net.safetensors"):
        (place / name.replace("net", "torn")).write_bytes((place / name).read_bytes()[:500])
    torch.save(nn.Linear(2, 2), place / "code.pt")  # a pickled class
    monkeypatch.chdir(tmp_path)
    result = prune(place, *(argument.format(place=place) for argument in arguments))
    assert result.exit_code == 2, result.output
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_network_of_which_nothing_can_go(place):
    result = prune(place, "--input", "1x20", "--fraction", "0.5", network="nothing")
    assert result.exit_code == 2
    assert "nothing can be removed from this network:  bmrs inspect  says why." in result.stderr


def test_a_checkpoint_of_another_network(place, trained, tmp_path):
    result = prune(place, "--checkpoint", trained, "--fraction", "0.5", "--out", tmp_path, network="one")
    assert result.exit_code == 2
    assert "--checkpoint is of another network" in result.stderr


def test_json_alone_is_on_stdout(place, tmp_path):
    result = prune(place, "--input", "1x20", "--fraction", "0.5", "--out", tmp_path, "--json")
    assert json.loads(result.stdout)["units"] == {"0": {"before": 24, "after": 12}}
