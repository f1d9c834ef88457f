"""Run logs on full and frozen disks, in forks, and from several processes at once."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import telemetry
from telemetry import Alert, StepRecord
from tests.helpers.disks import FreezableDisk
from tests.helpers.known_runs import alert_at
from tests.helpers.members import PRELOADED, until
from tests.helpers.tiny_run import TinyRun, steps_by_file


def rule(record: StepRecord, length: int = 500) -> Iterator[Alert]:
    """Report each step."""
    yield alert_at(record.step, None, kind="planted", summary="x" * length)


def alerted(log_dir: Path | str) -> list[int]:
    """Return the steps with alerts."""
    run = telemetry.read(log_dir)
    assert not run.problems
    return [alert.step for alert in run.alerts]


def train_here(log_dir: Path, steps: int) -> None:
    run = TinyRun(log_dir, alerts=[rule])
    run.train(steps)
    run.logger.close()


def test_a_hanging_disk_blocks_neither_training_nor_alerts(freezable_disk: FreezableDisk) -> None:
    run = TinyRun(freezable_disk.path / "run", alerts=[rule])
    run.train()
    run.logger.flush()
    with freezable_disk.frozen():
        run.train(100)  # would never end
        until(lambda: len(run.logger.alerts) == 101)
    run.logger.close()
    assert alerted(freezable_disk.path / "run") == list(range(101))
    assert steps_by_file(freezable_disk.path / "run") == [list(range(101))]


def test_runs_of_several_processes_in_one_directory_do_not_mix(tmp_path: Path) -> None:
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    writers = [context.Process(target=train_here, args=(tmp_path, steps)) for steps in (90, 100)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    runs = [tmp_path, *telemetry.read(tmp_path).earlier]
    assert sorted(map(alerted, runs)) == [[*range(90)], [*range(100)]]
