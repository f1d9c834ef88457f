"""Table of runs: order, status, steps and alerts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.board import open_slow
from tests.helpers.client import Client
from tests.helpers.known_runs import alert_at, layout_of, write_run
from tests.helpers.shell import records


def write(log_dir: Path, steps: range = range(2), **options: Any) -> None:
    write_run(log_dir, layout_of(["a"]), steps=steps, losses=False, **options)


def row(log_dir: Path) -> dict[str, Any]:
    """Return the row of a run on the page, which is the one of the command."""
    [found] = Client(open_slow(log_dir), log_dir).json("runs")
    [printed] = records("runs", log_dir)
    assert (printed["status"], printed["last_step"]) == (found["status"], found["lastStep"])
    return dict(found)


@pytest.mark.parametrize(
    ("starts", "order"),
    [
        ({"run10": 0, "old": 0, "new": 9, "run9": 0}, ["new", "old", "run9", "run10"]),
        ({"b": 0.1, "a": 0.2}, ["a", "b"]),
    ],
    ids=["natural order at one time", "within one second"],
)
def test_the_newest_run_comes_first(
    tmp_path: Path, starts: dict[str, float], order: list[str]
) -> None:
    for name, start_s in starts.items():
        write(tmp_path / name, time_of=lambda step, start_s=start_s: 1e9 + start_s + step)
    rows = Client(open_slow(tmp_path), tmp_path).json("runs")
    assert [run["name"] for run in rows] == order
    assert rows[-1]["started"] == 1e9 + min(starts.values())
    assert [Path(run["run"]).name for run in records("runs", tmp_path)] == order


def test_each_run_of_a_directory_has_a_row(tmp_path: Path) -> None:
    for number, run in enumerate(("first", "second")):
        write(tmp_path / "a", run=run, time_of=lambda step, number=number: 1e9 + number)
    names = ["a", "a@first"]
    client = Client(open_slow(tmp_path), tmp_path)
    assert [row["name"] for row in client.json("runs")] == names
    assert client.json("run", run="a@first")["lastStep"] == 1
    assert [row["run"] for row in records("runs", tmp_path)] == names
    assert records("summary", tmp_path / "a@first")


@pytest.mark.parametrize("first", [0, 2000], ids=["new", "resumed"])
@pytest.mark.parametrize(
    ("silent_s", "step_s", "status"),
    [(10, 1, "live"), (200, 1, "live"), (310, 1, "died"), (900, 60, "live"), (4000, 60, "died")],
)
def test_a_run_without_records_for_long_has_died(
    tmp_path: Path, silent_s: int, step_s: int, status: str, first: int
) -> None:
    last_s = time.time() - silent_s
    if first:
        write(tmp_path, range(3), time_of=lambda step: 1e9 + step)
    steps = range(first, first + 100)
    write(tmp_path, steps, time_of=lambda step: last_s - (steps[-1] - step) * step_s)
    assert row(tmp_path)["status"] == status


def test_a_closed_run_has_ended_unless_it_continues(tmp_path: Path) -> None:
    write(tmp_path / "ended", end=True, time_of=lambda step: 1e9)
    assert row(tmp_path / "ended")["status"] == "ended"
    write(tmp_path / "died", end=RuntimeError())
    assert row(tmp_path / "died")["status"] == "died"
    for first in (1, 2):
        write(tmp_path / f"{first}", end=True)
        write(tmp_path / f"{first}", range(first, first + 2))
        assert row(tmp_path / f"{first}")["status"] == "live"


def test_steps_that_a_resumed_run_repeats_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, steps=range(100), alerts=[alert_at(70, "a"), alert_at(20, "a")])
    write(tmp_path, range(50, 61))
    found = row(tmp_path)
    assert (found["lastStep"], found["alertCount"], found["alert"]["step"]) == (60, 1, 20)


@pytest.mark.parametrize(
    ("steps", "worst"), [((300, 323), 323), ((323, 330), 323), ((300, 310), 300)]
)
def test_the_alert_of_a_run_is_the_first_of_the_worst_severity(
    tmp_path: Path, steps: tuple[int, ...], worst: int
) -> None:
    """Notes are at steps below 323, a warning at 323 and later."""
    severities = {step: "note" if step < 323 else "warning" for step in steps}
    alerts = [alert_at(step, None, severity=severity) for step, severity in severities.items()]
    write(tmp_path, steps=range(400, 402), alerts=alerts)
    found = row(tmp_path)
    assert found["alert"]["step"] == worst
    assert found["alertCount"] == sum(step >= 323 for step in steps)


@pytest.mark.parametrize(
    ("stages", "worst"),
    [
        (["started", "resolved"], ("warning", 100, True)),
        (["started", "escalated"], ("error", 100, False)),
        (["started", "resolved", "started"], ("warning", 300, False)),
    ],
)
def test_the_alert_of_a_run_has_its_last_severity_and_may_be_resolved(
    tmp_path: Path, stages: list[str], worst: tuple[str, int, bool]
) -> None:
    alerts = [
        alert_at(
            100 * number, "a", stage=stage, severity="error" if stage == "escalated" else "warning"
        )
        for number, stage in enumerate(stages, 1)
    ]
    write(tmp_path, steps=range(400, 402), alerts=alerts)
    found = row(tmp_path)["alert"]
    assert (found["severity"], found["step"], found["resolved"]) == worst
