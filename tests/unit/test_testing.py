"""Rules, public test doubles for them, and the examples of their page."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from telemetry import Alert, Baseline, Finding, HookLogger, Rule, StepRecord
from telemetry.testing import CapturedRun, alerts_of, capture_run
from tests.helpers.known_runs import alert_at
from tests.helpers.paths import ROOT
from tests.helpers.small_runs import classify, fit, net

PAGE = (ROOT / "docs" / "howto" / "detector.md").read_text(encoding="utf-8")


def train(model: nn.Module, run: CapturedRun | HookLogger, steps: int, scale: float = 1.0) -> None:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    fit(run, steps, lambda step: classify(model) * scale**step, optimizer)


class Losses(Rule):
    """Rule that requests a full step after step 1 and reports each loss."""

    requests_full_step = False

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self.requests_full_step = record.step == 1
        return ()

    def on_loss(self, step: int, loss: float) -> Iterable[Alert]:
        yield alert_at(step, None, kind="loss", severity="note", value=loss)


class Plain(Rule):
    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        return ()


def test_only_the_call_of_a_rule_must_be_written() -> None:
    rule = Plain()
    assert (rule.name, rule.requests_full_step) == ("Plain", False)
    assert (rule.on_loss(3, 0.5), rule.state_dict()) == ((), {})
    rule.load_state_dict({})
    with pytest.raises(TypeError, match="__call__"):
        Rule()  # type: ignore[abstract]
    with pytest.raises(TypeError, match="1 is not a rule: it cannot be called"):
        alerts_of([], [1])  # type: ignore[list-item]


def test_a_run_is_recorded_at_once_and_without_files(in_tmp_path: Path) -> None:
    model = net()
    with capture_run(model, every_n_steps=10, rules=[Losses()]) as run:
        train(model, run, 5)
    assert [record.step for record in run.records] == [0, 1, 2, 3, 4]
    assert [record.step for record in run.records if record.full] == [0, 3]
    assert [alert.value for alert in run.alerts] == [record.loss for record in run.records]
    assert list(run.records[0].activations) == ["0", "1", "2", "3"]
    assert list(in_tmp_path.iterdir()) == []
    train(model, run, 2)  # nothing is recorded after the body
    assert len(run.records) == 5


@pytest.mark.slow
def test_a_captured_run_and_a_logger_report_the_same_alerts(tmp_path: Path) -> None:
    first, second = net(), net()
    with capture_run(first) as run:
        train(first, run, 40, scale=1e3)
    with HookLogger(second, tmp_path, every_n_steps=1, measure="!images") as logger:
        train(second, logger, 40, scale=1e3)
    found, logged = (
        [(alert.kind, alert.step, alert.stage) for alert in alerts]
        for alerts in (run.alerts, logger.alerts)
    )
    assert found == logged != []
    assert alerts_of(run.records) == run.alerts


@pytest.mark.parametrize(
    ("judge", "error", "message"),
    [
        (lambda record: 1 / 0, ZeroDivisionError, "division"),
        (lambda record: "text", TypeError, "must return alerts"),
    ],
)
def test_exceptions_and_invalid_results_of_a_rule_are_raised(
    judge: Any, error: type[Exception], message: str
) -> None:
    model = net()
    with pytest.raises(error, match=message), capture_run(model, rules=[judge]) as run:
        train(model, run, 1)


def test_the_examples_of_the_page_run(in_tmp_path: Path) -> None:
    model = net()
    page: dict[str, Any] = {
        "model": model,
        "train": lambda steps, run: train(model, run, steps),
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
    }
    for example in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(example, page)
    page["logger"].close()
    records = page["run"].records
    assert [record.full for record in records] == [step in (0, 10, 20) for step in range(30)]

    rule = page["HeavyTails"](kurtosis=1.0)
    found = alerts_of([replace(records[0], step=step) for step in range(9)], [rule])
    assert [(alert.kind, alert.step, alert.stage) for alert in found] == [
        ("heavy_tails", 6, "started")
    ]
    assert found[0].module_name == "2"
    assert found[0].value > found[0].threshold == 1.0
    negative = replace(page["run"].records[0], scalars={"loss": -1.0})
    [alert] = alerts_of([negative], [page["loss_is_negative"]])
    assert (alert.kind, alert.value) == ("negative_loss", -1.0)


@pytest.mark.parametrize(
    ("value", "name"),
    [(Alert, "reference/alert"), (Finding, "howto/detector")],
)
def test_the_page_names_every_field(value: Any, name: str) -> None:
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert [field.name for field in fields(value) if f"`{field.name}`" not in page] == []


def test_the_docstring_of_a_record_names_every_field() -> None:
    text = inspect.getdoc(StepRecord) or ""
    documented = {*re.findall(r"^    (\w+):", text, re.MULTILINE)}
    assert documented == {field.name for field in fields(StepRecord)}


def test_the_members_on_the_page_of_the_record_exist() -> None:
    page = (ROOT / "docs" / "reference" / "record.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|(`\w+`(?:, `\w+`)*)\|", page, re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    model = net()
    with capture_run(model, rules=()) as run:
        train(model, run, 1)
    assert len(names) > 20
    assert [name for name in sorted(names) if not hasattr(run.records[0], name)] == []


def test_the_documented_members_of_the_baseline_exist() -> None:
    names = re.findall(r"`(baseline\.[\w.]+)`", PAGE)
    baseline, model = Baseline(), net()
    with capture_run(model, rules=()) as run:
        train(model, run, 3)
    for record in run.records:
        baseline.add(record)
    assert len(names) > 10
    for name in names:
        assert eval(name, {"baseline": baseline}) is not None
