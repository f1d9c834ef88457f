"""Reports of a run: alerts and what they do, its end, and what is printed."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pickle
import pty
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

import telemetry
from telemetry import Alert, HookLogger, StepRecord, TelemetryAlert
from tests.helpers.disks import FreezableDisk
from tests.helpers.loops import (
    batches,
    fault_at,
    finish,
    is_hooked,
    load,
    mlp,
    scalars,
    train,
)
from tests.helpers.members import until
from tests.helpers.scripts import run_script
from tests.helpers.shell import records, run
from tests.helpers.twins import Recorder


def test_an_alert_is_kept_logged_written_and_passed_to_callbacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, received, recorder = mlp(), [], Recorder()
    rules = [recorder, fault_at(1)]
    with HookLogger(model, tmp_path, alerts=rules, on_alert=received.append) as logger:
        train(model)
    [alert] = logger.alerts
    assert (alert.kind, alert.step, alert.module_name) == ("nonfinite", 1, "0")
    assert received == [alert]
    [message] = [r for r in caplog.records if "planted fault" in r.getMessage()]
    assert message.levelno == logging.ERROR
    tags = load(tmp_path).Tags()["tensors"]
    assert [tag for tag in tags if tag.startswith("~alerts/")] == ["~alerts/0000.nonfinite.0"]
    count = [(event.step, event.value) for event in load(tmp_path).Scalars("alerts/count")]
    assert count == [(0, 0), (1, 0), (1, 1), (4, 1)], "steps, up to the end"
    [found] = telemetry.read(tmp_path).alerts
    assert (found.kind, found.step) == ("nonfinite", 1)
    assert [fault["step"] for fault in records("explain", tmp_path)] == [1]


def test_an_alert_is_reported_and_written_without_a_later_step(tmp_path: Path) -> None:
    model, reported = mlp(), threading.Event()
    options: Any = {"every_n_steps": 100, "on_alert": lambda _: reported.set()}
    with HookLogger(model, tmp_path, alerts=[fault_at(17)], **options):
        train(model, steps=18)
        assert reported.wait(120)

        def is_written() -> bool:
            try:
                return bool(telemetry.read(tmp_path).alerts)
            except ValueError:  # the first event is on its way to the disk
                return False

        assert any(is_written() for _ in range(2000))


def test_alerts_do_not_block_on_the_disk(freezable_disk: FreezableDisk) -> None:
    model = mlp()
    log_dir = freezable_disk.path / "run"
    log_dir.mkdir()
    writer = SummaryWriter(freezable_disk.path.parent / "elsewhere")
    writer.log_dir = str(log_dir)  # the run log is on the frozen disk
    with HookLogger(model, writer, alerts=[fault_at(1, 3)]) as logger:
        with freezable_disk.frozen():
            train(model)
            until(lambda: [alert.step for alert in logger.alerts] == [1, 3])
        logger.flush()
        assert [alert.step for alert in telemetry.read(log_dir).alerts] == [1, 3]
    writer.close()


@pytest.mark.parametrize(
    ("exception", "status"),
    [
        (None, "ended"),
        (KeyError("a"), "died"),
        (SystemExit(1), "ended"),
        (StopIteration(), "ended"),
    ],
)
def test_a_run_records_how_it_ended(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    exception: BaseException | None,
    status: str,
) -> None:
    model = mlp()
    with (
        suppress(KeyError, SystemExit, StopIteration),
        HookLogger(model, tmp_path, alerts=()),
    ):
        train(model, steps=2)
        if exception:
            raise exception
    assert run("runs", tmp_path, "--json") == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row["status"] == status
    assert (run("explain", tmp_path) == 0) == (status == "died")


# --- what an alert does to the training ----------------------------------------------------------


def test_a_resolved_alert_does_not_raise(tmp_path: Path) -> None:
    def rule(record: StepRecord) -> Iterator[Alert]:
        for alert in fault_at(1)(record):
            yield replace(alert, stage="resolved")

    model = mlp()
    with HookLogger(model, tmp_path, alerts=[rule], on_alert="raise") as logger:
        train(model)
    assert len(logger.alerts) == 1


def test_an_alert_raises_between_two_steps_if_requested(tmp_path: Path) -> None:
    model = mlp()
    with (
        pytest.raises(TelemetryAlert, match="planted fault") as raised,
        HookLogger(model, tmp_path, alerts=[fault_at(1)], on_alert="raise") as logger,
    ):
        finish(logger.flush() for _ in batches(model, steps=100))
    assert raised.value.alert.step == 1
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    assert str(raised.value).startswith("nonfinite in module 0 at step 1: planted fault")
    assert not is_hooked(model)


def test_an_alert_requests_a_stop_between_two_steps_if_configured(tmp_path: Path) -> None:
    model, seen = mlp(), []
    with HookLogger(model, tmp_path, alerts=[fault_at(1)], on_alert="stop") as logger:
        for _ in batches(model, steps=4):
            seen.append(logger.should_stop)
            logger.flush()
    assert seen[0] is False
    assert seen[2:] == [True, True]
    with HookLogger(model, tmp_path, alerts=[fault_at(1)], on_alert=print) as logger:
        train(model, steps=4)
    assert not logger.should_stop


@pytest.mark.parametrize("method", ["flush", "close"])
def test_a_callback_may_flush_or_close_the_writer(
    tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, writer = mlp(), SummaryWriter(tmp_path)

    def on_alert(alert: Alert) -> None:
        getattr(writer, method)()

    with HookLogger(model, writer, alerts=[fault_at(1)], on_alert=on_alert):
        train(model)
    writer.close()
    # By names, torch's tenth file of a second comes before its ninth.
    assert sorted(scalars(tmp_path)) == [0, 1, 2, 3, 4]
    assert "failed" not in caplog.text


def test_a_callback_may_close_the_logger_and_queued_steps_are_checked(tmp_path: Path) -> None:
    model, recorder, closed = mlp(), Recorder(), threading.Event()
    may_start = threading.Event()

    def blocked(record: StepRecord) -> Iterable[Alert]:
        assert may_start.wait(120)
        return fault_at(1)(record)

    def on_alert(alert: Alert) -> None:
        logger.close()
        closed.set()

    logger = HookLogger(model, tmp_path, alerts=[blocked, recorder], on_alert=on_alert)
    train(model, steps=9)
    may_start.set()
    assert closed.wait(120)
    logger.close()  # returns after the callback's close()
    assert [record.step for record in recorder.records] == list(range(9))
    assert list(scalars(tmp_path)) == list(range(9))


def broken(_: object) -> list[Alert]:
    raise RuntimeError("planted")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alerts": [broken]}, "telemetry failed to apply the rule 'broken'"),
        ({"alerts": [fault_at(1)], "on_alert": broken}, "telemetry failed to call on_alert"),
        *(
            ({"alerts": [lambda _, found=found: found]}, f"() for none; it returned {found!r}")
            for found in ("diverged", None, {"step": 1}, [1])
        ),
    ],
)
def test_a_rule_or_callback_that_fails_is_logged_once_and_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], message: str
) -> None:
    model = mlp()
    with HookLogger(model, tmp_path, **options):
        train(model)
    assert sum(message in text for text in caplog.text.splitlines()) == 1
    assert len(scalars(tmp_path)) == 5


# --- what is shown -------------------------------------------------------------------------------


@pytest.mark.parametrize("enabled", [True, False])
def test_a_notebook_shows_state_step_directory_and_alerts(tmp_path: Path, enabled: bool) -> None:
    log_dir, model = tmp_path / "a<b", mlp()
    with HookLogger(model, log_dir, alerts=[fault_at(1)], enabled=enabled) as logger:
        train(model, steps=3)
        logger.flush()
        alerts = [alert.kind for alert in logger.alerts]
        table = ElementTree.fromstring(logger._repr_html_())
    cells = {row[0].text: row[1].text or "" for row in table.iter("tr")}
    assert cells["log_dir"] == str(log_dir)
    assert (cells["state"], cells["step"]) == (("attached", "3") if enabled else ("removed", "0"))
    assert len(alerts) == enabled
    assert all(kind in cells["alerts"] for kind in alerts)


def test_a_notebook_shows_runs_alerts_and_results_of_a_check(tmp_path: Path) -> None:
    model = mlp()
    with HookLogger(model, tmp_path, alerts=[fault_at(1)]) as logger:
        logger.hparams({"lr": 0.5})
        train(model, steps=3)
    found = telemetry.read(tmp_path)
    checked = telemetry.check(model, 255 * torch.rand(16, 3), Tensor.sum, show=False)
    for shown, parts in (
        (found, (str(tmp_path), "lr", "0.5", found.alerts[0].title)),
        (found.alerts[0], (found.alerts[0].title, found.alerts[0].message, "error")),
        (checked, ("loss", checked.findings[0].title, checked.findings[0].message)),
    ):
        texts = {*ElementTree.fromstring(shown._repr_html_()).itertext()}
        assert all(any(part in text for text in texts) for part in parts)


MAKES_THREE_LOGGERS = """
import logging, sys
from torch import nn
from telemetry import HookLogger
if sys.argv[2] != "unset":
    logging.basicConfig(level=sys.argv[2])
