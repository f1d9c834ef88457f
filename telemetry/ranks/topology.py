"""Topology of the ranks: which local shard of each tensor this rank has, and which it measures."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from telemetry.records import Output
from telemetry.torch_private.host_copy import HostCopy
from telemetry.torch_private.ranks import (
    active_ddp,
    averages_weights,
    calling_stage,
    fsdp_mesh,
    has_flat_shards,
    ignored_by,
    is_dtensor,
    made_local,
    spec_of,
)

log = logging.getLogger("telemetry")

# Elements of a gradient that ranks send as an addend.
MOST_ADDED = 65_536

_NOTE = "telemetry.ranks"
_MOST_NODES = 4096
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Indexed = Sequence[tuple[int, Tensor]]


@dataclass(frozen=True, kw_only=True)
class LocalShard:
    """Part of a whole tensor that one rank has.

    A tensor has one or more copies, each split over one or more ranks: shards of a parameter, parts
    of a batch. The parts of one copy add up. Of several copies the lowest counts.
    """

    copy: int = 0
    copies: int = 1  # 0: unknown
    # For each axis that is split over ranks: the axis counted from the end (-1 is the last), this
    # rank's position along it and the number of positions.
    splits: tuple[tuple[int, int, int], ...] = ()
    # Of a DTensor's Partial: whether the tensor is the sum of the ranks' addends.
    reduction: Literal["", "sum", "unknown"] = ""
    # False: this rank does not measure it, as another one has a lower copy, or it is an addend.
    counts: bool = True
    # Number of this shard within its copy, to compare copies; -1: others may not be copies.
    shard: int = 0
    piece: int = 0  # of the units, if they are split over ranks
    pieces: int = 1

    def numbered(
        self, turn: int | Output = 0, *, first: int = 0, axis: int | None = None
    ) -> LocalShard:
        """Return the shard of one tensor: copies are numbered from ``first``.

        ``turn``, modulo their number, is the one that counts; ``axis`` of the units is negative.
        """
        # Unlike Python's hash, the sum of the characters is the same on all ranks.
        number = turn if isinstance(turn, int) else sum(map(ord, str(turn)))
        later = (self.copy - number) % self.copies
        counts = later == 0 and not self.reduction
        shard, _ = _flat((at, size) for _, at, size in self.splits)
        piece, pieces = _flat((at, size) for split, at, size in self.splits if split == axis)
        return replace(
            self, copy=first + later, counts=counts, shard=shard, piece=piece, pieces=pieces
        )


# The whole tensor, or a part that adds up with the parts of all other ranks.
UNSPLIT = LocalShard()

# Prefixes of mesh dimensions along which ranks have different data: parts of the batch, of the
# sequences (context parallel), or tokens for their experts.
_OF_DATA = (
    *("dp", "ddp", "fsdp", "hsdp", "data", "batch", "replicate", "shard"),
    *("cp", "ep", "expert"),
)


def placed(spec: Any) -> LocalShard:
    """Return the shard that a local tensor is, by a ``DTensorSpec``."""
    axes = [(*axis, o) for axis, o in zip(_axes(spec.mesh), spec.placements, strict=True)]
    copy, copies = _flat((at, size) for at, size, o in axes if o.is_replicate())
    operations = {o.reduce_op for _, _, o in axes if o.is_partial()}
    splits = [
        (o.dim - len(spec.shape), at, size)
        for at, size, o in axes
        if size > 1 and not (o.is_replicate() or o.is_partial())
    ]
    return LocalShard(
        copy=copy,
        copies=copies,
        splits=tuple(splits),
        reduction="" if not operations else "sum" if operations == {"sum"} else "unknown",
    )


def _axes(mesh: Any) -> list[tuple[int, int]]:
    """Return this rank's position along each axis of a mesh, and the size of the axis."""
    return [*zip(mesh.get_coordinate() or [0] * mesh.ndim, mesh.shape, strict=True)]


