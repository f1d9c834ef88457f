"""Experts that lose their tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest

from telemetry import Alert
from telemetry.alerts.outputs import ExpertCollapse
from telemetry.records import StepRecord
from tests.helpers.small_records import full_record


def record(step: int, load: Sequence[int]) -> StepRecord:
    return full_record(step, expert_loads={"router": np.array(load)})


def judged(loads: Sequence[Sequence[int]], detector: ExpertCollapse | None = None) -> list[Alert]:
    detector = detector or ExpertCollapse()
    return [alert for step, load in enumerate(loads) for alert in detector(record(step, load))]


EVEN = [40, 40, 40, 40]


@pytest.mark.parametrize(
    ("load", "severity", "share"),
    [([80, 80, 0, 0], "warning", 0.5), ([160, 0, 0, 0], "warning", 0.75),
     ([60, 50, 50, 0], "note", 0.25)],
)  # fmt: skip
def test_experts_that_lose_their_tokens_are_named(
    load: list[int], severity: str, share: float
) -> None:
    [alert] = judged([EVEN] * 3 + [load] * 6)
    assert (alert.severity, alert.module_name, alert.value) == (severity, "router", share)
    assert alert.step == 6  # 120 expected tokens at step 5, confirmed by the next one
    idle = [expert for expert, tokens in enumerate(load) if not tokens]
    assert str(idle[-1]) in alert.summary


def test_the_alert_resolves_when_the_experts_are_chosen_again() -> None:
    alerts = judged([EVEN] * 3 + [[160, 0, 0, 0]] * 6 + [EVEN] * 30)
    assert [alert.stage for alert in alerts] == ["started", "resolved"]


def test_all_load_on_one_from_the_start_is_a_note() -> None:
    [alert] = judged([[160, 0, 0, 0]] * 6)
    assert (alert.severity, alert.value) == ("note", 0.75)


def test_a_few_tokens_of_an_expert_count_as_none() -> None:
    [alert] = judged([[100] * 4] + [[398, 1, 0, 1]] * 4)
    assert alert.value == 0.75
    assert judged([[100] * 4] + [[196, 100, 102, 2]] * 9) == []  # 2 % of an even load


def test_experts_that_few_tokens_miss_by_chance_are_not_reported() -> None:
    draw = np.random.default_rng(0)
    uneven = np.array([0.3, 0.2, 0.15, 0.15, 0.1, 0.05, 0.03, 0.02])
    assert judged(draw.multinomial(16, uneven, size=400).tolist()) == []
    assert judged(draw.multinomial(4, np.full(8, 1 / 8), size=400).tolist()) == []


def test_a_collapse_of_half_of_the_experts_requests_full_steps() -> None:
    detector = ExpertCollapse()
    judged([EVEN] * 3, detector)
    assert not detector.requests_full_step
    judged([[160, 0, 0, 0]], detector)
    assert detector.requests_full_step


def test_the_state_survives_a_checkpoint() -> None:
    before, after = ExpertCollapse(), ExpertCollapse()
    judged([EVEN] * 3 + [[160, 0, 0, 0]] * 2, before)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert len(judged([[160, 0, 0, 0]] * 3, after)) == 1
