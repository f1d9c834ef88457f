"""Further healthy runs; see the labels for the oddities of each."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from runs.further_models import Rows, Tokens
from runs.models import moons, recall
from runs.training import Log, batches, digits, fit, generator, mlp, run


def _digits_run(
    log: Log, model: nn.Module, optimizer: Optimizer, steps: int, **options: object
) -> None:
    data = batches(log, 32, *digits())

    def loss() -> Tensor:
        images, classes = next(data)
        return F.cross_entropy(model(images), classes)

    fit(log, model, optimizer, loss, steps, **options)  # type: ignore[arg-type]


def _pictures(*widths: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), *mlp(*widths))


@run
def tied_lstm(log: Log) -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(8, 48), nn.LSTM(48, 48, batch_first=True)
            self.head = nn.Linear(48, 8)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = self.head(self.lstm(self.embed(tokens))[0])
            return logits

    g, model = generator(log), Language()

    def loss() -> Tensor:
        given, wanted = recall(g)
        return F.cross_entropy(model(given).flatten(0, 1), wanted.flatten())

    fit(log, model, Adam(model.parameters(), 5e-3), loss, 400, clip=1.0)


@run
def actor_of_growing_value(log: Log) -> None:
    g = generator(log)
    actor, critic = mlp(3, 48, 2), mlp(4, 48, 48, 1)
    slow = copy.deepcopy(critic).requires_grad_(False)
    of_actor, of_critic = Adam(actor.parameters(), 1e-3), Adam(critic.parameters(), 3e-3)
    actor_logger, critic_logger = log.attach(actor, of_actor), log.attach(critic, of_critic)

    def act(state: Tensor) -> Tensor:
        mean, log_std = actor(state).chunk(2, 1)
        noise = torch.randn(mean.shape, generator=g)
        action: Tensor = (mean + log_std.clamp(-4, 0).exp() * noise).tanh()
        return action

    for _ in range(400):
        state, following = torch.randn(2, 64, 3, generator=g)
        action = 2 * torch.rand(64, 1, generator=g) - 1
        with torch.no_grad():
            reward = 1 - (action - state[:, :1].tanh()) ** 2
            target = reward + 0.95 * slow(torch.cat([following, act(following)], 1))
        loss = F.mse_loss(critic(torch.cat([state, action], 1)), target)
        of_critic.zero_grad()
        loss.backward()
        critic_logger.log(loss=loss.item())
        of_critic.step()
        loss = -critic(torch.cat([state, act(state)], 1)).mean()
        of_actor.zero_grad()
        loss.backward()
        actor_logger.log(loss=loss.item())
        log.losses.append(loss.item())
        of_actor.step()
        with torch.no_grad():
            for p, q in zip(slow.parameters(), critic.parameters(), strict=True):
                p.lerp_(q, 0.05)


@run
def learned_variance(log: Log) -> None:
    g, model = generator(log), mlp(4, 64, 64, 2, activation=nn.SiLU)

    def loss() -> Tensor:
        x = torch.randn(128, 4, generator=g)
        y = x[:, 0].sin() + 0.05 * (1 + x[:, 1].abs()) * torch.randn(128, generator=g)
        mean, log_variance = model(x).unbind(1)
        return F.gaussian_nll_loss(mean, y, log_variance.exp())

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 400)


@run
def score_matching(log: Log) -> None:
    g, model = generator(log), mlp(3, 96, 96, 2, activation=nn.SiLU)

    def loss() -> Tensor:
        noise, x = torch.randn(128, 2, generator=g), moons(g)
        sigma = (4 * torch.rand(128, 1, generator=g) - 4).exp()
        score = model(torch.cat([x + sigma * noise, sigma.log()], 1))
        error: Tensor = ((score + noise) ** 2).sum(1).mean()
        return error

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 400)


@run
def vector_quantized(log: Log) -> None:
    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = mlp(64, 64, 32), mlp(32, 64, 64)
            self.codes = nn.Embedding(64, 8)
            nn.init.normal_(self.codes.weight, std=0.3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            z = self.encoder(x).unflatten(1, (4, 8))
            code = self.codes(torch.cdist(z, self.codes.weight[None]).argmin(-1))
            commit = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
            return self.decoder((z + (code - z).detach()).flatten(1)), commit

    model, data = Codes(), batches(log, 64, digits()[0].flatten(1))

    def loss() -> Tensor:
        (x,) = next(data)
        y, commit = model(x)
        total: Tensor = F.mse_loss(y, x) + commit
        return total

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 400)


@run
def spectral_norm_gan(log: Log) -> None:
    g, maker = generator(log), mlp(4, 64, 64, 2)
    critic = nn.Sequential(
        spectral_norm(nn.Linear(2, 64)), nn.LeakyReLU(0.1),
        spectral_norm(nn.Linear(64, 64)), nn.LeakyReLU(0.1), spectral_norm(nn.Linear(64, 1)),
    )  # fmt: skip
    of_maker = Adam(maker.parameters(), 5e-4, (0.0, 0.9))
    of_critic = Adam(critic.parameters(), 1e-3, (0.0, 0.9))
    maker_logger, critic_logger = log.attach(maker, of_maker), log.attach(critic, of_critic)
    for _ in range(300):
        fake = maker(torch.randn(64, 4, generator=g)).detach()
        loss = F.relu(1 - critic(3 * moons(g, 64))).mean() + F.relu(1 + critic(fake)).mean()
        of_critic.zero_grad()
        loss.backward()
        critic_logger.log(loss=loss.item())
        of_critic.step()
        log.losses.append(loss.item())
        loss = -critic(maker(torch.randn(64, 4, generator=g))).mean()
        of_maker.zero_grad()
        loss.backward()
        maker_logger.log(loss=loss.item())
        of_maker.step()


@run
def weight_normalized(log: Log) -> None:
    model = _pictures(64, 64, 64, 10)
    for layer in model:
        if isinstance(layer, nn.Linear):
            weight_norm(layer)
    _digits_run(log, model, Adam(model.parameters(), 2e-3), 300)


@run
def pruned_by_l1(log: Log) -> None:
    model, data = _pictures(64, 128, 10), batches(log, 64, *digits())

    def loss() -> Tensor:
        images, classes = next(data)
        size = sum((p.abs().sum() for p in model.parameters()), torch.zeros(()))
        return F.cross_entropy(model(images), classes) + 1e-3 * size

    fit(log, model, Adam(model.parameters(), 3e-3), loss, 400)


@run
def modular_addition(log: Log) -> None:
    g = generator(log)
    pairs = torch.cartesian_prod(torch.arange(31), torch.arange(31))
    pairs = pairs[torch.randperm(len(pairs), generator=g)[:400]]
    model = nn.Sequential(nn.Embedding(31, 48), nn.Flatten(), *mlp(96, 128, 31))

    def loss() -> Tensor:
        return F.cross_entropy(model(pairs), pairs.sum(1) % 31)

    fit(log, model, AdamW(model.parameters(), 1e-3, weight_decay=1.0), loss, 400)


class Lion(Optimizer):
    """Steps of one size, by the sign of a running mean."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                p.sub_(group["lr"] * (0.9 * mean + 0.1 * p.grad).sign())
                mean.lerp_(p.grad, 0.01)


