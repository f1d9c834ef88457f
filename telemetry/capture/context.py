"""Shared by hooks, optimizers and steps: the captured model, and the position in its training."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

from torch import nn

from telemetry.capture.account import Stopwatch
from telemetry.capture.missed_steps import MissedSteps
from telemetry.capture.norms import GradientReader
from telemetry.capture.parameters import ParameterTable
from telemetry.capture.scaler import SkippedSteps
from telemetry.failures import Failures
from telemetry.ranks.topology import RankObserver
from telemetry.selection import Selection
from telemetry.torch_private import undisturbed
from telemetry.torch_private.compiler import CompiledAutograd

Method = TypeVar("Method", bound=Callable[..., object])


@dataclass(frozen=True, kw_only=True)
class Content:
    """Tensors that a full step measures."""

    activations: bool = True
    activation_gradients: bool = True
    gradients: bool = True
    weights: bool = True
    images: bool = True


class Guard(NamedTuple):
    """Keeps the capture apart from training: reports its failures and measures its time."""

    failures: Failures
    own_time: Stopwatch


class Context:
    """The captured model, held weakly, what its full steps measure, and the position in training.

    Attributes:
        step: Number of the step in progress.
        training, in_phase, armed: Whether forward passes of training are observed, those of a
            phase, or either. Compiled graphs are guarded by these: one graph has observers, the
            other has none.
        output_grads: Whether gradients with respect to outputs are observed, too.
        thread: Thread whose forward passes belong to the step in progress; None: not known yet.
        ranks: Observer of the other ranks; None: a single rank, or not known yet.
        skipped_steps: Count over all steps of the run, of the worker.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        selection: Selection,
        content: Content,
        guard: Guard,
        first_step: int,
    ) -> None:
        self.model = weakref.ref(model)
        self.selection, self.content, self.guard = selection, content, guard
        self.table = ParameterTable(model, selection)
        self.reader = GradientReader(self.table)
        self.missed = MissedSteps()
        self.compiled_autograd = CompiledAutograd()
        self.step = first_step
        self.training = self.in_phase = self.armed = self.output_grads = False
        self.thread: int | None = None
        self.ranks: RankObserver | None = None
        self.skipped_steps = SkippedSteps()

    def observe(self, *, training: bool) -> None:
        """Observe passes of training, or no longer, and those of phases."""
        self.training, self.armed = training, training or self.in_phase


def guarded(doing: str, *, reads: bool = True) -> Callable[[Method], Method]:
    """Report exceptions of a method instead of raising them, and count its time as telemetry's.

    The owner of the method has a :class:`Guard`, ``guard``.

    Args:
        doing: What failed, "to ..."; ``{0}`` is the owner, ``{1}`` the first argument.
        reads: Whether the method reads tensors. It then runs without the caller's modes, and not
            at all where they cannot be left.

    The result is None where the method fails or does not run.
    """

    def decorate(method: Method) -> Method:
        call = undisturbed()(method) if reads else method

        @functools.wraps(method)
        def contained(self: Any, *args: Any, **kwargs: Any) -> Any:
            failures, own_time = self.guard
            try:
                if not own_time.is_on:
                    return call(self, *args, **kwargs)
                with own_time:
                    return call(self, *args, **kwargs)
            except Exception:
                failures.report(doing.format(self, *args))
                return None

        return cast(Method, contained)

    return decorate
