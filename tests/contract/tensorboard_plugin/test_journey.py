"""The functions on the path of an activation run in the documented order (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from telemetry import HookLogger
from tests.helpers.client import OpenClient
from tests.helpers.paths import ROOT

PACKAGE = ROOT / "telemetry"


def stations(heading: str) -> list[tuple[str, str]]:
    """File and function of each station on the way, as the page numbers them."""
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    way = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\d+\. `([\w/.]+)`, `([\w.]+)`", way, re.MULTILINE)
    assert len(found) >= 10
    return found


@contextmanager
def calls_recorded(calls: list[tuple[str, str]]) -> Iterator[None]:
    """Note file and name of each of the package's functions that any thread enters."""

    home = f"{PACKAGE}{os.sep}"

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(home):
            file = Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix()
            # Python 3.10 has no qualified names.
            calls.append((file, getattr(frame.f_code, "co_qualname", frame.f_code.co_name)))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def train(logger: HookLogger, model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 1, 8, 8)).square().mean().backward()
        optimizer.step()
    logger.flush()


def test_an_activation_takes_the_documented_path(tmp_path: Path, open_client: OpenClient) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    calls: list[tuple[str, str]] = []
    with calls_recorded(calls), HookLogger(model, tmp_path / "run", every_n_steps=1) as logger:
        train(logger, model, steps=2)
        calls.clear()
        train(logger, model, steps=1)
    client = open_client(tmp_path)
    assert client.json("runs")  # TensorBoard loads much at the first request
    with calls_recorded(calls):
        client.arrays("matrix", run="run", statistic="activation_rms")
    whole_names = sys.version_info >= (3, 11)
    later = iter(calls)
    not_in_turn = [
        f"{file}, {name}"
        for file, name in stations("The way of one activation")
        if file.endswith(".py")
        and (file, name if whole_names else name.rpartition(".")[2]) not in later
    ]
    assert not_in_turn == []


@pytest.mark.parametrize("way", ["one activation", "a step of several ranks"])
def test_each_function_on_the_path_is_defined_where_the_docs_say(way: str) -> None:
    for file, name in stations(f"The way of {way}"):
        assert name in defined_in(PACKAGE / file), f"{file} defines no {name}"


def defined_in(path: Path) -> set[str]:
    """Functions by name, and methods behind their class."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".js":
        return set(re.findall(r"^export function (\w+)", text, re.MULTILINE))
    names: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{m.name}" for m in node.body if isinstance(m, ast.FunctionDef)}
    return names


def test_defined_in_lists_the_functions_and_methods_of_a_file(tmp_path: Path) -> None:
    source: Any = tmp_path / "file.py"
    source.write_text("class A:\n    def b(self): ...\n\ndef c(): ...\n", encoding="utf-8")
    assert defined_in(source) == {"A.b", "c"}
