"""Runs of unfamiliar architectures and places of a fault, each with a twin without that fault."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

from runs import unfamiliar_models as models
from runs.labels import EXPLOSION, LABELS, LOSS, TREND, Label
from runs.models import graphs, moons, node_loss, recall
from runs.training import RUNS, Log, batches, digits, fit, generator, mlp, run

NONFINITE, VANISHING = frozenset({"nonfinite"}), frozenset({"vanishing_gradient"})
DEAD, SATURATED = frozenset({"dead_units"}), frozenset({"saturated_units"})
IDLE = frozenset({"no_learning", "untrained_parameters", "layers_not_learning"})
JUMP = EXPLOSION | LOSS | {"weight_jump"}


def twins(
    *,
    kinds: frozenset[str],
    why: str,
    healthy: str,
    layers: tuple[str, ...] = (),
    onset: int = 0,
    by: int | None = None,
) -> Callable[[Callable[[Log, bool], None]], None]:
    """Add a run with its fault, and without it under the name that ends in ``_ok``."""

    def add(train: Callable[[Log, bool], None]) -> None:
        name = train.__name__
        RUNS[name], RUNS[f"{name}_ok"] = partial(_run, train, True), partial(_run, train, False)
        LABELS[name] = Label(kinds=kinds, layers=layers, onset=onset, by=by, why=why)
        LABELS[f"{name}_ok"] = Label(why=healthy)

    return add


def _run(train: Callable[[Log, bool], None], faulty: bool, log: Log) -> None:
    train(log, faulty)


def class_loss(
    log: Log,
    predict: Callable[[Tensor], Tensor],
    alter: Callable[[int, Tensor, Tensor], None] = lambda step, images, classes: None,
) -> Callable[[], Tensor]:
    """Cross entropy of digits; ``alter`` may change a step's images and classes in place."""
    data, steps = batches(log, 32, *digits()), iter(range(10**6))

    def loss() -> Tensor:
        images, classes = next(data)
        alter(next(steps), images, classes)
        return F.cross_entropy(predict(images), classes)

    return loss


def at_step(step: int, faulty: bool, act: Callable[[], object]) -> Callable[[int], None]:
    """Act once, before a step of the faulty run."""

    def before(now: int) -> None:
        if faulty and now == step:
            with torch.no_grad():
                act()

    return before


def _from(step: int, faulty: bool, act: Callable[[], object]) -> Callable[[int], None]:
    """Act before each step from one on."""

    def before(now: int) -> None:
        at_step(now, faulty and now >= step, act)(now)

    return before


def times(model: nn.Module, name: str, factor: float) -> Callable[[], object]:
    return lambda: model.get_parameter(name).mul_(factor)


# --- activations and gradients explode -----------------------------------------------------------


@twins(
    kinds=JUMP, layers=("blocks.1.tokens",), onset=118, by=168,
    why="the first weights that mix tokens in one block, times 300",
    healthy="MLP-Mixer on patches of digits",
)  # fmt: skip
def mixer_tokens_scaled(log: Log, faulty: bool) -> None:
    model = models.Mixer()
    scale = at_step(118, faulty, times(model, "blocks.1.tokens.0.weight", 300))
    fit(log, model, AdamW(model.parameters(), 2e-3), class_loss(log, model), 230, before=scale)


@twins(
    kinds=EXPLOSION | LOSS | NONFINITE, layers=("cell",), onset=121, by=230,
    why="a layer that runs 16 times in a pass grows by 3 % at each step",
    healthy="one residual layer runs 16 times in a pass",
)  # fmt: skip
def iterated_cell_drifts(log: Log, faulty: bool) -> None:
    model = models.Iterated()
    drift = _from(121, faulty, times(model, "cell.weight", 1.03))
    optimizer = SGD(model.parameters(), 0.02, 0.9)
    fit(log, model, optimizer, class_loss(log, model), 260, clip=1.0, before=drift)


@twins(
    kinds=JUMP, layers=("layers.2",), onset=109, by=159,
    why="one convolution's weights, times 200", healthy="each convolution sees all before it",
)  # fmt: skip
def dense_convolution_scaled(log: Log, faulty: bool) -> None:
    model = models.Dense()
    scale = at_step(109, faulty, times(model, "layers.2.weight", 200))
    fit(log, model, SGD(model.parameters(), 0.05, 0.9), class_loss(log, model), 210, before=scale)


