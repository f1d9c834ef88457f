"""Heat map picture in TensorBoard: colors and number of pictures."""

from __future__ import annotations

import numpy as np
import pytest

from telemetry.layers.heat_map import heat_map
from telemetry.writing.dashboard import HEATMAP_TAG, HeatmapPicture
from tests.helpers.small_records import LAYOUT, full_record


def colors_of(matrix: np.ndarray) -> list[tuple[int, ...]]:
    """Return the color of the middle of each row."""
    drawn = heat_map(matrix, [f"layer{i}" for i in range(len(matrix))], [0, 10], title="norm")
    pixels, cells = drawn.pixels(), drawn.cells[0]
    middles = [
        cells.y + (2 * r + 1) * cells.height // (2 * len(matrix)) for r in range(len(matrix))
    ]
    return [tuple(pixels[y, cells.x + cells.width // 2].tolist()) for y in middles]


def test_known_values_have_known_colors() -> None:
    values = np.array([1e-3, 1e3, 0, -1, np.inf, np.nan])
    found = colors_of(np.repeat(values[:, None], 2, axis=1))
    assert found[0] == (68, 1, 84)
    assert found[1] == (253, 231, 37)
    assert found[2] == (0, 0, 0)
    assert found[3] == (228, 230, 234)
    assert found[4] == (255, 90, 0)
    assert found[5] == (213, 0, 109)


def test_a_matrix_without_any_number_can_be_drawn() -> None:
    assert colors_of(np.full((2, 2), np.nan)) == [(213, 0, 109)] * 2


@pytest.mark.slow
def test_pictures_are_written_less_and_less_often() -> None:
    picture, minute = HeatmapPicture(), 60.0
    records = (full_record(step, wall_time=minute * (step + 1)) for step in range(1500))
    drawn = [record.step for record in records if list(picture.values_of(record))]
    assert drawn[:5] == [7, 9, 12, 16, 21]
    assert len(drawn) < 30


@pytest.mark.slow
def test_fast_runs_have_a_picture_every_ten_seconds_and_one_at_the_end() -> None:
    picture = HeatmapPicture()
    records = (full_record(step, wall_time=1000 + step / 10) for step in range(300))
    assert [record.step for record in records if list(picture.values_of(record))] == [7, 108, 209]
    assert list(picture.last_values())
    assert not list(picture.last_values())


def test_a_run_of_few_full_steps_has_no_picture() -> None:
    picture = HeatmapPicture()
    list(picture.values_of(full_record(0)))
    assert not list(picture.last_values())


@pytest.mark.slow
def test_columns_of_long_runs_are_merged_by_their_maximum() -> None:
    picture = HeatmapPicture()
    for step in range(700):
        peak = 1e9 if step == 301 else 1.0
        norms = np.array([1.0, peak, 1.0, 1.0])
        list(picture.values_of(full_record(step, grad_norms=norms)))
    assert len(picture._columns) < 512
    assert max(column.max() for column in picture._columns) == 1e9
    assert picture._steps[1] == 2


def test_only_full_training_steps_count_and_another_layout_restarts_the_picture() -> None:
    picture = HeatmapPicture()
    for changes in ({"full": False}, {"phase": "validation"}, {"skipped": True}):
        assert not list(picture.values_of(full_record(0, **changes)))
    assert picture._columns == []
    list(picture.values_of(full_record(0)))
    other = type(LAYOUT)(modules=LAYOUT.modules, parameters=LAYOUT.parameters)
    list(picture.values_of(full_record(1, layout=other)))
    assert picture._steps == [1]
    assert HEATMAP_TAG == "~run/telemetry_heatmap"
