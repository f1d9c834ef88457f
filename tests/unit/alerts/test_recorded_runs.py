"""Verdicts on recorded runs stay: kind, step, module, severity and numbers of each alert."""

from __future__ import annotations

import json

import pytest

from tests.helpers.recorded_runs import RUNS, VERDICTS, replay, verdicts

KNOWN = json.loads(VERDICTS.read_text(encoding="utf-8"))


def test_each_recording_has_verdicts() -> None:
    assert KNOWN.keys() == RUNS.keys()


@pytest.mark.parametrize("name", RUNS)
def test_verdicts_on_a_recorded_run_stay(name: str) -> None:
    assert verdicts(RUNS[name]) == KNOWN[name]


@pytest.mark.parametrize("norms_every", [1, 8])
@pytest.mark.parametrize("name", RUNS)
def test_a_machine_under_load_finds_the_same_kinds_and_layers(name: str, norms_every: int) -> None:
    loaded = replay.Machine(norms_every=norms_every, seed=1)
    [(_, alerts, *_)] = replay.replayed(RUNS[name], [10], loaded)
    found = {(a["kind"], a["module_name"]) for a in alerts if a["severity"] != "note"}
    assert found == {
        (kind, layer) for kind, _, layer, severity, *_ in KNOWN[name]["10"] if severity != "note"
    }
