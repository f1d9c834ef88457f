"""``telemetry explain`` of real trainings: the steps around each fault, its origin and its figures.

A fault is an alert of severity ``error`` or an exception that ends the training.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from telemetry import Alert, HookLogger, Output, StepRecord, TelemetryAlert
from tests.helpers.known_runs import alert_at
from tests.helpers.rules import rule
from tests.helpers.shell import call, records
from tests.helpers.small_runs import fit
from tests.helpers.tiny_run import TinyRun, whole_run
from tests.helpers.twins import Recorder, descend


def explain(log_dir: Path) -> list[dict[str, Any]]:
    """Return the faults of a run in their order."""
    return sorted(records("explain", log_dir), key=lambda fault: fault["step"])


def small_cnn() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3)
    )


def train(log_dir: Path, *, steps: int, nan_at: int) -> None:
    """Train until the batches end with an IndexError."""
    model = small_cnn()

    def loss_of(step: int) -> torch.Tensor:
        x = [torch.rand(4, 1, 8, 8)] * (step < steps)
        if step == nan_at:
            x[0][1, 0, 2, 3] = torch.nan
        return F.cross_entropy(model(x[0]), torch.tensor([0, 1, 2, 0]))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rules = [rule("nonfinite")]
    with HookLogger(model, log_dir, every_n_steps=10, alerts=rules) as logger:
        fit(logger, steps + 1, loss_of, optimizer)


def alerts_at(
    *steps: int, severity: Any = "error", resolved: int = -1, module: str | None = None
) -> Callable[[StepRecord], Iterable[Alert]]:
    """A rule with alerts at these steps; the last may be resolved at another."""

    def planted(record: StepRecord) -> Iterator[Alert]:
        if record.step in (*steps, resolved):
            stage = "resolved" if record.step == resolved else "started"
            known = {"severity": severity, "value": math.nan, "threshold": math.inf}
            yield alert_at(record.step, module, stage=stage, **known)

    return planted


def moments(fault: dict[str, Any]) -> list[tuple[str, int]]:
    return [(profile["when"], profile["step"]) for profile in fault["profiles"]]


def test_a_bad_batch_has_its_step_curves_and_profiles(tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        train(tmp_path, steps=93, nan_at=83)
    [fault] = explain(tmp_path)
    assert (fault["step"], fault["complete"]) == (83, True)
    assert fault["first_bad_module"] is None, "step 83 is not a full step"
    assert [alert["kind"] for alert in fault["alerts"]] == ["nonfinite"]
    assert fault["modules"]["name"] == ["model input", "0", "1", "2", "3", "4"]
    assert fault["modules"]["type"][1:3] == ["Conv2d", "ReLU"]
    steps = fault["steps"]
    assert steps["step"] == list(range(93))
    assert np.isfinite(steps["loss"][:83]).all()
    assert (steps["loss"][83], steps["grad_norm"][83]) == ("nan", "nan")
    assert steps["learning_rates"] == [[0.1]] * 93
    assert moments(fault)[1:] == [("at", 83), ("after", 90)]
    before, at, _ = fault["profiles"]
    assert before["step"] in (20, 30), "a full step fifty steps before"
    assert before["activation_rms"][0] > 0
    assert [norm is not None for norm in before["grad_norm"]] == [False, True] * 3
    assert at["grad_norm"][1] == at["grad_norm"][5] == "nan"
    assert at["activation_rms"] == [None] * 6
    assert fault["exception"]["type"] == "IndexError"


def test_a_fault_at_a_full_step_names_its_first_bad_module(tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        train(tmp_path, steps=23, nan_at=20)
    [fault] = explain(tmp_path)
    assert fault["step"] == 20
    assert fault["first_bad_module"] == "0"
    profiles = {profile["when"]: profile for profile in fault["profiles"]}
    # One pixel is under 3 x 3 positions of each of four filters, these are under 3 x 4; gradients
    # come on top.
    bad, found = [4 * 9, 4 * 9, 4 * 12, 4 * 12, 3], profiles["at"]["nonfinite"]
    assert found[0] == 1, "of the input"
    assert all(n >= least for n, least in zip(found[1:], bad, strict=True))
    assert profiles["before"]["nonfinite"] == [0] * 6


def test_figures_equal_those_of_the_record(tmp_path: Path) -> None:
    recorder = Recorder()
    rules = [recorder, alerts_at(4, module="")]
    whole_run(tmp_path, 7, every_n_steps=2, alerts=rules)
    [fault] = explain(tmp_path)
    norms = [float(math.sqrt((record.grad_norms**2).sum())) for record in recorder.records]
    assert fault["steps"]["grad_norm"] == pytest.approx(norms, rel=1e-5)
    [at] = [profile for profile in fault["profiles"] if profile["when"] == "at"]
    assert at["grad_norm"][1:] == [pytest.approx(norms[4], rel=1e-5)]
    full = recorder.records[4]
    squares = sum(tensor.sketch.sum_squares for tensor in full.weights.values())
    assert at["weight_norm"][1:] == [pytest.approx(math.sqrt(squares), rel=1e-4)]
    assert min(full.update_ratios.values()) <= at["update_ratio"][1]
    assert at["update_ratio"][1] <= max(full.update_ratios.values())
    output = full.outputs[Output("")].sketch
    assert at["activation_rms"][1:] == [pytest.approx(math.sqrt(output.sum_squares / 4), rel=1e-4)]
    [alert] = fault["alerts"]
    assert (alert["value"], alert["threshold"]) == ("nan", "inf")


def test_the_steps_around_a_fault_are_kept_and_errors_among_them_belong_to_it(
    tmp_path: Path,
) -> None:
    """Two hundred steps, of which fifty come after it; later errors are another fault."""
    rules = [
        alerts_at(300, 330, resolved=340),
        alerts_at(400),
        alerts_at(290, 395, severity="warning"),
    ]
    tiny = TinyRun(tmp_path, every_n_steps=20, alerts=rules)
    tiny.train(420)
    tiny.logger.flush()
    assert [fault["complete"] for fault in explain(tmp_path)] == [True, False]
    tiny.train(80)
    tiny.logger.close()
    one, other = explain(tmp_path)
    assert one["complete"]
    assert one["steps"]["step"] == list(range(151, 351))
    assert moments(one) == [("before", 240), ("at", 300), ("after", 340)]
    assert [(alert["step"], alert["stage"]) for alert in one["alerts"]] == [
        *((290, "started"), (300, "started"), (330, "started"), (340, "resolved"))
    ]
    assert other["complete"]
    assert other["steps"]["step"] == list(range(251, 451))
    assert other["alerts"][-1]["step"] == 400


def test_an_alert_at_the_first_step_has_no_profile_before_it(tmp_path: Path) -> None:
    whole_run(tmp_path, alerts=[alerts_at(0)])
    [fault] = explain(tmp_path)
    assert moments(fault) == [("at", 0)]


def test_random_states_repeat_the_batch(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def learn() -> None:
        with HookLogger(model, tmp_path, every_n_steps=2, alerts=()):
            for _ in range(4):
                seen.append(torch.rand(4, 1, 8, 8))
                descend(model, seen[-1], optimizer)
            raise ArithmeticError

    torch.manual_seed(7)
    with pytest.raises(ArithmeticError):
        learn()
    [fault] = explain(tmp_path)
    random = fault["random"]
    assert (random["seed"], random["step"]) == (7, 2)
    state = base64.b64decode(random["states"]["cpu"])
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    assert torch.equal(torch.rand(4, 1, 8, 8), seen[2])


@pytest.mark.parametrize("alerts", [(), [alerts_at(12)]], ids=["alone", "after an alert"])
def test_an_exception_that_ends_the_training_is_a_fault(tmp_path: Path, alerts: Any) -> None:
    tiny = TinyRun(tmp_path, alerts=alerts)
    with suppress(LookupError), tiny.logger:
        tiny.train(13)
        raise LookupError("no such batch")
    [fault] = explain(tmp_path)
    assert fault["step"] == (12 if alerts else 13)
    assert fault["exception"]["type"] == "LookupError"
    assert fault["exception"]["message"] == "no such batch"
    assert "test_faults.py" in fault["exception"]["traceback"]
    assert moments(fault) == [("before", 0), ("at", 12)]
    assert [row["status"] for row in records("runs", tmp_path)] == ["died"]


@pytest.mark.parametrize(
    "exception",
    [
        KeyboardInterrupt(),
        SystemExit(1),
        TelemetryAlert(alert_at(1, None)),
        GeneratorExit(),
        StopIteration(),
        None,
    ],
)
def test_an_intended_end_warnings_and_resolved_errors_are_no_faults(
    tmp_path: Path, exception: BaseException | None
) -> None:
    tiny = TinyRun(tmp_path, alerts=[alerts_at(1, severity="warning"), alerts_at(resolved=2)])
    with suppress(BaseException), tiny.logger:
        tiny.train(3)
        if exception is not None:
            raise exception
    assert len(tiny.logger.alerts) == 2
    done = call("explain", tmp_path)
    assert done.returncode == 2
    assert "no alert of severity error" in done.stderr
    assert [row["status"] for row in records("runs", tmp_path)] == ["ended"]


def test_a_run_keeps_its_first_faults(tmp_path: Path) -> None:
    steps = range(0, 600, 60)
    whole_run(tmp_path, 600, alerts=[alerts_at(*steps)])
    faults = explain(tmp_path)
    assert [fault["step"] for fault in faults] == list(steps)[:8]
    assert all(fault["complete"] for fault in faults)
