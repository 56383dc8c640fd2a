"""Lightning trains as it did, and the network gets smaller."""

import runpy
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bmrs
from tests.integrations.toy import EPOCHS, OPTIONS, RATE, X, accuracy, loader, network, same, train_by_hand
from tests.integrations.written import board, offline, wandb_rows  # noqa: F401  a fixture among them
from tests.processes import together

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    L = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
    from lightning.pytorch.strategies import SingleDeviceStrategy

    from bmrs.integrations.lightning import PruningCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists and is not empty"),
]
ROOT = Path(__file__).parents[2]


class Classifier(L.LightningModule):
    """As most are: a network inside, called as ``self(x)`` or as ``self.net(x)``."""

    def __init__(self, through="net"):
        super().__init__()
        self.net = network()
        self.through = through
        self.example_input_array = X[:4]

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.net(x) if self.through == "net" else self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), batch_size=len(batch[0]))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=RATE)


class InParts(Classifier):
    """Layers of its own, put together in ``forward``."""

    def __init__(self):
        super().__init__(through="self")
        self.first, _, self.last = self.net
        del self.net

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


def trainer(*callbacks, epochs=EPOCHS, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    saves = any(isinstance(one, ModelCheckpoint) for one in callbacks)
    return L.Trainer(
        max_epochs=epochs, callbacks=list(callbacks), **{"enable_checkpointing": saves, **quiet, **options}
    )


def pruning(**options):
    return PruningCallback(**{**OPTIONS, **options})


def units(callback):
    return [report.units for report in callback.reports]


class TestTraining:
    def test_units_go_and_the_task_is_still_solved(self):
        module, callback = Classifier(), pruning()
        fit = trainer(callback)
        fit.fit(module, loader())
        assert len(callback.reports) == EPOCHS
        assert units(callback)[-1] < 16 < 24 == units(callback)[0]
        assert accuracy(module) > 0.97
        before = module(X)
        plain = callback.finish()
        assert plain is module.net
        assert [name for name, _ in module.named_modules()] == ["", "net", "net.0", "net.1", "net.2"]
        assert plain[0].out_features == units(callback)[-1]
        assert torch.allclose(module(X), before, atol=1e-5)

    @pytest.mark.parametrize(("through", "target"), [("net", Classifier), ("self", Classifier), ("self", InParts)])
    def test_it_is_the_plain_loop_to_the_last_bit(self, through, target):
        module, callback = target() if target is InParts else target(through), pruning()
        trainer(callback).fit(module, loader())
        expected = network()
        optimizer = torch.optim.AdamW(expected.parameters(), lr=RATE)
        pruner = bmrs.Pruner(expected, X[:4], optimizer, **OPTIONS)
        train_by_hand(expected, pruner, optimizer, EPOCHS)
        assert [p.shape for p in expected.parameters()] == [p.shape for p in callback.pruner.model.parameters()]
        assert all(map(torch.equal, expected.parameters(), callback.pruner.model.parameters()))

    def test_accumulated_and_clipped_gradients_and_a_schedule_are_those_of_the_plain_loop(self):
        class Scheduled(Classifier):
            def configure_optimizers(self):
                optimizer = torch.optim.AdamW(self.parameters(), lr=RATE)
                return [optimizer], [{"scheduler": cycle(optimizer), "interval": "step"}]

        def cycle(optimizer):
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=8 * EPOCHS, div_factor=2)

        module, callback = Scheduled(), pruning(phi_lr=20)
        fit = trainer(callback, accumulate_grad_batches=2, gradient_clip_val=0.5)
        fit.fit(module, loader())
        expected = network()
        optimizer = torch.optim.AdamW(expected.parameters(), lr=RATE)
        scheduler = cycle(optimizer)
        pruner = bmrs.Pruner(expected, X[:4], optimizer, **OPTIONS | {"phi_lr": 20})
        train_by_hand(expected, pruner, optimizer, EPOCHS, accumulate=2, clip=0.5, scheduler=scheduler)
        assert callback.reports[-1].units < 24
        assert len(fit.optimizers[0].param_groups) == 1
        assert [p.shape for p in expected.parameters()] == [p.shape for p in module.net.parameters()]
        assert all(
            torch.allclose(a, b, atol=1e-5) for a, b in zip(expected.parameters(), module.net.parameters(), strict=True)
        )

    def test_what_is_left_is_logged(self):
        module, callback = Classifier(), pruning()
        fit = trainer(callback)
        fit.fit(module, loader())
        callback.finish()
        assert fit.callback_metrics["bmrs_units"] == module.net[0].out_features
        assert fit.callback_metrics["bmrs_parameters"] == sum(p.numel() for p in module.parameters())

    def test_tensorboard_and_wandb_are_told(self, tmp_path, offline):  # noqa: F811
        pytest.importorskip("tensorboard")
        pytest.importorskip("wandb")
        callback = pruning()
        boards = [
            L.loggers.TensorBoardLogger(tmp_path, name="", version=""),
            L.loggers.WandbLogger(save_dir=tmp_path, offline=True),
        ]
        trainer(callback, logger=boards, log_every_n_steps=16).fit(Classifier(), loader())
        found, rows = board(tmp_path), wandb_rows(tmp_path)
        assert len(set(units(callback))) > 2
        last_steps = [16 * epoch + 15 for epoch in range(EPOCHS)]
        for name, values in {
            "bmrs_units": units(callback),
            "bmrs_parameters": [report.parameters for report in callback.reports],
        }.items():
            assert found[name] == dict(zip(last_steps, values, strict=True))
            assert {row["trainer/global_step"]: row[name] for row in rows if name in row} == found[name]

    def test_weight_decay_does_not_reach_the_gates(self):
        class Decayed(Classifier):
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=1e-9, weight_decay=1e8)

        module, callback = Decayed(), pruning(phi_lr=1)
        trainer(callback, epochs=1, limit_train_batches=1).fit(module, loader())
        assert module.net[0].weight.norm() < 0.95 * network()[0].weight.norm()
        assert torch.allclose(callback.pruner.bank.log_sigma, torch.tensor(-5.0), atol=1e-6)

    def test_epochs_that_are_not_due_are_passed_over(self):
        module, callback = Classifier(), pruning(every_n_epochs=2, start_epoch=5, stop_epoch=10)
        seen = []

        class Look(L.Callback):
            def on_train_epoch_end(self, trainer, pl_module):
                seen.append(len(callback.reports))

        trainer(callback, Look(), epochs=12).fit(module, loader())
        assert seen == [0] * 6 + [1, 1] + [2] * 4

    def test_validation_sees_what_the_epoch_left(self):
        callback, seen = pruning(), []

        class Seen(Classifier):
            def on_validation_epoch_start(self):
                if not self.trainer.sanity_checking:
                    seen.append(self.net[0].out_features)

        trainer(callback).fit(Seen(), loader(), loader())
        assert seen == units(callback)
        assert len(set(seen)) > 1

    def test_an_epoch_cut_short_is_pruned_once(self):
        callback = pruning()
        trainer(callback, epochs=-1, max_steps=8 * 16 + 5).fit(Classifier(), loader())
        assert len(callback.reports) == 9

    def test_fitting_twice_goes_on_pruning(self):
        module, callback = Classifier(), pruning()
        trainer(callback, epochs=6).fit(module, loader())
        first = units(callback)
        trainer(callback, epochs=6).fit(module, loader())
        assert len(callback.reports) == 12
        assert units(callback)[-1] < first[-1] < 24
        assert accuracy(module) > 0.97

    def test_fitting_twice_with_optimizers_that_do_not_know_of_the_gates(self):
        class Own(Classifier):
            def configure_optimizers(self):
                return torch.optim.AdamW([*self.net[0].parameters(), *self.net[2].parameters()], lr=RATE)

        module, callback = Own(), pruning()
        trainer(callback, epochs=1).fit(module, loader())
        before = callback.pruner.bank.log_sigma.detach().clone()
        trainer(callback, epochs=1).fit(module, loader())
        assert (callback.pruner.bank.log_sigma - before).abs().min() > 0.1
        assert len(callback.pruner.followed()) == 1

    def test_a_finished_callback_leaves_the_network_alone(self):
        module, callback = Classifier(), pruning()
        trainer(callback).fit(module, loader())
        callback.finish()
        left = module.net[0].out_features
        trainer(callback, epochs=2).fit(module, loader())
        assert len(callback.reports) == EPOCHS
        assert module.net[0].out_features == left
        assert not any("bmrs" in name for name, _ in module.named_modules())

    def test_a_network_built_in_configure_model(self):
        class Late(Classifier):
            def __init__(self):
                super().__init__()
                self.net = None

            def configure_model(self):
                if self.net is None:
                    self.net = network()

        module, callback = Late(), pruning()
        trainer(callback).fit(module, loader())
        assert callback.finish()[0].out_features < 24

    def test_two_optimizers_stepped_by_hand(self):
        class Pair(Classifier):
            def __init__(self):
                super().__init__()
                self.other = nn.Linear(8, 2)
                self.automatic_optimization = False

            def training_step(self, batch, index):
                x, y = batch
                for optimizer, part in zip(self.optimizers(), (self.other, self.net), strict=True):
                    optimizer.zero_grad()
                    self.manual_backward(F.cross_entropy(part(x), y))
                    optimizer.step()

            def configure_optimizers(self):
                return [
                    torch.optim.SGD(self.other.parameters(), lr=0.1),
                    torch.optim.Adam(self.net.parameters(), lr=RATE),
                ]

        module, callback = Pair(), pruning(module="net")
        fit = trainer(callback)
        fit.fit(module, loader())
        assert callback.finish()[0].out_features == fit.callback_metrics["net.bmrs_units"] < 16
        assert accuracy(module) > 0.97

    def test_a_callback_for_each_of_two_parts(self):
        class Two(Classifier):
            def __init__(self):
                super().__init__()
                self.other = network(hidden=40)
                self.automatic_optimization = False

            def training_step(self, batch, index):
                x, y = batch
                for optimizer, part in zip(self.optimizers(), (self.net, self.other), strict=True):
                    optimizer.zero_grad()
                    self.manual_backward(F.cross_entropy(part(x), y))
                    optimizer.step()

            def configure_optimizers(self):
                return [torch.optim.Adam(part.parameters(), lr=RATE) for part in (self.net, self.other)]

        module, callbacks = Two(), [pruning(module=name, example_inputs=X[:4]) for name in ("net", "other")]
        fit = trainer(*callbacks)
        fit.fit(module, loader())
        left = [callback.finish()[0].out_features for callback in callbacks]
        assert left == [fit.callback_metrics["net.bmrs_units"], fit.callback_metrics["other.bmrs_units"]]
        assert left[0] < 16
        assert left[1] < 30
        assert min(accuracy(module.net), accuracy(module.other)) > 0.97

    def test_several_inputs_some_by_name(self):
        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.net = network()

            def forward(self, x, scale, *, shift):
                return self.net(x * scale + shift)

        class Named(Classifier):
            def __init__(self):
                super().__init__()
                self.net = Two()

            def forward(self, x):
                return self.net(x, 1.0, shift=x.new_zeros(1))

            def training_step(self, batch, index):
                return F.cross_entropy(self(batch[0]), batch[1])

        module, callback = Named(), pruning()
        trainer(callback).fit(module, loader())
        assert callback.pruner.model is module.net
        assert callback.finish().net[0].out_features < 16


