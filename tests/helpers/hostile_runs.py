"""Untrusted directories: a good run, next to files that must not break a reader.

Each entry of :data:`KINDS` puts one thing into the directory of :func:`write_good_run`, and names a
part of the one line that says what was skipped; an empty one where nothing has to be.
"""

from __future__ import annotations

import os
import socket
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
from tensorboard.compat.proto import types_pb2
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from telemetry.events import summaries
from telemetry.events.framing import frame
from telemetry.events.message_pack import encode
from telemetry.events.run_log import (
    Alerted,
    Begin,
    End,
    Failure,
    Frame,
    FullStep,
    Hyperparameters,
    LaidOut,
    Logged,
    LossFound,
    Norms,
    Random,
)
from telemetry.layers import MATRIX_STATISTICS
from tests.helpers.known_runs import COLUMN, alert_at, layout_of, write_dashboards, write_run

RUN = "20260101-000000-aaaa"
LAYERS = ("a", "b")
STEPS = 20
SCRIPT = "</script><img src=x onerror=alert(1)>"
GiB = 1 << 30
NOW = 1.7e9
EVENTS, RUN_LOG = "events.out.tfevents.{}", "telemetry.{}.runlog"

_numbers = count()


def write_good_run(log_dir: Path) -> None:
    """Two layers, 20 steps, one alert at step 7, a histogram and a picture of the first layer."""
    write_run(
        log_dir, layout_of(LAYERS), steps=range(STEPS), run=RUN, alerts=[alert_at(7, "b")],
        norms=lambda step: np.array([step, 2 * step], np.float32),
        matrices=lambda step: np.full((2, len(COLUMN)), 0.5, np.float32),
    )  # fmt: skip
    edges = np.linspace(-1, 1, 11)
    write_dashboards(
        log_dir, histograms={"activation/0000.a": {0: (edges[:-1], edges[1:], np.ones(10))}},
        pictures={"feature_maps/0000.a": {0: png(2, 2)}},
    )  # fmt: skip


# --- pieces ------------------------------------------------------------------------------------


def file_at(log_dir: Path, content: bytes = b"", name: str = RUN_LOG) -> Path:
    """A further file; its name sorts behind those of the good run."""
    path = log_dir / name.format(f"99999999{next(_numbers):02d}")
    path.write_bytes(content)
    return path


def name_at(log_dir: Path, name: str = RUN_LOG) -> Path:
    """Return the name of a file that does not exist yet."""
    path = file_at(log_dir, name=name)
    path.unlink()
    return path


FLOATS = struct.pack("<2f", 1, 2)
BEGIN = Begin(0, NOW, RUN, 0, continues=True)
LAYOUT = LaidOut(0, NOW, layout_of(LAYERS), [*COLUMN])
NORMS = Norms(3, NOW, memoryview(FLOATS), 1.0, (0.1,), 0.5, None, False)
FULL_STEP = FullStep(3, NOW, memoryview(FLOATS * len(MATRIX_STATISTICS)), memoryview(b""))
ALERTED = Alerted(3, NOW, alert_at(3, "a"), random=Random(0, {"cpu": b"1"}))
LOGGED = Logged(3, NOW, {"loss": 0.5})
END = End(3, NOW, Failure("ValueError", "bad", "line 1"))


def add(log_dir: Path, *frames: Frame | bytes, begin: Iterable[Frame] = (BEGIN, LAYOUT)) -> None:
    """Add a file of the good run, which continues it; bytes are the data of a frame."""
    data = [one if isinstance(one, bytes) else encode(one) for one in (*begin, *frames)]
    file_at(log_dir, b"".join(map(frame, data)))


def changed(good: Frame, **changes: Any) -> bytes:
    """Return the data of a frame with other fields; ``alert__step`` is one of the alert."""
    values = msgspec.to_builtins(good, builtin_types=(bytes, memoryview))
    for name, value in changes.items():
        name, _, inner = name.partition("__")
        place = 1 + good.__struct_fields__.index(name)
        if not inner:
            values[place] = value
        elif value is ...:
            del values[place][inner]
        else:
            values[place][inner] = value
    return msgspec.msgpack.encode(values)


def raw(*values: Any) -> bytes:
    return msgspec.msgpack.encode(values)


