"""Models that several runs train, or that a healthy run and a faulty one share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Seq2Seq(nn.Module):
    """GRU encoder and decoder; the decoder is given the targets, one place late."""

    def __init__(self, vocabulary: int = 12, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)
        self.encoder_learns = True

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.encoder_learns):
            _, state = self.encoder(self.embedding(source))
        outputs, _ = self.decoder(self.embedding(target), state)
        logits: Tensor = self.head(outputs)
        return logits


def reversal(g: torch.Generator, size: int = 32, length: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Digits 1 to 10, the inputs of the decoder, and the reversed digits; 0 begins."""
    source = torch.randint(1, 11, (size, length), generator=g)
    target = source.flip(1)
    return source, F.pad(target[:, :-1], (1, 0)), target


class UNet(nn.Module):
    """Two levels down and up with skip connections."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = _double(1, width), _double(width, 2 * width)
        self.middle = _double(2 * width, 2 * width)
        self.up2, self.up1 = _double(4 * width, width), _double(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        d = self.up2(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        e = self.up1(torch.cat([F.interpolate(d, scale_factor=2), a], 1))
        logits: Tensor = self.out(e)
        return logits


def _double(given: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(given, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
    )  # fmt: skip


def discs(g: torch.Generator, size: int = 8) -> tuple[Tensor, Tensor]:
    """Noisy pictures of a disc, ``[size, 1, 32, 32]``, and where it is."""
    at = torch.arange(32.0)
    x, y, r = (
        torch.rand(3, size, 1, 1, generator=g) * torch.tensor([20.0, 20, 6])[:, None, None, None]
    )
    mask = (((at - x - 6) ** 2 + (at[:, None] - y - 6) ** 2) < (r + 3) ** 2).float()[:, None]
    return mask + 0.7 * torch.randn(mask.shape, generator=g), mask


def segmentation_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy and Dice."""
    images, masks = batch
    logits = model(images)
    p = logits.sigmoid()
    dice = 1 - (2 * (p * masks).sum() + 1) / (p.sum() + masks.sum() + 1)
    loss: Tensor = F.binary_cross_entropy_with_logits(logits, masks) + dice
    return loss


class Speech(nn.Module):
    """Convolution, bidirectional GRU, and classes with blank 0."""

    def __init__(self, bands: int = 12, width: int = 32, classes: int = 6) -> None:
        super().__init__()
        self.front = nn.Conv1d(bands, width, 5, 2, 2)
        self.rnn = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.front(x)).transpose(1, 2)
        log_p: Tensor = self.head(self.rnn(h)[0]).log_softmax(-1)
        return log_p.transpose(0, 1)


def utterances(g: torch.Generator, size: int = 16) -> tuple[Tensor, Tensor]:
    """Five tones of eight frames each, ``[size, 12, 40]``, and which they are, from 1 to 5."""
    said = torch.randint(1, 6, (size, 5), generator=g)
    spectra = F.one_hot(2 * said, 12).float().repeat_interleave(8, 1).transpose(1, 2)
    return spectra + 0.3 * torch.randn(spectra.shape, generator=g), said


def ctc(log_p: Tensor, said: Tensor, frames: int = 20) -> Tensor:
    """Mean CTC loss of targets that all have five symbols."""
    size = len(said)
    lengths = torch.full((size,), frames), torch.full((size,), said.shape[1])
    loss: Tensor = F.ctc_loss(log_p, said, *lengths)
    return loss


