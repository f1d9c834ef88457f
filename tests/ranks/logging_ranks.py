"""Run on two ranks by test_logger_ranks.py: trains bare and with a ``HookLogger``."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from twins import draw, seed

from telemetry import Alert, HookLogger, TelemetryAlert
from telemetry.records import StepRecord

STEPS, BATCH, WIDTH = 9, 8, 6


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 3))


def plain(model: Any) -> nn.Module:
    """Gradients are reduced by the loop."""
    return model  # type: ignore[no-any-return]


def fsdp(model: Any) -> nn.Module:
    fully_shard(model[0])
    return fully_shard(model)


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp": fsdp,
    "plain": plain,
}


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(BATCH, WIDTH, generator=generator) for _ in range(STEPS)]


def own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(
    way: str, log_dir: Path | None, rank: int = 0, size: int = 1, **options: Any
) -> dict[str, Any]:
    """What training left behind; ``way`` is ``alone`` in one process with the whole batch."""
    seed(0)
    model = mlp() if way == "alone" else WRAPPERS[way](mlp())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    logger = None
    if log_dir is not None:
        logger = HookLogger(model, log_dir, every_n_steps=2, **options)
    losses = []
    with logger or nullcontext():
        for batch in batches():
            optimizer.zero_grad()
            loss = (model(batch.chunk(size)[rank]) - 1).square().mean()
            loss.backward()
            if way == "plain":
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= size  # type: ignore[operator]
            losses.append(float(loss.detach()))
            if logger is not None:
                logger.log(loss=loss, own=rank)
            optimizer.step()
        if logger is not None:
            logger.log(accuracy=rank)
    parameters = [own(p).detach().flatten().tolist() for p in model.parameters()]
    return {"losses": losses, "parameters": parameters, "random": draw()}


class AtStep:
    """A rule with an alert of its own at one step."""

    name = "told"

    def __call__(self, record: StepRecord) -> list[Alert]:
        if record.step != 3:
            return []
        return [
            Alert(
                kind="told", severity="error", step=3, module_name=None, value=1.0, threshold=0.0,
                message="A rule said so.",
            )
        ]  # fmt: skip


def until_raised(log_dir: Path) -> dict[str, Any]:
    """Train until the alert is raised; a collective in each step holds the ranks together."""
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = -1
    try:
        with HookLogger(model, log_dir, every_n_steps=2, alerts=[AtStep()], on_alert="raise"):
            while step < 100_000:
                step += 1
                optimizer.zero_grad()
                model(torch.randn(2, WIDTH)).square().mean().backward()
                optimizer.step()
    except TelemetryAlert as raised:
        return {"step": step, "kind": raised.alert.kind, "message": raised.alert.message}
    return {"step": None}


def with_a_death(log_dir: Path, rank: int) -> dict[str, Any]:
    """Rank 1 dies in the middle; the other has no collective, and goes on."""
    seed(0)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    logger = HookLogger(model, log_dir, every_n_steps=2)
    for step, batch in enumerate(batches()):
        if (step, rank) == (5, 1):
            logger.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        (model(batch) - 1).square().mean().backward()
        optimizer.step()
    began = time.monotonic()
    logger.close(30.0)
    return {
        "close_s": time.monotonic() - began,
        "parameters": [p.detach().flatten().tolist() for p in model.parameters()],
    }


def main(folder: Path, cases: list[str]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    left: dict[str, Any] = {}
    for case in cases:
        way, _, ranks = case.partition("-")
        if case == "raise":
            left[case] = until_raised(folder / case)
        elif case == "death":
            dist.barrier()
            (folder / f"{rank}.json").write_text(json.dumps(left))
            left[case] = with_a_death(folder / case, rank)
        else:
            options = {"ranks": ranks} if ranks else {}
            bare = train(way, None, rank, size)
            left[case] = {
                "bare": bare,
                "watched": train(way, folder / case, rank, size, **options),
            }
    (folder / f"{rank}.json").write_text(json.dumps(left))


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if "STORE" in os.environ:
        rank = int(os.environ["RANK"])
        store = dist.FileStore(os.environ["STORE"], 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    else:
        dist.init_process_group("gloo")
    main(Path(sys.argv[1]), sys.argv[2:])
    if "STORE" not in os.environ:
        dist.destroy_process_group()
