"""Records of other ranks arrive as they were sent; anything else is refused before it is used."""

from __future__ import annotations

import math
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.msgpack import Ext

from telemetry import TensorRecord
from telemetry.alert import Consequence
from telemetry.events.message_pack import encode
from telemetry.ranks.exchange import Announcement
from telemetry.ranks.rank_record import Addend, RankRecord, TensorKey, TensorTable, decode
from telemetry.ranks.topology import LocalShard
from telemetry.records import CodeLocation, StepRecord
from telemetry.records.batches import Batch
from telemetry.records.sketch import sketch_array
from tests.helpers.known_runs import layout_of
from tests.helpers.members import ALERT


def table(*values: float) -> TensorTable:
    """Return a sampled tensor, whose counts are fractions, and its units."""
    units = np.array([1, 2], np.float32)
    sketch = sketch_array(np.array(values, np.float32))
    sketch = replace(sketch, counts=sketch.counts * 1e9 / 7)
    record = TensorRecord(sketch=sketch, unit_min=units, unit_max=units + 1)
    return TensorTable.of(
        {TensorKey(0, "weights", "layer.weight"): LocalShard(copy=7)}, record.rows
    )


def part(norm: float = 1.0, tensors: TensorTable | None = None, **values: Any) -> RankRecord:
    values = {"scalars": {"loss": norm}, "nan_buffers": ("a", "b")} | values
    record = StepRecord(
        step=5, wall_time=1.5, full=True, grad_norms=np.array([norm]),
        grad_present=np.ones(1, bool), grad_finite=np.isfinite([norm]), **values,
    )  # fmt: skip
    return RankRecord(
        rank=1,
        size=8,
        record=record,
        sequence=2**50 + 6,
        tensors=tensors,
        stage=1,
        layout_id="a",
        layout=encode(layout_of(["layer"])),
        grad_copies=np.array([2**40]),
        addends=(Addend(0, np.array([0.1, norm])),),
        checks=np.array([[0], [-1], [-(2**60) - 1]]),
        batches=(Batch(step=5, rank=1, ids=(2**63, "a")),),
    )


@pytest.mark.parametrize("norm", [0.1, 1e300, math.nan, math.inf])
@pytest.mark.parametrize("values", [(), (0.5, -3e9, 1e-30), (math.nan, -math.inf, 2.0)])
def test_decoded_records_equal_the_encoded_ones(norm: float, values: tuple[float, ...]) -> None:
    sent = part(norm, table(*values))
    got = decode(RankRecord, sent.encode())
    assert got.encode() == sent.encode()
    assert (got.rank, got.record.step) == (1, 5)
    assert got.record.scalars == pytest.approx(sent.record.scalars, nan_ok=True)
    np.testing.assert_array_equal(got.tensors.rows.counts, sent.tensors.rows.counts)
    np.testing.assert_array_equal(got.record.grad_norms, [norm])
    assert {type(key) for key in got.tensors.keys} == {TensorKey}


def test_decoded_announcements_equal_the_encoded_ones() -> None:
    alert = replace(
        ALERT,
        summary="x" * 8000,
        location=CodeLocation(file="a.py", line=1, class_name="A"),
        consequences=(Consequence(kind="dead_units"),),
        batches=(Batch(step=5, ids=(7, "a")),),
    )
    announcement = Announcement(full_step=5, raise_at=7, alert=alert)
    assert decode(Announcement, encode(announcement)) == announcement
    with pytest.raises(ValueError, match="damaged"):
        decode(TensorKey, encode(announcement))


def test_text_without_utf_8_and_ids_beyond_64_bits_are_sent_as_text() -> None:
    batch = Batch(step=5, ids=(2**70, 7))
    sent = replace(part(tensors=table(1.0), nan_buffers=("\ud800",)), batches=(batch,))
    got = decode(RankRecord, sent.encode())
    assert got.record.nan_buffers == (r"\ud800",)
    assert got.batches[0].ids == (str(2**70), 7)
    assert encode(got.tensors) == encode(sent.tensors)


def test_a_small_array_does_not_keep_its_message_in_memory() -> None:
    got = decode(RankRecord, part(tensors=table(*range(1000))).encode())
    small, large = got.grad_copies, got.tensors.rows.counts
    assert [one.base is None or one.base.flags.owndata for one in (small, large)] == [True, False]


