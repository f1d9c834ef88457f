"""Ends of a whole process: kill -9, exits, Ctrl-C, forks."""

from __future__ import annotations

import json
import shutil
import signal
import time
from itertools import chain
from pathlib import Path

import pytest

import telemetry
from tests.helpers.board import ReadBoard
from tests.helpers.disks import FreezableDisk
from tests.helpers.scripts import HANGS_S, run_script, start_script
from tests.helpers.tiny_run import TinyRun, event_files, norm_steps, steps_by_file

KILLED = 12
EVERY = (1, 10, 100)


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """Log directory of trainings killed at random moments; by run, how many steps it flushed."""
    log_dir = tmp_path_factory.mktemp("killed")
    output, _ = run_script(
        tmp_path_factory.mktemp("script"),
        """
        import json, os, random, signal, sys
        import torch
        from tests.helpers.tiny_run import TinyRun

        log_dir, count = sys.argv[1], int(sys.argv[2])
        torch.nn.Linear(2, 1)(torch.ones(4, 2)).sum().backward()  # imports what a step imports

        def train_for_ever(number, progress):
            run = TinyRun(f"{log_dir}/{number}", every_n_steps=10)
            while True:
                run.train()
                os.write(progress, b"s")
                if number % 2 and random.random() < 0.1:
                    run.logger.flush()
                    os.write(progress, b"f")

        random.seed(0)
        flushed = {}
        for number in range(count):
            steps, (progress, report) = random.randint(0, 60), os.pipe()
            child = os.fork()
            if not child:
                random.seed(number)
                train_for_ever(number, report)
            os.close(report)
            seen = b""
            while seen.count(b"s") < steps:
                seen += os.read(progress, 1)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            seen += os.read(progress, 1 << 16)
            flushed[number] = seen[: seen.rfind(b"f") + 1].count(b"s")
        print(json.dumps(flushed))
        """,
        log_dir,
        KILLED,
    )
    return log_dir, json.loads(output)


def test_after_kill_9_no_step_is_missing_in_between_and_none_that_was_flushed(
    killed_runs: tuple[Path, dict[str, int]], read_board: ReadBoard
) -> None:
    log_dir, flushed = killed_runs
    shown = read_board(log_dir).scalars()
    assert len(flushed) == KILLED
    assert sum(count > 0 for count in flushed.values()) > KILLED / 4
    for run, count in flushed.items():
        for tag in ("count", "grad_norm/total"):
            steps = [step for step, _ in shown.get(run, {}).get(tag, [])]
            assert steps == list(range(len(steps))), (run, tag)
            assert len(steps) >= count, (run, tag)
        if count:
            assert telemetry.read(log_dir / run).problems == (), run  # a torn end is no damage
            assert norm_steps(log_dir / run)[:count] == list(range(count))


def test_a_killed_run_resumes_after_the_steps_that_it_flushed(
    killed_runs: tuple[Path, dict[str, int]], tmp_path: Path
) -> None:
    log_dir, flushed = killed_runs
    for run, count in flushed.items():
        if count:
            resumed = TinyRun(shutil.copytree(log_dir / run, tmp_path / run), resume=True)
            assert resumed.logger.current_step >= count
            resumed.logger.close()


def test_a_step_is_written_though_no_other_follows_and_nothing_is_flushed(tmp_path: Path) -> None:
    script = """
        import sys, time
        from tests.helpers.tiny_run import TinyRun
        run = TinyRun(sys.argv[1])
        run.train(3)
        time.sleep(3600)
    """
    log_dir, deadline = tmp_path / "run", time.monotonic() + HANGS_S
    with start_script(tmp_path, script, log_dir) as process:
        while time.monotonic() < deadline:
            if steps_by_file(log_dir) == [[0, 1, 2]] and norm_steps(log_dir) == [0, 1, 2]:
                break
            assert process.poll() is None
            time.sleep(0.1)
        process.kill()
    assert steps_by_file(log_dir) == [[0, 1, 2]]
    assert norm_steps(log_dir) == [0, 1, 2]


