"""Root causes are reported, and their consequences are listed and suppressed."""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from telemetry import Alert, Baseline, Detector, StepRecord
from telemetry.alert import Consequence, Severity
from telemetry.alerts import default_rules, rules_from
from telemetry.alerts.configuration import DETECTORS
from telemetry.alerts.detector import RATE_ADVICE
from telemetry.alerts.engine import Engine
from telemetry.testing import alerts_of, capture_run
from tests.helpers.figures import figures
from tests.helpers.interrupted_runs import RUNS
from tests.helpers.interrupted_runs import train as train_interrupted
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
    return alerts_of(map(record, range(steps)), [Engine(detectors)])


def reported(*detectors: Detector, steps: int = 100) -> list[tuple[int, str, str]]:
    return [(a.step, a.stage, a.kind) for a in alerts_from(*detectors, steps=steps)]


# --- causes and consequences ---------------------------------------------------------------------


def test_a_suppressed_symptom_is_listed_and_not_reported() -> None:
    both = effect(5, module_name="my_layer"), cause(5)
    follower = Scripted(at(5, module_name="my_layer"), kind="dead_units", explained_by={"cause"})
    [found] = alerts_from(cause(*range(5, 100)), follower, steps=6)
    assert (found.kind, found.consequences) == (
        "cause",
        (Consequence(kind="dead_units", module_name="my_layer"),),
    )
    assert found.message == "Seen.\nConsequences: dead units in my_layer.\nAdvice."
    assert reported(cause(*range(5, 100)), effect(7)) == [(5, "started", "cause")]
    kinds_of_both = [kind for _, _, kind in reported(*both, steps=6)]
    assert kinds_of_both == ["effect", "cause"]  # the effect is evaluated first


def test_a_fault_without_a_cause_is_reported() -> None:
    other = effect(7, explained_by={"another"})
    assert reported(cause(*range(5, 100)), other) == [
        (5, "started", "cause"),
        (7, "started", "effect"),
    ]


@pytest.mark.parametrize(("distance", "suppressed"), [(200, True), (201, False)])
def test_a_cause_suppresses_symptoms_that_start_within_200_steps(
    distance: int, suppressed: bool
) -> None:
    found = reported(cause(*range(5, 300)), effect(5 + distance), steps=300)
    assert [kind for _, _, kind in found] == ["cause"] + ["effect"] * (not suppressed)


def test_a_suppressed_symptom_extends_the_200_steps_of_its_cause() -> None:
    second = effect(350, kind="second")
    found = reported(cause(*range(5, 400)), effect(180), second, steps=400)
    assert [kind for _, _, kind in found] == ["cause"]  # 170 steps after the last consequence


def test_the_earliest_of_several_causes_is_the_root_cause() -> None:
    first = cause(*range(5, 50), severity="warning")
    later = cause(*range(6, 50), severity="warning", kind="later")
    found = alerts_from(later, first, effect(7, explained_by={"cause", "later"}))
    [worse] = [alert for alert in found if alert.stage == "escalated"]
    assert (worse.kind, worse.consequences) == ("cause", (Consequence(kind="effect"),))


@pytest.mark.parametrize("severity", ["warning", "error"])
def test_a_persistent_symptom_escalates_a_cause_of_the_same_severity(severity: Severity) -> None:
    first = cause(*range(5, 100), severity=severity)
    seen = finding(summary="7 of 9 units", value=7.0, threshold=9.0, advice=("Other advice",))
    second = Scripted(
        {77: seen, 78: seen}, kind="dead_units", severity=severity, explained_by={"cause"},
        persistent=True, clear_after=99,
    )  # fmt: skip
    [_, worse] = alerts_from(first, second, steps=90)
    assert (worse.kind, worse.step, worse.stage) == ("cause", 77, "escalated")
    assert (worse.value, worse.threshold, worse.severity) == (7.0, 9.0, severity)
    assert worse.consequences == (Consequence(kind="dead_units"),)
    assert (worse.summary, worse.advice) == ("7 of 9 units", ("Advice",))
    assert figures(worse.cause) == [5]


def test_a_warning_that_leads_to_an_error_escalates_once_with_all_consequences() -> None:
    first = cause(*range(5, 100), severity="warning")
    second = Scripted(
        at(7, summary="And"), kind="my_effect", explained_by={"cause"}, persistent=True
    )
    [_, worse] = alerts_from(first, effect(7), second, steps=8)
    assert (worse.stage, worse.severity, worse.step) == ("escalated", "error", 7)
    assert worse.consequences == (Consequence(kind="effect"), Consequence(kind="my_effect"))
    assert worse.summary == "And; Seen"
    assert figures(worse.cause) == [5]


