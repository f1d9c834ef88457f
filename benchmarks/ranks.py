"""What merging the records of many ranks costs: bytes, seconds.

Every part is measured for itself: how large what one rank sends is, how long a rank takes to merge
what those below it sent, and how long that takes to arrive over a connection on this machine. The
time for many ranks is put together from these: leaders are on different machines and work at the
same time, so one of them is merged, and the others are taken for equal to it. CPU times are those
of the thread that merges. A real network adds its own latency.

It also measures what the training thread pays for each step.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import socket
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from machine import describe_machine, write_json

from telemetry.failures import Failures
from telemetry.ranks.channel import TURN_S, Channel
from telemetry.ranks.columns import NO_ROWS, Table
from telemetry.ranks.connections import Inbox, Uplink
from telemetry.ranks.gathering import Gathering
from telemetry.ranks.held import WHOLE
from telemetry.ranks.measured import (
    Measured,
    MeasuredParameters,
    Row,
    merge,
    tensors_of,
)
from telemetry.ranks.meeting import Address, Meeting, this_machine
from telemetry.ranks.messages import Message, decode, encode
from telemetry.records import Layout, Module, Parameter, TensorRecord
from telemetry.records.sketch import sketch_array
from telemetry.records.tensor import Tensors

WORLDS = (8, 64, 1024)
PER_MACHINE = 8
INTERVALS = (10, 100)
LIGHT = range(12)
UNITS = 256
ELEMENTS = 4096
_KINDS = ("grads", "weights", "second_moments")


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much one rank sends.

    Attributes:
        layers: Linear layers with a weight and a bias.
        tensors: Their outputs, the gradients of these, and of each parameter the gradient, the
            values and the second moment.
        first_bytes: At the first full step, with the layout.
        bytes: At later ones.
        encode_s: CPU time for making bytes of it.
    """

    layers: int
    tensors: int
    first_bytes: int
    bytes: int
    encode_s: float


@dataclass(frozen=True, kw_only=True)
class Light:
    """What a step costs that is not measured in full, if so many travel together.

    Attributes:
        parameters: How many there are; of each the norm of the gradient is sent.
        bytes: What one rank sends.
        encode_s: CPU time for making bytes of it.
        merge_s: CPU time for merging what the ranks of one machine sent.
    """

    parameters: int
    bytes: float
    encode_s: float
    merge_s: float


@dataclass(frozen=True, kw_only=True)
class Average:
    """What a step costs on average if every so many are measured in full.

    Attributes:
        ranks, layers: As in :class:`Tree`.
        every_n_steps: From one full step to the next.
        bytes: What one rank sends.
        first_rank_s: CPU time of the writing rank in the background.
    """

    ranks: int
    layers: int
    every_n_steps: int
    bytes: float
    first_rank_s: float


@dataclass(frozen=True, kw_only=True)
class Tree:
    """What a full step costs.

    Attributes:
        ranks: How many there are.
        layers: Of each one's model.
        levels: How many ranks are above the lowest one.
        arrival_s: From the end of the step until the writing rank has the whole, without anyone
            late; a turn of waiting per level included.
        first_rank_s: CPU time of the writing rank in the background.
        own_bytes: What a rank sends of its own.
        waiting_bytes: What arrives at the writing rank.
        peak_bytes: The most memory that it needs until it has the whole; 0: not measured.
    """

    ranks: int
    layers: int
    levels: int
    arrival_s: float
    first_rank_s: float
    own_bytes: float
    waiting_bytes: int
    peak_bytes: int


