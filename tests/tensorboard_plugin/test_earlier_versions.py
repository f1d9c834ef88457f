"""What earlier versions wrote is opened by every later one, and runs go on from it.

``tests/fixtures`` has a folder for each version that wrote in another form; earlier_runs.py wrote
it. A version that leaves something out tells so in one line, which then takes its place in
``expected.json``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from client import Client, OpenClient
from earlier_figures import differences, figures, shown_in_report
from earlier_runs import MORE, RUNS, SAVED

import telemetry

FIXTURES = sorted(path for path in Path(__file__).parents[1].joinpath("fixtures").iterdir())
SCRIPT = Path(__file__).with_name("earlier_runs.py")


@pytest.fixture(params=FIXTURES, ids=[path.name for path in FIXTURES])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of what one version wrote."""
    copy: Path = shutil.copytree(request.param, tmp_path / "runs")
    return copy


def expected(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", RUNS)
def test_every_reader_shows_what_it_did(folder: Path, open_client: OpenClient, name: str) -> None:
    found = figures(folder / name, open_client(folder))
    wanted = expected(folder)[name]
    assert found.keys() == wanted.keys()
    for reader, shown in json.loads(json.dumps(found)).items():
        assert shown == close_to(wanted[reader]), reader


def close_to(value: Any) -> Any:
    """The same, with a tolerance for numbers."""
    if isinstance(value, dict):
        return {key: close_to(each) for key, each in value.items()}
    if isinstance(value, list):
        return [close_to(each) for each in value]
    return pytest.approx(value, rel=1e-4) if isinstance(value, float) else value


def test_runs_are_compared(folder: Path) -> None:
    assert differences(folder) == expected(folder)["diff"]["differences"]


def test_a_report_holds_what_a_later_one_does(folder: Path) -> None:
    report = shown_in_report((folder / "alone.html").read_text(encoding="utf-8"))
    assert {**report, "script": True} == expected(folder)["alone"]["report"]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_from_its_checkpoint(
    folder: Path, open_client: OpenClient, name: str
) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder / name), name],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    step, counted = json.loads(done.stdout)
    assert (step, counted) == (SAVED, SAVED)
    left_out = re.findall(r"load_state_dict\(\) left out (.*)", done.stderr)
    assert {*left_out} == {"default_rules: their state is of an earlier release, they begin anew"}
    assert "telemetry failed" not in done.stderr

    client = open_client(folder)
    assert shown_steps(client, name) == list(range(SAVED + MORE))
    before = [alert[:5] for alert in expected(folder)[name]["alerts"] if alert[2] < SAVED]
    alerts = client.json("run", run=name)["alerts"]
    fields = ("kind", "severity", "step", "module_name", "stage")
    assert [[alert[field] for field in fields] for alert in alerts] == before


def shown_steps(client: Client, name: str) -> list[int]:
    _, arrays = client.arrays("matrix", run=name, statistic="grad_norm")
    steps: list[int] = arrays["steps"].tolist()
    return steps


def test_a_checkpoint_is_plain_values(folder: Path) -> None:
    for path in folder.glob("*/checkpoint-*.pt"):
        state = torch.load(path, weights_only=True)["logger"]
        assert repr(json.loads(json.dumps(state))) == repr(state)


def test_this_version_is_among_them() -> None:
    assert telemetry.__version__ in {path.name for path in FIXTURES}