for number in range(3):
    HookLogger(nn.Linear(2, 1), f"{sys.argv[1]}/{number}")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("terminal", "level", "expected"),
    [
        (True, "WARNING", "\r\x1b[Jtelemetry: "),
        (True, "INFO", "INFO:telemetry:"),
        (False, "WARNING", None),
        (False, "unset", "telemetry: "),
    ],
)
def test_each_logger_shows_its_directory_and_the_command_to_look_at_it(
    tmp_path: Path, terminal: bool, level: str, expected: str | None
) -> None:
    screen, stderr = pty.openpty() if terminal else os.pipe()
    command = [sys.executable, "-c", MAKES_THREE_LOGGERS, str(tmp_path), level]
    subprocess.run(command, check=True, stderr=stderr)
    os.close(stderr)
    try:
        printed = os.read(screen, 65536).decode()
    except OSError:  # Linux raises it for a closed terminal without text
        printed = ""
    os.close(screen)
    assert [
        line for line in printed.replace("\r\n", "\n").split("\n") if "tensorboard" in line
    ] == [
        f"{expected}writing to {tmp_path}/{number}; to look at it: tensorboard --logdir {tmp_path}"
        for number in range(3)
        if expected is not None
    ]


MEETS_NAN_BESIDE_A_BAR = """
import sys, torch
from tqdm import tqdm
from telemetry import HookLogger
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with HookLogger(model, sys.argv[1]) as logger:
    for step in tqdm(range(3)):
        optimizer.zero_grad()
        model(torch.full((4, 8), float("nan"))).sum().backward()
        optimizer.step()
        logger.flush()
"""


