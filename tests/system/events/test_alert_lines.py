"""``alerts.jsonl`` on full and frozen disks, in forks, and from several processes at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest

from telemetry import Alert, StepRecord
from tests.helpers.disks import FreezableDisk, fill
from tests.helpers.known_runs import alert_at
from tests.helpers.members import until
from tests.helpers.scripts import run_script
from tests.helpers.tiny_run import TinyRun


def rule(record: StepRecord, length: int = 500) -> Iterator[Alert]:
    """Report each step, as an error, so that it also has a flight file."""
    yield alert_at(record.step, None, kind="planted", summary="x" * length)


def lines_of(log_dir: Path) -> list[int]:
    """Return the steps of the lines, each of which must be whole."""
    text = (log_dir / "alerts.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line)["step"] for line in text.splitlines()]


def train_here(log_dir: Path, first_step: int) -> None:
    run = TinyRun(log_dir, alerts=[rule], first_step=first_step)
    run.train(100)
    run.logger.close()


def test_a_line_after_a_torn_line_begins_on_a_new_line(tmp_path: Path) -> None:
    (tmp_path / "alerts.jsonl").write_text('{"step": 7}\n{"st')
    run = TinyRun(tmp_path, alerts=[rule])
    run.train(2)
    run.logger.close()
    first, torn, *rest = (tmp_path / "alerts.jsonl").read_text().splitlines()
    assert (first, torn) == ('{"step": 7}', '{"st')
    assert [json.loads(line)["step"] for line in rest] == [0, 1]


def test_lines_that_a_full_disk_refuses_are_not_written_in_part_and_follow_in_order(
    tiny_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log_dir = tiny_disk / "run"
    run = TinyRun(log_dir, alerts=[lambda record: rule(record, 6000 if record.step else 10)])
    run.train()
    run.logger.flush()
    ballast = fill(tiny_disk)
    run.train(3)
    run.logger.flush()
    assert lines_of(log_dir) == [0]
    assert not list(log_dir.glob(".*")), "no temporary files"
    ballast.unlink()
    run.logger.close()
    assert lines_of(log_dir) == [0, 1, 2, 3]
    assert (log_dir / "flight-0.json").exists()
    [_] = [message for message in caplog.messages if "cannot be written for now" in message]


def test_a_hanging_disk_blocks_neither_training_nor_alerts(freezable_disk: FreezableDisk) -> None:
    run = TinyRun(freezable_disk.path / "run", alerts=[rule])
    run.train()
    run.logger.flush()
    with freezable_disk.frozen():
        run.train(100)  # would never end
        until(lambda: len(run.logger.alerts) == 101)
    run.logger.close()
    assert lines_of(freezable_disk.path / "run") == list(range(101))


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    context = get_context("spawn")
    writers = [context.Process(target=train_here, args=(tmp_path, first)) for first in (0, 1000)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(lines_of(tmp_path)) == [*range(100), *range(1000, 1100)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    # In a fresh process: PyTorch has no backward pass in a child once its engine has threads.
    script = """
        import os, sys
        from pathlib import Path
        from tests.helpers.tiny_run import TinyRun
        from tests.system.events.test_alert_lines import rule
        run = TinyRun(Path(sys.argv[1]), alerts=[rule])
        run.train()
        run.logger.flush()
        child = os.fork()
        if child == 0:
            run.train()
            run.logger.close()
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        run.train()
        run.logger.close()
    """
    output, _ = run_script(tmp_path, script, tmp_path / "run")
    assert output == "7\n"
    assert lines_of(tmp_path / "run") == [0, 1]
