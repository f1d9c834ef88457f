"""Run on two ranks by test_ranks.py: two frameworks train until an alert stops them."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning
import torch
import transformers

from telemetry.integrations import huggingface
from telemetry.integrations import lightning as telemetry_lightning
from tests.contract.integrations.test_huggingface import Regressor
from tests.contract.integrations.test_lightning import Module
from tests.helpers.frameworks import AlertFrom, batches


def lightning_steps(folder: Path) -> int:
    callback = telemetry_lightning.TelemetryCallback(alerts=[AlertFrom(3)], on_alert="stop")
    trainer = lightning.Trainer(
        accelerator="cpu", strategy="ddp", devices=2, max_steps=50_000, callbacks=[callback],
        default_root_dir=folder, enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Module(), batches())
    return int(trainer.global_step)


def huggingface_steps(folder: Path) -> int:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=50_000, use_cpu=True,
        disable_tqdm=True, report_to="none", save_strategy="no",
    )  # fmt: skip
    callback = huggingface.TelemetryCallback(folder / "run", alerts=[AlertFrom(3)], on_alert="stop")
    rows = [{"x": x, "labels": y} for x, y in batches().dataset]
    trainer = transformers.Trainer(Regressor(), arguments, train_dataset=rows, callbacks=[callback])
    trainer.train()
    return int(trainer.state.global_step)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    steps = lightning_steps(folder / "lightning"), huggingface_steps(folder / "huggingface")
    (folder / f"{torch.distributed.get_rank()}.txt").write_text(f"{steps[0]} {steps[1]}")
