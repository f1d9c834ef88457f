"""Reports of a run: alerts and what they do, its end, and what is printed."""

from __future__ import annotations

import fcntl
import logging
import os
import pickle
import pty
import signal
import struct
import termios
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

import telemetry
from telemetry import Alert, HookLogger, StepRecord, TelemetryAlert
from tests.helpers.applied import Applied
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
from tests.helpers.scripted import Scripted, finding
from tests.helpers.scripts import run_script
from tests.helpers.shell import lines, records
from tests.helpers.twins import Blocked, Recorder, descend


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


def test_title_and_message_are_composed_of_all_known_fields(tmp_path: Path) -> None:
    root = finding(
        module_name="fc", cause="Their biases are negative", advice=("Wait", "Is it frozen?"),
        batch_steps=range(9),
    )  # fmt: skip
    detectors = [
        Scripted({9: root}, kind="root"),
        Scripted({9: finding(module_name="fc")}, kind="effect", explained_by={"root"}),
        Scripted({9: finding(module_name="gone")}, kind="gone"),
    ]
    model = Applied(lambda self, x: self.fc(x).sum(), fc=nn.Linear(2, 1))
    rules = {detector.kind: detector for detector in detectors}
    with HookLogger(model, tmp_path, alerts=rules) as logger:
        for step in range(11):
            if step != 1:
                logger.batch([step, f"file {step}"])
            descend(model, torch.ones(1, 2))
    begin, *others = logger.alerts
    assert begin.title == "root in fc at step 9"
    assert [alert.title for alert in others][-1] == "gone in gone resolved at step 10"
    worse = replace(begin, module_name=None, stage="escalated")
    assert worse.title == "root, then effect in fc at step 9"
    assert replace(worse, consequences=()).title == "root escalated at step 9"
    first, code, consequences, *batches, advice = begin.message.splitlines()
    assert first == "Seen. Their biases are negative."
    assert code.startswith("Code: tests/helpers/applied.py:")
    assert code.endswith(" (Applied.forward)")
    assert consequences == "Consequences: effect in fc."
    assert batches == [f"Batch of step {n}: {n}, file {n}." for n in (0, 2, 3, 4, 5)]
    assert advice == "Wait. Is it frozen?"
    stages = [(alert.kind, alert.stage, alert.location) for alert in others]
    assert sorted(stages) == [
        ("gone", "resolved", None), ("gone", "started", None), ("root", "resolved", None)
    ]  # fmt: skip


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
    model, blocked, recorder, closed = mlp(), Blocked(), Recorder(), threading.Event()

    def on_alert(alert: Alert) -> None:
        logger.close()
        closed.set()

    rules = [blocked, fault_at(1), recorder]
    logger = HookLogger(model, tmp_path, alerts=rules, on_alert=on_alert)
    train(model, steps=9)
    blocked.may_judge.set()
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


class Unreadable(dict[str, Tensor]):
    """Output of a module; its tensors cannot be listed."""

    def values(self) -> Any:
        raise OSError("unreadable")


