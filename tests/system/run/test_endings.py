"""Ends of a run by kill -9 or on a hanging disk: the files contain the promised records."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import tensorboard

import telemetry
from telemetry import Alert, HookLogger
from telemetry.events import list_event_files, read_events
from telemetry.reading.run_data import RunData
from telemetry.reading.sources import FileSource
from telemetry.records import StepRecord
from telemetry.tag_names import TOTAL_GRAD_NORM
from tests.helpers.scripts import run_script, start_script

KILLED = 8
PROMISED_S = 2.0
STEP = struct.Struct("<id")  # a step's number, and when it ended

TRAIN = """
import os, random, signal, struct, sys, time
import torch
from torch import nn
from telemetry import Alert, HookLogger

torch.set_num_threads(1)

def every_tenth(record):
    if record.step % 10 == 0:
        yield Alert(
            kind="nonfinite", severity="warning", step=record.step, module_name="0",
            value=1.0, threshold=0.0, summary="planted",
        )

def train(log_dir, pause_s, steps, progress):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    logger = log_dir and HookLogger(model, log_dir, alerts=[every_tenth], every_n_steps=25)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.rand(8, 4)).square().mean()
        loss.backward()
        if logger:
            logger.log(loss=loss)
        optimizer.step()
        os.write(progress, struct.pack("<id", step, time.time()))
        time.sleep(pause_s)
    if logger:
        time.sleep(3600)
"""


def written_steps(log_dir: Path, tag: str) -> list[int]:
    events = (event for path in list_event_files(log_dir) for event in read_events(path))
    return [e.step for e in events if any(value.tag.startswith(tag) for value in e.summary.value)]


# --- kill -9 -------------------------------------------------------------------------------------


def test_after_kill_9_no_record_of_a_run_older_than_two_seconds_is_missing(
    tmp_path: Path,
) -> None:
    script = TRAIN + textwrap.dedent(
        """
        log_dir, count = sys.argv[1], int(sys.argv[2])
        random.seed(0)
        train(None, 0, 1, os.open(os.devnull, os.O_WRONLY))  # imports what the first step imports
        children = []
        for run in range(count):
            progress, report = os.pipe()
            child = os.fork()
            if not child:
                # Slow and fast loops, and some that stop and wait.
                train(f"{log_dir}/{run}", (0.05, 0.3, 0.7)[run % 3], (30, 10**6)[run % 2], report)
            os.close(report)
            children.append((random.uniform(3.0, 6.0), run, child, progress))
        firsts = {run: os.read(progress, 12) for _, run, _, progress in children}
        begin = time.time()
        for moment, run, child, progress in sorted(children):
            time.sleep(max(0, begin + moment - time.time()))
            os.kill(child, signal.SIGKILL)
            killed = time.time()
            os.waitpid(child, 0)
            steps = struct.iter_unpack("<id", firsts[run] + os.read(progress, 1 << 16))
            old = [step for step, ended in steps if ended < killed - 2]
            print(run, len(old))
        """
    )
    output, _ = run_script(tmp_path, script, tmp_path / "runs", KILLED)
    counts = {run: int(count) for run, count in map(str.split, output.splitlines())}
    assert len(counts) == KILLED
    assert sum(counts.values()) > 5 * KILLED
    for run, count in counts.items():
        log_dir, old = tmp_path / "runs" / run, set(range(count))
        alerts = {step for step in old if step % 10 == 0}
        assert old <= set(written_steps(log_dir, TOTAL_GRAD_NORM)), run
        assert old <= set(written_steps(log_dir, "loss")), run
        assert alerts <= set(written_steps(log_dir, "~alerts/")), run
        if old:
            page = RunData(FileSource(log_dir))
            assert old <= set(page.matrix("grad_norm").steps.tolist()), run
            assert alerts <= {alert.step for alert in page.overview().alerts}, run
            lines = (log_dir / "alerts.jsonl").read_text().splitlines()
            assert alerts <= {json.loads(line)["step"] for line in lines}, run


def test_the_last_norms_are_in_the_file_although_no_step_follows(tmp_path: Path) -> None:
    script = TRAIN + "train(sys.argv[1], pause_s=0, steps=40, progress=1)\n"
    with start_script(tmp_path, script, tmp_path / "run") as process:
        assert process.stdout is not None
        process.stdout.buffer.read(40 * STEP.size)  # returns when all are done
        time.sleep(PROMISED_S)
        process.kill()
    page = RunData(FileSource(tmp_path / "run"))
    assert page.matrix("grad_norm").steps.tolist() == list(range(40))


# --- Ctrl-C --------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["", "logger.close()"])
def test_steps_queued_when_ctrl_c_interrupts_close_are_written(tmp_path: Path, then: str) -> None:
    script = f"""