def make_part(layers: int, rank: int, world_size: int, *, with_layout: bool = False) -> Measured:
    """What one rank measured of so many layers; each tensor has normal numbers of its own."""
    dice = np.random.default_rng(rank)

    def draw(*, has_units: bool) -> TensorRecord:
        numbers = dice.standard_normal(ELEMENTS, np.float32) * np.float32(10 ** dice.uniform(-4, 1))
        return TensorRecord(
            sketch=sketch_array(numbers),
            unit_min=-dice.random(UNITS, np.float32) if has_units else None,
            unit_max=dice.random(UNITS, np.float32) if has_units else None,
        )

    names = [f"layers.{layer}" for layer in range(layers)]
    shapes = {"weight": (UNITS, UNITS), "bias": (UNITS,)}
    parameters = [
        Parameter(name=f"{name}.{part}", module_name=name, shape=shape)
        for name in names
        for part, shape in shapes.items()
    ]
    tensors: dict[Row, TensorRecord] = {}
    for name in names:
        tensors[Row(0, "outputs", name)] = draw(has_units=True)
        tensors[Row(0, "output_grads", name)] = draw(has_units=False)
    for kind in _KINDS:
        for parameter in parameters:
            tensors[Row(0, kind, parameter.name)] = draw(has_units=False)
    layout = Layout(
        modules=tuple(Module(name=name, type_name="Linear") for name in names),
        parameters=tuple(parameters),
    )
    rows = range(len(parameters))
    ones, numbers = np.ones(len(rows), np.bool_), dice.random(len(rows))
    stage = MeasuredParameters(
        stage=0,
        layout_id="0123456789abcdef",
        layout=layout if with_layout else None,
        grads=Table.of(rows, norm=dice.random(len(rows)), present=ones, finite=ones),
        before=Table.of(rows, before=dice.random(len(rows))),
        updates=Table.of(rows, moved=dice.random(len(rows)), size=numbers),
    )
    return Measured(
        step=0,
        wall_time=0.0,
        size=world_size,
        ranks=frozenset({rank}),
        measured=frozenset({rank}),
        stages={stage.key: stage},
        tensors=tensors_of(rank, dict.fromkeys(tensors, WHOLE), Tensors.of(tensors).rows),
        alike=(rank,),
    )


def measure_size(layers: int) -> Size:
    part = make_part(layers, 0, 1024)
    began = time.thread_time()
    payload = encode(Message.of([part]))
    encode_s = time.thread_time() - began
    return Size(
        layers=layers,
        tensors=len(part.tensors.rows),
        first_bytes=len(encode(Message.of([make_part(layers, 0, 1024, with_layout=True)]))),
        bytes=len(payload),
        encode_s=encode_s,
    )


def light_parts(machine: Sequence[Measured]) -> list[Measured]:
    """What the ranks of a machine send at a step that is not measured in full."""
    return [
        replace(
            part,
            tensors=NO_ROWS,
            measured=frozenset[int](),
            stages={
                key: replace(stage, before=NO_ROWS, updates=NO_ROWS)
                for key, stage in part.stages.items()
            },
        )
        for part in machine
    ]


def measure_light(machine: Sequence[Measured]) -> Light:
    parts = [several(part, LIGHT) for part in light_parts(machine)]
    payloads = [encode(Message.of(block)) for block in parts]

    def merge_all() -> None:
        for together in zip(*(decode(Message, data).parts for data in payloads), strict=True):
            merge(together)

    return Light(
        parameters=2 * layers_of(parts[0][0]),
        bytes=len(payloads[0]) / len(LIGHT),
        encode_s=least_s(lambda: encode(Message.of(parts[0]))) / len(LIGHT),
        merge_s=least_s(merge_all) / len(LIGHT),
    )


def several(part: Measured, steps: Sequence[int]) -> list[Measured]:
    """What a rank measured at several steps, with other norms at each."""
    dice, (key, stage) = np.random.default_rng(), next(iter(part.stages.items()))

    def other_norms() -> MeasuredParameters:
        norms = stage.grads["norm"] * dice.uniform(0.5, 2, len(stage.grads.rows))
        grads = replace(stage.grads, columns={**stage.grads.columns, "norm": norms})
        return replace(stage, grads=grads)

    return [replace(part, step=step, place=step, stages={key: other_norms()}) for step in steps]


def layers_of(part: Measured) -> int:
    return sum(len(stage.grads.rows) for stage in part.stages.values()) // 2


