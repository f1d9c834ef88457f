"""Captures training by hooks on a model and on its optimizers, as one record per step.

PyTorch calls the :mod:`hooks`, which call the :mod:`loop`; they share a :mod:`context`. The loop
begins and ends each :class:`~step.Step`, a full one with its forward and backward :mod:`passes`,
and delivers it; the worker resolves it, which turns what was read into a record. :mod:`optimizers`
says which optimizer ends a step, and why none does.

:mod:`observations` measures the tensors of a step and copies other values, and :mod:`parameters`
takes norms. :mod:`modules` installs the hooks of modules, and explains why some are not measured;
:mod:`layouts` describes them. :mod:`schedule` decides what a step measures.
"""

from telemetry.capture.context import Content as Content
from telemetry.capture.loop import Loop as Loop
from telemetry.capture.schedule import Schedule as Schedule
from telemetry.capture.step import Step as Step
