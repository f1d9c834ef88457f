"""Parameters that could learn and do not."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from telemetry.alert import Severity
from telemetry.alerts.baseline import Baseline, Marks
from telemetry.alerts.detector import Detector, Finding
from telemetry.plain_text import called_all, steps_in_words
from telemetry.records import Layout, StepRecord


class UntrainedParameters(Detector):
    """Names parameters that require a gradient and never get one, or that no optimizer steps.

    Told once, after ``steps`` steps. It is a warning where gradients come and no optimizer takes
    them: an optimizer made before a module was replaced, made for a part of the model or for
    another one, or not stepped. It is a warning, too, where parameters that are stepped have no
    gradient and are at least ``share`` of all trainable elements (``detach()``, ``no_grad()``),
    else a note: a head that nobody reads, a part whose turn comes later. Frozen parameters do not
    count, nor do modules that did not run and are one of several alike, of which others learn:
    experts are chosen, and some are chosen rarely.

    What is unfrozen later is looked at likewise. That gradients come to what an optimizer stepped
    before, and none does so any more, is a note: a second stage may train a part.
    """

    kind = "untrained_parameters"
    explained_by = frozenset({"vanishing_gradient"})
    # An auxiliary head of Inception has an eighth, a pooler of BERT a hundredth; a branch that is
    # detached by mistake usually a third or more. By eye between them.
    share = 0.2
    steps = 90  # as long as within 100 steps: rare parts should have had their turn
    evaluations = 2  # full steps; a step of one optimizer of several says too little
    full_steps_in_a_row = 2
    _steps: int
    _evaluations: int
    _is_new: bool  # something can learn that could not before
    _marks: Marks  # which was trained, reached by a gradient, held by an optimizer, and ran
    _trainable: Marks
    _told: Marks
    _trained_before: Marks

    def set_up(self) -> None:
        self._begin(0)
        self._trainable = self._told = self._trained_before = np.zeros(0, bool)

    def _begin(self, count: int, *, is_new: bool = True) -> None:
        """Look at so many parameters from now on."""
        self._steps = self._evaluations = 0
        self._marks, self._is_new = np.zeros((4, count), bool), is_new

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        layout = record.layout
        count = len(layout.parameters)
        if len(self._told) != count:
            self._begin(count)
            self._trainable = self._told = self._trained_before = np.zeros(count, bool)
        if len(record.trainable) == count:
            if not self._is_new and (record.trainable & ~self._trainable).any():
                self._begin(count)
            self._evaluations += 1
            ran = [p.module_name in record.activations for p in layout.parameters]
            self._marks[1:] |= np.array([record.reached, record.held, ran])
            self._trainable = record.trainable
        self._steps += 1
        self._marks[0] |= record.grad_present
        (trained, reached, _, ran), trainable = self._marks, self._trainable
        late = abs(self._steps - self.steps) <= _LATE and self._evaluations < self.evaluations
        self.needs_full_step = late and bool((trainable & ~trained & ~self._told).any())
        if (
            self._steps < self.steps
            or self._evaluations < self.evaluations
            or record.total_grad_norm == 0
        ):
            return None
        left = trainable & ~trained & ~self._told & (reached | ~self._trained_before)
        left &= reached | ran | ~_one_of_many(layout, trained)
        found = self._found(layout, left) if left.any() else None
        self._told, self._trained_before = self._told | left, self._trained_before | trained
        self._begin(count, is_new=False)
        return found

    def _found(self, layout: Layout, left: Marks) -> Finding:
        (_, reached, held, _), trainable = self._marks, self._trainable
        share = float(layout.sizes[left].sum() / layout.sizes[trainable].sum())
        names = list(_groups(layout, left, trainable))
        comes = bool((left & reached).any())
        if self._trained_before[left].all():
            severity: Severity = "note"
            what = (
                f"gets gradients, and no optimizer has stepped it for {steps_in_words(self._steps)}"
            )
        elif comes:
            severity, what = "warning", "gets gradients, and no optimizer steps it"
        else:
            severity = "warning" if share >= self.share and (left & held).any() else "note"
            what = f"requires a gradient, and got none in {steps_in_words(self._steps)}"
        return Finding(
            summary=f"{called_all(names, _NAMED)} ({share:.1%} of the trainable elements) {what}",
            advice=_NOT_STEPPED if comes else _NOT_REACHED,
            value=share,
            threshold=self.share,
            module_name=names[0],
            severity=severity,
            momentary=True,
        )


_NOT_STEPPED = (
    "Make the optimizer after the last module is in place, with all parameters, and step it; what "
    "should stay as it is is better frozen by requires_grad_(False).",
)
_NOT_REACHED = (
    "Check for detach() and no_grad() between it and the loss, and that its output is used; what "
    "should stay as it is is better frozen by requires_grad_(False).",
)
_LATE = 9  # steps around the last one in which a measurement is asked for
_NAMED = 5
_NUMBER = re.compile(r"\.\d+(?=\.)")


def _one_of_many(layout: Layout, trained: Marks) -> Marks:
    """Parameters that but for numbers in their names are called like one that is trained."""
    kinds = [(_NUMBER.sub(".*", f".{p.name}"), p.shape) for p in layout.parameters]
    known = {kind for kind, is_trained in zip(kinds, trained, strict=True) if is_trained}
    return np.array([kind in known for kind in kinds])


def _groups(layout: Layout, left: Marks, trainable: Marks) -> Iterable[str]:
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
