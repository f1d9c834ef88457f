"""Margins of limits, and halves of the benches."""

from __future__ import annotations

import sys

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.recorded_runs import RUNS

sys.path.insert(0, str(ROOT / "benchmarks"))
import halves
import margins
import replay


def test_the_margin_is_the_smallest_change_that_changes_a_verdict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "onsets", lambda: {"a.fine": None, "a.faulty": 7})
    found = {
        "a.fine": {"dead_units": {("fraction", 1 / 3)}},
        "a.faulty": {"dead_units": {*margins.changes("dead_units")} - {("batches", 3.0)}},
    }
    of = margins.margins(found)
    assert of["dead_units", "fraction"] == margins.Margin(healthy=(1 / 3, "a.fine"))
    assert of["dead_units", "batches"] == margins.Margin(fault=(3.0, "a.faulty"))
    assert of["dead_units", "samples"] == margins.Margin()
    assert "|`dead_units`|`fraction`|0.9|0.33, fine|–|" in margins.table(of)


def test_a_limit_that_is_changed_changes_what_a_recorded_run_shows() -> None:
    found = margins.measured(RUNS["inputs_all_zero"], 10)
    assert "same_batch" not in found  # a note
    found = margins.measured(RUNS["layer_begins_large"], 10)
    assert margins.DEFAULT in found["loss_divergence"]
    assert found["loss_divergence"] < {*margins.changes("loss_divergence")}


def test_a_family_is_in_one_half() -> None:
    assert halves.half_of("runs.text_ok") == halves.half_of("realruns.text_decay_x1000")
    names = ["runs.text_ok", "runs.cnn_ok", "runs.gpt_ok", "runs.mlp_ok", "runs.unet_ok"]
    assert {*map(halves.half_of, names)} == {0, 1}
