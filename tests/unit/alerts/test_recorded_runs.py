"""Verdicts on recorded runs stay: kind, step, module, severity and numbers of each alert."""

from __future__ import annotations

import json

import pytest

from tests.helpers.recorded_runs import RUNS, VERDICTS, verdicts

KNOWN = json.loads(VERDICTS.read_text(encoding="utf-8"))


def test_each_recording_has_verdicts() -> None:
    assert KNOWN.keys() == RUNS.keys()


@pytest.mark.parametrize("name", RUNS)
def test_verdicts_on_a_recorded_run_stay(name: str) -> None:
    assert verdicts(RUNS[name]) == KNOWN[name]
