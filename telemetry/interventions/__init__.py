"""Ready-made hooks that change gradients or activations, or capture them.

Each is active from the call that makes it until :meth:`~Intervention.remove` or the end of its
``with`` block. They can be combined with each other and with :class:`telemetry.HookLogger`, which
shows their effect.

``select`` is like ``HookLogger(modules=...)``: a glob over names such as ``"encoder.*"``, a module
class, a ``predicate(name, module)``, or several of these. For gradients, a module stands for all
parameters inside of it, and a glob may also match parameters, such as ``"fc*.bias"``.
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
