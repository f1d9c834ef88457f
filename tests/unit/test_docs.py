"""README and docs name files that exist, and the defaults, kinds and figures that are true."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from telemetry import HookLogger
from tests.helpers.paths import ROOT
from tests.helpers.shell import lines

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
    assert len(answers) == 13
    assert [name for name in answers if not (ROOT / "telemetry" / name).is_file()] == []


def test_the_functions_on_the_way_of_a_step_are_in_their_files() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"^\d+\. `([\w/]+\.(?:py|js))`, `([\w.]+)`", text, re.MULTILINE)
    assert len(named) > 30
    missing = []
    for file, name in named:
        source = (ROOT / "telemetry" / file).read_text(encoding="utf-8")
        for part in name.split("."):
            if not re.search(rf"\b(?:def|class|function) {part}\b", source):
                missing.append((file, part))
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_picture_is_a_link_to_its_full_size(page: Path) -> None:
    pictures = re.findall(r"(.?)!\[[^]]*\]\(([^)]*)\)(.*)", page.read_text(encoding="utf-8"))
    assert [
        file for before, file, after in pictures if (before, after) != ("[", f"]({file})")
    ] == []


def test_the_reference_has_all_arguments_with_their_defaults() -> None:
    text = (ROOT / "docs" / "reference" / "logger.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\|(`.*?)\|`(.*?)`(?:: \d+)?\|", text.partition("## Methods")[0], re.MULTILINE
    )
    documented = {name: value for names, value in rows for name in re.findall(r"`(\w+)`", names)}
    parameters = list(inspect.signature(HookLogger).parameters.values())[2:]
    assert documented == {one.name: repr(one.default) for one in parameters}


def test_the_table_in_the_readme_has_each_kind_of_alert() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Faults it finds")[2]
    listed = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)))
    kinds = [line.split()[0] for line in lines("help") if line.startswith("  ")]
    assert sorted(listed) == sorted(kinds)


def test_readme_and_docs_name_the_kinds_that_are_notes() -> None:
    text = (ROOT / "docs" / "alerts" / "index.md").read_text(encoding="utf-8")
    [listed] = re.findall(r"These\s+kinds are notes:(.*?)\.\s", text, re.DOTALL)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [first] = re.findall(r"\n\n(`\w+`, [^|]*?) are\s+\[notes\]", readme)
    notes = {line.split()[0] for line in lines("help") if line.split()[1:2] == ["note"]}
    assert set(re.findall(r"`(\w+)`", listed)) == set(re.findall(r"`(\w+)`", first)) == notes


def test_the_readme_has_the_accuracy_on_runs_that_no_rule_had_seen() -> None:
    page = (ROOT / "docs" / "alerts" / "accuracy.md").read_text(encoding="utf-8")
    table = page.partition("## Runs that no rule had seen")[2].partition("\n## ")[0]
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("accuracy.md)")[2]
    figures = re.findall(r"\d+ of \d+|\d+ to \d+ %", text.partition("benchmark")[0])
    assert len(figures) == 4
    assert [figure for figure in figures if figure not in table] == []


def test_figures_of_cost_are_those_of_the_page_about_it() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = (ROOT / "docs" / "understand" / "cost.md").read_text(encoding="utf-8")
    text = readme.partition("## Cost")[2].partition("## ")[0]
    text += "".join(re.findall(r"^\| every step measured.*", readme, re.MULTILINE))
    figures = re.findall(r"(?<![.\d])(\d+) %", text)
    assert len(figures) > 5
    assert [figure for figure in figures if f"+{figure} %" not in table] == []
