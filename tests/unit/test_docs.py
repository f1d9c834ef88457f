"""README and docs name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = [ROOT, ROOT / "telemetry", ROOT / "benchmarks"]
MADE_BY_A_RUN = {"alerts.jsonl", "cases.py", "report.html"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[\w.]+/)*[\w]+\.(?:py|c|md|cfg)|(?:[\w.]+/)+)`", text))
    missing = [
        name
        for name in sorted(named - MADE_BY_A_RUN)
        if not any((folder / name).exists() for folder in FOLDERS)
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_linked_files_exist(page: Path) -> None:
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_each_question_of_a_newcomer_has_one_file_as_its_answer() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| question |")[2]
    answers = re.findall(r"^\| [^|]+\? \| `([\w/.]+)` \|$", table, re.MULTILINE)
    assert len(answers) == 12
    assert [name for name in answers if not (ROOT / "telemetry" / name).is_file()] == []
