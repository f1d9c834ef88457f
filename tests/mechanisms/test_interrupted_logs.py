"""Run logs that a kill has cut, resumed runs, and other runs in the same directory."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.events.files import run_log_file
from telemetry.events.framing import frame
from telemetry.events.run_log import Alerted, Begin, End, FullStep, Logged, Norms, decode
from telemetry.reading.matrix import WHOLE
from telemetry.reading.run_data import RunData
from telemetry.reading.run_log import NEVER, RunDirectory
from telemetry.writing.run_log import RunLog
from tests.helpers.known_runs import alert_at
from tests.helpers.small_records import full_record


class Logger:
    """Logger of a run, each of whose numbers is another one; it can be killed in a write."""

    numbers: Iterator[int]

    def __init__(self, log_dir: Path, run: str, step: int) -> None:
        self.run, self.step = run, step
        self.path: Path | None = None
        self.written: list[bytes] = []  # data of the whole frames in the file
        self._log_dir = log_dir
        self._waiting = deque[bytes]()
        self._file = run_log_file(str(log_dir))
        self._log = RunLog(self._put, self._file.repeat, run="")
        self._log.begin(step, run)

    def _put(self, data: bytes, **_: bool) -> None:
        self._waiting.append(data)

    def restore(self, step: int) -> None:
        self.step = step
        self._log.begin(step, self.run)

    def log_step(self) -> None:
        step, number = self.step, float(next(self.numbers))
        self.step += 1
        norms = np.full(4, number)
        self._log.step(
            full_record(step, scalars={"loss": number}, grad_norms=norms, full=step % 3 == 0)
        )
        self._log.logged(step, 1e9, {"count": number})
        if step % 5 == 1:
            self._log.alert(alert_at(step, "layer0", value=number), 1e9)

    def end(self) -> None:
        self._log.end(self.step - 1, None)

    def write(self) -> None:
        before = {*self._log_dir.iterdir()}
        self.written += self._waiting
        if self._waiting:
            self._file.append(self._waiting)
        self.path = next(iter({*self._log_dir.iterdir()} - before), self.path)

    def kill(self, share: float) -> None:
        """Write as much of what waits as the kill permits."""
        waiting = list(self._waiting)
        cut = int(share * sum(len(frame(data)) for data in waiting))
        self._waiting.clear()
        for data in waiting:
            if cut < len(frame(data)):
                break
            cut -= len(frame(data))
            self._waiting.append(data)
        torn = b"".join(map(frame, waiting[len(self._waiting) :]))[:cut]
        self.write()
        self._file.close()
        if self.path is not None:
            with self.path.open("ab") as file:
                file.write(torn)


@dataclass
class Expected:
    """Content of a run, by step."""

    losses: dict[int, float] = field(default_factory=dict)
    counts: dict[int, float] = field(default_factory=dict)
    full: set[int] = field(default_factory=set)
    alerts: list[float] = field(default_factory=list)
    resumed: set[int] = field(default_factory=set)


def expected_of(loggers: list[Logger]) -> dict[str, Expected]:
    """Return the frames that are whole and not hidden, of each run that has data."""
    parts = defaultdict[str, list[list[Any]]](list)
    for logger in sorted((one for one in loggers if one.written), key=lambda one: str(one.path)):
        for data in logger.written:
            one = decode(data)
            if isinstance(one, Begin):
                parts[one.run].append([])
            parts[logger.run][-1].append(one)
    found = {}
    for run, of_run in parts.items():
        content, end = Expected(resumed={part[0].step for part in of_run[1:]}), NEVER
        for part in reversed(of_run):
            for one in part:
                if one.step >= end:
                    continue
                if isinstance(one, Norms):
                    content.losses.setdefault(one.step, one.loss or 0.0)
                elif isinstance(one, FullStep):
                    content.full.add(one.step)
                elif isinstance(one, Logged):
                    content.counts.setdefault(one.step, one.scalars["count"])
                elif isinstance(one, Alerted):
                    content.alerts.append(one.alert.value)
            end = min(end, part[0].step)
        if any(
            isinstance(one, Norms | FullStep | Alerted | End) for part in of_run for one in part
        ):
            found[run] = content
    return found


def check(directory: RunDirectory, expected: dict[str, Expected]) -> None:
    directory.refresh()
    if expected:
        assert set(directory.runs) == set(expected)
    for run, content in expected.items():
        data = RunData(directory, run)
        assert {one.step: one.loss for one in data.norms(WHOLE)} == content.losses
        assert dict(data.logged().get("count", ())) == content.counts
        assert set(data.steps(FullStep).tolist()) == content.full
        assert sorted(alert.value for alert in data.alerts) == sorted(content.alerts)
        assert set(data.resumed) == content.resumed
        matrix = data.matrix("grad_norm")
        assert matrix.steps.tolist() == sorted(content.losses)
        for step, row in zip(matrix.steps.tolist(), matrix.values, strict=True):
            assert set(row.tolist()) == {content.losses[step]}
    assert [*directory.problems] == []


@pytest.mark.slow
@given(st.data())
def test_each_run_has_the_frames_that_are_whole_and_not_hidden(
    tmp_path_factory: pytest.TempPathFactory, drawn: st.DataObject
) -> None:
    log_dir = tmp_path_factory.mktemp("run")
    Logger.numbers = iter(range(1, 10_000))
    live, loggers, running = RunDirectory(log_dir), list[Logger](), list[Logger]()

    def draw_step(run: str) -> int:
        last = max((one.step for one in loggers if one.run == run), default=0)
        return drawn.draw(st.integers(0, last), "first step")

    for _ in range(drawn.draw(st.integers(2, 20), "actions")):
        action = drawn.draw(st.sampled_from(["begin", "log", "log", "kill", "restore"]))
        if action == "begin" or not running:
            run = drawn.draw(st.sampled_from("aab"), "run")
            running.append(Logger(log_dir, run, draw_step(run)))
            loggers.append(running[-1])
            continue
        logger = drawn.draw(st.sampled_from(running), "logger")
        if action == "log":
            for _ in range(drawn.draw(st.integers(1, 8), "steps")):
                logger.log_step()
            if drawn.draw(st.booleans(), "at once"):
                logger.write()
        elif action == "restore":
            logger.restore(drawn.draw(st.integers(0, logger.step), "step"))
        else:
            if drawn.draw(st.booleans(), "ends"):
                logger.end()
            logger.kill(drawn.draw(st.floats(0, 1), "share"))
            running.remove(logger)
        if drawn.draw(st.booleans(), "read"):
            check(live, expected_of(loggers))
    for logger in running:
        logger.kill(drawn.draw(st.floats(0, 1), "share"))
    check(live, expected_of(loggers))
    check(RunDirectory(log_dir), expected_of(loggers))
    if files := [one for one in loggers if one.written]:
        cut = drawn.draw(st.sampled_from(files), "cut")  # as a power cut does
        assert cut.path is not None
        size = drawn.draw(st.integers(0, cut.path.stat().st_size), "size")
        cut.path.write_bytes(cut.path.read_bytes()[:size])
        while sum(len(frame(data)) for data in cut.written) > size:
            cut.written.pop()
        check(RunDirectory(log_dir), expected_of(loggers))
