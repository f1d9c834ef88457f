"""Training loops of other frameworks: every step is counted and its gradients are logged."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.tensorboard import SummaryWriter

import telemetry
from telemetry import HookLogger, StepRecord
from tests.helpers.twins import Recorder, seed

pytestmark = pytest.mark.filterwarnings("ignore::Warning")  # of the frameworks


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def written_steps(log_dir: Path) -> list[int]:
    """Steps whose gradient norms are in the event files, in their order."""
    scalars = telemetry.read(log_dir).scalars
    return scalars[scalars["tag"] == "grad_norm/total"]["step"].tolist()


def assert_complete(records: list[StepRecord], *, steps: int, calls: int = 1) -> None:
    """Check the number of steps and the completeness of each."""
    assert [record.step for record in records] == list(range(steps))
    for record in records:
        assert record.grad_present.all()
        assert {tensor.calls for tensor in record.activations.values()} == {calls}
        assert {tensor.calls for tensor in record.activation_grads.values()} == {calls}
        assert all(ratio > 0 for ratio in record.update_ratios.values())


# --- trainers ------------------------------------------------------------------------------------


def lightning_module(automatic: bool) -> Any:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()
            self.automatic_optimization = automatic

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = self.net(batch[0]).square().mean()
            self.log("loss", loss)
            if not automatic:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            self.net(batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Module()


def batches() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4)


class Lightning:
    """A default trainer, whose default logger closes its writer at the end."""

    def __init__(self, log_dir: Path, *, automatic: bool = True, **options: Any) -> None:
        pytest.importorskip("lightning")
        from lightning.pytorch.loggers import TensorBoardLogger

        self.model = lightning_module(automatic)
        self.logger = TensorBoardLogger(log_dir, name="", version="")
        self.writer, self.options = self.logger.experiment, options

    def train(self) -> None:
        import lightning

        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=1, logger=self.logger, val_check_interval=2,
            **self.options,
        )  # fmt: skip
        trainer.fit(self.model, batches(), batches())


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        y = self.net(x)
        return {"loss": y.square().mean(), "logits": y}


def rows() -> list[dict[str, Tensor]]:
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    return [{"x": x, "labels": torch.zeros(())} for x in inputs]


class HuggingFace:
    """A trainer, whose callback closes the writer that it was given at the end."""

    def __init__(self, log_dir: Path, **options: Any) -> None:
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
        self.model, self.options = Regressor(), options
        self.writer, self.out = SummaryWriter(log_dir), str(log_dir.parent / "out")

    def train(self) -> None:
        import transformers
        from transformers.integrations import TensorBoardCallback

        arguments = transformers.TrainingArguments(
            output_dir=self.out, per_device_train_batch_size=4, num_train_epochs=1, use_cpu=True,
            report_to="tensorboard", save_strategy="no", disable_tqdm=True, **self.options,
        )  # fmt: skip
        trainer = transformers.Trainer(
            self.model, arguments, train_dataset=rows(), eval_dataset=rows(), processing_class=None
        )
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback):
                callback.tb_writer = self.writer
        trainer.train()


TRAINERS: list[tuple[Any, dict[str, Any], int, int]] = [
    (Lightning, {}, 6, 1),
    (Lightning, {"automatic": False}, 6, 1),
    (Lightning, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}, 3, 2),
    (Lightning, {"precision": "bf16-mixed"}, 6, 1),
    (HuggingFace, {}, 6, 1),
    (HuggingFace, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.01}, 3, 2),
    (HuggingFace, {"bf16": True, "eval_strategy": "steps", "eval_steps": 2}, 6, 1),
]


def watched_by(run: Any, rule: Recorder) -> HookLogger:
    return HookLogger(run.model, run.writer, alerts=[rule], every_n_steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "options", "steps", "calls"), TRAINERS)
def test_a_trainer_trains_unchanged_and_every_step_is_logged(
    tmp_path: Path, framework: Any, options: dict[str, Any], steps: int, calls: int
) -> None:
    recorder, trained = Recorder(), []
    for name in ("bare", "watched"):
        seed(0)
        run = framework(tmp_path / name, **options)
        with nullcontext() if name == "bare" else watched_by(run, recorder):
            run.train()
        trained.append(run.model)
    for expected, got in zip(*(model.parameters() for model in trained), strict=True):
        assert torch.equal(expected, got)
    assert_complete(recorder.records, steps=steps, calls=calls)
    assert written_steps(tmp_path / "watched") == list(range(steps))
    if {"gradient_clip_val", "max_grad_norm"} & set(options):
        for record in recorder.records:
            assert record.total_grad_norm == pytest.approx(0.01, rel=1e-3)
            assert record.total_grad_norm_before_clipping > 0.02


@pytest.mark.slow
@pytest.mark.parametrize("make", [Lightning, partial(HuggingFace, logging_steps=4)])
def test_every_step_is_written_though_a_trainer_closes_its_writer_before_the_logger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Any
) -> None:
    log_dir = tmp_path / "log"
    trainer = make(log_dir)
    for run in range(2):
        with HookLogger(trainer.model, trainer.writer, first_step=6 * run):
            trainer.train()
        assert written_steps(log_dir) == list(range(6 * run + 6))
    assert not [record for record in caplog.records if record.name.startswith("telemetry")]


# --- pieces of trainers ---------------------------------------------------------------------------


def test_steps_of_an_optimizer_that_accelerate_prepared_are_logged(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, recorder = mlp(), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with HookLogger(prepared, tmp_path, optimizer=optimizer, alerts=[recorder], every_n_steps=1):
        for [x] in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    assert_complete(recorder.records, steps=3, calls=2)


@pytest.mark.slow
def test_a_keras_model_is_reported_and_its_layers_are_logged_in_a_module_list(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keras stores the layers of a Sequential outside of the modules that PyTorch registers."""
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras")
    model = keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)]
    )
    layers, recorder = nn.ModuleList(model.layers), Recorder()

    def train(logger: HookLogger) -> None:
        for _ in range(3):
            model.zero_grad()
            model(torch.rand(8, 4), training=True).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            logger.step()

    with HookLogger(model, tmp_path / "model") as logger:
        train(logger)
    [message] = [record.getMessage() for record in caplog.records]
    assert "Keras keeps the layers of such a model where PyTorch does not look" in message
    assert "layers = torch.nn.ModuleList(model.layers)" in message
    with HookLogger(layers, tmp_path / "layers", alerts=[recorder], every_n_steps=1) as logger:
        train(logger)
    assert [list(record.activations) for record in recorder.records] == [["0", "1"]] * 3
    assert all(set(record.activation_grads) == {"0", "1"} for record in recorder.records)
    assert len(caplog.records) == 1
