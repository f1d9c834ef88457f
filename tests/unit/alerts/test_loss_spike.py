from __future__ import annotations

import copy
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adam

from telemetry import Alert, HookLogger
from telemetry.testing import alerts_of
from tests.helpers.board import open_slow
from tests.helpers.client import Client
from tests.helpers.figures import figures
from tests.helpers.rules import rule
from tests.helpers.shell import records
from tests.helpers.small_runs import captured, classify, drawn, fit, net, rate_of, train


def rates(high: dict[int, float], usual: float = 3e-3) -> dict[str, Any]:
    model = net()
    optimizer = Adam(model.parameters(), usual)
    before = rate_of(optimizer, lambda step: high.get(step, usual))
    return {"model": model, "optimizer": optimizer, "before": before}


def with_returns(settings: dict[str, Any], at: Collection[int], *, after: int) -> dict[str, Any]:
    """Return to the state before each of these steps, ``after`` steps later."""
    parts, set_rate = (settings["model"], settings["optimizer"]), settings["before"]
    saved: list[dict[str, Any]] = []

    def before(step: int) -> None:
        if step in at:
            saved[:] = [copy.deepcopy(part.state_dict()) for part in parts]
        elif step - after in at:
            for part, state in zip(parts, saved, strict=True):
                part.load_state_dict(state)
        set_rate(step)

    return {**settings, "before": before}


def spikes(steps: int, **settings: Any) -> list[Alert]:
    return train(rule("loss_spike"), steps, **settings)


def stages(alerts: list[Alert]) -> list[str]:
    return [alert.stage for alert in alerts]


@pytest.mark.slow
@pytest.mark.parametrize(("at", "every"), [(133, 1), (133, 10), (205, 10), (205, 100), (301, 100)])
def test_a_learning_rate_that_jumps_for_three_steps_is_named(at: int, every: int) -> None:
    begin, *rest = spikes(400, every=every, **rates(dict.fromkeys(range(at, at + 3), 0.9)))
    assert at < begin.step <= at + 3
    assert begin.value > begin.threshold
    assert {300, 0.9} <= {*figures(begin.cause)}
    assert stages(rest) in ([], ["resolved"])


@pytest.mark.slow
def test_the_layers_of_the_group_whose_rate_jumped_are_named() -> None:
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": model[3].parameters()}]
    optimizer = Adam(groups, 3e-3)
    jump = rate_of(optimizer, lambda step: 3.0 if step in (205, 206, 207) else 3e-3, group=1)
    begin, *_ = spikes(250, model=model, optimizer=optimizer, before=jump)
    assert begin.module_name == "3"
    assert {1000, 3, 205} <= {*figures(begin.cause)}


@pytest.mark.slow
def test_a_spike_is_not_resolved_while_the_rate_and_the_loss_stay_high() -> None:
    stays = dict.fromkeys(range(205, 500), 0.5)
    assert stages(spikes(500, **rates(stays))) == ["started"]


