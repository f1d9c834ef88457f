"""First difference of two runs and export of all numbers, also of very long runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from telemetry.commands.export import cells
from telemetry.layers import PAGE_STATISTICS
from telemetry.reading import run_data
from telemetry.reading.comparison import ARISES, compare
from telemetry.reading.run import open_run
from telemetry.reading.run_data import windows
from tests.helpers.known_runs import COLUMN, layout_of, write_run

NAMES = ["a", "b", "c"]
STEPS = 200


def write(
    log_dir: Path, changes: Sequence[tuple[int, str, float]] = (), names: Sequence[str] = NAMES
) -> None:
    """Write a run with a known number for each step and layer, except for the norms in changes."""

    def norms(step: int) -> NDArray[np.float32]:
        values = np.array([step + 1 + ord(name) for name in names], np.float32)
        for at, name, value in changes:
            if at == step:
                values[names.index(name)] = value
        return values

    def matrices(step: int) -> NDArray[np.float32]:
        return np.full((len(names), len(COLUMN)), step, np.float32)

    write_run(
        log_dir, layout_of(names), steps=range(STEPS), norms=norms, matrices=matrices, every=2
    )


@pytest.fixture(params=["at once", "in pieces"])
def _pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "in pieces":
        monkeypatch.setattr(run_data, "READ_BYTES", 1 << 11)


@pytest.mark.usefixtures("_pieces")
def test_the_earliest_difference_of_each_statistic_is_found(tmp_path: Path) -> None:
    write(tmp_path / "one")
    write(tmp_path / "two", [(190, "c", 9), (131, "a", 7), (131, "b", 8)])
    found = compare(open_run(tmp_path / "one"), open_run(tmp_path / "two"))
    norm, rms = found.differences
    assert (norm.statistic, rms.statistic) == ("grad_norm", "grad_rms")
    # The backward pass reaches the later layer first.
    assert (norm.step, norm.module_name, norm.layer_count) == (131, "b", 2)
    assert (norm.first, norm.second) == (132 + ord("b"), 8)
    assert (found.step_count, found.layer_count) == (STEPS, 3)


@pytest.mark.usefixtures("_pieces")
def test_cells_have_a_row_for_each_step_and_layer(tmp_path: Path) -> None:
    write(tmp_path)
    rows = list(cells(open_run(tmp_path), ["grad_norm", "weight_norm"]))
    assert [(row[0], row[1]) for row in rows] == [(str(s), n) for s in range(STEPS) for n in NAMES]
    assert rows[3:7] == [
        ["1", "a", "Linear", f"{2.0 + ord('a')}", ""],
        ["1", "b", "Linear", f"{2.0 + ord('b')}", ""],
        ["1", "c", "Linear", f"{2.0 + ord('c')}", ""],
        ["2", "a", "Linear", f"{3.0 + ord('a')}", "2.0"],
    ]


def test_windows_cover_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.setattr(run_data, "READ_BYTES", 1 << 11)
    run = open_run(tmp_path)
    assert run.matrix("grad_norm").sampled
    found = [matrix for [[matrix]] in windows([run], ["grad_norm"])]
    assert len(found) > 1
    assert np.concatenate([matrix.steps for matrix in found]).tolist() == list(range(STEPS))


def test_equal_nan_and_infinity_are_not_a_difference(tmp_path: Path) -> None:
    same = [(5, "a", np.nan), (6, "a", np.inf)]
    write(tmp_path / "one", [*same, (7, "a", np.inf)])
    write(tmp_path / "two", [*same, (7, "a", 1.0)])
    one, two = open_run(tmp_path / "one"), open_run(tmp_path / "two")
    assert compare(one, one, tolerance=0.5).differences == []
    assert {found.step for found in compare(one, two, tolerance=0.5).differences} == {7}


def test_layers_in_another_order_are_compared_by_name(tmp_path: Path) -> None:
    write(tmp_path / "one")
    write(tmp_path / "two", names=["c", "n", "a"])
    found = compare(open_run(tmp_path / "one"), open_run(tmp_path / "two"))
    assert found.differences == []
    assert (found.only_first, found.only_second) == (["b"], ["n"])


def test_each_statistic_that_arises_outside_of_the_forward_pass_exists() -> None:
    assert ARISES.keys() <= {statistic.name for statistic in PAGE_STATISTICS}
