"""The arguments of :class:`telemetry.HookLogger` and its methods, checked."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import tensorboard

from telemetry.alert import Alert
from telemetry.alerts import rules_from
from telemetry.alerts.configuration import Settings
from telemetry.capture import Budget, Content
from telemetry.first_rank import Ranks
from telemetry.host_copy import HostCopy
from telemetry.pipeline import FullSteps
from telemetry.plain_text import check_text, type_of
from telemetry.resuming import FirstStep, check_first_step
from telemetry.rule import AnyRule, Rule, as_rule
from telemetry.selection import Selection, check_model
from telemetry.writing.bulk import Bulk

Alerts: TypeAlias = Iterable[AnyRule] | Mapping[str, Settings | None] | None
HistogramForm: TypeAlias = Literal["tensor", "classic"]
OnAlert: TypeAlias = Callable[[Alert], None] | Literal["raise", "stop"] | None

_OF_OTHERS = {"step", "global_step", "walltime", "commit"}
"""What ``wandb.log`` and ``SummaryWriter.add_scalar`` take beside the scalars."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Options:
    """What a logger is asked to do, in a form that is checked.

    Attributes:
        full_steps: Which steps are measured in full.
        budget: What measuring may cost; None: no limit.
        optimizer, on_alert, first_step, ranks, loss: As in :class:`telemetry.HookLogger`.
        selection: Which modules are watched.
        content: What a full measurement holds.
        bulk: Writes its histograms and pictures.
        rules: Judge each step.

    Raises:
        TypeError, ValueError: ``on_alert``, ``first_step`` or ``ranks`` is invalid.
    """

    full_steps: FullSteps
    budget: Budget | None
    optimizer: Optimizer | None
    selection: Selection
    content: Content
    bulk: Bulk
    rules: Sequence[Rule]
    on_alert: OnAlert
    first_step: FirstStep
    ranks: Ranks
    loss: str | None

    def __post_init__(self) -> None:
        if self.on_alert not in (None, "raise", "stop") and not callable(self.on_alert):
            raise TypeError(
                f'HookLogger(on_alert={self.on_alert!r}): must be a callable, "raise" or "stop"'
            )
        check_first_step(self.first_step)
        if self.ranks not in get_args(Ranks):
            raise ValueError(
                f'HookLogger(ranks={self.ranks!r}): must be "merged", "each" or "first"'
            )

    def check(self, model: nn.Module) -> None:
        """Check that this is a model with parameters, and that the options fit it.

        Raises:
            TypeError, ValueError: It is not, or they do not.
        """
        check_model(model, "HookLogger")
        if next(model.parameters(), None) is None:
            raise ValueError(
                f"HookLogger(model={type(model).__name__}): has no parameters, so it cannot be "
                "trained"
            )
        self.selection.check(model)
        if self.optimizer is not None:
            ours = {id(parameter) for parameter in model.parameters()}
            if not any(id(p) in ours for g in self.optimizer.param_groups for p in g["params"]):
                raise ValueError("HookLogger(optimizer=...): holds none of the model's parameters")


def bulk_of(max_bytes_per_step: object, histograms: object) -> Bulk:
    """What writes histograms and pictures as these two arguments say.

    Raises:
        TypeError, ValueError: One of them is invalid.
    """
    limit = max_bytes_per_step
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool)):
        raise TypeError(f"HookLogger(max_bytes_per_step={limit!r}): must be an int or None")
    if limit is not None and limit < 1:
        raise ValueError(
            f"HookLogger(max_bytes_per_step={limit}): must be at least 1; leave out histograms and "
            "pictures by activations=False, gradients=False, weights=False and images=False"
        )
    if histograms not in get_args(HistogramForm):
        raise ValueError(f'HookLogger(histograms={histograms!r}): must be "tensor" or "classic"')
    return Bulk(max_bytes=limit, classic=histograms == "classic")


