"""Each recipe of the docs runs alone and prints its documented output."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
INTRODUCTION, *SECTIONS = PAGE.split("\n## ")


def code_in(text: str) -> str:
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


RECIPES = {section.partition("\n")[0]: code for section in SECTIONS if (code := code_in(section))}
BUILDS_ON = {"Test a rule": "Write a rule"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_does_what_it_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "recipe"}
    exec(code_in(INTRODUCTION), names)
    if name in BUILDS_ON:
        exec(RECIPES[BUILDS_ON[name]], names)
        capsys.readouterr()
    exec(textwrap.dedent(RECIPES[name]), names)
    expected = re.findall(r"^ *print\(.*\)  # (.*)$", RECIPES[name], re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == expected
    assert list(Path("runs").glob("*/events.*")) or "capture_run" in RECIPES[name]