@pytest.mark.slow
def test_five_spikes_of_a_run_that_returns_to_its_checkpoint_are_five_alerts() -> None:
    at = range(150, 650, 100)
    settings = rates({step + i: 0.9 for step in at for i in range(3)})
    alerts = spikes(650, every=100, **with_returns(settings, at, after=20))
    assert stages(alerts) == ["started", "resolved"] * 5
    assert [alert.step // 50 * 50 for alert in alerts[::2]] == list(at)
    assert all(0.9 in figures(alert.cause) for alert in alerts[::2])


@pytest.mark.slow
def test_one_batch_in_another_unit_is_reported_when_the_next_is_usual() -> None:
    batch = drawn(points=lambda step, points: points * (3e4 if step == 220 else 1.0))
    begin, end = spikes(300, batch=batch, **rates({}, usual=1e-3))
    assert (begin.step, begin.stage, end.stage) == (220, "started", "resolved")
    assert "The batch" in (begin.cause or "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "tails", "times", "is_spike"),
    [(220, False, 30.0, True), (30, False, 30.0, False), (220, True, 3e5, False)],
)
def test_one_high_loss_is_a_spike_only_after_a_baseline_without_heavy_tails(
    at: int, tails: bool, times: float, is_spike: bool
) -> None:
    def weight(step: int) -> float:
        usual = 1 / (step * 0.618 % 1 + 1e-3) if tails else 1.0  # Pareto, index 1
        return times * usual if step == at else usual

    alerts = spikes(at + 10, weight=weight, **rates({}, usual=1e-4))
    assert stages(alerts) == ["started", "resolved"] * is_spike


@pytest.mark.slow
def test_batches_as_rare_and_as_high_as_an_earlier_one_are_reported_once() -> None:
    weights = {220: 1e3, 341: 1e3, 463: 1e3}
    alerts = spikes(600, weight=lambda step: weights.get(step, 1.0), **rates({}, usual=1e-4))
    assert [(alert.step, alert.stage) for alert in alerts] == [(220, "started"), (221, "resolved")]


shifted = drawn(classes=lambda step, classes: (classes + (step >= 200)) % 3)


def random_from_110(step: int, classes: Tensor) -> Tensor:
    return torch.randint(3, classes.shape) if step >= 110 else classes


@pytest.mark.slow
@pytest.mark.parametrize("logs_after", [False, True])
@pytest.mark.parametrize(
    ("changed", "rate", "step"),
    [
        ({"batch": shifted}, 3e-3, 200),
        ({"weight": lambda step: 3e3 if step >= 200 else 1.0}, 3e-3, 200),
        ({"batch": drawn(classes=random_from_110)}, 1e-3, 110),  # the loss was as high before
    ],
    ids=["other data", "another weight", "random classes"],
)
def test_other_data_and_another_weight_of_the_loss_are_noted(
    changed: dict[str, Any], rate: float, step: int, logs_after: bool
) -> None:
    [alert] = spikes(step + 40, logs_after=logs_after, **changed, **rates({}, usual=rate))
    assert (alert.step, alert.severity) == (step + logs_after, "note")
    assert "Something else changed" in (alert.cause or "")


@pytest.mark.slow
def test_a_warm_restart_is_not_a_spike() -> None:
    restarts = {step: 0.03 * (1 - step % 60 / 60) for step in range(300)}
    assert spikes(300, **rates(restarts)) == []


@pytest.mark.parametrize(("less", "severity"), [(0.0, "warning"), (0.3, "note")])
def test_gradients_that_left_their_baseline_before_the_loss_are_the_cause(
    less: float, severity: str
) -> None:
    settings = rates({})

    def grow(step: int) -> None:
        if step >= 200:  # weights grow on their own: gradients first, then the loss
            settings["model"][3].weight.data.mul_(1.6)

    def logged(step: int, loss: Tensor) -> Tensor:
        return (loss if step < 204 or step > 240 else loss + 50) - less

    run = captured(steps=260, every=100, seed=4, logged=logged, **{**settings, "before": grow})
    [alert, *_] = alerts_of(run.records, [rule("loss_spike")])
    assert (alert.step, alert.severity) == (204, severity)  # a loss around 0 may rise
    assert figures(alert.cause) == [3]  # steps before the loss


def test_a_spike_after_smaller_gradients_is_a_note() -> None:
    settings, scale = rates({}), [1.0] * 198 + [1e-4] * 32
    run = captured(
        steps=230,
        every=100,
        seed=4,
        loss_of=lambda step: scale[step] * classify(settings["model"]),
        logged=lambda step, loss: loss / scale[step] + 50 * (step >= 204),
        **settings,
    )
    [alert] = alerts_of(run.records, [rule("loss_spike")])
    assert (alert.step, alert.severity) == (204, "note")


@pytest.mark.slow
def test_a_spike_is_explained_and_names_the_onsets_of_the_page(tmp_path: Path) -> None:
    settings = rates(dict.fromkeys((200, 201, 202), 0.9))
    model = settings.pop("model")
    torch.manual_seed(1)
    with HookLogger(model, tmp_path / "run", every_n_steps=50, measure="!images") as logger:
        fit(logger, 210, lambda step: classify(model), **settings)
    [spike] = [alert for alert in logger.alerts if alert.kind == "loss_spike"]
    assert spike.severity == "warning"
    assert [fault["step"] for fault in records("explain", tmp_path)] == [spike.step]
    page = Client(open_slow(tmp_path), tmp_path).json("onsets", run="run", step=spike.step)
    movers = page["onsets"]
    assert movers
    named = re.findall(r"(\S+) \(([^ ]+)x above usual at step (\d+)\)", spike.summary)
    assert named == [(m["name"], f"{m['factor']:.3g}", str(m["step"])) for m in movers]


@pytest.mark.parametrize(("steps", "noted"), [(158, []), (164, [150])])
def test_a_rise_without_a_reason_is_noted_later_as_an_explosion_may_explain_it(
    steps: int, noted: list[int]
) -> None:
    alerts = spikes(steps, weight=lambda step: 50.0 if step >= 150 else 1.0, optimizer=_slow)
    assert [(alert.severity, alert.step) for alert in alerts] == [("note", at) for at in noted]


def _slow(parameters: Any) -> Adam:
    return Adam(parameters, 1e-4)