import os, signal, sys, threading, time
import torch
from telemetry import HookLogger

def slow(record):
    time.sleep(0.02)
    return ()

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    with HookLogger(model, sys.argv[1], alerts=[slow]) as logger:
        for step in range(60):
            loss = model(torch.rand(8, 4)).square().mean()
            logger.log(loss=loss)
            loss.backward()
            optimizer.step()
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
except KeyboardInterrupt:
    print("interrupted", logger)
{then}
"""
    output, errors = run_script(tmp_path, script, tmp_path / "run")
    assert output.startswith("interrupted <HookLogger removed")
    assert written_steps(tmp_path / "run", "loss") == list(range(60))
    assert len(written_steps(tmp_path / "run", "telemetry/end/")) == 1
    assert "Traceback" not in errors


# --- a disk that hangs ---------------------------------------------------------------------------


class FrozenDisk:
    """A file system on which writing hangs, as on an unreachable network drive."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def freeze(self) -> None:
        subprocess.run(["fsfreeze", "--freeze", str(self.path)], check=True)

    def thaw(self) -> None:
        subprocess.run(["fsfreeze", "--unfreeze", str(self.path)], stderr=subprocess.DEVNULL)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FrozenDisk]:
    image, path = tmp_path / "image", tmp_path / "disk"
    path.mkdir()
    image.touch()
    os.truncate(image, 16 << 20)
    if not all(map(shutil.which, ["mkfs.ext4", "mount", "fsfreeze"])):
        pytest.skip("no tools to make a file system that hangs")
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    mount = ["mount", "-o", "loop", str(image), str(path)]
    if subprocess.run(mount, stderr=subprocess.DEVNULL).returncode:
        pytest.skip("may not mount a file system")
    disk = FrozenDisk(path)
    try:
        yield disk
    finally:
        disk.thaw()
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def alert_at(step: int) -> Alert:
    return Alert(
        kind="nonfinite", severity="error", step=step, module_name="0",
        value=1.0, threshold=0.0, summary="planted",
    )  # fmt: skip


def train(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(8, 4)).square().mean().backward()
        optimizer.step()


def test_with_a_hanging_disk_each_step_is_checked_and_close_has_one_deadline(
    disk: FrozenDisk, caplog: pytest.LogCaptureFixture
) -> None:
    judged: list[int] = []
    received: list[Alert] = []

    def rule(record: StepRecord) -> Iterable[Alert]:
        judged.append(record.step)
        if record.step % 100 == 0:  # an error: alerts.jsonl and flight files are written, too
            yield alert_at(record.step)

    model = nn.Linear(4, 2)
    log_dir = disk.path / "run"
    logger = HookLogger(model, log_dir, alerts=[rule], every_n_steps=50, on_alert=received.append)
    disk.freeze()
    train(model, 2000)
    begin = time.monotonic()
    logger.close(timeout_s=3)
    took_s = time.monotonic() - begin
    assert judged == list(range(2000))
    assert [alert.step for alert in received] == list(range(0, 2000, 100))
    assert took_s < 6
    lost = [message for message in caplog.messages if "could not be written" in message]
    assert any("events could not be written" in message for message in lost), caplog.messages
    assert any("has not ended" in message for message in lost), caplog.messages
    disk.thaw()


@pytest.mark.parametrize("kind", [tensorboard.SummaryWriter, telemetry.SummaryWriter])
def test_a_given_writer_on_a_hanging_disk_blocks_no_longer_than_the_timeout(
    disk: FrozenDisk, kind: type[tensorboard.SummaryWriter]
) -> None:
    model, writer = nn.Linear(4, 2), kind(disk.path / "run")
    threads = set(threading.enumerate())
    logger = HookLogger(model, writer, alerts=(), every_n_steps=50)
    disk.freeze()
    train(model, 500)
    begin = time.monotonic()
    logger.close(timeout_s=1)
    assert time.monotonic() - begin < 6
    disk.thaw()
    for thread in set(threading.enumerate()) - threads:
        thread.join()  # or it continues to write when the disk is unmounted
    writer.close()
