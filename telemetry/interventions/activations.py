"""Changes what modules return."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from torch import Tensor, nn

from telemetry.capture.hooks import map_tensors
from telemetry.capture.inert import Inert
from telemetry.interventions.intervention import Intervention, check_number
from telemetry.selection import Selectors, select_modules
from telemetry.torch_compiler import drop_compiled_code


def prune_activations(
    model: nn.Module, select: Selectors | None = None, *, threshold: float
) -> Intervention:
    """Set activations of small magnitude to zero: ``x`` becomes ``0`` where ``|x| < threshold``.

    ::

        with prune_activations(model, "encoder.*", threshold=0.5):
            train()

    Every floating-point tensor that a selected module returns is pruned, in training and in
    evaluation, the states of an LSTM included. Pruned elements have a gradient of zero, the others
    keep theirs. NaN and infinity are kept. The module's own tensor is not modified: later modules,
    and hooks that were registered earlier, receive a pruned copy.

    A compiled model is compiled again. Under checkpointing, remove the intervention only between
    steps, because the forward pass must run twice in the same way.

    Args:
        model: The model whose activations are pruned.
        select: Which modules; default: every leaf module, including the last one.
        threshold: Magnitudes below it are set to zero; 0 prunes nothing.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A glob matches no module, or ``threshold`` is negative or not finite.
    """
    if not 0 <= check_number("prune_activations", "threshold", threshold) < math.inf:
        raise ValueError(f"prune_activations(threshold={threshold}): must be finite, at least 0")
    selected = select_modules(model, select, caller="prune_activations")
    hook = _Prune(threshold)
    pruning = Intervention(
        [partial(m.register_forward_hook, hook, prepend=True) for m in selected.values()]
    )
    drop_compiled_code()
    return pruning


class _Prune(Inert):
    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return map_tensors(output, self._prune)

    def _prune(self, x: Tensor) -> Tensor:
        if not (x.is_floating_point() or x.is_complex()):
            return x
        # A comparison with NaN is false, so NaN stays.
        return x.masked_fill(x.detach().abs() < self._threshold, 0)
