"""Onset: the layers that left their baseline first, when, and how far."""

from __future__ import annotations

import numpy as np
import pytest

from telemetry.layers.onset import Onset, onsets

NAMES = ["calm", "late", "early", "falls", "unknown"]


def norms(steps: int = 100) -> np.ndarray:
    """Return noise of 10 %; one layer grows 10-fold at step 60, another 100-fold at step 62."""
    noise = np.random.default_rng(0).uniform(0.9, 1.1, (steps, 5))
    noise[62:, 1] *= 100
    noise[60:64, 2] *= 10
    noise[62:, 3] = 0
    noise[5, 4] = np.nan
    return noise


def test_layers_are_ranked_by_onset_and_then_by_distance_from_their_baseline() -> None:
    found = onsets(NAMES, range(70), norms(70), 63)
    assert found is not None
    assert [(m.name, m.step) for m in found] == [("early", 60), ("falls", 62), ("late", 62)]
    early, falls, late = found
    assert early.factor == pytest.approx(10, rel=0.15)
    assert (falls.factor, late.factor) == (0, pytest.approx(100, rel=0.15))


@pytest.mark.parametrize(
    ("usual_between", "step", "factor"), [(1, 60, 30), (2, 60, 30), (3, 65, 0.1)]
)
def test_the_onset_of_a_layer_that_rises_and_soon_falls_is_the_rise(
    usual_between: int, step: int, factor: float
) -> None:
    values = norms()
    changes = [30, 30, *[1] * usual_between]
    values[60:, 0] *= [*changes, *[0.1] * (40 - len(changes))]
    found = onsets(NAMES, range(100), values, 65) or []
    (calm,) = (onset for onset in found if onset.name == "calm")
    assert calm.step == step
    assert calm.factor == pytest.approx(factor, rel=0.15)


def test_an_infinite_norm_has_an_onset_with_an_infinite_factor() -> None:
    values = norms()
    values[62:, 0] = np.inf
    found = onsets(NAMES, range(100), values, 62) or []
    assert Onset(name="calm", step=62, factor=np.inf) in found


def test_without_a_baseline_or_in_a_stable_run_there_is_no_onset() -> None:
    assert onsets(NAMES, range(29), norms(29), 29) is None
    assert onsets(NAMES, range(31), norms(31), 30) == []
    assert onsets(NAMES, [], np.empty((0, 5)), 5) is None
    assert onsets(NAMES, range(50), norms(50), 45) == []
