"""Run by test_launchers.py with torchrun: two ranks train, and in the first attempt one dies."""

from __future__ import annotations

import logging
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from telemetry import HookLogger

STEPS = 6


def train(log_dir: str) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with HookLogger(model, log_dir, every_n_steps=2, resume=True, alerts=()) as logger:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 2, 1, 1)).square().mean()
            loss.backward()
            logger.log(loss=loss)
            optimizer.step()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            logger.flush()
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL) if dist.get_rank() == 1 else signal.pause()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # The agent's store keeps the first attempt's addresses, to which gloo would connect.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=False)
    attempt = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=attempt, rank=rank, world_size=world_size)
    train(sys.argv[1])
    dist.destroy_process_group()