@twins(
    kinds=EXPLOSION | LOSS | NONFINITE, layers=("layers",), onset=133, by=183,
    why="neighbors are added up 300 times as strongly, in each of three layers",
    healthy="graph isomorphism network",
)  # fmt: skip
def neighbors_added_up(log: Log, faulty: bool) -> None:
    g, model = generator(log), models.SumGraph()
    strong = at_step(133, faulty, lambda: setattr(model, "share", 30.0))
    optimizer = Adam(model.parameters(), 3e-3)
    fit(log, model, optimizer, lambda: node_loss(model, graphs(g)), 230, before=strong)


@twins(
    kinds=JUMP, layers=("norm1",), onset=141, by=191,
    why="the gains of a group norm, times 1000", healthy="group norm and generalized mean",
)  # fmt: skip
def norm_gain_scaled(log: Log, faulty: bool) -> None:
    model = models.PowerPooled()
    scale = at_step(141, faulty, times(model, "norm1.weight", 1000))
    fit(log, model, AdamW(model.parameters(), 2e-3), class_loss(log, model), 230, before=scale)


def _restored(log: Log, model: nn.Module) -> Callable[[], Tensor]:
    data = batches(log, 32, *digits())

    def loss() -> Tensor:
        images = next(data)[0]
        return F.mse_loss(model(images), images)

    return loss


@twins(
    kinds=JUMP, layers=("decoder.2",), onset=97, by=147,
    why="a transposed convolution's weights, times 300", healthy="autoencoder of convolutions",
)  # fmt: skip
def deconvolution_scaled(log: Log, faulty: bool) -> None:
    model = models.ConvAutoencoder()
    scale = at_step(97, faulty, times(model, "decoder.2.weight", 300))
    fit(log, model, Adam(model.parameters(), 2e-3), _restored(log, model), 200, before=scale)


def _topics(log: Log, model: nn.Module) -> Callable[[], Tensor]:
    g = generator(log)

    def loss() -> Tensor:
        tokens, topic = models.topics(g)
        return F.cross_entropy(model(tokens), topic)

    return loss


@twins(
    kinds=JUMP, layers=("embedding",), onset=113, by=163,
    why="a table of embeddings, times 3000", healthy="topic of a bag of tokens",
)  # fmt: skip
def embedding_scaled(log: Log, faulty: bool) -> None:
    model = models.BagOfTokens()
    scale = at_step(113, faulty, times(model, "embedding.weight", 3000))
    fit(log, model, SGD(model.parameters(), 0.1, 0.9), _topics(log, model), 210, before=scale)


@twins(
    kinds=JUMP, layers=("meet",), onset=131, by=181,
    why="a bilinear layer's weights, times 500", healthy="two halves meet in a bilinear layer",
)  # fmt: skip
def bilinear_scaled(log: Log, faulty: bool) -> None:
    model = models.TwoViews()
    scale = at_step(131, faulty, times(model, "meet.weight", 500))
    fit(log, model, SGD(model.parameters(), 0.02, 0.9), class_loss(log, model), 220, before=scale)


@twins(
    kinds=EXPLOSION | LOSS | NONFINITE, layers=("blocks",), by=20,
    why="five dilated convolutions begin 20 times too large", healthy="dilated convolutions",
)  # fmt: skip
def dilated_begin_large(log: Log, faulty: bool) -> None:
    model = models.Temporal(depth=5)
    with torch.no_grad():
        for block in model.blocks:
            block.get_parameter("0.weight").mul_(20.0 if faulty else 1.0)
    fit(log, model, Adam(model.parameters(), 2e-3), class_loss(log, model), 150)


@twins(
    kinds=EXPLOSION | LOSS, layers=("reverse", "features"), onset=125, by=175,
    why="a layer that reverses gradients makes them 10^6 times as large",
    healthy="domain adaptation by reversed gradients",
)  # fmt: skip
def reversal_far_too_strong(log: Log, faulty: bool) -> None:
    model, data, g = models.Adversarial(), batches(log, 32, *digits()), generator(log)

    def loss() -> Tensor:
        images, classes = next(data)
        mirrored = torch.randint(2, (32,), generator=g).float()
        images = torch.where(mirrored[:, None, None, None] > 0, images.flip(3), images)
        logits, domain = model(images)
        error = F.binary_cross_entropy_with_logits(domain, mirrored)
        return F.cross_entropy(logits, classes) + error

    change = at_step(125, faulty, lambda: setattr(model.reverse, "factor", -1e5))
    fit(log, model, SGD(model.parameters(), 0.05, 0.9), loss, 220, before=change)


