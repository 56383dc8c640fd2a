"""A reduced Hugging Face model that its configuration can describe needs no bmrs to be loaded."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import bmrs
from bmrs.integrations.transformers import save_pretrained

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

IDS = torch.arange(10).reshape(2, 5)
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 31}
INPUTS = {"input_ids": IDS, "use_cache": False}


def bert():
    torch.manual_seed(0)
    return transformers.BertModel(transformers.BertConfig(**SMALL)).eval()


def llama(**options):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, **options)
    return transformers.LlamaForCausalLM(config).eval()


def qwen():
    """Whose configuration does not mention the width of a head."""
    torch.manual_seed(0)
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL, num_key_value_heads=2)).eval()


def gpt2():
    """Whose configuration leaves the number of neurons open."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=4, vocab_size=31, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def reduced(model, inputs=INPUTS, **units):
    """``units``: what goes from every structure whose name has this in it."""
    going = {s: chosen for s in bmrs.structures(model, inputs) for part, chosen in units.items() if part in s.name}
    assert going
    return bmrs.remove(model, going)


@torch.no_grad()
def outputs(model, inputs=INPUTS):
    return model(**inputs)[0]


def close(first, second):
    """Up to the order of sums, which may depend on where weights lie in memory."""
    return torch.allclose(first, second, rtol=0.0, atol=1e-14 if first.dtype == torch.float64 else 1e-6)


def content(folder):
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def same_after(model, folder, inputs=INPUTS):
    again = type(model).from_pretrained(folder)
    return not again.training and close(outputs(again, inputs), outputs(model, inputs))


BERT = {"input_ids": IDS}


class TestExpressible:
    def test_neurons_of_bert(self, tmp_path):
        model = reduced(bert(), BERT, intermediate=[0, 3, 5])
        assert save_pretrained(model, tmp_path / "small", BERT) == {"intermediate_size": 21}
        assert same_after(model, tmp_path / "small", BERT)

    def test_groups_and_neurons_of_llama(self, tmp_path):
        model = reduced(llama(), self_attn=[1], mlp=list(range(12)))
        changes = save_pretrained(model, tmp_path / "small", INPUTS)
        assert changes == {"intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1}
        assert same_after(model, tmp_path / "small")

    def test_heads_are_not_mistaken_for_narrower_heads(self, tmp_path):
        model = reduced(llama(), self_attn=[0])
        changes = save_pretrained(model, tmp_path / "small", INPUTS)
        assert changes == {"num_attention_heads": 2, "num_key_value_heads": 1}

    def test_heads_whose_width_is_not_in_the_configuration(self, tmp_path):
        model = reduced(qwen(), self_attn=[1])
        changes = save_pretrained(model, tmp_path / "small", INPUTS)
        assert changes == {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
        assert same_after(model, tmp_path / "small")

    def test_a_setting_that_was_left_open(self, tmp_path):
        model = reduced(gpt2(), mlp=[1, 2, 3])
        assert save_pretrained(model, tmp_path / "small", INPUTS) == {"n_inner": 61}
        assert same_after(model, tmp_path / "small")

    def test_another_type_of_numbers(self, tmp_path):
        model = reduced(llama().double(), mlp=[0])
        save_pretrained(model, tmp_path / "small", INPUTS)
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
        assert again.dtype == torch.float64
        assert close(outputs(again), outputs(model))

    def test_the_model_and_its_configuration_stay_as_they_were(self, tmp_path):
        model = reduced(bert(), BERT, intermediate=[0]).train()
        config, before = model.config, model.config.to_dict()
        state = torch.get_rng_state()
        save_pretrained(model, tmp_path / "small", BERT)
        assert model.config is config
        assert config.to_dict() == before
        assert model.training
        assert torch.equal(torch.get_rng_state(), state)

    def test_a_second_save_takes_the_place_of_the_first(self, tmp_path):
        save_pretrained(reduced(bert(), BERT, intermediate=[0]), tmp_path / "small", BERT)
        (tmp_path / "small" / "model-00001-of-00002.safetensors").write_text("stale")
        (tmp_path / "small" / "notes.txt").write_text("mine")
        model = reduced(bert(), BERT, intermediate=[0, 1])
        save_pretrained(model, str(tmp_path / "small"), BERT)
        assert content(tmp_path / "small") == ["config.json", "model.safetensors", "notes.txt"]
        assert content(tmp_path) == ["small"]
        assert same_after(model, tmp_path / "small", BERT)

    def test_a_whole_model_is_saved_as_usual(self, tmp_path):
        model = bert()
        assert save_pretrained(model, tmp_path / "whole", BERT) == {}
        assert same_after(model, tmp_path / "whole", BERT)


class TestRefused:
    def refused(self, model, folder, inputs, match):
        before = model.config.to_dict()
        with pytest.raises(ValueError, match=match) as caught:
            save_pretrained(model, folder / "small", inputs)
        assert str(caught.value).endswith("save it with bmrs.save(model, path) instead.")
        assert content(folder) == []
        assert model.config.to_dict() == before

    def test_layers_of_unequal_width(self, tmp_path):
        model = bert()
        first, second = (s for s in bmrs.structures(model, BERT) if "intermediate" in s.name)
        bmrs.remove(model, {first: [0], second: [0, 1]})
        self.refused(
            model,
            tmp_path,
            BERT,
            r"layers of unequal width: 'encoder.layer.0.intermediate.dense.weight' has shape \(23, 16\), "
            r"'encoder.layer.1.intermediate.dense.weight' \(22, 16\)",
        )

    def test_one_layer_alone(self, tmp_path):
        model = llama()
        bmrs.remove(model, {bmrs.structures(model, INPUTS)[0]: [0]})
        self.refused(model, tmp_path, INPUTS, "layers of unequal width")

    def test_heads_that_follow_from_the_width(self, tmp_path):
        model = reduced(bert(), BERT, attention=[1])
        self.refused(model, tmp_path, BERT, r"nothing fits 'encoder.layer.0.attention.output.dense.weight' of shape")

    def test_shapes_that_fit_and_outputs_that_do_not(self, tmp_path):
        model = reduced(bert(), BERT, intermediate=[1])
        model.register_forward_hook(lambda module, args, output: output[0] + 1)
        self.refused(model, tmp_path, BERT, "intermediate_size=23 has its shapes but not its outputs")

    def test_what_an_earlier_save_left_stays(self, tmp_path):
        save_pretrained(bert(), tmp_path / "small", BERT)
        model = reduced(bert(), BERT, attention=[1])
        with pytest.raises(ValueError, match="no configuration of BertModel"):
            save_pretrained(model, tmp_path / "small", BERT)
        assert same_after(bert(), tmp_path / "small", BERT)

    def test_a_model_with_gates(self, tmp_path):
        model = bert()
        listed = bmrs.structures(model, BERT)
        bmrs.NoiseBank.attach(model, listed)
        with pytest.raises(ValueError, match="model has gates on it"):
            save_pretrained(model, tmp_path / "small", BERT)

    def test_a_model_of_another_kind(self, tmp_path):
        with pytest.raises(TypeError, match=r"must be a Hugging Face model; got Linear, which bmrs.save can save"):
            save_pretrained(nn.Linear(2, 2), tmp_path, torch.randn(1, 2))

    def test_a_folder_in_one_that_is_not_there(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="make it first"):
            save_pretrained(reduced(bert(), BERT, intermediate=[0]), tmp_path / "no" / "small", BERT)


def test_transformers_is_not_imported_before_it_is_needed():
    code = "import sys, bmrs.integrations.transformers; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
