"""Cost of a run of many ranks on rank 0: CPU time, bytes and memory of its exchange.

Rank 0 is this process, with its exchange; all other ranks are simulated by another process, which
sends their measurements of GPT-2 under DDP: over real connections of this machine, each step
when rank 0 has the one before. CPU times are those of this process, the kernel's share included. A
real network adds its latency, and other ranks their waiting.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from machine import describe_machine, write_json
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from telemetry.events.message_pack import encode
from telemetry.failures import Failures
from telemetry.ranks.connection import RECORDS, Address, Client, Rendezvous
from telemetry.ranks.exchange import CLOSE_S, RankExchange
from telemetry.ranks.merging import MergedRecords, MergedStep
from telemetry.ranks.rank_record import RankRecord, TensorKey, TensorTable
from telemetry.ranks.topology import LocalShard
from telemetry.records import Layout, Module, Parameter, StepRecord, TensorRecord
from telemetry.records.sketch import Sketch, sketch_array

WORLDS = (8, 64, 256, 1024)
INTERVALS = (10, 100)
SHARE = 0.05  # of a core
WIDTH, TOKENS, CONTEXT = 768, 50257, 1024
ELEMENTS = 2**16
DIFFERENT = 8  # simulated ranks; the others send the same as one of these
ROUNDS = 5


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a run with this number of ranks.

    Attributes:
        full_bytes, light_bytes: What one rank sends of a step.
        encode_s: CPU time of another rank to encode a full step.
        full_s, light_s: CPU time of rank 0 for a step, median.
        peak_bytes: Peak memory of rank 0 beyond its memory before the run.
    """

    ranks: int
    full_bytes: int
    light_bytes: int
    encode_s: float
    full_s: float
    light_s: float
    peak_bytes: int

    def mean_s(self, every_n_steps: int) -> float:
        """CPU time per step."""
        return self.light_s + (self.full_s - self.light_s) / every_n_steps


def gpt2(blocks: int) -> tuple[dict[str, int], dict[str, tuple[int, ...]]]:
    """Units of the leaf modules of GPT-2, and shapes of its parameters, by name."""
    units = {"wte": WIDTH, "wpe": WIDTH, "drop": WIDTH}
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (TOKENS, WIDTH), "wpe.weight": (CONTEXT, WIDTH),
    }  # fmt: skip
    for block in range(blocks):
        for name, size in {
            "ln_1": 1, "attn.c_attn": 3, "attn.c_proj": 1, "attn.resid_dropout": 1, "ln_2": 1,
            "mlp.c_fc": 4, "mlp.gelu": 4, "mlp.c_proj": 1, "mlp.dropout": 1,
        }.items():  # fmt: skip
            units[f"h.{block}.{name}"] = size * WIDTH
        for name, rows, columns in (
            ("attn.c_attn", 3, 1),
            ("attn.c_proj", 1, 1),
            ("mlp.c_fc", 4, 1),
            ("mlp.c_proj", 1, 4),
        ):
            shapes[f"h.{block}.{name}.weight"] = (rows * WIDTH, columns * WIDTH)
            shapes[f"h.{block}.{name}.bias"] = (rows * WIDTH,)
        for name in ("ln_1", "ln_2"):
            shapes |= {f"h.{block}.{name}.{part}": (WIDTH,) for part in ("weight", "bias")}
    units |= {"ln_f": WIDTH, "lm_head": TOKENS}
    return units, shapes | {f"ln_f.{part}": (WIDTH,) for part in ("weight", "bias")}


