"""Numbers of a dozen programs in ``telemetry.read`` stay, whatever the files look like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.frozen_programs import NUMBERS, PROGRAMS, differences, numbers

FROZEN = json.loads(NUMBERS.read_text(encoding="utf-8"))


def test_each_program_has_numbers() -> None:
    assert FROZEN.keys() == PROGRAMS.keys()


@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_of_a_run_stay(name: str, tmp_path: Path) -> None:
    PROGRAMS[name](tmp_path)
    assert list(differences(FROZEN[name], numbers(tmp_path))) == []