# --- NaN and infinity ----------------------------------------------------------------------------


@twins(
    kinds=NONFINITE, layers=("spread",), onset=127, by=127,
    why="some rows are constant; rounding makes their variance negative, and a root follows",
    healthy="the same rows, with an epsilon under the root",
)  # fmt: skip
def variance_below_zero(log: Log, faulty: bool) -> None:
    model = nn.Sequential()
    model.add_module("flat", nn.Flatten())
    model.add_module("spread", spread := models.Spread())
    model.add_module("net", mlp(65, 48, 32, 10))
    spread.eps = 0.0 if faulty else 1e-3

    def alter(step: int, images: Tensor, classes: Tensor) -> None:
        if step == 127:
            images[:16] = torch.linspace(1.01, 3.77, 16)[:, None, None, None]

    fit(log, model, Adam(model.parameters(), 1e-3), class_loss(log, model, alter), 190)


@twins(
    kinds=NONFINITE, layers=("pool",), onset=123, by=123,
    why="no token of one example counts: the mean of nothing is 0/0",
    healthy="the same example, divided by an epsilon at least",
)  # fmt: skip
def mean_of_nothing(log: Log, faulty: bool) -> None:
    model, g, steps = models.Pooled(), generator(log), iter(range(10**6))
    model.pool.least = 0.0 if faulty else 1e-6

    def predict(images: Tensor) -> Tensor:
        mask = (torch.rand(32, 8, generator=g) < 0.8).float()
        mask[:, 3] = 1.0
        if next(steps) == 123:
            mask[7] = 0.0
        logits: Tensor = model(images, mask)
        return logits

    fit(log, model, AdamW(model.parameters(), 2e-3), class_loss(log, predict), 180)


def _similarities(log: Log, model: models.Towers) -> Callable[[], Tensor]:
    data, steps = batches(log, 32, *digits()), iter(range(10**6))

    def loss() -> Tensor:
        images = next(data)[0]
        if next(steps) == 135:
            images[5, :, 4:] = 0.0
        logits = model(images)
        own = torch.arange(32)
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    return loss


@twins(
    kinds=NONFINITE, layers=("unit_right",), onset=135, by=135,
    why="half a picture is empty: its embedding has length 0, and is divided by that",
    healthy="contrastive towers, an empty half, an epsilon",
)  # fmt: skip
def empty_half_normalized(log: Log, faulty: bool) -> None:
    model = models.Towers()
    model.unit_right.eps = 0.0 if faulty else 1e-8
    fit(log, model, Adam(model.parameters(), 1e-3), _similarities(log, model), 200)


@twins(
    kinds=NONFINITE, layers=("prototypes",), onset=119, by=119,
    why="a center is set to an example: the root of a distance of 0",
    healthy="the same, with an epsilon under the root",
)  # fmt: skip
def center_at_an_example(log: Log, faulty: bool) -> None:
    model = models.Centers()
    model.prototypes.eps = 0.0 if faulty else 1e-6

    def alter(step: int, images: Tensor, classes: Tensor) -> None:
        if step == 119:
            with torch.no_grad():
                model.prototypes.centers[classes[3]] = model.embed(images)[3]

    fit(log, model, Adam(model.parameters(), 1e-3), class_loss(log, model, alter), 190)


@twins(
    kinds=NONFINITE, layers=("gem",), onset=117, by=117,
    why="a clamp is lost: negative numbers to the power of 2.5",
    healthy="generalized mean over a feature map",
)  # fmt: skip
def power_of_negative(log: Log, faulty: bool) -> None:
    model = models.PowerPooled()
    change = at_step(117, faulty, lambda: setattr(model.gem, "least", -torch.inf))
    fit(log, model, AdamW(model.parameters(), 2e-3), class_loss(log, model), 180, before=change)


