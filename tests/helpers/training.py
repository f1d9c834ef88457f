"""Called on several ranks by test_merged_records.py: trains bare and watched, and keeps the parts.

Every way of training is that of :func:`train` in one process, and computes the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from telemetry.capture import Capture, CapturedStep, Content, LightStep
from telemetry.failures import Failures
from telemetry.pipeline import FullSteps
from telemetry.ranks.partial_record import PartMaker, encode
from telemetry.ranks.topology import RankObserver
from telemetry.records import StepRecord
from telemetry.selection import Selection
from tests.helpers.twins import draw, seed

STEPS, BATCH, LENGTH, WIDTH, CLASSES = 5, 8, 4, 8, 3
EXPERTS = 6
MAX_NORM = 0.05


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.act = nn.ReLU()
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return out


class Net(nn.Module):
    """Two blocks and a head with an odd number of classes, whose bias not every rank gets."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"0": Block(), "1": Block()})
        self.head: nn.Linear | None = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


class Experts(nn.Module):
    """Every expert takes every token; in a group, each rank has some of the experts."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return self.mixture(x)
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        own = [x if other == rank else torch.zeros_like(x) for other in range(size)]
        every = all_reduce(torch.cat(own), group=self.group)
        mixed: Tensor = all_reduce(self.mixture(every), group=self.group)
        return mixed.chunk(size)[rank]

    def mixture(self, x: Tensor) -> Tensor:
        return torch.einsum("bli,eio->elbo", x, own(self.weight)).relu().sum(0).transpose(0, 1)


class Mixture(nn.Module):
    """Experts between two layers that every rank has."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts(group)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.experts(self.first(x)))
        return out


@dataclass
class Setup:
    """A model in one way of training.

    ``share``: this rank's part of the batch, and the number of parts; ``run`` does a forward
    and a backward pass and says the loss; ``clips``: whether gradients are clipped, as DTensors.
    """

    watched: nn.Module
    share: tuple[int, int]
    run: Callable[[Tensor], float | None]
    clips: bool = True


def loss_of(out: Tensor) -> Tensor:
    return (out - 1).square().mean()


def plainly(model: nn.Module) -> Callable[[Tensor], float]:
    def run(batch: Tensor) -> float:
        loss = loss_of(model(batch))
        loss.backward()
        return float(loss.detach())

    return run


def setup(name: str, rank: int, size: int) -> Setup:
    model = Net()
    if name in ("alone", "alone unclipped"):
        return Setup(model, (0, 1), plainly(model), clips=name == "alone")
    if name in ("ddp", "ddp inside"):
        wrapped = DistributedDataParallel(model)
        watched = model if name == "ddp inside" else wrapped
        return Setup(watched, (rank, size), plainly(wrapped))
    if name == "by hand":
        return Setup(model, (rank, size), by_hand(model, size))
    if name == "fsdp":
        fully_shard(model.blocks["0"])
        fully_shard(model)
        return Setup(model, (rank, size), plainly(model))
    if name == "fsdp1":
        wrapped = FullyShardedDataParallel(
            model, use_orig_params=True, device_id=torch.device("cpu")
        )
        return Setup(wrapped, (rank, size), plainly(wrapped), clips=False)
    if name == "hsdp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
        fully_shard(model.blocks["0"], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return Setup(model, (rank, size), plainly(model))
    if name in ("tp", "sequence"):
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        tensor_parallel(model, mesh, in_sequence=name == "sequence")
        # PyTorch does not clip DTensors and others together.
        return Setup(model, (0, 1), plainly(model), clips=name == "sequence")
    if name in ("fsdp tp", "ddp tp", "ddp tp inside"):
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        data = mesh["dp"]
        tensor_parallel(model, mesh["tp"], in_sequence=True)
        share = data.get_local_rank(), 2
        if name != "fsdp tp":
            wrapped = DistributedDataParallel(model, device_mesh=data)
            watched = model if name == "ddp tp inside" else wrapped
            return Setup(watched, share, plainly(wrapped), clips=False)
        fully_shard(model.blocks["0"], mesh=data)
        fully_shard(model, mesh=data)
        return Setup(model, share, plainly(model))
    if name == "alone experts":
        return Setup(mixture := Mixture(), (0, 1), plainly(mixture), clips=False)
    if name == "experts":
        return experts(rank, size)
    if name == "ignored experts":
        return ignored_experts(rank, size)
    assert name == "pipeline"
    return pipeline(model, rank, size)


def by_hand(model: nn.Module, size: int) -> Callable[[Tensor], float]:
    def run(batch: Tensor) -> float:
        loss = plainly(model)(batch)
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        return loss

    return run


def experts(rank: int, size: int) -> Setup:
    """Experts are spread over two ranks, and copied where there are more."""
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "ep"))
    model = Mixture(mesh["ep"].get_group())
    shards = distribute_tensor(model.experts.weight, mesh["ep"], [Shard(0)])
    model.experts.weight = nn.Parameter(shards)

    def run(batch: Tensor) -> float:
        loss = plainly(model)(batch)
        for parameter in model.parameters():
            assert parameter.grad is not None
            is_expert = parameter is model.experts.weight
            dist.all_reduce(
                own(parameter.grad), group=mesh["dp"].get_group() if is_expert else None
            )
            parameter.grad /= size
        return loss

    return Setup(model, (rank, size), run, clips=False)


