"""The Hugging Face Trainer trains as it did, and the model gets smaller."""

import logging
import runpy
import sys
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

import bmrs
from tests.integrations.toy import same
from tests.integrations.written import board, offline, wandb_rows  # noqa: F401  a fixture among them

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from bmrs.integrations.transformers import PruningCallback

ROOT = Path(__file__).parents[2]
OPTIONS = {"phi_lr": 30, "strength": 0.3, "seed": 1}
EPOCHS, BATCH, RATE, STEPS = 6, 16, 4e-3, 32
IDS = torch.randint(2, 30, (512, 12), generator=torch.Generator().manual_seed(0))
LABELS = ((IDS == 5) | (IDS == 7)).any(1).long()  # whether one of two words occurs
ROWS = [{"input_ids": ids, "labels": label} for ids, label in zip(IDS, LABELS, strict=True)]


def bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def pruning(model, **options):
    return PruningCallback(model, {"input_ids": IDS[:2]}, **{**OPTIONS, **options})


def trainer(model, folder, *callbacks, metrics=None, **options):
    arguments = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": RATE,
        "weight_decay": 0.01,
        "save_strategy": "no",
        "logging_strategy": "epoch",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "per_device_eval_batch_size": 512,
        **options,
    }
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(str(folder), **arguments),
        train_dataset=ROWS,
        eval_dataset=ROWS,
        callbacks=list(callbacks),
        compute_metrics=metrics,
    )


def units(callback):
    return [report.units for report in callback.reports]


@torch.no_grad()
def accuracy(model):
    model.eval()
    return float((model(IDS).logits.argmax(1) == LABELS).double().mean())


@pytest.fixture
def complaints():
    """What transformers warns of in its log."""
    said = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield said
    logger.removeHandler(handler)