def event(*values: bytes, step: int = 0) -> bytes:
    return frame(summaries.event_of(values, step, 1.0))


def values(tag: str, shape: Sequence[int], content: bytes = b"", **fields: Any) -> bytes:
    """A tensor in which nothing needs to fit together."""
    value = Summary.Value(tag=tag)
    value.metadata.plugin_data.plugin_name = fields.pop("plugin", "scalars")
    value.metadata.data_class = fields.pop("data_class", 1)
    value.tensor.dtype = fields.pop("dtype", types_pb2.DT_FLOAT)
    for size in shape:
        value.tensor.tensor_shape.dim.add(size=size)
    value.tensor.tensor_content = content
    for name, items in fields.items():
        getattr(value.tensor, name).extend(items)
    return bytes(Summary(value=[value]).SerializeToString())


def png(width: int, height: int, padding: int = 0) -> bytes:
    """PNG file; it contains its pixels only if it is small."""
    rows = b"".join(bytes(1 + width) for _ in range(height)) if width * height < 1e6 else b""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"teXt", bytes(padding)), (b"IDAT", zlib.compress(rows))]
    parts = [_png_chunk(name, data) for name, data in [*chunks, (b"IEND", b"")]]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


# --- files -------------------------------------------------------------------------------------


def add_socket(log_dir: Path) -> None:
    here = Path.cwd()
    os.chdir(log_dir)  # a socket's path has at most 107 characters
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(name_at(Path()).name)
    finally:
        os.chdir(here)


def move_behind_link(log_dir: Path) -> None:
    for number, path in enumerate(sorted(log_dir.iterdir())):
        target = path.rename(log_dir.parent / f"{log_dir.name}-file-{number}")
        path.symlink_to(target)


def add_loop(log_dir: Path) -> None:
    path = name_at(log_dir)
    path.symlink_to(path)


def add_sparse_frame(log_dir: Path, name: str, then: bytes) -> None:
    """A whole frame of 3 GiB that takes no room on the disk, and another one behind it."""
    length = struct.pack("<Q", 3 * GiB)
    path = file_at(log_dir, length + frame(length)[-4:], name)
    with path.open("r+b") as file:
        file.seek(12 + 3 * GiB + 4)
        file.write(then)


def add_zeros(log_dir: Path, name: str, first: bytes) -> None:
    with file_at(log_dir, first, name).open("r+b") as file:
        file.truncate(100 * GiB)


def add_histogram(table: Any) -> Callable[[Path], None]:
    value = summaries.tensor(HISTOGRAM, np.array(table, np.float64), "histograms")
    return lambda d: file_at(d, event(value, step=5), EVENTS) and None


def add_picture(*strings: bytes) -> Callable[[Path], None]:
    value = values(
        PICTURE, [len(strings)], string_val=strings, plugin="images", data_class=3,
        dtype=types_pb2.DT_STRING,
    )  # fmt: skip
    return lambda d: file_at(d, event(value, step=5), EVENTS) and None


def add_foreign_files(log_dir: Path) -> None:
    with SummaryWriter(str(log_dir), filename_suffix=".torch") as writer:
        writer.add_histogram(HISTOGRAM, np.array([0.0, 1.0, 1e30]), 3)
        writer.add_text("note", SCRIPT, 3)
        writer.add_scalar("train/loss", 0.5, -3)
        writer.add_image(PICTURE, np.zeros((3, 2, 2)), 3)
        writer.add_hparams({"lr": 0.1}, {"accuracy": 1})


def add_damaged_files(log_dir: Path) -> None:
    for number in range(3000):
        (log_dir / f"telemetry.99{number:08d}.runlog").write_bytes(b"\x01" * 20)


def begins(count: int, *, same_run: bool) -> Iterator[Begin]:
    for number in range(count):
        run = RUN if same_run else f"{number}"
        yield Begin(STEPS, NOW - number, run, 0)


def add_overlapping_run(log_dir: Path) -> None:
    """An earlier run, which ends after the good one and has the same steps."""
    earlier = [Begin(0, NOW, "another", 0), LAYOUT]
    add(log_dir, NORMS, ALERTED, changed(NORMS, step=1, time_s=9e9), begin=earlier)


@dataclass(frozen=True)
class Kind:
    """Content of the directory, a part of its log line, and the resulting layers."""

    make: Callable[[Path], object]
    said: str = ""
    layers: Sequence[str] = LAYERS


