"""Checks arguments of :class:`~telemetry.HookLogger`; errors name the argument and the way out."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import tensorboard

from telemetry.alert import Alert
from telemetry.alerts import rules_from
from telemetry.alerts.configuration import Settings
from telemetry.host_copy import HostCopy
from telemetry.rule import AnyRule, Rule, as_rule

Alerts = Iterable[AnyRule] | Mapping[str, Settings | None]
OnAlert = Callable[[Alert], None] | Literal["raise"]


def check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"HookLogger(model=...): must be a torch.nn.Module, not {type_name(model)}")
    if next(model.parameters(), None) is None:
        raise ValueError(
            f"HookLogger(model={type(model).__name__}): has no parameters, nothing can be trained"
        )


def checked_optimizer(optimizer: Any, model: nn.Module) -> Optimizer | None:
    if optimizer is None:
        return None
    # Lightning and Accelerate wrap optimizers; it is the wrapped one that runs the hooks.
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, Optimizer):
        raise TypeError(
            "HookLogger(optimizer=...): must be a torch.optim.Optimizer, not "
            f"{type_name(optimizer)}; call logger.step() in a loop that has none"
        )
    ours = {id(parameter) for parameter in model.parameters()}
    if not any(id(p) in ours for group in inner.param_groups for p in group["params"]):
        raise ValueError("HookLogger(optimizer=...): holds none of the model's parameters")
    return inner


def checked_rules(alerts: Any) -> Sequence[Rule]:
    if alerts is None or isinstance(alerts, Mapping):
        return rules_from(alerts or {})
    if not isinstance(alerts, Iterable) or isinstance(alerts, str):
        raise TypeError(
            f"HookLogger(alerts={alerts!r}): must be rules, () for none, or a dict by name"
        )
    try:
        return [as_rule(rule) for rule in alerts]
    except TypeError as error:
        raise TypeError(f"HookLogger(alerts=...): {error}") from None


def check_on_alert(on_alert: object) -> None:
    if not (on_alert is None or on_alert == "raise" or callable(on_alert)):
        raise TypeError(f'HookLogger(on_alert={on_alert!r}): must be a callable or "raise"')


def log_dir_of(writer: object) -> str:
    if isinstance(writer, tensorboard.SummaryWriter):
        return str(writer.log_dir)
    if not isinstance(writer, str | os.PathLike):
        raise TypeError(
            "HookLogger(writer=...): must be a torch.utils.tensorboard.SummaryWriter or a log "
            f"directory, not {type_name(writer)}"
        )
    return os.path.expanduser(os.fspath(writer))


def _checked_tag(tag: object) -> str:
    if not isinstance(tag, str):
        raise TypeError(f"HookLogger.log({{{tag!r}: ...}}): a tag must be a string")
    try:
        tag.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"HookLogger.log({{{tag!r}: ...}}): the tag has half of a surrogate pair, which no "
            "file can hold; tag.encode(errors='replace').decode() replaces it"
        ) from None
    return tag


def checked_scalars(
    values: Mapping[str, float | Tensor],
) -> tuple[dict[str, float | HostCopy], list[TypeError | ValueError]]:
    """Those that can be logged, and why the others cannot."""
    good: dict[str, float | HostCopy] = {}
    refused: list[TypeError | ValueError] = []
    for tag, value in values.items():
        try:
            good[_checked_tag(tag)] = _scalar(tag, value)
        except (TypeError, ValueError) as error:
            refused.append(error)
    return good, refused


def _scalar(name: str, value: object) -> float | HostCopy:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"HookLogger.log({name}=...): has {value.numel()} elements; reduce it to one, "
                "for example by .mean()"
            )
        if value.is_complex() or value.is_meta:
            raise TypeError(f"HookLogger.log({name}={value!r}): must be a real number")
        return HostCopy(value.detach().reshape(()))
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"HookLogger.log({name}={reprlib.repr(value)}): must be a number") from None


def type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
