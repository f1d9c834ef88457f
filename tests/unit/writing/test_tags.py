"""Tags of one record."""

from __future__ import annotations

import numpy as np
from tensorboard.util.tensor_util import make_ndarray

from telemetry.alert import Alert
from telemetry.records import Layout, Module, Output, Parameter, StepRecord, TensorRecord
from telemetry.records.sketch import sketch_array
from telemetry.tag_names import plain
from telemetry.writing.tags import alert_value, values_of
from tests.helpers.serialized import joined, parsed, summary_of, tags_of

LAYOUT = Layout(
    modules=(
        Module(name="", type_name="Net"),
        Module(name="lstm", type_name="LSTM"),
        Module(name="out", type_name="Linear"),
    ),
    parameters=(
        Parameter(name="out.weight", module_name="out", shape=(2, 3)),
        Parameter(name="position", module_name="", shape=(4,)),
    ),
)


def tensor(*values: float) -> TensorRecord:
    return TensorRecord(sketch=sketch_array(np.array(values)))


def record(**fields: object) -> StepRecord:
    return StepRecord(
        **{
            "step": 3,
            "wall_time": 0.0,
            "layout": LAYOUT,
            "grad_norms": np.array([3.0, 4.0]),
            "grad_present": np.array([True, True]),
            "grad_finite": np.array([True, True]),
            **fields,
        }
    )


def scalars(step: StepRecord) -> dict[str, float]:
    values = summary_of(joined(values_of(step))).value
    return {v.tag: v.simple_value for v in values if v.WhichOneof("value") == "simple_value"}


def test_a_light_step_has_only_the_total_norm() -> None:
    assert scalars(record()) == {"~run/grad_norm/total": 5.0}


def test_parameters_are_tagged_by_the_index_of_their_module() -> None:
    curves = scalars(record(full=True))
    assert curves["~statistics/grad_norm/0002.out.weight"] == 3.0
    assert curves["~statistics/grad_norm/0000.position"] == 4.0


def test_a_parameter_without_gradient_has_no_point() -> None:
    curves = scalars(record(full=True, grad_present=np.array([True, False])))
    assert "~statistics/grad_norm/0000.position" not in curves


def test_outputs_have_separate_histograms_and_common_curves() -> None:
    outputs = {Output(""): tensor(1.0), Output("lstm"): tensor(2.0), Output("lstm", 1): tensor(3.0)}
    curves = scalars(record(full=True, outputs=outputs))
    assert curves["~statistics/activation_mean/0000.Net"] == 1.0
    assert curves["~statistics/activation_mean/0001.lstm"] == 2.5, "of all outputs"
    tags = tags_of(joined(values_of(record(full=True, outputs=outputs))))
    assert {"~tensors/activation/0001.lstm", "~tensors/activation/0001.lstm[1]"} <= tags


def test_each_tag_has_the_histogram_of_its_own_tensor() -> None:
    """Tensors are measured in another order, and some have no histogram."""
    outputs = {Output("out"): tensor(1.0), Output("lstm"): tensor(np.nan), Output(""): tensor(2.0)}
    grads = {"position": tensor(3.0), "out.weight": tensor(4.0)}
    step = record(full=True, outputs=outputs, output_grads=outputs, grads=grads, weights=grads)
    smallest = {
        value.tag.removeprefix("~tensors/"): make_ndarray(value.tensor)[0, 0]
        for value in summary_of(joined(values_of(step))).value
        if value.tag.startswith("~tensors/") and "log10" not in value.tag
    }
    assert smallest == {
        "activation/0002.out": 1.0,
        "activation/0000.Net": 2.0,
        "activation_grad/0002.out": 1.0,
        "activation_grad/0000.Net": 2.0,
        "grad/0002.out.weight": 4.0,
        "grad/0000.position": 3.0,
        "weight/0002.out.weight": 4.0,
        "weight/0000.position": 3.0,
    }


def test_a_tensor_without_a_finite_value_has_no_histogram() -> None:
    outputs = {Output("lstm"): tensor(np.nan, np.inf), Output("out"): tensor(1.0, np.nan)}
    tags = tags_of(joined(values_of(record(full=True, outputs=outputs))))
    assert {tag for tag in tags if "/activation/" in tag} == {"~tensors/activation/0002.out"}


def test_nonfinite_values_are_counted_where_there_are_any() -> None:
    outputs = {Output("lstm"): tensor(1.0, np.nan, np.inf), Output("out"): tensor(1.0)}
    curves = scalars(record(full=True, outputs=outputs))
    assert curves["~statistics/nonfinite/0001.lstm"] == 2
    assert "~statistics/nonfinite/0002.out" not in curves


def test_scaler_and_clipping_have_curves() -> None:
    step = record(
        full=True,
        loss_scale=1024.0,
        skipped_steps=2,
        total_grad_norm_before_clipping=10.0,
        clipped_fraction=0.5,
    )
    curves = scalars(step)
    assert curves["~run/scaler/scale"] == 1024.0
    assert curves["~run/scaler/skipped_steps"] == 2
    assert curves["~run/grad_norm/total_before_clipping"] == 10.0
    assert curves["~run/grad_norm/clipped_fraction"] == 0.5


def test_a_large_model_has_a_limited_number_of_curves_of_each_statistic() -> None:
    names = [f"layers.{i}" for i in range(70)]
    with_weights = names[:20]
    layout = Layout(
        modules=tuple(Module(name=name, type_name="Linear") for name in names),
        parameters=tuple(
            Parameter(name=f"{name}.weight", module_name=name, shape=(2,)) for name in with_weights
        ),
    )
    weights = {f"{name}.weight": tensor(1, 2) for name in with_weights}
    curves = scalars(
        record(
            full=True,
            layout=layout,
            grad_norms=np.ones(20),
            grad_present=np.ones(20, bool),
            grad_finite=np.ones(20, bool),
            outputs={Output(name): tensor(1, 2) for name in names},
            weights=weights,
        )
    )
    layers = [tag.split("/")[1] for tag in curves if tag.startswith("~statistics/")]
    counts = {statistic: layers.count(statistic) for statistic in layers}
    assert {"grad_norm", "weight_norm", "weight_rms", "activation_rms"} <= set(counts)
    assert set(counts.values()) == {12 + 3}


def test_a_phase_has_only_activations_under_its_name() -> None:
    step = record(phase="validation", full=True, outputs={Output("out"): tensor(1.0)})
    tags = tags_of(joined(values_of(step)))
    assert "~tensors/validation/activation/0002.out" in tags
    assert all(plain(tag).startswith("validation/") for tag in tags)
    assert not any("grad" in tag for tag in tags)


def test_each_alert_has_a_separate_tag_and_its_text() -> None:
    alert = Alert(
        kind="nonfinite",
        severity="error",
        step=3,
        module_name="out",
        value=1.0,
        threshold=0.0,
        summary="line one",
        advice=("line two",),
    )
    first, second = parsed(alert_value(alert, 0)), parsed(alert_value(alert, 1))
    assert first.tag == "~alerts/0000.nonfinite.out"
    assert second.tag == "~alerts/0001.nonfinite.out"
    [text] = first.tensor.string_val
    assert text.decode().startswith("**error** at step 3\n\nline one.  \nline two.")
