"""Part of each tensor that this rank has, by meshes of ``DTensor``, DDP and pipelines."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from telemetry.torch_private.ranks import (
    active_ddp,
    averages_weights,
    calling_stage,
    fsdp_mesh,
    has_flat_shards,
    ignored_by,
    is_dtensor,
    spec_of,
)

log = logging.getLogger("telemetry")

Reduction = Literal["", "sum", "mean", "unknown"]


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
    # A Partial of DTensor: how the ranks' addends become the tensor, and of how many ranks.
    reduction: Reduction = ""
    reduced: int = 1
    counts: bool = True  # False: another rank has a lower copy, so this one need not measure
    # Number of this shard within its copy, to compare copies; -1: others may not be copies.
    shard: int = 0
    piece: int = 0  # of the units, if they are split over ranks
    pieces: int = 1

    def numbered(self, *, first: int = 0, turn: int = 0, axis: int | None = None) -> LocalShard:
        """The shard of one tensor: copies are numbered from ``first``, and take turns to count.

        ``turn`` says whose turn it is; units are along ``axis``, counted from the end.
        """
        piece, pieces = _flat((at, size) for split, at, size in self.splits if split == axis)
        shard, _ = _flat((at, size) for _, at, size in self.splits)
        later = (self.copy - turn) % self.copies
        return replace(
            self, copy=first + later, counts=later == 0, shard=shard, piece=piece, pieces=pieces
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
    """The shard that a local tensor is, by a ``DTensorSpec``."""
    mesh = spec.mesh
    coordinates = mesh.get_coordinate() or [0] * mesh.ndim
    axes = list(zip(coordinates, mesh.shape, spec.placements, strict=True))
    copy, copies = _flat((at, size) for at, size, o in axes if o.is_replicate())
    partial = [(o.reduce_op, size) for _, size, o in axes if o.is_partial()]
    known: dict[str, Reduction] = {"sum": "sum", "avg": "mean"}
    kinds = {known.get(operation, "unknown") for operation, _ in partial}
    return LocalShard(
        copy=copy,
        copies=copies,
        splits=tuple(
            [
                (o.dim - len(spec.shape), at, size)
                for at, size, o in axes
                if size > 1 and not (o.is_replicate() or o.is_partial())
            ]
        ),
        reduction="unknown" if len(kinds) > 1 else next(iter(kinds), ""),
        reduced=math.prod(size for _, size in partial),
    )


def _flat(axes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Position in a grid of positions and sizes, the last axis running fastest; and its size."""
    index, count = 0, 1
    for at, size in axes:
        index, count = index * size + at, count * size
    return index, count


def local_values(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return local


@dataclass(kw_only=True, eq=False)
class RankTopology:
    """Position of this rank among those that train together."""

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
    _known: dict[Hashable, LocalShard] = field(default_factory=dict)
    _plain: dict[int, LocalShard] = field(default_factory=dict)  # plain, and nobody has copies
    _ignored: set[int] = field(default_factory=set)
    _meshes: dict[int, Any] = field(default_factory=dict)
    _copies: tuple[object, NDArray[np.int64]] | None = None

    def read_model(self, model: nn.Module) -> None:
        """Read from a model's parameters which dimensions of their meshes have the same data.

        Those are the dimensions that FSDP does not shard over and whose names do not say otherwise.
        """
        if isinstance(model, DistributedDataParallel):
            self._take_replicas(model)
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
        found: dict[str, tuple[int, int]] = {}
        for spec in filter(None, map(spec_of, model.parameters())):
            self._meshes[id(spec.mesh)] = spec.mesh
        for mesh in self._meshes.values():
            names = mesh.mesh_dim_names
            if names is None:
                names = ("",) * mesh.ndim if not of_fsdp else ()
            coordinates = mesh.get_coordinate() or [0] * mesh.ndim
            for name, coordinate, size in zip(names, coordinates, mesh.shape, strict=False):
                if name not in data_names and not name.startswith(_OF_DATA):
                    found[name] = (coordinate, size)
        copy, copies = _flat(found.values())
        self.same_data = LocalShard(copy=copy, copies=copies)

    def read_call(self) -> None:
        """Read from the call stack, while a module is called, whether DDP or a pipeline calls."""
        wrapper = active_ddp()
        if wrapper is not None:
            self._take_replicas(wrapper)
        stage = calling_stage()
        if stage is not None:
            self.stage, self.is_in_pipeline = stage.number, True

    def of_parameter(self, tensor: Any, index: int) -> LocalShard:
        """This rank's part of a parameter, its gradient or its state."""
        spec = spec_of(tensor)
        if spec is None:
            if id(tensor) in self._ignored and self.replicas is not None:
                self._plain[index] = LocalShard(copy=self.replicas[1] * self.size)
            return self.of_plain(index)
        key = index, spec.mesh, spec.placements
        shard = self._known.get(key)
        if shard is None:
            first = int(spec.mesh.mesh.min())
            shard = placed(spec).numbered(first=first * self.size, turn=index)
            if spec.mesh.size() < self.size:  # ranks outside of it may have copies of their own
                shard = replace(shard, copies=0)
            self._known[key] = shard
        if not is_dtensor(tensor):
            self._plain[index] = shard  # its gradient is plain, too, and has no spec
        return shard

    def of_plain(self, index: int) -> LocalShard:
        """This rank's part of a parameter that is no ``DTensor``."""
        if index in self._plain:
            return self._plain[index]
        if self.replicas is None:
            copies = 1 if self.size == 1 or self.has_flat_shards else 0
            return LocalShard(copy=self.rank * self.size, copies=copies, shard=-1)
        where, first = self.replicas
        # Another group of DDP may have another part: only copies in one group are compared.
        return replace(where.numbered(first=first * self.size, turn=index), shard=first)

    def plain_copies(self, count: int) -> NDArray[np.int64]:
        """Numbers of the copies of ``count`` parameters, as if none was a ``DTensor``."""
        state = count, self.replicas, len(self._plain)
        if self._copies is None or self._copies[0] != state:
            copies = np.array([self.of_plain(index).copy for index in range(count)], np.int64)
            self._copies = state, copies
        return self._copies[1]

    @property
    def data_group(self) -> int | None:
        """Lowest of the ranks that should have different data; None if nothing says so."""
        if self.same_data.copies > 1 or self.is_in_pipeline:
            return None
        return self.shards_of if self.replicas is None else self.replicas[1]

    def _take_replicas(self, wrapper: DistributedDataParallel) -> None:
        self._ignored = ignored_by(wrapper)
        self.averages = averages_weights(wrapper)
        group = wrapper.process_group
        ranks = sorted(distributed.get_process_group_ranks(group))
        self.replicas = LocalShard(copy=distributed.get_rank(group), copies=len(ranks)), ranks[0]