@twins(
    kinds=NONFINITE, layers=("gru",), onset=137, by=137,
    why="one recurrent weight becomes infinite", healthy="GRU over the rows of digits",
)  # fmt: skip
def recurrent_bit_flip(log: Log, faulty: bool) -> None:
    model = models.Reader()
    weight = model.get_parameter("gru.weight_hh_l0")
    flip = at_step(137, faulty, lambda: weight[3, 5].fill_(torch.inf))
    fit(log, model, Adam(model.parameters(), 3e-3), class_loss(log, model), 190, before=flip)


@twins(
    kinds=NONFINITE, layers=("attend",), onset=129, by=129,
    why="a learned temperature arrives at 0", healthy="cross attention from learned queries",
)  # fmt: skip
def temperature_of_zero(log: Log, faulty: bool) -> None:
    model = models.Perceiver()
    freeze = at_step(129, faulty, lambda: model.attend.temperature.zero_())
    fit(log, model, AdamW(model.parameters(), 2e-3), class_loss(log, model), 190, before=freeze)


@twins(
    kinds=NONFINITE, layers=("wide",), onset=139, by=139,
    why="one value of the table next to the pictures is missing", healthy="wide and deep",
)  # fmt: skip
def table_with_a_gap(log: Log, faulty: bool) -> None:
    model, g, steps = models.WideAndDeep(), generator(log), iter(range(10**6))

    def predict(images: Tensor) -> Tensor:
        table = torch.randn(32, 6, generator=g)
        if faulty and next(steps) == 139:
            table[4, 2] = torch.nan
        logits: Tensor = model(images, table)
        return logits

    fit(log, model, Adam(model.parameters(), 1e-3), class_loss(log, predict), 200)


def _elbo(log: Log, model: models.Variational) -> Callable[[], Tensor]:
    data = batches(log, 32, *digits())

    def loss() -> Tensor:
        images = next(data)[0]
        restored, mean, log_variance = model(images)
        spread = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).sum(1)
        error: Tensor = ((restored - images.flatten(1)) ** 2).sum(1).mean()
        bound: Tensor = error + 0.2 * spread.mean()
        return bound

    return loss


@twins(
    kinds=NONFINITE, layers=("sample", "log_variance"), onset=133, by=133,
    why="a head of log-variances returns 300: its exponential is infinite",
    healthy="variational autoencoder of pixels",
)  # fmt: skip
def log_variance_overflows(log: Log, faulty: bool) -> None:
    model = models.Variational()
    raise_bias = at_step(133, faulty, lambda: model.log_variance.bias.fill_(300.0))
    optimizer = Adam(model.parameters(), 1e-3)
    fit(log, model, optimizer, _elbo(log, model), 190, before=raise_bias)


@twins(
    kinds=NONFINITE | LOSS | EXPLOSION, onset=121, by=125,
    why="a schedule divides by 0: the learning rate is infinite", healthy="MLP-Mixer, SGD",
)  # fmt: skip
def rate_infinite(log: Log, faulty: bool) -> None:
    model = models.Mixer(depth=2)
    optimizer = SGD(model.parameters(), 0.05, 0.9)
    change = at_step(121, faulty, lambda: optimizer.param_groups[0].update(lr=math.inf))
    fit(log, model, optimizer, class_loss(log, model), 170, before=change)


@twins(
    kinds=NONFINITE, layers=("neck",), onset=131, by=131,
    why="two views are the same picture: the root of a distance of 0, in the loss",
    healthy="the same, with an epsilon under the root",
)  # fmt: skip
def distance_of_zero(log: Log, faulty: bool) -> None:
    model = nn.Sequential()
    model.add_module("body", nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.Tanh()))
    model.add_module("neck", nn.Linear(48, 12))
    data, steps = batches(log, 32, *digits()), iter(range(10**6))
    eps = 0.0 if faulty else 1e-6

    def loss() -> Tensor:
        images, classes = next(data)
        if next(steps) == 131:
            images[17], classes[17] = images[1], classes[1]
        given: Tensor = model(images)
        a, b = given.chunk(2)
        distance: Tensor = ((a - b).square().sum(1) + eps).sqrt()
        same = (classes[:16] == classes[16:]).float()
        error: Tensor = (same * distance + (1 - same) * F.relu(3 - distance)).mean()
        return error

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 200)


# --- gradients vanish ----------------------------------------------------------------------------


