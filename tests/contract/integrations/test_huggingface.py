"""The Trainer of Transformers, with its own reporting and checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback

from telemetry import HookLogger
from telemetry.integrations.huggingface import ReturnedLoss, TelemetryCallback
from tests.helpers.frameworks import (
    AlertFrom,
    assert_clipped,
    assert_complete,
    batches,
    curve,
    mlp,
    run_example,
    same_weights,
)
from tests.helpers.twins import Recorder


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.net(x)
        loss = (y - labels).square().mean()
        if self.training:
            self.losses.append(loss.detach())
        return {"loss": loss, "logits": y}


def train(
    model: nn.Module, out: Path, callback: TrainerCallback | None = None, **options: Any
) -> Any:
    """Train with default arguments, except for those of a small run on a CPU."""
    resume = options.pop("resume", None)
    rows = [{"x": x, "labels": y} for x, y in batches().dataset]
    arguments = transformers.TrainingArguments(
        output_dir=str(out), per_device_train_batch_size=4, use_cpu=True, disable_tqdm=True,
        **{"report_to": "tensorboard", "num_train_epochs": 1, **options},
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows,
        callbacks=[] if callback is None else [callback],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"eval_strategy": "steps", "eval_steps": 2}, 6),
        ({"eval_strategy": "epoch", "gradient_accumulation_steps": 2, "max_grad_norm": 0.01}, 3),
        ({"eval_strategy": "epoch", "bf16": True}, 6),
    ],
)
def test_the_callback_writes_next_to_the_trainers_runs_and_leaves_training_alone(
    tmp_path: Path, options: dict[str, Any], steps: int
) -> None:
    bare, watched, recorder = Regressor(), Regressor(), Recorder()
    train(bare, tmp_path / "bare", **options)
    callback = TelemetryCallback(alerts=[recorder], every_n_steps=1)
    train(watched, tmp_path / "watched", callback, **options)
    assert same_weights(bare, watched)
    [run] = (tmp_path / "watched" / "runs").iterdir()  # that of the trainer's own callback
    by_step = torch.stack(watched.losses).reshape(steps, -1).mean(1).tolist()
    assert curve(run, "loss") == pytest.approx(dict(enumerate(by_step)))
    assert list(curve(run, "grad_norm/total")) == list(range(steps))
    assert curve(run, "validation/activation/0000.net.0")
    assert not watched._forward_hooks
    records = [record for record in recorder.records if not record.phase]
    assert_complete(records, steps=steps, calls=6 // steps)
    if "max_grad_norm" in options:
        assert_clipped(records)


@pytest.mark.usefixtures("silent")
def test_each_step_is_written_though_the_trainer_closes_its_writer_before_a_logger_ends(
    tmp_path: Path,
) -> None:
    model, writer = Regressor(), SummaryWriter(tmp_path / "run")
    for run in range(2):
        with HookLogger(model, writer, first_step=6 * run):
            own = TensorBoardCallback(writer)
            train(model, tmp_path, own, report_to="none", logging_steps=4)
        steps = sorted(curve(tmp_path / "run", "grad_norm/total"))
        assert steps == list(range(6 * run + 6))


class CountsLabels(Regressor):
    """Model that receives the number of labels of a step, like those of Transformers."""

    def forward(
        self, x: Tensor, labels: Tensor, num_items_in_batch: Any = None, **_: Any
    ) -> dict[str, Tensor]:
        found = super().forward(x, labels)
        if num_items_in_batch is None:
            return found
        return found | {"loss": found["loss"] * labels.numel() / num_items_in_batch}


class IgnoresLabelCount(Regressor):
    """Model that ignores the number of labels: ``Trainer`` then sums the means."""

    def forward(self, x: Tensor, labels: Tensor, **_: Any) -> dict[str, Tensor]:
        return super().forward(x, labels)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("model", [Regressor, CountsLabels, IgnoresLabelCount])
def test_the_logged_loss_equals_the_loss_of_the_trainer(
    tmp_path: Path, model: type[Regressor], average: bool
) -> None:
    trainer = train(
        model(), tmp_path, TelemetryCallback(tmp_path / "run"), logging_steps=1,
        gradient_accumulation_steps=4, average_tokens_across_devices=average,
    )  # fmt: skip
    assert_losses_of(trainer, tmp_path / "run", steps=2)  # of four micro-batches and of two


def assert_losses_of(trainer: Any, run: Path, steps: int) -> None:
    history = [log for log in trainer.state.log_history if "loss" in log]
    theirs = {log["step"] - 1: float(log["loss"]) for log in history}
    assert len(theirs) == steps
    assert curve(run, "loss") == pytest.approx(theirs, rel=1e-4, abs=1e-4)


def test_a_checkpoint_resumes_the_steps_and_a_damaged_state_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, run = tmp_path / "out", tmp_path / "run"
    train(Regressor(), out, TelemetryCallback(run), max_steps=4, save_steps=4)
    assert (out / "checkpoint-4" / "telemetry.json").is_file()
    callback = TelemetryCallback(run)
    train(Regressor(), out, callback, max_steps=6, resume=str(out / "checkpoint-4"))
    assert sorted(curve(run, "grad_norm/total")) == list(range(6))
    assert callback.hook_logger is not None
    assert callback.hook_logger.current_step == 6
    (out / "checkpoint-4" / "telemetry.json").write_text("torn")
    train(Regressor(), out, TelemetryCallback(run), max_steps=6, resume=str(out / "checkpoint-4"))
    [message] = [r.getMessage() for r in caplog.records if r.name.startswith("telemetry")]
    assert "failed to read its state" in message


def test_an_alert_stops_the_trainer(tmp_path: Path) -> None:
    callback = TelemetryCallback(alerts=[AlertFrom(2)], on_alert="stop")
    trainer = train(Regressor(), tmp_path, callback, max_steps=60_000, save_strategy="no")
    assert 2 < trainer.state.global_step < 60_000
    assert "train_runtime" in trainer.state.log_history[-1]  # the training ended regularly


def test_the_loss_hook_ignores_copies_compiled_calls_and_outputs_without_a_scalar_loss(
    tmp_path: Path,
) -> None:
    model, x, y = Regressor(), torch.randn(4, 4), torch.randn(4, 2)
    callback = TelemetryCallback(tmp_path)
    callback.begin(model, None)
    hook = ReturnedLoss(model)
    copy.deepcopy(model)(x, y)
    torch.compile(model, backend="eager", fullgraph=True)(x, y)
    hook(model, (), {}, (x, x))
    hook(model, (), {}, {"loss": x})  # of each sample
    assert hook.of_step() is None
    loss = model(x, y)["loss"]
    assert hook.of_step() == loss
    callback.end()


def test_the_example_of_the_docs_runs() -> None:
    rows = [{"x": x, "labels": y} for x, y in batches().dataset]
    arguments = transformers.TrainingArguments("out", use_cpu=True, max_steps=3, disable_tqdm=True)
    names = {"Trainer": transformers.Trainer, "model": Regressor(), "arguments": arguments}
    run_example("Hugging Face Transformers", rows=rows, **names)
    assert list(curve(Path("runs/first"), "loss")) == [0, 1, 2]
