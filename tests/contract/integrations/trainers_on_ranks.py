"""Run on two ranks by test_ranks.py: two frameworks train until an alert stops them.

Then the logged losses are compared with those of Transformers' ``Trainer``.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import torch

from telemetry.integrations import huggingface
from telemetry.integrations import lightning as telemetry_lightning
from tests.contract.integrations.test_huggingface import (
    CountsLabels,
    Regressor,
    assert_losses_of,
    train,
)
from tests.contract.integrations.test_lightning import Module, trainer
from tests.helpers.frameworks import AlertFrom, batches


def lightning_steps(folder: Path) -> int:
    callback = telemetry_lightning.TelemetryCallback(alerts=[AlertFrom(3)], on_alert="stop")
    used = trainer(
        folder, callback, strategy="ddp", devices=2, max_epochs=None, max_steps=50_000,
        enable_checkpointing=False,
    )  # fmt: skip
    used.fit(Module(), batches())
    return int(used.global_step)


def huggingface_steps(folder: Path) -> int:
    callback = huggingface.TelemetryCallback(folder / "run", alerts=[AlertFrom(3)], on_alert="stop")
    options = {"max_steps": 50_000, "report_to": "none", "save_strategy": "no"}
    return int(train(Regressor(), folder, callback, **options).state.global_step)


def compare_huggingface_losses(folder: Path) -> None:
    models, choices = (Regressor, CountsLabels), (True, False)
    for model, average, unused in itertools.product(models, choices, choices):
        run = folder / f"{model.__name__}-{average}-{unused}"
        used = train(
            model(), folder, huggingface.TelemetryCallback(run), logging_steps=1,
            gradient_accumulation_steps=2, average_tokens_across_devices=average,
            ddp_find_unused_parameters=unused, save_strategy="no", report_to="none",
        )  # fmt: skip
        if torch.distributed.get_rank() == 0:
            assert_losses_of(used, run, steps=2)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    steps = lightning_steps(folder / "lightning"), huggingface_steps(folder / "huggingface")
    (folder / f"{torch.distributed.get_rank()}.txt").write_text(f"{steps[0]} {steps[1]}")
    compare_huggingface_losses(folder / "losses")
