from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam

from telemetry import HookLogger
from telemetry.alerts.engine import Engine
from telemetry.alerts.losses import LossBurst, LossSpike
from telemetry.plain_text import called
from telemetry.reading.run import open_run
from telemetry.testing import alerts_of, capture_run
from tests.helpers.figures import figures
from tests.helpers.small_runs import Batch, draw, net, train


def rates(high: dict[int, float], usual: float = 3e-3) -> dict[str, Any]:
    model = net()
    optimizer = Adam(model.parameters(), usual)

    def set_rate(step: int) -> None:
        optimizer.param_groups[0]["lr"] = high.get(step, usual)

    return {"model": model, "optimizer": optimizer, "before": set_rate}


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


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 100])
@pytest.mark.parametrize("at", [133, 205, 301])
def test_a_learning_rate_that_jumps_for_three_steps_is_named(at: int, every: int) -> None:
    high = {at: 0.9, at + 1: 0.9, at + 2: 0.9}
    begin, *rest = train(LossSpike(), 400, every=every, **rates(high))
    assert at < begin.step <= at + 3
    assert {300, 0.9} <= {*figures(begin.cause)}
    assert [alert.stage for alert in rest] in ([], ["resolved"])


@pytest.mark.slow
def test_the_layers_of_the_group_whose_rate_jumped_are_named() -> None:
    model = net()
    *_, head = (module for module in model if isinstance(module, torch.nn.Linear))
    of_head = {id(p) for p in head.parameters()}
    rest = [p for p in model.parameters() if id(p) not in of_head]
    optimizer = Adam([{"params": rest}, {"params": [*head.parameters()]}], 3e-3)

    def set_rate(step: int) -> None:
        optimizer.param_groups[1]["lr"] = 3.0 if step in (205, 206, 207) else 3e-3

    begin, *_ = train(LossSpike(), 250, every=10, model=model, optimizer=optimizer, before=set_rate)
    name = next(name for name, module in model.named_modules() if module is head)
    assert begin.module_name == name
    assert {1000, 3, 205} <= {*figures(begin.cause)}
    assert name in (begin.cause or "")


def test_a_small_rise_after_a_jump_of_the_rate_is_reported_if_the_loss_had_fallen_far() -> None:
    settings = rates(dict.fromkeys(range(205, 250), 0.03))
    model, optimizer, before = settings["model"], settings["optimizer"], settings["before"]
    torch.manual_seed(1)
    with capture_run(model, every_n_steps=100, rules=[]) as run:
        for step in range(225):
            before(step)
            points, classes = draw()
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(points), classes)
            loss.backward()
            run.log(loss=loss + max(0, 160 - step) / 10 + (step > 205))
            optimizer.step()
    alert, *_ = alerts_of(run.records, [LossSpike()])
    assert alert.step == 206  # step of the first high loss; the value is the highest
    high = run.records[206].loss
    assert alert.value >= high
    assert {float(f"{high:.4g}"), 206} <= {*figures(alert.summary)}
    assert {10, 0.03} <= {*figures(alert.cause)}


@pytest.mark.slow
def test_a_spike_is_not_resolved_while_the_rate_and_the_loss_stay_high() -> None:
    stays = dict.fromkeys(range(205, 500), 0.5)
    assert [alert.stage for alert in train(LossSpike(), 500, **rates(stays))] == ["started"]
    ends = with_returns(rates(dict.fromkeys(range(205, 300), 0.5)), [204], after=96)
    assert [alert.stage for alert in train(LossSpike(), 400, **ends)] == ["started", "resolved"]