@twins(
    kinds=VANISHING, layers=tuple(f"layers.{i}" for i in range(4)), by=100,
    why="eight convolutions with sigmoids and no normalization",
    healthy="eight convolutions with sigmoids and batch norms",
)  # fmt: skip
def sigmoid_convolutions(log: Log, faulty: bool) -> None:
    model = models.SigmoidNet(norm=not faulty)
    fit(log, model, SGD(model.parameters(), 0.1, 0.9), class_loss(log, model), 180)


@twins(
    kinds=VANISHING, layers=tuple(f"layers.{i}" for i in range(6)), by=100,
    why="fourteen layers with weights a fourth of the usual; functional softsign",
    healthy="fourteen layers with orthogonal weights; functional softsign",
)  # fmt: skip
def softsign_small(log: Log, faulty: bool) -> None:
    model = models.Softsigns(14, 0.3 if faulty else 1.2)
    fit(log, model, SGD(model.parameters(), 0.05, 0.9), class_loss(log, model), 180)


@twins(
    kinds=VANISHING | LOSS, layers=("encoder",), onset=101, by=201,
    why="what the encoder returns is multiplied by 1e-7", healthy="autoencoder of convolutions",
)  # fmt: skip
def encoder_gated_off(log: Log, faulty: bool) -> None:
    model = models.ConvAutoencoder()
    shut = at_step(101, faulty, lambda: setattr(model, "gate", 1e-7))
    optimizer = SGD(model.parameters(), 0.1, 0.9)
    fit(log, model, optimizer, _restored(log, model), 220, before=shut)


@twins(
    kinds=VANISHING | IDLE, layers=("embed",), onset=141, by=261,
    why="detach() behind the embedding of rows from a step on", healthy="GRU, SGD",
)  # fmt: skip
def detached_midway(log: Log, faulty: bool) -> None:
    model, cut = models.Reader(), [False]
    model.embed.register_forward_hook(lambda _, __, y: y.detach() if cut[0] else y)
    change = at_step(141, faulty, lambda: cut.__setitem__(0, True))
    optimizer = SGD(model.parameters(), 0.1, 0.9)
    fit(log, model, optimizer, class_loss(log, model), 280, clip=1.0, before=change)


# --- units die -----------------------------------------------------------------------------------


@twins(
    kinds=DEAD, layers=("blocks.1",), by=50,
    why="the biases of one residual convolution begin at -30", healthy="dilated convolutions",
)  # fmt: skip
def residual_branch_dead(log: Log, faulty: bool) -> None:
    model = models.Temporal()
    if faulty:
        nn.init.constant_(model.get_parameter("blocks.1.0.bias"), -30.0)
    fit(log, model, Adam(model.parameters(), 3e-3), class_loss(log, model), 160)


@twins(
    kinds=DEAD, layers=("item_tower",), onset=112, by=162,
    why="the biases of one of two towers become -30", healthy="two towers of a recommender",
)  # fmt: skip
def tower_dies(log: Log, faulty: bool) -> None:
    model, g = models.Recommender(), generator(log)
    a, b = torch.randn(60, 4, generator=g), torch.randn(80, 4, generator=g)

    def loss() -> Tensor:
        users, items = (torch.randint(n, (64,), generator=g) for n in (60, 80))
        return F.mse_loss(model(users, items), (a[users] * b[items]).sum(1) / 2)

    kill = at_step(112, faulty, lambda: model.get_parameter("item_tower.0.bias").fill_(-30.0))
    fit(log, model, Adam(model.parameters(), 5e-3), loss, 220, before=kill)


@twins(
    kinds=DEAD, layers=("blocks.1",), onset=126, by=176,
    why="the gates of one feed-forward layer, a functional ReLU, shut permanently",
    healthy="pre-norm blocks with gated layers, SGD",
)  # fmt: skip
def gates_shut(log: Log, faulty: bool) -> None:
    model = models.GatedRows()
    kill = at_step(126, faulty, lambda: model.get_parameter("blocks.1.gate.bias").fill_(-50.0))
    optimizer = SGD(model.parameters(), 0.05, 0.9)
    fit(log, model, optimizer, class_loss(log, model), 220, before=kill)


@twins(
    kinds=DEAD, layers=("decoder1",), by=50,
    why="biases of a decoder's first layer begin at -40; functional ReLU",
    healthy="variational autoencoder, SGD",
)  # fmt: skip
def decoder_dead(log: Log, faulty: bool) -> None:
    model = models.Variational()
    if faulty:
        nn.init.constant_(model.decoder1.bias, -40.0)
    fit(log, model, SGD(model.parameters(), 2e-4, 0.9), _elbo(log, model), 160)


