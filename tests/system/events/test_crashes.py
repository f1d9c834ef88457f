"""Ends of a whole process: kill -9, exits, forks."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from telemetry import HookLogger
from telemetry.events import list_event_files, read_events
from telemetry.tag_names import plain
from tests.helpers.board import ReadBoard
from tests.helpers.disks import FreezableDisk
from tests.helpers.scripts import run_script, start_script

KILLED = 50
EVERY = (1, 10, 100)


@dataclass(frozen=True, kw_only=True)
class Killed:
    """A writer that was killed; times in seconds since the first was started."""

    run: str
    started: float
    killed: float
    flushed: list[float]  # when each event that it had flushed was added


@pytest.fixture(scope="module")
def killed_writers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Killed]]:
    """Writers killed at random moments, and the log directory that they leave."""
    log_dir = tmp_path_factory.mktemp("killed")
    output, _ = run_script(
        tmp_path_factory.mktemp("script"),
        """
        import json, os, random, signal, struct, sys, time
        from telemetry.events import FileWriter, summaries

        log_dir, count = sys.argv[1], int(sys.argv[2])
        begin = time.time()

        def write_for_ever(run, flushed):
            # The value of a scalar is its time of adding, so that missing events are detectable.
            writer = FileWriter(f"{log_dir}/{run}")
            added = []
            while True:
                now = time.time() - begin
                added.append(now)
                writer.write_values([summaries.scalar("added", now)], len(added))
                if run % 2 and random.random() < 0.05:
                    writer.flush()
                    os.write(flushed, struct.pack("<d", now))
                if run % 5 == 0 and len(added) % 10 == 0:
                    writer.write_values([summaries.text("ballast", "x" * 20_000)], len(added))
                time.sleep(0.01)

        random.seed(0)
        children = []
        for run in range(count):
            moment = random.uniform(0.2, 3.5)
            flushed, report = os.pipe()
            child = os.fork()
            if not child:
                random.seed(run)
                write_for_ever(run, report)
            os.close(report)
            children.append((moment, run, child, flushed, time.time() - begin))

        for moment, run, child, flushed, started in sorted(children):
            time.sleep(max(0, begin + moment - time.time()))
            os.kill(child, signal.SIGKILL)
            killed = time.time() - begin
            os.waitpid(child, 0)
            times = struct.iter_unpack("<d", os.read(flushed, 1 << 16))
            record = dict(run=str(run), started=started, killed=killed)
            print(json.dumps({**record, "flushed": [time for time, in times]}))
        """,
        log_dir,
        KILLED,
    )
    return log_dir, [Killed(**json.loads(line)) for line in output.splitlines()]


def test_after_kill_9_no_event_older_than_two_seconds_is_missing(
    killed_writers: tuple[Path, list[Killed]], read_board: ReadBoard
) -> None:
    log_dir, writers = killed_writers
    shown = read_board(log_dir).scalars()
    assert len(writers) == KILLED

    for writer in writers:
        points = shown.get(writer.run, {}).get("added", [])
        steps = [step for step, _ in points]
        assert steps == list(range(1, len(steps) + 1))  # no step is missing in between
        last_added = points[-1][1] if points else writer.started
        assert writer.killed - last_added < 2


def test_after_kill_9_everything_flushed_is_in_the_file(
    killed_writers: tuple[Path, list[Killed]], read_board: ReadBoard
) -> None:
    log_dir, writers = killed_writers
    shown = read_board(log_dir).scalars()
    flushed = [writer for writer in writers if writer.flushed]
    assert len(flushed) > KILLED / 4

    for writer in flushed:
        _, last_added = shown[writer.run]["added"][-1]
        assert last_added >= writer.flushed[-1] - 1e-6  # float32


def test_after_kill_9_the_rest_of_every_file_is_readable(
    killed_writers: tuple[Path, list[Killed]],
) -> None:
    log_dir, _ = killed_writers
    readers = [read_events(path) for path in log_dir.rglob("*tfevents*")]
    assert len(readers) > KILLED / 2

    for reader in readers:
        for _ in reader:
            pass  # a damaged record would raise
        was_just_created = reader.path.stat().st_size == 0
        assert reader.offset > 0 or reader.torn_at == 0 or was_just_created


CHECKPOINTED, RESUMED = 299, 309

TRAINING = """
    import math, os, signal, sys
    import torch
    from torch import nn
    from torch.utils import tensorboard
    import telemetry

    def train(name, first, last):
        writer, every = name.split("-")
        log_dir = f"{sys.argv[1]}/{name}"
        if writer == "torch":
            log_dir = tensorboard.SummaryWriter(log_dir, purge_step=first or None)
        elif writer == "ours":
            log_dir = telemetry.SummaryWriter(log_dir, purge_step=first or None)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        logger = telemetry.HookLogger(
            model, log_dir, every_n_steps=int(every), images=False, max_overhead=math.inf
        )
        if first:
            logger.load_state_dict(torch.load(f"{sys.argv[1]}-{name}", weights_only=True))
            assert logger.current_step == first
        for _ in range(first, last):
            optimizer.zero_grad()
            loss = model(torch.rand(8, 3)).square().mean()
            logger.log(loss=loss)
            loss.backward()
            optimizer.step()
        return model, logger, log_dir
