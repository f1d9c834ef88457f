"""Which part of a whole the local outputs of tensor-parallel modules are."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from typing import Any

from torch import Tensor

from telemetry.ranks.meshes import Placed, is_dtensor, placed, placed_by
from telemetry.torch_ranks import made_local

_NOTE = "telemetry.ranks"
_MOST_NODES = 4096


class Lineage:
    """Knows how a module's output lies in the whole by what it was computed from.

    The styles of ``parallelize_module`` compute with a ``DTensor`` and return its local tensor. The
    autograd graph remembers where that happened. What is computed from such tensors and others,
    without communication, is a part of the whole like them if one of them is; and is the same on
    all ranks that are given the same data if all of them are.
    """

    def __init__(self) -> None:
        # Passes without gradients have no graph; modules do there what they do in training.
        self._known: dict[Hashable, Placed] = {}

    def of(self, name: Hashable, tensor: Tensor, alike: Placed) -> Placed:
        """How a module's output lies in the whole.

        Args:
            name: Which output.
            tensor: It, as returned.
            alike: This rank's place among those that are given the same data.
        """
        if is_dtensor(tensor):
            found = placed(tensor)
        elif tensor.grad_fn is not None:
            found = _together(_origins(tensor.grad_fn), alike)
            node: Any = tensor.grad_fn
            node.metadata[_NOTE] = found
        else:
            return self._known.get(name, alike)
        self._known[name] = found
        return found


def _together(origins: Iterator[Placed], alike: Placed) -> Placed:
    """The first of the origins that is only a part; else one that is the same on several ranks."""
    for origin in origins:
        if origin.shards or origin.reduction:
            return origin
        if origin.copies > alike.copies:
            alike = origin
    return alike


def _origins(node: Any) -> Iterator[Placed]:
    """How the nearest known tensors behind a node lie in the whole, from near to far."""
    waiting, seen = deque([node]), {node}
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.popleft()
        known = node.metadata.get(_NOTE)
        if known is None and (spec := made_local(node)) is not None:
            known = placed_by(spec.mesh, spec.placements, len(spec.shape))
        if known is not None:
            yield known
            continue
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                waiting.append(before)