def test_a_pass_within_a_pass_has_gates_of_its_own():
    """With several processes Lightning calls the module to run training_step, and that calls it again."""

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.weight = nn.Linear(8, 6), nn.Parameter(torch.randn(6, 2))
            self.within = False

        def forward(self, x):
            if self.within:
                self.within = False
                return self(x)
            return torch.relu(self.first(x)) @ self.weight

    torch.manual_seed(0)
    model = Product()
    pruner = bmrs.Pruner(model, X[:4], **OPTIONS)
    pruner.bank.log_sigma.data.fill_(-1.0)
    model.within = True
    found = model(X[:4])
    assert torch.allclose(found, (torch.relu(model.first(X[:4])) * pruner.bank.theta("first")[:1]) @ model.weight)
    assert pruner.bank.draws == 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A whole training, and what it saved after each epoch."""
    folder = tmp_path_factory.mktemp("undisturbed")
    module, callback = Classifier(), pruning()
    saved = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    checked = ModelCheckpoint(folder, filename="best-{epoch}", save_top_k=-1, monitor="val_loss")
    fit = trainer(callback, saved, checked)
    fit.fit(module, loader(), loader())
    assert len(set(units(callback))) > 3
    return folder, module, callback, fit


class TestCheckpoints:
    @pytest.mark.parametrize("name", ["epoch=5", "epoch=7", "best-epoch=6"])
    def test_a_fresh_start_from_one_ends_as_if_nothing_had_happened(self, undisturbed, name):
        folder, module, callback, _ = undisturbed
        again, resumed = Classifier(), pruning()
        trainer(resumed).fit(again, loader(), loader(), ckpt_path=folder / f"{name}.ckpt")
        assert units(resumed) == units(callback)[int(name[-1]) + 1 :]
        assert same(again.state_dict(), module.state_dict())

    def test_one_of_a_larger_network_is_tested_and_finished(self, undisturbed):
        folder, *_ = undisturbed
        module, callback = Classifier(), pruning()
        fit = trainer(callback, ModelCheckpoint(folder / "larger", save_top_k=1, monitor="val_loss", mode="max"))
        fit.fit(module, loader(), loader())
        found = fit.test(module, loader(), ckpt_path="best", verbose=False)[0]
        assert found["val_loss"] == pytest.approx(float(fit.checkpoint_callback.best_model_score), abs=1e-6)
        assert callback.finish()[0].out_features == 24 > units(callback)[-1]

    def test_one_is_loaded_without_fitting(self, undisturbed):
        folder, _, callback, fit = undisturbed
        module = Classifier()
        attached = pruning()
        attached.attach(module)
        found = trainer(attached).test(module, loader(), ckpt_path=folder / "epoch=9.ckpt", verbose=False)[0]
        assert attached.finish()[0].out_features == units(callback)[-1]
        assert found["val_loss"] == pytest.approx(float(fit.callback_metrics["val_loss"]), abs=1e-6)

    def test_one_with_an_average_of_the_weights(self, tmp_path):
        def fitted(**options):
            module, callback = Classifier(), pruning()
            average = EMAWeightAveraging(decay=0.9)
            saved = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
            fit = trainer(callback, average, saved)
            fit.fit(module, loader(), loader(), **options)
            return module, callback, average

        module, callback, average = fitted()
        left = units(callback)[-1]
        assert left < 16
        assert average._average_model.module.net[0].out_features == left
        again, *_ = fitted(ckpt_path=tmp_path / "epoch=6.ckpt")
        assert same(again.state_dict(), module.state_dict())
        assert accuracy(module) > 0.97
        assert callback.finish()[0].out_features == left

    def test_the_average_is_that_of_the_units_left(self):
        """Half of it is forgotten at every step: two epochs after the last removal only what was seen since counts."""
        seen = []

        class Look(L.Callback):
            def on_train_batch_end(self, trainer, pl_module, *_):
                seen.append(pl_module.net[2].weight.detach().clone())

        module, callback = Classifier(), pruning(stop_epoch=8)
        averaging = EMAWeightAveraging(decay=0.5)
        trainer(callback, averaging, Look()).fit(module, loader())
        shape = seen[-1].shape
        alike = [weight for weight in seen if weight.shape == shape]
        assert 20 < len(alike) < len(seen)
        expected = alike[0]
        for weight in alike[1:]:
            expected = 0.5 * expected + 0.5 * weight
        assert torch.allclose(module.net[2].weight, expected, atol=1e-5)

    def test_stochastic_weight_averaging_shrinks_along(self):
        module, callback = Classifier(), pruning()
        averaging = StochasticWeightAveraging(swa_lrs=RATE, swa_epoch_start=4)
        trainer(callback, averaging).fit(module, loader())
        assert averaging._average_model.net[0].out_features == units(callback)[-1] < 24
        assert accuracy(module) > 0.95


class TestTargets:
    def found(self, fitted, **options):
        callback = pruning(**options)
        callback.attach(fitted)
        return callback.pruner.model

    def test_the_one_submodule_with_all_parameters(self):
        module = Classifier()
        assert self.found(module) is module.net

    def test_the_module_itself_where_parameters_lie_in_several(self):
        module = InParts()
        assert self.found(module) is module

    def test_the_module_itself_where_its_submodule_is_taken_apart(self):
        class Apart(Classifier):
            def forward(self, x):
                for layer in self.net:
                    x = layer(x)
                return x

        module = Apart()
        assert self.found(module) is module

    def test_the_submodule_that_is_named(self):
        class Deep(Classifier):
            def __init__(self):
                super().__init__()
                self.net = nn.Sequential(nn.Linear(8, 8), network())

        module = Deep()
        assert self.found(module, module="net.1") is module.net[1]

    def test_the_only_submodule_of_a_module_without_forward(self):
        class Plain(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = network()

        module = Plain()
        assert self.found(module, example_inputs=X[:4]) is module.net


class TestRefused:
    def refused(self, match, fitted=None, error=ValueError, **options):
        with pytest.raises(error, match=match) as caught:
            trainer(pruning(**options), epochs=1).fit(fitted or Classifier(), loader())
        return caught.value

    def test_no_example_inputs(self):
        module = Classifier()
        module.example_input_array = None
        self.refused(r"example_inputs are needed .* give PruningCallback\(example_inputs\), or set", module)

    def test_a_submodule_that_is_not_there(self):
        self.refused("module='nett' is no submodule of the LightningModule: net are", module="nett")

    def test_a_submodule_that_is_not_called(self):
        module = Classifier()
        module.other = network()
        self.refused("'other' is not called when the LightningModule is: give example_inputs", module, module="other")

    def test_several_parts_and_no_forward(self):
        class Plain(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.first, self.second = network(), network()

        callback = pruning(example_inputs=X[:4])
        with pytest.raises(ValueError, match=r"has no forward: name the part to prune with module='...'"):
            callback.attach(Plain())

    def test_gates_that_the_loss_does_not_hear_of(self):
        module = Classifier()
        module.other = network()
        self.refused(
            "training_step does not use the Sequential that has the gates",
            module,
            RuntimeError,
            module="other",
            example_inputs=X[:4],
        )

    def test_parts_called_one_by_one(self):
        class Apart(InParts):
            def training_step(self, batch, index):
                return F.cross_entropy(self.last(torch.relu(self.first(batch[0]))), batch[1])

        problem = self.refused("no gates have been drawn", Apart(), RuntimeError)
        assert "training_step must call self(...)" in problem.__notes__[0]

    def test_optimizers_of_something_else(self):
        class Elsewhere(Classifier):
            def __init__(self):
                super().__init__()
                self.other = network()

            def configure_optimizers(self):
                return torch.optim.SGD(self.other.parameters(), lr=0.1)

        self.refused("no optimizer of configure_optimizers holds parameters of", Elsewhere(), module="net")

    def test_an_average_made_before_the_gates(self):
        with pytest.raises(ValueError, match="EMAWeightAveraging copies the network before it has gates: put Pruning"):
            trainer(EMAWeightAveraging(), pruning()).fit(Classifier(), loader())

    def test_a_strategy_that_splits_parameters(self):
        class FSDPStrategy(SingleDeviceStrategy):
            pass

        with pytest.raises(ValueError, match=r"FSDPStrategy splits parameters, .* use strategy='ddp'"):
            trainer(pruning(), strategy=FSDPStrategy("cpu")).fit(Classifier(), loader())

    def test_a_strategy_that_trains_copies(self):
        fit, module, callback = trainer(pruning(), devices=2, strategy="ddp_fork"), Classifier(), pruning()
        fit.strategy._configure_launcher()
        with pytest.raises(ValueError, match=r"DDPStrategy trains copies in other processes, .* use strategy='ddp'"):
            callback.setup(fit, module, "fit")

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"every_n_epochs": 0}, "every_n_epochs must be a finite number of at least 1"),
            ({"every_n_epochs": 1.5}, "every_n_epochs must be a whole number"),
            ({"start_epoch": -1}, "start_epoch must be a finite number of at least 0"),
            ({"start_epoch": 3, "stop_epoch": 3}, "stop_epoch must be a finite number of at least 4"),
        ],
    )
    def test_epochs_that_cannot_be(self, options, match):
        with pytest.raises(ValueError, match=match):
            pruning(**options)

    @pytest.mark.parametrize("name", ["phi_rate", "optimizer"])
    def test_an_option_that_is_none(self, name):
        with pytest.raises(TypeError, match=f"'{name}' is no option of a Pruner in a callback: choose from num_exam"):
            pruning(**{name: 1})

    def test_finishing_before_there_are_gates(self):
        with pytest.raises(ValueError, match="there are no gates yet: train with the callback, or attach it, first"):
            pruning().finish()


def one_of_two(folder):
    module, callback = InParts(), pruning()
    fit = trainer(callback, epochs=6, devices=2, strategy="ddp")
    fit.fit(module, loader(16))
    torch.save((units(callback), dict(module.named_parameters())), folder / str(fit.global_rank))
    assert accuracy(callback.finish()) > 0.95


def test_two_processes_keep_the_same_units(tmp_path):
    together(2, one_of_two, tmp_path)
    (units_of_one, one), (units_of_other, other) = (torch.load(tmp_path / rank) for rank in "01")
    assert units_of_one == units_of_other
    assert units_of_one[-1] < 20
    assert same(one, other)


def test_the_example_runs(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning_digits.py", "--epochs", "3"])
    runpy.run_path(str(ROOT / "examples" / "lightning_digits.py"), run_name="__main__")
    assert "3 epochs" in capsys.readouterr().out