def test_a_persistent_note_escalates_nothing() -> None:
    note = effect(7, severity="note", persistent=True)
    assert reported(cause(*range(5, 100)), note) == [(5, "started", "cause")]


def test_a_fault_that_started_before_a_cause_is_not_suppressed_by_it() -> None:
    found = at(3, severity="warning") | at(7, severity="error")
    earlier = Scripted(found, kind="effect", explained_by={"cause"}, clear_after=99)
    assert reported(cause(*range(5, 100)), earlier) == [
        (3, "started", "effect"),
        (5, "started", "cause"),
        (7, "escalated", "effect"),
    ]


def test_a_persistent_symptom_is_reported_when_its_cause_resolves() -> None:
    later = effect(7, persistent=True)
    assert reported(cause(*range(5, 30)), later, steps=50) == [
        (5, "started", "cause"),
        (7, "escalated", "cause"),
        (30, "resolved", "cause"),
        (30, "started", "effect"),
    ]
    *_, last = alerts_from(cause(*range(5, 30)), effect(7, persistent=True), steps=50)
    assert (last.step, figures(last.summary), last.cause) == (30, [7], None)


def test_a_symptom_that_resolves_first_is_not_reported() -> None:
    assert reported(cause(*range(5, 30)), effect(7, persistent=True, clear_after=3)) == [
        (5, "started", "cause"),
        (7, "escalated", "cause"),
        (30, "resolved", "cause"),
    ]


def test_a_symptom_that_is_not_persistent_resolves_with_its_cause() -> None:
    assert reported(cause(*range(5, 30)), effect(7, clear_after=53)) == [
        (5, "started", "cause"),
        (30, "resolved", "cause"),
    ]


def test_a_note_suppresses_only_notes() -> None:
    note = cause(*range(5, 100), severity="note")
    assert [kind for _, _, kind in reported(note, effect(7))] == ["cause", "effect"]
    note = cause(*range(5, 100), severity="note")
    assert [kind for _, _, kind in reported(note, effect(7, severity="note"))] == ["cause"]


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
    found = [kind for _, _, kind in reported(first, later)]
    assert found == ["vanishing_gradient"] + ["untrained_parameters"] * is_reported


@pytest.mark.parametrize("jumps", [True, False])
def test_a_loss_spike_suppresses_an_explosion_only_after_a_jump_of_the_learning_rate(
    jumps: bool,
) -> None:
    spike = Scripted(at(*range(15, 60)), kind="loss_spike")
    explosion = Scripted(at(19), kind="exploding_gradient", explained_by={"loss_spike"})
    rates = [5.0 if jumps and step >= 14 else 0.1 for step in range(60)]
    records = [record(step, learning_rates=(rate,)) for step, rate in enumerate(rates)]
    started = [
        a.kind for a in alerts_of(records, [Engine([spike, explosion])]) if a.stage == "started"
    ]
    assert started == ["loss_spike"] + ["exploding_gradient"] * (not jumps)


@pytest.mark.parametrize(("after", "named"), [(0, True), (20, True), (21, False)])
@pytest.mark.parametrize("explained_by_rate_jump", [True, False])
def test_a_jump_of_the_learning_rate_is_the_cause_of_faults_within_20_steps(
    after: int, named: bool, explained_by_rate_jump: bool
) -> None:
    fault = Scripted(
        at(10 + after, advice=("a", "b")), explained_by_rate_jump=explained_by_rate_jump
    )
    records = [record(step, learning_rates=(0.1 if step < 10 else 5.0,)) for step in range(60)]
    found = alerts_of(records, [Engine([fault])])[0]
    if named and explained_by_rate_jump:
        assert figures(found.cause) == [5, 10]
        assert found.advice == RATE_ADVICE
    else:
        assert (found.cause, found.advice) == (None, ("a", "b"))


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

    others = {name: None for name in DETECTORS if name not in {"dead_units", "vanishing_gradient"}}
    [rule] = rules_from(others)
    [alert] = train(rule, 50, model=model, optimizer=optimizer, before=kill, every=100)
    assert (alert.kind, alert.step) == ("dead_units", 38)  # measured twice
    assert (figures(alert.cause) == [30, 33]) == (jump > 1)


def test_users_choose_the_severity_of_a_kind() -> None:
    engine = Engine([cause(5, 6, 7)], severities={"cause": "note"})
    assert [a.severity for a in alerts_of(map(record, range(10)), [engine])] == ["note", "warning"]


def test_causes_of_default_kinds_are_default_kinds_and_four_kinds_persist() -> None:
    [engine] = default_rules()
    detectors = engine._detectors  # type: ignore[attr-defined]
    assert all(detector.explained_by <= {*detectors} for detector in detectors.values())
    persistent = {kind for kind, detector in detectors.items() if detector.persistent}
    assert persistent == {"saturated_units", "dead_units", "vanishing_gradient", "nonfinite"}


