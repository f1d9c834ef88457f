"""Output and exit status of the command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from telemetry.alert import Alert, Consequence
from telemetry.commands.cli import main
from telemetry.events import FileWriter, summaries
from telemetry.events.page_format import PLUGIN_NAME, Chunk
from telemetry.layers.record import Group
from telemetry.layers.units import encode_units
from telemetry.records.rows import Rows
from telemetry.records.sketch import Sketch
from telemetry.tensorboard_plugin.report import MAX_RUNS
from telemetry.writing.hparams import session_value
from tests.helpers.known_runs import alert_at, layout_of, write_run

ESCAPE = "\x1b[2Jcleared"


def write_demo(log_dir: Path, *alerts: Alert) -> None:
    def norms(step: int) -> np.ndarray:
        return np.array([1.0, 10.0**step, np.nan if step > 5 else 1.0], np.float32)

    layout = layout_of(["steady", "growing", f"[bold]{ESCAPE}"])
    write_run(log_dir, layout, steps=range(12), norms=norms, alerts=alerts)


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("NO_COLOR", "1")


def test_the_summary_is_a_table_of_all_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_demo(tmp_path, alert_at(5, "growing"))
    assert main(["summary", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "3 layers, steps 0 to 11, alerts: 1"
    growing = next(line for line in lines if line.strip().startswith("growing"))
    assert growing.split() == [
        "growing", "Linear", "1e+11", "5.5e+05", "↗", "×1e+09", "▁▂▂▃▄▄▅▅▆▇▇█", "1",
    ]  # fmt: skip
    assert "→ ×1" in next(line for line in lines if line.strip().startswith("steady"))


def test_control_characters_and_markup_are_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_demo(tmp_path, alert_at(5, None, summary=f"[red]{ESCAPE}", kind=ESCAPE))
    main(["summary", str(tmp_path)])
    main(["alerts", str(tmp_path)])
    main(["alerts", str(tmp_path / ESCAPE)])
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err
    assert "[bold]" in out
    assert "[red]" in out


def test_a_statistic_that_was_not_measured_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_demo(tmp_path)
    assert main(["summary", str(tmp_path), "--statistic", "saturation"]) == 0
    assert "not measured in this run" in capsys.readouterr().out


def test_the_layers_with_the_largest_or_smallest_values_can_be_requested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def norms(step: int) -> np.ndarray:
        return np.array([1.0, 5.0, np.nan, 0.5], np.float32)

    write_run(tmp_path, layout_of(["one", "five", "nan", "half"]), steps=range(3), norms=norms)

    def names(*options: str) -> list[str]:
        assert main(["summary", str(tmp_path), "--json", *options]) == 0
        return [record["module_name"] for record in json.loads(capsys.readouterr().out)]

    assert names("--sort", "grad_norm") == ["nan", "five", "one", "half"]
    assert names("--sort", "grad_norm", "--reverse", "--top", "2") == ["half", "one"]
    assert names("--sort", "saturation", "--statistic", "grad_norm", "--top", "1") == ["one"]
    assert main(["summary", str(tmp_path), "--sort", "grad_norm", "--top", "1"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]] == [
        "layer",
        "nan",
    ]
    assert names("--top", "2") == ["nan", "five"]
    assert names("--reverse") == ["half", "one", "five", "nan"]
    assert main(["summary", str(tmp_path), "--top", "0"]) == 2
    assert "--top 0: must be at least 1" in capsys.readouterr().err


def test_a_resolved_explosion_is_not_a_decay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def norms(step: int) -> np.ndarray:
        usual = 0.1 if step > 22 else 1.0
        return np.array(
            [1e5 if step == 21 else usual, usual, np.inf if step == 3 else 1], np.float32
        )

    write_run(tmp_path, layout_of(["peak", "falls", "infinite"]), steps=range(40), norms=norms)
    assert main(["summary", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(f["trend"], f["largest"], f["largest_step"]) for f in found] == [
        (pytest.approx(0.1), 1e5, 21), (pytest.approx(0.1), 1, 0), (1, "inf", 3),
    ]  # fmt: skip
    assert main(["summary", str(tmp_path)]) == 0
    rows = capsys.readouterr().out.splitlines()[-3:]
    assert ["1e+05 at 21" in rows[0], "at" in rows[1].split(), "inf at 3" in rows[2]] == [1, 0, 1]


def test_a_run_of_nan_shows_no_median_of_the_few_values_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def norms(step: int) -> np.ndarray:
        return np.array([3e14 if step < 2 else np.nan, np.nan if step == 7 else 2.0], np.float32)

    write_run(tmp_path, layout_of(["lost", "once"]), steps=range(12), norms=norms)
    assert main(["summary", str(tmp_path)]) == 0
    lost, once = capsys.readouterr().out.splitlines()[-2:]
    assert lost.split()[:8] == ["lost", "Linear", "nan", "nan", "first", "nan", "at", "step"]
    assert once.split()[:8] == ["once", "Linear", "2", "2", "peak", "nan", "at", "7,"]


def test_units_are_printed_with_the_dead_ones_in_ranges(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_demo(tmp_path)
    extremes = np.array([[0, 0]] * 12 + [[-1, 2]], np.float32)
    rows = Rows.of([Sketch.empty()], units=[extremes])
    units = encode_units(Group(rows=rows, modules=np.array([1]), size=3))
    writer = FileWriter(tmp_path)
    tag = Chunk(kind="u", session="20260101-000000.000-aaaa", layout=0, number=0).tag
    for step in (0, 5):
        writer.write_values([summaries.tensor(tag, units, PLUGIN_NAME)], step)
    writer.close()
    assert main(["units", str(tmp_path), "growing"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["growing at step 5: 13 units", "dead: 0-11", "saturated: none"]
    assert lines[-1].split() == ["12", "-1", "2"]
    assert main(["units", str(tmp_path), "growing", "--step", "0", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert [record["dead"] for record in records] == [True] * 12 + [False]
    assert records[12] == {
        "step": 0, "unit": 12, "min": -1, "max": 2,
        "dead": False, "saturated": False, "omitted": False,
    }  # fmt: skip
    extremes[3:5] = -2, -1
    rows = Rows.of([Sketch.empty()], units=[extremes])
    units = encode_units(Group(rows=rows, modules=np.array([1]), size=3))
    writer = FileWriter(tmp_path)
    writer.write_values([summaries.tensor(tag, units, PLUGIN_NAME)], 6)
    writer.close()
    assert main(["units", str(tmp_path), "growing"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(": ")[2] for line in lines[1:4]] == ["0-2, 5-11", "none", "3-4"]
    assert main(["units", str(tmp_path), "growing", "--step", "3"]) == 2
    assert "the nearest steps are [0, 5, 6]" in capsys.readouterr().err
    assert main(["units", str(tmp_path), "nope"]) == 2
    assert "no layer 'nope'; there are steady, growing, [bold]" in capsys.readouterr().err
    assert main(["units", str(tmp_path), "steady"]) == 0
    assert capsys.readouterr() == ("", "telemetry: steady: no units recorded\n")


@pytest.mark.parametrize(
    ("severity", "stage", "fail_on", "status"),
    [
        ("error", "started", None, 1),
        ("warning", "started", None, 1),
        ("error", "started", "never", 0),
        ("error", "started", "error", 1),
        ("error", "started", "warning", 1),
        ("warning", "started", "warning", 1),
        ("note", "started", "warning", 0),
        ("warning", "escalated", "error", 0),
        ("error", "resolved", None, 0),
    ],
)
def test_alerts_decide_the_exit_status(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    severity: str,
    stage: str,
    fail_on: str | None,
    status: int,
) -> None:
    write_demo(tmp_path, alert_at(5, "growing", severity=severity, stage=stage))
    options = ["--fail-on", fail_on] if fail_on else []
    assert main(["alerts", str(tmp_path), *options]) == status
    out = capsys.readouterr().out
    stages = "" if stage == "started" else f", {stage}"
    assert out.startswith(f"step 5: {severity} exploding_gradient in growing{stages}\n  The gradi")


def test_an_alert_is_printed_with_its_cause_consequences_and_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alert = replace(
        alert_at(5, "growing"), consequences=(Consequence(kind="dead_units", module_name="fc"),)
    )
    alert = replace(alert, summary="7 of 9", cause="A jump", advice=("Lower it", "Warm it up"))
    write_demo(tmp_path, alert)
    assert main(["alerts", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [
        "  7 of 9. A jump.",
        "  Consequences: dead units in fc.",
        "  Lower it. Warm it up.",
        "telemetry help exploding_gradient explains it",
    ]


def test_a_run_without_alerts_prints_no_alerts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_demo(tmp_path)
    assert main(["alerts", str(tmp_path), "--fail-on", "warning"]) == 0
    assert capsys.readouterr().out == "no alerts\n"


def test_a_report_is_of_all_runs_of_a_directory_up_to_a_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, output = tmp_path / "runs", tmp_path / "report.html"
    for number in range(MAX_RUNS + 1):
        assert main(["report", str(runs), "-o", str(output)]) == (0 if number else 2)
        write_demo(runs / f"x{number}")
    assert main(["report", str(runs), "-o", str(output)]) == 2
    assert f"at most {MAX_RUNS} runs, not of {MAX_RUNS + 1}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["summary", "alerts", "report", "export"])
def test_a_wrong_directory_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, str(tmp_path / "nothing")]) == 2
    assert main([command, str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "no such directory: " in err
    assert "no event files in" in err


def test_a_damaged_file_is_reported_and_the_rest_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_demo(tmp_path, alert_at(5, "growing"))
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes() + bytes(range(1, 60)))
    assert main(["alerts", str(tmp_path)]) == 1
    out, err = capsys.readouterr()
    assert "damaged" in err
    assert "exploding_gradient" in out


def test_the_report_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_demo(tmp_path / "run")
    output = tmp_path / "out.html"
    assert main(["report", str(tmp_path / "run"), "-o", str(output)]) == 0
    assert output.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert "out.html" in capsys.readouterr().out


def test_explain_fails_without_a_flight_file_and_on_a_damaged_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_demo(tmp_path)
    for form in ((), ("--json",), ("--csv",)):
        assert main(["explain", str(tmp_path), *form]) == 2
        assert "no flight file" in capsys.readouterr().err
    broken = tmp_path / "flight-3.json"
    broken.write_text("{")
    assert main(["explain", str(broken)]) == 2


def test_explain_names_runs_without_a_flight_file_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in "abcdefg":
        write_demo(tmp_path / name)
    main(["explain", str(tmp_path)])
    [line] = capsys.readouterr().err.splitlines()
    assert f"{tmp_path / 'b'}" in line
    assert "and 2 more: no flight file" in line


def test_the_command_alone_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "write all numbers of the page as CSV" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_does_not_load_torch() -> None:
    code = (
        "import sys, telemetry.commands.cli; assert not {'torch', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_all_of_very_many_layers_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"layer{i:04d}" for i in range(1200)]
    write_run(
        tmp_path, layout_of(names), steps=[0], norms=lambda _: np.ones(1200, np.float32),
    )  # fmt: skip
    assert main(["summary", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "Linear" in line] == names


def write_sweep(folder: Path) -> None:
    layout = layout_of(["fc"])
    for number, rate in enumerate([0.1, 1e-4, 3.0, None], start=8):
        log_dir = folder / f"run{number}"
        alerts = [alert_at(2, "fc", kind="exploding_gradient")] if rate == 3 else []
        session = f"20260101-0000{number:02d}.000-aaaa"
        write_run(
            log_dir, layout, steps=range(number), norms=lambda _: np.ones(1, np.float32),
            alerts=alerts, session=session, losses=False,
        )  # fmt: skip
        writer = FileWriter(log_dir)
        if rate is not None:
            hparams = {"lr": rate, "seed": 5, "status": "x"}
            writer.write_values([session_value(hparams)], 0)
            for step, loss in enumerate([1.0, rate, np.nan if rate == 3 else 2 * rate]):
                writer.write_values([summaries.scalar("loss", loss)], step)
        writer.close()


def test_runs_are_a_table_of_their_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_sweep(tmp_path)
    assert main(["runs", str(tmp_path)]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    titles = ["last step", "last loss", "best loss", "first alert", "lr", "seed", "hparams/status"]
    assert re.split("  +", heading) == ["run", "status", "started", *titles]
    assert [row.split()[0] for row in rows] == ["run11", "run10", "run9", "run8"]
    cells = ["9", "nan", "1", "exploding_gradient in fc, step 2", "3", "5", "x"]
    assert re.split("  +", rows[1].rstrip())[3:] == cells
    end = heading.index("  lr  ") + 4
    assert [row[:end].split(" ")[-1] for row in rows[1:]] == ["3", "0.0001", "0.1"]


def test_runs_are_sorted_and_filtered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep(tmp_path)

    def names(*options: str) -> list[str]:
        assert main(["runs", str(tmp_path), "--json", *options]) == 0
        return [record["run"] for record in json.loads(capsys.readouterr().out)]

    assert names("--sort", "lr") == [
        "run9",
        "run8",
        "run10",
        "run11",
    ]  # runs without a rate are last
    assert names("--sort", "lr", "--reverse") == ["run10", "run8", "run9", "run11"]
    assert names("--sort", "last_loss") == ["run9", "run8", "run10", "run11"]
    assert names("--sort", "run") == ["run8", "run9", "run10", "run11"]
    assert names("--filter", "LR=0.1") == ["run8"]
    assert names("--filter", "lr=1e-1") == ["run8"]
    assert names("--filter", "lr<1") == ["run9", "run8"]
    assert names("--filter", "lr>=0.1 lr!=3") == ["run8"]
    assert names("--filter", "hparams/status=x last_step>8") == ["run10"]
    assert names("--filter", "status=end") == []  # part of a text
    assert names("--filter", "exploding lr=3") == ["run10"]
    assert main(["runs", str(tmp_path), "--csv", "--filter", "x"]) == 0
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.endswith("first_alert,lr")  # the shown runs differ only in these
    assert len(rows) == 3
    assert main(["runs", str(tmp_path), "--json", "--sort", "lr"]) == 0
    text = capsys.readouterr().out
    assert ('"seed": 5,' in text, '"lr": 3,' in text, '"lr": 0.1,' in text) == (True, True, True)
    assert main(["runs", str(tmp_path), "--filter", "lr=7"]) == 0
    assert "'lr=7'" in capsys.readouterr().out
    assert main(["runs", str(tmp_path), "--filter", "lr<"]) == 2
    assert "--filter lr<: needs a value" in capsys.readouterr().err
    assert main(["diff", str(tmp_path), str(tmp_path), "--tolerance", "-1"]) == 2
    assert "--tolerance -1: must be at least 0" in capsys.readouterr().err
    assert main(["runs", str(tmp_path), "--sort", "loss"]) == 2
    assert "must be one of run, status, started" in capsys.readouterr().err