@pytest.mark.slow
def test_a_terminal_shows_alerts_in_its_width_in_place_of_a_progress_bar(tmp_path: Path) -> None:
    screen, stderr = pty.openpty()
    fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("4H", 40, 50, 0, 0))
    command = [sys.executable, "-c", MEETS_NAN_BESIDE_A_BAR, str(tmp_path / "run")]
    subprocess.run(command, check=True, stderr=stderr)
    os.close(stderr)
    printed = os.read(screen, 65536).decode().replace("\r\n", "\n")
    os.close(screen)
    before, alert = printed.split("nonfinite at step 0", 1)
    assert before.endswith("\r\x1b[J")  # erases the bar
    assert "0/3" in before
    lines = alert.partition("\r")[0].splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) <= 50
    assert all(line.startswith("  ") for line in lines[1:])


def test_notes_are_printed_at_the_end_without_logging(tmp_path: Path) -> None:
    script = """
        import sys, torch
        from telemetry import HookLogger
        model = torch.nn.Linear(8, 2)
        optimizer, batch = torch.optim.SGD(model.parameters(), 0.01), torch.randn(16, 8)
        with HookLogger(model, sys.argv[1], every_n_steps=1, max_overhead=float("inf")) as logger:
            for step in range(300):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
    """
    _, errors = run_script(tmp_path, script, tmp_path / "run")
    _, _, notes = errors.partition("telemetry: one note, which may be intended:\n")
    assert notes.startswith("  same_batch at step ")
    assert "next(iter(loader))" in notes  # its advice
