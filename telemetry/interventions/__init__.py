"""Hooks that people write by hand: on gradients, on activations, and to read what flows through.

Each is in force from the call that makes it to its :meth:`~Intervention.remove` or the end of its
``with`` block. They work together, and with :class:`telemetry.HookLogger`, which shows what they
do.

``select`` says what is meant, in the words of ``HookLogger(modules=...)``: a glob over names such
as ``"encoder.*"``, a module class, a ``predicate(name, module)``, or several of these. For
gradients a module stands for all parameters inside of it, and a glob may name parameters, such as
``"fc*.bias"``.
"""

from telemetry.interventions.activations import prune_activations
from telemetry.interventions.capturing import Captured, Capturing, capture
from telemetry.interventions.gradients import clip_gradients, scale_gradients, zero_gradients
from telemetry.interventions.intervention import Intervention

__all__ = [
    "Captured",
    "Capturing",
    "Intervention",
    "capture",
    "clip_gradients",
    "prune_activations",
    "scale_gradients",
    "zero_gradients",
]