@run
def lion(log: Log) -> None:
    model = Rows()
    _digits_run(log, model, Lion(model.parameters(), 3e-4), 300)


@run
def adagrad(log: Log) -> None:
    model = _pictures(64, 64, 64, 10)
    _digits_run(log, model, Adagrad(model.parameters(), 2e-2), 350)


def _chain(log: Log, discount: float, actions: int) -> None:
    """Values of a chain of 12 places, of which the last gives 1; the target net follows slowly."""
    g, model = generator(log), mlp(12, 48, actions)
    slow = copy.deepcopy(model).requires_grad_(False)

    def loss() -> Tensor:
        place = torch.randint(12, (64,), generator=g)
        action = torch.randint(2, (64,), generator=g)
        move = torch.where(action == 1, 1, -1 if actions == 2 else 0)
        following = (place + move).clamp(0, 11)
        with torch.no_grad():
            ahead = slow(F.one_hot(following, 12).float()).amax(1)
            target = (following == 11).float() + discount * ahead
        said = model(F.one_hot(place, 12).float())
        chosen = said.gather(1, action[:, None])[:, 0] if actions == 2 else said[:, 0]
        return F.mse_loss(chosen, target)

    def follow(step: int) -> None:
        if step % 8 == 0:
            slow.load_state_dict(model.state_dict())

    fit(log, model, Adam(model.parameters(), 3e-3), loss, 400, before=follow)


@run
def q_learning(log: Log) -> None:
    _chain(log, 0.97, 2)


@run
def value_learning(log: Log) -> None:
    _chain(log, 0.95, 1)


