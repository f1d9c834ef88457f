"""Parameters that could learn and do not."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from telemetry.alert import Alert, Severity
from telemetry.alerts.episode import DefaultRule
from telemetry.records import Layout, Parameter, StepRecord
from telemetry.shared.plain_text import called


class UntrainedParameters(DefaultRule):
    """Names parameters that require a gradient and never get one, or that no optimizer steps.

    Told once, after ``steps`` steps. It is a warning where gradients come and no optimizer takes
    them: an optimizer made before a module was replaced, made for a part of the model or for
    another one, or not stepped. It is a warning, too, where parameters that are stepped have no
    gradient and are at least ``share`` of the trainable ones (``detach()``, ``no_grad()``), else a
    note: a head that nobody reads, a part whose turn comes later. Frozen parameters do not count,
    nor do modules that did not run and are one of several alike, of which others learn: experts are
    chosen, and some are chosen rarely.

    What is unfrozen later is looked at likewise. That gradients come to what an optimizer stepped
    before, and none does so any more, is a note: a second stage may train a part.

    Args:
        share: Of the elements of all parameters that require a gradient.
        steps: Number of steps that are looked at before anything is said.
    """

    name = "untrained_parameters"
    # An auxiliary head of Inception has an eighth, a pooler of BERT a hundredth; a branch that is
    # detached by mistake usually a third or more. By eye between them.
    share = 0.2
    steps = 90  # as long as within 100 steps: rare parts should have had their turn
    _steps: int
    _looks: int
    _trained: NDArray[np.bool_]
    _reached: NDArray[np.bool_]
    _trainable: NDArray[np.bool_]
    _held: NDArray[np.bool_]
    _ran: NDArray[np.bool_]
    _trained_before: NDArray[np.bool_]
    _told: NDArray[np.bool_]
    _is_new: bool

    def _set_up(self) -> None:
        self._begin(0)
        self._trainable = self._trained_before = self._told = np.zeros(0, bool)

    def _begin(self, count: int, *, is_new: bool = True) -> None:
        """Look at so many parameters from now on.

        Args:
            is_new: Whether something can learn that could not before.
        """
        self._steps = self._looks = 0
        self._trained, self._reached = np.zeros(count, bool), np.zeros(count, bool)
        self._held, self._ran = np.zeros(count, bool), np.zeros(count, bool)
        self._is_new = is_new

    @property
    def wants_full(self) -> bool:
        """Whether it is time to tell, and which parameters have a gradient is not known enough."""
        late = self.steps - _LATE <= self._steps <= self.steps + _LATE
        if not (late and self._is_new and self._looks < _LOOKS):
            return False
        return bool((self._trainable & ~self._trained).any())

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        count = len(record.layout.parameters)
        if len(self._trained) != count:
            self._begin(count)
            self._trainable = self._trained_before = self._told = np.zeros(count, bool)
        if len(record.trainable) == count:
            if not self._is_new and (record.trainable & ~self._trainable).any():
                self._begin(count)
            self._looks += 1
            self._trainable = record.trainable
            self._reached |= record.reached
            self._held |= record.held
            ran = record.activations
            self._ran |= [p.module_name in ran for p in record.layout.parameters]
        self._steps += 1
        self._trained |= record.grad_present
        if self._steps < self.steps or self._looks < _LOOKS or record.total_grad_norm == 0:
            return ()
        left = self._trainable & ~self._trained & ~self._told
        left &= self._reached | self._ran | ~_one_of_many(record.layout, self._trained)
        left &= self._reached | ~self._trained_before
        alerts = [self._found(record, left)] if left.any() else []
        self._told = self._told | left
        self._trained_before = self._trained_before | self._trained
        self._begin(count, is_new=False)
        return alerts

    def _found(self, record: StepRecord, left: NDArray[np.bool_]) -> Alert:
        layout = record.layout
        sizes = np.array([parameter.size for parameter in layout.parameters])
        share = float(sizes[left].sum() / sizes[self._trainable].sum())
        names = list(_groups(layout, left, self._trainable))
        shown = ", ".join(called(name) for name in names[:_NAMED])
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        severity: Severity = "warning"
        if self._trained_before[left].all():
            severity = "note"
            what = f"gets gradients, and no optimizer has stepped it for {self._steps} steps"
        elif (left & self._reached).any():
            what = "gets gradients, and no optimizer steps it"
        else:
            lost = share >= self.share and (left & self._held).any()
            severity = "warning" if lost else "note"
            what = f"requires a gradient, and had none in {self._steps} steps"
        advice = _NOT_STEPPED if (left & self._reached).any() else _NOT_REACHED
        message = f"{shown}{more} ({share:.1%} of the trainable elements) {what}.\n{advice}"
        return self._alert(record.step, names[0], share, self.share, message, severity)


_NOT_STEPPED = (
    "Make the optimizer after the last module is in place, with all parameters, and step it; what "
    "should stay as it is is better frozen by requires_grad_(False)."
)
_NOT_REACHED = (
    "Check for detach() and no_grad() between it and the loss, and that its output is used; what "
    "should stay as it is is better frozen by requires_grad_(False)."
)
_LOOKS = 2  # a look at a step of one optimizer of several says too little
_LATE = 9  # steps around the last one in which a measurement is asked for
_NAMED = 5
_NUMBER = re.compile(r"\.\d+(?=\.)")


def _one_of_many(layout: Layout, trained: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Parameters that but for numbers in their names are called like one that is trained."""

    def kind(parameter: Parameter) -> tuple[str, tuple[int, ...]]:
        return _NUMBER.sub(".*", f".{parameter.name}"), parameter.shape

    kinds = [kind(parameter) for parameter in layout.parameters]
    known = {kind for kind, is_trained in zip(kinds, trained, strict=True) if is_trained}
    return np.array([kind in known for kind in kinds])


def _groups(layout: Layout, left: NDArray[np.bool_], trainable: NDArray[np.bool_]) -> Iterable[str]:
    """The largest modules all of whose trainable parameters are left, in forward order."""
    learns: set[str] = set()
    for parameter, is_left, can in zip(layout.parameters, left, trainable, strict=True):
        if can and not is_left:
            learns.update(_within(parameter.module_name))
    groups: dict[str, None] = {}
    for index in layout.depth_order:
        if left[index]:
            parameter = layout.parameters[index]
            path = [name for name in _within(parameter.module_name) if name not in learns]
            groups.setdefault(path[0] if path else parameter.name)
    return groups


def _within(name: str) -> list[str]:
    """All modules that the module is in, the largest first, and itself."""
    parts = name.split(".") if name else []
    return ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]
