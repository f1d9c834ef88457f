"""Run log: all that the page, the commands and a resumed run read of a run; its frames.

Each logger appends to a file of its own, ``telemetry.<stamp>.<writer>.runlog``. Frames are those of
event files (TFRecord). The data of a frame is a MessagePack array: kind, step, seconds since the
epoch, and the fields of the kind's class below, in their order. Arrays are float32, little-endian;
numbers are 0 or more, NaN or infinite, and :data:`~telemetry.layers.MISSING` marks those that were
not measured.

:class:`Begin` at a step hides all frames of that step and later ones in what was written before of
the same run. Decoding checks types and ranges, and creates nothing else.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct

from telemetry.alert import Alert
from telemetry.events import message_pack
from telemetry.records import Layout
from telemetry.records.batches import Batch
from telemetry.untrusted import MAX_INTEGER, MAX_NAME, MAX_TEXT
from telemetry.version import __version__

FORMAT = 1
SUFFIX = ".runlog"

# Limits of what is read; Python's objects take up to forty times the size of their data.
MAX_FRAME_BYTES = 32 << 20
MAX_RATES = 10_000
_MAX_MODULES = 1 << 18

Step: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Time: TypeAlias = Annotated[float, Meta(ge=0, le=1e11)]
Name: TypeAlias = Annotated[str, Meta(max_length=MAX_NAME)]
Rates: TypeAlias = Annotated[tuple[float, ...], Meta(max_length=MAX_RATES)]
Text: TypeAlias = Annotated[str, Meta(max_length=6 * MAX_TEXT)]  # each character may be escaped


class Frame(Struct, array_like=True):
    step: Step
    time_s: Time


class Begin(Frame, tag=0):
    """Begin of a file, and of what is recorded after a checkpoint was restored.

    Later formats may add fields behind these.
    """

    run: Name
    seed: int | None  # of torch's generator
    continues: bool = False  # a further file of the same logger: it hides nothing
    format: int = FORMAT
    version: str = __version__


class LaidOut(Frame, tag=1):
    """Modules in forward order, and parameters; they hold for all later frames of steps."""

    layout: Layout
    statistics: list[Name]  # rows of the tables of full steps


class Norms(Frame, tag=2):
    """One step."""

    norms: memoryview  # of each parameter's gradient, ``[parameters]``
    total: float  # norm of all gradients
    learning_rates: Rates
    loss: float | None
    loss_scale: float | None
    skipped: bool


class FullStep(Frame, tag=3):
    """Measurements of a full step."""

    table: memoryview  # ``[statistics, modules]``
    units: memoryview  # see :func:`telemetry.layers.units.encode_units`; may be empty
    # Whether zeros, NaN, infinities and kurtosis of some tensors are those of a sample.
    estimated: bool = False


class Random(Struct):
    """Random states at the start of a step, by device."""

    step: Step
    states: dict[str, bytes]


class Alerted(Frame, tag=4):
    alert: Alert
    batches: tuple[Batch, ...] = ()  # of a fault's step, whose ids are known
    random: Random | None = None  # of the last full step before a fault

    @property
    def is_fault(self) -> bool:
        """Whether the steps around the alert explain it: an error, or a spike of the loss."""
        is_serious = self.alert.severity == "error" or self.alert.kind == "loss_spike"
        return is_serious and self.alert.stage != "resolved"


class Logged(Frame, tag=5):
    scalars: dict[str, float]  # of the user; times, memory and limits of a run begin with ``~run/``


class LossFound(Frame, tag=6):
    tag: Name  # of the scalar that is the loss
    delay: Step  # steps between a batch and its loss


class Hyperparameters(Frame, tag=7):
    values: dict[str, str | int | float | bool]


class Failure(Struct):
    """Exception that ended the training."""

    type: Text
    message: Text
    traceback: Text


class End(Frame, tag=8):
    """End of a logger, after the last step of the training."""

    failure: Failure | None
    batches: tuple[Batch, ...] = ()
    random: Random | None = None
    full_steps: tuple[Step, Step] = (0, 0)  # scheduled, and requested by rules


AnyFrame: TypeAlias = (
    Begin | LaidOut | Norms | FullStep | Alerted | Logged | LossFound | Hyperparameters | End
)


def new_run_id() -> str:
    """Return an id that names the second, and differs between processes."""
    # os.urandom does not change the random state of the training.
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(2).hex()}"


_decode_any = message_pack.decoder(AnyFrame)  # looked up by a union, it would take twice as long


def decode(data: bytes, kind: type[Frame] | None = None) -> Any:
    """Return a frame, of this kind or any; ValueError for anything else."""
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"it has {len(data)} bytes")
    frame = _decode_any(data) if kind is None else message_pack.decode(kind, data)
    if isinstance(frame, Alerted):
        frame.alert = _checked(frame.alert, frame.step)
    elif isinstance(frame, LaidOut):
        _check(frame.layout)
    return frame


def _checked(alert: Alert, step: int) -> Alert:
    """Return an alert whose long texts are cut."""
    if alert.step != step:
        raise ValueError("the alert is of another step")
    texts: dict[str, Any] = {n: v[:MAX_TEXT] for n, v in vars(alert).items() if isinstance(v, str)}
    return replace(alert, **texts)


def _check(layout: Layout) -> None:
    """Raise ValueError if the parts of a layout do not fit together, or are too large."""
    modules, parameters = layout.modules, layout.parameters
    names = {module.name for module in modules}
    if len(names) < len(modules) or len(names) > _MAX_MODULES:
        raise ValueError("modules: two of them have the same name, or there are too many")
    texts = [text for m in modules for text in (m.name, m.type_name, m.forward, m.code)]
    if max(map(len, (*texts, *(p.name for p in parameters))), default=0) > MAX_NAME:
        raise ValueError("a name of the layout is too long")
    for p in parameters:
        if p.module_name not in names or len(p.shape) > 64 or min(p.shape, default=0) < 0:
            raise ValueError("parameters: the module or the shape of one is out of range")
        if p.size > MAX_INTEGER:
            raise ValueError("parameters: one of them is too large")
