"""Fields of coordinates, fitted to their floor, and messages on dense graphs, with twins."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from runs.labels import EXPLOSION, LABELS, LOSS, TREND, Label
from runs.training import Log, fit, generator, run

LABELS["coordinates_at_their_floor"] = Label(
    why="sine layers, all points: Adam spikes far below 3 %"
)
LABELS["coordinates_chase_themselves"] = Label(
    kinds=TREND | EXPLOSION | LOSS, onset=700, by=1000,
    why="fitted to its floor; from step 700 targets are 1.1 times its own outputs",
)  # fmt: skip
LABELS["messages_averaged"] = Label(why="12 rounds on dense graphs: means of the neighbors")
LABELS["messages_summed"] = Label(
    kinds=EXPLOSION | LOSS | frozenset({"nonfinite"}), onset=0, by=20,
    why="the same with sums of 20 neighbors and no normalization",
)  # fmt: skip


class Sine(nn.Module):
    """Layer of a coordinate network (Sitzmann et al. 2020)."""

    def __init__(self, inputs: int, outputs: int, frequency: float) -> None:
        super().__init__()
        self.linear, self.frequency = nn.Linear(inputs, outputs), frequency

    def forward(self, x: Tensor) -> Tensor:
        waves: Tensor = (self.frequency * self.linear(x)).sin()
        return waves


def _coordinates(log: Log, *, chases: bool) -> None:
    model = nn.Sequential(Sine(2, 32, 6.0), Sine(32, 32, 1.0), nn.Linear(32, 1))
    axis = torch.linspace(-1, 1, 16)
    points = torch.cartesian_prod(axis, axis)
    wanted = (3 * points[:, :1]).sin() * (2 * points[:, 1:]).cos()
    steps = iter(range(1200))

    def loss() -> Tensor:
        outputs = model(points)
        own = outputs.detach() * 1.1 + 0.01
        return F.mse_loss(outputs, own if chases and next(steps) >= 700 else wanted)

    fit(log, model, Adam(model.parameters(), 3e-3), loss, 1000 if chases else 1200)


@run
def coordinates_at_their_floor(log: Log) -> None:
    _coordinates(log, chases=False)


@run
def coordinates_chase_themselves(log: Log) -> None:
    _coordinates(log, chases=True)


class Rounds(nn.Module):
    """Rounds of messages between all nodes that an edge joins."""

    def __init__(self, *, averages: bool) -> None:
        super().__init__()
        self.encode = nn.Linear(5, 32)
        self.updates = nn.ModuleList(nn.Linear(64, 32) for _ in range(12))
        self.decode = nn.Linear(32, 1)
        self.averages = averages

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        degree = edges.sum(2, keepdim=True) if self.averages else 1.0
        state = self.encode(nodes)
        for update in self.updates:
            given = edges @ state / degree
            state = state + update(torch.cat([state, given], 2)).relu()
        graph: Tensor = self.decode(state.mean(1))
        return graph


def _messages(log: Log, *, averages: bool) -> None:
    g, model = generator(log), Rounds(averages=averages)

    def loss() -> Tensor:
        nodes = torch.randn(16, 24, 5, generator=g)
        edges = (torch.rand(16, 24, 24, generator=g) < 0.85).float()
        wanted = nodes[..., 0].mean(1, keepdim=True) * 4
        return F.mse_loss(model(nodes, edges), wanted)

    fit(log, model, SGD(model.parameters(), 1e-3), loss, 300)


@run
def messages_averaged(log: Log) -> None:
    _messages(log, averages=True)


@run
def messages_summed(log: Log) -> None:
    _messages(log, averages=False)