def least_s(call: Callable[[], object]) -> float:
    """CPU time of the fastest of twenty calls."""
    times = []
    for _ in range(20):
        began = time.thread_time()
        call()
        times.append(time.thread_time() - began)
    return min(times)


def simulate(ranks: int, machine: Sequence[Measured], steps: Sequence[int] = (0,)) -> Tree:
    """What the ranks of a machine send to its leader, and the leaders to the first rank.

    Args:
        ranks: How many there are.
        machine: What those of one machine measured.
        steps: Which travel together.
    """
    parts = [several(replace(part, size=ranks), steps) for part in machine[:ranks]]
    own = [encode(Message.of(part)) for part in parts]
    led, led_s = gather(ranks, own)
    begins = range(0, ranks, PER_MACHINE)
    leaders = [
        encode(
            Message.of([replace(part, ranks=frozenset(range(b, b + PER_MACHINE))) for part in led])
        )
        for b in begins[1:]
    ]
    began = time.thread_time()
    encode(Message.of(led))
    led_s += time.thread_time() - began
    arriving = [*own, *leaders]
    _, cpu_s = gather(ranks, arriving)
    arrival_s = carry(arriving[1:]) + cpu_s + TURN_S
    if leaders:
        arrival_s += carry(own[1:]) + led_s + TURN_S
    return Tree(
        ranks=ranks,
        layers=layers_of(machine[0]),
        levels=2 if leaders else 1,
        arrival_s=arrival_s,
        first_rank_s=cpu_s / len(steps),
        own_bytes=len(own[0]) / len(steps),
        waiting_bytes=sum(map(len, arriving)),
        peak_bytes=peak_bytes(lambda: gather(ranks, arriving)) if len(steps) == 1 else 0,
    )


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that is in use at a time, beyond what was before."""
    tracemalloc.start()
    call()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def averages(full: Tree, light: Tree) -> list[Average]:
    def mean(of_full: float, of_light: float, every_n_steps: int) -> float:
        return of_light + (of_full - of_light) / every_n_steps

    return [
        Average(
            ranks=full.ranks,
            layers=full.layers,
            every_n_steps=n,
            bytes=mean(full.own_bytes, light.own_bytes, n),
            first_rank_s=mean(full.first_rank_s, light.first_rank_s, n),
        )
        for n in INTERVALS
    ]


def carry(payloads: Sequence[bytes]) -> float:
    """Seconds until bytes from several ranks have arrived in an inbox, one after another."""

    async def send_all() -> float:
        arrived: asyncio.Queue[bytes] = asyncio.Queue()
        listening = socket.create_server(("127.0.0.1", 0))
        inbox = Inbox("", arrived.put_nowait, b"{}")
        await inbox.open(listening)
        meeting = Meeting("benchmark")
        meeting.first = Address(this_machine(), [], listening.getsockname()[1])
        uplink = Uplink(meeting, math.inf, lambda news: None)
        began = time.perf_counter()
        for payload in payloads:
            uplink.put(payload, droppable=False)
        uplink.finish()
        await uplink.run()
        inbox.close()
        return time.perf_counter() - began

    return asyncio.run(send_all())


def gather(ranks: int, payloads: Sequence[bytes]) -> tuple[list[Measured], float]:
    """What a rank makes of its own part, the first one, and of others', and its CPU time."""
    gathering = Gathering(world_size=ranks, patience_s=1.0, start_s=1.0, is_first=True)
    own, others, whole = decode(Message, payloads[0]).parts, payloads[1:], []
    began = time.thread_time()
    for part in own:
        gathering.add_own(part, 0.0)
    for data in others:
        gathering.add(decode(Message, data), 0.0)
        while (found := gathering.take(0.0, hurry=data is others[-1])) is not None:
            whole.append(found)
    return whole, time.thread_time() - began


def training_thread_us(steps: int) -> float:
    """CPU microseconds per step on the training thread: handing bytes over, and the look whether to
    raise."""
    channel = Channel(
        name="benchmark",
        rank=0,
        world_size=1,
        deliver=lambda merged: None,
        heard=lambda news: None,
        failures=Failures(),
    )
    began = time.thread_time()
    for step in range(steps):
        channel.agreement.step_ended(step)
    looked_s = time.thread_time() - began
    channel.close()
    return looked_s / steps * 1e6