def check_optimizer(optimizer: Any) -> Optimizer | None:
    """The optimizer that runs the hooks, if one is given."""
    if optimizer is None:
        return None
    # Lightning and Accelerate wrap optimizers; only the wrapped one runs hooks.
    inner = getattr(optimizer, "optimizer", optimizer)
    if not isinstance(inner, Optimizer):
        raise TypeError(
            f"HookLogger(optimizer=...): must be a torch.optim.Optimizer, not "
            f"{type_of(optimizer)}; call logger.step() in a loop that has none"
        )
    return inner


def check_loss(loss: object) -> str | None:
    """The tag of the loss, if the user has named it."""
    if loss is not None:
        if not isinstance(loss, str):
            raise TypeError(
                f"HookLogger(loss={reprlib.repr(loss)}): must be the tag of a logged scalar, such "
                "as 'train/ce', or None"
            )
        check_text(f"HookLogger(loss={loss!r}): it", loss)
        if not loss:
            raise ValueError("HookLogger(loss=''): must be the tag of a logged scalar, or None")
    return loss


def check_phase(name: str) -> str:
    """The name of a phase, with which tags can begin."""
    check_text(f"HookLogger.phase(name={name!r}): it", name)
    if not name:
        raise ValueError("HookLogger.phase(name=''): must not be empty, it begins the tags")
    return name


def check_rules(alerts: Any) -> Sequence[Rule]:
    """The rules given as ``alerts``."""
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
    """The directory of a writer; on a rank that does not write it may be any object."""
    if isinstance(writer, tensorboard.SummaryWriter):
        return str(writer.log_dir)
    if not isinstance(writer, str | os.PathLike):
        if not written:  # such as Lightning's, which does nothing
            return ""
        raise TypeError(
            "HookLogger(writer=...): must be a torch.utils.tensorboard.SummaryWriter or a log "
            f"directory, not {type_of(writer)}"
        )
    if not os.fspath(writer):
        raise ValueError("HookLogger(writer=''): must name a log directory")
    return os.path.expanduser(os.fspath(writer))


def scalars_of(
    scalars: object, more: Sequence[object], named: Mapping[str, object]
) -> tuple[dict[str, float | HostCopy], list[TypeError | ValueError]]:
    """The scalars that ``log`` writes, and an error for each of the others.

    Raises:
        TypeError: ``scalars`` is not a mapping, or there are more positional arguments.
    """
    if more or not isinstance(scalars, Mapping | None):
        given = ", ".join(map(reprlib.repr, (scalars, *more)))
        raise TypeError(
            f"HookLogger.log({given}): must be numbers by tag, such as log(loss=0.5) or "
            "log({'loss': 0.5}); the step is the one in progress"
        )
    values: dict[str, float | HostCopy] = {}
    refused: list[TypeError | ValueError] = [
        TypeError(
            f"HookLogger.log({name}={reprlib.repr(named[name])}): is no argument, the step is the "
            f"one in progress, logger.current_step; leave it out, or "
            f"write log({{{name!r}: ...}}) for a curve of this name"
        )
        for name in named
        if name in _OF_OTHERS
    ]
    curves = {tag: value for tag, value in named.items() if tag not in _OF_OTHERS}
    for tag, value in {**(scalars or {}), **curves}.items():
        try:
            check_text(f"HookLogger.log({{{tag!r}: ...}}): a tag", tag)
            values[tag] = _scalar(tag, value)
        except (TypeError, ValueError) as error:
            refused.append(error)
    return values, refused


def _scalar(name: str, value: object) -> float | HostCopy:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"HookLogger.log({name}=...): must have one element, not {value.numel()}; "
                "reduce it, for example by .mean()"
            )
        if value.is_complex() or value.is_meta:
            raise TypeError(f"HookLogger.log({name}={value!r}): must be a real number")
        return HostCopy(value.detach().reshape(()))
    try:
        if isinstance(value, str | bytes | bytearray):  # float("1") is 1.0
            raise TypeError
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise TypeError(f"HookLogger.log({name}={reprlib.repr(value)}): must be a number") from None
