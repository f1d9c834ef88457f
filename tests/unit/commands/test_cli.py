"""Output and exit status of the command."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from telemetry import Alert
from tests.helpers.known_runs import ValuesOf, alert_at, layout_of, write_run
from tests.helpers.shell import call, lines, records, table


def write_demo(log_dir: Path, *alerts: Alert) -> None:
    def norms(step: int) -> np.ndarray:
        return np.array([1.0, 10.0**step, np.nan if step > 5 else 1.0], np.float32)

    write(log_dir, ["steady", "growing", "lost"], 12, norms, *alerts)


def write(
    log_dir: Path, names: list[str], steps: int, norms: ValuesOf | float = 1.0, *alerts: Alert
) -> None:
    def constant(step: int) -> np.ndarray:
        return np.full(len(names), norms, np.float32)

    norms_of = norms if callable(norms) else constant
    write_run(log_dir, layout_of(names), steps=range(steps), norms=norms_of, alerts=alerts)


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("NO_COLOR", "1")


def error(*arguments: object) -> str:
    """Return the message with which the command ends with status 2."""
    done = call(*arguments)
    assert done.returncode == 2
    return done.stderr


# --- summary -------------------------------------------------------------------------


def test_the_summary_is_a_table_of_all_layers(tmp_path: Path) -> None:
    write_demo(tmp_path, alert_at(5, "growing"))
    shown = lines("summary", tmp_path)
    assert shown[0] == "3 layers, steps 0 to 11, alerts: 1"
    growing = next(line for line in shown if line.strip().startswith("growing"))
    assert growing.split() == [
        "growing", "Linear", "1e+11", "5.5e+05", "↗", "×1e+09", "▁▂▂▃▄▄▅▅▆▇▇█", "1",
    ]  # fmt: skip
    assert "→ ×1" in next(line for line in shown if line.strip().startswith("steady"))
    unmeasured = "\n".join(lines("summary", tmp_path, "--statistic", "saturation"))
    assert "not measured in this run" in unmeasured


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("--sort grad_norm", ["nan", "five", "one", "half"]),
        ("--sort grad_norm --reverse --top 2", ["half", "one"]),
        ("--sort saturation --statistic grad_norm --top 1", ["one"]),
        ("--top 2", ["nan", "five"]),
        ("--reverse", ["half", "one", "five", "nan"]),
    ],
)
def test_the_layers_with_the_largest_or_smallest_values_can_be_requested(
    tmp_path: Path, options: str, names: list[str]
) -> None:
    values = np.array([1.0, 5.0, np.nan, 0.5], np.float32)
    write(tmp_path, ["one", "five", "nan", "half"], 3, lambda _: values)
    found = records("summary", tmp_path, *options.split())
    assert [record["module_name"] for record in found] == names
    if options == "--top 2":
        shown = lines("summary", tmp_path, *options.split())[-3:]
        assert [line.split()[0] for line in shown] == ["layer", *names]
    assert "--top 0: must be at least 1" in error("summary", tmp_path, "--top", "0")


def test_a_resolved_explosion_is_not_a_decay(tmp_path: Path) -> None:
    def norms(step: int) -> np.ndarray:
        usual = 0.1 if step > 22 else 1.0
        return np.array(
            [1e5 if step == 21 else usual, usual, np.inf if step == 3 else 1], np.float32
        )

    write(tmp_path, ["peak", "falls", "infinite"], 40, norms)
    found = records("summary", tmp_path)
    assert [(f["trend"], f["largest"], f["largest_step"]) for f in found] == [
        (pytest.approx(0.1), 1e5, 21), (pytest.approx(0.1), 1, 0), (1, "inf", 3),
    ]  # fmt: skip
    rows = lines("summary", tmp_path)[-3:]
    assert ["1e+05 at 21" in rows[0], "at" in rows[1].split(), "inf at 3" in rows[2]] == [1, 0, 1]


def test_a_run_of_nan_shows_no_median_of_the_few_values_before(tmp_path: Path) -> None:
    def norms(step: int) -> np.ndarray:
        return np.array([3e14 if step < 2 else np.nan, np.nan if step == 7 else 2.0], np.float32)

    write(tmp_path, ["lost", "once"], 12, norms)
    lost, once = lines("summary", tmp_path)[-2:]
    assert lost.split()[:8] == ["lost", "Linear", "nan", "nan", "first", "nan", "at", "step"]
    assert once.split()[:8] == ["once", "Linear", "2", "2", "peak", "nan", "at", "7,"]


# --- alerts, explain, report -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("severity", "stage", "fail_on", "status"),
    [
        ("error", "started", None, 1),
        ("warning", "started", None, 1),
        ("error", "started", "never", 0),
        ("error", "started", "error", 1),
        ("note", "started", "warning", 0),
        ("warning", "escalated", "error", 0),
        ("error", "resolved", None, 0),
    ],
)
def test_alerts_decide_the_exit_status(
    tmp_path: Path, severity: str, stage: str, fail_on: str | None, status: int
) -> None:
    write_demo(tmp_path, alert_at(5, "growing", severity=severity, stage=stage))
    shown = lines("alerts", tmp_path, *(["--fail-on", fail_on] if fail_on else []), status=status)
    stages = "" if stage == "started" else f" {stage}"
    assert shown[0] == f"{severity}: exploding_gradient in growing{stages} at step 5"
    assert shown[1].startswith("  The gradi")


def test_an_alert_is_printed_with_its_cause_consequences_and_advice(tmp_path: Path) -> None:
    known, own = tmp_path / "known", tmp_path / "own"
    alert = alert_at(
        5, "growing", summary="7 of 9", cause="A jump", advice=("Lower it", "Warm it up"),
        follows=[("dead_units", "fc")],
    )  # fmt: skip
    write_demo(known, alert)
    expected = ["  7 of 9. A jump.", "  Consequences: dead units in fc.", "  Lower it. Warm it up."]
    help_line = "telemetry help exploding_gradient explains it"
    assert lines("alerts", known, status=1)[1:] == [*expected, help_line]
    write_demo(known, replace(alert, stage="escalated", added="More"))
    title = "error: exploding_gradient in growing, then dead units in fc at step 5"
    assert lines("alerts", known, status=1) == [title, "  More.", help_line]
    write_demo(own, replace(alert, kind="mine"))
    assert lines("alerts", own, status=1)[1:] == expected
    write_demo(tmp_path / "none")
    assert lines("alerts", tmp_path / "none", "--fail-on", "warning") == ["no alerts"]


def test_explain_fails_without_a_fault(tmp_path: Path) -> None:
    for name in "abcdefg":
        write_demo(tmp_path / name)
    for form in ((), ("--json",), ("--csv",)):
        [line] = error("explain", tmp_path, *form).splitlines()
        assert f"{tmp_path / 'b'}" in line
        assert "and 2 more: no fault" in line


# --- runs --------------------------------------------------------------------------------------


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Write four runs with three learning rates; the last has none."""
    for number, rate in enumerate([0.1, 1e-4, 3.0, None], start=8):
        log_dir = tmp_path / f"run{number}"
        losses = {0: 1.0, 1: rate, 2: np.nan if rate == 3 else 2 * (rate or 0)}
        write_run(
            log_dir, layout_of(["fc"]), steps=range(number), losses=False,
            alerts=[alert_at(2, "fc")] if rate == 3 else [],
            time_of=lambda step, number=number: 1.7e9 + 100 * number + step,
            hparams=None if rate is None else {"lr": rate, "seed": 5, "status": "x"},
            logged={"loss": losses} if rate is not None else None,
        )  # fmt: skip
    return tmp_path


