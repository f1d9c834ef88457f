"""Flight files of real training runs: contents, times of writing, bounds and failures."""

from __future__ import annotations

import base64
import gc
import itertools
import json
import logging
import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from telemetry import Alert, HookLogger, TelemetryAlert
from telemetry.alert import Consequence
from telemetry.alerts.nonfinite import Nonfinite
from telemetry.flight import FlightRecorder, flight_files, read_flight
from telemetry.flight import recorder as recorder_module
from telemetry.records import Layout, Module, Output, Parameter, StepRecord, TensorRecord
from telemetry.records.sketch import sketch_array
from tests.helpers.disks import fill

SEED = 7


def small_cnn() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3)
    )


def train(
    log_dir: Path, *, steps: int, nan_at: int = -1, alerts: Iterable[Any] = (), **options: Any
) -> None:
    """Train until the batches end with an IndexError."""
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with HookLogger(model, log_dir, every_n_steps=10, alerts=alerts, **options) as logger:
        for step in itertools.count():
            x = [torch.rand(4, 1, 8, 8)] * (step < steps)
            if step == nan_at:
                x[0][1, 0, 2, 3] = torch.nan
            loss = F.cross_entropy(model(x[0]), torch.tensor([0, 1, 2, 0]))
            logger.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


# --- records without a training ------------------------------------------------------------------

LAYOUT = Layout(
    modules=tuple(Module(name=name, type_name="Linear") for name in ("a", "b", "c")),
    parameters=tuple(
        Parameter(name=f"{name}.{kind}", module_name=name, shape=(2, 2))
        for name in ("a", "b")
        for kind in ("weight", "bias")
    ),
)


def record(step: int, *, full: bool = False, **fields: Any) -> StepRecord:
    made = StepRecord(
        step=step,
        wall_time=float(step),
        layout=LAYOUT,
        grad_norms=np.array([3.0, 4.0, 1.0, 0.0]),
        grad_present=np.array([True, True, True, True]),
        grad_finite=np.ones(4, dtype=bool),
        learning_rates=(0.5,),
        full=full,
        **fields,
    )
    if not full:
        return made
    tensor = TensorRecord(sketch=sketch_array(np.arange(6.0) + step))
    return replace(
        made,
        outputs=dict.fromkeys(map(Output, "abc"), tensor),
        weights={p.name: tensor for p in LAYOUT.parameters},
        update_ratios={p.name: 0.25 for p in LAYOUT.parameters},
        random_states={"cpu": bytes([step % 256])},
    )


def alert(step: int, *, module: str | None = "b", severity: Any = "error", **fields: Any) -> Alert:
    return Alert(
        kind="nonfinite",
        severity=severity,
        step=step,
        module_name=module,
        value=float("nan"),
        threshold=float("inf"),
        summary="planted",
        **fields,
    )


def fly(recorder: FlightRecorder, steps: Iterable[int], every: int = 10) -> None:
    for step in steps:
        recorder.on_step(record(step, full=step % every == 0))


def profile(flight: dict[str, Any], when: str) -> dict[str, Any]:
    [found] = [p for p in flight["profiles"] if p["when"] == when]
    return found


def moments(flight: dict[str, Any]) -> list[tuple[str, int]]:
    return [(p["when"], p["step"]) for p in flight["profiles"]]


# --- contents of a file --------------------------------------------------------------------------


