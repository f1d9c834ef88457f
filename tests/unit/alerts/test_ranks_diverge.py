"""Parameters that count as copies on several ranks, and ranks that get the same batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from telemetry.testing import alerts_of
from tests.helpers.figures import figures
from tests.helpers.rank_records import of_ranks
from tests.helpers.rules import rule
from tests.helpers.scripted import record


@pytest.mark.parametrize(
    ("declared", "differs", "alerts"),
    [
        (True, [True, True], [0]),
        (False, [True, True], []),  # separate models, or experts
        (False, [False, True, True], []),  # equal at first
        (False, [False, False, True], [2]),
        (True, [False, False, True], [2]),
    ],
)
def test_parameters_that_were_never_equal_are_copies_only_if_declared(
    declared: bool, differs: Sequence[bool], alerts: Sequence[int]
) -> None:
    records = [
        of_ranks(record(step), diverged=["fc.weight"] * some, declared=declared)
        for step, some in enumerate(differs)
    ]
    assert [alert.step for alert in alerts_of(records, [rule("ranks_diverge")])] == alerts


def test_a_rank_with_nan_is_reported_until_the_gradients_of_all_are_finite_again() -> None:
    alone = of_ranks(record(5))
    facts = {"nonfinite": 1, "first_nonfinite": (1, "its loss")}
    records = [replace(alone, ranks=replace(alone.ranks, **facts))]
    broken = {"norms": [math.nan], "grad_finite": np.zeros(1, bool)}
    records += [of_ranks(record(step, **broken)) for step in range(6, 60)]
    records += [of_ranks(record(step)) for step in range(60, 90)]
    found = alerts_of(records, [rule("ranks_diverge")])
    assert [(alert.step, alert.stage) for alert in found] == [(5, "started"), (79, "resolved")]


@pytest.mark.parametrize(("same", "alerts"), [([1, 1, 1, 1], [2]), ([1, 1, 0, 1, 1], [])])
def test_the_same_batch_on_both_ranks_is_reported_at_the_third_step_in_a_row(
    same: Sequence[int], alerts: Sequence[int]
) -> None:
    records = [of_ranks(record(n), same_batch=range(1 + some)) for n, some in enumerate(same)]
    found = alerts_of(records, [rule("ranks_same_batch")])
    assert [alert.step for alert in found] == alerts
    assert all(figures(alert.summary)[:3] == [0, 1, 2] for alert in found)
