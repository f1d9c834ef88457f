"""Memory of the steps that are kept for a fault."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from telemetry.flight import FlightRecorder
from telemetry.flight import recorder as recorder_module
from tests.helpers.small_records import full_record


def test_memory_is_bounded_and_the_latest_steps_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "MAX_STEP_BYTES", 50_000)
    monkeypatch.setattr(recorder_module, "MAX_FULL_BYTES", 10_000)
    recorder = FlightRecorder(tmp_path, steps=1000)
    sizes = []
    for step in range(600):
        recorder.on_step(full_record(step, full=step % 10 == 0))
        sizes.append(recorder.nbytes)
    assert 40_000 < max(sizes) <= 60_000
    assert [step.step for step in recorder._steps][-40:] == list(range(560, 600))
    assert recorder._full[-1].step == 590
    assert len(recorder._full) >= 2


def test_pictures_of_the_record_are_not_kept(tmp_path: Path) -> None:
    recorder = FlightRecorder(tmp_path)
    pixels = np.zeros((1000, 1000, 3), np.uint8)
    given = replace(full_record(0), feature_maps={"a": pixels}, input=pixels)
    recorder.on_step(given)
    kept = weakref.ref(given)
    del given
    gc.collect()
    assert kept() is None
    assert recorder.nbytes < 100_000