def test_the_file_of_a_bad_batch_has_its_step_curves_and_profiles(tmp_path: Path) -> None:
    log_dir = tmp_path / "run"
    recorder = FlightRecorder(tmp_path, steps=20, seed=SEED)

    def record_step(record: StepRecord) -> Iterable[Alert]:
        recorder.on_step(record)
        return ()

    rules = [record_step, Nonfinite()]
    with pytest.raises(IndexError):
        train(log_dir, steps=40, nan_at=23, alerts=rules, on_alert=recorder.on_alert)
    [path] = flight_files(tmp_path)
    assert path.name == "flight-23.json"
    flight = read_flight(path)
    assert (flight["step"], flight["batch"], flight["complete"]) == (23, 23, True)
    assert flight["first_bad_module"] is None, "step 23 is not a full step"
    assert [a.kind for a in flight["alerts"]] == ["nonfinite"]
    assert flight["modules"]["name"] == ["0", "1", "2", "3", "4"]
    assert flight["modules"]["type"][:2] == ["Conv2d", "ReLU"]
    steps = flight["steps"]
    assert steps["step"] == list(range(9, 29))
    at = steps["step"].index(23)
    assert np.isfinite(steps["loss"][:at]).all()
    assert np.isnan([steps["loss"][at], steps["grad_norm"][at]]).all()
    assert steps["learning_rates"] == [[0.1]] * 20
    assert all(isinstance(x, float) for x in flight["grad_norms"][at - 1][::2])
    assert np.isnan([flight["grad_norms"][at][0], flight["grad_norms"][at][4]]).all()
    assert flight["grad_norms"][at][1] is None, "an activation has no parameters"
    assert moments(flight) == [("before", 10), ("at", 23), ("after", 28)]
    assert profile(flight, "before")["activation_rms"][0] > 0
    assert profile(flight, "at")["activation_rms"] == [None] * 5
    assert flight["random"]["seed"] == SEED


def test_each_logger_writes_a_file_of_a_fault_and_of_the_exception_that_ends_the_run(
    tmp_path: Path,
) -> None:
    with pytest.raises(IndexError):
        train(tmp_path, steps=23, nan_at=20, alerts=[Nonfinite()])
    [path] = flight_files(tmp_path)
    flight = read_flight(path)
    assert flight["step"] == 20
    assert flight["exception"]["type"] == "IndexError"
    assert flight["complete"]
    assert flight["first_bad_module"] == "0"
    # One pixel is under 3 x 3 positions of each of four filters, these are under 3 x 4; gradients
    # come on top.
    bad = [4 * 9, 4 * 9, 4 * 12, 4 * 12, 3]
    assert all(n >= least for n, least in zip(profile(flight, "at")["nonfinite"], bad, strict=True))
    assert profile(flight, "before")["nonfinite"] == [0] * 5


def test_random_states_repeat_the_batch(tmp_path: Path) -> None:
    def batches() -> Iterator[torch.Tensor]:
        for _ in range(4):
            yield torch.rand(4, 1, 8, 8)
        raise ArithmeticError

    seen = []
    model = small_cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def learn(batch: torch.Tensor) -> None:
        seen.append(batch)
        model(batch).sum().backward()
        optimizer.step()

    with pytest.raises(ArithmeticError), HookLogger(model, tmp_path, every_n_steps=2, alerts=()):
        list(map(learn, batches()))
    random = json.loads((tmp_path / "flight-4.json").read_bytes())["random"]
    assert random["step"] == 2
    state = base64.b64decode(random["states"]["cpu"])
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    assert torch.equal(torch.rand(4, 1, 8, 8), seen[2])


def test_figures_equal_those_of_the_record(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, steps=40)
    fly(recorder, range(41))
    recorder.on_alert(alert(40))
    flight = read_flight(tmp_path / "flight-40.json")
    assert flight["grad_norms"][-1] == [5.0, 1.0, None]
    assert flight["steps"]["grad_norm"][-1] == pytest.approx(26**0.5, rel=1e-5)
    at = profile(flight, "at")
    x = np.arange(6.0) + 40
    assert at["activation_rms"] == [pytest.approx(np.sqrt(np.mean(x**2)), rel=1e-5)] * 3
    norm = np.sqrt(2 * np.sum(x**2))
    assert at["weight_norm"] == [pytest.approx(norm, rel=1e-5)] * 2 + [None]
    assert at["update_ratio"] == [0.25, 0.25, None]
    assert np.isnan(flight["alerts"][0].value)
    assert flight["alerts"][0].threshold == np.inf