class GraphAttention(nn.Module):
    """Attention over the nodes of graphs with a learned bias for edges; softmax is a module."""

    def __init__(self, width: int, heads: int, scale: float | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.scale = scale or (width // heads) ** -0.5
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.edge_bias = nn.Parameter(torch.zeros(heads, 1, 1))
        self.softmax, self.drop = nn.Softmax(-1), nn.Dropout(0.1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        def split(h: Tensor) -> Tensor:
            return h.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        logits = self.scale * q @ k.transpose(-1, -2) + self.edge_bias * edges[:, None]
        attended = self.drop(self.softmax(logits)) @ v
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out


class GraphBlock(nn.Module):
    """Attention and a feed-forward layer, normalized after each."""

    def __init__(self, width: int, scale: float | None) -> None:
        super().__init__()
        self.attention = GraphAttention(width, 4, scale)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.act, self.down = (
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, edges))
        y: Tensor = self.norm2(x + self.down(self.act(self.up(x))))
        return y


class GraphTransformer(nn.Module):
    """Classes of nodes."""

    def __init__(self, width: int = 32, depth: int = 3, scale: float | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(GraphBlock(width, scale) for _ in range(depth))
        self.pooler: nn.Module | None = None
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, edges)
        logits: Tensor = self.head(x)
        return logits


def graphs(g: torch.Generator, size: int = 8, nodes: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Features, edges and the classes of nodes; nodes of a class are more often neighbors."""
    classes = torch.randint(3, (size, nodes), generator=g)
    same = classes[:, :, None] == classes[:, None]
    edges = (torch.rand(same.shape, generator=g) < torch.where(same, 0.4, 0.1)).float()
    features = torch.randn(size, nodes, 8, generator=g)
    features[..., :3] += 1.2 * F.one_hot(classes, 3)
    return features, edges, classes


def node_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    features, edges, classes = batch
    return F.cross_entropy(model(features, edges).flatten(0, 1), classes.flatten())


class Field(nn.Module):
    """The right side of an ordinary differential equation, solved with Runge and Kutta's method."""

    def __init__(self, step: float = 0.1, activation: type[nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.step = step
        self.lift, self.act, self.drop = nn.Linear(2, 48), activation(), nn.Linear(48, 2)

    def slope(self, y: Tensor) -> Tensor:
        dy: Tensor = self.drop(self.act(self.lift(y**3)))
        return dy

    def forward(self, y: Tensor, count: int = 8) -> Tensor:
        path, h = [], self.step
        for _ in range(count):
            a = self.slope(y)
            b = self.slope(y + h / 2 * a)
            c = self.slope(y + h / 2 * b)
            d = self.slope(y + h * c)
            y = y + h / 6 * (a + 2 * b + 2 * c + d)
            path.append(y)
        return torch.stack(path)


def spirals(g: torch.Generator, size: int = 32, count: int = 8) -> tuple[Tensor, Tensor]:
    """Starting points and the true path of a damped, cubic spiral."""
    a = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
    y = start = 2 * torch.rand(size, 2, generator=g) - 1
    path = []
    for _ in range(count):
        for _ in range(10):
            y = y + 0.01 * (y**3) @ a
        path.append(y)
    return start, torch.stack(path)


class Coupling(nn.Module):
    """One affine coupling layer; ``bounded`` keeps its log-scale between -1 and 1."""

    def __init__(self, flip: bool, bounded: bool) -> None:
        super().__init__()
        self.flip, self.bounded = flip, bounded
        self.first, self.act, self.last = nn.Linear(1, 48), nn.ReLU(), nn.Linear(48, 2)
        if bounded:
            nn.init.zeros_(self.last.weight)
            nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = x.flip(1).chunk(2, 1) if self.flip else x.chunk(2, 1)
        scale, shift = self.last(self.act(self.first(kept))).chunk(2, 1)
        scale = scale.tanh() if self.bounded else scale
        moved = moved * scale.exp() + shift
        return torch.cat([moved, kept] if self.flip else [kept, moved], 1), scale[:, 0]


class Flow(nn.Module):
    """Log density of points of the plane."""

    def __init__(self, bounded: bool = True) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(i % 2 == 1, bounded) for i in range(6))

    def forward(self, x: Tensor) -> Tensor:
        log_det = torch.zeros(len(x))
        for coupling in self.couplings:
            x, scale = coupling(x)
            log_det = log_det + scale
        return log_det - 0.5 * (x**2).sum(1) - math.log(2 * math.pi)


def moons(g: torch.Generator, size: int = 128) -> Tensor:
    """Two half circles."""
    angle = math.pi * torch.rand(size, generator=g)
    upper = torch.rand(size, generator=g) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    return torch.stack([x - 0.5, y - 0.25], 1) + 0.05 * torch.randn(size, 2, generator=g)


class ActorCritic(nn.Module):
    """Policy and value of a state, each with a separate net."""

    def __init__(self, states: int = 16, actions: int = 2) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(states, 32), nn.Tanh(), nn.Linear(32, actions))
        self.critic = nn.Sequential(nn.Linear(states, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.actor(state), self.critic(state)[..., 0]


def walk(model: nn.Module, g: torch.Generator, steps: int = 48) -> tuple[Tensor, Tensor, Tensor]:
    """States, actions and returns in a corridor of 16 places; the far end gives 1, then again."""
    places, actions, rewards, place = [], [], [], 0
    for _ in range(steps):
        state = F.one_hot(torch.tensor(place), 16).float()
        with torch.no_grad():
            p = model(state)[0].softmax(-1)
        action = int(torch.multinomial(p, 1, generator=g))
        places.append(state)
        actions.append(action)
        place = max(0, place + (1 if action else -1))
        rewards.append(float(place == 15))
        place = 0 if place == 15 else place
    total, returns = 0.0, []
    for reward in reversed(rewards):
        total = reward + 0.95 * total
        returns.append(total)
    return torch.stack(places), torch.tensor(actions), torch.tensor(returns[::-1])


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class FakeQuantize(nn.Module):
    """Rounds to 8 bits with a scale for each batch; gradients pass straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.on:
            return x
        scale = x.detach().abs().amax() / 127
        rounded: Tensor = _Round.apply(x / scale) * scale
        return rounded


class QuantizedMLP(nn.Module):
    """Quantized after each activation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act1, self.quantize1 = nn.Linear(64, 48), nn.ReLU(), FakeQuantize()
        self.fc2, self.act2, self.quantize2 = nn.Linear(48, 48), nn.ReLU(), FakeQuantize()
        self.gate = 1.0
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.quantize1(self.act1(self.fc1(x.flatten(1))))
        h = h + self.quantize2(self.gate * self.act2(self.fc2(h)))
        logits: Tensor = self.head(h)
        return logits


class StateSpace(nn.Module):
    """Diagonal linear recurrence with a gate, twice; ``decay`` is the largest factor of a step."""

    def __init__(self, width: int = 24, decay: float = 0.99) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, width), nn.Linear(width, 8)
        self.layers = nn.ModuleList(Recurrence(width, decay) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.head(x)
        return logits


class Recurrence(nn.Module):
    """``h[t] = a h[t-1] + b x[t]`` for each channel."""

    def __init__(self, width: int, decay: float) -> None:
        super().__init__()
        self.norm, self.inward = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.log_decay = nn.Parameter(torch.linspace(0.5, decay, width).log())
        self.outward = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.inward(self.norm(x)).chunk(2, -1)
        a, h, states = self.log_decay.exp(), torch.zeros_like(u[:, 0]), []
        for t in range(u.shape[1]):
            h = a * h + u[:, t]
            states.append(h)
        y: Tensor = self.outward(torch.stack(states, 1) * F.silu(gate))
        return y


def recall(g: torch.Generator, size: int = 16, length: int = 48) -> tuple[Tensor, Tensor]:
    """Tokens of which each equals the one six places before, but for a tenth."""
    tokens = torch.randint(8, (size, length), generator=g)
    for t in range(6, length):
        keep = torch.rand(size, generator=g) < 0.9
        tokens[:, t] = torch.where(keep, tokens[:, t - 6], tokens[:, t])
    return tokens[:, :-1], tokens[:, 1:]


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)
        return (v > 0).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (v,) = ctx.saved_tensors
        surrogate: Tensor = grad / (1 + 10 * v.abs()) ** 2
        return surrogate


class Spiking(nn.Module):
    """Leaky neurons that fire above a threshold; 12 time steps of the same picture."""

    def __init__(self, threshold: float = 1.0) -> None:
        super().__init__()
        self.fc1, self.fire1 = nn.Linear(64, 64), Leaky(threshold)
        self.fc2, self.fire2 = nn.Linear(64, 48), Leaky(threshold)
        self.head = nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        spikes = self.fire1(self.fc1(x.flatten(1)).expand(12, -1, -1))
        spikes = self.fire2(self.fc2(spikes))
        logits: Tensor = self.head(spikes.mean(0))
        return logits


class Leaky(nn.Module):
    """Sums its input up over time, and starts again at 0 when it fires."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, current: Tensor) -> Tensor:
        v, spikes = torch.zeros_like(current[0]), []
        for now in current:
            v = 0.9 * v + now
            spike = _Spike.apply(v - self.threshold)
            v = v * (1 - spike.detach())
            spikes.append(spike)
        return torch.stack(spikes)


class SparseAutoencoder(nn.Module):
    """Keeps the ``top`` largest latents, or all if that is None."""

    def __init__(self, top: int | None) -> None:
        super().__init__()
        self.top = top
        self.encoder, self.latent, self.decoder = nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.latent(self.encoder(x))
        if self.top is not None:
            least = z.topk(self.top, -1).values[:, -1:]
            z = z * (z >= least)
        return self.decoder(z), z


def mixed_features(g: torch.Generator, directions: Tensor, size: int = 128) -> Tensor:
    """Sums of three of the given directions ``[n, 32]``."""
    chosen = torch.randint(len(directions), (size, 3), generator=g)
    return (directions[chosen] * torch.rand(size, 3, 1, generator=g)).sum(1)


def residual(model: nn.Module, t: Tensor) -> Tensor:
    """Mean squared error of a net as a solution of u'' = -9 u with u(0) = 0 and u'(0) = 3."""
    t = t.clone().requires_grad_()
    u = model(t)
    (du,) = torch.autograd.grad(u.sum(), t, create_graph=True)
    (ddu,) = torch.autograd.grad(du.sum(), t, create_graph=True)
    at_0 = torch.zeros(1, 1, requires_grad=True)
    u0 = model(at_0)
    (du0,) = torch.autograd.grad(u0.sum(), at_0, create_graph=True)
    error: Tensor = ((ddu + 9 * u) ** 2).mean() + 10 * (u0**2 + (du0 - 3) ** 2).sum()
    return error


class Text(nn.Module):
    """Two pre-norm blocks over letters, with weights as small as GPT-2's."""

    def __init__(self, vocabulary: int = 64, width: int = 64, length: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, F.gelu, 1e-5, True, True)
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for parameter in (self.embedding.weight, self.head.weight):
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for block in self.blocks:
            h = block(h, src_mask=mask, is_causal=True)
        logits: Tensor = self.head(self.norm(h))
        return logits


def letters(g: torch.Generator, size: int = 16, length: int = 33) -> Tensor:
    """Each letter is the one two places before plus 1 or 3, of 64; ``[size, length]``."""
    given = torch.randint(0, 64, (size, length), generator=g)
    for place in range(2, length):
        step = 1 + 2 * torch.randint(0, 2, (size,), generator=g)
        given[:, place] = (given[:, place - 2] + step) % 64
    return given


def chain(g: torch.Generator, size: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """States of a random walk of 8 in a ring, rewards of 1 at one of them, and the returns."""
    at = torch.randint(0, 8, (size,), generator=g)
    following = (at + 2 * torch.randint(0, 2, (size,), generator=g) - 1) % 8
    return F.one_hot(at, 8).float(), (at == 3).float(), F.one_hot(following, 8).float()


class Experts(nn.Module):
    """The best of four experts; only where it is weighted by its share does the router learn."""

    def __init__(self, *, weighted: bool) -> None:
        super().__init__()
        self.inside = nn.Linear(64, 64)
        self.router = nn.Linear(64, 4)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 10)
        self.weighted, self.balance = weighted, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.inside(x))
        shares = self.router(h).softmax(1)
        best = shares.argmax(1)
        self.balance = 4 * F.one_hot(best, 4).float().mean(0) @ shares.mean(0)
        outputs = torch.stack([expert(h) for expert in self.experts], 1)
        chosen = outputs[torch.arange(len(x)), best]
        if self.weighted:
            chosen = chosen * shares.gather(1, best[:, None])
        logits: Tensor = self.head(h + F.relu(chosen))
        return logits