@pytest.mark.slow
def test_five_spikes_of_a_run_that_returns_to_its_checkpoint_are_five_alerts() -> None:
    at = range(150, 650, 100)
    settings = rates({step + i: 0.9 for step in at for i in range(3)})
    alerts = train(LossSpike(), 650, every=100, **with_returns(settings, at, after=20))
    assert [alert.stage for alert in alerts] == ["started", "resolved"] * 5
    assert [alert.step // 50 * 50 for alert in alerts[::2]] == list(at)
    assert all(0.9 in figures(alert.cause) for alert in alerts[::2])


@pytest.mark.slow
def test_one_batch_in_another_unit_is_reported_when_the_next_is_usual() -> None:
    def batch(step: int) -> Batch:
        points, classes = draw()
        return (points * 3e4, classes) if step == 220 else (points, classes)

    settings = rates({}, usual=1e-3)
    begin, end = train(LossSpike(), 300, batch=batch, **settings)
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

    alerts = train(LossSpike(), at + 10, weight=weight, **rates({}, usual=1e-4))
    assert [alert.stage for alert in alerts] == ["started", "resolved"] * is_spike


@pytest.mark.slow
def test_batches_as_rare_and_as_high_as_an_earlier_one_are_reported_once() -> None:
    settings = rates({}, usual=1e-4)
    alerts = train(
        LossSpike(), 600, weight=lambda step: 1e3 if step in (220, 341, 463) else 1.0, **settings
    )
    assert [(alert.step, alert.stage) for alert in alerts] == [(220, "started"), (221, "resolved")]


@pytest.mark.slow
def test_random_classes_are_noted_though_the_loss_was_as_high_before() -> None:
    def batch(step: int) -> Batch:
        points, classes = draw()
        return points, torch.randint(3, classes.shape) if step >= 110 else classes

    [alert] = train(LossSpike(), 150, batch=batch, **rates({}, usual=1e-3))
    assert (alert.step, alert.severity) == (110, "note")


def shifted(step: int) -> Batch:
    points, classes = draw()
    return points, (classes + (step >= 200)) % 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [{"batch": shifted}, {"weight": lambda step: 3e3 if step >= 200 else 1.0}],
    ids=["other data", "another weight"],
)
@pytest.mark.parametrize("logs_after", [False, True])
def test_other_data_and_another_weight_of_the_loss_are_noted(
    changed: dict[str, Any], logs_after: bool
) -> None:
    [alert] = train(LossSpike(), 300, logs_after=logs_after, **changed, **rates({}))
    assert (alert.step, alert.severity) == (200 + logs_after, "note")
    assert "Something else changed" in (alert.cause or "")


def test_no_flight_file_is_written_for_a_note(tmp_path: Path) -> None:
    settings = rates({})
    model, optimizer = settings["model"], settings["optimizer"]
    torch.manual_seed(1)
    with HookLogger(model, tmp_path, alerts=[LossSpike()]) as logger:
        for step in range(210):
            points, classes = shifted(step)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(points), classes)
            loss.backward()
            logger.log(loss=loss)
            optimizer.step()
    assert [alert.severity for alert in logger.alerts] == ["note"]
    assert list(tmp_path.glob("flight-*.json")) == []


@pytest.mark.slow
def test_a_warm_restart_is_not_a_spike() -> None:
    restarts = {step: 0.03 * (1 - step % 60 / 60) for step in range(300)}
    assert train(LossSpike(), 300, **rates(restarts)) == []


@pytest.mark.parametrize(("less", "severity"), [(0.0, "warning"), (0.3, "note")])
def test_gradients_that_left_their_baseline_before_the_loss_are_the_cause(
    less: float, severity: str
) -> None:
    model, torch_seed = net(), 4
    optimizer = Adam(model.parameters(), 3e-3)
    torch.manual_seed(torch_seed)
    with capture_run(model, every_n_steps=100, rules=[]) as run:
        for step in range(260):
            points, classes = draw()
            optimizer.zero_grad()
            if step >= 200:  # weights grow on their own: gradients first, then the loss
                with torch.no_grad():
                    model[3].weight.mul_(1.6)
            loss = torch.nn.functional.cross_entropy(model(points), classes)
            loss.backward()
            run.log(loss=(loss if step < 204 or step > 240 else loss + 50) - less)
            optimizer.step()
    [alert, *_] = alerts_of(run.records, [LossSpike()])
    assert (alert.step, alert.severity) == (204, severity)  # a loss around 0 may rise
    assert figures(alert.cause) == [3]  # steps before the loss


