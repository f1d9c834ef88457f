"""Called on two ranks by test_wrapping.py: trains bare and watched, returns the logged values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from telemetry import HookLogger
from telemetry.records import StepRecord
from tests.helpers.twins import Recorder, draw, seed


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def ddp_with_accumulation(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp(model: Any) -> nn.Module:
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": ddp,
    "ddp_with_accumulation": ddp_with_accumulation,
    "fsdp": fsdp,
}


def train(name: str, log_dir: Path | None, *, watch: str) -> dict[str, Any]:
    """Three steps; ``watch`` selects the bare model or the wrapped one."""
    seed(0)
    model = mlp()
    recorder = Recorder()
    logger = None
    if log_dir is not None and watch == "before":
        logger = HookLogger(model, log_dir, alerts=[recorder], every_n_steps=2, ranks="each")
    wrapped = WRAPPERS[name](model)
    if log_dir is not None and watch == "after":
        logger = HookLogger(wrapped, log_dir, alerts=[recorder], every_n_steps=2, ranks="each")
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=0.1)
    seed(dist.get_rank() + 1)
    norms, grads, second_moments = [], [], []
    for _ in range(3):
        optimizer.zero_grad()
        if name == "ddp_with_accumulation":
            with wrapped.no_sync():
                wrapped(torch.randn(5, 4)).square().mean().backward()
        wrapped(torch.randn(5, 4)).square().mean().backward()
        norms.append([own(p.grad).double().norm().item() for p in model.parameters()])
        grads.append(float(torch.cat([own(p.grad).flatten() for p in model.parameters()]).norm()))
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.05)
        optimizer.step()
        states = [optimizer.state[p] for p in wrapped.parameters()]
        second_moments.append([float(own(s["exp_avg_sq"]).double().sum()) for s in states])
    if logger is not None:
        logger.close()
    return {
        "parameters": [own(p).detach().flatten().tolist() for p in model.parameters()],
        "random": draw(),
        "norms_before_clipping": grads,
        "second_moments": second_moments,
        "records": [summary(record) for record in recorder.records],
    }


def own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def summary(record: StepRecord) -> dict[str, Any]:
    return {
        "step": record.step,
        "names": [parameter.name for parameter in record.layout.parameters],
        "before_clipping": record.total_grad_norm_before_clipping,
        "grad_norms": record.grad_norms.tolist(),
        "activations": {name: t.calls for name, t in record.activations.items()},
        "activation_counts": {name: t.sketch.count for name, t in record.activations.items()},
        "activation_grads": {name: t.calls for name, t in record.activation_grads.items()},
        "weights": {name: t.sketch.count for name, t in record.weights.items()},
        "second_moments": {name: t.sketch.sum for name, t in record.second_moments.items()},
        "update_ratios": {n: bool(np.isfinite(r)) for n, r in record.update_ratios.items()},
    }


def run_twins(rank: int, size: int, case: str, folder: Path) -> dict[str, Any]:
    """Run twins, on rank 0 alone if the case requires it: then rank 1 must not block."""
    name, watch = case.split("/")
    log_dir = folder / case / str(rank) if rank == 0 or watch != "rank 0" else None
    when = "before" if watch == "rank 0" else watch
    return {
        "bare": train(name, None, watch=when),
        "watched": train(name, log_dir, watch=when),
    }
