"""Reading a run back: its curves, layers, histograms and alerts as tables."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import telemetry
from telemetry import HookLogger
from tests.helpers.paths import ROOT
from tests.helpers.small_runs import fit
from tests.helpers.twins import loss_of


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a run of 12 steps with full steps every 4; the loss of the last step is NaN."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with HookLogger(model, folder, every_n_steps=4) as logger:  # and those that rules request
        factors = [1.0] * 11 + [torch.nan]
        fit(logger, 12, lambda step: factors[step] * loss_of(model, torch.randn(8, 4)), optimizer)
    return folder


def test_scalars_have_a_row_for_each_point(log_dir: Path) -> None:
    scalars = telemetry.read(log_dir).scalars
    assert list(scalars.columns) == ["tag", "step", "value"]
    loss = scalars[scalars.tag == "loss"]
    assert loss.step.tolist() == list(range(12))
    assert loss.value.notna().sum() == 11


def test_layers_have_a_row_for_each_number_that_was_measured(log_dir: Path) -> None:
    layers = telemetry.read(log_dir).layers
    norms = layers[layers.statistic == "grad_norm"]
    table = norms.pivot(index="step", columns="module_name", values="value")
    assert list(table.columns) == ["0", "2"]
    assert table.index.tolist() == list(range(12))
    assert np.isnan(table.loc[11]).all()
    assert np.isfinite(table.loc[:10]).all().all()
    dead = layers[(layers.statistic == "dead_units") & (layers.type_name == "ReLU")]
    assert {0, 4, 8} <= set(dead.step) < set(range(12))
    assert set(dead.module_name) == {"1"}


def test_histograms_are_read_as_written(log_dir: Path) -> None:
    run = telemetry.read(log_dir)
    histograms = run.histogram("weight/0000.0.weight")
    assert {0, 4, 8} <= set(histograms)
    left, right, counts = histograms[4].T
    assert counts.sum() == 24
    assert (left <= right).all()
    with pytest.raises(KeyError, match=r"the closest are weight/0000\.0\.weight"):
        run.histogram("weight/0000.0.weigh")


def test_alerts_are_those_of_the_run(log_dir: Path) -> None:
    run = telemetry.read(log_dir.parent)  # the only one below
    assert "nonfinite" in {alert.kind for alert in run.alerts}
    assert "3 layers, steps 0 to 11" in repr(run)
    assert run.problems == ()


def test_a_run_without_a_step_has_its_alert_and_empty_tables(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with HookLogger(model, tmp_path) as logger:
        for _ in range(100):
            logger.log(loss=0.5)
    run = telemetry.read(tmp_path)
    assert [(alert.kind, alert.step) for alert in run.alerts] == [("no_learning", 0)]
    assert [len(table) for table in (run.layers, run.modules)] == [0, 0]
    assert run.scalars.tag.tolist().count("loss") == 1
    assert list(run.layers.columns) == ["statistic", "step", "module_name", "type_name", "value"]
    assert run.histogram_tags == run.problems == ()
    with pytest.raises(KeyError):
        run.units("")


def test_reading_requires_neither_torch_nor_pandas(log_dir: Path) -> None:
    code = f"""
import sys
sys.modules["pandas"] = None
import telemetry
run = telemetry.read({str(log_dir)!r})
print(run.scalars["tag"][run.scalars["tag"] == "loss"].size, run.layers["value"].dtype)
print({{"torch", "matplotlib"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["12", "float32", "set()"]


def test_a_wrong_name_or_argument_is_reported_with_the_known_names(log_dir: Path) -> None:
    run = telemetry.read(log_dir)
    with pytest.raises(KeyError, match="no layer 'nope'; there are model input, 0, 1, 2"):
        run.units("nope")
    with pytest.raises(TypeError, match=r"units\(layer=5\)"):
        run.units(5)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="no such directory"):
        telemetry.read(log_dir / "nothing")
    with pytest.raises(TypeError, match=r"read\(run=5\)"):
        telemetry.read(5)  # type: ignore[arg-type]


def test_the_example_of_the_docs_runs(log_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "howto" / "reading.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert code is not None
    (log_dir.parent / "runs").mkdir()
    (log_dir.parent / "runs" / "first").symlink_to(log_dir)
    monkeypatch.chdir(log_dir.parent)
    names: dict[str, Any] = {}
    exec(code[1], names)
    assert list(names["by_layer"].columns) == ["0", "2"]
    assert len(names["loss"]) == 12
    assert names["count"].sum() == 24


def test_the_only_run_or_the_run_of_the_directory_itself_is_chosen(
    log_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(log_dir, tmp_path / "a")
    assert telemetry.read(tmp_path).log_dir == tmp_path / "a"
    shutil.copytree(log_dir, tmp_path / "b")
    with pytest.raises(ValueError, match="a, b"):
        telemetry.read(tmp_path)
    shutil.copytree(log_dir, tmp_path, dirs_exist_ok=True)
    assert telemetry.read(tmp_path).log_dir == tmp_path
