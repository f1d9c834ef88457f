"""Notes, while a step is measured, how this rank's tensors relate to the whole ones."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from telemetry.host_copy import HostCopy
from telemetry.ranks.bit_sums import BitSums, bit_sums
from telemetry.ranks.lineage import Lineage
from telemetry.ranks.meshes import Standing, is_dtensor, local_values, placed
from telemetry.ranks.share import Share
from telemetry.records import Output

MOST_ADDED = 65_536
"""Elements of a gradient whose addends travel, to be added where they meet; of larger ones the norm
is not known."""

Indexed = Sequence[tuple[int, Tensor]]


@dataclass(kw_only=True, eq=False)
class RankNotes:
    """What was noted during one step.

    Attributes:
        outputs: Share of each input (by name) and output.
        output_grads: Share of each output's gradient.
        grads: Share of each gradient that is a ``DTensor``, by the index of the parameter.
        parameters: Share of each parameter; empty if they were not measured.
        addends: Gradients of which every rank holds an addend.
        bit_sums: Of parameters that other ranks hold, too.
        not_known: Tensors of which every rank holds an addend, and which are too large to be added.
    """

    outputs: dict[str | Output, Share] = field(default_factory=dict)
    output_grads: dict[Output, Share] = field(default_factory=dict)
    grads: dict[int, Share] = field(default_factory=dict)
    parameters: dict[int, Share] = field(default_factory=dict)
    addends: dict[int, HostCopy] = field(default_factory=dict)
    bit_sums: list[BitSums] = field(default_factory=list)
    not_known: set[str] = field(default_factory=set)


class RankObserver:
    """Finds out, on the training thread, how tensors relate to the whole ones.

    It calls no collective and waits for no device: it reads what tensors and modules say.

    Args:
        rank: This one.
        size: How many train together.
    """

    def __init__(self, *, rank: int, size: int) -> None:
        self.standing = Standing(rank=rank, size=size)
        self._lineage = Lineage()

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
        share = self.standing.same_data.share(first=stage * self.standing.size)
        notes.outputs[name] = share
        return share.counts

    def takes_output(
        self, notes: RankNotes, output: Output, tensor: Tensor, unit_axis: int | None
    ) -> bool:
        """Note the share of what a module returned; whether to measure it here."""
        where = self._lineage.of(output, tensor, self.standing.same_data)
        axis = None if unit_axis is None else unit_axis % tensor.dim() - tensor.dim()
        share = notes.outputs[output] = where.share(turn=_turn(output), axis=axis)
        return share.counts and _is_known(notes, share, f"the output of {output}")

    def takes_output_grad(self, notes: RankNotes, output: Output, grad: Tensor) -> bool:
        """Note the share of the gradient of an output; whether to measure it here."""
        share = notes.outputs.get(output, Share())
        if is_dtensor(grad):
            share = placed(grad).share(turn=_turn(output))
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
        held = [(i, p) for i, p in parameters if notes.parameters[i].copies != 1]
        local = [(i, local_values(p)) for i, p in held]
        notes.bit_sums += bit_sums((i, v.detach()) for i, v in local if _has_bits(v))

    def counting(self, tensors: Indexed) -> Indexed:
        """Those of the parameters, or of what belongs to them, that this rank is to measure."""
        shares = [self.standing.of_parameter(tensor, index) for index, tensor in tensors]
        return [
            pair
            for pair, share in zip(tensors, shares, strict=True)
            if share.counts and not share.reduction
        ]


def _is_known(notes: RankNotes, share: Share, what: str) -> bool:
    if share.reduction:
        notes.not_known.add(what)
    return not share.reduction


def _turn(name: Hashable) -> int:
    """Copies take turns in being measured; the same on all ranks, unlike Python's own hash."""
    return sum(map(ord, str(name)))


def _has_bits(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.numel() > 0 and tensor.dtype.itemsize <= 8
