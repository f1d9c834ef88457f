"""Alerts of severity note are kept, written and logged at INFO, and not raised."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from telemetry import Alert, HookLogger, StepRecord


def noted(record: StepRecord) -> Iterable[Alert]:
    if record.step == 1:
        yield Alert(
            kind="habit", severity="note", step=1, module_name=None, value=1.0, threshold=0.0,
            summary="Perhaps meant so.",
        )  # fmt: skip


def train(log_dir: Path, **settings: Any) -> HookLogger:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with HookLogger(model, log_dir, alerts=[noted], **settings) as logger:
        for _ in range(4):
            model(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
            logger.flush()
    return logger


def test_a_note_is_kept_written_and_logged_at_info_without_a_flight_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "telemetry"):
        logger = train(tmp_path)
    assert [alert.severity for alert in logger.alerts] == ["note"]
    [line] = (tmp_path / "alerts.jsonl").read_text().splitlines()
    assert json.loads(line)["severity"] == "note"
    assert [r.levelname for r in caplog.records if "Perhaps" in r.getMessage()] == ["INFO"]
    assert not list(tmp_path.glob("flight-*"))


def test_a_note_is_not_raised(tmp_path: Path) -> None:
    assert len(train(tmp_path, on_alert="raise").alerts) == 1


def test_a_note_is_passed_to_a_callback(tmp_path: Path) -> None:
    seen: list[Alert] = []
    train(tmp_path, on_alert=seen.append)
    assert [alert.kind for alert in seen] == ["habit"]
