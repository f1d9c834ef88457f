"""Notes, while a step is measured, how this rank's tensors relate to the whole ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from telemetry.ranks.held import Share, Standing, local_values, placed
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
    """What was noted during one step; parameters go by their indices."""

    outputs: dict[str | Output, Share] = field(default_factory=dict)  # and inputs, by name
    output_grads: dict[Output, Share] = field(default_factory=dict)
    grads: dict[int, Share] = field(default_factory=dict)  # of those that are a DTensor
    parameters: dict[int, Share] = field(default_factory=dict)  # empty if they were not measured
    addends: dict[int, HostCopy] = field(default_factory=dict)  # where every rank holds one
    # Of parameters that other ranks hold, too, for each device: their indices and the sums of their
    # elements' bits read as whole numbers, modulo 2**64, int64 [k]. They do not depend on the order
    # of addition, so they are equal on different hardware, too.
    bit_sums: list[tuple[list[int], HostCopy]] = field(default_factory=list)
    not_known: set[str] = field(default_factory=set)  # addends that are too large to be added


class RankObserver:
    """Finds out, on the training thread, how tensors relate to the whole ones.

    It calls no collective and waits for no device: it reads what tensors and modules say.
    """

    def __init__(self, *, rank: int, size: int) -> None:
        self.standing = Standing(rank=rank, size=size)
        # Passes without gradients have no graph; modules do there what they do in training.
        self._known: dict[Output, Share] = {}

    def takes_inputs(self, notes: RankNotes, name: str, model: nn.Module | None) -> bool:
        """Note the share of what a module is given from outside; whether to measure it here.

        To be called while the module is called, before what it returns.
        """
        if model is not None and not notes.outputs:
            self.standing.look_at(model)
        self.standing.look_at_call()
        if name and self.standing.same_data.copies > 1:
            return False  # it may be a part of what the model was given, and nothing says which
        stage = self.standing.stage  # the first stage's inputs are the model's
        share = self.standing.same_data.numbered(first=stage * self.standing.size)
        notes.outputs[name] = share
        return share.counts

    def takes_output(
        self, notes: RankNotes, output: Output, tensor: Tensor, unit_axis: int | None
    ) -> bool:
        """Note the share of what a module returned; whether to measure it here."""
        where = self._place_of(output, tensor)
        axis = None if unit_axis is None else unit_axis % tensor.dim() - tensor.dim()
        share = notes.outputs[output] = where.numbered(turn=_turn(output), axis=axis)
        return share.counts and _is_known(notes, share, f"the output of {output}")

    def _place_of(self, output: Output, tensor: Tensor) -> Share:
        """How a module's output lies in the whole, by what it was computed from.

        The styles of ``parallelize_module`` compute with a ``DTensor`` and return its local tensor.
        The autograd graph remembers where that happened. What is computed from such tensors and
        others, without communication, is a part of the whole like them if one of them is; and is
        the same on all ranks that are given the same data if all of them are.
        """
        if is_dtensor(tensor):
            found = placed(spec_of(tensor))
        elif tensor.grad_fn is None:
            return self._known.get(output, self.standing.same_data)
        else:
            node: Any = tensor.grad_fn
            found = node.metadata[_NOTE] = _together(_origins(node), self.standing.same_data)
        self._known[output] = found
        return found

    def takes_output_grad(self, notes: RankNotes, output: Output, grad: Tensor) -> bool:
        """Note the share of the gradient of an output; whether to measure it here."""
        share = notes.outputs.get(output, Share())
        if is_dtensor(grad):
            share = placed(spec_of(grad)).numbered(turn=_turn(output))
        notes.output_grads[output] = share
        return share.counts and _is_known(notes, share, f"the gradient of the output of {output}")

    def note_grads(self, notes: RankNotes, grads: Iterable[tuple[int, Tensor]]) -> None:
        """Note the shares of gradients, and keep the addends of those that are sums."""
        for index, grad in grads:
            if type(grad) is Tensor:
                continue  # see :meth:`Standing.of_plain`; this runs at every step
            share = notes.grads[index] = self.standing.of_parameter(grad, index)
            if share.reduction:
                values = local_values(grad)
                if share.reduction == "unknown" or values.numel() > MOST_ADDED:
                    notes.grads[index] = replace(share, reduction="unknown")
                else:
                    notes.addends[index] = HostCopy(values)

    def note_parameters(self, notes: RankNotes, parameters: Indexed) -> None:
        """Note the shares of parameters, and sum the bits of those that others hold, too."""
        for index, parameter in parameters:
            notes.parameters[index] = self.standing.of_parameter(parameter, index)
        if not self.standing.averages:
            held = ((i, p) for i, p in parameters if notes.parameters[i].copies != 1)
            notes.bit_sums += _bit_sums((i, local_values(p)) for i, p in held)

    def counting(self, tensors: Indexed) -> Indexed:
        """Those of the parameters, or of what belongs to them, that this rank is to measure."""
        of = self.standing.of_parameter
        return [(i, t) for i, t in tensors if (s := of(t, i)).counts and not s.reduction]


def _is_known(notes: RankNotes, share: Share, what: str) -> bool:
    if share.reduction:
        notes.not_known.add(what)
    return not share.reduction


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


def _together(origins: Iterator[Share], alike: Share) -> Share:
    """The first of the origins that is only a part; else one that is the same on several ranks."""
    for origin in origins:
        if origin.shards or origin.reduction:
            return origin
        if origin.copies > alike.copies:
            alike = origin
    return alike


def _origins(node: Any) -> Iterator[Share]:
    """How the nearest known tensors behind a node lie in the whole, from near to far."""
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