"""


@pytest.fixture(scope="module")
def resumed_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Directory and names of runs that were killed after a checkpoint and resumed."""
    folder = tmp_path_factory.mktemp("resumed")
    runs, names = folder / "runs", [f"{w}-{n}" for w in ("own", "ours", "torch") for n in EVERY]
    killed = """
    runs = {name: train(name, 0, int(sys.argv[2])) for name in sys.argv[4:]}
    for name, (model, logger, writer) in runs.items():
        torch.save(logger.state_dict(), f"{sys.argv[1]}-{name}")
    os.kill(os.getpid(), signal.SIGKILL)
    """
    arguments = runs, CHECKPOINTED, RESUMED, *names
    with start_script(folder, TRAINING + killed, *arguments) as process:
        _, log = process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL, log
    assert "is not written" not in log
    resumed = """
    for name in sys.argv[4:]:
        model, logger, writer = train(name, int(sys.argv[2]), int(sys.argv[3]))
        logger.close()
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
        for tag in ("loss", "grad_norm/total"):
            points = next(points for full, points in shown[name].items() if plain(full) == tag)
            assert [step for step, _ in points] == list(range(RESUMED)), (name, tag)


def test_a_checkpoint_times_out_on_a_frozen_disk(
    freezable_disk: FreezableDisk, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("telemetry.run.assembly._CHECKPOINT_S", 0.5)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with HookLogger(model, freezable_disk.path / "run") as logger:
        logger.flush()
        with freezable_disk.frozen():
            model(torch.rand(8, 3)).sum().backward()
            optimizer.step()
            began = time.monotonic()
            assert logger.state_dict()["step"] == 1
            assert time.monotonic() - began < 20
        assert "up to the checkpoint at step 1 are not written within" in caplog.text
        caplog.clear()
        assert logger.state_dict()["step"] == 1
    assert "are not written" not in caplog.text


def read_steps(log_dir: Path) -> dict[str, list[int]]:
    """Steps per tag, from the run's only file."""
    (path,) = list_event_files(log_dir)
    reader = read_events(path)
    steps: dict[str, list[int]] = {}
    for event in reader:
        for value in event.summary.value:
            steps.setdefault(value.tag, []).append(event.step)
    assert reader.torn_at is None
    return steps


