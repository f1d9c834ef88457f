"""Documentation of the kinds of alerts: complete, printed by the command, the same in the docs."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from telemetry import Detector
from tests.helpers.paths import ROOT
from tests.helpers.shell import call, lines

GENERATOR = runpy.run_path(str(ROOT / ".ci" / "alert_pages.py"))
PAGES: Mapping[str, tuple[str, ...]] = GENERATOR["PAGES"]
KINDS: Mapping[str, type[Detector]] = GENERATOR["KINDS"]


def in_one_line(text: str) -> str:
    return " ".join(text.replace("``", "").split())


@pytest.mark.parametrize("kind", KINDS)
def test_help_prints_all_sections_of_the_docstring(kind: str) -> None:
    printed = lines("help", kind)
    text = " ".join(" ".join(printed).split())
    detector = KINDS[kind]
    assert text.startswith(f"{kind} ({detector.severity}) ")
    summary, fields = inspect.cleandoc(detector.__doc__ or "").split("\n\n")[:2]
    assert f") {in_one_line(summary)} Evidence:" in text
    found = dict(re.findall(r"^(\w+):(.*(?:\n +.*)*)", fields, re.MULTILINE))
    for name in ("Evidence", "Causes", "Remedies", "Silent"):
        assert f"{name}: {in_one_line(found[name])}" in text
        assert found[name].endswith(".")
    ast.parse(textwrap.dedent(found.get("Example", "")))
    for name, meaning in detector.limits().items():
        assert f"{name} = {getattr(detector, name):g}: {in_one_line(meaning)}" in text
        assert meaning.endswith(".")
    for line in re.findall(r"^May follow from: (.*)\.$", "\n".join(printed), re.MULTILINE):
        assert {*line.split(", ")} <= {*KINDS, "a jump of the learning rate"}


def test_the_help_of_a_kind_omits_its_decision() -> None:
    text = "\n".join(lines("help", "dead_units"))
    assert re.findall(r"^(?:samples|fraction) = (\S+):", text, re.MULTILINE) == ["0.9", "500"]
    assert "nn.init.constant_" in text
    assert "a jump of the learning rate" in text
    assert "A unit is dead in a batch" not in text
    assert "A unit is dead in a batch" in str(KINDS["dead_units"].__doc__)


def test_help_lists_the_kinds_and_the_closest_names_to_an_unknown_one() -> None:
    listed = [line.split()[:2] for line in lines("help") if line.startswith("  ")]
    assert sorted(listed) == sorted([kind, detector.severity] for kind, detector in KINDS.items())
    done = call("help", "dead_unit")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'dead_unit'" in done.stderr
    assert "dead_units" in done.stderr


def test_the_pages_of_the_docs_are_those_of_the_docstrings() -> None:
    """Update the pages with ``python .ci/alert_pages.py``."""
    pages = cast("Callable[[], Mapping[Path, str]]", GENERATOR["pages"])()
    changed: list[Any] = [
        path.name for path, text in pages.items() if path.read_text(encoding="utf-8") != text
    ]
    assert changed == []


def test_the_index_of_the_docs_lists_the_kinds_of_each_page() -> None:
    index = (ROOT / "docs" / "alerts" / "index.md").read_text(encoding="utf-8")
    for name, kinds in PAGES.items():
        row = re.search(rf"^\|[^|]*\]\({name}\)\|(.*)\|$", index, re.MULTILINE)
        assert row is not None
        assert tuple(re.findall(r"`(\w+)`", row[1])) == kinds
