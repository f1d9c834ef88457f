"""Parameters that count as copies on several ranks, and when they have diverged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from telemetry.alerts.ranks_diverge import RanksDiverge, RanksSameBatch
from telemetry.records import (
    Divergence,
    Layout,
    Module,
    Parameter,
    RankFacts,
    StepRecord,
)
from telemetry.testing import alerts_of
from tests.helpers.figures import figures

LAYOUT = Layout(
    modules=(Module(name="a", type_name="Linear"),),
    parameters=(Parameter(name="a.weight", module_name="a", shape=(1,)),),
)


def record(step: int, *, differs: bool = False, declared: bool = False, bad: int = 0) -> StepRecord:
    found = Divergence(parameter="a.weight", rank=1, other=0, declared=declared)
    everyone = frozenset({0, 1})
    return StepRecord(
        step=step,
        wall_time=0.0,
        layout=LAYOUT,
        grad_norms=np.ones(1),
        grad_present=np.ones(1, bool),
        grad_finite=np.ones(1, bool),
        full=True,
        ranks=RankFacts(
            size=2,
            held=everyone,
            measured=everyone,
            diverged=(found,) if differs else (),
            nonfinite=bad,
            first_nonfinite=(1, "the loss") if bad else None,
        ),
    )


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
    records = [record(n, differs=some, declared=declared) for n, some in enumerate(differs)]
    assert [alert.step for alert in alerts_of(records, [RanksDiverge()])] == alerts


@pytest.mark.parametrize(("same", "alerts"), [([1, 1, 1, 1], [2]), ([1, 1, 0, 1, 1], [])])
def test_the_same_batch_on_both_ranks_is_reported_at_the_third_step_in_a_row(
    same: Sequence[int], alerts: Sequence[int]
) -> None:
    def given(step: int, alike: frozenset[int]) -> StepRecord:
        made = record(step)
        assert made.ranks is not None
        return replace(made, ranks=replace(made.ranks, same_batch=alike))

    records = [given(n, frozenset({0, 1} if some else {0})) for n, some in enumerate(same)]
    found = alerts_of(records, [RanksSameBatch()])
    assert [alert.step for alert in found] == alerts
    assert all(figures(alert.summary)[:3] == [0, 1, 2] for alert in found)
