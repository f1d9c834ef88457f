"""The code of guides and tutorials runs and prints the output on their pages."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import telemetry
from tests.helpers.paths import ROOT
from tests.helpers.scripts import run_script

DOCS = ROOT / "docs"
GUIDES = ["layers", "alerts", "resume", "interventions", "cost"]
ALONE = ["quickstart", "tutorials/explosion", "tutorials/gan", "language-models", "tutorials/sweep"]


def blocks_of(page: Path) -> list[tuple[str, str]]:
    """Return language and content of each block of code, in order."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def code_of(name: str) -> str:
    return "\n".join(code for kind, code in blocks_of(DOCS / f"{name}.md") if kind == "python")


def printed(code: str) -> list[str]:
    return re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE)


def put_command_on_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``telemetry`` run by this interpreter, wherever it is installed."""
    folder.mkdir()
    command = folder / "telemetry"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m telemetry "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_the_check_in_the_readme_prints_the_output_below_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = blocks_of(ROOT / "README.md")
    [place] = [index for index, (_, code) in enumerate(blocks) if "telemetry.check(" in code]
    exec(blocks[place][1], {})
    printed = capsys.readouterr().out.split()
    assert " ".join(blocks[place + 1][1].split()) in " ".join(printed)


def test_each_plain_block_of_the_readme_is_commands_or_a_tested_output() -> None:
    """``test_train_mnist.py`` compares the two other outputs."""
    blocks = blocks_of(ROOT / "README.md")
    commands = ("git ", "python ", "telemetry ")
    above = [
        blocks[index - 1][1].splitlines()[-1]
        for index, (kind, content) in enumerate(blocks)
        if kind == "" and not content.startswith(commands)
    ]
    assert above == [
        "python train_mnist.py --fault exploding",
        "telemetry explain runs/",
        "telemetry.check(model, inputs, nn.CrossEntropyLoss(), targets=targets)",
    ]


def test_the_loop_in_the_readme_runs(in_tmp_path: Path) -> None:
    [code] = [code for _, code in blocks_of(ROOT / "README.md") if "as logger:" in code]
    names: dict[str, object] = {}
    exec(code_of("howto/index"), names)
    exec(
        "batches = [(torch.randn(64, 8), torch.zeros(64, 1))] * 3; loss_function = nn.MSELoss()",
        names,
    )
    exec(code, names)
    assert [*telemetry.read("runs/first").scalars.tag].count("loss") == 3


@pytest.mark.parametrize("name", [f"howto/{name}" for name in GUIDES] + ALONE)
def test_the_code_of_a_page_prints_its_documented_output(
    name: str,
    in_tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    put_command_on_path(in_tmp_path / "bin", monkeypatch)
    names: dict[str, object] = {"__name__": "page"}
    if name.startswith("howto/"):
        exec(code_of("howto/index"), names)
    code = code_of(name)
    exec(compile(code, f"docs/{name}.md", "exec"), names)
    output = capsys.readouterr().out.splitlines()
    assert [line for line in output if line in printed(code)] == printed(code)
    assert list(Path("runs").rglob("*.tfevents.*"))


def test_the_run_log_is_read_without_telemetry(in_tmp_path: Path) -> None:
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
    torchrun = "from torch.distributed.run import main; main()"
    run_script(tmp_path, torchrun, "--nproc-per-node", 2, "train.py", cwd=tmp_path)
    runs = {path.parent for path in tmp_path.rglob("*.tfevents.*")}
    assert runs == {tmp_path / "runs" / "ddp"}
