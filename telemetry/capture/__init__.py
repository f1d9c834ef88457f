"""Captures training by hooks on a model and on its optimizers, as one record per step.

PyTorch calls the hooks (:mod:`hooks`), which read a small :mod:`state` and call the :mod:`loop`. It
begins and ends each :class:`~step.Step`, with its :mod:`forward` and :mod:`backward` passes, and
delivers its record with :mod:`pending` values, which the worker turns into numbers. At most steps
one call reads the gradients instead (:mod:`light_step`). :mod:`optimizers` says which optimizer
ends a step.

:mod:`observations` measures the tensors of a step, :mod:`parameters` takes norms, and :mod:`nested`
finds tensors in containers. :mod:`modules` installs the hooks of modules and :mod:`layouts`
describes them. :mod:`schedule` and :mod:`account` decide what a step measures, and
:mod:`missed_steps` explains why no step is recorded.
"""

from telemetry.capture.loop import Loop as Loop
from telemetry.capture.pending import Pending as Pending
from telemetry.capture.schedule import Schedule as Schedule
from telemetry.capture.state import Content as Content
