"""Table of runs: order, status, steps and alerts."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.board import open_slow
from tests.helpers.client import Client
from tests.helpers.known_runs import alert_at, layout_of, write_run
from tests.helpers.shell import records

FIRST, SECOND = "20260101-120000.000000-aaaa", "20260102-120000.000000-bbbb"


def write(log_dir: Path, session: str = FIRST, steps: range = range(2), **options: Any) -> None:
    write_run(
        log_dir, layout_of(["a"]), steps=steps, norms=lambda _: np.ones(1, np.float32),
        session=session, losses=False, **options,
    )  # fmt: skip


def row(log_dir: Path) -> dict[str, Any]:
    """Return the row of a run on the page, which is the one of the command."""
    [found] = Client(open_slow(log_dir)).json("run_table")
    [printed] = records("runs", log_dir)
    assert (printed["status"], printed["last_step"]) == (found["status"], found["lastStep"])
    return dict(found)


@pytest.mark.parametrize(
    ("sessions", "order"),
    [
        (
            {"run10": FIRST, "old": FIRST, "new": SECOND, "run9": FIRST},
            ["new", "old", "run9", "run10"],
        ),
        ({"b": f"{FIRST[:-11]}100000-ffff", "a": f"{FIRST[:-11]}200000-ffff"}, ["a", "b"]),
    ],
    ids=["natural order at one time", "within one second"],
)
def test_the_newest_run_comes_first(
    tmp_path: Path, sessions: dict[str, str], order: list[str]
) -> None:
    for name, session in sessions.items():
        write(tmp_path / name, session)
    assert [run["name"] for run in Client(open_slow(tmp_path)).json("run_table")] == order
    assert [Path(run["run"]).name for run in records("runs", tmp_path)] == order


@pytest.mark.parametrize("session", ["19990231-999999", "mine", FIRST])
def test_a_run_started_at_the_time_in_its_session_or_else_with_its_layout(
    tmp_path: Path, session: str
) -> None:
    write(tmp_path, session, time_of=lambda step: 1e9 + step)
    noon = datetime(2026, 1, 1, 12, tzinfo=timezone.utc).timestamp()
    assert row(tmp_path)["started"] == (noon if session == FIRST else 1e9)


@pytest.mark.parametrize(
    ("silent_s", "step_s", "status"),
    [(10, 1, "live"), (200, 1, "live"), (310, 1, "died"), (900, 60, "live"), (4000, 60, "died")],
)
def test_a_run_without_records_for_long_has_died(
    tmp_path: Path, silent_s: int, step_s: int, status: str
) -> None:
    last_s = time.time() - silent_s
    write(tmp_path, "mine", range(100), time_of=lambda step: last_s - (99 - step) * step_s)
    assert row(tmp_path)["status"] == status


def test_a_closed_run_has_ended_unless_it_continues(tmp_path: Path) -> None:
    write(tmp_path / "ended", end=True, time_of=lambda step: 1e9)
    assert row(tmp_path / "ended")["status"] == "ended"
    write(tmp_path / "died", end=RuntimeError())
    assert row(tmp_path / "died")["status"] == "died"
    for name, session, steps in (("same", FIRST, range(2, 4)), ("later", SECOND, range(1, 3))):
        write(tmp_path / name, end=True)
        write(tmp_path / name, session, steps)
        assert row(tmp_path / name)["status"] == "live"


def test_steps_that_a_later_session_replaces_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, steps=range(100), alerts=[alert_at(70, "a"), alert_at(20, "a")])
    write(tmp_path, SECOND, range(50, 61))
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
