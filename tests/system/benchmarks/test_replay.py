"""Replayed steps raise the alerts of the original run, and a changed verdict is reported."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from telemetry.capture import Step
from telemetry.pipeline import Pipeline
from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import realruns
import replay

RUN = "runs.modulation_saturates"  # the histograms of outputs lead to alerts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    assert replay.record(folder, RUN, 0) == 0
    return folder


def test_replay_gives_the_alerts_of_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Pipeline.submit

    def judge_at_once(pipeline: Pipeline, step: Step) -> None:
        submit(pipeline, step)
        pipeline.flush()

    monkeypatch.setattr(Pipeline, "submit", judge_at_once)  # as replay does
    live = realruns.run_once("runs", RUN.removeprefix("runs."), 10, 0).alerts
    [(name, alerts, (light_s, full_s), due)] = replay.replayed(folder / f"{RUN}.0.npz", [10])
    assert name == f"{RUN}.0 every 10"
    replayed_alerts = [(alert["kind"], alert["module_name"], alert["severity"]) for alert in alerts]
    assert replayed_alerts == [
        (alert["kind"], alert["module_name"], alert["severity"]) for alert in live
    ]
    assert alerts[0]["kind"] == "saturated_units"
    assert len(light_s) > len(full_s) >= due > 0


@pytest.fixture
def run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Replay with these arguments; return the exit status and the output."""

    def run(*arguments: str) -> tuple[int, str]:
        common = ["replay.py", "replay", str(folder), "--every", "10", *arguments]
        monkeypatch.setattr(sys, "argv", common)
        return replay.main(), capsys.readouterr().out

    return run


def test_compare_fails_on_each_changed_field_and_names_it(
    run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    verdicts = tmp_path / "verdicts.json"
    assert run("--save", str(verdicts))[0] == 0
    code, out = run("--compare", str(verdicts))
    assert (code, out.splitlines()[-1]) == (0, "no difference")
    before = json.loads(verdicts.read_text(encoding="utf-8"))
    [alerts] = before.values()
    alerts[0] |= {"step": alerts[0]["step"] + 1, "advice": ["another"]}
    alerts.append(alerts[0] | {"kind": "dead_units"})
    verdicts.write_text(json.dumps(before), encoding="utf-8")
    code, out = run("--compare", str(verdicts))
    assert code == 1
    assert f"    step: {alerts[0]['step']} -> {alerts[0]['step'] - 1}" in out
    assert "    advice: ['another'] -> " in out
    assert "vanished" in out
    assert "dead_units" in out


def test_against_fails_for_a_lost_fault_and_lists_the_rest(
    run: Callable[..., tuple[int, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frozen = tmp_path / "frozen.json"
    assert run("--freeze", str(frozen))[0] == 0
    code, out = run("--against", str(frozen))
    assert (code, out.splitlines()[-1]) == (0, "nothing lost, no new false alarm, no later p90")
    [name] = json.loads(frozen.read_text(encoding="utf-8"))
    lost = ["exploding_gradient", 10**6, None, "error", "started"]
    faults = replay.judged({name: [lost]}, {name: []})
    assert f"{name} is no longer found" in faults
    assert f"- {name}: {lost}" in capsys.readouterr().out.splitlines()