def print_tables(
    sizes: Sequence[Size],
    lights: Sequence[Light],
    trees: Sequence[Tree],
    means: Sequence[Average],
    step_us: float,
) -> None:
    print("\nWhat one rank sends at a full step, with 8 tensors per layer; CPU time to encode it")
    print(f"{'layers':>8}{'tensors':>9}{'first kB':>10}{'kB':>9}{'B/tensor':>10}{'encode':>11}")
    for size in sizes:
        print(
            f"{size.layers:8,}{size.tensors:9,}{size.first_bytes / 1e3:10.1f}"
            f"{size.bytes / 1e3:9.1f}{size.bytes / size.tensors:10.0f}"
            f"{size.encode_s * 1e3:9.1f}ms"
        )
    print(
        f"\nA step that is not measured in full, {len(LIGHT)} of which travel together; CPU times, "
        f"to merge those of {PER_MACHINE} ranks"
    )
    print(f"{'parameters':>12}{'bytes':>9}{'encode':>11}{'merge':>11}")
    for light in lights:
        print(
            f"{light.parameters:12,}{light.bytes:9,.0f}"
            f"{light.encode_s * 1e3:9.2f}ms{light.merge_s * 1e3:9.2f}ms"
        )
    print("\nUntil the writing rank has the whole, and its own CPU time in the background")
    print(
        f"{'ranks':>8}{'layers':>8}{'levels':>8}{'arrival':>10}{'CPU':>9}{'MB to it':>12}"
        f"{'MB peak':>11}"
    )
    for tree in trees:
        print(
            f"{tree.ranks:8,}{tree.layers:8,}{tree.levels:8}{tree.arrival_s:9.2f}s"
            f"{tree.first_rank_s:8.2f}s{tree.waiting_bytes / 1e6:12.1f}"
            f"{tree.peak_bytes / 1e6:11.1f}"
        )
    print("\nA step on average, one of so many in full: what a rank sends, CPU of the writing one")
    print(f"{'ranks':>8}{'layers':>8}{'interval':>10}{'kB':>9}{'CPU':>10}")
    for mean in means:
        print(
            f"{mean.ranks:8,}{mean.layers:8,}{mean.every_n_steps:10}{mean.bytes / 1e3:9.1f}"
            f"{mean.first_rank_s * 1e3:8.1f}ms"
        )
    print(f"\nOn the training thread: {step_us:.3f} µs per step for the look whether to raise")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small: figures are rough")
    parser.add_argument("--layers", type=int, nargs="+", help="default: 10 100 1000")
    parser.add_argument("--ranks", type=int, nargs="+", help=f"default: {WORLDS}")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    print(describe_machine(device))
    layers = args.layers or ([5, 10] if args.quick else [10, 100, 1000])
    worlds = args.ranks or (WORLDS[:2] if args.quick else WORLDS)
    sizes = [measure_size(count) for count in layers]
    machines = [
        [make_part(count, rank, worlds[-1]) for rank in range(PER_MACHINE)] for count in layers
    ]
    lights = [measure_light(machine) for machine in machines]
    trees, means = [], []
    for machine in machines:
        light = light_parts(machine)
        for ranks in worlds:
            trees.append(simulate(ranks, machine))
            means += averages(trees[-1], simulate(ranks, light, LIGHT))
    step_us = training_thread_us(10_000 if args.quick else 1_000_000)
    print_tables(sizes, lights, trees, means, step_us)
    if args.json:
        write_json(
            args.json,
            device,
            figures={
                "sizes": [asdict(size) for size in sizes],
                "light": [asdict(light) for light in lights],
                "trees": [asdict(tree) for tree in trees],
                "averages": [asdict(mean) for mean in means],
                "training_thread_us": step_us,
            },
        )


if __name__ == "__main__":
    main()
