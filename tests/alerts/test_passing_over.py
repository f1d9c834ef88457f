"""Steps that rules pass over together lead to the alerts that judging each of them gives."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from telemetry.alert import Alert
from telemetry.alerts.configuration import default_rules
from telemetry.alerts.history import leading
from telemetry.alerts.judging import Judge
from telemetry.failures import Failures
from telemetry.records import ABSENT, Bounds, LightSteps, StepRecord
from telemetry.testing import capture_run

STEPS = 330


def train(name: str) -> list[StepRecord]:
    """A run with a fault that begins at step 151, except a healthy one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
    spare = nn.Linear(3, 3)
    held = list(model.parameters())
    if name == "a layer without optimizer":
        model.append(spare)
    optimizer = torch.optim.SGD(held, lr=0.05, momentum=0.9)
    inputs = torch.randn(512, 8)
    targets = inputs[:, :3].argmax(dim=1)
    with capture_run(model, every_n_steps=50, optimizer=optimizer) as run:
        for step in range(STEPS):
            broken = step > 150
            optimizer.param_groups[0]["lr"] = rate(name, step)
            if name == "evaluation mode" and step == 151:
                model.eval()
            batch = torch.arange(8 * step, 8 * step + 32) % 512
            x, y = inputs[batch], targets[batch]
            if name == "labels":
                y = torch.randint(3, (32,))
            if name == "one bad batch" and step == 157:
                x = x * 1e4
            loss = loss_of(name, model(x), y, broken)
            run.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return run.records


def rate(name: str, step: int) -> float:
    if name == "rate of zero" and step > 150:
        return 0.0
    if name == "rate jumps" and 157 <= step < 160:
        return 5.0
    return 0.05


def loss_of(name: str, output: Tensor, target: Tensor, broken: bool) -> Tensor:
    loss = nn.functional.cross_entropy(output, target)
    return loss * math.nan if name == "loss becomes NaN" and broken else loss


def judged(records: Sequence[StepRecord], at_once: int) -> tuple[list[Alert], int]:
    """Alerts of the default rules, and how many steps they passed over."""
    judge, found, passed = Judge(default_rules(), Failures()), list[Alert](), 0

    def judge_one(record: StepRecord) -> None:
        if record.loss is not None:
            found.extend(judge.judge_loss(record.step, record.loss))
        found.extend(judge.judge(record))

    waiting: list[StepRecord] = []

    def judge_waiting() -> None:
        nonlocal passed
        if waiting:
            calm = leading([math.isfinite(record.loss or 0.0) for record in waiting])
            quiet = judge.pass_over(LightSteps.of(waiting)[:calm]) if calm else 0
            passed += quiet
            for record in waiting[quiet:]:
                judge_one(record)
            waiting.clear()

    for record in records:
        fits = not waiting or LightSteps.fit(waiting[0], record)
        if record.full or at_once == 1 or not fits or len(waiting) == at_once:
            judge_waiting()
        if record.full or at_once == 1:
            judge_one(record)
        else:
            waiting.append(record)
    judge_waiting()
    return found, passed


def put_off(records: Sequence[StepRecord], at_once: int) -> tuple[list[Alert], int]:
    """Alerts where steps within the bounds of the rules wait for others, and how many waited."""
    judge, found, waited = Judge(default_rules(), Failures()), list[Alert](), 0
    bounds, waiting = None, list[StepRecord]()
    for i, record in enumerate(records):
        waiting.append(record)
        if not record.full and bounds is not None and within(bounds, record):
            waited += 1
            continue
        *before, last = waiting
        if before:  # all that waited was quiet indeed
            assert judge.pass_over(LightSteps.of(before)) == len(before)
        bounds, waiting = None, []
        if not last.full and judge.pass_over(LightSteps.of([last])):
            latest = [r for r in records[max(0, i + 1 - at_once) : i + 1] if not r.full]
            bounds = judge.bounds(LightSteps.of(latest), 72)
            continue
        if last.loss is not None:
            found.extend(judge.judge_loss(last.step, last.loss))
        found.extend(judge.judge(last))
    return found, waited


def within(bounds: Bounds, record: StepRecord) -> bool:
    norms = np.where(record.grad_present, record.grad_norms, ABSENT)
    row = np.concatenate([record.learning_rates, norms])[np.newaxis]
    fits = bounds.hold(record.layout, record.step, record.step, row)
    return fits and (record.loss is None or bounds.hold_loss(record.loss))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("healthy", None),
        ("rate of zero", "learning_rate_zero"),
        ("rate jumps", "loss_spike"),
        ("one bad batch", None),
        ("evaluation mode", "eval_mode"),
        ("a layer without optimizer", "untrained_parameters"),
        ("labels", "loss_stuck"),
        ("loss becomes NaN", "nonfinite"),
    ],
)
def test_alerts_are_those_of_judging_each_step(name: str, kind: str | None) -> None:
    records = train(name)
    alone, _ = judged(records, 1)
    together, passed = judged(records, 8)
    assert together == alone
    later, waited = put_off(records, 8)
    assert later == alone
    assert name != "healthy" or waited > 0.4 * STEPS
    assert kind is None or kind in {alert.kind for alert in alone}
    assert name != "healthy" or (alone == [] and passed > 0.8 * STEPS)