def test_profiles_are_taken_ten_steps_before_and_ten_steps_after_the_fault(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, steps=40)
    fly(recorder, range(56), every=5)
    recorder.on_alert(alert(55))
    flight = read_flight(tmp_path / "flight-55.json")
    assert not flight["complete"]
    assert moments(flight) == [("before", 45), ("at", 55)]
    fly(recorder, range(56, 65), every=5)
    assert not read_flight(tmp_path / "flight-55.json")["complete"]
    fly(recorder, [65], every=5)
    flight = read_flight(tmp_path / "flight-55.json")
    assert flight["complete"]
    assert moments(flight) == [("before", 45), ("at", 55), ("after", 65)]
    assert flight["steps"]["step"] == list(range(26, 66))


def test_the_latest_full_step_is_kept_though_it_is_older_than_the_window(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, steps=10)
    fly(recorder, range(96), every=100)
    recorder.on_alert(alert(95))
    flight = read_flight(tmp_path / "flight-95.json")
    assert moments(flight) == [("before", 0), ("at", 95)]
    assert flight["steps"]["step"] == list(range(86, 96))


def test_the_file_of_an_alert_on_the_loss_is_completed_when_its_step_ends(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, steps=20)
    fly(recorder, range(5))
    recorder.on_alert(alert(5, module=None))
    assert moments(read_flight(tmp_path / "flight-5.json"))[-1] == ("at", 4)
    fly(recorder, range(5, 7))
    recorder.close()
    flight = read_flight(tmp_path / "flight-5.json")
    assert moments(flight) == [("before", 0), ("at", 5), ("after", 6)]
    assert flight["first_bad_module"] is None


def test_an_alert_before_any_step_writes_an_empty_file(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path)
    recorder.on_alert(alert(0))
    recorder.close()
    flight = read_flight(tmp_path / "flight-0.json")
    assert flight["profiles"] == flight["grad_norms"] == flight["steps"]["step"] == []


def test_an_alert_at_the_first_step_has_no_profile_before_it(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path)
    recorder.on_step(record(0, full=True))
    recorder.on_alert(alert(0))
    assert moments(read_flight(tmp_path / "flight-0.json")) == [("at", 0)]


def test_the_profile_after_a_fault_is_of_a_full_step(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, steps=40)
    fly(recorder, range(11))
    recorder.on_alert(alert(10))
    fly(recorder, range(11, 21))
    after = profile(read_flight(tmp_path / "flight-10.json"), "after")
    assert after["step"] == 20
    assert after["weight_norm"][0] > 0


def test_figures_of_a_module_include_all_its_outputs_and_parameters(tmp_path: Path) -> None:
    good, bad, masked = (
        TensorRecord(sketch=sketch_array(np.array(values)))
        for values in ([1.0], [np.nan, np.inf], [-np.inf, 1.0])
    )
    recorder = FlightRecorder(tmp_path)
    recorder.on_step(
        replace(
            record(0, full=True),
            outputs={
                Output("a"): masked,
                Output("b"): good,
                Output("b", 1): bad,
                Output("c"): bad,
            },
            update_ratios={"a.weight": np.nan, "b.weight": np.inf, "b.bias": 1.0},
        )
    )
    recorder.on_exception(RuntimeError(), step=1)
    flight = read_flight(tmp_path / "flight-1.json")
    assert flight["first_bad_module"] == "b", "a mask of -inf is no fault"
    at = profile(flight, "at")
    assert at["nonfinite"] == [1, 2, 2]
    assert at["update_ratio"] == [None, np.inf, None]


def test_errors_until_a_file_is_complete_are_part_of_it(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, steps=40)
    fly(recorder, range(10))
    recorder.on_alert(alert(9, severity="warning", module="a"))
    assert flight_files(tmp_path) == []
    fly(recorder, [10])
    recorder.on_alert(alert(10))
    fly(recorder, range(11, 15))
    recorder.on_alert(alert(14, module="c", consequences=(Consequence(kind="more"),)))
    recorder.on_alert(alert(14, module="c", stage="resolved"))
    fly(recorder, range(15, 60))
    recorder.on_alert(alert(55, module="c", stage="resolved"))
    recorder.on_alert(alert(59, module="a"))
    first, second = flight_files(tmp_path)
    assert [(a.step, a.stage) for a in read_flight(first)["alerts"]] == [
        (9, "started"),
        (10, "started"),
        (14, "started"),
        (14, "resolved"),
    ]
    assert read_flight(first)["first_bad_module"] == "b"
    assert [a.step for a in read_flight(second)["alerts"]] == [55, 59], "older alerts are removed"
    assert read_flight(second)["first_bad_module"] == "a"


