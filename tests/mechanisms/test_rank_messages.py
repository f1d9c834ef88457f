"""Records are sent as JSON and raw arrays; anything else is refused before it is used."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from telemetry import Layout, Module, Parameter, TensorRecord
from telemetry.alert import Consequence
from telemetry.ranks.exchange import Announcement
from telemetry.ranks.partial_record import (
    Addend,
    ParameterPart,
    PartialRecord,
    Row,
    TensorTable,
    decode,
    encode,
)
from telemetry.ranks.topology import LocalShard
from telemetry.records import CodeLocation
from telemetry.records.batches import Batch
from telemetry.records.sketch import sketch_array
from tests.helpers.members import ALERT

ROW = Row(0, "weights", "layer.weight")


def table(values: NDArray[Any]) -> TensorTable:
    units = np.array([1, 2], np.float32)
    record = TensorRecord(sketch=sketch_array(values), unit_min=units, unit_max=units + 1)
    return TensorTable.of({ROW: LocalShard(copy=7)}, record.rows)


def part(norm: float = 1.0, tensors: TensorTable | None = None) -> PartialRecord:
    parameters = ParameterPart(
        stage=1,
        layout_id="a",
        layout=Layout(
            modules=(Module(name="layer", type_name="Linear"),),
            parameters=(Parameter(name="layer.weight", module_name="layer", shape=(4, 2)),),
        ),
        columns={
            "copies": np.array([2**40]),
            "norms": np.array([norm]),
            "present": np.ones(1, bool),
            "finite": np.isfinite([norm]),
        },
        addends=(Addend(0, np.array([0.1, norm])),),
        checks=np.array([[0], [-1], [-(2**60) - 1]]),
    )
    return PartialRecord(
        rank=1,
        size=8,
        step=5,
        wall_time=1.5,
        sequence=2**50 + 6,
        full=True,
        parameters=parameters,
        tensors=tensors,
        scalars={"loss": norm},
        nan_buffers=("a", "\ud800"),
        batches=(Batch(step=5, rank=1, ids=(2**70, "a")),),
    )


def fields(value: Any) -> Any:
    """Convert a value to built-in types, to compare it."""
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.tolist()]
    if hasattr(value, "__dataclass_fields__"):
        return {name: fields(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, tuple):
        return [fields(item) for item in value]
    if isinstance(value, dict):
        return {str(key): fields(item) for key, item in value.items()}
    return value


@pytest.mark.slow
@given(
    norm=st.floats(allow_nan=False),
    values=arrays(np.float32, st.integers(0, 30), elements=st.floats(-1e9, 1e9, width=32)),
)
def test_encoding_and_decoding_returns_equal_records(
    norm: float, values: NDArray[np.float32]
) -> None:
    sent = part(norm, table(values))
    got = decode(PartialRecord, encode(sent))
    assert json.dumps(fields(got)) == json.dumps(fields(sent))
    assert {type(row) for row in got.tensors.rows} == {Row}


def test_nan_and_announcements_are_encoded_and_decoded() -> None:
    assert math.isnan(decode(PartialRecord, encode(part(math.nan))).scalars["loss"])
    alert = replace(
        ALERT,
        summary="x" * 8000,
        location=CodeLocation(file="a.py", line=1, class_name="A"),
        consequences=(Consequence(kind="dead_units"),),
        batches=(Batch(step=5, ids=(2**70, "a")),),
    )
    announcement = Announcement(full_step=5, raise_at=7, alert=alert)
    assert decode(Announcement, encode(announcement)) == announcement
    with pytest.raises(ValueError, match="damaged"):
        decode(Row, encode(announcement))
    other: Any = "other"  # of a user's rule
    sent = replace(announcement, alert=replace(alert, severity=other, stage=other))
    expected = replace(alert, severity="warning", stage="started")
    assert decode(Announcement, encode(sent)).alert == expected


def test_fractional_counts_are_encoded_and_decoded() -> None:
    sketch = sketch_array(np.arange(1, 9))
    sampled = TensorRecord(sketch=replace(sketch, counts=sketch.counts * 1e9 / 7))
    tensors = TensorTable.of({ROW: LocalShard()}, sampled.rows)
    got = decode(PartialRecord, encode(part(tensors=tensors))).tensors.content.counts
    np.testing.assert_array_equal(got, sampled.sketch.counts)


def header(change: Any) -> bytes:
    """Return a record with a changed header."""
    data = encode(part(tensors=table(np.ones(3, np.float32))))
    end = 4 + int.from_bytes(data[:4], "big")
    changed = json.dumps(change(json.loads(data[4:end]))).encode()
    return len(changed).to_bytes(4, "big") + changed + data[end:]


def set_to(*path: int | str, value: Any) -> Any:
    def change(found: Any) -> Any:
        inner = found
        for at in path[:-1]:
            inner = inner[at]
        inner[path[-1]] = value
        return found

    return change


COPIES = ("parameters", "columns", "copies")


def array(dtype: str, *shape: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 50,
        encode(part())[:-1],
        encode(part()) + b"?",
        pickle.dumps(print),
        b"\0\0\0\4null",
        header(lambda found: {"rank": found["rank"]}),
        header(lambda found: [found] * 2),
        header(set_to("rank", value="1")),
        header(set_to("step", value=1.5)),
        header(set_to("full", value=1)),
        header(set_to(*COPIES, value=array("<i8", 2**61))),
        header(set_to(*COPIES, value=array("<i8", -1))),
        header(set_to(*COPIES, value=array("|O8", 1))),
        header(set_to(*COPIES, value=array("<i8", 1, 1))),
        header(set_to(*COPIES, value=array("<f8", 1))),
        header(set_to(*COPIES, value=[1])),
        header(set_to("tensors", "rows", value="[[0]]")),
        header(set_to("tensors", "rows", value="[" * 100_000)),
    ],
)
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="a message of another rank is damaged"):
        decode(PartialRecord, data)


@pytest.mark.parametrize("name", ["columns", "buckets", "counts", "units"])
def test_tensor_columns_of_different_lengths_are_refused(name: str) -> None:
    complete = table(np.ones(3, np.float32))
    short = replace(complete.content, **{name: getattr(complete.content, name)[:-1]})
    with pytest.raises(ValueError, match="different lengths"):
        replace(complete, content=short)


@pytest.mark.parametrize("name", ["copies", "present", "finite", "before", "moved"])
def test_parameter_columns_of_different_lengths_are_refused(name: str) -> None:
    parameters = part().parameters
    assert parameters is not None
    copies = {"parameter_copies": np.ones(1, np.int64)}
    short = {name: np.ones(2, parameters.columns.get(name, np.ones(1)).dtype)}
    with pytest.raises(ValueError, match="different lengths"):
        replace(parameters, columns={**parameters.columns, **copies, **short})


@pytest.mark.parametrize("name", ["copies", "norms", "present"])
def test_parameter_columns_of_another_type_or_without_copies_are_refused(name: str) -> None:
    parameters = part().parameters
    assert parameters is not None
    for columns in ({name: np.ones(1, np.int16)}, {"moved": np.ones(1)}):
        with pytest.raises(ValueError, match="different lengths"):
            replace(parameters, columns={**parameters.columns, **columns})
