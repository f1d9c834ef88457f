"""Several loggers on one model or in one directory, here and in other processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import telemetry
from telemetry import HookLogger
from tests.helpers.loops import train
from tests.helpers.scripts import run_script, start_script
from tests.helpers.twins import Recorder

TAKES_THE_PLACE = "a new HookLogger replaces"
WRITTEN_TO = "another HookLogger, in this process"


def count(caplog: pytest.LogCaptureFixture, words: str) -> int:
    return sum(words in message for message in caplog.messages)


@pytest.fixture
def model() -> nn.Linear:
    return nn.Linear(3, 2)


# --- one model -----------------------------------------------------------------------------------


def test_a_new_logger_replaces_the_old_one(
    tmp_path: Path, model: nn.Linear, caplog: pytest.LogCaptureFixture
) -> None:
    recorders = [Recorder() for _ in range(4)]
    loggers = []
    for recorder in recorders:
        loggers.append(HookLogger(model, tmp_path, alerts=[recorder], resume=True))
        train(model, 2)
    loggers[-1].close()
    # Each has written its records, and later steps belong to the next one alone.
    steps = [[record.step for record in recorder.records] for recorder in recorders]
    assert steps == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert count(caplog, TAKES_THE_PLACE) == 3
    assert len(caplog.messages) == 3


def test_a_logger_is_still_replaced_after_the_code_is_reloaded(tmp_path: Path) -> None:
    script = """
        import importlib, sys
        import telemetry
        from tests.helpers.loops import mlp
        model = mlp()
        old = telemetry.HookLogger(model, sys.argv[1])
        importlib.reload(sys.modules[telemetry.HookLogger.__module__])
        new = telemetry.HookLogger(model, sys.argv[1])
        print(old, type(new) is type(old))
    """
    output, log = run_script(tmp_path, script, tmp_path / "run")
    assert output.startswith("<HookLogger removed")
    assert (log.count(TAKES_THE_PLACE), log.count(WRITTEN_TO)) == (1, 0)


def test_a_logger_is_replaced_if_its_directory_is_spelled_differently(
    tmp_path: Path, model: nn.Linear, caplog: pytest.LogCaptureFixture
) -> None:
    first = HookLogger(model, tmp_path / "run")
    second = HookLogger(model, str(tmp_path / "run" / ".." / "run"))
    assert "removed" in repr(first)
    second.close()
    with SummaryWriter(tmp_path / "shared") as writer:  # stays open
        HookLogger(model, writer)
        recorder = Recorder()
        with HookLogger(model, writer, alerts=[recorder]):
            train(model, 2)
    assert len(recorder.records) == 2
    assert (count(caplog, TAKES_THE_PLACE), count(caplog, WRITTEN_TO)) == (2, 0)


def test_other_directories_closed_loggers_and_shared_writers_are_not_reported(
    tmp_path: Path, model: nn.Linear, caplog: pytest.LogCaptureFixture
) -> None:
    other = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="matches none"):
        HookLogger(model, tmp_path / "a", modules="nothing.*")
    with HookLogger(model, tmp_path / "a") as one, HookLogger(model, tmp_path / "b") as two:
        [file] = (tmp_path / "a").iterdir()
        assert "tfevents" in file.name
        train(model, 1)
        assert one.current_step == two.current_step == 1
    with HookLogger(model, tmp_path / "a", first_step=1):
        train(model, 1)
    with SummaryWriter(tmp_path / "c") as writer:
        with HookLogger(model, writer), HookLogger(other, writer):
            pass
        with HookLogger(model, writer):
            pass
    assert caplog.messages == []


# --- one directory -------------------------------------------------------------------------------


def test_two_writers_in_one_directory_are_reported(
    tmp_path: Path, model: nn.Linear, caplog: pytest.LogCaptureFixture
) -> None:
    other = nn.Linear(3, 2)
    with HookLogger(model, tmp_path), HookLogger(other, tmp_path):
        [message] = caplog.messages
    assert f"{WRITTEN_TO} or another one, also writes to {tmp_path}:" in message
    assert "its own directory" in message
    with HookLogger(model, tmp_path):
        pass
    assert len(caplog.messages) == 1


# --- other processes -----------------------------------------------------------------------------

LOGS_UNTIL_KILLED = """
    import multiprocessing, sys, time
    from torch import nn
    from telemetry import HookLogger

    def worker(connection):
        connection.send(multiprocessing.current_process().pid)
        time.sleep(600)

    model = nn.Linear(3, 2)
    logger = HookLogger(model, sys.argv[1])
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("fork").Process(target=worker, args=[theirs]).start()
    print(ours.recv(), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def child() -> Iterator[list[int]]:
    """Processes that outlive their parent."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        os.kill(pid, 9)


@pytest.mark.skipif(os.name == "nt", reason="no locks on directories")
def test_a_live_process_is_reported_and_a_dead_one_is_not(
    tmp_path: Path, model: nn.Linear, caplog: pytest.LogCaptureFixture, child: list[int]
) -> None:
    run = tmp_path / "run"
    with start_script(tmp_path, LOGS_UNTIL_KILLED, run) as process:
        child.append(int(process.stdout.readline()))
        with HookLogger(model, run):
            assert count(caplog, WRITTEN_TO) == 1
        process.kill()
        process.wait()
        # Its forked children survive it for a while, like workers of a DataLoader.
        os.kill(child[0], 0)
        with HookLogger(model, run):
            pass
        os.kill(child.pop(), 9)
    assert len(caplog.messages) == 1


def test_a_third_process_reports_the_second_after_the_first_exits(
    tmp_path: Path, model: nn.Linear, caplog: pytest.LogCaptureFixture
) -> None:
    other = nn.Linear(3, 2)
    first = HookLogger(model, tmp_path)
    with HookLogger(other, tmp_path):
        first.close()
        _, log = run_script(
            tmp_path,
            """
            import sys
            from torch import nn
            from telemetry import HookLogger
            model = nn.Linear(3, 2)
            HookLogger(model, sys.argv[1]).close()
            """,
            tmp_path,
        )
    assert log.count(WRITTEN_TO) == 1


def test_runs_of_several_processes_in_one_directory_do_not_mix(tmp_path: Path) -> None:
    script = """
        import os, sys
        from tests.helpers.known_runs import alert_at
        from tests.helpers.tiny_run import TinyRun
        child = os.fork()
        run = TinyRun(sys.argv[1], alerts=[lambda record: [alert_at(record.step, None)]])
        run.train(100 if child else 90)
        run.logger.close()
        if child:
            assert os.waitpid(child, 0)[1] == 0
    """
    run_script(tmp_path, script, tmp_path / "run")
    last = telemetry.read(tmp_path / "run")
    runs = [last, *map(telemetry.read, last.earlier)]
    assert [run.problems for run in runs] == [(), ()]
    steps = sorted([alert.step for alert in run.alerts] for run in runs)
    assert steps == [[*range(90)], [*range(100)]]
