"""Flight files are bounded, found and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from telemetry.alert import Alert
from telemetry.flight import FlightRecorder, flight_files, read_flight
from telemetry.flight.file import MAX_MODULES
from telemetry.records import Layout, Module, Output, Parameter, StepRecord, TensorRecord
from telemetry.records.sketch import sketch_array


def write(log_dir: Path, *, modules: int, culprit: int = 0, steps: int = 3) -> dict[str, Any]:
    """Return the flight file of a fault in a network of ``modules`` layers."""
    names = [f"layer{i}" for i in range(modules)]
    layout = Layout(
        modules=tuple(Module(name=name, type_name="Linear") for name in names),
        parameters=tuple(
            Parameter(name=f"{name}.weight", module_name=name, shape=(3, 3)) for name in names
        ),
    )
    tensor = TensorRecord(sketch=sketch_array(np.random.default_rng(0).normal(size=500)))
    recorder = FlightRecorder(log_dir)
    for step in range(steps):
        recorder.on_step(
            StepRecord(
                step=step,
                wall_time=0.0,
                layout=layout,
                grad_norms=np.arange(modules) + 1.0,
                grad_present=np.arange(modules) != 3,
                grad_finite=np.ones(modules, dtype=bool),
                full=step == steps - 1,
                outputs=dict.fromkeys(map(Output, names), tensor),
                weights={f"{name}.weight": tensor for name in names},
            )
        )
    recorder.on_alert(
        Alert(
            kind="nonfinite",
            severity="error",
            step=steps - 1,
            module_name=names[culprit],
            value=1.0,
            threshold=0.0,
            summary="planted",
        )
    )
    return read_flight(log_dir / f"flight-{steps - 1}.json")


def test_a_file_of_many_modules_has_an_even_selection_with_the_first_bad_one(
    tmp_path: Path,
) -> None:
    flight = write(tmp_path, modules=2000, culprit=777)
    names = flight["modules"]["name"]
    assert len(names) <= MAX_MODULES
    assert {"layer0", "layer777", "layer1999"} <= set(names)
    assert flight["modules"]["left_out"] == 2000 - len(names)
    numbers = [int(name[5:]) for name in names]
    assert numbers == sorted(numbers)
    assert max(np.diff(numbers)) <= 9
    assert all(len(row) == len(names) for row in flight["grad_norms"])
    assert flight["grad_norms"][0][names.index("layer777")] == 778
    assert len(flight["profiles"][-1]["weight_norm"]) == len(names)
    assert (tmp_path / "flight-2.json").stat().st_size < 200_000


def test_files_are_found_in_the_order_of_their_steps(tmp_path: Path) -> None:
    for name in ("flight-100.json", "flight-9.json", "flight-x.json", "flight-3.txt", "other"):
        (tmp_path / name).touch()
    assert [path.name for path in flight_files(tmp_path)] == ["flight-9.json", "flight-100.json"]
    assert flight_files(tmp_path / "missing") == []


@pytest.mark.parametrize("text", ['{"format": "telemetry-flight-99"}', "{}", "[1]", "{", ""])
def test_an_invalid_flight_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "flight-1.json").write_text(text)
    with pytest.raises(ValueError, match=r"flight-1.json: (has the format|not a flight file: )"):
        read_flight(tmp_path / "flight-1.json")