def test_warnings_and_resolved_errors_write_no_file(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path)
    fly(recorder, range(3))
    recorder.on_alert(alert(2, severity="warning"))
    recorder.on_alert(alert(2, stage="resolved"))
    recorder.close()
    assert list(tmp_path.iterdir()) == []


def test_an_exception_that_ends_the_training_writes_a_file(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, steps=20)
    fly(recorder, range(13))
    try:
        raise LookupError("no such batch")
    except LookupError as error:
        recorder.on_exception(error, step=13)
    recorder.close()
    flight = read_flight(tmp_path / "flight-13.json")
    assert flight["exception"]["type"] == "LookupError"
    assert flight["exception"]["message"] == "no such batch"
    assert (
        "test_an_exception_that_ends_the_training_writes_a_file" in flight["exception"]["traceback"]
    )
    assert moments(flight) == [("before", 0), ("at", 12)]


def test_an_exception_after_an_alert_is_part_of_the_file_of_the_alert(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, steps=20)
    fly(recorder, range(13))
    recorder.on_alert(alert(12))
    recorder.on_exception(ZeroDivisionError(), step=13)
    recorder.close()
    [path] = flight_files(tmp_path)
    assert read_flight(path)["exception"]["type"] == "ZeroDivisionError"


@pytest.mark.parametrize(
    "exception",
    [
        KeyboardInterrupt(),
        SystemExit(),
        TelemetryAlert(alert(1)),
        GeneratorExit(),
        StopIteration(),
    ],
)
def test_an_intended_exception_writes_no_file(tmp_path: Path, exception: BaseException) -> None:
    recorder = FlightRecorder(tmp_path)
    recorder.on_exception(exception, step=1)
    assert list(tmp_path.iterdir()) == []


def test_random_states_are_those_of_the_last_full_step_up_to_the_fault(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, steps=20, seed=SEED)
    fly(recorder, range(21))
    recorder.on_alert(alert(20))
    assert json.loads((tmp_path / "flight-20.json").read_bytes())["random"] == {
        "seed": SEED,
        "step": 20,
        "states": {"cpu": "FA=="},
    }
    fly(recorder, range(21, 36))
    recorder.on_alert(alert(35))
    assert read_flight(tmp_path / "flight-35.json")["random"]["step"] == 30


# --- bounds --------------------------------------------------------------------------------------


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_STEP_BYTES", 50_000)
    monkeypatch.setattr(recorder_module, "MAX_FULL_BYTES", 10_000)
    recorder = FlightRecorder(tmp_path, steps=1000)
    sizes = []
    for step in range(600):
        recorder.on_step(record(step, full=step % 10 == 0))
        sizes.append(recorder.nbytes)
    assert 50_000 < max(sizes) <= 60_000
    recorder.on_alert(alert(599))
    assert len(read_flight(tmp_path / "flight-599.json")["steps"]["step"]) > 40


def test_the_latest_steps_are_kept_though_they_exceed_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_STEP_BYTES", 1)
    monkeypatch.setattr(recorder_module, "MAX_FULL_BYTES", 1)
    recorder = FlightRecorder(tmp_path, steps=40)
    fly(recorder, range(31))
    recorder.on_alert(alert(30))
    flight = read_flight(tmp_path / "flight-30.json")
    assert flight["steps"]["step"] == [29, 30]
    assert moments(flight) == [("before", 20), ("at", 30)]


@pytest.mark.slow
def test_of_full_steps_in_a_row_one_in_ten_is_kept(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, steps=160)
    fly(recorder, range(500), every=1)
    kept = [step.step for step in recorder._full]
    assert len(kept) <= 18
    assert kept[-1] == 499
    assert kept[0] <= 499 - 160 + 10
    assert max(np.diff(kept)) <= 11