CURVE = "other"
HISTOGRAM, HISTOGRAM_B, PICTURE = "activation/0000.a", "activation/0001.b", "feature_maps/0000.a"
BUCKETS = {"plugin": "histograms", "data_class": 2}
HERE = "at byte"  # of the file


def frames(*data: Frame | bytes, said: str = HERE, **changes: Any) -> Kind:
    return Kind(lambda d: add(d, *data), said, **changes)


def other(
    good: Frame, said: str | None = None, layers: Sequence[str] = LAYERS, **changes: Any
) -> Kind:
    """A frame with one field that is wrong, which the line names by its place."""
    [name] = changes
    first, _, inner = name.partition("__")
    place = f"$[{1 + good.__struct_fields__.index(first)}]" + (f".{inner}" if inner else "")
    return Kind(lambda d: add(d, changed(good, **changes)), place if said is None else said, layers)


def foreign(tag: str, shape: Sequence[int] = (8,), content: bytes = FLOATS * 4, **of: Any) -> Kind:
    value = values(tag, shape, content, **of)
    return Kind(lambda d: file_at(d, event(value), EVENTS), tag)


def picture(png: Callable[[], bytes], said: str = PICTURE) -> Kind:
    return Kind(lambda d: add_picture(b"2", b"2", png())(d), said)


def modules(*names: Any) -> Mapping[str, Any]:
    return {"layout": {"modules": [_module(name) for name in names], "parameters": []}}


def _module(name: Any, **more: Any) -> Mapping[str, Any]:
    return {"name": name, "type_name": "L", **more}


def parameter(owner: Any, shape: Sequence[int]) -> Mapping[str, Any]:
    return {"layout__parameters": [{"name": "w", "module_name": owner, "shape": shape}]}


def pairs(*numbers: int) -> bytes:
    """Units as they are stored."""
    return zlib.compress(np.array(numbers, "<u4").reshape(-1, 2).T.tobytes())


HEAD = b"\x03" + msgspec.msgpack.encode(NOW)  # step 3
DEEP = b"\x91" * 100_000

