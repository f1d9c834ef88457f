"""Kinds of alerts that only :func:`telemetry.check` reports, before training."""

from __future__ import annotations

from typing import ClassVar

from telemetry.alert import Alert
from telemetry.alerts.detector import Detector


class CheckKind(Detector):
    """A kind that no step of a run is judged for."""

    threshold: ClassVar[float] = 0.0
    advice: ClassVar[tuple[str, ...]]

    @classmethod
    def alert(cls, summary: str, value: float, *, threshold: float | None = None) -> Alert:
        """Return the alert of the model at step 0."""
        return Alert(
            kind=cls.kind,
            severity=cls.severity,
            step=0,
            module_name=None,
            value=value,
            threshold=cls.threshold if threshold is None else threshold,
            summary=summary,
            advice=cls.advice,
        )


class LossAtStart(CheckKind):
    """The cross entropy of a model before training is more than six times ln C, the loss of a
    random guess among C classes. Only ``telemetry.check`` reports it.

    Evidence: the loss, and that of a guess.
    Causes: large initial weights in the last layer, inputs that are not scaled.
    Remedies: make the weights of the last layer smaller; scale its inputs; check the targets.
    Silent: losses that are not known to be a cross entropy of classes.
    Example: model[-1].weight.data.mul_(50.0)
    """

    kind = "loss_at_start"
    # Times ln C: torchvision's new MNASNet has up to 5.7, logits 50 times as large 7.4 or more.
    factor: ClassVar[float] = 6.0
    advice = (
        "Make the initial weights of the last layer smaller, or scale its inputs",
        "For a trained model, check that inputs and targets belong to it",
    )


class InputIgnored(CheckKind):
    """The outputs of a model do not depend on its inputs. Only ``telemetry.check`` reports it.

    Evidence: the gradients of two samples' outputs with respect to all inputs are zero.
    Causes: ``detach()``, a factor of zero, dead units, a ``forward`` that does not use its input.
    Remedies: follow the input through ``forward``.
    Silent: weight matrices that start at zero, outputs without a gradient.
    Example: model.forward = lambda x: torch.zeros_like(x)
    """

    kind = "input_ignored"
    advice = (
        "Check for detach(), a factor of zero, and dead units",
        "Check that forward() uses its input",
    )


class BatchLeak(CheckKind):
    """The output of one sample depends on another sample of the batch, in evaluation mode. A note
    if the first axis may be time or samples are related. Only ``telemetry.check`` reports it.

    Evidence: the two samples.
    Causes: a mean, a softmax, a norm or a reshape over the first axis, ``batch_first=False``.
    Remedies: reduce over other axes; set ``batch_first=True``.
    Silent: batch norm, which depends on other samples in training only.
    Example: outputs = model(inputs).softmax(dim=0)
    """

    kind = "batch_leak"
    advice = (
        "Check for a mean, a softmax, a norm or a reshape over the first axis",
        "Set batch_first=True if attention expects the sequence there",
        "Move in-batch negatives into the loss",
    )


CHECK_KINDS = {check.kind: check for check in (LossAtStart, InputIgnored, BatchLeak)}