@pytest.mark.slow
def test_pictures_of_the_record_are_not_kept(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path)
    pixels = np.zeros((1000, 1000, 3), np.uint8)
    given = replace(record(0, full=True), feature_maps={"a": pixels}, input=pixels)
    recorder.on_step(given)
    kept = weakref.ref(given)
    del given
    gc.collect()
    assert kept() is None
    assert recorder.nbytes < 100_000


def test_a_run_writes_at_most_the_maximum_of_files(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, steps=4)
    for step in range(100):
        recorder.on_step(record(step))
        recorder.on_alert(alert(step))
    recorder.close()
    assert len(flight_files(tmp_path)) == recorder_module.MAX_FILES
    assert flight_files(tmp_path)[0].name == "flight-0.json"
    assert all(read_flight(path)["complete"] for path in flight_files(tmp_path))


# --- failures of ours ----------------------------------------------------------------------------


def test_a_directory_that_cannot_be_written_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = FlightRecorder(tmp_path / "is not there", steps=4)
    fly(recorder, range(3))
    for step in range(3, 30):
        recorder.on_step(record(step))
        recorder.on_alert(alert(step))
    recorder.on_exception(ValueError(), 30)
    recorder.close()
    assert caplog.text.count("telemetry failed to write a flight file into") == 1


def test_a_full_disk_keeps_the_existing_files(
    tiny_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = FlightRecorder(tiny_disk, steps=4)
    recorder.on_step(record(0))
    recorder.on_alert(alert(0))
    before = (tiny_disk / "flight-0.json").read_bytes()
    fill(tiny_disk)

    fly(recorder, range(1, 9))
    recorder.close()

    assert "No space left" in caplog.text
    assert {path.name for path in tiny_disk.iterdir()} == {"flight-0.json", "ballast"}
    assert (tiny_disk / "flight-0.json").read_bytes() == before


def test_a_custom_writer_receives_each_file(tmp_path: Path) -> None:
    written: list[tuple[Path, bytes]] = []
    recorder = FlightRecorder(tmp_path, write=lambda *file: written.append(file))
    recorder.on_step(record(0))
    recorder.on_alert(alert(0))
    recorder.close()

    assert list(tmp_path.iterdir()) == []
    for path, content in written:
        assert path == tmp_path / "flight-0.json"
        assert json.loads(content)["step"] == 0
    assert len(written) == 2


def test_internal_errors_are_logged_and_not_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = FlightRecorder(tmp_path, steps=4)
    broken: Any = object()
    recorder.on_step(broken)
    recorder.on_alert(broken)
    recorder.on_step(record(1))
    recorder.on_alert(alert(1))
    assert "telemetry failed to keep the last steps" in caplog.text
    assert flight_files(tmp_path)


def test_a_remote_directory_gets_no_files_and_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    recorder = FlightRecorder("memory://run", steps=4)
    for step in range(9):
        recorder.on_step(record(step))
        recorder.on_alert(alert(step))
    recorder.close()
    assert os.listdir(tmp_path) == []
    assert caplog.text.count("flight files are not written to memory://run") == 1


def test_every_file_is_valid_json(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path, steps=20)
    bad = TensorRecord(sketch=sketch_array(np.array([np.nan, np.inf, -np.inf])))
    for step, value in enumerate([np.nan, np.inf, -np.inf, 1e300]):
        recorder.on_step(
            replace(
                record(step, full=True, scalars={"loss": value}, loss_scale=value),
                grad_norms=np.full(4, abs(value)),
                learning_rates=(value,),
                outputs={Output("a"): bad},
                weights={"a.weight": bad},
                update_ratios={"a.weight": value},
            )
        )
        recorder.on_alert(alert(step))
    recorder.close()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for path in flight_files(tmp_path):
        text = path.read_text(encoding="ascii")
        flight = json.loads(text, parse_constant=refuse)
        assert flight["steps"]["loss"][:3] == ["nan", "inf", "-inf"]


def test_fewer_than_one_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"FlightRecorder\(steps=0\): must be at least 1"):
        FlightRecorder(tmp_path, steps=0)
