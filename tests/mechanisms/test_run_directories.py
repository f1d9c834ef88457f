"""Directories of runs: remote ones, and those below TensorBoard's log directories."""

from __future__ import annotations

import os
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from torch.utils.tensorboard import SummaryWriter

import telemetry
from telemetry import HookLogger
from telemetry.reading.run_data import RunData
from telemetry.reading.run_log import LogFile, RunDirectory
from telemetry.tensorboard_plugin.provider_source import find_directories
from tests.helpers.board import open_slow
from tests.helpers.client import Client
from tests.helpers.known_runs import layout_of, write_newer, write_run
from tests.helpers.loops import fault_at, mlp, train
from tests.helpers.shell import records


def write(log_dir: Path, steps: range = range(1), **options: Any) -> None:
    write_run(log_dir, layout_of(["a"]), steps=steps, **options)


def test_a_remote_directory_gets_event_files_and_a_run_log(in_tmp_path: Path) -> None:
    model = mlp()
    writer = SummaryWriter("memory://alerts")
    with writer, HookLogger(model, writer, alerts=[fault_at(1)]) as logger:
        train(model, steps=2)
        logger.flush()
        run = RunData(RunDirectory("memory://alerts"))
        assert run.matrix("grad_norm").steps.tolist() == [0, 1]
        train(model, steps=2)
    run.refresh()
    assert run.matrix("grad_norm").steps.tolist() == [0, 1, 2, 3]
    assert [alert.step for alert in run.alerts] == [1]
    assert list(in_tmp_path.iterdir()) == []


def test_a_program_that_changes_its_directory_has_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    model = mlp()
    with HookLogger(model, "run", alerts=[fault_at(1)]):
        monkeypatch.chdir(elsewhere)
        train(model, steps=2)
    assert not list(elsewhere.iterdir())
    run = telemetry.read(tmp_path / "run")
    assert [alert.step for alert in run.alerts] == [1]
    assert len(run.scalars.query("tag == 'grad_norm/total'")) == 2


def test_runs_have_the_names_that_tensorboard_gives_them(tmp_path: Path) -> None:
    for folder in ("one", "one/below", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "telemetry.0.x.runlog").touch()
    (tmp_path / "two" / "again").symlink_to(tmp_path)
    one, two = str(tmp_path / "one"), str(tmp_path / "two")

    def names(logdir: str, spec: str = "") -> set[str]:
        return set(find_directories(Namespace(logdir=logdir, logdir_spec=spec)))

    assert names(str(tmp_path)) == {"one", "one/below", "two"}
    assert names(one) == names(f"{one}/") == {".", "below"}
    assert {"first", "first/below", "."} <= names("", f"first:{one},{two}")


@pytest.mark.parametrize("view", ["page", "command"])
def test_rows_of_runs_list_their_directory_once_and_read_each_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, view: str
) -> None:
    """However many runs have used it; walking to it has listed it, too."""
    for number in range(5):
        write(tmp_path, run=f"run {number}")
    client, calls = Client(open_slow(tmp_path), tmp_path), list[Any]()
    listdir, refresh = os.listdir, LogFile.refresh
    monkeypatch.setattr(os, "listdir", lambda path: (calls.append(str(path)), listdir(path))[1])
    monkeypatch.setattr(LogFile, "refresh", lambda file: (calls.append(file), refresh(file))[1])
    rows = client.json("runs") if view == "page" else records("runs", tmp_path)
    assert len(rows) == 5
    assert calls.count(str(tmp_path)) == 1
    assert len(calls) == 1 + 5


def test_requests_in_several_threads_take_each_frame_once(tmp_path: Path) -> None:
    client, ready = Client(open_slow(tmp_path), tmp_path), Barrier(8)
    write(tmp_path, range(2000), losses=False)

    def steps(_: int) -> int:
        ready.wait()
        return len(client.arrays("matrix", run=".", statistic="grad_norm")[1]["steps"])

    with ThreadPoolExecutor(8) as threads:
        assert {*threads.map(steps, range(8))} == {2000}
    [run] = client.json("runs")
    assert run["lastStep"] == 1999
    assert len(client.arrays("layer", run=".", layer="a")[1]["statistics0.steps"]) == 2000


def test_a_run_of_a_newer_format_is_listed_until_another_one_replaces_it(tmp_path: Path) -> None:
    client = Client(open_slow(tmp_path), tmp_path)
    write_newer(tmp_path, 99)
    assert [row["name"] for row in client.json("runs")] == ["."]
    assert "format 99" in client.request("run", {"run": "."}).json["error"]
    for path in tmp_path.iterdir():
        path.unlink()
    write(tmp_path, range(3))
    assert client.json("run", run=".")["lastStep"] == 2
