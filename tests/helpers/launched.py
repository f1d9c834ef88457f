"""Run by test_launchers.py: two processes train one model, started by one of several launchers."""

from __future__ import annotations

import logging
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel

from telemetry import HookLogger

STEPS, RESTARTED_STEPS = 4, 6

logging.basicConfig(level=logging.INFO)  # in a spawned process, too
torch.manual_seed(0)  # the ranks train copies of one model


def train(model: nn.Module, log_dir: str) -> None:
    """Every process logs; the last step gives NaN."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with HookLogger(model, log_dir, every_n_steps=2):
        for step in range(STEPS):
            optimizer.zero_grad()
            batch = torch.full((4, 3), torch.nan if step == STEPS - 1 else 1.0)
            model(batch).square().mean().backward()
            optimizer.step()


def spawned(rank: int, log_dir: str) -> None:
    """Train in a spawned process, which has no rank before the process group exists."""
    dist.init_process_group(
        "gloo", init_method=f"file://{log_dir}-rendezvous", rank=rank, world_size=2
    )
    train(nn.Linear(3, 1), log_dir)
    dist.destroy_process_group()


def spawn(log_dir: str) -> None:
    multiprocessing.spawn(spawned, args=(log_dir,), nprocs=2)


def lightning(log_dir: str) -> None:
    """Runs this script a second time, and makes the process group after the logger."""
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss: Tensor = self.layer(batch).square().mean()
            return loss * (torch.nan if index == STEPS - 1 else 1.0)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    with HookLogger(module, log_dir, every_n_steps=2):
        trainer.fit(module, torch.utils.data.DataLoader(torch.ones(8 * STEPS, 3), batch_size=4))


def torchrun(log_dir: str) -> None:
    """Train with the agent of torchrun, which forks the ranks here, and restarts them once."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=1, start_method="fork",
        run_id="restarted", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
    )  # fmt: skip
    elastic_launch(config, restarted)(log_dir)


def restarted(log_dir: str) -> None:
    """Train as one of two ranks; in the first attempt, one dies."""
    # The agent's store keeps the first attempt's addresses, to which gloo would connect.
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore(attempt, dist.TCPStore(address, port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with HookLogger(model, log_dir, every_n_steps=2, resume=True, alerts=()) as logger:
        for _ in range(RESTARTED_STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 2, 1, 1)).square().mean()
            loss.backward()
            logger.log(loss=loss)
            optimizer.step()
        if attempt == "0":
            logger.flush()
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else signal.pause()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    launcher, *arguments = sys.argv[1:]
    {"spawn": spawn, "lightning": lightning, "torchrun": torchrun}[launcher](*arguments)
