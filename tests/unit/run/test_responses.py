"""Responses of a run to its alerts, its messages, and the states of its layers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

import telemetry
from telemetry import Alert, HookLogger, TelemetryAlert
from tests.helpers.known_runs import alert_at
from tests.helpers.shell import run as command


def train(
    log_dir: Path,
    respond: Callable[[Alert], object] | None,
    steps: int = 30,
    until_stopped: bool = True,
) -> HookLogger:
    """Train with NaN at step 5."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = SGD(model.parameters(), 0.1)
    with HookLogger(model, log_dir, on_alert=respond) as logger:
        for step in range(steps):
            inputs = torch.randn(16, 4) if step != 5 else torch.full((16, 4), torch.nan)
            loss = model(inputs).square().mean()
            logger.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            logger.flush()
            if logger.should_stop and until_stopped:
                break
    return logger


def test_a_function_stops_at_the_kinds_that_it_chooses(tmp_path: Path) -> None:
    stopped = train(tmp_path / "a", lambda alert: "stop" if "nonfinite" in alert.kinds else None)
    assert (stopped.should_stop, stopped.current_step) == (True, 7)
    other = train(tmp_path / "b", lambda alert: "stop" if "dead_units" in alert.kinds else "go on")
    assert (other.should_stop, other.current_step) == (False, 30)


def test_a_function_raises(tmp_path: Path) -> None:
    with pytest.raises(TelemetryAlert) as raised:
        train(tmp_path, lambda alert: "raise")
    assert raised.value.alert.kind == "nonfinite"


def test_a_loss_that_stays_nan_is_followed_by_the_way_to_stop_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path / "a", None)
    ways = [record for record in caplog.records if "on_alert=" in record.getMessage()]
    assert len(ways) == 1
    caplog.clear()
    train(tmp_path / "b", lambda alert: "stop")
    assert not [record for record in caplog.records if "on_alert=" in record.getMessage()]


class Untrained(nn.Module):
    """Layers of each state."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.still, self.frozen, self.other, self.head = (
            nn.Linear(4, 4) for _ in range(5)
        )
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.other(self.frozen(self.still(self.cut(x).detach()))))


def test_each_layer_with_parameters_has_a_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = Untrained()
    groups = [
        {"params": [*model.cut.parameters(), *model.head.parameters()]},
        {"params": [*model.still.parameters()], "lr": 0.0},
    ]
    optimizer = SGD(groups, 0.1)
    with HookLogger(model, tmp_path, every_n_steps=1, alerts=()):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    modules = telemetry.read(tmp_path).modules
    assert dict(zip(modules.module_name, modules.state, strict=True)) == {
        "model input": "",
        "cut": "no gradient",
        "still": "learning rate 0",
        "frozen": "frozen",
        "other": "not in an optimizer",
        "head": "trains",
    }
    capsys.readouterr()
    assert command("summary", tmp_path) == 0
    out = capsys.readouterr().out
    assert "20.0% of the parameters" in out
    rows = {line.split()[0] for line in out.splitlines() if line.strip()}
    assert {"cut", "still", "frozen", "other", "head"} <= rows


def test_messages_have_no_second_name_where_logging_is_configured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "telemetry")
    train(tmp_path, None)
    assert caplog.records
    assert not [r for r in caplog.records if r.getMessage().startswith("telemetry: ")]


def test_notes_at_the_end_keep_their_percent_signs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def rule(record: telemetry.StepRecord) -> list[Alert]:
        noted = record.step == 0
        return [alert_at(0, None, severity="note", summary="50% of it")] if noted else []

    caplog.set_level(logging.WARNING, "telemetry")
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), 0.1)
    with HookLogger(model, tmp_path, alerts=[rule]):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    [message] = [text for text in caplog.messages if "one note" in text]
    assert "50% of it" in message
