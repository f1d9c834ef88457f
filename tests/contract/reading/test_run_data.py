"""Written runs are read back completely, with each reader."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from telemetry.events import FileWriter, summaries
from telemetry.events.page_format import PLUGIN_NAME, NewerFormatError, alert_tag, layout_tag
from telemetry.layers import MATRIX_STATISTICS, MISSING
from telemetry.reading import matrix, run_data
from telemetry.reading.matrix import Region
from telemetry.reading.run_data import RunData
from telemetry.reading.sources import FileSource
from tests.helpers.known_runs import COLUMN, OpenRun, alert_at, layout_of, write_run

LAYOUT = layout_of(["a", "b.x", "b.y"])
EARLIER, LATER = "20260101-000000.000-aaaa", "20260102-000000.000-0000"


def norms(step: int) -> np.ndarray:
    return np.array([step, step * 10, step * 100], np.float32)


def matrices(step: int) -> np.ndarray:
    return np.full((3, len(MATRIX_STATISTICS)), step, np.float32)


def test_every_step_and_every_number_is_read_back(tmp_path: Path, open_run: OpenRun) -> None:
    write_run(tmp_path, LAYOUT, steps=range(237), norms=norms, matrices=matrices, every=2)
    run = open_run(tmp_path)
    overview = run.overview()
    assert [layer.name for layer in overview.layers] == ["a", "b.x", "b.y"]
    assert (overview.first_step, overview.last_step) == (0, 236)
    grad_norm = run.matrix("grad_norm")
    assert grad_norm.steps.tolist() == list(range(237))
    np.testing.assert_array_equal(grad_norm.values, np.stack([norms(s) for s in range(237)]))
    activation = run.matrix("activation_rms")
    assert activation.steps.tolist() == list(range(0, 237, 2))
    assert (activation.values == activation.steps[:, None]).all()


def test_gradient_rms_is_the_norm_divided_by_the_root_of_the_size(
    tmp_path: Path, open_run: OpenRun
) -> None:
    write_run(tmp_path, LAYOUT, steps=[5], norms=norms)
    values = open_run(tmp_path).matrix("grad_rms").values
    np.testing.assert_allclose(values, [norms(5) / np.sqrt(6)], rtol=1e-6)


def test_the_gradient_share_is_the_part_of_the_squared_norm_of_all_layers(
    tmp_path: Path, open_run: OpenRun
) -> None:
    write_run(tmp_path, LAYOUT, steps=[5], norms=norms)
    run = open_run(tmp_path)
    squares = run.matrix("grad_norm").values[0].astype(np.float64) ** 2
    values = run.matrix("grad_share").values
    np.testing.assert_allclose(values, [squares / squares.sum()], rtol=1e-6)
    region = Region(first_step=5, last_step=5, first_layer=1, last_layer=1)
    np.testing.assert_array_equal(run.matrix("grad_share", region).values, values[:, 1:2])


def test_the_gradient_share_is_unknown_where_all_gradients_are_zero(
    tmp_path: Path, open_run: OpenRun
) -> None:
    write_run(tmp_path, LAYOUT, steps=[0], norms=norms)
    assert (open_run(tmp_path).matrix("grad_norm").values == 0).any()
    assert (open_run(tmp_path).matrix("grad_share").values == MISSING).all()


def test_only_the_requested_window_is_read(tmp_path: Path, open_run: OpenRun) -> None:
    write_run(tmp_path, LAYOUT, steps=range(100), norms=norms)
    region = Region(first_step=31, last_step=33, first_layer=1, last_layer=1)
    part = open_run(tmp_path).matrix("grad_norm", region)
    assert part.steps.tolist() == [31, 32, 33]
    assert part.values.tolist() == [[310], [320], [330]]
    assert part.first_layer == 1
    beyond = open_run(tmp_path).matrix("grad_norm", Region(first_layer=2**53))
    assert beyond.values.shape == (100, 0)


def test_a_resumed_run_is_one_curve(tmp_path: Path, open_run: OpenRun) -> None:
    old = [alert_at(4, "a"), alert_at(30, "a")]
    write_run(
        tmp_path, LAYOUT, steps=range(40), norms=norms, matrices=matrices, session=EARLIER,
        alerts=old,
    )  # fmt: skip
    write_run(
        tmp_path, LAYOUT, steps=range(25, 33), norms=lambda s: -norms(-s - 1), session=LATER,
        alerts=[alert_at(26, "b.x")],
    )  # fmt: skip
    run = open_run(tmp_path)
    overview = run.overview()
    assert overview.last_step == 32
    assert [(alert.step, alert.module_name) for alert in overview.alerts] == [(4, "a"), (26, "b.x")]
    line = run.matrix("grad_norm")
    assert line.steps.tolist() == list(range(33))
    assert line.values[24, 0] == 24
    assert line.values[25, 0] == 26  # the value of the later session
    assert run.matrix("activation_rms").steps.tolist() == list(range(25))


def test_layers_that_are_added_or_removed_keep_their_rows(
    tmp_path: Path, open_run: OpenRun
) -> None:
    write_run(tmp_path, layout_of(["a", "old", "c"]), steps=[0], norms=norms, session=EARLIER)
    write_run(
        tmp_path, layout_of(["a", "c", "new"]), steps=[1], norms=lambda _: np.ones(3, np.float32),
        session=LATER,
    )  # fmt: skip
    run = open_run(tmp_path)
    assert [layer.name for layer in run.overview().layers] == ["a", "old", "c", "new"]
    values = run.matrix("grad_norm").values.tolist()
    assert values == [[0, 0, 0, MISSING], [1, MISSING, 1, 1]]


def test_the_series_of_a_layer_has_every_step_and_statistic(
    tmp_path: Path, open_run: OpenRun
) -> None:
    write_run(tmp_path, LAYOUT, steps=range(30), norms=norms, matrices=matrices, every=10)
    statistics, parameters = open_run(tmp_path).layer_series("b.x")
    steps, values = statistics["weight_norm"]
    assert steps.tolist() == values.tolist() == [0, 10, 20]
    steps, values = parameters["b.x.weight"]
    assert values.tolist() == [10.0 * step for step in range(30)]
    assert set(statistics) == {"grad_norm", "grad_rms", "grad_share", *COLUMN}


def test_nan_and_infinity_are_read_back(tmp_path: Path, open_run: OpenRun) -> None:
    values = np.array([np.nan, np.inf, MISSING], np.float32)
    write_run(tmp_path, LAYOUT, steps=[0], norms=lambda _: values)
    np.testing.assert_array_equal(open_run(tmp_path).matrix("grad_norm").values, [values])


def test_a_newer_format_is_reported(tmp_path: Path, open_run: OpenRun) -> None:
    with_format(tmp_path, b'{"format": 99, "strange": true}')
    with pytest.raises(NewerFormatError, match="format 99"):
        open_run(tmp_path).overview()


def test_malformed_texts_are_omitted(tmp_path: Path, open_run: OpenRun) -> None:
    with_format(tmp_path, b"not JSON")
    with_format(tmp_path, b'{"format": 1}')
    writer = FileWriter(tmp_path)
    writer.write_values([summaries.tensor(alert_tag(EARLIER, 7), b"[]", PLUGIN_NAME)], 1)
    writer.close()
    write_run(tmp_path, LAYOUT, steps=[0], norms=norms, session=LATER)
    overview = open_run(tmp_path).overview()
    assert len(overview.layers) == 3
    assert overview.alerts == ()


def with_format(log_dir: Path, text: bytes) -> None:
    writer = FileWriter(log_dir)
    tag = layout_tag(EARLIER, len(list(log_dir.iterdir())))
    writer.write_values([summaries.tensor(tag, text, PLUGIN_NAME)], 0)
    writer.close()


def test_an_unknown_statistic_is_a_key_error(tmp_path: Path) -> None:
    write_run(tmp_path, LAYOUT, steps=[0], norms=norms)
    with pytest.raises(KeyError, match="nonsense"):
        RunData(FileSource(tmp_path)).matrix("nonsense")


class CountingSource(FileSource):
    """Source that records each read."""

    def __init__(self, log_dir: Path) -> None:
        super().__init__(log_dir)
        self.reads: list[str] = []

    def read(self, plugin_name: str, tags: Sequence[str], *, sampled: bool = False) -> object:  # type: ignore[override]
        self.reads += tags
        return super().read(plugin_name, tags, sampled=sampled)


def test_nothing_is_read_twice(tmp_path: Path) -> None:
    write_run(tmp_path, LAYOUT, steps=range(100), norms=norms, matrices=matrices)
    source = CountingSource(tmp_path)
    run = RunData(source)
    run.matrix("grad_norm")
    run.matrix("weight_norm")
    assert len(source.reads) == len(set(source.reads)) == 21
    run.matrix("grad_rms")
    run.layer_series("a")
    run.matrix("grad_norm", Region(first_step=50))
    assert len(source.reads) == 21


def test_a_tag_that_has_grown_is_read_again(tmp_path: Path) -> None:
    write_run(tmp_path / "short", LAYOUT, steps=range(15), norms=norms)
    write_run(tmp_path / "long", LAYOUT, steps=range(18), norms=norms)
    run = RunData(FileSource(tmp_path / "short"))
    assert len(run.matrix("grad_norm").steps) == 15
    run.source = CountingSource(tmp_path / "long")
    assert run.matrix("grad_norm").steps.tolist() == list(range(18))
    assert len(run.source.reads) == 1  # the first ten steps are known


def test_steps_beyond_the_limit_are_omitted_until_a_window_is_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, LAYOUT, steps=range(200), norms=norms, matrices=matrices)
    monkeypatch.setattr(run_data, "READ_BYTES", 250 * len(MATRIX_STATISTICS))
    run = RunData(FileSource(tmp_path))
    whole = run.matrix("weight_norm")
    assert whole.sampled
    assert whole.steps.tolist() == list(range(9, 200, 10))
    part = run.matrix("weight_norm", Region(first_step=42, last_step=47))
    assert not part.sampled
    assert part.steps.tolist() == list(range(42, 48))


def test_the_cache_stays_within_its_limit_and_a_second_read_is_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path, LAYOUT, steps=range(100), norms=norms)
    monkeypatch.setattr(matrix, "_CACHE_BYTES", 500)
    run = RunData(FileSource(tmp_path))
    first, again = run.matrix("grad_norm"), run.matrix("grad_norm")
    np.testing.assert_array_equal(first.values, again.values)
    assert run._numbers.nbytes <= 500


def test_data_that_an_older_version_can_read_is_shown(tmp_path: Path, open_run: OpenRun) -> None:
    with_format(tmp_path, b'{"format": 99}')
    write_run(tmp_path, LAYOUT, steps=[0], norms=norms, session=LATER)
    run = open_run(tmp_path)
    assert len(run.overview().layers) == 3
    [problem] = run.source.problems
    assert "format 99" in problem


def test_a_distant_step_does_not_hide_others(tmp_path: Path) -> None:
    write_run(tmp_path, LAYOUT, steps=[*range(30), 2**50], norms=norms)
    matrix = RunData(FileSource(tmp_path)).matrix("grad_norm")
    assert not matrix.sampled
    assert matrix.steps.tolist() == [*range(30), 2**50]
