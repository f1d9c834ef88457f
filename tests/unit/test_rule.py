"""The protocol of rules and its optional members."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pytest

from telemetry import Alert, Rule, StepRecord
from telemetry.rule import as_rule


class Plain(Rule):
    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        return ()


def silent(record: StepRecord) -> Iterable[Alert]:
    return ()


def test_only_the_call_must_be_written() -> None:
    rule = Plain()
    assert (rule.name, rule.requests_full_step) == ("Plain", False)
    assert (rule.on_loss(3, 0.5), rule.state_dict()) == ((), {})
    rule.load_state_dict({})
    with pytest.raises(TypeError, match="__call__"):
        Rule()  # type: ignore[abstract]


def test_a_plain_callable_becomes_a_rule_once() -> None:
    rule = as_rule(silent)
    assert rule.name == "silent"
    assert as_rule(rule) is rule
    assert as_rule(partial(silent)).name == "partial"


@pytest.mark.parametrize(
    ("value", "message"),
    [(1, "1 is not a rule: it cannot be called"), (Plain, r"pass an instance: Plain\(\)")],
)
def test_an_object_that_is_not_a_rule_is_refused(value: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        as_rule(value)  # type: ignore[arg-type]
