"""Documentation of the kinds of alerts: complete, printed by the command, the same in the docs."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from telemetry.alerts.configuration import KINDS
from telemetry.commands.alerts import help_line, meaning_of
from telemetry.commands.cli import main
from tests.helpers.paths import ROOT

GENERATOR = runpy.run_path(str(ROOT / ".ci" / "alert_pages.py"))
PAGES: Mapping[str, tuple[str, ...]] = GENERATOR["PAGES"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_all_sections(kind: str) -> None:
    meaning = meaning_of(KINDS[kind])
    assert [*meaning.sections] == ["Evidence", "Causes", "Remedies", "Silent"]
    assert meaning.summary.endswith(".")
    assert all(text.endswith(".") for text in meaning.sections.values())
    assert all(text.endswith(".") for _, text in meaning.parameters.values())
    assert [*meaning.parameters] == [*KINDS[kind].limits()]
    ast.parse(meaning.example)
    assert set(meaning.causes) <= {*KINDS, "a jump of the learning rate"}


def test_the_meaning_of_a_kind_omits_its_decision() -> None:
    dead = meaning_of(KINDS["dead_units"])
    assert dead.parameters["samples"][0] == 500
    assert dead.parameters["fraction"][0] == 0.9
    assert "nn.init.constant_" in dead.example
    assert "a jump of the learning rate" in dead.causes
    assert "A unit is dead in a batch" not in str(dead)
    assert "A unit is dead in a batch" in str(KINDS["dead_units"].__doc__)


@pytest.mark.parametrize("kind", KINDS)
def test_help_prints_the_docstring(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help", kind]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    meaning = meaning_of(KINDS[kind])
    assert printed.startswith(f"{kind} ({meaning.severity}) ")
    texts = [meaning.summary, *meaning.sections.values()]
    texts += [text for _, text in meaning.parameters.values()]
    assert [text for text in texts if text.replace("``", "") not in printed] == []
    for name, (default, _) in meaning.parameters.items():
        assert f"{name} = {default:g}:" in printed


def test_help_lists_the_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        [kind, detector.severity] for kind, detector in KINDS.items()
    ]


def test_an_unknown_kind_is_an_error_with_the_closest_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["help", "dead_unit"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "'dead_unit'" in err
    assert "dead_units" in err


def test_only_a_known_kind_has_a_line_of_help() -> None:
    assert help_line(["mine", "nonfinite", "dead_units"]) == "telemetry help nonfinite explains it"
    assert help_line(["mine"]) is None


def test_the_pages_of_the_docs_are_those_of_the_docstrings() -> None:
    """Update the pages with ``python .ci/alert_pages.py``."""
    pages = cast("Callable[[], Mapping[Path, str]]", GENERATOR["pages"])()
    changed: list[Any] = [
        path.name for path, text in pages.items() if path.read_text(encoding="utf-8") != text
    ]
    assert changed == []


def test_each_kind_has_one_section_with_its_name() -> None:
    folder = ROOT / "docs" / "alerts"
    texts = [(folder / name).read_text(encoding="utf-8") for name in PAGES]
    headings = [kind for text in texts for kind in re.findall(r"^## (\w+)$", text, re.MULTILINE)]
    assert sorted(headings) == sorted(KINDS)
    index = (folder / "index.md").read_text(encoding="utf-8")
    for name, kinds in PAGES.items():
        row = re.search(rf"^\|[^|]*\]\({name}\)\|(.*)\|$", index, re.MULTILINE)
        assert row is not None
        assert tuple(re.findall(r"`(\w+)`", row[1])) == kinds
