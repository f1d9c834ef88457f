"""Replayed runs: alerts of the original, changed verdicts, margins of limits, halves of benches."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from telemetry.capture import Step
from telemetry.pipeline import Pipeline
from tests.helpers.paths import ROOT
from tests.helpers.recorded_runs import RUNS

sys.path.insert(0, str(ROOT / "benchmarks"))
import halves
import margins
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


# --- margins and halves --------------------------------------------------------------------------


def test_the_margin_is_the_smallest_change_that_changes_a_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "onsets", lambda: {"a.fine": None, "a.faulty": 7})
    found = {
        "a.fine": {"dead_units": {("fraction", 1 / 3)}},
        "a.faulty": {"dead_units": {*margins.changes("dead_units")} - {("batches", 3.0)}},
    }
    of = margins.margins(found)
    assert of["dead_units", "fraction"] == margins.Margin(healthy=(1 / 3, "a.fine"))
    assert of["dead_units", "batches"] == margins.Margin(fault=(3.0, "a.faulty"))
    assert of["dead_units", "samples"] == margins.Margin()
    assert "|`dead_units`|`fraction`|0.9|0.33, fine|–|" in margins.table(of)


def test_a_limit_that_is_changed_changes_what_a_recorded_run_shows() -> None:
    found = margins.measured(RUNS["inputs_all_zero"], 10)
    assert "same_batch" not in found  # a note
    found = margins.measured(RUNS["layer_begins_large"], 10)
    assert margins.DEFAULT in found["loss_divergence"]
    assert found["loss_divergence"] < {*margins.changes("loss_divergence")}


def test_a_family_is_in_one_half() -> None:
    assert halves.half_of("runs.text_ok") == halves.half_of("realruns.text_decay_x1000")
    names = ["runs.text_ok", "runs.cnn_ok", "runs.gpt_ok", "runs.mlp_ok", "runs.unet_ok"]
    assert {*map(halves.half_of, names)} == {0, 1}
