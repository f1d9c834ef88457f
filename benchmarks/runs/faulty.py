"""Runs with faults that occur in practice; see the labels for each."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

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
    reversal,
    segmentation_loss,
    spirals,
    utterances,
    walk,
)
from runs.training import Log, batches, digits, fit, generator, mlp, run


@run
def encoder_not_in_optimizer(log: Log) -> None:
    g, model = generator(log), UNet()
    decoder = [*model.up2.parameters(), *model.up1.parameters(), *model.out.parameters()]
    fit(log, model, Adam(decoder, 2e-3), lambda: segmentation_loss(model, discs(g)), 150)


@run
def encoder_under_no_grad(log: Log) -> None:
    g, model = generator(log), Seq2Seq()
    model.encoder_learns = False

    def loss() -> Tensor:
        source, given, target = reversal(g)
        return F.cross_entropy(model(source, given).flatten(0, 1), target.flatten())

    fit(log, model, Adam(model.parameters(), 3e-3), loss, 200, clip=1.0)


@run
def head_optimizer_never_stepped(log: Log) -> None:
    g, model = generator(log), ActorCritic()
    actor, critic = Adam(model.actor.parameters(), 3e-3), Adam(model.critic.parameters(), 1e-2)
    logger = log.attach(model)
    for _ in range(150):
        states, actions, returns = walk(model, g)
        logits, values = model(states)
        taken = logits.log_softmax(-1).gather(1, actions[:, None])[:, 0]
        loss = F.mse_loss(values, returns) - (taken * (returns - values).detach()).mean()
        actor.zero_grad()
        critic.zero_grad()
        loss.backward()
        logger.log(loss=loss.item())
        log.losses.append(loss.item())
        actor.step()


@run
def pooler_unused(log: Log) -> None:
    g, model = generator(log), GraphTransformer()
    model.pooler = nn.Linear(32, 32)
    optimizer = AdamW(model.parameters(), 1e-3)
    fit(log, model, optimizer, lambda: node_loss(model, graphs(g)), 200)


@run
def ctc_impossible_length(log: Log) -> None:
    g, model = generator(log), Speech()
    drawn = iter(range(10**6))

    def loss() -> Tensor:
        spectra, said = utterances(g)
        if next(drawn) == 117:
            return ctc(model(spectra), said.repeat(1, 5))
        return ctc(model(spectra), said)

    fit(log, model, AdamW(model.parameters(), 3e-3), loss, 180)


@run
def quantization_scale_zero(log: Log) -> None:
    model, data = QuantizedMLP(), batches(log, 32, *digits())
    model.quantize1.on = model.quantize2.on = True

    def loss() -> Tensor:
        images, classes = next(data)
        return F.cross_entropy(model(images), classes)

    def close(step: int) -> None:
        model.gate = 0.0 if step == 133 else 1.0

    fit(log, model, SGD(model.parameters(), 0.05, 0.9), loss, 200, before=close)


@run
def flow_without_bound(log: Log) -> None:
    g, model = generator(log), Flow(bounded=False)
    fit(log, model, Adam(model.parameters(), 6e-2), lambda: -model(moons(g)).mean(), 250)


@run
def state_space_unstable(log: Log) -> None:
    g, model = generator(log), StateSpace(decay=1.5)

    def loss() -> Tensor:
        given, wanted = recall(g)
        return F.cross_entropy(model(given).flatten(0, 1), wanted.flatten())

    fit(log, model, AdamW(model.parameters(), 5e-3), loss, 120)


@run
def ode_step_too_long(log: Log) -> None:
    g, model = generator(log), Field(step=2.5, activation=nn.SiLU)

    def loss() -> Tensor:
        start, path = spirals(g)
        error: Tensor = (model(start) - path).abs().mean()
        return error

    fit(log, model, Adam(model.parameters(), 5e-3), loss, 150)


@run
def student_left_in_eval(log: Log) -> None:
    teacher = mlp(64, 128, 10)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(48, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 10),
    )  # fmt: skip
    data, optimizer = batches(log, 32, *digits()), Adam(teacher.parameters(), 2e-3)
    for _ in range(150):
        images, classes = next(data)
        optimizer.zero_grad()
        F.cross_entropy(teacher(images.flatten(1)), classes).backward()
        optimizer.step()

    def loss() -> Tensor:
        images, _ = next(data)
        with torch.no_grad():
            wanted = teacher(images.flatten(1))
        return F.cross_entropy(model(images), wanted.softmax(1))

    def validate(step: int) -> None:
        if step == 83:
            model.eval()
            with torch.no_grad():
                model(next(data)[0])

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 300, before=validate)


@run
def first_batch_forever(log: Log) -> None:
    g, model = generator(log), Speech()
    examples = [utterances(g) for _ in range(20)]

    def loss() -> Tensor:
        spectra, said = next(iter(examples))
        return ctc(model(spectra.clone()), said)

    fit(log, model, AdamW(model.parameters(), 1e-3), loss, 320)


def _set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


@run
def rate_spike(log: Log) -> None:
    g, model = generator(log), GraphTransformer()
    optimizer = AdamW(model.parameters(), 1e-3)

    def spike(step: int) -> None:
        _set_rate(optimizer, 0.2 if 157 <= step < 160 else 1e-3)

    fit(log, model, optimizer, lambda: node_loss(model, graphs(g)), 300, before=spike)


@run
def target_spike(log: Log) -> None:
    g, model = generator(log), mlp(16, 64, 64, 1, activation=nn.GELU)
    weights, drawn = torch.randn(16, generator=g), iter(range(10**6))

    def loss() -> Tensor:
        x = torch.randn(64, 16, generator=g)
        y = (x @ weights / 4).tanh() + 0.1 * torch.randn(64, generator=g)
        unit = 100 if next(drawn) == 213 else 1
        return F.mse_loss(model(x)[:, 0], unit * y)

    fit(log, model, SGD(model.parameters(), 0.01, 0.9), loss, 350, clip=1.0)


@run
def schedule_ends_early(log: Log) -> None:
    g, model = generator(log), UNet()
    optimizer = SGD(model.parameters(), 1e-2, 0.9)

    def schedule(step: int) -> float:
        return float(max(0.0, 1 - step / 83) ** 0.9)

    def loss() -> Tensor:
        return segmentation_loss(model, discs(g, 4))

    fit(log, model, optimizer, loss, 320, schedule=schedule)


@run
def targets_misaligned(log: Log) -> None:
    g, model = generator(log), StateSpace()

    def loss() -> Tensor:
        given, wanted = recall(g)
        order = torch.randperm(wanted.numel(), generator=g)
        return F.cross_entropy(model(given).flatten(0, 1), wanted.flatten()[order])

    fit(log, model, AdamW(model.parameters(), 5e-3), loss, 300, clip=1.0)


@run
def sparsity_too_strong(log: Log) -> None:
    g, model = generator(log), SparseAutoencoder(None)
    directions = F.normalize(torch.randn(96, 32, generator=g), dim=1)

    def loss() -> Tensor:
        x = mixed_features(g, directions)
        y, z = model(x)
        total: Tensor = F.mse_loss(y, x) + 3.0 * z.abs().sum(1).mean()
        return total

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 400)


@run
def spikes_never_fire(log: Log) -> None:
    model, data = Spiking(threshold=50.0), batches(log, 32, *digits())

    def loss() -> Tensor:
        images, classes = next(data)
        return F.cross_entropy(model(images), classes)

    fit(log, model, Adam(model.parameters(), 1e-3), loss, 250)


@run
def attention_one_hot(log: Log) -> None:
    g, model = generator(log), GraphTransformer(scale=1.0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query.weight" in name or "key.weight" in name:
                parameter.mul_(12)
    optimizer = AdamW(model.parameters(), 1e-3)
    fit(log, model, optimizer, lambda: node_loss(model, graphs(g)), 200)


@run
def logits_grow(log: Log) -> None:
    g, model = generator(log), GraphTransformer()
    fast = [p for n, p in model.named_parameters() if ".query." in n or ".key." in n]
    slow = [p for n, p in model.named_parameters() if ".query." not in n and ".key." not in n]
    optimizer = AdamW([{"params": slow}, {"params": fast}], 1e-3)

    def raise_rate(step: int) -> None:
        optimizer.param_groups[1]["lr"] = 0.1 if step >= 60 else 1e-3

    fit(log, model, optimizer, lambda: node_loss(model, graphs(g)), 280, before=raise_rate)
