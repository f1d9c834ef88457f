"""Hooks on a model and on its optimizers: what happens in training, as one value per step.

PyTorch calls our hooks (:mod:`hooks`, :mod:`optimizers`), these call :mod:`capture`, which knows
the step in progress, or the :class:`~step.Step` itself. Its methods are in the order of time:
begin, forward passes, backward passes, optimizer steps, end. It leaves behind a
:class:`CapturedStep`, of which the background thread makes the record.

:mod:`budget` says how much is affordable, :mod:`modules` puts hooks on what is watched,
:mod:`parameters` takes norms, :mod:`nested` finds tensors in values, :mod:`unseen` says why
no step was seen. Most steps need none of this: one call reads their gradients, which makes a
:class:`LightStep`.
"""

from telemetry.capture.budget import Budget
from telemetry.capture.capture import Capture, Content
from telemetry.capture.captured import CapturedStep, LightStep

__all__ = ["Budget", "Capture", "CapturedStep", "Content", "LightStep"]