CHECKPOINTED, RESUMED = 99, 109

TRAINING = """
    import os, signal, sys
    import torch
    from torch.utils import tensorboard
    from tests.helpers.tiny_run import TinyRun

    def train(name, first, last):
        kind, every = name.split("-")
        writer = log_dir = f"{sys.argv[1]}/{name}"
        if kind == "torch":
            writer = tensorboard.SummaryWriter(log_dir, purge_step=first or None)
        run = TinyRun(writer, every_n_steps=int(every))
        if first:
            run.logger.load_state_dict(torch.load(f"{log_dir}.state", weights_only=True))
            assert run.logger.current_step == first
        run.train(last - first)
        return run, writer
"""


@pytest.fixture(scope="module")
def resumed_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Directory and names of runs that were killed after a checkpoint and resumed."""
    folder = tmp_path_factory.mktemp("resumed")
    runs, names = folder / "runs", [f"{kind}-{n}" for kind in ("own", "torch") for n in EVERY]
    killed = """
    runs = {name: train(name, 0, int(sys.argv[2])) for name in sys.argv[4:]}
    for name, (run, _) in runs.items():
        torch.save(run.logger.state_dict(), f"{sys.argv[1]}/{name}.state")
    os.kill(os.getpid(), signal.SIGKILL)
    """
    arguments = runs, CHECKPOINTED, RESUMED, *names
    with start_script(folder, TRAINING + killed, *arguments) as process:
        _, log = process.communicate()
    assert process.returncode == -signal.SIGKILL, log
    assert "is not written" not in log
    resumed = """
    for name in sys.argv[4:]:
        run, writer = train(name, int(sys.argv[2]), int(sys.argv[3]))
        run.logger.close()
        if not isinstance(writer, str):
            writer.close()
    """
    run_script(folder, TRAINING + resumed, *arguments)
    return runs, names


def test_a_run_killed_after_its_checkpoint_lacks_no_step_when_it_is_resumed(
    resumed_runs: tuple[Path, list[str]], read_board: ReadBoard
) -> None:
    runs, names = resumed_runs
    shown = read_board(runs).scalars()
    for name in names:
        for tag in ("count", "grad_norm/total"):
            assert [step for step, _ in shown[name][tag]] == list(range(RESUMED)), (name, tag)


def test_a_checkpoint_times_out_on_a_frozen_disk(
    freezable_disk: FreezableDisk, caplog: pytest.LogCaptureFixture
) -> None:
    run = TinyRun(freezable_disk.path / "run")
    run.logger.flush()
    with freezable_disk.frozen():
        run.train()
        assert run.logger.state_dict()["step"] == 1
    assert "up to the checkpoint at step 1 are not written within" in caplog.text
    caplog.clear()
    assert run.logger.state_dict()["step"] == 1
    run.logger.close()
    assert "are not written" not in caplog.text
    assert steps_by_file(freezable_disk.path / "run") == [[0]]


# --- ends without close --------------------------------------------------------------------------


def test_an_exit_without_close_loses_no_step(tmp_path: Path) -> None:
    run_script(
        tmp_path,
        """
        import multiprocessing, sys
        from tests.helpers.tiny_run import TinyRun

        def train(name):
            TinyRun(f"{sys.argv[1]}/{name}").train(200)

        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                child = multiprocessing.get_context(method).Process(target=train, args=(method,))
                child.start()
                child.join()
            train("main")
        """,
        tmp_path,
    )
    for name in ("main", "fork", "spawn"):
        assert steps_by_file(tmp_path / name) == [list(range(200))], name


@pytest.mark.parametrize(
    ("number", "handler"),
    [
        (None, ""),
        (signal.SIGINT, ""),
        (signal.SIGTERM, "signal.signal(signal.SIGTERM, stop)"),
    ],
    ids=["exception", "Ctrl-C", "SIGTERM"],
)
def test_an_exception_or_a_signal_that_ends_the_training_loses_no_step(
    tmp_path: Path, number: signal.Signals | None, handler: str
) -> None:
    """A handler may log, and may have interrupted the logger itself."""
    script = f"""
        import signal, sys
        from tests.helpers.tiny_run import TinyRun

        def stop(*_):
            run.logger.log(stopped=1.0)
            print(run.logger.current_step, flush=True)
            sys.exit(3)

        {handler}
        run = TinyRun(sys.argv[1])
        while True:
            run.train()
            if run.logger.current_step == 100:
                print("ready", flush=True)
                if {number is None}:
                    raise ArithmeticError("the loss is NaN")
    """
    with start_script(tmp_path, script, tmp_path / "run") as process:
        assert process.stdout.readline() == "ready\n"
        if number is not None:
            process.send_signal(number)
        output, log = process.communicate()
    [steps], [stopped] = (steps_by_file(tmp_path / "run", tag) for tag in ("count", "stopped"))
    assert steps == list(range(len(steps)))
    assert len(steps) >= 100
    if number == signal.SIGTERM:
        assert stopped == [int(output)]
        assert len(steps) - stopped[0] in (0, 1)
    else:
        assert ("KeyboardInterrupt" if number else "the loss is NaN") in log


# --- forks ---------------------------------------------------------------------------------------


def test_forked_children_neither_hang_nor_write(tmp_path: Path) -> None:
    _, log = run_script(
        tmp_path,
        """
        import os, signal, sys
        from torch.utils.tensorboard import SummaryWriter
        from tests.helpers.known_runs import alert_at
        from tests.helpers.tiny_run import TinyRun

        writer = SummaryWriter(f"{sys.argv[1]}/given")
        rules = [lambda record: [alert_at(record.step, None)]]
        runs = [TinyRun(f"{sys.argv[1]}/own", alerts=rules), TinyRun(writer)]
        writer.close()  # a new file in its directory continues

        def train(steps=1, **scalars):
            for run in runs:
                run.train(steps, **scalars)

        for step in range(16):
            train()
            child = os.fork()  # at every state that the threads may be in
            if not child:
                signal.alarm(500)
                train(2, child=1.0)
                for run in runs:
                    run.logger.flush()
                if step % 4:
                    for run in runs:
                        run.logger.close()
                    os._exit(0)
                sys.exit(0)
            train()
            assert os.waitpid(child, 0)[1] == 0
        for run in runs:
            run.logger.close()
        writer.close()
        """,
        tmp_path,
    )
    for name in ("own", "given"):
        assert sorted(chain(*steps_by_file(tmp_path / name))) == list(range(32))
        assert not any(steps_by_file(tmp_path / name, "child"))
    found = telemetry.read(tmp_path / "own")
    assert ([alert.step for alert in found.alerts], found.problems) == ([*range(32)], ())
    assert norm_steps(tmp_path / "own") == list(range(32))
    assert "Traceback" not in log


def test_children_of_a_data_loader_neither_hang_nor_write(tmp_path: Path) -> None:
    _, log = run_script(
        tmp_path,
        """
        import sys
        from torch.utils.data import DataLoader, Dataset
        from tests.helpers.tiny_run import TinyRun

        class Samples(Dataset):
            def __init__(self, logger):
                self.logger = logger

            def __len__(self):
                return 6

            def __getitem__(self, index):
                self.logger.log(child=1.0)
                self.logger.flush()
                return index

        if __name__ == "__main__":
            run = TinyRun(sys.argv[1])
            for method in ("fork", "spawn"):
                loader = DataLoader(
                    Samples(run.logger), num_workers=1, multiprocessing_context=method, timeout=300
                )
                for _ in loader:
                    run.train()
            run.train()
            run.logger.close()
        """,
        tmp_path / "run",
    )
    assert steps_by_file(tmp_path / "run") == [list(range(13))]
    assert steps_by_file(tmp_path / "run", "child") == [[]]
    assert "Traceback" not in log
    assert event_files(tmp_path / "run")[0].stat().st_size > 0
