"""Flight files explained as text."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from telemetry.alert import Alert, Consequence
from telemetry.commands.cli import main
from telemetry.commands.explain import print_faults
from telemetry.commands.output import new_console
from telemetry.flight import FlightRecorder
from telemetry.records import Layout, Module, Output, Parameter, StepRecord, TensorRecord
from telemetry.records.sketch import sketch_array


def explain(path: Path) -> str:
    print_faults(path, new_console(text := io.StringIO()))
    return text.getvalue()


def fly(
    log_dir: Path, *, modules: int = 4, culprit: int = 2, moved: tuple[int, ...] = ()
) -> FlightRecorder:
    """Record a run whose module ``culprit`` returns NaN at step 30; ``moved`` changed before."""
    names = [f"block.{i}" for i in range(modules)]
    layout = Layout(
        modules=tuple(Module(name=name, type_name="Linear") for name in names),
        parameters=tuple(
            Parameter(name=f"{name}.weight", module_name=name, shape=(3, 3)) for name in names
        ),
    )
    good = TensorRecord(sketch=sketch_array(np.full(100, 0.5)))
    low, high = np.zeros(4, np.float32), np.eye(4, dtype=np.float32)[0]
    dead = TensorRecord(sketch=good.sketch, unit_min=low, unit_max=high)
    bad = TensorRecord(sketch=sketch_array(np.array([np.nan] * 7 + [1.0])))
    recorder = FlightRecorder(log_dir, steps=40 if moved else 20, seed=123)
    for step in range(35):
        late = step >= 30
        norms = np.full(modules, np.nan if late else 2.0**-step)
        if moved and not late:
            norms[:] = 1 + 0.01 * (step % 3)
            norms[list(moved)] *= 50 if step >= 27 else 1
        outputs = {
            Output(name): bad if late and i >= culprit else dead if i == 0 else good
            for i, name in enumerate(names)
        }
        recorder.on_step(
            StepRecord(
                step=step,
                wall_time=0.0,
                layout=layout,
                grad_norms=norms,
                grad_present=np.ones(modules, dtype=bool),
                grad_finite=np.isfinite(norms),
                learning_rates=(0.1,),
                scalars={"loss": 1.0 + step},
                full=step % 10 == 0,
                outputs=outputs if step % 10 == 0 else {},
                random_states={"cpu": b"state"},
            )
        )
        if step == 30:
            recorder.on_alert(
                Alert(
                    kind="nonfinite",
                    severity="error",
                    step=30,
                    module_name=names[culprit],
                    value=7.0,
                    threshold=0.0,
                    summary="7 of 8 elements are NaN",
                    advice=("Check the batch",),
                    consequences=(Consequence(kind="loss_divergence"),),
                )
            )
    return recorder


def test_the_text_has_the_fault_its_module_step_consequences_and_advice(tmp_path: Path) -> None:
    fly(tmp_path).close()
    text = explain(tmp_path)
    for line in (
        "Something went wrong at step 30; first bad module: block.2",
        "error: nonfinite in block.2 at step 30",
        "  7 of 8 elements are NaN.",
        "  Consequences: loss divergence.",
        "  Check the batch.",
        "Batch 30 of a loop with one batch per step; torch was seeded with 123; the file holds the "
        "random state at step 30",
        "Steps 15 to 34",
    ):
        assert line in text.splitlines()
    assert explain(tmp_path / "flight-30.json") == text


def test_curves_are_sparklines(tmp_path: Path) -> None:
    fly(tmp_path).close()
    lines = explain(tmp_path).splitlines()
    [loss] = [line for line in lines if line.startswith("  loss ")]
    assert loss.endswith("  from 16 to 35")
    assert "▁" in loss
    assert "█" in loss
    [norm] = [line for line in lines if line.startswith("  gradient norm ")]
    assert norm.partition("  gradient norm ")[2].split()[0].endswith("!!!!!")


def test_the_depth_profile_marks_the_first_bad_module(tmp_path: Path) -> None:
    fly(tmp_path).close()
    lines = explain(tmp_path).splitlines()
    start = lines.index(
        "By depth, before (step 20) → at (step 30) → after (step 34); – was not measured; "
        "» is the first bad module"
    )
    header, *rows = lines[start + 1 : start + 6]
    assert header.split() == ["module", "output", "rms", "gradient", "norm"]
    assert [row[:9] for row in rows] == ["  block.0", "  block.1", "» block.2", "  block.3"]
    assert "0.5 →     nan →       –" in rows[2]
    assert "9.5e-07 →     nan →     nan" in rows[2]
    assert "  75% of units dead: block.0" in lines
    assert "  7 values not finite: block.2, block.3" in lines


def test_of_many_modules_those_around_the_first_bad_one_are_shown(tmp_path: Path) -> None:
    fly(tmp_path, modules=100, culprit=60).close()
    text = explain(tmp_path)
    assert "» block.60" in text
    assert "block.46" in text
    assert "block.10 " not in text
    assert "and 70 more modules" in text


@pytest.mark.parametrize("modules", [100, 600])
def test_earliest_onsets_are_shown_at_any_depth(tmp_path: Path, modules: int) -> None:
    fly(tmp_path, modules=modules, culprit=60, moved=(3, modules - 7)).close()
    lines = explain(tmp_path).splitlines()
    for name in ("block.3", f"block.{modules - 7}"):
        assert name in [line.split()[0] for line in lines if line]
    assert f"  gradient norm unusual from step 27 on: block.3, block.{modules - 7}" in lines
    assert any(line.startswith("» block.60") for line in lines)
    assert [line.strip() for line in lines].count("…") == 2
    assert f"  and {modules - 30} more modules" in lines


def test_an_incomplete_file_is_reported(tmp_path: Path) -> None:
    fly(tmp_path)
    assert "(not complete: the run is still going on or was killed)" in explain(tmp_path)


def test_an_exception_is_shown_without_a_depth_profile(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path)
    recorder.on_exception(IndexError("list index out of range"), step=3)
    recorder.close()
    text = explain(tmp_path)
    assert "The training ended in IndexError: list index out of range" in text
    assert "By depth" not in text


def test_flight_files_are_read_without_torch(tmp_path: Path) -> None:
    fly(tmp_path).close()
    code = (
        "import sys; from telemetry.commands.cli import main; "
        "main(['explain', sys.argv[1]]); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert "block.2" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


def test_the_command_ends_with_the_help_of_the_kind_except_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fly(tmp_path).close()
    assert main(["explain", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "telemetry help nonfinite explains it"
    assert main(["explain", str(tmp_path), "--json"]) == 0
    assert "telemetry help" not in capsys.readouterr().out
