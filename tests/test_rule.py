"""What a rule is, and what it may leave out."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from telemetry import Alert, HookLogger, Rule, StepRecord
from telemetry.records import Layout, TensorRecord
from telemetry.records.sketch import sketch_array
from telemetry.rule import as_rule


class Plain(Rule):
    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        return ()


class PassesOver(Plain):
    """As rules were once, which could leave out steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self.steps.append(record.step)
        return ()

    def quiet_steps(self, steps: object) -> int:
        raise AssertionError("asked")

    pass_over = narrow = quiet_steps


def silent(record: StepRecord) -> Iterable[Alert]:
    return ()


def test_only_the_call_must_be_written() -> None:
    rule = Plain()
    assert (rule.name, rule.wants_full) == ("Plain", False)
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
def test_what_is_no_rule_is_refused(value: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        as_rule(value)  # type: ignore[arg-type]


def test_a_rule_that_could_pass_over_steps_sees_each_and_one_line_tells(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "telemetry")
    rule, model = PassesOver(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with HookLogger(model, tmp_path, every_n_steps=100, alerts=[rule, silent]):
        for _ in range(20):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert rule.steps == list(range(20))
    (line,) = [message for message in caplog.messages if "no longer asked" in message]
    assert "'PassesOver'" in line
    assert "its quiet_steps, pass_over, narrow are" in line


def test_what_such_rules_imported_and_read_warns_for_a_release() -> None:
    with pytest.warns(DeprecationWarning, match="LightSteps is gone"):
        from telemetry.records import LightSteps  # type: ignore[attr-defined]  # noqa: F401
    record = StepRecord(
        step=0,
        wall_time=0.0,
        layout=Layout(modules=(), parameters=()),
        grad_norms=np.zeros(0),
        grad_present=np.zeros(0, bool),
        grad_finite=np.zeros(0, bool),
    )
    with pytest.warns(DeprecationWarning, match="left_out is gone"):
        assert record.left_out == frozenset()
    tensor = TensorRecord(sketch=sketch_array(np.zeros(2)))
    with pytest.warns(DeprecationWarning, match="now called TensorRecord.variation"):
        assert tensor.spread == tensor.variation