def ignored_experts(rank: int, size: int) -> Setup:
    """Each rank has some of the experts as a plain tensor, which DDP ignores."""
    model = Mixture(dist.group.WORLD)
    model.experts.weight = nn.Parameter(model.experts.weight.detach().chunk(size)[rank].clone())
    ignore = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    ignore(model, ["experts.weight"])
    wrapped = DistributedDataParallel(model)

    def run(batch: Tensor) -> float:
        loss = plainly(wrapped)(batch)
        assert model.experts.weight.grad is not None
        model.experts.weight.grad /= size
        return loss

    return Setup(wrapped, (rank, size), run, clips=False)


def tensor_parallel(model: Net, mesh: Any, *, in_sequence: bool) -> None:
    spread = Shard(1) if in_sequence else Replicate()
    plan: dict[str, Any] = {}
    for index in range(2):
        block = f"blocks.{index}"
        plan[f"{block}.up"] = ColwiseParallel(input_layouts=spread)
        plan[f"{block}.down"] = RowwiseParallel(output_layouts=spread)
        if in_sequence:
            plan[f"{block}.norm"] = SequenceParallel()
    if in_sequence:
        plan["blocks.0"] = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
        )
    plan["head"] = ColwiseParallel(input_layouts=spread, output_layouts=Replicate())
    parallelize_module(model, mesh, plan)


def pipeline(model: Net, rank: int, size: int) -> Setup:
    """Two stages with global names: each deletes the modules of the other."""
    assert size == 2
    if rank == 0:
        del model.blocks["1"]
        model.head = None
    else:
        del model.blocks["0"]
    stage = PipelineStage(model, rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, _: loss_of(out))

    def run(batch: Tensor) -> float | None:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch)
            return None
        schedule.step(target=batch, losses=losses)
        return float(torch.stack(losses).detach().mean())

    return Setup(model, (0, 1), run, clips=False)


@contextmanager
def watched(
    model: nn.Module, rank: int, size: int, deliver: Callable[[CapturedStep | LightStep], None]
) -> Iterator[tuple[Capture, RankObserver | None]]:
    ranks = RankObserver(rank=rank, size=size) if size > 1 else None
    capture = Capture(
        model,
        selection=Selection.parse(None, None),
        is_full=FullSteps(2),
        content=Content(),
        deliver=deliver,
        safe_point=lambda: None,
        primary=None,
        failures=Loud(),
        find_ranks=lambda: ranks,
    )
    capture.attach()
    try:
        yield capture, ranks
    finally:
        capture.end()


class Loud(Failures):
    def report(self, doing: str) -> None:
        raise


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(BATCH, LENGTH, WIDTH, generator=generator) for _ in range(STEPS)]


def own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(
    name: str, rank: int, size: int, *, watch: bool, fault: str = ""
) -> tuple[dict[str, Any], list[StepRecord], list[bytes]]:
    """Results of a training, the records of this rank, and its parts."""
    seed(0)
    made = setup(name, rank, size)
    optimizer = torch.optim.Adam(made.watched.parameters(), lr=0.01)
    taken: list[CapturedStep | LightStep] = []
    losses: list[float | None] = []
    norms: list[float] = []

    def loop() -> None:
        for step, batch in enumerate(batches()):
            if step == 2 and rank == size - 1:
                if fault == "tampered":
                    with torch.no_grad():
                        own(next(made.watched.parameters())).view(-1)[0] += 1
                elif fault == "poisoned":
                    batch[-1] = torch.nan
            index, count = made.share
            optimizer.zero_grad()
            losses.append(made.run(batch.chunk(count)[index]))
            if made.clips:
                total = nn.utils.clip_grad_norm_(made.watched.parameters(), MAX_NORM)
                norms.append(float(total.full_tensor() if isinstance(total, DTensor) else total))
            optimizer.step()

    records: list[StepRecord] = []
    parts: list[bytes] = []
    if watch:
        with watched(made.watched, rank, size, taken.append) as (_, ranks):
            loop()
        maker = None if ranks is None else PartMaker(ranks)
        scalars = [{} if loss is None else {"loss": loss} for loss in losses]
        for captured in taken:
            record = captured.record(scalars[captured.step])
            made_of = captured if isinstance(captured, CapturedStep) else None
            records.append(record)
            if maker is not None:
                parts.append(encode(maker.part(record, made_of)))
    else:
        loop()
    parameters = [own(p).detach().flatten().tolist() for p in made.watched.parameters()]
    left = {"losses": losses, "norms": norms, "parameters": parameters, "random": draw()}
    return left, records, parts


def run(rank: int, size: int, folder: Path, names: list[str]) -> dict[str, Any]:
    """Run all ways of training one after the other; return the results of each."""
    results: dict[str, Any] = {}
    for name in names:
        kind, _, fault = name.partition(", ")
        bare, _, _ = train(kind, rank, size, watch=False, fault=fault)
        seen, _, parts = train(kind, rank, size, watch=True, fault=fault)
        results[name] = {"bare": bare, "watched": seen}
        for step, part in enumerate(parts):
            (folder / f"{size}-{name}-{step}-{rank}").write_bytes(part)
    return results
