"""Two ranks train by a trainer: they write one run, and an alert stops both at the same step."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import socket
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
from tests.helpers.frameworks import AlertFrom, batches, curve
from tests.helpers.scripts import run_script


def test_two_ranks_write_one_run_and_stop_at_the_same_step(tmp_path: Path) -> None:
    _, errors = run_script(tmp_path, Path(__file__).read_text(), tmp_path)
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert first == second
    for name, steps in zip(["lightning", "huggingface"], map(int, first.split()), strict=True):
        assert 3 < steps < 50_000
        [run] = {path.parent for path in (tmp_path / name).rglob("*tfevents*")}
        assert sorted(curve(run, "grad_norm/total")) == list(range(steps))
        assert sorted(curve(run, "loss")) == list(range(steps))
    assert "telemetry failed" not in errors


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


def train_as(rank: int, port: int, folder: Path) -> None:
    """Train in a process of its own, with the variables that launchers set."""
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({k: str(v) for k, v in {**here, "RANK": rank, "LOCAL_RANK": rank}.items()})
    steps = lightning_steps(folder / "lightning"), huggingface_steps(folder / "huggingface")
    (folder / f"{rank}.txt").write_text(f"{steps[0]} {steps[1]}")
    compare_huggingface_losses(folder / "losses")


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        chosen = free.getsockname()[1]
    context = multiprocessing.get_context("fork")  # the frameworks are imported once
    ranks = [
        context.Process(target=train_as, args=(rank, chosen, Path(sys.argv[1]))) for rank in (0, 1)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(max(abs(rank.exitcode or 0) for rank in ranks))
