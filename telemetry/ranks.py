"""Which of several processes that train together this one is."""

from __future__ import annotations

import os

from torch import distributed

_OF_LAUNCHERS = (
    "LOCAL_RANK",  # Lightning's own launcher sets no RANK, but this and NODE_RANK
    "NODE_RANK",
    "GROUP_RANK",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "PMIX_RANK",
    "MV2_COMM_WORLD_RANK",
    "JSM_NAMESPACE_RANK",
)


def is_first_rank() -> bool:
    """Whether this process is the one of several that speaks and writes for all.

    To be asked whenever it matters, for the answer may change: a process of ``mp.spawn`` cannot
    know it before ``torch.distributed`` is initialized. From then on its default group says so.
    Until then ``RANK`` does, as torchrun, Accelerate and DeepSpeed set it; else the variables of
    Lightning, SLURM, MPI and LSF, none of which may name another rank than 0. SLURM's counts only
    if several tasks were asked for.

    Returns:
        True also for a process that trains alone.
    """
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank() == 0
    rank = _number("RANK")
    if rank is not None:
        return rank == 0
    several_tasks = (_number("SLURM_NTASKS") or 1) > 1
    return not any(
        _number(name) for name in _OF_LAUNCHERS if name != "SLURM_PROCID" or several_tasks
    )


def _number(variable: str) -> int | None:
    """The value of an environment variable; None if it is not there or no number."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdecimal() else None