def test_a_spike_after_smaller_gradients_is_a_note() -> None:
    model = net()
    optimizer = Adam(model.parameters(), 3e-3)
    torch.manual_seed(4)
    with capture_run(model, every_n_steps=100, rules=[]) as run:
        for step in range(230):
            points, classes = draw()
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(points), classes)
            (loss * 1e-4 if step >= 198 else loss).backward()
            run.log(loss=loss if step < 204 else loss + 50)
            optimizer.step()
    [alert] = alerts_of(run.records, [LossSpike()])
    assert (alert.step, alert.severity) == (204, "note")


def test_a_restored_detector_finds_a_spike_with_its_cause() -> None:
    high = {205: 0.9, 206: 0.9, 207: 0.9}
    settings = rates(high)
    model, optimizer, before = settings["model"], settings["optimizer"], settings["before"]
    with capture_run(model, every_n_steps=100, rules=[]) as run:
        for step in range(230):
            before(step)
            points, classes = draw()
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(points), classes)
            loss.backward()
            run.log(loss=loss)
            optimizer.step()
    first, second = Engine([LossSpike()]), Engine([LossSpike()])
    assert alerts_of(run.records[:206], [first]) == []
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    [alert, *_] = alerts_of(run.records[206:], [second])
    assert 300 in figures(alert.cause)


@pytest.mark.slow
def test_a_spike_writes_a_flight_file_and_names_the_onsets_of_the_page(tmp_path: Any) -> None:
    settings = rates({150: 0.9, 151: 0.9, 152: 0.9})
    model, optimizer, before = settings["model"], settings["optimizer"], settings["before"]
    torch.manual_seed(1)
    with HookLogger(model, tmp_path, every_n_steps=50, images=False) as logger:
        for step in range(170):
            before(step)
            points, classes = draw()
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(points), classes)
            loss.backward()
            logger.log(loss=loss)
            optimizer.step()
    [spike] = [alert for alert in logger.alerts if alert.severity != "note"]
    assert (spike.kind, spike.severity) == ("loss_spike", "warning")
    assert len(list(tmp_path.glob("flight-*.json"))) == 1
    logger.close()
    movers = open_run(tmp_path).onsets_by(spike.step)  # as on the page
    assert movers
    named = ", ".join(
        f"{called(m.name)} ({m.factor:.3g}x above usual at step {m.step})" for m in movers
    )
    assert spike.summary.endswith(f": {named}")


def bursts(*steps: range) -> Callable[[int], Batch]:
    """Return batches whose targets belong to other points at these steps."""
    other = frozenset(step for some in steps for step in some)

    def batch(step: int) -> Batch:
        points, classes = draw()
        return points, (classes + 1) % 3 if step in other else classes

    return batch


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 100])
def test_some_batches_of_other_data_are_noted_with_their_steps(every: int) -> None:
    (note,) = train(LossBurst(), 250, every=every, batch=bursts(range(173, 183)), **slow())
    assert (note.severity, note.step) == ("note", 173)
    assert {173, 182} <= {*figures(note.summary)}


@pytest.mark.slow
def test_two_bursts_close_together_are_noted_as_one() -> None:
    (note,) = train(LossBurst(), 250, batch=bursts(range(173, 180), range(183, 187)), **slow())
    assert note.step == 173
    assert {173, 186} <= {*figures(note.summary)}


@pytest.mark.slow
def test_permanent_changes_and_single_batches_are_no_bursts_and_repeats_are_noted_twice() -> None:
    assert train(LossBurst(), 250, batch=bursts(range(173, 250)), **slow()) == []
    hard = bursts(*(range(step, step + 1) for step in range(120, 300, 15)))
    assert train(LossBurst(), 300, batch=hard, **slow()) == []
    again = bursts(*(range(step, step + 4) for step in range(150, 330, 40)))
    assert len(train(LossBurst(), 340, batch=again, **slow())) == 2


def slow() -> dict[str, Any]:
    """Return a trained model and a learning rate at which other data hardly change it."""
    model = net()
    train(LossBurst(), 150, model=model)
    return {"model": model, "optimizer": SGD(model.parameters(), 1e-4)}
