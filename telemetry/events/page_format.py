"""Format of the Telemetry page's data: its tags and JSON texts.

The data has the plugin name ``telemetry`` and is in string and float32 tensors. ``<session>`` is
the id of one logger, and ``<layout>`` counts its layouts. ``<chunk>`` counts its tags. Each has at
most :data:`EVENTS_PER_TAG` events, so that TensorBoard's sampling keeps every step.

================================================  ==================================================
``telemetry/layout/<session>/<layout>``           JSON: modules, parameters, statistics
``telemetry/m/<session>/<layout>/<chunk>``        float32 ``[modules, statistics]`` of a full step
``telemetry/n/<session>/<layout>/<chunk>``        float32 ``[steps, 1 + parameters]``: gradient
                                                  norms of every step; the first column is the
                                                  step relative to the event's (0 or less)
``telemetry/u/<session>/<layout>/<chunk>``        extremes of units at a full step, see
                                                  :func:`~telemetry.layers.units.encode_units`
``telemetry/a/<session>/<number>``                JSON: one alert
``telemetry/loss/<session>/<tag>``                empty: the scalar with this tag is the loss
``telemetry/end/<session>``                       JSON: how the logger was closed
================================================  ==================================================

Numbers are 0 or more, NaN or infinite; :data:`~telemetry.layers.MISSING` marks values that were
not measured. Sessions sort by age. From its first step on, a session replaces all earlier ones.
Decoders raise NewerFormatError for the data of later versions, and ValueError for damaged data.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any, Literal, NamedTuple, cast

from telemetry import untrusted
from telemetry.alert import Alert, parse_alert
from telemetry.layers import Statistic
from telemetry.plain_text import json_plain
from telemetry.records import CodeLocation, Layout, Module, Parameter

PLUGIN_NAME = "telemetry"
FORMAT_VERSION = 1
EVENTS_PER_TAG = 10

# A block of norms is written when it reaches this size.
NORM_BLOCK_BYTES = 1 << 18

LAYOUT_PREFIX = "telemetry/layout/"
ALERT_PREFIX = "telemetry/a/"
END_PREFIX = "telemetry/end/"
LOSS_PREFIX = "telemetry/loss/"
_NUMBER = "([0-9]{1,15})"
_LAYOUT_TAG = re.compile(rf"{LAYOUT_PREFIX}([^/]+)/{_NUMBER}")
_CHUNK = re.compile(rf"telemetry/([mnu])/([^/]+)/{_NUMBER}/{_NUMBER}")
_MAX_DIMENSIONS = 64  # torch's own limit

ChunkKind = Literal["m", "n", "u"]


class NewerFormatError(ValueError):
    """Data of a later version of telemetry, which this one cannot read."""


class Chunk(NamedTuple):
    kind: ChunkKind
    session: str
    layout: int
    number: int

    @property
    def tag(self) -> str:
        return f"telemetry/{self.kind}/{self.session}/{self.layout:04d}/{self.number:06d}"


def parse_chunk(tag: str) -> Chunk | None:
    """Return the parts of a tag of numbers; None for any other tag."""
    found = _CHUNK.fullmatch(tag)
    if found is None:
        return None
    return Chunk(cast(ChunkKind, found[1]), found[2], int(found[3]), int(found[4]))


def new_session_id() -> str:
    """Return an id that sorts behind all earlier ones and differs between processes."""
    stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S.%f")
    # os.urandom does not change the random state of the training.
    return f"{stamp}-{os.urandom(2).hex()}"


def session_start_s(session: str) -> float | None:
    """Return the begin of a session in seconds since the epoch; None for other ids."""
    try:
        return datetime.strptime(f"{session.rpartition('-')[0]}Z", "%Y%m%d-%H%M%S.%f%z").timestamp()
    except ValueError:
        return None


def layout_tag(session: str, number: int) -> str:
    return f"{LAYOUT_PREFIX}{session}/{number:04d}"


def alert_tag(session: str, number: int) -> str:
    return f"{ALERT_PREFIX}{session}/{number:05d}"


def end_tag(session: str) -> str:
    return f"{END_PREFIX}{session}"


def loss_tag(session: str, tag: str) -> str:
    return f"{LOSS_PREFIX}{session}/{tag}"


def session_of(tag: str) -> str:
    return (tag.split("/", 3) + [""] * 3)[2]


def chosen_loss(page_tags: Iterable[str]) -> str | None:
    """Return the tag of the loss in the newest session that has one, or None."""
    found = [tag.split("/", 3)[2:] for tag in page_tags if tag.startswith(LOSS_PREFIX)]
    return max(found)[-1] if found else None


def parse_layout_tag(tag: str) -> tuple[str, int]:
    """Return session and number; raise ValueError if the tag does not end in a number."""
    found = _LAYOUT_TAG.fullmatch(tag)
    if found is None:
        raise ValueError("the tag does not end in a number")
    return found[1], int(found[2])


def encode_layout(layout: Layout, statistics: Sequence[Statistic]) -> bytes:
    """Return the JSON text of a layout; ``statistics`` are the columns of its ``m`` tags."""
    code: dict[tuple[str, CodeLocation | None], list[int]] = {}
    for place, module in enumerate(layout.modules):
        if module.forward or module.user_code:
            code.setdefault((module.forward, module.user_code), []).append(place)
    content = {
        "format": FORMAT_VERSION,
        "code": [
            [forward, user_code and asdict(user_code), places]
            for (forward, user_code), places in code.items()
        ],
        "modules": [[module.name, module.type_name] for module in layout.modules],
        "parameters": [
            [p.name, layout.position[p.module_name], p.shape] for p in layout.parameters
        ],
        "statistics": [statistic.name for statistic in statistics],
    }
    return json.dumps(content, separators=(",", ":")).encode()


def decode_layout(text: bytes) -> tuple[Layout, tuple[str, ...]]:
    """Return the layout, and the names of the statistics."""
    content = _LAYOUT(_parse(text, "layout"))
    names = [name for name, _ in content["modules"]]
    if len(set(names)) < len(names):
        raise ValueError("modules: two of them have the same name")
    parameters = []
    for name, owner, shape in content["parameters"]:
        if owner >= len(names) or math.prod(shape) > untrusted.MAX_INTEGER:
            raise ValueError("parameters: the module or the shape of one is out of range")
        parameters.append(Parameter(name=name, module_name=names[owner], shape=tuple(shape)))
    code = {place: where for *where, places in content["code"] for place in places}
    layout = Layout(
        modules=tuple(
            [
                Module(name=name, type_name=kind, forward=forward, user_code=user_code)
                for place, (name, kind) in enumerate(content["modules"])
                for forward, user_code in [code.get(place, ("", None))]
            ]
        ),
        parameters=tuple(parameters),
    )
    return layout, tuple(content["statistics"])


_LAYOUT = untrusted.check_of(
    {
        "modules": [(untrusted.name, untrusted.name)],
        "parameters": [(untrusted.name, int, untrusted.Most(_MAX_DIMENSIONS, int))],
        "statistics": [untrusted.name],
        "code": [(untrusted.name, CodeLocation | None, [int])],
    }
)
_END = untrusted.check_of({"exception": str | None})
_FORMAT = untrusted.check_of({"format": int})


def encode_alert(alert: Alert, origin: Mapping[str, str | float] | None = None) -> bytes:
    """Return the JSON text of an alert in one line; ``origin`` adds fields."""
    content = {**json_plain(alert), "format": FORMAT_VERSION, **(origin or {})}
    return json.dumps(content, separators=(",", ":")).encode()


def decode_alert(text: bytes) -> Alert:
    return parse_alert(_parse(text, "alert"))


def encode_end(exception: BaseException | None) -> bytes:
    """Return the JSON text of a logger's end; ``exception``: the training raised it."""
    name = None if exception is None else type(exception).__name__
    return json.dumps({"exception": name, "format": FORMAT_VERSION}).encode()


def decode_end(text: bytes) -> str | None:
    """Return the class name of the exception that ended the training; None without one."""
    name: str | None = _END(_parse(text, "end"))["exception"]
    return name


def _parse(text: bytes, what: str) -> Any:
    content = untrusted.parse_json(text)
    version = _FORMAT(content)["format"]
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"the {what} has format {version}, this version of telemetry reads {FORMAT_VERSION}; "
            "update telemetry on this machine"
        )
    return content
