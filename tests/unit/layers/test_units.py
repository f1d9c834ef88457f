"""Extremes of the units of layers, written and read back."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from torch import nn

import telemetry
from telemetry import HookLogger, Sketch
from telemetry.layers.record import Group
from telemetry.layers.units import (
    MOST_BYTES,
    MOST_LAYERS,
    decode_units,
    encode_units,
    ranges,
    saturated_units,
)
from telemetry.records.rows import NO_VALUES, Rows
from tests.helpers.known_runs import layout_of, write_run
from tests.helpers.twins import descend

Extremes = NDArray[np.float32]

EXTREMES = arrays(
    np.float32, st.tuples(st.integers(0, 40), st.just(2)), elements=st.floats(width=32)
)


def group(layers: Sequence[Extremes]) -> Group:
    """Return outputs of modules 1, 3, 5, ... with the extremes of their units, ``[units, 2]``."""
    modules = np.arange(len(layers)) * 2 + 1
    rows = Rows.of([Sketch.empty()] * len(layers), units=layers)
    return Group(rows=rows, modules=modules, size=2 * len(layers) + 1)


@pytest.mark.slow
@given(st.lists(EXTREMES, min_size=1, max_size=4))
def test_extremes_are_read_back_with_eight_bits_away_from_zero(layers: list[Extremes]) -> None:
    data = encode_units(group(layers))
    for index, given_units in enumerate(layers):
        read = decode_units(data, 2 * index + 1) if data else None
        if not len(given_units):
            assert read is None
            continue
        assert read is not None
        same = np.where(given_units == 0, read == 0, np.isnan(given_units) == np.isnan(read))
        finite = np.isfinite(given_units) & (np.abs(given_units) > 1e-37)
        finite &= np.abs(given_units) < 3.3e38
        sizes = np.abs(given_units[finite].astype(np.float64))
        assert same.all()
        assert (np.abs(read[finite]) >= sizes).all()
        assert (np.abs(read[finite]) <= sizes * (1 + 2**-7)).all()
        assert np.isfinite(read[np.isfinite(given_units)]).all()
        infinite = np.isinf(given_units)
        assert (read[infinite] == given_units[infinite]).all()


def test_above_the_limit_every_layer_keeps_its_dead_and_its_largest_units() -> None:
    random = np.random.default_rng(0)
    layers = [random.normal(size=(size, 2)).astype(np.float32) for size in (30, 6000, 9000)]
    layers[2] *= 1e-3  # layers of small values are kept, too
    layers[1][:12] = layers[1][40] = 0
    layers[2][17] = np.nan
    data = encode_units(group(layers))
    assert len(data) <= MOST_BYTES
    few, dead, other = (np.array(decode_units(data, module)) for module in (1, 3, 5))
    assert ranges((dead == 0).all(axis=1)) == "0-11, 40"
    assert (few[:, 0] <= few[:, 1]).any()
    assert MOST_BYTES - 16 < len(zlib.decompress(data)) <= MOST_BYTES  # the limit is used
    for units, layer in ((dead, layers[1]), (other, layers[2])):
        omitted = (units == NO_VALUES).all(axis=1)
        sizes = np.nan_to_num(np.abs(layer).max(axis=1), nan=np.inf)
        kept = sizes[~omitted & (sizes > 0)]
        assert 3500 < len(kept) < 4500
        assert kept.min() >= sizes[omitted].max() * (1 - 2**-7)
    assert np.isnan(other[17]).all()
    assert not (few == NO_VALUES).all(axis=1).any()


def test_more_layers_and_dead_units_than_fit_stay_within_the_limit() -> None:
    layers = [np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32)] * MOST_LAYERS
    data = encode_units(group(layers))
    assert len(data) <= MOST_BYTES
    assert decode_units(data, 2 * MOST_LAYERS + 1) is None
    fragmented = np.zeros((30_000, 2), np.float32)
    fragmented[::2] = 1
    data = encode_units(group([fragmented]))
    assert len(data) <= MOST_BYTES
    units = np.array(decode_units(data, 1))
    assert (units == 0).all(axis=1).sum() == MOST_BYTES // 8 - 2


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"x" * 9, "text", np.ones(4, np.float32), bytes(8)),
        *map(zlib.compress, (b"", b"x" * 9, b"\xff" * 64, bytes(8), b"\xff" * MOST_BYTES)),
    ],
)
def test_foreign_data_is_refused_or_has_no_units(data: object) -> None:
    try:
        assert decode_units(data, 1) is None
    except ValueError:
        return


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (bytes(MOST_BYTES + 8), "does not hold units"),
        (np.array([[1, 0], [1, 2**32 - 1]], "<u4").T.tobytes(), "4294967295 units"),
    ],
)
def test_data_and_units_beyond_the_limits_are_refused(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        decode_units(zlib.compress(data), 1)


def test_ranges_are_formatted_compactly() -> None:
    chosen = np.zeros(100, bool)
    assert ranges(chosen) == ""
    chosen[:12] = chosen[40] = chosen[98:] = True
    assert ranges(chosen) == "0-11, 40, 98-99"
    assert ranges(chosen, most=1) == "0-11 and 3 more"


def test_units_at_one_flat_end_are_saturated() -> None:
    units = np.array([[0.9, 1], [-1, -0.9], [-1, 1], [0, 0], [np.nan, np.nan], NO_VALUES], "f4")
    assert saturated_units("Tanh", units).tolist() == [True, True, False, False, False, False]
    assert not saturated_units("Linear", units).any()


class Model(nn.Sequential):
    """The first twelve units and the 40th of layer ``1`` are dead, the third of ``3`` saturated."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 8), nn.Tanh())
        with torch.no_grad():
            self[0].bias[:12] = self[0].bias[40] = -50.0
            self[2].bias[3] = 50.0


