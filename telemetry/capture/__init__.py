"""Hooks on a model and on its optimizers: what happens in training, as one value per step.

PyTorch calls our hooks (:mod:`hooks`, :mod:`optimizer_hooks`), each hook calls :mod:`steps`, and
that hands the :class:`~window.Window` of the step in progress to one piece after the other:

1. begin: :mod:`budget` says how much is affordable, :mod:`modules` puts hooks on what is watched;
2. forward and backward passes: :mod:`passes` says which are training and adds what the modules
   return, :mod:`backward` the gradients of that;
3. optimizer steps: :mod:`reader` adds gradients, parameters and what the step changes;
4. end: :mod:`hand_over` delivers a :class:`CapturedStep`, and the next step begins.

:mod:`capture` turns all that on and off.

:mod:`captured` makes the record of it, on the background thread. Most steps need none of this:
:mod:`light` reads their gradients and adds a row to a :class:`LightBlock`.
"""

from telemetry.capture.budget import Budget
from telemetry.capture.capture import Capture
from telemetry.capture.captured import CapturedStep
from telemetry.capture.light import LightBlock, LightItem, LightRows, light_steps
from telemetry.capture.watch import Content

__all__ = [
    "Budget",
    "Capture",
    "CapturedStep",
    "Content",
    "LightBlock",
    "LightItem",
    "LightRows",
    "light_steps",
]
