"""Role of this process among those that train together: its rank, and whether it writes."""

from __future__ import annotations

import multiprocessing
import os
from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import distributed

Ranks: TypeAlias = Literal["merged", "each", "rank0"]

_RANKS_AND_SIZES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
)
# Lightning's own launcher sets no RANK, but the first two.
_RANKS_ALONE = ("LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "PMIX_RANK", "JSM_NAMESPACE_RANK")


@dataclass(frozen=True, kw_only=True)
class Role:
    """Role of this process among those that train together; with size 1 it trains alone."""

    ranks: Ranks
    rank: int = 0
    size: int = 1

    @property
    def merges(self) -> bool:
        return self.size > 1 and self.ranks == "merged"

    @property
    def writes(self) -> bool:
        return self.rank == 0 or self.ranks == "each"

    @property
    def measures(self) -> bool:
        return self.rank == 0 or self.ranks != "rank0"

    def directory(self, log_dir: str) -> str:
        each = self.size > 1 and self.ranks == "each"
        return f"{log_dir.rstrip('/')}/rank-{self.rank:04d}" if each else log_dir


def role_of(ranks: Ranks) -> Role:
    """Return the role of this process; a preliminary one if its rank is unknown."""
    if (known := rank_and_world_size()) is not None:
        return Role(ranks=ranks, rank=known[0], size=known[1])
    if ranks == "each" and may_be_any_rank():
        raise ValueError(
            'HookLogger(ranks="each"): this process does not know its rank; call '
            "torch.distributed.init_process_group() before, or set RANK and WORLD_SIZE"
        )
    return Role(ranks=ranks, rank=0 if is_rank_0() else 1)


def is_rank_0() -> bool:
    """Whether this process logs and writes for all.

    Call it each time: a process of ``mp.spawn`` does not know its rank before there is a process
    group, which decides from then on. Until then it is ``RANK``, as torchrun, Accelerate and
    DeepSpeed set it; without it, no variable of Lightning, SLURM (with several tasks), MPI and LSF
    may be other than 0. A process that trains alone is rank 0.
    """
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    if (rank := _number("RANK")) is not None:
        return rank == 0
    several_tasks = (_number("SLURM_NTASKS") or 1) > 1
    names = [*_RANKS_ALONE, *(name for name, _ in _RANKS_AND_SIZES)]
    return not any(_number(name) for name in names if name != "SLURM_PROCID" or several_tasks)


def may_be_any_rank() -> bool:
    """Whether the rank of this process is still unknown, as in a process of ``mp.spawn``."""
    if rank_and_world_size() is not None:
        return False
    return multiprocessing.parent_process() is not None or not is_rank_0()


def rank_and_world_size() -> tuple[int, int] | None:
    """Return rank and number of ranks by process group or launcher; None if neither says it."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    for rank_in, size_in in _RANKS_AND_SIZES:
        rank, size = _number(rank_in), _number(size_in)
        if rank is not None and size is not None and rank < size:
            # Without srun, all processes of a SLURM job that Lightning starts have rank 0 there.
            is_wrong = rank == 0 and any(map(_number, _RANKS_ALONE))
            return (rank, size) if size > 1 and not is_wrong else None
    return None


def _number(variable: str) -> int | None:
    """Return the value of an environment variable; None if it is not set or not a number."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else None
