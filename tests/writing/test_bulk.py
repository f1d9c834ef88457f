"""Histograms and pictures of a step stay within their bytes, and each comes in its turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from serialized import parsed

from telemetry.sketch import Sketch, sketch_array
from telemetry.writing.bulk import Bulk, Picture

RANDOM = np.random.default_rng(0)
SKETCHES = {f"grad/{i:04d}.layer": sketch_array(RANDOM.normal(size=400)) for i in range(150)}
PICTURES = [(f"maps/{i}", RANDOM.integers(255, size=(40, 40, 3), dtype=np.uint8)) for i in range(9)]


def step(
    bulk: Bulk, pictures: Iterable[Picture] = PICTURES, sketches: Mapping[str, Sketch] = SKETCHES
) -> dict[str, int]:
    """Bytes by tag of what is written of one step."""
    magnitudes = {f"log10/{tag}": sketch for tag, sketch in sketches.items()}
    values = list(bulk.values_of(list(pictures), sketches, magnitudes))
    return {parsed(value).tag: len(value) for value in values}


WHOLE = step(Bulk())


def test_a_step_that_fits_is_written_whole() -> None:
    bulk = Bulk(max_bytes=3 * sum(WHOLE.values()))
    assert list(bulk.values_of(PICTURES, SKETCHES, SKETCHES)) == list(
        Bulk().values_of(PICTURES, SKETCHES, SKETCHES)
    )


@pytest.mark.parametrize("classic", [False, True])
@given(share=st.floats(0.005, 1.0))
def test_a_step_never_takes_more(classic: bool, share: float) -> None:
    bulk = Bulk(max_bytes=int(share * sum(WHOLE.values())), classic=classic)
    for _ in range(2):
        assert sum(step(bulk).values()) <= share * sum(WHOLE.values())


def test_first_magnitudes_go_and_buckets_are_wider_then_tags_take_turns() -> None:
    plain = sum(size for tag, size in WHOLE.items() if tag in SKETCHES)
    fine = step(Bulk(max_bytes=plain), ())
    coarse = step(Bulk(max_bytes=plain // 4), ())
    assert set(coarse) == set(SKETCHES)
    assert max(coarse.values()) < min(fine.values())
    bulk = Bulk(max_bytes=plain // 20)
    seen = [tag for _ in range(5) for tag in step(bulk, ())]
    assert len(step(bulk, ())) < len(SKETCHES) < len(seen)
    assert seen == [tag for _ in range(5) for tag in SKETCHES][: len(seen)]


def test_that_magnitudes_are_left_out_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    plain = sum(size for tag, size in WHOLE.items() if tag in SKETCHES)
    for bulk in (Bulk(max_bytes=plain + 2000), Bulk(max_bytes=plain // 2)):
        caplog.clear()
        for _ in range(3):
            step(bulk, ())
        [said] = caplog.messages
        assert "grad_log10/...) are left out" in said
        assert "max_bytes_per_step=" in said


def test_pictures_take_turns_and_a_large_one_is_made_smaller() -> None:
    size = max(WHOLE[tag] for tag, _ in PICTURES)
    bulk = Bulk(max_bytes=int(3 * 3.5 * size))
    seen = [list(step(bulk, sketches={})) for _ in range(4)]
    assert [int(tag[-1]) for tags in seen for tag in tags] == [*range(9), 0, 1, 2]
    large: NDArray[np.uint8] = RANDOM.integers(255, size=(400, 300, 3), dtype=np.uint8)
    [value] = Bulk(max_bytes=75_000).values_of([("large", large)], {}, {})
    assert [int(n) for n in parsed(value).tensor.string_val[:2]] == [75, 100]
