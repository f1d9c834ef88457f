"""Steps 0, n, 2n, ... are measured."""

from __future__ import annotations

import pytest

from telemetry.pipeline import every


@pytest.mark.parametrize(
    ("n", "steps"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6]), (100, [0]), (2, [0, 2, 4, 6])]
)
def test_every_nth_step_is_due_from_step_0(n: int, steps: list[int]) -> None:
    is_due = every(n)
    assert [step for step in range(7) if is_due(step)] == steps


@pytest.mark.parametrize("n", [0, -1])
def test_less_than_one_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match=rf"HookLogger\(every_n_steps={n}\): must be at least 1"):
        every(n)


@pytest.mark.parametrize("n", [True, 2.0, "100", None])
def test_what_is_no_int_is_refused(n: object) -> None:
    with pytest.raises(TypeError, match=r"HookLogger\(every_n_steps=.*\): must be an int"):
        every(n)  # type: ignore[arg-type]
