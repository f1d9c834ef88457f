"""Untrusted directories: a good run, next to files that must not break a reader.

Each entry of :data:`KINDS` puts one thing into the directory of :func:`write_good_run`, and names a
part of the one line that says what was skipped; an empty one where nothing has to be.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tensorboard.compat.proto import types_pb2
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from telemetry.events import summaries
from telemetry.events.framing import frame
from telemetry.events.page_format import PLUGIN_NAME, alert_tag, encode_layout, layout_tag
from telemetry.flight.file import FORMAT
from telemetry.layers import MATRIX_STATISTICS, STATISTICS
from tests.helpers.known_runs import (
    COLUMN,
    alert_at,
    layout_of,
    page,
    write_dashboards,
    write_run,
)

SESSION = "20260101-000000.000-aaaa"
OTHER = "20260101-000000.000-0000"  # sorts before it: its layout does not hide the good run
LAYERS = ("a", "b")
STEPS = 20
SCRIPT = "</script><img src=x onerror=alert(1)>"
DEEP = b"[" * 100_000
GiB = 1 << 30

_numbers = count()


def write_good_run(log_dir: Path) -> None:
    """Two layers, 20 steps, one alert at step 7, a histogram and a picture of the first layer."""
    write_run(
        log_dir, layout_of(LAYERS), steps=range(STEPS), session=SESSION,
        norms=lambda step: np.array([step, 2 * step], np.float32),
        matrices=lambda step: np.full((2, len(COLUMN)), 0.5, np.float32),
        alerts=[alert_at(7, "b")],
    )  # fmt: skip
    edges = np.linspace(-1, 1, 11)
    write_dashboards(
        log_dir, histograms={"activation/0000.a": {0: (edges[:-1], edges[1:], np.ones(10))}},
        pictures={"feature_maps/0000.a": {0: png(2, 2)}},
    )  # fmt: skip


# --- pieces ------------------------------------------------------------------------------------


def file_at(log_dir: Path, content: bytes = b"") -> Path:
    """A further event file; its name sorts behind those of the good run."""
    path = log_dir / f"events.out.tfevents.9999999999.{next(_numbers):06d}"
    path.write_bytes(content)
    return path


def name_at(log_dir: Path) -> Path:
    """Return the name of a file that does not exist yet."""
    path = file_at(log_dir)
    path.unlink()
    return path


def record(*values: bytes, step: int = 0) -> bytes:
    return frame(summaries.event_of(values, step, 1.0))


def add(log_dir: Path, *values: bytes, step: int = 0) -> None:
    file_at(log_dir, record(*values, step=step))


def values(tag: str, shape: Sequence[int], content: bytes = b"", **fields: Any) -> bytes:
    """A tensor in which nothing needs to fit together."""
    value = Summary.Value(tag=tag)
    value.metadata.plugin_data.plugin_name = fields.pop("plugin", PLUGIN_NAME)
    value.metadata.data_class = fields.pop("data_class", 2)
    value.tensor.dtype = fields.pop("dtype", types_pb2.DT_FLOAT)
    for size in shape:
        value.tensor.tensor_shape.dim.add(size=size)
    value.tensor.tensor_content = content
    for name, items in fields.items():
        getattr(value.tensor, name).extend(items)
    return bytes(Summary(value=[value]).SerializeToString())


def chunk(kind: str = "m", number: object = 99) -> str:
    return f"telemetry/{kind}/{SESSION}/0000/{number}"


def text(tag: str, content: Any) -> bytes:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return page(tag, data)


def layout(**changes: Any) -> bytes:
    """The text of a layout of two layers, with changes."""
    good = json.loads(encode_layout(layout_of(["x", "y"]), MATRIX_STATISTICS))
    return json.dumps(good | changes).encode()


def alert(**changes: Any) -> bytes:
    """The text of an alert, with changes; ``...`` leaves a field out."""
    fields = asdict(alert_at(3, "a")) | {"format": 1} | changes
    return json.dumps({k: v for k, v in fields.items() if v is not ...}).encode()


def flight(**changes: Any) -> bytes:
    """The text of a small flight file, with changes; ``...`` leaves a field out."""
    columns = {s.name: [1.0, "nan"] for s in STATISTICS}
    fields = {
        "format": FORMAT,
        "complete": True,
        "step": 3,
        "batch": 3,
        "batches": [],
        "first_bad_module": "b",
        "alerts": [asdict(alert_at(3, "b"))],
        "exception": None,
        "random": {"seed": 1, "step": None, "states": {}},
        "steps": {
            "step": [2, 3], "wall_time": [1, 2], "loss": [0.5, None], "grad_norm": [1, "nan"],
            "learning_rates": [[0.1], []], "loss_scale": [None, None],
            "skipped": [False, False], "full": [True, True],
        },
        "modules": {"name": LAYERS, "type": ["Linear", "Linear"], "code": ["", ""], "left_out": 0},
        "grad_norms": [[1, 2], [1, 2]],
        "profiles": [{"when": "at", "step": 3, **columns, "sketches": None}],
        "picture": None,
    } | changes  # fmt: skip
    return json.dumps({k: v for k, v in fields.items() if v is not ...}).encode()


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


def link(name: str, target: str) -> Callable[[Path], None]:
    return lambda d: (d / name).symlink_to(target)


def add_loop(log_dir: Path) -> None:
    path = name_at(log_dir)
    path.symlink_to(path)


def add_sparse_record(log_dir: Path) -> None:
    """A whole record of 3 GiB that takes no room on the disk, and an event behind it."""
    length = struct.pack("<Q", 3 * GiB)
    path = file_at(log_dir, length + frame(length)[-4:])
    with path.open("r+b") as file:
        file.seek(12 + 3 * GiB + 4)
        file.write(record(text(alert_tag(SESSION, 50), alert(step=9))))


def add_zeros(log_dir: Path) -> None:
    with file_at(log_dir, record(summaries.scalar("x", 1))).open("r+b") as file:
        file.truncate(100 * GiB)


def write_flight(content: bytes, name: str = "flight-3.json") -> Callable[[Path], None]:
    return lambda d: (d / name).write_bytes(content) and None


def add_layout(content: Any, *, step: int = 0) -> Callable[[Path], None]:
    return lambda d: add(d, text(layout_tag(OTHER, 0), content), step=step)


def add_alert(content: bytes) -> Callable[[Path], None]:
    return lambda d: add(d, text(alert_tag(SESSION, 77), content), step=3)


def add_values(*items: Summary.Value, step: int = 0) -> Callable[[Path], None]:
    return lambda d: add(d, *items, step=step)


def add_norms(distance: float, *, step: int = 5) -> Callable[[Path], None]:
    block = np.array([[0, 1, 1], [distance, 1, 1]], np.float32)
    return add_values(page(chunk("n"), block), step=step)


def add_histogram(table: Any) -> Callable[[Path], None]:
    value = summaries.tensor("activation/0000.a", np.array(table, np.float64), "histograms")
    return add_values(value, step=5)


def add_picture(*strings: bytes) -> Callable[[Path], None]:
    value = values(
        "feature_maps/0000.a", [len(strings)], string_val=strings, plugin="images", data_class=3,
        dtype=types_pb2.DT_STRING,
    )  # fmt: skip
    return add_values(value, step=5)


def add_foreign_files(log_dir: Path) -> None:
    with SummaryWriter(str(log_dir), filename_suffix=".torch") as writer:
        writer.add_histogram("activation/0000.a", np.array([0.0, 1.0, 1e30]), 3)
        writer.add_text("note", SCRIPT, 3)
        writer.add_scalar("train/loss", 0.5, -3)
        writer.add_image("feature_maps/0000.a", np.zeros((3, 2, 2)), 3)
        writer.add_hparams({"lr": 0.1}, {"accuracy": 1})


def add_many_sessions(log_dir: Path) -> None:
    records = (
        record(text(f"telemetry/layout/0-{n:04d}/0000", layout()), step=n) for n in range(3000)
    )
    file_at(log_dir, b"".join(records))


def add_overlapping_sessions(log_dir: Path) -> None:
    """A session with an earlier name continues in parallel and repeats its own steps."""
    norms = [page(f"telemetry/n/{OTHER}/0000/{n}", np.ones((1, 3), np.float32)) for n in range(3)]
    add(log_dir, text(layout_tag(OTHER, 0), encode_layout(layout_of(LAYERS), MATRIX_STATISTICS)))
    for value, step in zip(norms, (5, 3, 5), strict=True):
        add(log_dir, value, step=step)


def add_tiny_files(log_dir: Path) -> None:
    for _ in range(3000):
        file_at(log_dir, b"\x01" * 20)


def add_many_alerts(log_dir: Path) -> None:
    file_at(log_dir, b"".join(
        record(text(alert_tag(SESSION, n), alert(module_name=f"m{n}")))
        for n in range(100, 12_000)
    ))  # fmt: skip


NAMES = [["\x1b[2J\n", "L"], ["\ud800", "\udfff"]]


@dataclass(frozen=True)
class Kind:
    """Content of the directory, a part of its log line, and the resulting layers."""

    make: Callable[[Path], object]
    said: str = ""
    layers: Sequence[str] = LAYERS

    @property
    def in_flight(self) -> bool:
        """Whether only readers of flight files report it."""
        return self.said.startswith("flight-")


FLOATS = struct.pack("<8f", *range(8))
CURVE = {"plugin": "scalars", "data_class": 1}
HISTOGRAM, PICTURE = "activation/0000.a", "feature_maps/0000.a"


def numbers(shape: Sequence[int], content: bytes = b"", kind: str = "m", **fields: Any) -> Kind:
    step = fields.pop("step", 0)
    value = values(chunk(kind), shape, content, **fields)
    return Kind(add_values(value, step=step), chunk(kind))


def no_chunk(number: object) -> Kind:
    return Kind(add_values(values(chunk(number=number), [2, 8], FLOATS * 2)))


def foreign(tag: str, shape: Sequence[int] = (8,), content: bytes = FLOATS, **fields: Any) -> Kind:
    return Kind(add_values(values(tag, shape, content, **fields)), tag)


def changed_layout(said: str = "", *, layers: Sequence[str] = LAYERS, **changes: Any) -> Kind:
    return Kind(add_layout(layout(**changes)), said, layers)


def layout_text(content: Any, said: str = layout_tag(OTHER, 0)) -> Kind:
    return Kind(lambda d: add_layout(content() if callable(content) else content)(d), said)


def changed_alert(said: str = "", **changes: Any) -> Kind:
    return Kind(lambda d: add_alert(alert(**changes))(d), said)


def alert_text(old: bytes, new: bytes, said: str) -> Kind:
    return Kind(add_alert(alert().replace(old, new)), said)


def changed_flight(said: str = "", **changes: Any) -> Kind:
    return Kind(write_flight(flight(**changes)), said and f"flight-3.json: {said}")


def picture(png: Callable[[], bytes], said: str = PICTURE) -> Kind:
    return Kind(lambda d: add_picture(b"2", b"2", png())(d), said)


def large_list() -> bytes:
    return b"[" + b"[]," * 33_000_000 + b"0]"


KINDS = {
    # Replacement of a file.
    "fifo": Kind(lambda d: os.mkfifo(name_at(d)), "not a regular file"),
    "socket": Kind(add_socket, "999"),
    "directory": Kind(lambda d: name_at(d).mkdir(), "not a regular file"),
    "endless device": Kind(lambda d: name_at(d).symlink_to("/dev/zero"), "not a regular file"),
    "terminal": Kind(lambda d: name_at(d).symlink_to("/dev/tty"), "999"),
    "link to itself": Kind(add_loop, "999"),
    "link to nothing": Kind(lambda d: name_at(d).symlink_to("gone"), "No such file"),
    "links to files": Kind(move_behind_link),
    "unreadable file": Kind(lambda d: file_at(d).chmod(0), "Permission" if os.geteuid() else ""),
    "endless alerts.jsonl": Kind(link("alerts.jsonl", "/dev/zero")),
    "endless flight file": Kind(link("flight-3.json", "/dev/zero"), "flight-3.json"),
    "fifo as flight file": Kind(lambda d: os.mkfifo(d / "flight-3.json"), "flight-3.json"),
    "directory as flight file": Kind(lambda d: (d / "flight-3.json").mkdir(), "flight-3.json"),
    "loop of directories": Kind(link("again", ".")),
    # Event files.
    "empty file": Kind(lambda d: file_at(d)),
    "truncated record": Kind(lambda d: file_at(d, record(summaries.scalar("x", 1))[:-3])),
    "corrupted record": Kind(
        lambda d: file_at(d, record(summaries.scalar("x", 1))[:-6] + bytes(6)), "damaged"
    ),
    "no event": Kind(lambda d: file_at(d, frame(b"\xff" * 9)), "damaged"),
    "giant length": Kind(
        lambda d: file_at(d, struct.pack("<Q", 2**62) + frame(struct.pack("<Q", 2**62))[-4:])
    ),
    "record of 3 GiB": Kind(add_sparse_record, "3221225472 bytes"),
    "100 GiB of zeros": Kind(add_zeros),
    "3000 damaged files": Kind(add_tiny_files, "more"),
    "files of other tools": Kind(add_foreign_files),
    # Tensors.
    "negative shape": numbers([-2, -4], FLOATS),
    "shape of other bytes": numbers([3, 8], FLOATS),
    "odd byte count": numbers([2, 1], FLOATS[:7]),
    "other columns": numbers([1, 8], FLOATS),
    "no dimension": numbers([], FLOATS[:4]),
    "no dimension of norms": numbers([], FLOATS[:4], "n"),
    "five dimensions": numbers([1, 1, 1, 1, 8], FLOATS),
    "dimensions beyond memory": numbers([2**62, 4]),
    "product of 0 mod 2**64": numbers([2**32, 2**32]),
    "one value for all": numbers([2**50], float_val=[1.0]),
    "none of many": numbers([0, 2**40]),
    "text for numbers": numbers([1], dtype=types_pb2.DT_STRING, string_val=[b"x"]),
    "numbers for a layout": foreign(layout_tag(OTHER, 0)),
    "numbers for an alert": foreign(alert_tag(SESSION, 9)),
    "no text at all": foreign(alert_tag(SESSION, 9), [0], b"", dtype=types_pb2.DT_STRING),
    "objects": numbers([2, 8], dtype=types_pb2.DT_VARIANT),
    "unknown dtype": numbers([8], FLOATS, dtype=77),
    "complex numbers": numbers([4], FLOATS, dtype=types_pb2.DT_COMPLEX64),
    "negative step": numbers([2, 8], FLOATS * 2, step=-5),
    "last step of all": numbers([2, 8], FLOATS * 2, step=2**63 - 1),
    "NaN as step of norms": Kind(add_norms(np.nan), chunk("n")),
    "infinite step of norms": Kind(add_norms(-np.inf), chunk("n")),
    "huge step of norms": Kind(add_norms(1e30), chunk("n")),
    "norms before the start": Kind(add_norms(-100), chunk("n")),
    "number of 5000 digits": no_chunk("1" * 5000),
    "digits of another script": no_chunk("\u0663"),
    "tag of 1 MB": no_chunk("x" * 2**20),
    "layout of a strange tag": Kind(
        add_values(text("telemetry/layout/" + "1" * 5000, layout())), "telemetry/layout/1"
    ),
    "text for a scalar": foreign(
        "loss", [1], b"", dtype=types_pb2.DT_STRING, string_val=[b"x"], **CURVE
    ),
    "many values for a scalar": foreign("loss", **CURVE),
    "odd bytes for a scalar": foreign("other", [1], FLOATS[:3], **CURVE),
    "loss beyond all": Kind(add_values(summaries.scalar("loss", np.inf), step=-(2**63))),
    # Histograms and pictures.
    "histogram of NaN": Kind(add_histogram([[np.nan] * 3] * 2), HISTOGRAM),
    "histogram backwards": Kind(add_histogram([[5, 6, 1], [1, 2, 1]]), HISTOGRAM),
    "histogram of less than nothing": Kind(add_histogram([[0, 1, -5]]), HISTOGRAM),
    "histogram of the largest": Kind(add_histogram([[-1e308, 1e308, 1], [1e308, 1.7e308, 1]])),
    "histogram of two columns": Kind(add_histogram([[0, 1], [1, 2]]), HISTOGRAM),
    "histogram of odd bytes": foreign(
        "activation/0001.b", [1, 3], FLOATS[:11], plugin="histograms"
    ),
    "picture of 300 MB": picture(lambda: png(2, 2, padding=300_000_000), "bytes"),
    "picture of 20 MB": picture(lambda: png(2, 2, padding=20_000_000)),
    "picture of 60000 × 60000": picture(lambda: png(60_000, 60_000)),
    "picture of SVG": picture(lambda: b"<svg onload=alert(1)>"),
    "picture cut off": picture(lambda: png(2, 2)[:20]),
    "picture without a picture": Kind(add_picture(b"2")),
    # Layouts.
    "layout is a list": layout_text([1, 2]),
    "layout is null": layout_text(None),
    "layout is deep": layout_text(DEEP),
    "layout is no text": layout_text(b"\xff\xfe\xff"),
    "layout of 100 MB": layout_text(large_list),
    "names are lists": changed_layout("modules", modules=[[["x"], "L"], ["y", "L"]]),
    "names are numbers": changed_layout("modules", modules=[[1, "L"], ["y", "L"]]),
    "names twice": changed_layout("modules", modules=[["x", "L"], ["x", "L"]]),
    "names of 1 MB": changed_layout("modules", modules=[["x" * 2**20, "L"], ["y", "L"]]),
    "names are half characters": changed_layout(
        modules=NAMES, layers=["\x1b[2J\n", "\ud800", *LAYERS]
    ),
    "names are scripts": changed_layout(
        modules=[[SCRIPT, SCRIPT], ["y", "L"]], layers=[SCRIPT, "y", *LAYERS]
    ),
    "modules is a number": changed_layout("modules", modules=3),
    "owner is NaN": changed_layout("parameters", parameters=[["w", np.nan, [1]]]),
    "owner is negative": changed_layout("parameters", parameters=[["w", -1, [1]]]),
    "owner is missing": changed_layout("parameters", parameters=[["w", 2, [1]]]),
    "shape is negative": changed_layout("parameters", parameters=[["w", 0, [-1]]]),
    "shape is endless": changed_layout("parameters", parameters=[["w", 0, [10**18] * 50]]),
    "statistics are numbers": changed_layout("statistics", statistics=[1]),
    "layout without fields": layout_text({"format": 1}, "modules"),
    "layout of step -1": Kind(add_layout(layout(), step=-(2**63)), layout_tag(OTHER, 0)),
    "later format": layout_text({"format": 2}, "format 2"),
    "format is a word": layout_text({"format": "1"}, "format"),
    "format is infinite": layout_text(b'{"format": 1e999}', "format"),
    # Alerts.
    "alert at step 1e999": alert_text(b'"step": 3', b'"step": 1e999', "step"),
    "alert at step NaN": changed_alert("step", step=np.nan),
    "alert at step -1": changed_alert("step", step=-1),
    "alert at step 10**400": changed_alert("step", step=10**400),
    "alert at step 10**5000": alert_text(
        b'"step": 3', b'"step": 1' + b"0" * 5000, alert_tag(SESSION, 77)
    ),
    "alert at step '3'": changed_alert("step", step="3"),
    "alert without step": changed_alert("step", step=...),
    "alert in a list": changed_alert("module_name", module_name=["a"]),
    "alert of a list": changed_alert("value", value=[1]),
    "alert beyond floats": alert_text(
        b'"value": 1000000000.0', b'"value": 1' + b"0" * 400, "value"
    ),
    "alert without summary": changed_alert("summary", summary=...),
    "alert of 10 MB": Kind(lambda d: add_alert(alert(summary="x" * 10_000_000))(d)),
    "alert of unknown severity": changed_alert(severity="doom"),
    "alert of unknown stage": changed_alert(stage="doom"),
    "alert of a list of stages": changed_alert("stage", stage=["resolved"]),
    "alert with a number of consequences": changed_alert("consequences", consequences=3),
    "alert with lists of consequences": changed_alert("consequences", consequences=[["x"]]),
    "alert of half characters": changed_alert(summary="\ud800\x1b[2J", kind="\udfff"),
    "alert of a script": changed_alert(summary=SCRIPT, module_name=SCRIPT),
    "alert is deep": Kind(add_alert(b'{"format": 1, "step": ' + DEEP), alert_tag(SESSION, 77)),
    "12,000 alerts": Kind(add_many_alerts, "10000"),
    # Sessions.
    "sessions that overlap": Kind(add_overlapping_sessions),
    "3000 sessions": Kind(add_many_sessions, layers=["x", "y", *LAYERS]),
    # Flight files.
    "flight is empty": Kind(write_flight(b""), "flight-3.json"),
    "flight is a list": Kind(write_flight(b"[]"), "flight-3.json"),
    "flight is null": Kind(write_flight(b"null"), "flight-3.json"),
    "flight is {}": Kind(write_flight(b"{}"), "flight-3.json"),
    "flight is minimal": Kind(write_flight(b'{"format": "%s"}' % FORMAT.encode()), "flight-3.json"),
    "flight is deep": Kind(write_flight(DEEP), "flight-3.json"),
    "flight of 100 MB": Kind(lambda d: write_flight(large_list())(d), "flight-3.json"),
    "flight of scripts": changed_flight(first_bad_module=SCRIPT),
    "flight of half characters": changed_flight(first_bad_module="\ud800\x1b[2J"),
    "flight with an empty alert": changed_flight("alerts", alerts=[{}]),
    "flight of a long step": changed_flight("step", step=[3]),
    "flight with unequal columns": changed_flight(
        "modules", modules={"name": ["b"] * 9, "type": ["L"], "code": [], "left_out": 0}
    ),
    "flight with a short profile": changed_flight(
        "profiles", profiles=[{"when": "at", "step": 3, "activation_rms": [1]}]
    ),
    "flight of words": changed_flight(
        "steps.loss",
        steps={"step": [1], "loss": ["x"], "grad_norm": [1], "learning_rates": [[]]},
    ),
    "flight of extremes": changed_flight(
        steps={"step": [1, 2], "loss": [-1.7e308, 1.7e308],
               "grad_norm": [5e-324, 1.7e308], "learning_rates": [[], []]}
    ),
    "flight at step ²": Kind(write_flight(flight(), "flight-\u00b2.json")),
    "flights": Kind(lambda d: [
        write_flight(b"{}", f"flight-{n}.json")(d) for n in range(1000)
    ], "flight-0.json"),
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
