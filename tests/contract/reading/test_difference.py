"""First difference of two runs, by the command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.helpers.known_runs import COLUMN, layout_of, write_run
from tests.helpers.shell import call, lines, records

NAMES = ["a", "b", "c"]
STEPS = 200


def write(
    log_dir: Path, changes: Sequence[tuple[int, str, float]] = (), names: Sequence[str] = NAMES
) -> Path:
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
    return log_dir


def test_the_earliest_difference_of_each_statistic_is_found(tmp_path: Path) -> None:
    one = write(tmp_path / "one")
    two = write(tmp_path / "two", [(190, "c", 9), (131, "a", 7), (131, "b", 8)])
    norm, rms = records("diff", one, two, status=1)
    assert (norm["statistic"], rms["statistic"]) == ("grad_norm", "grad_rms")
    # The backward pass reaches the later layer first.
    assert (norm["step"], norm["module_name"], norm["layer_count"]) == (131, "b", 2)
    assert (norm["first"], norm["second"]) == (132 + ord("b"), 8)
    assert lines("diff", one, one) == ["3 layers and 200 steps in common: no difference"]


def test_equal_nan_and_infinity_are_not_a_difference(tmp_path: Path) -> None:
    same = [(5, "a", np.nan), (6, "a", np.inf)]
    one = write(tmp_path / "one", [*same, (7, "a", np.inf)])
    two = write(tmp_path / "two", [*same, (7, "a", 1.0)])
    assert records("diff", one, one, "--tolerance", "0.5") == []
    found = records("diff", one, two, "--tolerance", "0.5", status=1)
    assert {difference["step"] for difference in found} == {7}


def test_layers_in_another_order_are_compared_by_name(tmp_path: Path) -> None:
    one, two = write(tmp_path / "one"), write(tmp_path / "two", names=["c", "n", "a"])
    assert records("diff", one, two) == []
    assert f"only in {one}: b\nonly in {two}: n" in call("diff", one, two).stdout
