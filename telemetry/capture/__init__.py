"""Captures training by hooks on a model and on its optimizers, as one value per step.

PyTorch calls the hooks (:mod:`hooks`, :mod:`optimizers`), which read a small :mod:`state` and call
:mod:`capture`. It opens and ends each :class:`~step.Step`, whose methods are in the order of time,
and delivers a :class:`CapturedStep`. The worker thread makes the record of it. At most steps one
call reads the gradients instead, and makes a :class:`LightStep`.

:mod:`activations` and :mod:`observations` measure the tensors of a step, :mod:`parameters` takes
norms, and :mod:`nested` finds tensors in containers. :mod:`modules` installs the hooks of modules
and :mod:`layouts` describes them. :mod:`schedule` and :mod:`account` decide what a step measures,
and :mod:`missed_steps` explains why no step is recorded.
"""

from telemetry.capture.capture import Capture as Capture
from telemetry.capture.captured_step import CapturedStep as CapturedStep
from telemetry.capture.light_step import LightStep as LightStep
from telemetry.capture.schedule import Schedule as Schedule
from telemetry.capture.state import Content as Content
