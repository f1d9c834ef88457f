"""Arguments of :class:`telemetry.HookLogger` and its methods: checks, and environment variables."""

from __future__ import annotations

import math
import os
import reprlib
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from operator import index
from typing import Any, Literal, SupportsIndex, TypeAlias

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import tensorboard

from telemetry.alert import Alert
from telemetry.alerts import rules_from
from telemetry.alerts.configuration import Settings
from telemetry.alerts.detector import Detector
from telemetry.capture import Content
from telemetry.capture.modules import unregistered
from telemetry.plain_text import called_all, check_text, type_of
from telemetry.records.batches import MAX_IDS, BatchId
from telemetry.rule import AnyRule, Rule, as_rule
from telemetry.selection import Selection, check_model
from telemetry.tag_names import GROUPS
from telemetry.torch_private.host_copy import HostCopy

Alerts: TypeAlias = Iterable[AnyRule] | Mapping[str, Settings | Detector | None] | None
OnAlert: TypeAlias = Callable[[Alert], object] | Literal["raise", "stop"] | None

MEASURED = "activations", "activation_gradients", "gradients", "weights", "images"

# Arguments of ``wandb.log`` and ``SummaryWriter.add_scalar`` other than scalars.
_FOREIGN_ARGUMENTS = {"step", "global_step", "walltime", "commit"}


def check_flag(argument: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"HookLogger({argument}={value!r}): must be True or False")


def writer_of(log_dir: Any) -> Any:
    """Return a given writer or directory, else that of the environment, else torch's default."""
    now = datetime.now().strftime("%b%d_%H-%M-%S")
    return setting("log_dir", log_dir, os.path.join("runs", f"{now}_{socket.gethostname()}"))


def check_parts(model: Any, selection: Selection, optimizer: Any) -> Optimizer | None:
    """Check model, selection and optimizer; return the optimizer that calls the hooks, if any."""
    check_model(model, "HookLogger")
    own = {id(parameter) for parameter in model.parameters()}
    if not own:
        hidden = unregistered(model)
        raise ValueError(
            f"HookLogger(model={type(model).__name__}): has no parameters, so it cannot be trained"
            + (
                f"; keep the modules in {called_all(hidden, 3)} in a torch.nn.ModuleList or "
                "ModuleDict, so that PyTorch finds them"
                if hidden
                else ""
            )
        )
    selection.check(model)
    if optimizer is None:
        return None
    # Lightning and Accelerate wrap optimizers; only the wrapped one runs hooks.
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, Optimizer):
        raise TypeError(
            f"HookLogger(optimizer=...): must be a torch.optim.Optimizer, not "
            f"{type_of(optimizer)}; without one, call logger.step() in the loop"
        )
    if not any(id(p) in own for group in inner.param_groups for p in group["params"]):
        raise ValueError("HookLogger(optimizer=...): holds none of the model's parameters")
    return inner