def train(folder: Path, *, every_n_steps: int, **options: str) -> None:
    torch.manual_seed(0)
    model = Model()
    with HookLogger(model, folder, every_n_steps=every_n_steps, alerts=(), **options):
        descend(model, torch.randn(32, 4), steps=25)


@pytest.mark.parametrize(
    ("every_n_steps", "measure"), [(1, "!images"), (10, "!images"), (1, "weights")]
)
def test_every_full_step_has_the_units_unless_activations_are_off(
    tmp_path: Path, every_n_steps: int, measure: str
) -> None:
    train(tmp_path, every_n_steps=every_n_steps, measure=measure)
    units = telemetry.read(tmp_path).units("1")
    assert units.steps.tolist() == [*range(0, 25, every_n_steps)] * (measure == "!images")


def test_a_run_shows_dead_and_saturated_units(tmp_path: Path) -> None:
    train(tmp_path, every_n_steps=10)
    run = telemetry.read(tmp_path)
    units = run.units("1")
    assert units.steps.tolist() == [0, 10, 20]
    assert [*map(ranges, units.dead)] == ["0-11, 40"] * 3
    assert units.min.shape == units.max.shape == (3, 64)
    assert (units.min <= units.max).all()
    assert not units.omitted.any()
    assert not units.saturated.any()
    assert [*map(ranges, run.units("3").saturated)] == ["3"] * 3
    with pytest.raises(KeyError, match="no layer '11'; the closest are 1"):
        run.units("11")


def test_damaged_units_are_reported_and_the_others_are_read(tmp_path: Path) -> None:
    extremes = np.array([[0, 1]], np.float32)
    write_run(
        tmp_path, layout_of(["1"]), steps=range(4),
        units=lambda step: extremes if step < 3 else b"\xff" * 9,
    )  # fmt: skip
    run = telemetry.read(tmp_path)
    assert run.units("1").steps.tolist() == [0, 1, 2]
    [problem] = run.problems
    assert "it does not hold units" in problem