def make_part(blocks: int, rank: int, world_size: int) -> RankRecord:
    """A full step of one rank, with its own numbers."""
    dice = np.random.default_rng(rank)

    def draw(size: int = 0) -> TensorRecord:
        numbers = dice.standard_normal(ELEMENTS, np.float32) * np.float32(10 ** dice.uniform(-4, 1))
        return TensorRecord(
            sketch=sketch_array(numbers),
            unit_min=-dice.random(size, np.float32) if size else None,
            unit_max=dice.random(size, np.float32) if size else None,
        )

    units, shapes = gpt2(blocks)
    tensors: dict[TensorKey, TensorRecord] = {}
    for name, size in units.items():
        tensors[TensorKey(0, "outputs", name)] = draw(size)
        tensors[TensorKey(0, "output_grads", name)] = draw()
    for index, name in enumerate(shapes):
        if index % world_size == rank:  # copies take turns
            tensors |= {
                TensorKey(0, kind, name): draw() for kind in ("grads", "weights", "second_moments")
            }
            tensors[TensorKey(0, "updates", name)] = TensorRecord(sketch=Sketch.empty())
    layout = Layout(
        modules=tuple(Module(name=name, type_name="Linear") for name in units),
        parameters=tuple(
            Parameter(name=name, module_name=name.rpartition(".")[0], shape=shape)
            for name, shape in shapes.items()
        ),
    )
    count = len(shapes)
    norms = dice.random(count)
    record = StepRecord(
        step=0, wall_time=0.0, layout=layout, full=True, scalars={"loss": float(norms[0])},
        grad_norms=norms, grad_norms_before_clipping=norms,
        grad_present=np.ones(count, bool), grad_finite=np.ones(count, bool),
    )  # fmt: skip
    table = [one.rows for one in tensors.values()]
    return RankRecord(
        rank=rank,
        size=world_size,
        record=record,
        layout_id="0123456789abcdef",
        layout=encode(layout),
        grad_copies=np.zeros(count, np.int64),
        checks=np.stack([np.arange(count), np.zeros(count, np.int64), np.arange(count) * 2**50]),
        tensors=TensorTable.of(
            dict.fromkeys(tensors, LocalShard()), type(table[0]).concatenate(table)
        ),
        step_s=0.1,
        host="host",
    )


def step_of(part: RankRecord, rank: int, step: int, *, full: bool) -> RankRecord:
    """The same measurements at another step of another rank; of a light step the norms."""
    if not full:
        record = replace(part.record, grad_norms_before_clipping=np.empty(0))
        checks = part.checks[:, :0]
        part = replace(part, record=record, layout=b"", tensors=None, checks=checks, host="")
    record = replace(part.record, step=step, full=full)
    return replace(part, rank=rank, record=record, sequence=(step + 1) * 2**10 - 1)