@run
def mixture_of_experts(log: Log) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.head = nn.Linear(64, 4), nn.Linear(32, 10)
            self.experts = nn.ModuleList(mlp(64, 32, 32) for _ in range(4))

        def forward(self, images: Tensor) -> Tensor:
            x = images.flatten(1)
            p = self.router(x).softmax(1)
            p = p * (p >= p.topk(2).values[:, -1:])
            mixed = sum(p[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
            logits: Tensor = self.head(mixed)
            return logits

    model = Experts()
    _digits_run(log, model, Adam(model.parameters(), 2e-3), 300)


@run
def simsiam(log: Log) -> None:
    encoder = nn.Sequential(
        nn.Linear(64, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 32), nn.BatchNorm1d(32)
    )
    model = nn.ModuleDict({"encoder": encoder, "predictor": mlp(32, 16, 32)})
    g, data = generator(log), batches(log, 64, digits()[0].flatten(1))

    def loss() -> Tensor:
        (x,) = next(data)
        a, b = (encoder(x + 0.5 * torch.randn(x.shape, generator=g)) for _ in range(2))
        p, q = model["predictor"](a), model["predictor"](b)
        near = F.cosine_similarity(p, b.detach()) + F.cosine_similarity(q, a.detach())
        return -near.mean() / 2

    fit(log, model, SGD(model.parameters(), 0.05, 0.9), loss, 300)


@run
def layerwise_decay(log: Log) -> None:
    model = Rows(8)
    parts = [nn.ModuleList([model.embed]), *model.blocks, nn.ModuleList([model.norm, model.head])]
    groups = [
        {"params": part.parameters(), "lr": 2e-3 * 0.7 ** (9 - i)} for i, part in enumerate(parts)
    ]
    _digits_run(log, model, AdamW([*groups, {"params": [model.place], "lr": 1e-4}]), 200)


@run
def exponential_warm_up(log: Log) -> None:
    model = Rows()

    def schedule(step: int) -> float:
        return float(10.0 ** (3 * min(step, 100) / 100 - 3)) * min(
            1.0, math.exp((100 - step) / 150)
        )

    _digits_run(log, model, AdamW(model.parameters(), 1e-3), 300, schedule=schedule)


@run
def hard_batches(log: Log) -> None:
    g, model, drawn = generator(log), mlp(16, 64, 64, 1, activation=nn.GELU), iter(range(10**6))
    weights = torch.randn(16, generator=g)

    def loss() -> Tensor:
        x = torch.randn(64, 16, generator=g)
        noise = 0.52 if next(drawn) % 40 == 39 else 0.3
        y = (x @ weights / 4).tanh() + noise * torch.randn(64, generator=g)
        return F.mse_loss(model(x)[:, 0], y)

    fit(log, model, Adam(model.parameters(), 1e-3), loss, 400)


@run
def curriculum(log: Log) -> None:
    model, g, data, drawn = Rows(), generator(log), batches(log, 32, *digits()), iter(range(10**6))

    def loss() -> Tensor:
        images, classes = next(data)
        noise = 0.5 * (next(drawn) // 100)
        return F.cross_entropy(
            model(images + noise * torch.randn(images.shape, generator=g)), classes
        )

    fit(log, model, AdamW(model.parameters(), 2e-3), loss, 400)


@run
def trunk_frozen_late(log: Log) -> None:
    g, model = generator(log), Tokens(8, 48)

    def loss() -> Tensor:
        given, wanted = recall(g)
        return F.cross_entropy(model(given).flatten(0, 1), wanted.flatten())

    def freeze(step: int) -> None:
        if step == 153:
            model.requires_grad_(False)
            model.head.requires_grad_(True)

    fit(log, model, AdamW(model.parameters(), 3e-3), loss, 300, before=freeze)


@run
def autocast_bfloat16(log: Log) -> None:
    model, data = Rows(), batches(log, 32, *digits())

    def loss() -> Tensor:
        images, classes = next(data)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(images)
        return F.cross_entropy(logits.float(), classes)

    fit(log, model, AdamW(model.parameters(), 2e-3), loss, 250)


@run
def rezero(log: Log) -> None:
    model = Rows(6, rezero=True)
    _digits_run(log, model, Adam(model.parameters(), 2e-3), 250)


@run
def skip_init(log: Log) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.scale = mlp(32, 32, 32), nn.Parameter(torch.full((1,), 1e-3))

        def forward(self, x: Tensor) -> Tensor:
            added: Tensor = self.scale * self.layers(x)
            return x + added

    blocks = [Scaled() for _ in range(30)]
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), *blocks, nn.Linear(32, 10))
    _digits_run(log, model, AdamW(model.parameters(), 1e-3), 200)


@run
def targets_of_large_unit(log: Log) -> None:
    g, model = generator(log), mlp(8, 64, 1)
    slopes = 1e5 * torch.randn(8, generator=g)

    def loss() -> Tensor:
        x = torch.randn(64, 8, generator=g)
        return F.mse_loss(model(x)[:, 0], x @ slopes + 2e5)

    fit(log, model, Adam(model.parameters(), 1e-2), loss, 300)


@run
def curve_by_heart(log: Log) -> None:
    model, x = mlp(1, 32, 32, 1, activation=nn.Tanh), torch.linspace(-3, 3, 64)[:, None]
    adam = Adam(model.parameters(), 1e-2)
    fit(log, model, adam, lambda: F.mse_loss(model(x), x.sin()), 800)