def changed(change: Any) -> bytes:
    content = msgspec.msgpack.decode(part(tensors=table(1.0, 1.0)).encode())
    return msgspec.msgpack.encode(change(content))


def set_to(*path: int | str, value: Any) -> Any:
    def change(found: Any) -> Any:
        inner = found
        for at in path[:-1]:
            inner = inner[at]
        inner[path[-1]] = value
        return found

    return change


def copies(*column: Any) -> bytes:
    """Return a record with another column: its shape and values."""
    return changed(set_to("grad_copies", value=column))


def eight(code: int) -> Ext:
    return Ext(code, bytes(8))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 50,
        part().encode()[:-1],
        part().encode() + b"?",
        pickle.dumps(print),
        msgspec.msgpack.encode(None),
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 100_000,
        changed(lambda found: {"rank": found["rank"]}),
        changed(lambda found: [found] * 2),
        changed(set_to("rank", value="1")),
        changed(set_to("rank", value=-1)),
        changed(set_to("size", value=2**50)),
        changed(set_to("record", "step", value=1.5)),
        changed(set_to("record", "full", value=1)),
        changed(set_to("record", "expert_loads", value={"a": [[1], eight(1)]})),
        changed(set_to("record", value=1)),
        copies([2**61], eight(0)),
        copies([-1, -1], eight(0)),
        copies(["1"], eight(0)),
        copies(1.5, eight(0)),
        copies([1], eight(100)),
        copies([1], eight(-1)),
        copies([1], eight(4)),
        copies([1], Ext(0, bytes(7))),
        copies([1], [1]),
        copies([1, 1], eight(0)),
        copies([1], eight(1)),
        copies(1),
        changed(set_to("layout", value=b"?")),
        changed(set_to("checks", value=[[1], eight(1)])),
        changed(set_to("tensors", "rows", "columns", value=[[1], eight(0)])),
        changed(set_to("tensors", "keys", value=[[0]])),
    ],
)
def test_damaged_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="a message of another rank is damaged"):
        decode(RankRecord, data)


@pytest.mark.parametrize("name", ["columns", "buckets", "counts", "units"])
def test_tensor_columns_of_different_lengths_are_refused(name: str) -> None:
    complete = table(1.0, 1.0)
    short = replace(complete.rows, **{name: getattr(complete.rows, name)[:-1]})
    with pytest.raises(ValueError, match="different lengths"):
        replace(complete, rows=short)


@pytest.mark.parametrize(
    "changed",
    [
        {"grad_copies": np.ones(2, np.int64)},
        {"addends": (Addend(1, np.ones(1)),)},
        {"checks": np.array([[1], [0], [0]])},
        *({"record": {name: np.ones(2, bool)}} for name in ("grad_present", "grad_finite")),
        *({"record": {name: np.ones(2)}} for name in ("grad_norms", "grad_norms_before_clipping")),
    ],
)
def test_parameter_columns_of_another_length_are_refused(changed: dict[str, Any]) -> None:
    known = part()
    if isinstance(own := changed.get("record"), dict):
        changed = {"record": replace(known.record, **own)}
    with pytest.raises(ValueError, match="different lengths"):
        replace(known, **changed)


def test_fields_of_rank_0_and_those_that_nothing_merges_are_not_sent() -> None:
    own = part(random_states={"cpu": b"1"}, loss_tag="loss", groups=np.array([0]))
    sent = decode(RankRecord, own.encode()).record
    assert (sent.random_states, sent.loss_tag, sent.groups.size) == ({}, None, 0)


evaluated = Event()


def slow() -> type[int]:
    """Return the type of a field, while another thread makes a decoder of the same class."""
    evaluated.set()
    time.sleep(0.2)
    return int


@dataclass
class Inner:
    value: slow()  # type: ignore[valid-type]


@dataclass
class Outer:
    inner: Inner


def test_two_loggers_may_receive_their_first_records_at_the_same_time() -> None:
    """Without a lock, msgspec ends the process with SIGSEGV."""
    sent = Outer(Inner(1))
    with ThreadPoolExecutor() as pool:
        first = pool.submit(decode, Outer, encode(sent))
        evaluated.wait()
        assert decode(Outer, encode(sent)) == first.result() == sent
