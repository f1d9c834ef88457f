"""Of the faults that follow from each other the first is reported, with the others listed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from small_runs import net, train
from torch.optim import SGD

from telemetry.alert import Alert, Severity, Stage
from telemetry.alerts.causes import OneCause
from telemetry.alerts.configuration import _RULES, rules_from
from telemetry.alerts.loss_divergence import LossDivergence
from telemetry.alerts.units import DeadUnits
from telemetry.records import Layout, StepRecord
from telemetry.rule import as_rule


def record(step: int) -> StepRecord:
    nothing = np.zeros(0)
    return StepRecord(
        step=step,
        wall_time=0.0,
        layout=Layout(modules=(), parameters=()),
        grad_norms=nothing,
        grad_present=nothing.astype(bool),
        grad_finite=nothing.astype(bool),
    )


def alert(kind: str, step: int, stage: Stage = "begin", severity: Severity = "error") -> Alert:
    return Alert(
        kind=kind,
        severity=severity,
        step=step,
        module_name=None,
        value=1.0,
        threshold=0.0,
        message="Seen.\nAdvice.",
        stage=stage,
    )


def reported(*found: Alert) -> list[tuple[int, str, str]]:
    def script(record: StepRecord) -> Iterable[Alert]:
        return [alert for alert in found if alert.step == record.step]

    one_cause = OneCause([as_rule(script)])
    alerts = [alert for step in range(100) for alert in one_cause(record(step))]
    return [(alert.step, alert.stage, alert.kind) for alert in alerts]


@pytest.mark.parametrize("state", ["dead_units", "nonfinite"])
@pytest.mark.parametrize("severity", ["warning", "error"])
def test_a_state_is_told_though_its_cause_is_as_severe(state: str, severity: Severity) -> None:
    cause = alert("loss_spike", 5, severity=severity)
    seen = f"{state} is 7 of 9."
    found = replace(alert(state, 77, severity=severity), value=7.0, threshold=9.0)
    found = replace(found, message=f"{seen}\nOther advice.")
    by_step = {5: [cause], 77: [found], 78: [replace(found, step=78)]}
    one_cause = OneCause([as_rule(lambda record: by_step.get(record.step, []))])
    [_, worse] = [alert for step in range(90) for alert in one_cause(record(step))]
    assert (worse.kind, worse.step, worse.stage) == ("loss_spike", 77, "worse")
    assert (worse.value, worse.threshold, worse.severity) == (7.0, 9.0, severity)
    told = f"{seen} It follows from the loss spike of step 5."
    listed = f"It leads to: {state.replace('_', ' ')}."
    assert worse.message.split("\n") == [told, listed, "Advice."]


@pytest.mark.parametrize("gradient_is_left", [False, True])
def test_dead_units_become_an_error_in_the_end(gradient_is_left: bool) -> None:
    model = net()
    _, bias, *head = model.parameters()
    optimizer = SGD(model.parameters(), 0.1)

    def silence(step: int) -> None:
        if step == 150:
            bias.data[1:] = -999.0
        elif step == 160:
            bias.data[0] = -999.0
            for parameter in head:
                parameter.requires_grad_(gradient_is_left)

    found = train(DeadUnits(), 200, model=model, optimizer=optimizer, before=silence, every=1)
    assert [(a.severity, a.stage) for a in found] == [("warning", "begin"), ("error", "worse")]
    seen = "32 of 32 units of 0 are zero for every input of 2 batches"
    assert (seen in found[-1].message) == gradient_is_left  # else at once, whatever units are left


def test_a_consequence_is_not_reported() -> None:
    assert reported(alert("loss_divergence", 5), alert("exploding_gradient", 7)) == [
        (5, "begin", "loss_divergence")
    ]


@pytest.mark.parametrize("state", ["dead_units", "saturated_units", "nonfinite"])
def test_a_lasting_state_is_reported_when_its_cause_is_over(state: str) -> None:
    cause, over = alert("loss_divergence", 5), alert("loss_divergence", 30, "end")
    assert reported(cause, alert(state, 7), over) == [
        (5, "begin", "loss_divergence"),
        (7, "worse", "loss_divergence"),
        (30, "end", "loss_divergence"),
        (30, "begin", state),
    ]


@pytest.mark.parametrize(("place", "told"), [("image", False), ("images", True), ("head", True)])
def test_a_layer_without_a_gradient_is_told_once(place: str, told: bool) -> None:
    first = replace(alert("vanishing_gradient", 20), module_name="image.0")
    later = replace(alert("untrained_parameters", 89), module_name=place)
    found = [kind for _, _, kind in reported(first, later)]
    assert found == ["vanishing_gradient"] + ["untrained_parameters"] * told


def test_an_explosion_passes_with_its_cause() -> None:
    cause, over = alert("loss_divergence", 5), alert("loss_divergence", 30, "end")
    later = alert("exploding_gradient", 60, "end")
    assert reported(cause, alert("exploding_gradient", 7), over, later) == [
        (5, "begin", "loss_divergence"),
        (30, "end", "loss_divergence"),
    ]


def test_a_consequence_names_its_module_as_it_is_called() -> None:
    cause = alert("exploding_gradient", 0)
    consequence = replace(alert("dead_units", 0), module_name="my_layer", severity="warning")
    [found] = OneCause([as_rule(lambda record: [cause, consequence])])(record(0))
    assert found.consequences == ("dead_units in my_layer",)
    assert "\nIt leads to: dead units in my_layer.\n" in found.message


def test_all_consequences_of_one_step_are_listed_when_it_grows_worse() -> None:
    found = [
        alert("loss_divergence", 5, severity="warning"),
        alert("exploding_gradient", 7),
        alert("nonfinite", 7),
    ]
    one_cause = OneCause([as_rule(lambda record: [a for a in found if a.step == record.step])])
    [_, worse] = [alert for step in range(10) for alert in one_cause(record(step))]
    assert worse.stage == "worse"
    assert worse.consequences == ("exploding_gradient", "nonfinite")
    assert "exploding gradient, nonfinite" in worse.message


def test_an_explosion_is_no_consequence_of_a_loss_that_jumped_without_the_learning_rate() -> None:
    spike = alert("loss_spike", 5, severity="warning")
    found = reported(spike, alert("exploding_gradient", 9))
    assert [kind for _, _, kind in found] == ["loss_spike", "exploding_gradient"]


@pytest.mark.parametrize("jump", [1.0, 300.0])
def test_units_that_died_between_two_measurements_died_when_the_rate_jumped(jump: float) -> None:
    model = net()
    optimizer = SGD(model.parameters(), 0.1)

    def kill(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 * (jump if step == 33 else 1.0)
        if step == 33:
            model[0].bias.data.fill_(-999.0)

    others = {name: None for name in _RULES if name not in {"dead_units", "vanishing_gradient"}}
    [rule] = rules_from(others)
    [alert] = train(rule, 60, model=model, optimizer=optimizer, before=kill, every=100)
    assert (alert.kind, alert.step) == ("dead_units", 37)  # measured twice
    assert (", 4 steps after the learning rate had jumped to 30." in alert.message) == (jump > 1)


@pytest.mark.parametrize(("after", "said"), [(0, True), (20, True), (21, False)])
def test_a_jump_of_the_learning_rate_is_to_blame_for_what_follows(after: int, said: bool) -> None:
    fault = alert("dead_units", 10 + after)

    def script(record: StepRecord) -> Iterable[Alert]:
        return [fault] if record.step == fault.step else []

    follows = LossDivergence()
    one_cause = OneCause([follows, as_rule(script)], course=follows.course)
    steps = [replace(record(s), learning_rates=(0.1 if s < 10 else 5.0,)) for s in range(60)]
    [found] = [found for step in steps for found in one_cause(step)]
    seen, advice = found.message.split("\n")
    assert ("after the learning rate had jumped to 5." in seen) == said
    assert ("limit what a schedule can return" in advice) == said
