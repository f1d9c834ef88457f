"""What this rank holds: which part of each tensor, by meshes of ``DTensor``, DDP and pipelines."""

from __future__ import annotations

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
    flat_shard_group,
    fsdp_mesh,
    ignored_by,
    is_dtensor,
    spec_of,
)

Reduction = Literal["", "sum", "mean", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of a whole tensor one rank holds.

    A tensor has one or more copies, each split over one or more ranks: shards of a parameter, parts
    of a batch. What the ranks of a copy measured adds up. Of several copies the lowest counts.

    """

    copy: int = 0
    copies: int = 1  # 0: not known
    # For each axis that is split over ranks: which, from the end (-1 is the last), this rank's
    # place along it and the number of places.
    shards: tuple[tuple[int, int, int], ...] = ()
    # How what the ranks of one copy hold becomes the tensor, and over how many of them, if it is
    # not part of it: a Partial of DTensor.
    reduction: Reduction = ""
    reduced: int = 1
    counts: bool = True  # no rank that this one knows of has a lower copy; else it need not measure
    # Which part of its copy this is, for telling whether two copies are equal; -1 if nothing says
    # that other ranks' are copies of it.
    shard: int = 0
    piece: int = 0  # if units are split over ranks, which of so many pieces this is
    pieces: int = 1

    def numbered(self, *, first: int = 0, turn: int = 0, axis: int | None = None) -> Share:
        """That of one tensor, of which copies are numbered from ``first``, and take turns to count.

        ``turn`` says whose it is; units are along ``axis``, counted from the end.
        """
        piece, pieces = _flat((place, places) for at, place, places in self.shards if at == axis)
        shard, _ = _flat((place, places) for _, place, places in self.shards)
        later = (self.copy - turn) % self.copies
        return replace(
            self, copy=first + later, counts=later == 0, shard=shard, piece=piece, pieces=pieces
        )


# All of it, or a part that adds up with those of all other ranks.
WHOLE = Share()


# Beginnings of the names of mesh dimensions along which ranks are given different data: parts of
# the batch, of the sequences (context parallel), or tokens for their experts.
_OF_DATA = (
    *("dp", "ddp", "fsdp", "hsdp", "data", "batch", "replicate", "shard"),
    *("cp", "ep", "expert"),
)


def placed(spec: Any) -> Share:
    """How a local tensor lies in the whole one, by a ``DTensorSpec``."""
    mesh = spec.mesh
    coordinates = mesh.get_coordinate() or [0] * mesh.ndim
    axes = list(zip(coordinates, mesh.shape, spec.placements, strict=True))
    copy, copies = _flat((at, size) for at, size, o in axes if o.is_replicate())
    partial = [(o.reduce_op, size) for _, size, o in axes if o.is_partial()]
    known: dict[str, Reduction] = {"sum": "sum", "avg": "mean"}
    kinds = {known.get(operation, "unknown") for operation, _ in partial}
    return Share(
        copy=copy,
        copies=copies,
        shards=tuple(
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
    """The place in a grid of places and sizes, the last axis running fastest; and its size."""
    index, count = 0, 1
    for place, size in axes:
        index, count = index * size + place, count * size
    return index, count


def local_values(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return local


@dataclass(kw_only=True, eq=False)
class Standing:
    """Where this rank stands among those that train with it."""

    rank: int
    size: int  # how many there are
    stage: int = 0  # of a pipeline; 0 without one
    is_in_pipeline: bool = False
    # This rank's place among those that hold equal parameters, apart from what a DTensor says, and
    # the lowest of them; without it those of the lowest rank that has a parameter count.
    replicas: tuple[Share, int] | None = None
    averages: bool = False  # those are made equal only from time to time
    same_data: Share = WHOLE  # its place among those that are given the same data
    # The lowest of the ranks that have one copy together, flattened and sharded by
    # FullyShardedDataParallel, or sharded by fully_shard.
    flat_shards_of: int | None = None
    shards_of: int | None = None
    _shares: dict[Hashable, Share] = field(default_factory=dict)
    _plain: dict[int, Share] = field(default_factory=dict)  # of plain ones that nobody copies
    _ignored: set[int] = field(default_factory=set)
    _meshes: dict[int, Any] = field(default_factory=dict)
    _copies: tuple[object, NDArray[np.int64]] | None = None

    def look_at(self, model: nn.Module) -> None:
        """Read from a model's parameters which dimensions of their meshes are given the same data.

        Those are the dimensions that FSDP does not shard over and whose names do not say otherwise.
        """
        if isinstance(model, DistributedDataParallel):
            self._take_replicas(model)
        if self.flat_shards_of is None and (group := flat_shard_group(model)) is not None:
            self.flat_shards_of = min(distributed.get_process_group_ranks(group))
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
        self.same_data = Share(copy=copy, copies=copies)

    def look_at_call(self) -> None:
        """Find out, while a module of the model is called, what calls it: DDP, or a pipeline."""
        wrapper = active_ddp()
        if wrapper is not None:
            self._take_replicas(wrapper)
        stage = calling_stage()
        if stage is not None:
            self.stage, self.is_in_pipeline = stage.number, True

    def of_parameter(self, tensor: Any, index: int) -> Share:
        """Which part of a parameter, its gradient or its state this rank holds."""
        spec = spec_of(tensor)
        if spec is None:
            if id(tensor) in self._ignored and self.replicas is not None:
                self._plain[index] = Share(copy=self.replicas[1] * self.size)
            return self.of_plain(index)
        key = index, spec.mesh, spec.placements
        share = self._shares.get(key)
        if share is None:
            first = int(spec.mesh.mesh.min())
            share = placed(spec).numbered(first=first * self.size, turn=index)
            if spec.mesh.size() < self.size:  # ranks outside of it may have copies of their own
                share = replace(share, copies=0)
            self._shares[key] = share
        if not is_dtensor(tensor):
            self._plain[index] = share  # its gradient is plain, too, and does not know
        return share

    def of_plain(self, index: int) -> Share:
        """Which part this rank holds of a parameter that is no ``DTensor``."""
        if index in self._plain:
            return self._plain[index]
        if self.flat_shards_of is not None:
            return Share(copy=self.flat_shards_of * self.size)
        if self.replicas is None:
            return Share(copy=self.rank * self.size, copies=0 if self.size > 1 else 1, shard=-1)
        where, first = self.replicas
        # What other groups of DDP have may be another part: only copies in one group are compared.
        return replace(where.numbered(first=first * self.size, turn=index), shard=first)

    def plain_copies(self, count: int) -> NDArray[np.int64]:
        """Numbers of the copies of so many parameters, as if none was a ``DTensor``."""
        state = count, self.replicas, self.flat_shards_of, len(self._plain)
        if self._copies is None or self._copies[0] != state:
            copies = np.array([self.of_plain(index).copy for index in range(count)], np.int64)
            self._copies = state, copies
        return self._copies[1]

    @property
    def data_group(self) -> int | None:
        """The lowest of the ranks that are each given other data; None if nothing says so."""
        if self.same_data.copies > 1 or self.is_in_pipeline:
            return None
        if self.replicas is not None:
            return self.replicas[1]
        return self.flat_shards_of if self.shards_of is None else self.shards_of

    def _take_replicas(self, wrapper: DistributedDataParallel) -> None:
        self._ignored = ignored_by(wrapper)
        self.averages = averages_weights(wrapper)
        group = wrapper.process_group
        ranks = sorted(distributed.get_process_group_ranks(group))
        self.replicas = Share(copy=distributed.get_rank(group), copies=len(ranks)), ranks[0]