class Wrapping(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return Unreadable(x=super().forward(x))


UNWRAPPING = Applied(lambda m, x: dict.values(m.inner(x)), inner=Wrapping(4, 2))


@pytest.mark.parametrize(
    ("model", "called"), [(Wrapping(4, 2), "the model"), (UNWRAPPING, "inner")]
)
def test_a_measurement_that_fails_is_logged_once_with_its_module(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, model: nn.Module, called: str
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with HookLogger(model, tmp_path, every_n_steps=1) as logger:
        for _ in range(3):
            output = model(torch.ones(8, 4))
            [x] = dict.values(output) if isinstance(output, dict) else output
            x.sum().backward()
            optimizer.step()
    assert logger.current_step == 3
    reports = [text for text in caplog.messages if "telemetry failed" in text]
    assert reports == [f"telemetry failed to observe the output of {called}; training continues"]


def test_what_a_signal_handler_raises_inside_of_a_hook_reaches_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def time_out(number: int, frame: object) -> None:
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, time_out)
    monkeypatch.setattr(Unreadable, "values", lambda _: signal.raise_signal(signal.SIGALRM))
    model = Wrapping(4, 2)
    try:
        with pytest.raises(TimeoutError), HookLogger(model, tmp_path):
            model(torch.ones(8, 4))
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert not is_hooked(model)


def train_with_nan(
    log_dir: Path,
    respond: Callable[[Alert], object] | None,
    steps: int = 30,
    until_stopped: bool = True,
) -> HookLogger:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
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
    stopped = train_with_nan(
        tmp_path / "a", lambda alert: "stop" if "nonfinite" in alert.kinds else None
    )
    assert stopped.should_stop
    assert stopped.current_step in (6, 7)  # the loss may be judged before its step ends
    other = train_with_nan(
        tmp_path / "b", lambda alert: "stop" if "dead_units" in alert.kinds else "go on"
    )
    assert (other.should_stop, other.current_step) == (False, 30)


def test_a_function_raises(tmp_path: Path) -> None:
    with pytest.raises(TelemetryAlert) as raised:
        train_with_nan(tmp_path, lambda alert: "raise")
    assert raised.value.alert.kind == "nonfinite"


def test_a_loss_that_stays_nan_is_followed_by_the_way_to_stop_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_with_nan(tmp_path / "a", None)
    ways = [record for record in caplog.records if "on_alert=" in record.getMessage()]
    assert len(ways) == 1
    assert not [r for r in caplog.records if r.getMessage().startswith("telemetry: ")]
    caplog.clear()
    train_with_nan(tmp_path / "b", lambda alert: "stop")
    assert not [record for record in caplog.records if "on_alert=" in record.getMessage()]


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


FOLDERS = {"runs/first": "runs", "runs/second/": "runs", "third": ".", ".": "."}
FOLDERS["my runs/first"] = "'my runs'"
MAKES_LOGGERS = f"""
import logging, sys
from torch import nn
from telemetry import HookLogger
if sys.argv[1] == "quiet":
    logging.getLogger("telemetry").setLevel(logging.ERROR)
elif sys.argv[1] != "unset":
    logging.basicConfig(level=sys.argv[1])
for log_dir in {[*FOLDERS]}:
    HookLogger(nn.Linear(2, 1), log_dir).close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("terminal", "level", "beginning"),
    [
        (True, "WARNING", "\r\x1b[Jtelemetry: "),
        (True, "INFO", "INFO:telemetry:"),
        (False, "WARNING", None),
        (False, "unset", "telemetry: "),
        (True, "quiet", None),
        (False, "quiet", None),
    ],
)
def test_each_logger_shows_its_directory_and_the_command_that_shows_it_and_its_neighbors(
    tmp_path: Path, terminal: bool, level: str, beginning: str | None
) -> None:
    printed = printed_on(terminal, tmp_path, MAKES_LOGGERS, level)
    shown = [line for line in printed.split("\n") if "tensorboard" in line]
    assert shown == [
        f"{beginning}writing to {own}; to look at it: tensorboard --logdir {shared}"
        for own, shared in FOLDERS.items()
        if beginning is not None
    ]


def printed_on(terminal: bool, folder: Path, script: str, *arguments: str) -> str:
    """Return what a script prints in a folder to its stderr, a terminal of 50 columns or a pipe."""
    screen, stderr = pty.openpty() if terminal else os.pipe()
    if terminal:
        fcntl.ioctl(stderr, termios.TIOCSWINSZ, struct.pack("4H", 40, 50, 0, 0))
    run_script(folder, script, *arguments, stderr=stderr, cwd=folder)
    os.close(stderr)
    try:
        return os.read(screen, 65536).decode().replace("\r\n", "\n")
    except OSError:  # Linux raises it for a closed terminal without text
        return ""
    finally:
        os.close(screen)


MEETS_NAN_BESIDE_A_BAR = """
import torch
from tqdm import tqdm
from telemetry import HookLogger
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with HookLogger(model, "run") as logger:
    for step in tqdm(range(3)):
        optimizer.zero_grad()
        model(torch.full((4, 8), float("nan"))).sum().backward()
        optimizer.step()
        logger.flush()
"""


@pytest.mark.slow
def test_a_terminal_shows_alerts_in_its_width_in_place_of_a_progress_bar(tmp_path: Path) -> None:
    printed = printed_on(True, tmp_path, MEETS_NAN_BESIDE_A_BAR)
    before, alert = printed.split("nonfinite at step 0", 1)
    assert before.endswith("\r\x1b[J")  # erases the bar
    assert "0/3" in before
    lines = alert.partition("\r")[0].splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) <= 50
    assert all(line.startswith("  ") for line in lines[1:])


@pytest.mark.slow
def test_notes_are_printed_at_the_end_without_logging(tmp_path: Path) -> None:
    script = """
        import sys
        from tests.helpers.known_runs import alert_at
        from tests.helpers.tiny_run import TinyRun
        note = alert_at(
            0, None, severity="note", kind="planted", summary="50% of it", advice=("x",)
        )
        run = TinyRun(sys.argv[1], alerts=[lambda record: [note] if record.step == 0 else []])
        run.train()
        run.logger.close()
    """
    _, errors = run_script(tmp_path, script, tmp_path / "run")
    _, _, notes = errors.partition("telemetry: one note, which may be intended:\n")
    assert notes.startswith("  planted at step 0")
    assert "50% of it" in notes
    assert "x" in notes.splitlines()[-1]  # its advice


def test_each_layer_with_parameters_has_a_state(tmp_path: Path) -> None:
    torch.manual_seed(0)
    names = ["cut", "still", "frozen", "other", "head"]
    model = Applied(
        lambda m, x: m.head(m.other(m.frozen(m.still(m.cut(x).detach())))),
        **{name: nn.Linear(4, 4) for name in names},
    )
    model.frozen.requires_grad_(False)
    groups = [
        {"params": [*model.cut.parameters(), *model.head.parameters()]},
        {"params": [*model.still.parameters()], "lr": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, 0.1)
    with HookLogger(model, tmp_path, every_n_steps=1, alerts=()):
        descend(model, torch.randn(8, 4), optimizer, steps=3)
    modules = telemetry.read(tmp_path).modules
    assert dict(zip(modules.module_name, modules.state, strict=True)) == {
        "model input": "",
        "cut": "no gradient",
        "still": "learning rate 0",
        "frozen": "frozen",
        "other": "not in an optimizer",
        "head": "trains",
    }
    shown = lines("summary", tmp_path)
    assert any("20.0% of the parameters" in line for line in shown)
    rows = {line.split()[0] for line in shown if line.strip()}
    assert {*names} <= rows
