"""The code of guides and tutorials runs and prints the output on their pages."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import telemetry
from tests.helpers.paths import ROOT

DOCS = ROOT / "docs"
GUIDES = ["layers", "alerts", "resume", "interventions", "cost"]
ALONE = ["quickstart", "tutorials/explosion", "tutorials/gan", "language-models", "tutorials/sweep"]


def code_of(name: str) -> str:
    text = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


def printed(code: str) -> list[str]:
    return re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)


def put_command_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``telemetry`` run by this interpreter, wherever it is installed."""
    folder.mkdir()
    command = folder / "telemetry"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m telemetry "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.parametrize("name", [f"howto/{name}" for name in GUIDES] + ALONE)
def test_the_code_of_a_page_prints_its_documented_output(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    put_command_on_path(tmp_path / "bin", monkeypatch)
    names: dict[str, object] = {"__name__": "page"}
    if name.startswith("howto/"):
        exec(code_of("howto/index"), names)
    code = code_of(name)
    exec(compile(code, f"docs/{name}.md", "exec"), names)
    output = capsys.readouterr().out.splitlines()
    assert [line for line in output if line in printed(code)] == printed(code)
    assert list(Path("runs").rglob("*.tfevents.*"))


def test_the_run_log_is_read_without_telemetry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code_of("howto/index"), names)
    exec('with HookLogger(model, "runs/first") as logger:\n    train(10, logger)', names)
    code = code_of("understand/files")
    assert "telemetry" not in code
    exec(code, names)
    curves = telemetry.read("runs/first").scalars
    losses = curves[curves.tag == "loss"]
    assert [*names["losses"]] == [*losses.step] == [*range(10)]
    assert [*names["losses"].values()] == pytest.approx([*losses.value])
    total = curves.value[curves.tag == "grad_norm/total"].iloc[-1]
    assert np.linalg.norm([*names["norms"].values()]) == pytest.approx(total)


def test_the_tutorial_of_several_gpus_runs_on_two_ranks(tmp_path: Path) -> None:
    code = code_of("tutorials/several-gpus").partition("# FSDP2")[0]
    (tmp_path / "train.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=300)
    runs = {path.parent for path in tmp_path.rglob("*.tfevents.*")}
    assert runs == {tmp_path / "runs" / "ddp"}
