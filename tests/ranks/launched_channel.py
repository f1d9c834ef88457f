"""Run by test_launchers.py: two processes exchange steps, begun by one launcher or another."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch.distributed as dist
from members import Member, total
from torch import multiprocessing

STEPS = 20


def exchange(folder: Path, rank: int) -> None:
    """The first rank writes what it got; in the first of two attempts the other dies."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    member = Member(rank, dist.get_world_size())
    member.open(patience_s=1000.0)
    member.send(range(STEPS))
    if rank == 0:
        got = member.got(STEPS - 1)
        everyone = [0, 1]
        assert got == [(step, everyone, total(everyone, step)) for step in range(STEPS)]
        (folder / f"attempt-{attempt}").touch()
        member.announce(1)
    member.heard(1)
    if attempt == "0" and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else signal.pause()
    member.close()
    dist.destroy_process_group()


def spawned(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    exchange(folder, rank)


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if "RANK" in os.environ:
        # The agent's store keeps the first attempt's addresses, to which gloo would connect.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False)
        attempt = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=attempt, rank=rank, world_size=world_size)
        exchange(Path(sys.argv[1]), dist.get_rank())
    else:
        multiprocessing.spawn(spawned, args=(Path(sys.argv[1]),), nprocs=2)
