"""Called on ranks by test_logger_ranks.py: trains bare and with a ``HookLogger``."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter

from telemetry import Alert, HookLogger, Rule, StepRecord, TelemetryAlert
from telemetry.ranks.exchange import RankExchange
from tests.helpers import training
from tests.helpers.frameworks import AlertFrom
from tests.helpers.members import until
from tests.helpers.twins import Recorder, draw, seed


def twins(rank: int, size: int, way: str, folder: Path, **options: Any) -> dict[str, Any]:
    """Results of a bare training and of a logged one."""
    return {"bare": train(rank, size, way), "watched": train(rank, size, way, folder, **options)}


def shards(
    rank: int, size: int, way: str, folder: Path, *, alone: bool = False, **options: Any
) -> dict[str, Any]:
    """Twins whose ranks write a run each, or rank 0 alone; with the records of this rank."""
    recorder = Recorder()
    bare = train(rank, size, way, **options)
    log_dir = None if alone and rank else folder
    watched = train(rank, size, way, log_dir, ranks="each", alerts=[recorder], **options)
    return {"bare": bare, "watched": watched, "records": recorder.records}


def train(
    rank: int,
    size: int,
    way: str,
    log_dir: Path | None = None,
    *,
    is_wrapped: bool = True,
    micro_batches: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Results of a training; see :func:`training.setup`.

    The logger gets the wrapped model or the bare one, before it is wrapped.
    """
    seed(0)
    model, logger = training.Net(), None
    if log_dir is not None and not is_wrapped:
        logger = HookLogger(model, log_dir, every_n_steps=2, **options)
    made = training.setup(way, rank, size, model)
    if log_dir is not None and is_wrapped:
        logger = HookLogger(made.watched, log_dir, every_n_steps=2, **options)
    parameters = [*made.watched.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    index, count = made.share
    losses, norms, second_moments = [], [], []
    with logger or nullcontext():
        for batch in training.batches():
            optimizer.zero_grad()
            for _ in range(micro_batches - 1):
                with made.watched.no_sync():  # type: ignore[operator]
                    made.run(batch.chunk(count)[index])
            losses.append(made.run(batch.chunk(count)[index]))
            grads = local(p.grad for p in parameters if p.grad is not None)
            norms.append(float(torch.cat(grads).norm()))
            if made.clips:
                nn.utils.clip_grad_norm_(parameters, training.MAX_NORM)
            if logger is not None:
                own = {"own": rank} if losses[-1] is None else {"own": rank, "loss": losses[-1]}
                logger.log(own)
            optimizer.step()
            squares = local(state["exp_avg_sq"] for state in optimizer.state.values())
            second_moments.append([float(values.double().sum()) for values in squares])
        if logger is not None:
            logger.log(accuracy=rank)
    return {
        "losses": losses,
        "norms": norms,
        "second_moments": second_moments,
        "parameters": [values.tolist() for values in local(parameters)],
        "random": draw(),
    }


def local(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """Return the local shards of tensors, flat."""
    return [training.own(tensor).detach().flatten() for tensor in tensors]


def train_mlp(
    model: nn.Module, log_dir: Path, batches: Callable[[HookLogger], Iterable[Any]], **options: Any
) -> tuple[Alert, ...]:
    """Train on batches, which may depend on the logger; return the alerts."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with HookLogger(model, log_dir, **options) as logger:
        for batch in batches(logger):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    return tuple(logger.alerts)


def until_raised(rank: int, size: int, log_dir: Path) -> tuple[int, str]:
    """Train until the alert is raised; a collective keeps all ranks at the same step."""
    steps = 0

    def batches(logger: HookLogger) -> Iterator[Any]:
        nonlocal steps
        for steps in range(100_000):  # noqa: B007 - read below
            yield torch.randn(2, 6)

    options: dict[str, Any] = {"alerts": [AlertFrom(3)], "on_alert": "raise", "every_n_steps": 2}
    try:
        train_mlp(DistributedDataParallel(mlp()), log_dir, batches, **options)
    except TelemetryAlert as raised:
        return steps, raised.alert.summary
    return -1, ""


def poisoned(rank: int, size: int, every_n_steps: int, log_dir: Path) -> None:
    """Train; the last rank's batch 25 has a NaN. Ids name the rank and the step."""

    def batches(logger: HookLogger) -> Iterator[Any]:
        seed(rank)
        for step in range(30):
            logger.batch([f"{rank}/{step}"])
            is_bad = step == 25 and rank == size - 1
            yield torch.randn(4, 6) * (math.nan if is_bad else 1)

    train_mlp(DistributedDataParallel(mlp()), log_dir, batches, every_n_steps=every_n_steps)


def tampered(rank: int, size: int, way: str, log_dir: Path) -> list[tuple[int, str]]:
    """Train; the last rank changes a weight before step 50. Alerts of this rank."""
    seed(0)
    made = training.setup(way, rank, size, training.Net())
    optimizer = torch.optim.SGD(made.watched.parameters(), lr=0.01)
    index, count = made.share
    with HookLogger(made.watched, log_dir, every_n_steps=10) as logger:
        for step in range(70):
            if step == 50 and rank == size - 1:
                with torch.no_grad():
                    training.own(next(made.watched.parameters())).view(-1)[0] += 1e-6
            optimizer.zero_grad()
            made.run(training.batches()[step % training.STEPS].chunk(count)[index])
            optimizer.step()
    return [(a.step, a.summary) for a in logger.alerts if a.kind == "ranks_diverge"]


def first_sent(rank: int, size: int, way: str, log_dir: Path) -> Any:
    """Return what this rank sends of its first step."""
    with patch.object(
        RankExchange, "send_part", autospec=True, side_effect=RankExchange.send_part
    ) as sends:
        train(rank, size, way, log_dir)
    return sends.call_args_list[0].args[1]


def sum_of_many(rank: int, size: int, log_dir: Path) -> None:
    """Train a norm under sequence parallelism: its gradients are sums of 70,000 elements."""
    model = nn.Sequential(nn.LayerNorm(70_000))
    mesh = init_device_mesh("cpu", (size,))
    parallelize_module(model, mesh, {"0": SequenceParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with HookLogger(model, log_dir, alerts=()):
        for _ in range(3):
            optimizer.zero_grad()
            out: Any = model(torch.randn(1, size, 70_000))
            out.to_local().square().sum().backward()
            optimizer.step()


def apart(
    rank: int, size: int, way: str, every_n_steps: int, log_dir: Path
) -> list[tuple[str, int, str]]:
    """Train on other data on each rank, and keep copies equal or not. Alerts of this rank."""
    seed(rank if way == "other models" else 0)
    plain = mlp()
    ddp = way in ("never synchronized", "called past DDP", "post-local", "no_sync and averages")
    model: Any = DistributedDataParallel(plain) if ddp else plain
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1 / (1 + rank * (way == "a sweep")))
    if way == "post-local":
        state = PostLocalSGDState(
            None, None, start_localSGD_iter=5, post_local_gradient_allreduce=False
        )
        model.register_comm_hook(state, post_localSGD_hook)
        optimizer = PostLocalSGDOptimizer(optimizer, PeriodicModelAverager(4, 5))
    warm_up = torch.optim.lr_scheduler.LambdaLR(
        getattr(optimizer, "optim", optimizer), lambda step: min(1.0, step / 3)
    )
    shared = [p.detach().clone() for p in plain.parameters()]
    generator = torch.Generator().manual_seed(rank)
    with HookLogger(model, log_dir, every_n_steps=every_n_steps) as logger:
        for step in range(41):
            if way == "tampered" and step == 20 and rank == 1:
                with torch.no_grad():
                    plain[0].weight[0, 0] += 1e-6
            optimizer.zero_grad()
            batch = torch.randn(4, 6, generator=generator)
            with model.no_sync() if "no_sync" in way or "never" in way else nullcontext():
                out = plain(batch) if way == "called past DDP" else model(batch)
                (out - 1).square().mean().backward()
            if way in ("gradients averaged", "tampered"):
                for parameter in plain.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= size
            optimizer.step()
            warm_up.step()
            if (way.endswith("averages") and step % 4 == 3) or (way == "DiLoCo" and step % 10 == 9):
                with torch.no_grad():
                    for parameter, before in zip(plain.parameters(), shared, strict=True):
                        dist.all_reduce(parameter)
                        parameter /= size
                        if way == "DiLoCo":
                            before += 0.7 * (parameter - before)
                            parameter.copy_(before)
            dist.barrier()
    found = [a for a in logger.alerts if a.kind == "ranks_diverge"]
    return [(a.stage, a.step, a.message) for a in found]


def fed(rank: int, size: int, way: str, seed_of_all: bool, log_dir: Path) -> list[tuple[str, str]]:
    """Train; the data of each rank come from its own generator, or all begin alike."""
    model: nn.Module = mlp()
    if way == "ddp":
        model = DistributedDataParallel(model)
    elif way == "fully_shard":
        fully_shard(model)
    generator = torch.Generator().manual_seed(0 if seed_of_all else rank)
    batches = (torch.randn(4, 6, generator=generator) for _ in range(30))
    alerts = train_mlp(model, log_dir, lambda _: batches, every_n_steps=5)
    return [(a.severity, a.summary) for a in alerts if a.kind == "ranks_same_batch"]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class OnceFull(Rule):
    """Rule that requests a full measurement until an unscheduled step has one."""

    seen: StepRecord | None = None

    @property
    def requests_full_step(self) -> bool:
        return self.seen is None

    def __call__(self, record: StepRecord) -> tuple[()]:
        if record.full and record.step > 0 and self.seen is None:
            self.seen = record
        return ()


def started_before_the_group(rank: int, folder: str) -> None:
    """For ``mp.spawn``: the process group comes after the loggers, one of them with a writer."""
    merged, first = mlp(), mlp()
    rule = OnceFull()
    given = SummaryWriter(f"{folder}/merged") if rank == 0 else f"{folder}/merged"
    logger = HookLogger(merged, given, every_n_steps=10**6, alerts=[rule])
    other = HookLogger(first, f"{folder}/first", every_n_steps=2, ranks="rank0", alerts=())
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    for model in (merged, first):
        train_until(model, lambda: rule.seen is not None)
    logger.log(own=float(rank))
    with logger.phase("validation"), torch.no_grad():
        merged(torch.full((3, 6), float(rank)))
    logger.close()
    other.close()
    if rank == 0:
        assert rule.seen is not None
        ranks = rule.seen.ranks
        assert ranks is not None
        assert ranks.held == ranks.measured == {0, 1}, (rule.seen.step, ranks)
        assert rule.seen.activations["0"].sketch.count == 2 * 4 * 8
        given.close()  # type: ignore[union-attr]
    dist.destroy_process_group()


def train_until(model: nn.Module, is_done: Any) -> None:
    """Train until the first rank says that it is done."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    done = torch.zeros(())
    while not done:
        optimizer.zero_grad()
        model(torch.ones(4, 6)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        done.fill_(is_done())
        dist.broadcast(done, 0)


class Loner:
    """Train without collectives: if a rank exits, the others can continue. All compute the same."""

    def __init__(self, log_dir: Path | None, **options: Any) -> None:
        seed(0)
        self.model = mlp()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.recorder = Recorder()
        self.step = 0
        self.logger = None
        if log_dir is not None:
            self.logger = HookLogger(self.model, log_dir, alerts=[self.recorder], **options)

    def train_to(self, end: int) -> None:
        while self.step < end:
            self.optimizer.zero_grad()
            batch = torch.full((2, 6), 0.1 * self.step)
            (self.model(batch) - 1).square().mean().backward()
            self.optimizer.step()
            self.step += 1

    def left(self) -> Any:
        return [values.tolist() for values in local(self.model.parameters())], draw()


loners: list[Loner] = []


def begin(rank: int, size: int, log_dir: Path | None, every_n_steps: int = 2) -> None:
    """Start a loner whose timeout exceeds every pause of a test."""
    assert RankExchange.__init__.__kwdefaults__ is not None
    RankExchange.__init__.__kwdefaults__["timeout_s"] = 3.0
    loners.append(Loner(log_dir, every_n_steps=every_n_steps))


def begin_without_descriptors(rank: int, size: int, log_dir: Path) -> None:
    """Start a loner whose logger can open two files, fewer than an exchange needs."""
    held, limits = list[int](), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, limits[1]))
    with suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    for descriptor in held[:2]:
        os.close(descriptor)
    begin(rank, size, log_dir)
    for descriptor in held[2:]:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def train_to(rank: int, size: int, end: int) -> None:
    """Train up to this step; on rank 0, wait until all records are merged."""
    loners[-1].train_to(end)
    if rank == 0 and loners[-1].logger is not None:
        loners[-1].logger.flush()


def log(rank: int, size: int, loss: float) -> None:
    logger = loners[-1].logger
    assert logger is not None
    logger.log(loss=loss)


def wait_until_expecting(rank: int, size: int, other: int) -> None:
    """Wait until rank 0 expects measurements of another rank."""
    logger = loners[-1].logger
    assert logger is not None
    exchange = logger._run._ranks  # type: ignore[union-attr]
    until(lambda: other in exchange._collector.members)  # type: ignore[union-attr]


def end(rank: int, size: int) -> dict[str, Any]:
    """Results of a training, and the ranks of its steps.

    ``held``: ranks in the record; ``measured``: ranks in a full record; ``counts``: its numbers.
    """
    loner = loners.pop()
    if loner.logger is not None:
        loner.logger.close()
    records = loner.recorder.records
    return {
        "left": loner.left(),
        "held": [sorted(r.ranks.held) for r in records if r.ranks],
        "measured": [sorted(r.ranks.measured) for r in records if r.ranks],
        "counts": [r.activations["0"].sketch.count for r in records if r.full],
    }
