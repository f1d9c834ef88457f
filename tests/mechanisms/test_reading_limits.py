"""Numbers of a run are read once, cached within limits, and in pieces where there are too many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import telemetry
from telemetry.reading import matrix, run_data, sources
from telemetry.reading.matrix import Region
from telemetry.reading.run import open_run
from telemetry.reading.run_data import RunData
from telemetry.reading.sources import FileSource
from tests.helpers.known_runs import COLUMN, layout_of, write_dashboards, write_run
from tests.helpers.shell import records

LAYOUT = layout_of(["a", "b.x", "b.y"])


def norms(step: int) -> np.ndarray:
    return np.array([step, step * 10, step * 100], np.float32)


def matrices(step: int) -> np.ndarray:
    return np.full((3, len(COLUMN)), step, np.float32)


class CountingSource(FileSource):
    """Source that records each read."""

    def __init__(self, log_dir: Path) -> None:
        super().__init__(log_dir)
        self.reads: list[str] = []

    def read(self, plugin_name: str, tags: Sequence[str], *, sampled: bool = False) -> object:  # type: ignore[override]
        self.reads += tags
        return super().read(plugin_name, tags, sampled=sampled)


def test_only_a_tag_that_has_grown_is_read_again_and_the_cache_keeps_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "short", LAYOUT, steps=range(15), norms=norms)
    write_run(tmp_path / "long", LAYOUT, steps=range(18), norms=norms)
    run = RunData(FileSource(tmp_path / "short"))
    assert len(run.matrix("grad_norm").steps) == 15
    monkeypatch.setattr(matrix, "_CACHE_BYTES", 500)
    run.source = CountingSource(tmp_path / "long")
    assert run.matrix("grad_norm").steps.tolist() == list(range(18))
    assert len(run.source.reads) == 1  # the first ten steps are known
    assert run._numbers.nbytes <= 500


def test_steps_beyond_the_limit_are_omitted_until_a_window_is_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, LAYOUT, steps=range(200), norms=norms, matrices=matrices)
    monkeypatch.setattr(run_data, "READ_BYTES", 250 * len(COLUMN))
    run = RunData(FileSource(tmp_path))
    whole = run.matrix("weight_norm")
    assert whole.sampled
    assert whole.steps.tolist() == list(range(9, 200, 10))
    part = run.matrix("weight_norm", Region(first_step=42, last_step=47))
    assert not part.sampled
    assert part.steps.tolist() == list(range(42, 48))


def test_a_difference_and_a_table_of_long_runs_have_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_data, "READ_BYTES", 1 << 11)
    for name in ("one", "two"):
        changed = 131 if name == "two" else -1
        write_run(
            tmp_path / name, LAYOUT, steps=range(200), matrices=matrices, every=2,
            norms=lambda step, changed=changed: norms(step) + (step == changed),
        )  # fmt: skip
    assert open_run(tmp_path / "one").matrix("grad_norm").sampled
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