class TestTraining:
    def test_units_go_the_log_says_so_and_the_task_is_still_solved(self, tmp_path, complaints):
        model = bert()
        callback = pruning(model)
        run = trainer(model, tmp_path, callback)
        run.train()
        assert len(callback.reports) == EPOCHS
        assert units(callback)[-1] < 40 < 84 == units(callback)[0]
        assert accuracy(model) > 0.97
        assert [entry["bmrs_units"] for entry in run.state.log_history if "loss" in entry] == units(callback)
        assert run.state.log_history[-1]["bmrs_parameters"] == callback.reports[-1].parameters
        before = model(IDS).logits
        assert callback.finish() is model
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in bert().named_parameters()]
        assert sum(p.numel() for p in model.parameters()) == callback.reports[-1].parameters
        assert torch.allclose(model(IDS).logits, before, atol=1e-4)
        assert complaints == []

    @pytest.mark.parametrize("late", [False, True], ids=["given", "added"])
    def test_tensorboard_and_wandb_are_told(self, late, tmp_path, offline, monkeypatch, complaints):  # noqa: F811
        pytest.importorskip("tensorboard")
        pytest.importorskip("wandb")
        monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
        monkeypatch.setenv("WANDB_DIR", str(tmp_path))
        model = bert()
        callback = pruning(model)
        seen = []

        class Look(transformers.TrainerCallback):
            def on_epoch_end(self, args, state, control, **given):
                seen.append(state.global_step)

        options = {"report_to": ["tensorboard", "wandb"], "run_name": "pruning"}
        run = trainer(model, tmp_path, *([] if late else [callback]), Look(), **options)
        if late:
            run.add_callback(callback)
        else:
            run.evaluate()  # before anything has been trained
        run.train()
        assert seen == [STEPS * epoch for epoch in range(1, EPOCHS + 1)]  # no callback is left out or called twice
        found, rows = board(tmp_path), wandb_rows(tmp_path)
        assert len(set(units(callback))) > 1
        expected = dict(zip(seen, units(callback), strict=True))
        if not late:
            expected[0] = 84
        assert found["train/bmrs_units"] == expected
        assert found["train/bmrs_parameters"][seen[-1]] == callback.reports[-1].parameters
        for name in ("train/bmrs_units", "train/bmrs_parameters"):
            assert {row["train/global_step"]: row[name] for row in rows if name in row} == found[name]
        assert complaints == []

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_it_is_the_plain_loop(self, tmp_path, accumulate):
        model = bert()
        callback = pruning(model)
        order = {"train_sampling_strategy": "sequential", "gradient_accumulation_steps": accumulate}
        trainer(
            model, tmp_path, callback, max_grad_norm=0.5, per_device_train_batch_size=BATCH // accumulate, **order
        ).train()

        expected = bert()
        decayed = [p for name, p in expected.named_parameters() if "bias" not in name and "LayerNorm" not in name]
        others = [p for name, p in expected.named_parameters() if "bias" in name or "LayerNorm" in name]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=RATE, weight_decay=0.01, fused=True)
        total = EPOCHS * STEPS
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
        pruner = bmrs.Pruner(expected, {"input_ids": IDS[:2]}, optimizer, **OPTIONS)
        for _ in range(EPOCHS):
            for ids, labels in zip(IDS.split(BATCH), LABELS.split(BATCH), strict=True):
                for part, wanted in zip(ids.chunk(accumulate), labels.chunk(accumulate), strict=True):
                    F.cross_entropy(expected(part).logits, wanted).backward()  # the Trainer adds up this model's loss
                nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            pruner.prune()
        assert units(callback)[-1] < 84
        assert units(callback)[-1] == len(pruner.bank.mu)
        for (name, one), other in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert torch.allclose(one, other, atol=1e-4), name

    def test_weight_decay_does_not_reach_the_gates(self, tmp_path):
        model = bert()
        callback = pruning(model, phi_lr=1)
        trainer(model, tmp_path, callback, max_steps=1, learning_rate=1e-9, weight_decay=1e8, optim="sgd").train()
        before = bert().bert.pooler.dense.weight
        assert model.bert.pooler.dense.weight.norm() < 0.95 * before.norm()
        assert torch.allclose(callback.pruner.bank.log_sigma, torch.tensor(-5.0), atol=1e-6)

    def test_epochs_that_are_not_due_are_passed_over(self, tmp_path):
        model = bert()
        callback = pruning(model, every_n_epochs=2, start_epoch=1, stop_epoch=5)
        seen = []

        class Look(transformers.TrainerCallback):
            def on_epoch_end(self, args, state, control, **given):
                seen.append(len(callback.reports))

        trainer(model, tmp_path, callback, Look(), num_train_epochs=7).train()
        assert seen == [0, 0, 1, 1, 2, 2, 2]

    def test_an_epoch_cut_short_is_pruned_once(self, tmp_path):
        model = bert()
        callback = pruning(model)
        trainer(model, tmp_path, callback, max_steps=2 * STEPS + 5).train()
        assert len(callback.reports) == 3

    def test_training_twice_goes_on_pruning(self, tmp_path):
        model = bert()
        callback = pruning(model)
        run = trainer(model, tmp_path, callback, num_train_epochs=4)
        run.train()
        first = units(callback)[-1]
        run.train()
        assert len(callback.reports) == 8
        assert units(callback)[-1] < first
        assert accuracy(model) > 0.97

    def test_a_finished_callback_leaves_the_model_alone(self, tmp_path):
        model = bert()
        callback = pruning(model)
        run = trainer(model, tmp_path, callback, num_train_epochs=1)
        run.train()
        callback.finish()
        run.train()
        assert len(callback.reports) == 1
        assert {name: p.shape for name, p in model.named_parameters()} == {
            name: p.shape for name, p in bert().named_parameters()
        }

    def test_another_model_than_the_trainers_is_refused(self, tmp_path):
        callback = pruning(bert())
        with pytest.raises(ValueError, match="give PruningCallback and the Trainer the same"):
            trainer(bert(), tmp_path, callback).train()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A whole training, and what it saved twice in each epoch."""
    folder = tmp_path_factory.mktemp("undisturbed")
    model = bert()
    callback = pruning(model)
    trainer(model, folder, callback, save_strategy="steps", save_steps=STEPS // 2).train()
    assert len(set(units(callback))) > 1
    return folder, model, callback


class TestCheckpoints:
    @pytest.mark.parametrize("at", [4 * STEPS, 4 * STEPS + STEPS // 2])
    def test_a_fresh_start_from_one_ends_as_if_nothing_had_happened(self, undisturbed, tmp_path, at, complaints):
        folder, model, callback = undisturbed
        again = bert()
        resumed = pruning(again)
        saving = {"save_strategy": "steps", "save_steps": STEPS // 2}
        trainer(again, tmp_path, resumed, **saving).train(resume_from_checkpoint=str(folder / f"checkpoint-{at}"))
        assert units(callback)[at // STEPS - 1] < 84
        assert units(resumed) == units(callback)[at // STEPS :]
        assert same(again.state_dict(), model.state_dict())
        assert complaints == []

    def test_the_best_one_is_loaded_though_it_is_larger(self, undisturbed, tmp_path, complaints):
        seen = []

        def worse_every_time(prediction):
            seen.append(torch.from_numpy(prediction.predictions))
            return {"order": -len(seen)}

        model = bert()
        callback = pruning(model)
        options = {"save_strategy": "epoch", "eval_strategy": "epoch", "metric_for_best_model": "order"}
        trainer(model, tmp_path, callback, load_best_model_at_end=True, metrics=worse_every_time, **options).train()
        assert units(callback)[-1] < 84
        assert callback.left()["bmrs_units"] == 84
        model = callback.finish().eval()
        assert torch.allclose(model(IDS).logits, seen[0], atol=1e-4)
        assert complaints == []
        # Saved after an epoch or after its last step: the units that go then are gone in both.
        after_epoch, after_step = (
            safetensors.torch.load_file(there / f"checkpoint-{5 * STEPS}" / "model.safetensors")
            for there in (tmp_path, undisturbed[0])
        )
        assert same(after_epoch, after_step)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")
def test_the_example_runs(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trainer_bert.py", "--epochs", "2"])
    runpy.run_path(str(ROOT / "examples" / "trainer_bert.py"), run_name="__main__")
    assert "2 epochs" in capsys.readouterr().out