def integer(argument: str, value: Any) -> int:
    """Return an integer of any type, as NumPy's; TypeError for bools, floats and others."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"HookLogger({argument}={value!r}): must be an int")
    return index(value)


def content_of(measure: Any) -> Content:
    """Return the tensors of full steps: of these names, or all but those after ``!``."""
    is_one = isinstance(measure, str) or not isinstance(measure, Iterable)
    names = [measure] if is_one else [*measure]
    for name in names:
        if not isinstance(name, str) or name.removeprefix("!") not in MEASURED:
            check_choice("measure", name, *MEASURED)
    excluded = [name for name in names if name.startswith("!")]
    if excluded and len(excluded) < len(names):
        raise ValueError(
            f"HookLogger(measure={measure!r}): names either what is measured, or with ! what is not"
        )
    return Content(
        **{name: f"!{name}" not in names if excluded else name in names for name in MEASURED}
    )


def check_choice(name: str, value: object, *choices: str, other: str = "") -> None:
    """Check that an argument is one of the choices; ``other`` describes further valid values."""
    if value not in choices:
        *others, last = (f'"{choice}"' for choice in choices)
        words = f"{', '.join([*filter(None, [other]), *others])} or {last}"
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"HookLogger({name}={value!r}): must be {words}")


def first_step_of(first_step: Any) -> int:
    step = integer("first_step", first_step)
    if not 0 <= step < 2**53:  # readers accept no others
        raise ValueError(f"HookLogger(first_step={step}): must be from 0 to 2**53 - 1")
    return step


def check_loss_tag(loss_tag: object) -> None:
    if loss_tag is not None:
        valid = "the tag of a logged scalar, such as 'train/ce', or None"
        _check_name(f"HookLogger(loss_tag={reprlib.repr(loss_tag)})", loss_tag, valid)


def check_on_alert(on_alert: object) -> None:
    if on_alert is not None and not callable(on_alert):
        check_choice("on_alert", on_alert, "raise", "stop", other="a callable")


def check_phase(name: object) -> None:
    _check_name(f"HookLogger.phase(name={name!r})", name, "a text: the first part of the tags")


def _check_name(what: str, name: object, valid: str) -> None:
    if not isinstance(name, str) or not name:
        raise (ValueError if name == "" else TypeError)(f"{what}: must be {valid}")
    check_text(f"{what}: it", name)


def rules_of(alerts: Any) -> Sequence[Rule]:
    if alerts is None or isinstance(alerts, Mapping):
        return rules_from(alerts or {})
    if not isinstance(alerts, Iterable) or isinstance(alerts, str):
        raise TypeError(
            f"HookLogger(alerts={alerts!r}): must be a list of rules, () for none, or a dict by "
            "name"
        )
    try:
        return [as_rule(rule) for rule in alerts]
    except TypeError as error:
        raise TypeError(f"HookLogger(alerts=...): {error}") from None


def log_dir_of(writer: object, *, written: bool = True) -> str:
    """Return the directory of a writer; on a rank that does not write, it may be any object."""
    if isinstance(writer, tensorboard.SummaryWriter):
        return str(writer.log_dir)
    if not isinstance(writer, str | os.PathLike):
        if not written:  # such as Lightning's, which does nothing
            return ""
        raise TypeError(
            "HookLogger(log_dir=...): must be a directory or a "
            f"torch.utils.tensorboard.SummaryWriter, not {type_of(writer)}"
        )
    if not os.fspath(writer):
        raise ValueError("HookLogger(log_dir=''): must name a directory")
    if "\0" in os.fsdecode(writer):
        raise ValueError(f"HookLogger(log_dir={writer!r}): must not contain the character NUL")
    if "://" in os.fsdecode(writer):
        raise ValueError(
            f"HookLogger(log_dir={writer!r}): must be a local directory. Write to one and copy it "
            "there, for example with rclone or gsutil rsync; or pass a "
            "torch.utils.tensorboard.SummaryWriter that writes there"
        )
    return os.path.expanduser(os.fspath(writer))


def scalars_of(
    scalars: object, more: Sequence[object], named: Mapping[str, object]
) -> tuple[dict[str, float | HostCopy], list[TypeError | ValueError]]:
    """Return the valid scalars of ``log``, and an error for each other argument."""
    if more or not (scalars is None or isinstance(scalars, Mapping)):
        given = ", ".join(map(reprlib.repr, (scalars, *more)))
        raise TypeError(
            f"HookLogger.log({given}): must be numbers by tag, such as log(loss=0.5) or "
            "log({'loss': 0.5}); the step is the one in progress"
        )
    values: dict[str, float | HostCopy] = {}
    refused: list[TypeError | ValueError] = [
        TypeError(
            f"HookLogger.log({name}={reprlib.repr(named[name])}): is not an argument: the step "
            "is the one in progress, logger.current_step; remove it, or "
            f"write log({{{name!r}: ...}}) for a curve of this name"
        )
        for name in named
        if name in _FOREIGN_ARGUMENTS
    ]
    own = {tag: value for tag, value in named.items() if tag not in _FOREIGN_ARGUMENTS}
    for tag, value in {**(scalars or {}), **own}.items():
        try:
            if not (isinstance(tag, str) and tag.isascii()):
                check_text(f"HookLogger.log({{{tag!r}: ...}}): a tag", tag)
            if not tag or tag.startswith(GROUPS):
                raise ValueError(
                    f"HookLogger.log({{{tag!r}: ...}}): a tag must neither be empty nor begin with "
                    f"{', '.join(GROUPS)}, the groups of the logger; choose another name"
                )
            values[tag] = _scalar(tag, value)
        except (TypeError, ValueError) as error:
            refused.append(error)
    return values, refused


def batch_ids_of(ids: Any) -> tuple[BatchId, ...]:
    if isinstance(ids, Tensor) and not ids.is_cpu:
        raise TypeError(
            f"HookLogger.batch(ids=...): must be on the CPU, not on {ids.device}, which training "
            "would wait for; pass ids.cpu(), or the ids before they are moved"
        )
    if isinstance(ids, Tensor | np.ndarray):
        ids = ids.reshape(-1)
    elif not isinstance(ids, list | tuple | range):
        raise TypeError(
            f"HookLogger.batch(ids={reprlib.repr(ids)}): must be a list of strings or whole "
            "numbers, such as [17, 4]"
        )
    if len(ids) > MAX_IDS:
        raise ValueError(
            f"HookLogger.batch(ids=...): has {len(ids):,} ids, at most {MAX_IDS:,} are allowed; "
            "pass an id of the batch, such as its index in the loader"
        )
    values = tuple(ids.tolist() if isinstance(ids, Tensor | np.ndarray) else ids)
    return values if {*map(type, values)} <= {int, str} else tuple(map(_batch_id, values))


def _batch_id(value: Any) -> BatchId:
    is_number = isinstance(value, np.generic) or (
        isinstance(value, Tensor) and value.is_cpu and value.numel() == 1
    )
    item = value.item() if is_number else value
    if type(item) is int or type(item) is str:
        return item
    raise TypeError(
        f"HookLogger.batch(ids=[{type_of(value)}, ...]): an id must be a string or a whole number, "
        "on the CPU"
    )


def _scalar(name: str, value: object) -> float | HostCopy:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"HookLogger.log({name}=...): must have one element, not {value.numel()}; "
                "reduce it, for example by .mean()"
            )
        if value.is_cpu and type(value) in (Tensor, nn.Parameter):
            number = value.item()
            if not isinstance(number, complex):
                return float(number)
        if value.is_complex() or value.is_meta:
            raise TypeError(f"HookLogger.log({name}={value!r}): must be a real number")
        return HostCopy(value.detach().reshape(()))
    try:
        if isinstance(value, str | bytes | bytearray):  # float("1") is 1.0
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"HookLogger.log({name}={reprlib.repr(value)}): must be a number") from None


# --- environment variables -----------------------------------------------------------------------

_SWITCHES = {"0": False, "false": False, "no": False, "1": True, "true": True, "yes": True}

# What reads the variable of each argument, whether a value is valid, and the valid values.
_VARIABLES: Mapping[str, tuple[Callable[[str], Any], Callable[[Any], bool], str]] = {
    "disabled": (lambda text: _SWITCHES[text.lower()], lambda _: True, "0 or 1"),
    "every_n_steps": (int, lambda steps: steps >= 1, "an int of at least 1"),
    "log_dir": (str, lambda _: True, "a directory"),
    "loss_tag": (str, lambda _: True, "the tag of a logged scalar"),
    "max_overhead": (
        float,
        lambda share: 0 < share <= 1 or share == math.inf,
        "a number above 0 and at most 1, or inf",
    ),
    "on_alert": (str, lambda text: text in ("raise", "stop"), "raise or stop"),
}


def setting(argument: str, given: Any = None, default: Any = None) -> Any:
    """Return an argument as given, else from its environment variable, else the default."""
    if given is not None:
        return given
    variable = f"TELEMETRY_{argument.upper()}"
    read, is_valid, valid = _VARIABLES[argument]
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    with suppress(KeyError, ValueError):
        if is_valid(value := read(text)):
            return value
    raise ValueError(f"{variable}={text!r}: must be {valid}")
