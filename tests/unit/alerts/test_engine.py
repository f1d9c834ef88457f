"""Root causes are reported, and their consequences are listed and suppressed."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from telemetry import Alert, Baseline, Detector, HookLogger, StepRecord
from telemetry.testing import alerts_of
from tests.helpers.figures import figures
from tests.helpers.interrupted_runs import RUNS
from tests.helpers.interrupted_runs import train as train_interrupted
from tests.helpers.rules import KINDS, combined, default_rule, differences, rule
from tests.helpers.scripted import Scripted, at, finding, record
from tests.helpers.small_runs import net, train


def cause(*steps: int, **others: Any) -> Scripted:
    """Return a fault that explains others: an error at these steps."""
    return Scripted(at(*steps), **{"kind": "cause", "severity": "error", **others})


def effect(*steps: int, kind: str = "effect", clear_after: int = 99, **others: Any) -> Scripted:
    """Return a fault that may follow from it; it clears after 99 evaluations by default."""
    others = {"severity": "error", "explained_by": {"cause"}, **others}
    return Scripted(at(*steps), kind=kind, clear_after=clear_after, **others)


def alerts_from(*detectors: Detector, steps: int = 100) -> list[Alert]:
    return alerts_of(map(record, range(steps)), [combined(*detectors)])


def started(alerts: Iterable[Alert]) -> list[str]:
    return [alert.kind for alert in alerts if alert.stage == "started"]


def consequences(alert: Alert) -> list[tuple[str, str | None]]:
    return [(each.kind, each.module_name) for each in alert.consequences]


# --- causes and consequences ---------------------------------------------------------------------

LONG, UNTIL_30 = range(5, 100), range(5, 30)
BEGIN, END, WORSE = (5, "started", "cause"), (30, "resolved", "cause"), (7, "escalated", "cause")
BEFORE = at(3, severity="warning") | at(7, severity="error")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (cause(*LONG), effect(7), [BEGIN]),
        (cause(*LONG), effect(7, explained_by={"another"}), [BEGIN, (7, "started", "effect")]),
        (effect(5), cause(*LONG), [BEGIN]),
        (cause(*LONG), Scripted(BEFORE, kind="effect", explained_by={"cause"}, clear_after=99),
         [(3, "started", "effect"), BEGIN, (7, "escalated", "effect")]),
        # Persistent faults escalate the cause unless they are notes, and may outlast it.
        (cause(*LONG), effect(7, severity="note", persistent=True), [BEGIN]),
        (cause(*UNTIL_30), effect(7, persistent=True),
         [BEGIN, WORSE, END, (30, "started", "effect")]),
        # It starts then, though it had become an error before.
        (cause(*UNTIL_30),
         Scripted(at(7, severity="warning") | at(9, severity="error"), kind="effect",
                  explained_by={"cause"}, persistent=True, clear_after=99),
         [BEGIN, WORSE, END, (30, "started", "effect")]),
        (cause(*UNTIL_30), effect(7, persistent=True, clear_after=3), [BEGIN, WORSE, END]),
        (cause(*UNTIL_30), effect(7, clear_after=53), [BEGIN, END]),
        # A note suppresses only notes.
        (cause(*LONG, severity="note"), effect(7), [BEGIN, (7, "started", "effect")]),
        (cause(*LONG, severity="note"), effect(7, severity="note"), [BEGIN]),
    ],
)  # fmt: skip
def test_a_fault_is_reported_unless_an_earlier_one_explains_it(
    first: Detector, second: Detector, expected: list[tuple[int, str, str]]
) -> None:
    found = alerts_from(first, second, steps=90)
    assert [(alert.step, alert.stage, alert.kind) for alert in found] == expected


def test_a_suppressed_symptom_is_listed() -> None:
    follower = Scripted(at(5, module_name="my_layer"), kind="my_kind", explained_by={"cause"})
    [other, found] = alerts_from(
        effect(5, explained_by=frozenset()), cause(*LONG), follower, steps=6
    )
    assert other.consequences == ()
    assert consequences(found) == [("my_kind", "my_layer")]
    assert found.message == "Seen.\nConsequences: my kind in my_layer.\nAdvice."


@pytest.mark.parametrize(
    ("steps", "reported"),
    [([205], []), ([206], ["effect_206"]), ([180, 350], [])],  # 170 after the last consequence
)
def test_a_cause_suppresses_symptoms_within_200_steps_of_it_or_of_its_last_consequence(
    steps: list[int], reported: list[str]
) -> None:
    effects = [effect(step, kind=f"effect_{step}") for step in steps]
    found = alerts_from(cause(*range(5, 400)), *effects, steps=400)
    assert started(found) == ["cause", *reported]


def test_the_earliest_of_several_causes_is_the_root_cause() -> None:
    first = cause(*range(5, 50), severity="warning")
    later = cause(*range(6, 50), severity="warning", kind="later")
    found = alerts_from(later, first, effect(7, explained_by={"cause", "later"}))
    [worse] = [alert for alert in found if alert.stage == "escalated"]
    assert (worse.kind, consequences(worse)) == ("cause", [("effect", None)])


@pytest.mark.parametrize("severity", ["warning", "error"])
def test_a_persistent_symptom_escalates_a_cause_of_the_same_severity(severity: str) -> None:
    seen = finding(summary="7 of 9 units", value=7.0, threshold=9.0, advice=("Other advice",))
    second = Scripted(
        {77: seen, 78: seen}, kind="my_kind", severity=severity, explained_by={"cause"},
        persistent=True, clear_after=99,
    )  # fmt: skip
    [_, worse] = alerts_from(cause(*LONG, severity=severity), second, steps=90)
    assert (worse.kind, worse.step, worse.stage) == ("cause", 77, "escalated")
    assert (worse.value, worse.threshold, worse.severity) == (7.0, 9.0, severity)
    assert consequences(worse) == [("my_kind", None)]
    assert (worse.summary, worse.measured_at, worse.added) == ("Seen", 5, "7 of 9 units")
    assert worse.message.startswith("Since step 77: 7 of 9 units.\nSeen (measured at step 5).")
    assert worse.news == "7 of 9 units."
    assert worse.advice == ("Advice",)


def test_a_warning_that_leads_to_an_error_escalates_once_with_all_consequences() -> None:
    second = Scripted(
        at(7, summary="And"), kind="my_effect", explained_by={"cause"}, persistent=True
    )
    [_, worse] = alerts_from(cause(*LONG, severity="warning"), effect(7), second, steps=8)
    assert (worse.stage, worse.severity, worse.step) == ("escalated", "error", 7)
    assert consequences(worse) == [("effect", None), ("my_effect", None)]
    assert (worse.summary, worse.measured_at, worse.added) == ("Seen", 5, "Seen; And")
    assert worse.title == "cause, then my effect at step 7"


def test_a_symptom_that_outlasts_its_cause_names_the_step_of_its_measurement() -> None:
    *_, last = alerts_from(cause(*range(5, 30)), effect(7, persistent=True), steps=50)
    assert (last.step, last.measured_at, last.cause) == (30, 7, None)
    assert figures(last.message) == [7]


@pytest.mark.parametrize(
    ("name", "is_reported"), [("image", False), ("images", True), ("head", True)]
)
def test_a_vanishing_gradient_suppresses_untrained_parameters_of_its_parent_module_alone(
    name: str, is_reported: bool
) -> None:
    first = Scripted(at(20, module_name="image.0"), kind="vanishing_gradient", clear_after=99)
    later = Scripted(
        at(89, module_name=name, momentary=True), kind="untrained_parameters",
        explained_by={"vanishing_gradient"},
    )  # fmt: skip
    found = started(alerts_from(first, later))
    assert found == ["vanishing_gradient"] + ["untrained_parameters"] * is_reported


# --- jumps of the learning rate ------------------------------------------------------------------


def with_jump(at_step: int, steps: int = 60) -> list[StepRecord]:
    rates = [0.1 if step < at_step else 5.0 for step in range(steps)]
    return [record(step, learning_rates=(rate,)) for step, rate in enumerate(rates)]


@pytest.mark.parametrize("jump", [14, 99])
def test_a_loss_spike_suppresses_an_explosion_only_after_a_jump_of_the_learning_rate(
    jump: int,
) -> None:
    spike = Scripted(at(*range(15, 60)), kind="loss_spike")
    explosion = Scripted(at(19), kind="exploding_gradient", explained_by={"loss_spike"})
    found = started(alerts_of(with_jump(jump), [combined(spike, explosion)]))
    assert found == ["loss_spike"] + ["exploding_gradient"] * (jump == 99)


@pytest.mark.parametrize(
    ("after", "explained_by_rate_jump", "named"),
    [(0, True, True), (20, True, True), (21, True, False), (0, False, False)],
)
def test_a_jump_of_the_learning_rate_is_the_cause_of_faults_within_20_steps(
    after: int, explained_by_rate_jump: bool, named: bool
) -> None:
    fault = Scripted(
        at(10 + after, advice=("a", "b")), explained_by_rate_jump=explained_by_rate_jump
    )
    found, *_ = alerts_of(with_jump(10), [combined(fault)])
    assert figures(found.cause) == [5, 10] * named
    assert (found.advice == ("a", "b")) == (not named)
    assert ("schedule" in found.advice[0]) == named


@pytest.mark.parametrize("jump", [1.0, 300.0])
def test_a_jump_of_the_rate_is_the_cause_of_units_that_died_between_two_measurements(
    jump: float,
) -> None:
    model = net()
    optimizer = SGD(model.parameters(), 0.1)

    def kill(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 * (jump if step == 33 else 1.0)
        if step == 33:
            model[0].bias.data.fill_(-999.0)

    both = combined(rule("dead_units"), rule("vanishing_gradient"))
    [alert] = train(both, 50, model=model, optimizer=optimizer, before=kill, every=100)
    assert (alert.kind, alert.step) == ("dead_units", 38)  # measured twice
    assert (figures(alert.cause) == [30, 33]) == (jump > 1)


# --- requests of full steps ----------------------------------------------------------------------


class Needs(Scripted):
    """Detector that needs full steps after these steps."""

    def __init__(self, steps: Iterable[int], **others: Any) -> None:
        super().__init__({}, **others)
        self.steps = steps

    def find(self, record: StepRecord, baseline: Baseline) -> None:
        self.needs_full_step = record.step in self.steps


def test_the_engine_requests_as_many_full_steps_as_a_detector_needs() -> None:
    several = Needs({3, 4}, kind="several", full_steps_in_a_row=3)
    engine, found = combined(Needs({4, 5}), several), []
    for step in range(8):
        alerts_of([record(step)], [engine])
        found.append(engine.full_steps_needed if engine.requests_full_step else 0)
    assert found == [0, 0, 0, 3, 3, 1, 0, 0]


# --- failures ------------------------------------------------------------------------------------


class Broken(Detector):
    kind = "broken"

    def find(self, record: StepRecord, baseline: object) -> None:
        raise RuntimeError("planted in find")

    def find_in_loss(self, step: int, loss: float) -> None:
        raise RuntimeError("planted in find_in_loss")


class InLoss(Detector):
    kind = "in_loss"

    def find_in_loss(self, step: int, loss: float) -> Any:
        return finding()


def test_a_detector_that_raises_does_not_stop_the_others() -> None:
    engine, found = combined(Broken(), cause(0), InLoss()), list[Alert]()
    with pytest.raises(RuntimeError, match=r"planted in find$"):
        found.extend(engine(record(0)))
    with pytest.raises(RuntimeError, match="planted in find_in_loss"):
        found.extend(engine.on_loss(1, 0.5))
    assert engine.failed == "broken"
    assert [alert.kind for alert in found] == ["cause", "in_loss"]


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_restored_default_rules_remember_all_that_the_saved_ones_do(
    tmp_path: Path, name: str
) -> None:
    used, found = default_rule(), set[str]()

    def compare(record: StepRecord) -> Iterable[Alert]:
        if record.step % 10 == 5:
            restored = default_rule()
            restored.load_state_dict(json.loads(json.dumps(used.state_dict())))
            found.update(differences(restored, used))
        return ()

    def of_any_machine(record: StepRecord) -> Iterable[Alert]:
        # Times and memory are those of a machine, and a resumed run may be on another one.
        return used(replace(record, usage={}))

    train_interrupted(RUNS[name], tmp_path, rules=[of_any_machine, compare])
    assert used.state_dict()["baseline"]["age"] == 69
    assert found == set()


def test_each_incompatible_part_of_a_state_is_reported() -> None:
    state = default_rule().state_dict()
    state["dead_units"]["unknown"] = state["baseline"].pop("norm")
    del state["eval_mode"]
    state["of_another"] = {}
    with pytest.raises(ValueError, match="resets") as raised:
        default_rule().load_state_dict(state)
    problems = {"baseline resets", "eval_mode resets", "there is no rule of_another"}
    assert set(str(raised.value).split(", ")) == problems


# --- configuration -------------------------------------------------------------------------------


def test_causes_of_default_kinds_are_default_kinds_and_four_kinds_persist() -> None:
    detectors = [rule(kind) for kind in KINDS]
    assert all(detector.explained_by <= {*KINDS} for detector in detectors)
    persistent = {detector.kind for detector in detectors if detector.persistent}
    assert persistent == {"saturated_units", "dead_units", "vanishing_gradient", "nonfinite"}


def test_the_repr_lists_all_kinds_causes_first() -> None:
    settings = {"scripted": Scripted({}, explained_by={"dead_units"}), "loss_spike": None}
    name, *listed = re.findall(r"\w+", repr(default_rule(settings)))
    assert (name, {*listed}) == ("default_rules", {*KINDS, "scripted"} - {"loss_spike"})
    assert listed.index("dead_units") < listed.index("scripted")


def test_a_custom_detector_replaces_the_one_of_its_kind_and_is_suppressed_by_its_cause() -> None:
    mine = Scripted(at(7), explained_by={"eval_mode"})
    first = Scripted(at(*range(5, 40)), kind="eval_mode")
    settings = {"scripted": mine, "eval_mode": first}
    assert started(alerts_of(map(record, range(9)), [default_rule(settings)])) == ["eval_mode"]


def test_users_set_limits_and_severity_of_a_default_kind() -> None:
    rates = [0.1] * 30 + [0.0] * 40
    records = [record(step, learning_rates=(rate,)) for step, rate in enumerate(rates)]
    settings = {"learning_rate_zero": {"steps": 5, "severity": "error"}}
    for config, step, severity in ((settings, 34, "error"), ({}, 49, "warning")):
        [found] = alerts_of(records, [default_rule(config)])
        assert (found.kind, found.step, found.severity) == ("learning_rate_zero", step, severity)
    assert alerts_of(records, [default_rule({"learning_rate_zero": None})]) == []
    default_rule({"dead_units": {"fraction": 1}})  # the largest share


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"another": Scripted({})}, ValueError, r"'another': Scripted\(\)}\): its kind is 'scrip"),
        ({"eval_mode": Scripted({})}, ValueError, "its kind is 'scripted'; that has to be the key"),
        ({"scripted": Scripted}, TypeError, r"is a class; pass an instance: Scripted\(\)"),
        ({"dead_unit": None}, ValueError, "no rule has this name; .*dead_units"),
        ({"dead_units": {"fractoin": 0.5}}, ValueError, "no parameter has this name; .*fraction"),
        ({"dead_units": {"fraction": "half"}}, TypeError, "must be a number"),
        ({"dead_units": {"fraction": 0}}, ValueError, "must be above 0"),
        ({"dead_units": {"fraction": 8}}, ValueError, "'fraction': 8.*must be at most 1"),
        ({"untrained_parameters": {"share": 1.1}}, ValueError, "share.*must be at most 1"),
        ({"dead_units": {"severity": "fatal"}}, ValueError, "must be one of note, warning, error"),
        ({"dead_units": 0.5}, TypeError, "must be a dict of parameters, a Detector"),
    ],
)
def test_an_invalid_configuration_is_refused(
    tmp_path: Path, config: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        HookLogger(net(), tmp_path, alerts=config)


# --- cost ----------------------------------------------------------------------------------------


def calls_of_a_full_step(blocks: int) -> int:
    """Return the Python calls with which all rules judge the eighth full step of a model."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(blocks)]
    engine, calls = default_rule(), [0]

    def count(frame: Any, event: str, argument: Any) -> None:
        calls[-1] += event == "call"

    def judge(record: StepRecord) -> list[Alert]:
        calls.append(0)
        sys.setprofile(count)
        try:
            return list(engine(record))
        finally:
            sys.setprofile(None)

    train(judge, 8, model=nn.Sequential(*layers, nn.Linear(8, 3)), every=1)
    return calls[-1]


def test_the_calls_of_a_full_step_do_not_grow_with_the_layers() -> None:
    few, many = map(calls_of_a_full_step, (3, 30))
    assert many < few + 120  # a call or two for each of 108 more modules would be more