def simulate_ranks(commands: Connection, address: Address, world: int, blocks: int) -> None:
    """Run all ranks but 0 in another process; send the requested steps."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    parts = [make_part(blocks, rank, world) for rank in range(1, 1 + min(DIFFERENT, world - 1))]

    async def run() -> None:
        clients = []
        for rank in range(1, world):
            rendezvous = Rendezvous("benchmark")
            rendezvous.find = lambda: address  # type: ignore[method-assign]
            clients.append(Client(rendezvous, rank, lambda announcement: None))
        running = [asyncio.create_task(client.run()) for client in clients]
        while not all(client.is_known for client in clients):
            await asyncio.sleep(0.01)
        commands.send(None)
        while (command := await asyncio.to_thread(commands.recv)) is not None:
            step, full = command
            sizes, began = [], time.thread_time()
            for rank, client in enumerate(clients, start=1):
                part = step_of(parts[rank % len(parts)], rank, step, full=full)
                sizes.append(len(data := part.encode()))
                client.put(RECORDS, data)
                await asyncio.sleep(0)
            commands.send((max(sizes), (time.thread_time() - began) / len(clients)))
        for client in clients:
            client.finish()
        await asyncio.gather(*running)

    asyncio.run(run())


def exchange_of(name: str, world: int, put: Callable[[MergedStep], None]) -> RankExchange:
    """Return the exchange of rank 0."""
    return RankExchange(
        name=name, rank=0, size=world, put=put, ask=lambda step: None, current_step=lambda: 0,
        failures=Failures(), timeout_s=120.0,
    )  # fmt: skip


class RankZero:
    """Receives merged steps and makes their records, as the worker thread does."""

    def __init__(self, world: int) -> None:
        self._records = MergedRecords()
        self._done = threading.Event()
        self.exchange = exchange_of("benchmark", world, self._record)
        while self.exchange._server is None:
            time.sleep(0.01)
        host, port = self.exchange._server._listening.getsockname()[:2]
        self.address = Address(host, port, self.exchange._server._token)
        self.held = 0

    def _record(self, merged: MergedStep) -> None:
        assert self._records.record(merged) is not None
        self.exchange.note_recorded(merged)
        self.held = len(merged.parts)
        self._done.set()

    def cpu_s(self, commands: Connection, part: RankRecord) -> tuple[float, int, float]:
        """CPU time for one step; bytes of another rank, and its time to encode them."""
        self._done.clear()
        began = time.process_time()
        commands.send((part.record.step, part.record.full))
        self.exchange.send_part(part)
        assert self._done.wait(600)
        spent_s = time.process_time() - began
        size, encode_s = commands.recv()
        return spent_s, size, encode_s


def measure(world: int, blocks: int, rounds: int) -> Cost:
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    zero = RankZero(world)
    context = multiprocessing.get_context("spawn")
    commands, other = context.Pipe()
    simulation = context.Process(target=simulate_ranks, args=(other, zero.address, world, blocks))
    simulation.start()
    commands.recv()
    own = make_part(blocks, 0, world)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    costs: dict[bool, list[tuple[float, int, float]]] = {True: [], False: []}
    for step in range(3 * rounds):
        full = step % 3 == 0
        costs[full].append(zero.cpu_s(commands, step_of(own, 0, step, full=full)))
        assert zero.held == world
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    commands.send(None)
    simulation.join()
    zero.exchange.close(CLOSE_S)
    distributed.destroy_process_group()
    full_s, sizes, encode_s = zip(*costs[True], strict=True)
    light_s, light_sizes, _ = zip(*costs[False], strict=True)
    return Cost(
        ranks=world,
        full_bytes=max(sizes),
        light_bytes=max(light_sizes),
        encode_s=statistics.median(encode_s),
        full_s=statistics.median(full_s),
        light_s=statistics.median(light_s),
        peak_bytes=1024 * (peak - before),
    )


def training_thread_us(steps: int) -> float:
    """CPU microseconds per step of the training thread: the check whether to raise."""
    exchange = exchange_of("idle", 1, lambda merged: None)
    began = time.thread_time()
    for step in range(steps):
        exchange.to_raise(step)
    spent_s = time.thread_time() - began
    exchange.close(CLOSE_S)
    return spent_s / steps * 1e6


def print_table(costs: Sequence[Cost], step_us: float) -> None:
    print("\nOf one rank: kB sent of a full and of a light step, CPU time to encode the full one")
    print("Of rank 0: CPU time of a full and of a light step, memory; mean over the steps")
    print(
        f"{'ranks':>6}{'full kB':>9}{'light kB':>10}{'encode':>9}{'full':>10}{'light':>9}{'MB':>8}"
        + "".join(f"{f'every {n}':>11}" for n in INTERVALS)
        + f"{'5 % of a core':>16}"
    )
    for cost in costs:
        means = [cost.mean_s(n) for n in INTERVALS]
        print(
            f"{cost.ranks:6}{cost.full_bytes / 1e3:9.0f}{cost.light_bytes / 1e3:10.1f}"
            f"{cost.encode_s * 1e3:7.1f}ms{cost.full_s * 1e3:8.0f}ms{cost.light_s * 1e3:7.1f}ms"
            f"{cost.peak_bytes / 1e6:8.0f}"
            + "".join(f"{mean * 1e3:9.1f}ms" for mean in means)
            + f"{means[0] / SHARE:8.2f}s steps"
        )
    print(f"\nOn the training thread: {step_us:.3f} µs per step for the check whether to raise")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small: figures are rough")
    parser.add_argument("--blocks", type=int, help="of the model; default: 12, as GPT-2 has")
    parser.add_argument("--ranks", type=int, nargs="+", help=f"default: {WORLDS}")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    print(describe_machine(device))
    blocks = args.blocks or (1 if args.quick else 12)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    worlds = args.ranks or (WORLDS[:1] if args.quick else WORLDS)
    costs = [measure(world, blocks, 1 if args.quick else ROUNDS) for world in worlds]
    step_us = training_thread_us(10_000 if args.quick else 1_000_000)
    print_table(costs, step_us)
    if args.json:
        figures = {
            "costs": [
                asdict(cost) | {f"mean_s_every_{n}": cost.mean_s(n) for n in INTERVALS}
                for cost in costs
            ],
            "training_thread_us": step_us,
        }
        write_json(args.json, device, figures=figures)


if __name__ == "__main__":
    main()
