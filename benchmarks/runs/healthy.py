"""Healthy runs; see the labels for the oddities of each."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from runs.models import (
    ActorCritic,
    Field,
    Flow,
    GraphTransformer,
    QuantizedMLP,
    Seq2Seq,
    SparseAutoencoder,
    Speech,
    Spiking,
    StateSpace,
    UNet,
    ctc,
    discs,
    graphs,
    mixed_features,
    moons,
    node_loss,
    recall,
    residual,
    reversal,
    segmentation_loss,
    spirals,
    utterances,
    walk,
)
from runs.training import Log, batches, digits, fit, generator, mlp, run, warm_cosine


@run
def seq2seq_teacher_forcing(log: Log) -> None:
    g, model = generator(log), Seq2Seq()

    def loss() -> Tensor:
        source, given, target = reversal(g)
        return F.cross_entropy(model(source, given).flatten(0, 1), target.flatten())

    fit(log, model, Adam(model.parameters(), 3e-3), loss, 400, clip=1.0)


@run
def wgan_gradient_penalty(log: Log) -> None:
    g = generator(log)
    maker, critic = mlp(4, 64, 64, 2), mlp(2, 64, 64, 1, activation=nn.LeakyReLU)
    of_maker = Adam(maker.parameters(), 5e-4, (0.5, 0.9))
    of_critic = Adam(critic.parameters(), 5e-4, (0.5, 0.9))
    maker_logger, critic_logger = log.attach(maker, of_maker), log.attach(critic, of_critic)
    for _ in range(120):
        for _ in range(5):
            real, fake = 2 * moons(g, 64), maker(torch.randn(64, 4, generator=g)).detach()
            between = (fake + torch.rand(64, 1, generator=g) * (real - fake)).requires_grad_()
            (grad,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            penalty = 10 * ((grad.norm(dim=1) - 1) ** 2).mean()
            loss = critic(fake).mean() - critic(real).mean() + penalty
            of_critic.zero_grad()
            loss.backward()
            critic_logger.log(loss=loss.item())
            of_critic.step()
        loss = -critic(maker(torch.randn(64, 4, generator=g))).mean()
        of_maker.zero_grad()
        loss.backward()
        maker_logger.log(loss=loss.item())
        log.losses.append(loss.item())
        of_maker.step()


@run
def image_text_contrastive(log: Log) -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image = nn.Sequential(
                nn.Conv2d(1, 16, 3, 2, 1), nn.GELU(), nn.Flatten(), nn.Linear(256, 32)
            )
            self.words, self.text = nn.Embedding(40, 32), nn.GRU(32, 32, batch_first=True)
            self.temperature = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

        def forward(self, images: Tensor, captions: Tensor) -> Tensor:
            a = F.normalize(self.image(images), dim=1)
            b = F.normalize(self.text(self.words(captions))[0][:, -1], dim=1)
            logits: Tensor = self.temperature.exp() * a @ b.T
            return logits

    model, g, (images, classes) = Towers(), generator(log), digits()
    data = batches(log, 48, images, classes)

    def loss() -> Tensor:
        pictures, shown = next(data)
        noise = torch.randint(10, 40, (48, 3), generator=g)
        logits, same = model(pictures, torch.cat([noise, shown[:, None]], 1)), torch.arange(48)
        return (F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same)) / 2

    fit(log, model, AdamW(model.parameters(), 1e-3, weight_decay=0.1), loss, 300)


@run
def unet_segmentation(log: Log) -> None:
    g, model = generator(log), UNet()
    optimizer = Adam(model.parameters(), 2e-3)
    fit(log, model, optimizer, lambda: segmentation_loss(model, discs(g)), 250)


@run
def ctc_speech(log: Log) -> None:
    g, model = generator(log), Speech()

    def loss() -> Tensor:
        spectra, said = utterances(g)
        return ctc(model(spectra), said)

    fit(log, model, AdamW(model.parameters(), 3e-3), loss, 300, clip=5.0)


@run
def graph_transformer(log: Log) -> None:
    g, model = generator(log), GraphTransformer()
    optimizer = AdamW(model.parameters(), 1e-3)
    schedule = warm_cosine(30, 300)
    fit(log, model, optimizer, lambda: node_loss(model, graphs(g)), 300, schedule=schedule)


@run
def neural_ode(log: Log) -> None:
    g, model = generator(log), Field()

    def loss() -> Tensor:
        start, path = spirals(g)
        error: Tensor = (model(start) - path).abs().mean()
        return error

    fit(log, model, Adam(model.parameters(), 5e-3), loss, 300)


@run
def coupling_flow(log: Log) -> None:
    g, model = generator(log), Flow()
    fit(log, model, Adam(model.parameters(), 2e-3), lambda: -model(moons(g)).mean(), 400)


@run
def actor_critic(log: Log) -> None:
    g, model = generator(log), ActorCritic()
    actor, critic = Adam(model.actor.parameters(), 3e-3), Adam(model.critic.parameters(), 1e-2)
    logger = log.attach(model)
    for _ in range(200):
        states, actions, returns = walk(model, g)
        logits, values = model(states)
        taken = logits.log_softmax(-1).gather(1, actions[:, None])[:, 0]
        advantage = (returns - values).detach()
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        loss = F.mse_loss(values, returns) - (taken * advantage).mean() - 0.01 * entropy
        actor.zero_grad()
        critic.zero_grad()
        loss.backward()
        logger.log(loss=loss.item())
        log.losses.append(loss.item())
        actor.step()
        critic.step()


@run
def quantization_aware(log: Log) -> None:
    model, data = QuantizedMLP(), batches(log, 32, *digits())

    def loss() -> Tensor:
        images, classes = next(data)
        return F.cross_entropy(model(images), classes)

    def switch(step: int) -> None:
        model.quantize1.on = model.quantize2.on = step >= 100

    fit(log, model, SGD(model.parameters(), 0.05, 0.9), loss, 300, before=switch)


@run
def distillation(log: Log) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = mlp(64, 128, 128, 10), mlp(64, 24, 10)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                wanted = self.teacher(x.flatten(1))
            return self.student(x.flatten(1)), wanted

    model, data = Pair(), batches(log, 32, *digits())
    optimizer = Adam(model.teacher.parameters(), 2e-3)
    for _ in range(150):
        images, classes = next(data)
        optimizer.zero_grad()
        F.cross_entropy(model.teacher(images.flatten(1)), classes).backward()
        optimizer.step()
    model.teacher.requires_grad_(False).eval()

    def loss() -> Tensor:
        images, classes = next(data)
        logits, wanted = model(images)
        soft = F.kl_div((logits / 4).log_softmax(1), (wanted / 4).softmax(1), reduction="batchmean")
        return 0.1 * F.cross_entropy(logits, classes) + 0.9 * 16 * soft

    fit(log, model, Adam(model.student.parameters(), 2e-3), loss, 300)


@run
def mixture_density(log: Log) -> None:
    g, model = generator(log), mlp(1, 128, 15)

    def loss() -> Tensor:
        y = 2 * torch.rand(128, 1, generator=g) - 1
        x = y + 0.3 * (2 * math.pi * y).sin() + 0.03 * torch.randn(y.shape, generator=g)
        weight, mean, log_std = model(x).chunk(3, 1)
        log_p = weight.log_softmax(1) - log_std - 0.5 * ((y - mean) / log_std.exp()) ** 2
        nll: Tensor = -log_p.logsumexp(1).mean()
        return nll

    fit(log, model, Adam(model.parameters(), 5e-3), loss, 500)


@run
def triplet_siamese(log: Log) -> None:
    model, g, (images, classes) = mlp(64, 64, 16), generator(log), digits()
    by_class = [images[classes == c].flatten(1) for c in range(10)]

    def draw(c: int) -> Tensor:
        return by_class[c][torch.randint(len(by_class[c]), (), generator=g)]

    def loss() -> Tensor:
        chosen = [torch.randperm(10, generator=g)[:2].tolist() for _ in range(16)]
        anchor = torch.stack([draw(a) for a, _ in chosen])
        near = torch.stack([draw(a) for a, _ in chosen])
        far = torch.stack([draw(b) for _, b in chosen])
        return F.triplet_margin_loss(model(anchor), model(near), model(far), margin=1.0)

    fit(log, model, Adam(model.parameters(), 1e-3), loss, 400)


@run
def meta_learning(log: Log) -> None:
    g, model = generator(log), mlp(1, 40, 40, 1)

    def loss() -> Tensor:
        total = torch.zeros(())
        for _ in range(4):
            height, phase = torch.rand(2, generator=g) * torch.tensor([4.9, 3.1]) + 0.1
            x = 10 * torch.rand(20, 1, generator=g) - 5
            y = height * (x + phase).sin()
            fast: dict[str, Tensor] = dict(model.named_parameters())
            inner = F.mse_loss(torch.func.functional_call(model, fast, x[:10]), y[:10])
            grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            moved = zip(fast.items(), grads, strict=True)
            fast = {name: p - 0.01 * grad for (name, p), grad in moved}
            total = total + F.mse_loss(torch.func.functional_call(model, fast, x[10:]), y[10:])
        return total / 4

    fit(log, model, Adam(model.parameters(), 1e-3), loss, 300)


@run
def sparse_autoencoder(log: Log) -> None:
    g, model = generator(log), SparseAutoencoder(8)
    directions = F.normalize(torch.randn(96, 32, generator=g), dim=1)

    def loss() -> Tensor:
        x = mixed_features(g, directions)
        return F.mse_loss(model(x)[0], x)

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 400)


@run
def state_space(log: Log) -> None:
    g, model = generator(log), StateSpace()

    def loss() -> Tensor:
        given, wanted = recall(g)
        return F.cross_entropy(model(given).flatten(0, 1), wanted.flatten())

    optimizer = AdamW(model.parameters(), 5e-3)
    fit(log, model, optimizer, loss, 200, clip=1.0, schedule=warm_cosine(20, 200))


@run
def spiking_surrogate(log: Log) -> None:
    model, data = Spiking(), batches(log, 32, *digits())

    def loss() -> Tensor:
        images, classes = next(data)
        return F.cross_entropy(model(images), classes)

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 250)


@run
def matrix_factorization(log: Log) -> None:
    class Ratings(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.user, self.item = nn.Embedding(400, 8), nn.Embedding(300, 8)
            self.user_bias, self.item_bias = nn.Embedding(400, 1), nn.Embedding(300, 1)
            for table in (self.user, self.item):
                nn.init.normal_(table.weight, std=0.05)
            for table in (self.user_bias, self.item_bias):
                nn.init.zeros_(table.weight)

        def forward(self, u: Tensor, i: Tensor) -> Tensor:
            inner = (self.user(u) * self.item(i)).sum(-1)
            rating: Tensor = inner + (self.user_bias(u) + self.item_bias(i))[:, 0]
            return rating

    g, model = generator(log), Ratings()
    tastes, kinds = torch.randn(400, 3, generator=g), torch.randn(300, 3, generator=g)

    def loss() -> Tensor:
        u = torch.randint(400, (128,), generator=g)
        i = torch.randint(300, (128,), generator=g)
        rating = (tastes[u] * kinds[i]).sum(1) + 0.3 * torch.randn(128, generator=g)
        return F.mse_loss(model(u, i), rating)

    fit(log, model, Adam(model.parameters(), 1e-2), loss, 500)


@run
def physics_informed(log: Log) -> None:
    g, model = generator(log), mlp(1, 32, 32, 1, activation=nn.Tanh)
    optimizer = Adam(model.parameters(), 3e-3)

    def loss() -> Tensor:
        return residual(model, torch.rand(64, 1, generator=g))

    fit(log, model, optimizer, loss, 400, schedule=lambda step: 0.5 ** (step // 150))


@run
def layerwise_rates_ema(log: Log) -> None:
    model, data = mlp(64, 64, 64, 64, 10, activation=nn.GELU), batches(log, 32, *digits())
    rates = (1e-5, 1e-4, 1e-3, 1e-3)
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    optimizers = [
        AdamW(layers[0].parameters(), rates[0]),
        AdamW(layers[1].parameters(), rates[1]),
        AdamW([*layers[2].parameters(), *layers[3].parameters()], rates[2]),
    ]
    averaged, logger = copy.deepcopy(model).requires_grad_(False), log.attach(model)
    for step in range(350):
        images, classes = next(data)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(images.flatten(1)), classes)
        loss.backward()
        logger.log(loss=loss.item())
        log.losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(averaged.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.05)
            if step % 50 == 0:
                model.eval()
                model(images.flatten(1))
                model.train()


@run
def frozen_batch_norm(log: Log) -> None:
    images, classes = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    data, first = batches(log, 32, images, classes), Adam(model.parameters(), 2e-3)

    def loss() -> Tensor:
        pictures, shown = next(data)
        return F.cross_entropy(model(pictures), shown)

    for _ in range(100):
        first.zero_grad()
        loss().backward()
        first.step()
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            module.eval().requires_grad_(False)
    data = batches(log, 32, images.flip(3), classes)
    learning = [p for p in model.parameters() if p.requires_grad]
    fit(log, model, SGD(learning, 0.01, 0.9), loss, 300)