def _flat(axes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Return the position in a grid of positions and sizes, the last axis fastest; and its size."""
    index, count = 0, 1
    for at, size in axes:
        index, count = index * size + at, count * size
    return index, count


@dataclass(kw_only=True, eq=False)
class RankNotes:
    """Local shards of one step, by output or by index of the parameter; values for merging."""

    outputs: dict[str | Output, LocalShard] = field(default_factory=dict)  # and inputs, by name
    output_grads: dict[Output, LocalShard] = field(default_factory=dict)
    grads: dict[int, LocalShard] = field(default_factory=dict)  # of those that are a DTensor
    parameters: dict[int, LocalShard] = field(default_factory=dict)  # empty: not measured
    addends: dict[int, HostCopy] = field(default_factory=dict)  # of gradients that are sums
    # Of parameters with copies on other ranks, for each device: their indices and the sums of their
    # elements' bits read as whole numbers, modulo 2**64, int64 [k]. These do not depend on the
    # order of addition, so they are equal on different hardware, too.
    bit_sums: list[tuple[list[int], HostCopy]] = field(default_factory=list)
    # Index of each updated parameter, norms of its update and of itself before, and their ratio.
    moved: list[tuple[int, float, float, float]] = field(default_factory=list)


@dataclass(kw_only=True, eq=False)
class RankObserver:
    """Position of this rank among those that train together, and its shard of each tensor."""

    rank: int
    size: int  # number of ranks
    stage: int = 0  # of a pipeline; 0 without one
    is_in_pipeline: bool = False
    # This rank's position among those with equal parameters, apart from what a DTensor says, and
    # the lowest of them. None: of plain parameters those of the lowest rank count.
    replicas: tuple[LocalShard, int] | None = None
    averages: bool = False  # replicas are averaged only from time to time
    same_data: LocalShard = UNSPLIT  # the position among ranks with the same data
    shards_of: int | None = None  # lowest rank of those that ``fully_shard`` shards over
    has_flat_shards: bool = False  # of FullyShardedDataParallel
    _has_unknown_sums: bool = False
    _known: dict[Hashable, LocalShard] = field(default_factory=dict)
    _plain: dict[int, LocalShard] = field(default_factory=dict)  # of plain parameters, exceptions
    # For passes without gradients, which have no graph.
    _outputs: dict[Output, LocalShard] = field(default_factory=dict)
    _ignored: set[int] = field(default_factory=set)
    _meshes: dict[Any, None] = field(default_factory=dict)  # in the same order on all ranks

    def read_model(self, model: nn.Module) -> None:
        """Find the mesh dimensions of equal data: not sharded by FSDP, without a name of data."""
        if isinstance(model, DistributedDataParallel):
            self._read_ddp(model)
        if not self.has_flat_shards and has_flat_shards(model):
            self.has_flat_shards = True
            if self.rank == 0:
                log.warning(
                    "telemetry: FullyShardedDataParallel flattens parameters, so the records have "
                    "rank 0's part of parameters and gradients; use torch.distributed.fsdp."
                    "fully_shard for those of all ranks"
                )
        of_fsdp = [mesh for module in model.modules() if (mesh := fsdp_mesh(module)) is not None]
        self.shards_of = min((int(mesh.mesh.min()) for mesh in of_fsdp), default=None)
        data_names = {name for mesh in of_fsdp for name in mesh.mesh_dim_names or ()}
        specs = filter(None, map(spec_of, model.parameters()))
        self._meshes |= dict.fromkeys([spec.mesh for spec in specs])
        of_equal_data: dict[str, tuple[int, int]] = {}
        for mesh in self._meshes:
            names = mesh.mesh_dim_names or (() if of_fsdp else ("",) * mesh.ndim)
            for name, axis in zip(names, _axes(mesh), strict=False):
                if name not in data_names and not name.startswith(_OF_DATA):
                    of_equal_data[name] = axis
        copy, copies = _flat(of_equal_data.values())
        self.same_data = LocalShard(copy=copy, copies=copies)

    def of_parameter(self, tensor: Any, index: int) -> LocalShard:
        """Return this rank's shard of a parameter, its gradient or its state."""
        spec = spec_of(tensor)
        if spec is None:
            if id(tensor) in self._ignored and self.replicas is not None:
                self._plain[index] = LocalShard(copy=self.replicas[1] * self.size)
            return self.of_plain(index)
        key = index, spec.mesh, spec.placements
        shard = self._known.get(key)
        if shard is None:
            first = int(spec.mesh.mesh.min())
            shard = placed(spec).numbered(index, first=first * self.size)
            if spec.mesh.size() < self.size:  # ranks outside of it may have other copies
                shard = replace(shard, copies=0)
            self._known[key] = shard
        if not is_dtensor(tensor):
            self._plain[index] = shard  # its gradient is plain, too, and has no spec
        return shard

    def of_plain(self, index: int) -> LocalShard:
        """Return this rank's shard of a parameter that is no ``DTensor``."""
        if index in self._plain:
            return self._plain[index]
        if self.replicas is None:
            copies = 1 if self.size == 1 or self.has_flat_shards else 0
            return LocalShard(copy=self.rank * self.size, copies=copies, shard=-1)
        where, first = self.replicas
        # Another group of DDP may have another part: only copies in one group are compared.
        return replace(where.numbered(index, first=first * self.size), shard=first)

    def copies(self, count: int, shards: Mapping[int, LocalShard]) -> NDArray[np.int64]:
        """Return the copies of the first ``count`` parameters, with ``shards`` if not plain."""
        where, first = self.replicas or (LocalShard(), self.rank)
        copies = first * self.size + (where.copy - np.arange(count)) % where.copies
        for index, shard in {**self._plain, **shards}.items():
            copies[index] = shard.copy
        return copies

    @property
    def shares_data(self) -> bool:
        """Whether other ranks get the same data, or this one gets the outputs of others."""
        return self.same_data.copies > 1 or self.is_in_pipeline

    @property
    def data_group(self) -> int | None:
        """Lowest of the ranks that should have different data; None if nothing says so."""
        if self.shares_data:
            return None
        return self.shards_of if self.replicas is None else self.replicas[1]

    def _read_ddp(self, wrapper: DistributedDataParallel) -> None:
        self._ignored = ignored_by(wrapper)
        self.averages = averages_weights(wrapper)
        group = wrapper.process_group
        ranks = sorted(distributed.get_process_group_ranks(group))
        self.replicas = LocalShard(copy=distributed.get_rank(group), copies=len(ranks)), ranks[0]

    # --- on the training thread ------------------------------------------------------------------

    def takes_inputs(self, notes: RankNotes, name: str, model: nn.Module | None) -> bool:
        """Note the shard of an input of a running module; return whether to measure it here."""
        if model is not None and not notes.outputs:
            self.read_model(model)
        if (wrapper := active_ddp()) is not None:
            self._read_ddp(wrapper)
        if (stage := calling_stage()) is not None:
            self.stage, self.is_in_pipeline = stage.number, True
        if name and self.same_data.copies > 1:
            return False  # nothing says which part of the model's input this is
        # The first stage's inputs are the model's.
        shard = notes.outputs[name] = self.same_data.numbered(first=self.stage * self.size)
        return shard.counts

    def takes_output(
        self, notes: RankNotes, output: Output, tensor: Tensor, unit_axis: int | None
    ) -> bool:
        """Note the shard of a module's output; return whether to measure it here.

        ``parallelize_module`` returns local tensors of a ``DTensor``, which the autograd graph
        shows. Without communication, an output is a part of the whole if one of its origins is.
        """
        node: Any = tensor.grad_fn
        if is_dtensor(tensor):
            position = self._outputs[output] = placed(spec_of(tensor))
        elif node is not None:
            position = self._outputs[output] = node.metadata[_NOTE] = _origin(node, self.same_data)
        else:
            position = self._outputs.get(output, self.same_data)
        axis = None if unit_axis is None else unit_axis % tensor.dim() - tensor.dim()
        shard = notes.outputs[output] = position.numbered(output, axis=axis)
        return shard.counts

    def takes_output_grad(self, notes: RankNotes, output: Output, grad: Tensor) -> bool:
        """Note the shard of the gradient of an output; return whether to measure it here."""
        shard = notes.outputs.get(output, UNSPLIT)
        if is_dtensor(grad):
            shard = placed(spec_of(grad)).numbered(output)
        notes.output_grads[output] = shard
        return shard.counts

    def note_grads(self, notes: RankNotes, grads: Iterable[tuple[int, Tensor]]) -> None:
        """Note the shards of gradients, and copy the addends of gradients that are sums."""
        for index, grad in grads:
            if type(grad) is Tensor:
                continue  # see :meth:`of_plain`; this runs at every step
            shard = notes.grads[index] = self.of_parameter(grad, index)
            if shard.reduction == "sum" and (values := _local(grad)).numel() <= MOST_ADDED:
                notes.addends[index] = HostCopy(values)
            elif shard.reduction and self.rank == 0 and not self._has_unknown_sums:
                self._has_unknown_sums = True
                log.warning(
                    "telemetry: ranks hold addends of a gradient, which are not added up above "
                    "%d elements, or if it is no sum; its recorded norm is that of the addends",
                    MOST_ADDED,
                )

    def note_parameters(self, notes: RankNotes, parameters: Indexed) -> None:
        """Note the shards of parameters, and sum the bits of those with copies on other ranks."""
        sums: defaultdict[torch.device, dict[int, Tensor]] = defaultdict(dict)
        for index, parameter in parameters:
            shard = notes.parameters[index] = self.of_parameter(parameter, index)
            if shard.copies != 1 and not self.averages and parameter.is_floating_point():
                values = _local(parameter).detach()
                whole = _WHOLE_NUMBERS.get(values.element_size())
                if whole is not None and values.numel() > 0:
                    sums[values.device][index] = values.view(whole).sum(dtype=torch.int64)
        for some in sums.values():
            notes.bit_sums.append(([*some], HostCopy(torch.stack([*some.values()]))))

    def counting(self, tensors: Indexed) -> Indexed:
        """Select the parameters, or tensors of parameters, that this rank measures."""
        return [(index, o) for index, o in tensors if self.of_parameter(o, index).counts]


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[no-any-return]


def _origin(node: Any, same_data: LocalShard) -> LocalShard:
    """Return the nearest known tensor behind a node that is a part; else one with copies."""
    queued, seen = deque([node]), {node}
    known: LocalShard | None
    while queued and len(seen) < _MOST_NODES:
        node = queued.popleft()
        known = node.metadata.get(_NOTE)
        if known is None and (spec := made_local(node)) is not None:
            known = placed(spec)
        if known is None:
            before = {o: None for o, _ in node.next_functions if o is not None and o not in seen}
            seen.update(before)
            queued.extend(before)
        elif known.splits or known.reduction:
            return known
        elif known.copies > same_data.copies:
            same_data = known
    return same_data