# --- requests of full steps ----------------------------------------------------------------------


def requests(*detectors: Detector, steps: int) -> list[int]:
    engine, found = Engine(detectors), []
    for step in range(steps):
        list(engine(record(step)))
        if engine.requests_full_step:
            found.append(step)
    return found


@pytest.mark.parametrize("count", [1, 3])
def test_a_detector_requests_the_full_steps_it_needs_with_exponential_back_off(count: int) -> None:
    eager = Scripted({}, needs_full_step=True, full_steps_in_a_row=count)
    begins = [0, 20, 60, 140]
    assert requests(eager, steps=200) == [step + k for step in begins for k in range(count)]
    assert requests(Scripted({}), steps=40) == []


def test_the_back_off_of_one_detector_does_not_delay_another() -> None:
    eager, late = Scripted({}, needs_full_step=True), Undecided({30, 31}, kind="late")
    assert requests(eager, late, steps=50) == [0, 20, 30]


def test_an_alert_resets_the_back_off() -> None:
    eager, other = Scripted({}, needs_full_step=True), Scripted(at(30), kind="other")
    assert requests(eager, other, steps=55) == [0, 20, 30, 50]


class Undecided(Scripted):
    def __init__(self, steps: set[int], **others: Any) -> None:
        super().__init__({}, **others)
        self.steps = steps

    def find(self, record: StepRecord, baseline: Baseline) -> None:
        self.needs_full_step = record.step in self.steps


def test_an_unconfirmed_finding_requests_a_full_step() -> None:
    detector = Scripted(at(0), on="full", confirm_after=2)
    engine = Engine([detector])
    list(engine(record(0, full=True)))
    assert engine.requests_full_step
    list(engine(record(1)))
    assert not engine.requests_full_step  # requested already


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
    engine = Engine([Broken(), cause(0), InLoss()])
    found: list[Alert] = []
    with pytest.raises(RuntimeError, match=r"planted in find$"):
        found.extend(engine(record(0)))
    with pytest.raises(RuntimeError, match="planted in find_in_loss"):
        found.extend(engine.on_loss(1, 0.5))
    assert [alert.kind for alert in found] == ["cause", "in_loss"]


# --- memory --------------------------------------------------------------------------------------


def several() -> tuple[Detector, ...]:
    """A cause that escalates and resolves, consequences of each kind, one reported later."""
    return (
        cause(*range(5, 30), severity="warning", confirm_after=2),
        effect(7, persistent=True),
        effect(9, 10, 11, kind="passing", clear_after=3),
        effect(50, 51, 70, kind="alone", confirm_after=2, clear_after=4),
        Scripted({}, kind="eager", needs_full_step=True),
    )


@pytest.mark.slow
@pytest.mark.parametrize("cut", range(1, 60, 3))
def test_an_engine_continues_from_its_state(cut: int) -> None:
    records = [record(step, learning_rates=(0.1,)) for step in range(90)]
    before, after, uninterrupted = (Engine(several()) for _ in range(3))
    first = alerts_of(records[:cut], [before])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert first + alerts_of(records[cut:], [after]) == alerts_of(records, [uninterrupted])
    assert repr(after.state_dict()) == repr(uninterrupted.state_dict())


def not_saved(used: object, new: object, path: str) -> set[str]:
    """Return the attributes that differ from a new object's and are not part of the state."""
    hints, found = get_type_hints(type(used)), set()
    for name, value in vars(used).items():
        before = getattr(new, name)
        if name in hints:
            if hasattr(value, "__dict__") and not is_dataclass(value):
                found |= not_saved(value, before, f"{path}.{name}")
        elif isinstance(value, np.ndarray):
            found |= set() if np.array_equal(value, before) else {f"{path}.{name}"}
        elif isinstance(value, int | float | str | bool | dict | list | tuple | deque):
            found |= set() if repr(value) == repr(before) else {f"{path}.{name}"}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_the_state_of_detectors_contains_all_changed_attributes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    [used], [new] = default_rules(), default_rules()
    assert isinstance(used, Engine)
    assert isinstance(new, Engine)
    pairs = [(part, old, new._parts()[part]) for part, old in used._parts().items()]
    found: set[str] = set()

    def compare(record: StepRecord) -> Iterable[Alert]:
        for part, old, fresh in pairs:
            found.update(not_saved(old, fresh, part))
        return ()

    train_interrupted(RUNS[name], tmp_path, rules=[used, compare])
    assert "telemetry failed" not in caplog.text
    # Each of these has an entry in the state.
    parts = {"_detectors", "_of_light_steps", "_of_losses"}
    # Times and memory are those of a machine, and a resumed run may be on another one.
    of_machine = ("input_bound.", "slow_steps.", "memory_growth.")
    found = {name for name in found if not name.startswith(of_machine)}
    assert found <= {f"engine.{part}" for part in parts}
    new.load_state_dict(used.state_dict())
    assert repr(new.state_dict()) == repr(used.state_dict())


