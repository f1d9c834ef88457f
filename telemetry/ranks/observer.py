"""Notes, while a step is measured, which parts of the whole tensors this rank has."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from telemetry.ranks.topology import LocalShard, RankTopology, local_values, placed
from telemetry.records import Output
from telemetry.torch_private.host_copy import HostCopy
from telemetry.torch_private.ranks import is_dtensor, made_local, spec_of

# Elements of a gradient whose addends travel, to be added where they meet; of larger ones the norm
# is not known.
MOST_ADDED = 65_536

_NOTE = "telemetry.ranks"
_MOST_NODES = 4096
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Indexed = Sequence[tuple[int, Tensor]]


@dataclass(kw_only=True, eq=False)
class RankNotes:
    """Notes of one step, by output or by index of the parameter."""

    outputs: dict[str | Output, LocalShard] = field(default_factory=dict)  # and inputs, by name
    output_grads: dict[Output, LocalShard] = field(default_factory=dict)
    grads: dict[int, LocalShard] = field(default_factory=dict)  # of those that are a DTensor
    parameters: dict[int, LocalShard] = field(default_factory=dict)  # empty: not measured
    addends: dict[int, HostCopy] = field(default_factory=dict)  # where every rank holds one
    # Of parameters that other ranks hold, too, for each device: their indices and the sums of their
    # elements' bits read as whole numbers, modulo 2**64, int64 [k]. They do not depend on the order
    # of addition, so they are equal on different hardware, too.
    bit_sums: list[tuple[list[int], HostCopy]] = field(default_factory=list)
    unknown_sums: set[str] = field(default_factory=set)  # addends that are too large to be added


class RankObserver:
    """Finds out, on the training thread, how tensors relate to the whole ones.

    It calls no collective and waits for no device: it reads attributes of tensors and modules.
    """

    def __init__(self, *, rank: int, size: int) -> None:
        self.topology = RankTopology(rank=rank, size=size)
        # Passes without gradients have no graph; modules do there what they do in training.
        self._known: dict[Output, LocalShard] = {}

    def takes_inputs(self, notes: RankNotes, name: str, model: nn.Module | None) -> bool:
        """Note the shard of what a module is given from outside; whether to measure it here.

        To be called while the module is called, before what it returns.
        """
        if model is not None and not notes.outputs:
            self.topology.read_model(model)
        self.topology.read_call()
        if name and self.topology.same_data.copies > 1:
            return False  # it may be a part of what the model was given, and nothing says which
        stage = self.topology.stage  # the first stage's inputs are the model's
        shard = self.topology.same_data.numbered(first=stage * self.topology.size)
        notes.outputs[name] = shard
        return shard.counts

    def takes_output(
        self, notes: RankNotes, output: Output, tensor: Tensor, unit_axis: int | None
    ) -> bool:
        """Note the shard of what a module returned; whether to measure it here."""
        where = self._place_of(output, tensor)
        axis = None if unit_axis is None else unit_axis % tensor.dim() - tensor.dim()
        shard = notes.outputs[output] = where.numbered(turn=_turn(output), axis=axis)
        return shard.counts and _is_known(notes, shard, f"the output of {output}")

    def _place_of(self, output: Output, tensor: Tensor) -> LocalShard:
        """Shard of a module's output, by the tensors from which it was computed.

        The styles of ``parallelize_module`` compute with a ``DTensor`` and return its local tensor.
        The autograd graph remembers where that happened. What is computed from such tensors and
        others, without communication, is a part of the whole like them if one of them is; and is
        the same on all ranks that are given the same data if all of them are.
        """
        if is_dtensor(tensor):
            found = placed(spec_of(tensor))
        elif tensor.grad_fn is None:
            return self._known.get(output, self.topology.same_data)
        else:
            node: Any = tensor.grad_fn
            found = node.metadata[_NOTE] = _together(_origins(node), self.topology.same_data)
        self._known[output] = found
        return found

    def takes_output_grad(self, notes: RankNotes, output: Output, grad: Tensor) -> bool:
        """Note the shard of the gradient of an output; whether to measure it here."""
        shard = notes.outputs.get(output, LocalShard())
        if is_dtensor(grad):
            shard = placed(spec_of(grad)).numbered(turn=_turn(output))
        notes.output_grads[output] = shard
        return shard.counts and _is_known(notes, shard, f"the gradient of the output of {output}")

    def note_grads(self, notes: RankNotes, grads: Iterable[tuple[int, Tensor]]) -> None:
        """Note the shards of gradients, and keep the addends of those that are sums."""
        for index, grad in grads:
            if type(grad) is Tensor:
                continue  # see :meth:`RankTopology.of_plain`; this runs at every step
            shard = notes.grads[index] = self.topology.of_parameter(grad, index)
            if shard.reduction:
                values = local_values(grad)
                if shard.reduction == "unknown" or values.numel() > MOST_ADDED:
                    notes.grads[index] = replace(shard, reduction="unknown")
                else:
                    notes.addends[index] = HostCopy(values)

    def note_parameters(self, notes: RankNotes, parameters: Indexed) -> None:
        """Note the shards of parameters, and sum the bits of those that others hold, too."""
        for index, parameter in parameters:
            notes.parameters[index] = self.topology.of_parameter(parameter, index)
        if not self.topology.averages:
            held = ((i, p) for i, p in parameters if notes.parameters[i].copies != 1)
            notes.bit_sums += _bit_sums((i, local_values(p)) for i, p in held)

    def counting(self, tensors: Indexed) -> Indexed:
        """Select the parameters, or tensors of parameters, that this rank measures."""
        of = self.topology.of_parameter
        return [(i, t) for i, t in tensors if (s := of(t, i)).counts and not s.reduction]


def _is_known(notes: RankNotes, shard: LocalShard, what: str) -> bool:
    if shard.reduction:
        notes.unknown_sums.add(what)
    return not shard.reduction


def _turn(name: Hashable) -> int:
    """Copies take turns in being measured; the same on all ranks, unlike Python's own hash."""
    return sum(map(ord, str(name)))


def _bit_sums(tensors: Iterable[tuple[int, Tensor]]) -> list[tuple[list[int], HostCopy]]:
    groups: dict[torch.device, dict[int, Tensor]] = {}
    for index, tensor in tensors:
        whole = _WHOLE_NUMBERS.get(tensor.element_size())
        if whole is not None and tensor.is_floating_point() and tensor.numel() > 0:
            total = tensor.detach().view(whole).sum(dtype=torch.int64)
            groups.setdefault(tensor.device, {})[index] = total
    return [([*sums], HostCopy(torch.stack([*sums.values()]))) for sums in groups.values()]


def _together(origins: Iterator[LocalShard], alike: LocalShard) -> LocalShard:
    """The first of the origins that is only a part; else one that is the same on several ranks."""
    for origin in origins:
        if origin.splits or origin.reduction:
            return origin
        if origin.copies > alike.copies:
            alike = origin
    return alike


def _origins(node: Any) -> Iterator[LocalShard]:
    """Shards of the nearest known tensors behind a node, from near to far."""
    waiting, seen = deque([node]), {node}
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.popleft()
        known = node.metadata.get(_NOTE)
        if known is None and (spec := made_local(node)) is not None:
            known = placed(spec)
        if known is not None:
            yield known
            continue
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                waiting.append(before)
