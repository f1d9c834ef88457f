"""What is observed between two optimizer steps, gathered on the training thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from telemetry.capture.no_step import NoStepWatch
from telemetry.capture.norms import NormReading, Norms, UpdateReading
from telemetry.capture.scaler import ScalerReading
from telemetry.measure import Measurer
from telemetry.ranks.observer import RankNotes
from telemetry.records import Output, Parameter
from telemetry.torch_private.host_copy import HostCopy

MANY_OBSERVATIONS = 8192
FEW_CALLS = 4
"""Bounds of one step: after so many observations only the first calls of each tensor are measured,
the others counted."""

_CHECKS = 32
"""So many outputs, and so many of their gradients, are reduced by PyTorch, too, once in a run."""

Kind = Literal["inputs", "outputs", "output_grads", "grads", "weights", "second_moments"]
"""Named like the field of the :class:`StepRecord` that it becomes."""
_POWERS: Mapping[Kind, int] = {"outputs": 4}
"""Of how many powers there are sums: of four where the kurtosis is shown, elsewhere of two."""

Name: TypeAlias = str | Output
"""A parameter's or module's name, or which output."""


class Observation(NamedTuple):
    """One measured tensor: what and whose it is, and its number in the measurer.

    ``scaled``: it has the factor of a ``GradScaler`` on it, if there is one.
    """

    kind: Kind
    name: Name
    measurement: int
    scaled: bool


@dataclass(kw_only=True, eq=False)
class Tally:
    """What was observed, and how often each tensor came by and was only counted."""

    observations: list[Observation] = field(default_factory=list)
    counted: Counter[tuple[Kind, Name]] = field(default_factory=Counter)

    def absorb(self, other: Tally) -> None:
        """Add what ``other`` holds."""
        self.observations += other.observations
        self.counted.update(other.counted)


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerReading:
    """What one optimizer was given to step with; ``scaled``: gradients have a scaler's factor."""

    norms: Sequence[NormReading]
    scaled: bool