@twins(
    kinds=DEAD | LOSS | EXPLOSION, onset=115, by=165,
    why="one step with the learning rate times 3000", healthy="topic of a bag of tokens",
)  # fmt: skip
def one_huge_step(log: Log, faulty: bool) -> None:
    model = models.BagOfTokens()
    optimizer = SGD(model.parameters(), 0.1, 0.9)

    def rate(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 300.0 if faulty and step == 115 else 0.1

    fit(log, model, optimizer, _topics(log, model), 220, before=rate)


# --- units saturate ------------------------------------------------------------------------------


@twins(
    kinds=SATURATED, layers=("squeeze", "code"), by=50,
    why="weights in front of a hard tanh begin 300 times too large",
    healthy="autoencoder with a hard tanh as its code",
)  # fmt: skip
def hard_code(log: Log, faulty: bool) -> None:
    model = models.ConvAutoencoder(nn.Hardtanh())
    with torch.no_grad():
        model.squeeze.weight.mul_(300.0 if faulty else 1.0)
    fit(log, model, SGD(model.parameters(), 0.1, 0.9), _restored(log, model), 160)


@twins(
    kinds=SATURATED, layers=("5", "6"), onset=122, by=172,
    why="one layer of five, times 3000, in front of a softsign", healthy="softsign as a module",
)  # fmt: skip
def softsign_scaled(log: Log, faulty: bool) -> None:
    model = nn.Sequential(nn.Flatten(), *mlp(64, 40, 40, 40, 40, 10, activation=nn.Softsign))
    scale = at_step(122, faulty, times(model, "5.weight", 3000))
    fit(log, model, SGD(model.parameters(), 0.1, 0.9), class_loss(log, model), 220, before=scale)


@twins(
    kinds=SATURATED, layers=("1", "2"), by=50,
    why="inputs in a unit 3000 times too small, and not centered, meet a tanh",
    healthy="tanh layers with normalized inputs",
)  # fmt: skip
def inputs_of_large_unit(log: Log, faulty: bool) -> None:
    model = nn.Sequential(nn.Flatten(), *mlp(64, 48, 32, 10, activation=nn.Tanh))

    def predict(images: Tensor) -> Tensor:
        logits: Tensor = model(3000 * (images + 2) if faulty else images)
        return logits

    fit(log, model, SGD(model.parameters(), 0.02, 0.9), class_loss(log, predict), 160)


@twins(
    kinds=SATURATED, layers=("conv2", "act2"), onset=107, by=157,
    why="biases of +60 in front of a ReLU6: all outputs are 6", healthy="convolutions with ReLU6",
)  # fmt: skip
def relu6_full(log: Log, faulty: bool) -> None:
    model = nn.Sequential()
    for i, (given, width) in enumerate([(1, 12), (12, 16), (16, 16)], 1):
        model.add_module(f"conv{i}", nn.Conv2d(given, width, 3, 2 if i > 1 else 1, 1))
        model.add_module(f"act{i}", nn.ReLU6())
    model.add_module("head", nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    fill = at_step(107, faulty, lambda: model.get_parameter("conv2.bias").fill_(60.0))
    fit(log, model, SGD(model.parameters(), 0.05, 0.9), class_loss(log, model), 200, before=fill)


@twins(
    kinds=SATURATED, layers=("policy", "critic"), by=60,
    why="observations in a unit 10^4 times too small, for tanh layers",
    healthy="a bandit: policy and value, rewards of 0 and 1",
)  # fmt: skip
def observations_of_large_unit(log: Log, faulty: bool) -> None:
    model, data = models.Policy(64, 10), batches(log, 64, *digits())

    def loss() -> Tensor:
        images, classes = next(data)
        logits, value = model((1e4 if faulty else 1.0) * images.flatten(1))
        policy = torch.distributions.Categorical(logits=logits)
        action = policy.sample()
        reward = (action == classes).float()
        gain = (reward - value).detach()
        chance: Tensor = policy.log_prob(action)
        error: Tensor = F.mse_loss(value, reward) - (gain * chance).mean()
        return error

    fit(log, model, SGD(model.parameters(), 0.02, 0.9), loss, 200)


# --- the loss rises, or nothing is learned -------------------------------------------------------


def _next_tokens(log: Log, model: nn.Module, size: int = 4) -> Callable[[], Tensor]:
    g = generator(log)

    def loss() -> Tensor:
        given, wanted = recall(g, size, 17)
        return F.cross_entropy(model(given).flatten(0, 1), wanted.flatten())

    return loss


@twins(
    kinds=LOSS | EXPLOSION | DEAD, onset=151, by=201,
    why="the learning rate jumps to 0.5",
    healthy="eight linear experts, of which each token takes the best; some see few tokens",
)  # fmt: skip
def experts_rate_jumps(log: Log, faulty: bool) -> None:
    model = models.ExpertText()
    optimizer = AdamW(model.parameters(), 1e-3)
    change = at_step(151, faulty, lambda: optimizer.param_groups[0].update(lr=0.5))
    fit(log, model, optimizer, _next_tokens(log, model), 260, before=change)


@twins(
    kinds=LOSS | EXPLOSION | NONFINITE, by=100,
    why="SGD with a learning rate of 20", healthy="diffusion of points of the plane",
)  # fmt: skip
def denoiser_rate_too_high(log: Log, faulty: bool) -> None:
    model, g = models.Denoiser(), generator(log)

    def loss() -> Tensor:
        x, t = moons(g), torch.rand(128, 1, generator=g)
        noise, kept = torch.randn(128, 2, generator=g), (t * math.pi / 2).cos()
        return F.mse_loss(model(kept * x + (1 - kept**2).sqrt() * noise, t), noise)

    fit(log, model, SGD(model.parameters(), 20.0 if faulty else 0.05, 0.9), loss, 200)


@twins(
    kinds=LOSS | EXPLOSION, layers=("head",), onset=123, by=173,
    why="the learning rate of the last layer's group, times 1000",
    healthy="graph isomorphism network with two groups of parameters",
)  # fmt: skip
def rate_of_the_head(log: Log, faulty: bool) -> None:
    g, model = generator(log), models.SumGraph()
    body = [*model.embed.parameters(), *model.layers.parameters()]
    groups: list[dict[str, Any]] = [{"params": body}, {"params": model.head.parameters()}]
    optimizer = Adam(groups, 2e-3)
    change = at_step(123, faulty, lambda: optimizer.param_groups[1].update(lr=2.0))
    fit(log, model, optimizer, lambda: node_loss(model, graphs(g)), 220, before=change)


@twins(
    kinds=LOSS | TREND | {"loss_stuck"}, onset=171, by=201,
    why="classes are random from a step on", healthy="MLP-Mixer, AdamW",
)  # fmt: skip
def classes_random_from_a_step(log: Log, faulty: bool) -> None:
    model, g = models.Mixer(depth=2), generator(log)

    def alter(step: int, images: Tensor, classes: Tensor) -> None:
        if faulty and step >= 171:
            classes[:] = torch.randint(10, (32,), generator=g)

    fit(log, model, AdamW(model.parameters(), 2e-3), class_loss(log, model, alter), 300)


@twins(
    kinds=IDLE | VANISHING | {"learning_rate_zero"}, by=150,
    why="the learning rate of all adapters is 0", healthy="adapters of low rank learn",
)  # fmt: skip
def adapters_rate_zero(log: Log, faulty: bool) -> None:
    model = nn.Sequential(nn.Flatten(), *mlp(64, 48, 48, 10))
    loss = class_loss(log, model)
    optimizer: Optimizer = Adam(model.parameters(), 2e-3)
    for _ in range(60):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    for index in (1, 3):
        model[index] = models.Adapter(cast(nn.Linear, model[index]))
    model[5].requires_grad_(False)
    learning = [p for p in model.parameters() if p.requires_grad]
    fit(log, model, AdamW(learning, 0.0 if faulty else 2e-3), loss, 200)


@twins(
    kinds=IDLE | VANISHING | {"loss_stuck"}, onset=90, by=190,
    why="a mask over the targets is all 0: so is the loss",
    healthy="most of the targets are masked, sometimes all of a batch",
)  # fmt: skip
def mask_hides_everything(log: Log, faulty: bool) -> None:
    model, g, data = models.Mixer(depth=2), generator(log), batches(log, 32, *digits())
    steps = iter(range(10**6))

    def loss() -> Tensor:
        images, classes = next(data)
        mask = (torch.rand(32, generator=g) < 0.1).float()
        if faulty and next(steps) >= 90:
            mask.zero_()
        return (mask * F.cross_entropy(model(images), classes, reduction="none")).mean()

    fit(log, model, AdamW(model.parameters(), 2e-3), loss, 240)


# --- healthy, without a faulty twin --------------------------------------------------------------

LABELS["regression_at_its_floor"] = Label(why="no noise: Adam wanders at a millionth of the loss")
LABELS["curve_at_its_floor"] = Label(why="the same with all data in each step: late spikes")
LABELS["policy_optimized_by_default"] = Label(why="PPO as in Stable-Baselines3, on a cart and pole")


def _regression(log: Log, act: type[nn.Module], rate: float, size: int) -> None:
    g, model = generator(log), mlp(4, 32, 32, 1, activation=act)
    x = torch.randn(256, 4, generator=g)
    data = batches(log, size, x, 0.3 * (x[:, :1] - 0.5 * x[:, 1:2]))

    def loss() -> Tensor:
        some, wanted = next(data)
        return F.mse_loss(model(some), wanted)

    fit(log, model, Adam(model.parameters(), rate), loss, 2000)


@run
def regression_at_its_floor(log: Log) -> None:
    _regression(log, nn.GELU, 1e-2, 64)


@run
def curve_at_its_floor(log: Log) -> None:
    _regression(log, nn.Tanh, 3e-3, 256)


def _cart(g: torch.Generator, model: models.Policy, count: int) -> Iterator[Any]:
    """Steps of a cart with a pole: observation, action, its log-probability, value, and the end."""
    state, age = _upright(g), 0
    while True:
        steps = []
        for _ in range(count):
            with torch.no_grad():
                logits, value = model(state[None])
            action = int(torch.multinomial(logits[0].softmax(0), 1, generator=g))
            chance = float(logits[0].log_softmax(0)[action])
            before, (x, v, angle, turn) = state, state.tolist()
            force = (10.0 if action else -10.0) + 0.05 * turn**2 * math.sin(angle)
            fall = 9.8 * math.sin(angle) - math.cos(angle) * force / 1.1
            fall /= 0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1)
            push = force / 1.1 - 0.05 * fall * math.cos(angle) / 1.1
            state = torch.tensor([x + 0.02 * v, v + 0.02 * push, angle + 0.02 * turn, turn])
            state[3] += 0.02 * fall
            age += 1
            ended = abs(float(state[0])) > 2.4 or abs(float(state[2])) > 0.2095 or age == 500
            steps.append((before, action, chance, float(value), ended))
            if ended:
                state, age = _upright(g), 0
        yield steps


def _upright(g: torch.Generator) -> Tensor:
    return 0.1 * torch.rand(4, generator=g) - 0.05


@run
def policy_optimized_by_default(log: Log) -> None:
    g, model = generator(log), models.Policy(4, 2)
    optimizer, logger = Adam(model.parameters(), 3e-4, eps=1e-5), log.attach(model)
    for steps, _ in zip(_cart(g, model, 2048), range(2), strict=False):
        states = torch.stack([step[0] for step in steps])
        actions, chances, values, ends = (
            torch.tensor(c) for c in list(zip(*steps, strict=True))[1:]
        )
        gains, gain = torch.zeros(len(steps)), 0.0
        for t in reversed(range(len(steps))):
            goes_on = 0.0 if ends[t] else 1.0
            after = float(values[t + 1]) if t + 1 < len(steps) else float(values[t])
            gain = 1 + 0.99 * after * goes_on - float(values[t]) + 0.99 * 0.95 * goes_on * gain
            gains[t] = gain
        returns = gains + values
        for _ in range(10):
            for some in torch.randperm(len(steps), generator=g).split(64):
                logits, said = model(states[some])
                policy = torch.distributions.Categorical(logits=logits)
                ratio = (policy.log_prob(actions[some]) - chances[some]).exp()
                edge = gains[some]
                edge = (edge - edge.mean()) / (edge.std() + 1e-8)
                least = torch.min(ratio * edge, ratio.clamp(0.8, 1.2) * edge)
                loss = 0.5 * F.mse_loss(said, returns[some]) - least.mean()
                optimizer.zero_grad()
                loss.backward()
                log.losses.append(loss.item())
                logger.log(loss=loss.item())
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
