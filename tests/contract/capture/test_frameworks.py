"""Training loops of other frameworks: every step is counted and its gradients are logged."""

from __future__ import annotations

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


# --- Lightning ------------------------------------------------------------------------------------


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


def lightning_trainer(log_dir: Path, **options: Any) -> Any:
    """Return a default trainer with the default logger of Lightning."""
    import lightning
    from lightning.pytorch.loggers import TensorBoardLogger

    logger = TensorBoardLogger(log_dir, name="", version="")
    return lightning.Trainer(accelerator="cpu", max_epochs=1, logger=logger, **options)


def batches() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=4)


def fit(
    log_dir: Path, *, automatic: bool, watched: bool, **options: Any
) -> tuple[Any, list[StepRecord]]:
    seed(0)
    module = lightning_module(automatic)
    recorder = Recorder()
    loader = batches()
    trainer = lightning_trainer(log_dir, val_check_interval=2, **options)
    if not watched:
        trainer.fit(module, loader, loader)
    else:
        with HookLogger(module, trainer.logger.experiment, alerts=[recorder], every_n_steps=1):
            trainer.fit(module, loader, loader)
    return module, recorder.records


LIGHTNING = [
    ({"automatic": True}, 6, 1),
    ({"automatic": False}, 6, 1),
    ({"automatic": True, "accumulate_grad_batches": 2, "gradient_clip_val": 0.01}, 3, 2),
    ({"automatic": True, "precision": "bf16-mixed"}, 6, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "steps", "calls"), LIGHTNING)
def test_lightning_trains_unchanged_and_every_step_is_logged(
    tmp_path: Path, options: dict[str, Any], steps: int, calls: int
) -> None:
    pytest.importorskip("lightning")
    bare, _ = fit(tmp_path / "bare", watched=False, **options)
    watched, records = fit(tmp_path / "watched", watched=True, **options)
    for expected, got in zip(bare.parameters(), watched.parameters(), strict=True):
        assert torch.equal(expected, got)
    assert_complete(records, steps=steps, calls=calls)
    assert written_steps(tmp_path / "watched") == list(range(steps))
    if "gradient_clip_val" in options:
        assert all(record.total_grad_norm == pytest.approx(0.01, rel=1e-3) for record in records)
        assert all(record.total_grad_norm_before_clipping > 0.02 for record in records)


def test_every_step_is_written_though_lightning_closes_its_writer_before_the_logger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("lightning")
    module, logger = lightning_module(automatic=True), None
    for run in range(2):
        trainer = lightning_trainer(tmp_path)
        trainer.logger = logger = logger or trainer.logger
        with HookLogger(module, logger.experiment, first_step=6 * run):
            trainer.fit(module, batches())
            assert written_steps(tmp_path) == list(range(6 * run + 6))
    assert len([*tmp_path.glob("*tfevents*")]) == 2
    assert not [record for record in caplog.records if record.name.startswith("telemetry")]


# --- Hugging Face ---------------------------------------------------------------------------------


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


def hf_trainer(model: nn.Module, out: Path, **options: Any) -> Any:
    import transformers

    arguments = transformers.TrainingArguments(
        output_dir=str(out), per_device_train_batch_size=4, num_train_epochs=1, use_cpu=True,
        report_to="tensorboard", save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    return transformers.Trainer(
        model, arguments, train_dataset=rows(), eval_dataset=rows(), processing_class=None
    )


def share(trainer: Any, writer: SummaryWriter) -> SummaryWriter:
    """Give the writer to the trainer's own callback, which closes it when the training ends."""
    from transformers.integrations import TensorBoardCallback

    callbacks = trainer.callback_handler.callbacks
    [callback] = [each for each in callbacks if isinstance(each, TensorBoardCallback)]
    callback.tb_writer = writer
    return writer


def hf_train(log_dir: Path | None, out: Path, **options: Any) -> tuple[Any, list[StepRecord]]:
    seed(0)
    model = Regressor()
    recorder = Recorder()
    trainer = hf_trainer(model, out, **options)
    if log_dir is None:
        trainer.train()
    else:
        writer = share(trainer, SummaryWriter(log_dir))
        with HookLogger(model, writer, alerts=[recorder], every_n_steps=1):
            trainer.train()
    return model, recorder.records


HUGGING_FACE = [
    ({}, 6, 1),
    ({"gradient_accumulation_steps": 2, "max_grad_norm": 0.01}, 3, 2),
    ({"bf16": True, "eval_strategy": "steps", "eval_steps": 2}, 6, 1),
]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "steps", "calls"), HUGGING_FACE)
def test_the_hugging_face_trainer_trains_unchanged_and_every_step_is_logged(
    tmp_path: Path, options: dict[str, Any], steps: int, calls: int
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    bare, _ = hf_train(None, tmp_path / "out", **options)
    watched, records = hf_train(tmp_path / "log", tmp_path / "out", **options)
    for expected, got in zip(bare.parameters(), watched.parameters(), strict=True):
        assert torch.equal(expected, got)
    assert_complete(records, steps=steps, calls=calls)
    assert written_steps(tmp_path / "log") == list(range(steps))
    if "max_grad_norm" in options:
        assert all(record.total_grad_norm == pytest.approx(0.01, rel=1e-3) for record in records)


@pytest.mark.slow
def test_every_step_is_written_though_the_trainers_callback_closes_its_writer_before_the_logger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    model, writer = Regressor(), SummaryWriter(tmp_path)
    for run in range(2):
        trainer = hf_trainer(model, tmp_path / "out", logging_steps=4)
        with HookLogger(model, share(trainer, writer), first_step=6 * run):
            trainer.train()
            assert written_steps(tmp_path) == list(range(6 * run + 6))
    assert len([*tmp_path.glob("*tfevents*")]) == 2
    assert not [record for record in caplog.records if record.name.startswith("telemetry")]


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


# --- Keras ----------------------------------------------------------------------------------------


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
