"""Title and message of an alert, composed of its fields."""

from __future__ import annotations

from dataclasses import replace

from telemetry.alert import Alert, Consequence, located
from telemetry.records import Layout, Module
from telemetry.records.batches import Batch
from telemetry.records.step import CodeLocation

ALERT = Alert(
    kind="dead_units", severity="warning", step=7, module_name="fc1", value=0.9, threshold=0.5,
    summary="90% of its units are zero",
)  # fmt: skip
CODE = CodeLocation(file="nets.py", line=12, class_name="Net")


def test_the_title_has_kind_module_stage_and_step() -> None:
    assert ALERT.title == "dead_units in fc1 at step 7"
    assert replace(ALERT, stage="escalated").title == "dead_units in fc1 escalated at step 7"
    assert replace(ALERT, module_name=None).title == "dead_units at step 7"


def test_the_message_has_a_line_for_each_known_field() -> None:
    assert ALERT.message == "90% of its units are zero."
    full = replace(
        ALERT,
        cause="Their biases are negative",
        location=CODE,
        consequences=(
            Consequence(kind="no_learning"),
            Consequence(kind="nonfinite", module_name="fc2"),
        ),
        batches=(Batch(step=6, ids=(3,)), Batch(step=7), *[Batch(step=8, ids=(1,))] * 9),
        advice=("Lower the learning rate", "Is it frozen?"),
    )
    code, consequences, batch, *rest = full.message.splitlines()[1:]
    assert full.message.splitlines()[0] == "90% of its units are zero. Their biases are negative."
    assert (code, consequences) == (f"Code: {CODE}", "Consequences: no learning, nonfinite in fc2.")
    assert batch == "Batch of step 6: 3."
    assert rest == ["Batch of step 8: 1."] * 4 + ["Lower the learning rate. Is it frozen?"]


def test_an_alert_of_a_module_gets_the_location_of_its_call() -> None:
    modules = (
        Module(name="fc1", type_name="Linear", user_code=CODE),
        Module(name="fc2", type_name="Linear"),
    )
    layout = Layout(modules=modules, parameters=())
    assert located(ALERT, layout).location == CODE
    for alert in (
        replace(ALERT, stage="resolved"),
        replace(ALERT, module_name="fc2"),
        replace(ALERT, module_name="gone"),
        replace(ALERT, module_name=None),
    ):
        assert located(alert, layout) == alert
    assert located(ALERT, None) == ALERT
