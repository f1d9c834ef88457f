"""Ways of training on several ranks, which all compute the same as one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


def setup(name: str, rank: int, size: int, model: Net) -> Setup:
    """Wrap the model, or make another one if it is to have experts."""
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


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(BATCH, LENGTH, WIDTH, generator=generator) for _ in range(STEPS)]


def own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