def test_each_incompatible_part_of_a_state_is_reported() -> None:
    [rule], [new] = default_rules(), default_rules()
    state = rule.state_dict()
    state["dead_units"]["unknown"] = state["baseline"]["norm"].pop("above_all")
    del state["eval_mode"]
    state["of_another"] = {}
    with pytest.raises(ValueError, match="resets") as raised:
        new.load_state_dict(state)
    assert set(str(raised.value).split(", ")) == {
        "baseline resets",
        "eval_mode resets",
        "there is no rule of_another",
    }


# --- configuration -------------------------------------------------------------------------------


def kinds(config: Mapping[str, Any]) -> list[str]:
    [engine] = rules_from(config)
    assert isinstance(engine, Engine)
    return [*engine._detectors]


def test_a_custom_detector_follows_or_replaces_the_default_ones() -> None:
    mine = Scripted({})
    assert kinds({"scripted": mine}) == [*DETECTORS, "scripted"]
    mine = Scripted({}, kind="dead_units")
    [engine] = rules_from({"dead_units": mine, "loss_spike": None})
    detectors = engine._detectors  # type: ignore[attr-defined]
    assert detectors["dead_units"] is mine
    assert [*detectors] == [kind for kind in DETECTORS if kind != "loss_spike"]


def test_the_repr_of_rules_lists_their_kinds() -> None:
    for config in ({}, {"loss_spike": None}):
        [engine] = rules_from(config)
        assert re.findall(r"\w+", repr(engine)) == ["default_rules", *kinds(config)]


def test_users_set_limits_and_severity_of_a_default_kind() -> None:
    rates = [0.1] * 30 + [0.0] * 40
    records = [record(step, learning_rates=(rate,)) for step, rate in enumerate(rates)]
    settings = {"learning_rate_zero": {"steps": 5, "severity": "error"}}
    for config, step, severity in ((settings, 34, "error"), ({}, 49, "note")):
        [found] = alerts_of(records, rules_from(config))
        assert (found.kind, found.step, found.severity) == ("learning_rate_zero", step, severity)


def test_a_custom_detector_is_suppressed_by_its_cause() -> None:
    mine = Scripted(at(7), explained_by={"eval_mode"})
    first = Scripted(at(*range(5, 40)), kind="eval_mode")
    found = alerts_of(map(record, range(9)), rules_from({"scripted": mine, "eval_mode": first}))
    assert [alert.kind for alert in found] == ["eval_mode"]


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"another": Scripted({})}, ValueError, r"'another': Scripted\(\)}\): its kind is 'scrip"),
        ({"eval_mode": Scripted({})}, ValueError, "its kind is 'scripted'; that has to be the key"),
        ({"scripted": Scripted}, TypeError, r"is a class; pass an instance: Scripted\(\)"),
        ({"scripted": {"x": 1}}, ValueError, "no rule has this name"),
        ({"dead_units": 3}, TypeError, "a dict of parameters, a Detector of this kind, or None"),
        ({"dead_units": {"severity": "bad"}}, ValueError, "must be one of note, warning, error"),
        ({"dead_units": {"fractoin": 0.5}}, ValueError, "no parameter has this name; .*fraction"),
        ({"dead_units": {"fraction": "1"}}, TypeError, "must be a number"),
        ({"dead_units": {"fraction": 0}}, ValueError, "must be above 0"),
    ],
)
def test_an_invalid_configuration_is_refused(
    config: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rules_from(config)


# --- cost ----------------------------------------------------------------------------------------


def _calls_of_a_full_step(blocks: int) -> int:
    """Return the Python calls with which all rules judge the eighth full step of a model."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(blocks)]
    model = nn.Sequential(*layers, nn.Linear(8, 2))
    optimizer, calls = SGD(model.parameters(), lr=0.01), 0
    with capture_run(model, rules=(), optimizer=optimizer) as run:
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.randn(32, 8)).square().mean().backward()
            optimizer.step()

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    [rule] = default_rules()
    for earlier in run.records[:-1]:
        list(rule(earlier))
    sys.setprofile(count)
    try:
        list(rule(run.records[-1]))
    finally:
        sys.setprofile(None)
    return calls


def test_the_calls_of_a_full_step_do_not_grow_with_the_layers() -> None:
    few, many = map(_calls_of_a_full_step, (3, 30))
    assert many < few + 120  # a call or two for each of 108 more modules would be more
