"""Words of the field: docstrings begin with a verb or a noun, and a thing has one name."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

OPENING = re.compile(r"(What|Who|Whose|How|Which|Where|Of|As|In|That|Such|Those|So|It)\b")
"""Openings of a docstring that has no subject yet."""

TERMS = {
    r"\b(is|are|was|were|be|been) told\b": "is logged, is reported",
    r"\bbegins? anew\b|\banew\b": "restarts, resets",
    r"\bbell\b|\brang\b": "wake-up",
    r"\bthinned\b": "downgraded (a record), downsampled (a picture)",
    r"\bmore seldom\b": "with exponential back-off",
    r"\bfor good\b": "permanently",
    r"\bby eye\b": "chosen manually",
    r"\bnobody\b|\bsomebody\b|\bwhoever\b": "the name of the one who acts",
    r"\bwithout a word\b|\bno word\b": "silently",
    r"\bat (each|one|a) look\b": "evaluation",
    r"\bno such\b": "not found",
    r"\blikewise\b": "the thing itself",
}
"""Words of no standard meaning, and the terms of the field for them."""

FOLDERS = sorted(path.parent for path in (ROOT / "telemetry").rglob("__init__.py"))
OTHERS = [*sorted((ROOT / "tests").glob("*/")), ROOT / "benchmarks"]


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def prose(source: str) -> Iterator[tuple[int, str]]:
    yield from docstrings(source)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def openings(source: str) -> list[str]:
    """Return the docstrings that begin with neither a verb nor a noun."""
    return [
        f"{line}: begin with a verb or a noun, not with {found[0]!r}"
        for line, text in docstrings(source)
        if (found := OPENING.match(text))
    ]


def dialect(lines: Iterable[tuple[int, str]]) -> list[str]:
    """Return the words that have a term of the field, with the term."""
    return [
        f"{line}: {found[0]!r} -> {term}"
        for line, text in lines
        for pattern, term in TERMS.items()
        for found in re.finditer(pattern, text, re.IGNORECASE)
    ]


@pytest.mark.parametrize("folder", [*FOLDERS, *OTHERS], ids=lambda f: str(f.relative_to(ROOT)))
def test_prose_has_the_words_of_the_field(folder: Path) -> None:
    files = folder.glob("*.py") if folder in FOLDERS else folder.rglob("*.py")
    assert not [
        f"{file.relative_to(ROOT)}:{problem}"
        for file in sorted(files)
        if file != Path(__file__)
        for source in [file.read_text(encoding="utf-8")]
        for problem in openings(source) + dialect(prose(source))
    ]


def test_docs_have_the_words_of_the_field() -> None:
    pages = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    assert not [
        f"{page.relative_to(ROOT)}:{problem}"
        for page in pages
        for problem in dialect(enumerate(page.read_text(encoding="utf-8").splitlines(), 1))
    ]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('def f():\n    """What is left."""\n', "2: begin with a verb or a noun, not with 'What'"),
        ('def f():\n    """Return the rest."""\n', None),
        ("x = 1  # Chosen by eye.\n", "1: 'by eye' -> chosen manually"),
        ('class A:\n    """Nobody waits."""\n', "2: 'Nobody' -> the name of the one who acts"),
        ("x = 'by eye'\n", None),
    ],
)
def test_a_docstring_or_comment_is_checked(source: str, problem: str | None) -> None:
    assert openings(source) + dialect(prose(source)) == ([problem] if problem else [])