def test_an_exit_without_close_loses_no_event(tmp_path: Path) -> None:
    run_script(
        tmp_path,
        """
        import multiprocessing, sys
        from telemetry.events import FileWriter, summaries

        def write(run):
            writer = FileWriter(f"{sys.argv[1]}/{run}", flush_s=3600)
            for step in range(3000):
                writer.write_values([summaries.scalar("loss", step)], step)

        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                child = multiprocessing.get_context(method).Process(target=write, args=(method,))
                child.start()
                child.join()
            write("main")
        """,
        tmp_path,
    )

    for run in ("main", "fork", "spawn"):
        assert read_steps(tmp_path / run) == {"loss": list(range(3000))}


def test_an_exception_loses_no_event(tmp_path: Path) -> None:
    with start_script(
        tmp_path,
        """
        import sys
        from telemetry.events import FileWriter, summaries
        writer = FileWriter(sys.argv[1], flush_s=3600)
        writer.write_values([summaries.scalar("loss", 1.0)], 7)
        raise ArithmeticError("the loss is NaN")
        """,
        tmp_path / "run",
    ) as process:
        _, log = process.communicate(timeout=60)

    assert "the loss is NaN" in log
    assert read_steps(tmp_path / "run") == {"loss": [7]}


def test_a_handled_sigterm_loses_no_event(tmp_path: Path) -> None:
    with start_script(
        tmp_path,
        """
        import signal, sys
        from telemetry.events import FileWriter, summaries

        def stop(*_):
            writer.write_values([summaries.scalar("stopped", 1.0)], step)
            sys.exit(3)

        signal.signal(signal.SIGTERM, stop)
        writer = FileWriter(sys.argv[1], flush_s=3600)
        writer.flush()
        step = 0
        while True:
            step += 1
            writer.write_values([summaries.scalar("loss", 1.0)], step)
            if step == 1000:
                print("ready", flush=True)
        """,
        tmp_path / "run",
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 3

    steps = read_steps(tmp_path / "run")
    (last,) = steps["stopped"]
    assert steps["loss"] in (list(range(1, last)), list(range(1, last + 1)))


def test_forked_children_neither_hang_nor_write(tmp_path: Path) -> None:
    _, log = run_script(
        tmp_path,
        """
        import os, signal, sys
        from telemetry.events import FileWriter, summaries

        def add(tag, step):
            writer.write_values([summaries.scalar(tag, step)], step, flush=step % 3 == 0)

        writer = FileWriter(sys.argv[1], flush_s=0.001)
        for step in range(100):
            add("parent", step)
            child = os.fork()  # at every state that the writer's thread may be in
            if not child:
                signal.alarm(20)
                add("child", step)
                writer.flush()
                if step % 2:
                    writer.close()
                    os._exit(0)
                sys.exit(0)
            add("parent", step)
            assert os.waitpid(child, 0)[1] == 0
        writer.close()
        """,
        tmp_path / "run",
    )

    assert read_steps(tmp_path / "run") == {"parent": sorted([*range(100), *range(100)])}
    assert log.count("writes nothing") == 100  # each child logs it once


def test_children_of_a_data_loader_neither_hang_nor_write(tmp_path: Path) -> None:
    _, log = run_script(
        tmp_path,
        """
        import sys
        from torch.utils.data import DataLoader, Dataset
        from telemetry.events.summary_writer import SummaryWriter

        class Samples(Dataset):
            def __init__(self, writer):
                self.writer = writer

            def __len__(self):
                return 6

            def __getitem__(self, index):
                self.writer.add_scalar("child", 1.0, index)
                self.writer.flush()
                return index

        if __name__ == "__main__":
            writer = SummaryWriter(sys.argv[1])
            step = 0
            for method in ("fork", "spawn"):
                loader = DataLoader(
                    Samples(writer), num_workers=1, multiprocessing_context=method, timeout=50
                )
                for _ in loader:
                    writer.add_scalar("parent", 1.0, step)
                    step += 1
            writer.add_scalar("parent", 1.0, step)
            writer.close()
        """,
        tmp_path / "run",
    )

    assert read_steps(tmp_path / "run") == {"parent": list(range(13))}
    assert log.count("writes nothing") == 2
