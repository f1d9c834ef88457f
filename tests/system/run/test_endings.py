"""Ends of a run by kill -9 or on a hanging disk: the files contain the promised records."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest
from torch import nn
from torch.utils import tensorboard

import telemetry
from telemetry import Alert, HookLogger
from tests.helpers.disks import FreezableDisk
from tests.helpers.loops import fault_at, train, written
from tests.helpers.scripts import run_script
from tests.helpers.shell import run as run_command
from tests.helpers.tiny_run import norm_steps
from tests.helpers.twins import Recorder

KILLED = 8


def written_steps(log_dir: Path, tag: str) -> list[int]:
    """Return the steps of a group of tags, in the order of writing."""
    values = written(log_dir)
    return [step for _, step, v in values if v.tag.removeprefix("~run/").startswith(tag)]


# --- kill -9 -------------------------------------------------------------------------------------


def test_after_kill_9_no_record_of_a_run_older_than_two_seconds_is_missing(
    tmp_path: Path,
) -> None:
    script = """
        import os, random, signal, struct, sys, time
        import torch
        from tests.helpers.known_runs import alert_at
        from tests.helpers.tiny_run import TinyRun

        def every_tenth(record):
            return [alert_at(record.step, "")] if record.step % 10 == 0 else []

        def train(log_dir, pause_s, steps, report):
            run = TinyRun(log_dir, alerts=[every_tenth], every_n_steps=25)
            for step in range(steps):
                run.train()
                os.write(report, struct.pack("<id", step, time.time()))
                time.sleep(pause_s)
            time.sleep(3600)

        log_dir, count = sys.argv[1], int(sys.argv[2])
        random.seed(0)
        torch.nn.Linear(2, 1)(torch.ones(4, 2)).sum().backward()  # imports what a step imports
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
    output, _ = run_script(tmp_path, script, tmp_path / "runs", KILLED)
    counts = {run: int(count) for run, count in map(str.split, output.splitlines())}
    assert len(counts) == KILLED
    assert sum(counts.values()) > 5 * KILLED
    for run, count in counts.items():
        log_dir, old = tmp_path / "runs" / run, set(range(count))
        alerts = {step for step in old if step % 10 == 0}
        assert old <= set(written_steps(log_dir, "grad_norm/total")), run
        assert old <= set(written_steps(log_dir, "count")), run
        assert alerts <= set(written_steps(log_dir, "~alerts/")), run
        if old:
            assert old <= {*norm_steps(log_dir)}, run
            assert alerts <= {alert.step for alert in telemetry.read(log_dir).alerts}, run


# --- Ctrl-C --------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["", "logger.close()"])
def test_steps_queued_when_ctrl_c_interrupts_close_are_written(
    tmp_path: Path, then: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = f"""
        import os, signal, sys, threading, time
        from tests.helpers.tiny_run import TinyRun

        def slow(record):
            time.sleep(0.02)
            return ()

        run = TinyRun(sys.argv[1], alerts=[slow])
        try:
            with run.logger as logger:
                run.train(60)
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        except KeyboardInterrupt:
            print("interrupted", logger)
        {then}
    """
    output, errors = run_script(tmp_path, script, tmp_path / "run")
    assert output.startswith("interrupted <HookLogger removed")
    assert written_steps(tmp_path / "run", "count") == list(range(60))
    assert run_command("runs", tmp_path / "run", "--json") == 0
    assert json.loads(capsys.readouterr().out)[0]["status"] == "ended"
    assert "Traceback" not in errors


# --- a disk that hangs ---------------------------------------------------------------------------


def test_with_a_hanging_disk_each_step_is_checked_and_close_has_one_deadline(
    freezable_disk: FreezableDisk, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, received, model = Recorder(), list[Alert](), nn.Linear(3, 2)
    logger = HookLogger(
        model, freezable_disk.path / "run", alerts=[recorder, fault_at(*range(0, 2000, 100))],
        every_n_steps=50, max_overhead=math.inf, on_alert=received.append,
    )  # fmt: skip
    with freezable_disk.frozen():
        train(model, 2000)
        logger.close(timeout_s=3)  # returns although the disk hangs
    assert [record.step for record in recorder.records] == list(range(2000))
    assert [alert.step for alert in received] == list(range(0, 2000, 100))
    lost = [message for message in caplog.messages if "could not be written" in message]
    assert any("events could not be written" in message for message in lost), caplog.messages
    assert any("has not ended" in message for message in lost), caplog.messages


def test_a_given_writer_on_a_hanging_disk_does_not_block_closing(
    freezable_disk: FreezableDisk,
) -> None:
    model, writer = nn.Linear(3, 2), tensorboard.SummaryWriter(freezable_disk.path / "run")
    threads = set(threading.enumerate())
    logger = HookLogger(model, writer, alerts=(), every_n_steps=50)
    with freezable_disk.frozen():
        train(model, 500)
        logger.close(timeout_s=1)  # returns although the disk hangs
    for thread in set(threading.enumerate()) - threads:
        thread.join()  # or it continues to write when the disk is unmounted
    writer.close()