def test_runs_are_a_table_of_their_differences(sweep: Path) -> None:
    heading, *rows = lines("runs", sweep)
    titles = ["last step", "last loss", "best loss", "worst alert", "lr", "seed", "hparams/status"]
    assert re.split("  +", heading) == ["run", "status", "started", *titles]
    assert [row.split()[0] for row in rows] == ["run11", "run10", "run9", "run8"]
    cells = ["9", "nan", "1", "exploding_gradient in fc, step 2", "3", "5", "x"]
    assert re.split("  +", rows[1].rstrip())[3:] == cells
    end = heading.index("  lr  ") + 4
    assert [row[:end].split(" ")[-1] for row in rows[1:]] == ["3", "0.0001", "0.1"]
    text = call("runs", sweep, "--json").stdout
    assert ('"seed": 5,' in text, '"lr": 3.0,' in text, '"lr": 0.1,' in text) == (True, True, True)


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        (["--sort", "lr"], [9, 8, 10, 11]),  # runs without a rate are last
        (["--sort", "lr", "--reverse"], [10, 8, 9, 11]),
        (["--sort", "last_loss"], [9, 8, 10, 11]),
        (["--sort", "run"], [8, 9, 10, 11]),
        (["--filter", "LR=0.1"], [8]),
        (["--filter", "lr=1e-1"], [8]),
        (["--filter", "lr<1"], [9, 8]),
        (["--filter", "lr>=0.1 lr!=3"], [8]),
        (["--filter", "hparams/status=x last_step>8"], [10]),
        (["--filter", "status=end"], []),  # part of a text
        (["--filter", "exploding lr=3"], [10]),
    ],
)
def test_runs_are_sorted_and_filtered(sweep: Path, options: list[str], numbers: list[int]) -> None:
    found = [record["run"] for record in records("runs", sweep, *options)]
    assert found == [f"run{number}" for number in numbers]


def test_filtered_runs_have_the_columns_that_differ_and_a_wrong_filter_is_named(
    sweep: Path,
) -> None:
    rows = table("\n".join(lines("runs", sweep, "--csv", "--filter", "x")))
    assert len(rows) == 3
    assert list(rows[0])[-2:] == ["worst_alert", "lr"]
    assert "'lr=7'" in "".join(lines("runs", sweep, "--filter", "lr=7"))
    assert "--filter lr<: needs a value" in error("runs", sweep, "--filter", "lr<")
    assert "must be one of run, status, started" in error("runs", sweep, "--sort", "loss")
    said = error("diff", sweep, sweep, "--tolerance", "-1")
    assert "--tolerance -1: must be at least 0" in said