KINDS = {
    # In place of a file.
    "fifo": Kind(lambda d: os.mkfifo(name_at(d)), "not a regular file"),
    "fifo for events": Kind(lambda d: os.mkfifo(name_at(d, EVENTS)), "not a regular file"),
    "socket": Kind(add_socket, "999"),
    "directory": Kind(lambda d: name_at(d).mkdir(), "Is a directory"),
    "endless device": Kind(lambda d: name_at(d).symlink_to("/dev/zero"), "not a regular file"),
    "terminal": Kind(lambda d: name_at(d).symlink_to("/dev/tty"), "999"),
    "link to itself": Kind(add_loop, "999"),
    "link to nothing": Kind(lambda d: name_at(d).symlink_to("gone"), "No such file"),
    "links to files": Kind(move_behind_link),
    "unreadable file": Kind(lambda d: file_at(d).chmod(0), "Permission" if os.geteuid() else ""),
    "loop of directories": Kind(lambda d: (d / "again").symlink_to(".")),
    # Run logs.
    "empty file": Kind(lambda d: file_at(d)),
    "truncated frame": Kind(lambda d: file_at(d, frame(encode(BEGIN))[:-3])),
    "corrupted frame": Kind(lambda d: file_at(d, frame(encode(BEGIN))[:-6] + bytes(6)), "damaged"),
    "giant length": Kind(
        lambda d: file_at(d, struct.pack("<Q", 2**62) + frame(struct.pack("<Q", 2**62))[-4:])
    ),
    "frame of 3 GiB": Kind(
        lambda d: add_sparse_frame(d, RUN_LOG, frame(encode(BEGIN))), "3221225472 bytes"
    ),
    "frame of 100 MB": Kind(lambda d: add(d, b"\x90" * 100_000_000), "100000000 bytes"),
    "100 GiB of zeros": Kind(lambda d: add_zeros(d, RUN_LOG, frame(encode(BEGIN)))),
    "3000 damaged files": Kind(add_damaged_files, "more"),
    # Frames.
    "no frame": frames(b"\xc1"),
    "frame without data": frames(b""),
    "frame is an object": frames(msgspec.msgpack.encode({"kind": 2})),
    "frame is deep": frames(b"\x94\x02" + HEAD + DEEP),
    "frame of an unknown kind": frames(raw(99, 3, NOW), said="99"),
    "kind of 2**64 - 1": frames(raw(2**64 - 1, 3, NOW)),
    "kind is a word": frames(raw("2", 3, NOW)),
    "step is negative": other(NORMS, step=-1),
    "step is 2**53 + 1": other(NORMS, step=2**53 + 1),
    "step is 2**64 - 1": other(FULL_STEP, step=2**64 - 1),
    "step is NaN": other(NORMS, step=np.nan),
    "step is true": other(NORMS, step=True),
    "time is NaN": other(NORMS, time_s=np.nan),
    "time is infinite": other(ALERTED, time_s=np.inf),
    "time is negative": other(NORMS, time_s=-1.0),
    "frame of an extension": frames(b"\x93\x02" + HEAD[:1] + b"\xd4\x05\x00"),
    "frame of few fields": frames(raw(2, 3, NOW)),
    "frame of more fields": frames(raw(5, 3, NOW, {"loss": 0.5}, "more"), said=""),
    "array of 4 GB claimed": frames(b"\x99\x02" + HEAD + b"\xc6\xff\xff\xff\xff"),
    "object of 4 GB claimed": frames(b"\x94\x05" + HEAD + b"\xdf\xff\xff\xff\xff"),
    "list of 2 GB claimed": frames(b"\x95\x01" + HEAD + b"\x82\xa7modules\xdd\x7f\xff\xff\xff"),
    # Numbers.
    "norms of other bytes": other(NORMS, "step 3", norms=FLOATS[:7]),
    "norms without bytes": other(NORMS, "step 3", norms=b""),
    "norms are numbers": other(NORMS, norms=[1.0, 2.0]),
    "total is a word": other(NORMS, total="1"),
    "learning rates are words": other(NORMS, "$[5][0]", learning_rates=["x"]),
    "50,000 learning rates": other(NORMS, learning_rates=[0.1] * 50_000),
    "loss is a list": other(NORMS, loss=[1]),
    "loss beyond all": other(NORMS, "", loss=-np.inf),
    "skipped is a word": other(NORMS, skipped="no"),
    "table of other bytes": other(FULL_STEP, "step 3", table=FLOATS),
    "table is a text": other(FULL_STEP, table="x"),
    "units of noise": other(FULL_STEP, "units of step 3", units=b"\xff" * 9),
    "units that inflate": other(FULL_STEP, "units of step 3", units=zlib.compress(bytes(GiB >> 4))),
    "units of 2**32": other(FULL_STEP, "units of step 3", units=pairs(1, 0, 0, 2**32 - 1)),
    "units that are not there": other(FULL_STEP, "", units=pairs(2**32 - 1, 2**32 - 1)),
    "scalars are words": other(LOGGED, "$[3]", scalars={"loss": "x"}),
    "scalars are a list": other(LOGGED, scalars=[1]),
    "scalars without names": other(LOGGED, "$[3]", scalars={1: 1.0}),
    "a million scalars": Kind(
        lambda d: add(d, *(Logged(3, NOW, {f"{n}.{m}": 1.0 for m in range(10_000)})
                           for n in range(100))), "Logged"),
    "hyperparameters are lists": frames(raw(7, 3, NOW, {"lr": [1]}), said="$[3]"),
    "hyperparameters of scripts": frames(
        Hyperparameters(3, NOW, {SCRIPT: SCRIPT, "\x1b[2J": "\x1b[2J"}), said=""
    ),
    "loss of another tag": frames(LossFound(3, NOW, SCRIPT, 2**53), said=""),
    "loss of a tag of 1 MB": frames(LossFound(3, NOW, "x" * 2**20, 0), said="$[3]"),
    # Begins.
    "begin is deep": frames(b"\x97\x00" + HEAD + DEEP),
    "begin of 2 GB claimed": frames(b"\x97\x00" + HEAD + b"\xdd\x7f\xff\xff\xff"),
    "begin without fields": frames(raw(0, 3, NOW)),
    "begin of a long run": other(BEGIN, run="x" * 2**20),
    "begin of a script": Kind(lambda d: add(d, begin=[Begin(0, 1.0, SCRIPT, 0), LAYOUT])),
    "begin of a seed of 2**64 - 1": Kind(
        lambda d: add(d, begin=[Begin(0, NOW, RUN, 2**64 - 1, continues=True)])
    ),
    "later format": other(BEGIN, "format 2", format=2),
    "format is a word": other(BEGIN, format="1"),
    "format is infinite": other(BEGIN, format=np.inf),
    "frames before a begin": Kind(lambda d: add(d, NORMS, begin=()), "nothing began"),
    "steps without a layout": Kind(lambda d: add(d, NORMS, FULL_STEP, begin=[BEGIN])),
    "12,000 begins of the run": Kind(
        lambda d: add(d, begin=begins(12_000, same_run=True)), "10000"
    ),
    "12,000 runs": Kind(lambda d: add(d, begin=begins(12_000, same_run=False)), "10000"),
    "runs that overlap": Kind(add_overlapping_run),
    # Layouts.
    "layout is a list": other(LAYOUT, layout=[[], []]),
    "modules is a number": other(LAYOUT, layout__modules=3),
    "modules are words": other(LAYOUT, layout__modules=["a", "b"]),
    "names are lists": other(LAYOUT, "name`", **modules(["x"], "y")),
    "names are numbers": other(LAYOUT, "name`", **modules(1, "y")),
    "names twice": other(LAYOUT, "same name", **modules("x", "x")),
    "names of 1 MB": other(LAYOUT, "too long", **modules("x" * 2**20, "y")),
    "names are half characters": frames(
        changed(LAYOUT, **modules("half", "y")).replace(b"\xa4half", b"\xa4\xed\xa0\x80x")
    ),
    "names are control characters": other(
        LAYOUT, "", [*LAYERS, "\x1b[2J\n", "y"], **modules("\x1b[2J\n", "y")
    ),
    "names are scripts": other(LAYOUT, "", [*LAYERS, SCRIPT, "y"], **modules(SCRIPT, "y")),
    "owner is NaN": other(LAYOUT, "module_name`", **parameter(np.nan, [1])),
    "owner is missing": other(LAYOUT, "parameters", **parameter("c", [1])),
    "shape is negative": other(LAYOUT, "parameters", **parameter("a", [-1])),
    "shape is endless": other(LAYOUT, "parameters", **parameter("a", [2**53] * 50)),
    "shape of 65 sizes": other(LAYOUT, "parameters", **parameter("a", [1] * 65)),
    "statistics are numbers": other(LAYOUT, "$[4][0]", statistics=[1]),
    "code without a line": other(
        LAYOUT, "line`", layout__modules=[_module("a", user_code={"file": "x"})]
    ),
    "layout is deep": frames(b"\x95\x01" + HEAD + b"\x82\xa7modules\x91" + DEEP),
    "3000 layouts": Kind(
        lambda d: add(d, *(changed(LAYOUT, step=n, **modules("a", f"{n}")) for n in range(3000))),
        layers=[*LAYERS, *map(str, range(3000))],
    ),
    "300,000 modules": Kind(
        lambda d: add(d, changed(LAYOUT, **modules(*map(str, range(300_000))))), "modules"
    ),
    # Alerts.
    "alert at step NaN": other(ALERTED, alert__step=np.nan),
    "alert at another step": other(ALERTED, "another step", alert__step=4),
    "alert at step '3'": other(ALERTED, alert__step="3"),
    "alert without step": other(ALERTED, "`step`", alert__step=...),
    "alert is a list": other(ALERTED, alert=[1, 2]),
    "alert in a list": other(ALERTED, alert__module_name=["a"]),
    "alert of a list": other(ALERTED, alert__value=[1]),
    "alert of NaN": other(ALERTED, "", alert__value=np.nan),
    "alert without summary": other(ALERTED, "`summary`", alert__summary=...),
    "alert of 10 MB": other(ALERTED, "", alert__summary="x" * 10_000_000),
    "alert of unknown severity": other(ALERTED, alert__severity="doom"),
    "alert of unknown stage": other(ALERTED, alert__stage="doom"),
    "alert with a number of consequences": other(ALERTED, alert__consequences=3),
    "alert with lists of consequences": other(ALERTED, alert__consequences=[["x"]]),
    "alert of control characters": other(ALERTED, "", alert__summary="\x1b[2J\n"),
    "alert of a script": frames(
        Alerted(3, NOW, alert_at(3, SCRIPT, summary=SCRIPT, kind=SCRIPT)), said=""
    ),
    "alert is deep": frames(b"\x96\x04" + HEAD + b"\x81\xa4step" + DEEP),
    "batches are words": other(ALERTED, batches=["x"]),
    "random states are words": other(ALERTED, random={"step": 1, "states": {"cpu": 5}}),
    "12,000 alerts": frames(
        *(changed(ALERTED, alert__module_name=f"m{n}") for n in range(12_000)), said="32 MiB"
    ),
    # Ends.
    "end of a list": other(END, failure=["x"]),
    "end of 10 MB": other(END, failure={"type": "x", "message": "x" * 10_000_000, "traceback": ""}),
    "end of a script": other(
        END, "", failure={"type": SCRIPT, "message": "\x1b[2J", "traceback": SCRIPT}
    ),
    # Event files.
    "corrupted event": Kind(
        lambda d: file_at(d, event(summaries.scalar("x", 1))[:-6] + bytes(6), EVENTS), "damaged"
    ),
    "no event": Kind(lambda d: file_at(d, frame(b"\xff" * 9), EVENTS), "damaged"),
    "event of 3 GiB": Kind(
        lambda d: add_sparse_frame(d, EVENTS, event(summaries.scalar("x", 1))), "3221225472 bytes"
    ),
    "100 GiB of zeros in events": Kind(
        lambda d: add_zeros(d, EVENTS, event(summaries.scalar("x", 1)))
    ),
    "files of other tools": Kind(add_foreign_files),
    "negative shape": foreign(HISTOGRAM_B, [-2, -4], **BUCKETS),
    "dimensions beyond memory": foreign(HISTOGRAM_B, [2**62, 4], **BUCKETS),
    "product of 0 mod 2**64": foreign(HISTOGRAM_B, [2**32, 2**32], **BUCKETS),
    "one value for all": foreign(HISTOGRAM_B, [2**50], b"", float_val=[1.0], **BUCKETS),
    "unknown dtype": foreign(HISTOGRAM_B, dtype=77, **BUCKETS),
    "objects": foreign(HISTOGRAM_B, dtype=types_pb2.DT_VARIANT, **BUCKETS),
    "text for a scalar": foreign(CURVE, [1], b"", dtype=types_pb2.DT_STRING, string_val=[b"x"]),
    "many values for a scalar": foreign(CURVE),
    "odd bytes for a scalar": foreign(CURVE, [1], FLOATS[:3]),
    "histogram of odd bytes": foreign(HISTOGRAM_B, [1, 3], FLOATS[:7], **BUCKETS),
    "histogram of NaN": Kind(add_histogram([[np.nan] * 3] * 2), HISTOGRAM),
    "histogram backwards": Kind(add_histogram([[5, 6, 1], [1, 2, 1]]), HISTOGRAM),
    "histogram of less than nothing": Kind(add_histogram([[0, 1, -5]]), HISTOGRAM),
    "histogram of the largest": Kind(add_histogram([[-1e308, 1e308, 1], [1e308, 1.7e308, 1]])),
    "histogram of two columns": Kind(add_histogram([[0, 1], [1, 2]]), HISTOGRAM),
    "picture of 300 MB": picture(lambda: png(2, 2, padding=300_000_000), "bytes"),
    "picture of 20 MB": picture(lambda: png(2, 2, padding=20_000_000)),
    "picture of 60000 × 60000": picture(lambda: png(60_000, 60_000)),
    "picture of SVG": picture(lambda: b"<svg onload=alert(1)>"),
    "picture cut off": picture(lambda: png(2, 2)[:20]),
    "picture without a picture": Kind(add_picture(b"2")),
}  # fmt: skip


@contextmanager
def hostile_run(name: str) -> Iterator[tuple[Path, Kind]]:
    """Write a run of a kind; its directory is removed at once, for some are large."""
    with TemporaryDirectory() as folder:
        log_dir = Path(folder, "run")
        log_dir.mkdir()
        write_good_run(log_dir)
        KINDS[name].make(log_dir)
        yield log_dir, KINDS[name]
