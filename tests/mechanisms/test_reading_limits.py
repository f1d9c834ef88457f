"""A reader of a run reads what is new, and keeps what it needs within limits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import telemetry
from telemetry.events.run_log import Norms
from telemetry.reading import run_data, run_log, sources
from telemetry.reading.matrix import WHOLE
from telemetry.reading.run import open_run
from telemetry.reading.run_data import RunData
from telemetry.reading.run_log import LogFile, RunDirectory
from telemetry.reading.sources import FileSource
from tests.helpers.known_runs import (
    LAYOUT,
    matrices,
    norms,
    write_dashboards,
    write_run,
)
from tests.helpers.shell import records


def test_only_what_is_new_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, LAYOUT, steps=range(20), norms=norms)
    (log,) = tmp_path.glob("*.runlog")
    content, read = log.read_bytes(), list[int]()
    log.write_bytes(content[: len(content) // 2])
    add = LogFile._add
    monkeypatch.setattr(
        LogFile, "_add", lambda self, data, at: (read.append(at), add(self, data, at))
    )
    run = RunData(RunDirectory(tmp_path))
    before = len(read)
    half = len(run.matrix("grad_norm").steps)
    assert 0 < half < 20
    assert len(read) == before  # of the same file
    log.write_bytes(content)
    run.refresh()
    assert len(run.matrix("grad_norm").steps) == 20
    assert len(read) == len(set(read))


def test_a_damaged_file_is_not_read_again_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, LAYOUT, steps=range(20), norms=norms)
    (log,) = tmp_path.glob("*.runlog")
    log.write_bytes(log.read_bytes() + b"\x01" * 20)
    run = RunData(RunDirectory(tmp_path))
    monkeypatch.setattr(run_log, "read_frames", lambda *_: pytest.fail("read again"))
    run.refresh()
    assert len(run.matrix("grad_norm").steps) == 20
    assert len(run.problems) == 1


def test_a_run_that_is_deleted_while_it_is_read_has_what_is_known(tmp_path: Path) -> None:
    write_run(tmp_path, LAYOUT, steps=range(20), norms=norms, matrices=matrices)
    run = open_run(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    assert [layer.name for layer in run.layers] == ["a", "b.x", "b.y"]
    assert not len(run.matrix("grad_norm").steps)
    assert not any(run.layer_series("a"))
    assert "No such file" in " ".join(run.problems)


def test_the_last_of_equal_steps_counts_without_the_bytes_of_its_frame(tmp_path: Path) -> None:
    write_run(tmp_path, LAYOUT, steps=[0, 1, 1, 1, 2], norms=norms)
    found = open_run(tmp_path).norms(WHOLE)
    assert [frame.step for frame in found] == [0, 1, 2]
    assert {type(frame) for frame in found} == {Norms}
    assert {len(frame.norms) for frame in found} == {0}


def test_a_difference_and_a_table_of_long_runs_have_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_data, "_STEPS_AT_ONCE", 64)
    for name in ("one", "two"):
        changed = 131 if name == "two" else -1
        write_run(
            tmp_path / name, LAYOUT, steps=range(200), matrices=matrices, every=2,
            norms=lambda step, changed=changed: norms(step) + (step == changed),
        )  # fmt: skip
    found = records("diff", tmp_path / "one", tmp_path / "two", status=1)
    assert {difference["step"] for difference in found} == {131}
    layers = telemetry.read(tmp_path / "one").layers
    found = layers[(layers.statistic == "grad_norm") & (layers.module_name == "b.x")]
    assert found.value.tolist() == [10 * step for step in range(200)]


def test_every_second_step_of_units_is_omitted_beyond_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extremes = np.ones((64, 2), np.float32)
    write_run(tmp_path, LAYOUT, steps=range(21), norms=norms, every=10, units=lambda step: extremes)
    for steps, found in ((3, [0, 10, 20]), (2, [0, 20])):
        monkeypatch.setattr(run_data, "MAX_UNITS", 64 * steps)
        units = open_run(tmp_path).units("a")
        assert units.steps.tolist() == found
        assert units.sampled == (steps == 2)


def test_scalars_beyond_the_limit_are_omitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_dashboards(tmp_path, scalars={"loss": dict.fromkeys(range(10), 1.0)})
    monkeypatch.setitem(sources.MAX_KEPT_BYTES, "scalars", 2000)
    source = FileSource(tmp_path)
    assert [step for step, _ in source.read("scalars", ["loss"])["loss"]] == [0, 1, 2, 3]
    assert len(list(source.problems)) == 1
