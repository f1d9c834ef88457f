"""Trainable parameters that get no gradient, or that no optimizer steps."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from telemetry.alert import Severity
from telemetry.alerts.baseline import Baseline, Marks
from telemetry.alerts.detector import Detector, Finding
from telemetry.layers import table
from telemetry.plain_text import called_all, steps_in_words
from telemetry.records import Layout, StepRecord


class UntrainedParameters(Detector):
    """Parameters require a gradient and got none in 90 steps, or they get gradients and no
    optimizer steps them. A note if they are few and unused.

    Evidence: names, grouped by module.
    Causes: ``detach()``, ``no_grad()``, an optimizer that was made before a module was replaced.
    Remedies: pass all parameters to the optimizer, after the model is complete; freeze unused ones.
    Silent: frozen parameters, experts that are selected rarely, optimizers that step rarely.
    Example:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.head = nn.Linear(64, 10)  # the optimizer has the old head
    Args:
        share: Share of the trainable elements from which missing gradients are a warning.
        steps: Steps until it reports, once.
        evaluations: Full steps until it reports.

    Gradients that no optimizer uses are a warning. Modules that did not run while similar ones
    learn do not count. Parameters unfrozen later are a note if an optimizer stepped them before.
    """

    kind = "untrained_parameters"
    explained_by = frozenset({"vanishing_gradient"})
    # An auxiliary head of Inception has an eighth, a pooler of BERT a hundredth; a branch that is
    # detached by mistake usually a third or more. Chosen manually between them.
    share = 0.2
    steps = 90  # chosen manually: rare parts have run by then, and it is within 100 steps
    evaluations = 2  # full steps; a step of one optimizer of several says too little
    full_steps_in_a_row = 2
    _steps: int
    _evaluations: int
    _is_new: bool  # a parameter is trainable that was not before
    _marks: Marks  # trained, reached by a gradient, held by an optimizer, ran: [4, parameters]
    _trainable: Marks
    _reported: Marks
    _trained_before: Marks

    def set_up(self) -> None:
        self._begin(0)
        self._trainable = self._reported = self._trained_before = np.zeros(0, bool)

    def _begin(self, count: int, *, is_new: bool = True) -> None:
        """Start a new observation of ``count`` parameters."""
        self._steps = self._evaluations = 0
        self._marks, self._is_new = np.zeros((4, count), bool), is_new

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        layout = record.layout
        count = len(layout.parameters)
        if len(self._reported) != count:
            self._begin(count)
            self._trainable = self._reported = self._trained_before = np.zeros(count, bool)
        if len(record.trainable) == count:
            if not self._is_new and (record.trainable & ~self._trainable).any():
                self._begin(count)
            self._evaluations += 1
            ran = table(record).ran[layout.owners]
            self._marks[1:] |= np.array([record.reached, record.held, ran])
            self._trainable = record.trainable
        self._steps += 1
        self._marks[0] |= record.grad_present
        (trained, reached, _, ran), trainable = self._marks, self._trainable
        late = abs(self._steps - self.steps) <= _LATE and self._evaluations < self.evaluations
        self.needs_full_step = late and bool((trainable & ~trained & ~self._reported).any())
        if (
            self._steps < self.steps
            or self._evaluations < self.evaluations
            or record.total_grad_norm == 0
        ):
            return None
        left = trainable & ~trained & ~self._reported & (reached | ~self._trained_before)
        left &= reached | ran | ~_one_of_many(layout, trained)
        found = self._found(layout, left) if left.any() else None
        self._reported, self._trained_before = self._reported | left, self._trained_before | trained
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
            severity, what = "warning", "gets gradients, but no optimizer steps it"
        else:
            severity = "warning" if share >= self.share and (left & held).any() else "note"
            what = f"requires a gradient, but got none in {steps_in_words(self._steps)}"
        return Finding(
            summary=f"{called_all(names, _NAMED)} ({share:.1%} of the trainable elements) {what}",
            advice=_NOT_STEPPED if comes else _NOT_REACHED,
            value=share,
            threshold=self.share,
            module_name=names[0],
            severity=severity,
            momentary=True,
        )


_FREEZE = "Freeze parameters that should not learn by requires_grad_(False)"
_NOT_STEPPED = (
    "Create the optimizer after the last change of the model, with all parameters, and step it",
    _FREEZE,
)
_NOT_REACHED = (
    "Check for detach() and no_grad() between it and the loss",
    "Check that its output is used",
    _FREEZE,
)
_LATE = 9  # steps around the last one in which it requests a full step
_NAMED = 5
_NUMBER = re.compile(r"\.\d+(?=\.)")


def _one_of_many(layout: Layout, trained: Marks) -> Marks:
    """Mark parameters whose names differ from a trained one only in numbers."""
    kinds = [(_NUMBER.sub(".*", f".{p.name}"), p.shape) for p in layout.parameters]
    known = {kind for kind, is_trained in zip(kinds, trained, strict=True) if is_trained}
    return np.array([kind in known for kind in kinds])


def _groups(layout: Layout, left: Marks, trainable: Marks) -> Iterable[str]:
    """Return the largest modules all of whose trainable parameters are left, in forward order."""
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
    """Return all modules that contain the module, the largest first, and itself."""
    parts = name.split(".") if name else []
    return ["", *(".".join(parts[: i + 1]) for i in range(len(parts)))]