@dataclass(kw_only=True, eq=False)
class Window:
    """Gathers one step's observations, or those of a phase that is not training.

    Attributes:
        step: The step that they belong to.
        measurer: Takes the tensors of a fully measured step; None on other steps.
        norms: Whether at least the norms of the gradients are taken.
        phase: Name of a part of the run that is not training; empty for a step.
        thread: Whose forward passes are observed; None until one runs a watched module.
        order: Watched modules in the order of their first call.
        tally: Observations in their order, of backward passes those of training.
        passes: How many such passes have ended.
        light: Whether a :class:`LightReader` has read it; then the rest here stays empty.
        parameters: What the indices of this window count.
        square: Of the norm of the gradients that optimizers were given, as far as known at once.
        no_step: Notices training that no optimizer of the model ever ends.
        optimizers: What each optimizer was given at its first step in this window.
        learning_rates: Of every optimizer known by then, of each parameter group.
        before_clipping: Of each parameter that a backward pass has reached, the norms that were
            taken at the end of the last one, and its place among them.
        ranks: How the tensors relate to those of all ranks together.
        eval_mode: Whether the model was in evaluation mode when an optimizer stepped.
        trainable: Parameters that require a gradient, by index.
        reached: Those that have one, whether or not an optimizer holds them.
        held: Those that an optimizer holds which stepped.
        fingerprints: Of the tensors that the model was given, see :func:`fingerprint`.
        examples: Length of the first of them, in all forward passes together.
        checks: Of a few observations minimum, maximum and norm as PyTorch has them.
    """

    step: int
    measurer: Measurer | None
    norms: bool = True
    phase: str = ""
    thread: int | None = None
    order: dict[str, None] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    passes: int = 0
    light: bool = False
    parameters: tuple[Parameter, ...] = ()
    square: float = 0.0
    no_step: NoStepWatch = field(default_factory=NoStepWatch)
    optimizers: dict[int, OptimizerReading] = field(default_factory=dict)
    learning_rates: dict[int, Sequence[float | HostCopy]] = field(default_factory=dict)
    before_clipping: dict[int, tuple[NormReading, int]] = field(default_factory=dict)
    eval_mode: bool = False
    trainable: set[int] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)
    held: set[int] = field(default_factory=set)
    fingerprints: list[HostCopy] = field(default_factory=list)
    examples: int = 0
    checks: list[tuple[Kind, Name, int, HostCopy]] = field(default_factory=list)
    updates: list[UpdateReading] = field(default_factory=list)
    parameter_norms: list[NormReading] = field(default_factory=list)
    buffer_names: Sequence[str] = ()
    buffer_norms: Sequence[NormReading] = ()
    scaler: ScalerReading | None = None
    feature_maps: dict[str, HostCopy] = field(default_factory=dict)
    filters: dict[str, HostCopy] = field(default_factory=dict)
    input: HostCopy | None = None
    random_states: Mapping[str, bytes] = field(default_factory=dict)
    ranks: RankNotes = field(default_factory=RankNotes)

    def __post_init__(self) -> None:
        self._seen: dict[tuple[Kind, Name], int] = {}
        self._measured = 0
        # Of the tensor that was observed last: what it was, its identity, and its measurement.
        self._last: tuple[Kind, Name, int, int] | None = None
        self._overflow_ends: dict[torch.device, Tensor] = {}

    @property
    def full(self) -> bool:
        """Whether tensors are measured, not only gradient norms."""
        return self.measurer is not None

    def indices(self) -> set[int]:
        """Of all parameters whose gradients optimizers were given."""
        readings = [reading for given in self.optimizers.values() for reading in given.norms]
        return {index for reading in readings for index in reading.indices}

    def without_detail(self) -> Window:
        """The same with nothing but the norms, as if it had not been measured in full."""
        return replace(
            self,
            measurer=None,
            tally=Tally(),
            updates=[],
            feature_maps={},
            filters={},
            input=None,
            random_states={},
            trainable=set(),
            reached=set(),
            held=set(),
            fingerprints=[],
            examples=0,
            checks=[],
        )

    def observe(
        self,
        kind: Kind,
        name: Name,
        tensor: Tensor,
        *,
        unit_axis: int | None = None,
        scaled: bool = False,
        tally: Tally | None = None,
        plain: bool = False,
        repeats: Name | None = None,
    ) -> bool:
        """Measure ``tensor`` as it is now; False if that is not possible.

        Args:
            tensor: Not kept.
            unit_axis: See :meth:`Measurer.add`.
            scaled: Whether it still has the factor of a ``GradScaler`` on it, if there is one.
            tally: Where it goes: that of a running backward pass; None: this window's own.
            plain: By :meth:`Measurer.add_plain`, which disturbs nothing but takes fewer tensors.
            repeats: What of this kind has the same values; if it came just before, they are not
                read again.
        """
        if self.measurer is None:
            return True
        tally = self.tally if tally is None else tally
        key = kind, name
        seen = self._seen.get(key, 0)
        last = self._last
        if self._measured >= MANY_OBSERVATIONS and seen >= FEW_CALLS:
            tally.counted[key] += 1
            self._last = None
            return True
        measurement: int | None
        if last is not None and last[:3] == (kind, repeats, id(tensor)):
            measurement = last[3]
        else:
            add = self.measurer.add_plain if plain else self.measurer.add
            measurement = add(tensor, unit_axis=unit_axis, powers=_POWERS.get(kind, 2))
            if measurement is None:
                return False
        self._seen[key] = seen + 1
        self._last = kind, name, id(tensor), measurement
        self._measured += 1
        tally.observations.append(Observation(kind, name, measurement, scaled))
        return True

    def check(self, kind: Kind, name: Name, tensor: Tensor) -> None:
        """Have PyTorch reduce the tensor, too, if it is the one that was observed last.

        Nothing is waited for; :meth:`CapturedStep.record` compares.
        """
        if self._last is None or self._last[:3] != (kind, name, id(tensor)):
            return
        few = sum(checked[0] == kind for checked in self.checks) < _CHECKS
        if few and tensor.numel() and tensor.dtype in (torch.float32, torch.bfloat16):
            extremes = torch.stack(torch.aminmax(tensor.detach())).to(torch.float64)
            norm = torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)
            figures = HostCopy(torch.cat([extremes, norm[None]]))
            self.checks.append((kind, name, self._last[3], figures))

    def observe_parameters(
        self, kind: Kind, named: Mapping[str, Tensor], *, scaled: bool = False
    ) -> Sequence[str]:
        """Measure parameters, or what belongs to them; the names of those that cannot be."""
        assert self.measurer is not None, "only in full steps"
        measurements = self.measurer.add_all([*named.values()], powers=_POWERS.get(kind, 2))
        taken = [
            Observation(kind, name, measurement, scaled)
            for name, measurement in zip(named, measurements, strict=True)
            if measurement is not None
        ]
        self._measured += len(taken)
        self.tally.observations += taken
        return [n for n, found in zip(named, measurements, strict=True) if found is None]

    def end_pass(self, tally: Tally, norms: Sequence[Norms]) -> None:
        """A backward pass of training is over.

        Args:
            tally: What was observed in it.
            norms: Of the gradients of the parameters that it reached: not clipped yet.
        """
        self.passes += 1
        self.tally.absorb(tally)
        for group in norms:
            reading = group.sent()
            for place, index in enumerate(group.indices):
                self.before_clipping[index] = reading, place
            self._mark_overflow(group)

    def _mark_overflow(self, norms: Norms) -> None:
        """Remember on the device where the last pass with a non-finite gradient ends."""
        if norms.known_square is not None and not norms.known_nonfinite:
            return
        end = norms.nonfinite.to(torch.int64) * len(self.tally.observations)
        known = self._overflow_ends.get(end.device)
        self._overflow_ends[end.device] = end if known is None else torch.maximum(known, end)

    def overflow_ends(self) -> Sequence[HostCopy]:
        """Of each device, how many observations there were when a gradient last was not finite."""
        return [HostCopy(end) for end in self._overflow_ends.values()]
