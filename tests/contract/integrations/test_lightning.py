"""Lightning's own trainer, with its own loggers and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor

from telemetry import HookLogger
from telemetry.integrations.lightning import TelemetryCallback
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
from tests.helpers.shell import records
from tests.helpers.twins import Recorder


class Module(lightning.LightningModule):
    def __init__(self, *, automatic: bool = True) -> None:
        super().__init__()
        self.net, self.automatic_optimization = mlp(), automatic
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def trainer(folder: Path, callback: TelemetryCallback | None = None, **options: Any) -> Any:
    """Default trainer, with its TensorBoard logger and its checkpoints."""
    callbacks = [] if callback is None else [callback]
    return lightning.Trainer(
        default_root_dir=folder, accelerator="cpu", callbacks=callbacks,
        **{"max_epochs": 1, "enable_progress_bar": False, **options},
    )  # fmt: skip


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize(
    ("automatic", "options", "steps"),
    [
        (True, {}, 6),
        (False, {}, 6),
        (True, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}, 3),
        (True, {"precision": "bf16-mixed"}, 6),
    ],
)
def test_the_callback_writes_into_the_trainers_run_and_leaves_training_alone(
    tmp_path: Path, automatic: bool, options: dict[str, Any], steps: int
) -> None:
    bare, watched, recorder = Module(automatic=automatic), Module(automatic=automatic), Recorder()
    trainer(tmp_path / "bare", **options).fit(bare, batches(), batches())
    callback = TelemetryCallback(alerts=[recorder], every_n_steps=1)
    used = trainer(tmp_path / "watched", callback, **options)
    used.fit(watched, batches(), batches())
    assert same_weights(bare, watched)
    run = Path(used.logger.log_dir)
    micro = 6 // steps
    losses = watched.losses[::micro] if automatic else []  # manual ones are for the user to log
    assert curve(run, "loss") == pytest.approx(dict(enumerate(losses)))
    assert list(curve(run, "grad_norm/total")) == list(range(steps))
    assert curve(run, "validation/activation/0000.net.0")
    assert used.callbacks[0].hook_logger.current_step == steps
    assert_complete([r for r in recorder.records if not r.phase], steps=steps, calls=micro)
    if "gradient_clip_val" in options:
        assert_clipped([r for r in recorder.records if not r.phase])


@pytest.mark.usefixtures("silent")
def test_each_step_is_written_though_the_trainer_closes_its_writer_before_a_logger_ends(
    tmp_path: Path,
) -> None:
    module, own = Module(), TensorBoardLogger(tmp_path, name="", version="")
    writer = own.experiment
    for run in range(2):
        with HookLogger(module, writer, first_step=6 * run):
            trainer(tmp_path, logger=own).fit(module, batches(), batches())
        assert sorted(curve(tmp_path, "grad_norm/total")) == list(range(6 * run + 6))


def test_a_trainer_without_tensorboard_has_a_separate_run(tmp_path: Path) -> None:
    trainer(tmp_path, TelemetryCallback(), logger=CSVLogger(tmp_path)).fit(Module(), batches())
    assert list(curve(tmp_path / "telemetry", "loss")) == list(range(6))


@pytest.mark.usefixtures("silent")
def test_a_checkpoint_resumes_the_steps(tmp_path: Path) -> None:
    def logger() -> TensorBoardLogger:
        return TensorBoardLogger(tmp_path, name="run", version=0)

    first = trainer(tmp_path, TelemetryCallback(), logger=logger())
    first.fit(Module(), batches())
    saved = first.checkpoint_callback.best_model_path
    second = trainer(tmp_path, TelemetryCallback(), logger=logger(), max_epochs=2)
    second.fit(Module(), batches(), ckpt_path=saved)
    run = Path(second.logger.log_dir)
    assert sorted(curve(run, "grad_norm/total")) == list(range(12))


def test_an_alert_stops_the_trainer(tmp_path: Path) -> None:
    callback = TelemetryCallback(alerts=[AlertFrom(2)], on_alert="stop")
    used = trainer(tmp_path, callback, max_epochs=10_000)
    used.fit(Module(), batches())
    assert used.state.finished
    assert 2 < used.global_step < 60_000
    assert [alert.kind for alert in callback.hook_logger.alerts] == ["made_up"]


def test_an_exception_ends_the_run_and_is_explained(tmp_path: Path) -> None:
    class Broken(Module):
        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            if index == 3:
                raise ZeroDivisionError("of the user")
            return super().training_step(batch, index)

    used = trainer(tmp_path, TelemetryCallback())
    with pytest.raises(ZeroDivisionError):
        used.fit(Broken(), batches())
    [fault] = records("explain", used.logger.log_dir)
    assert fault["step"] == 3


def test_an_unknown_argument_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'evry_n_steps'"):
        TelemetryCallback(evry_n_steps=10)


def test_the_example_of_the_docs_runs() -> None:
    run_example("Lightning", Trainer=lightning.Trainer, module=Module(), loader=batches())
    [run] = Path("lightning_logs").iterdir()
    assert list(curve(run, "loss")) == list(range(12))
