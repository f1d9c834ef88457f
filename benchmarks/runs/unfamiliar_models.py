"""Models of the unfamiliar runs: architectures that the other runs lack, most with a switch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runs.further_models import Rows


class MixerBlock(nn.Module):
    """Mixes tokens, then channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        y: Tensor = x + self.channels(self.norm2(x))
        return y


class Mixer(nn.Module):
    """Classes of digits, whose 2 by 2 patches are the tokens."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, 24, 2, 2)
        self.blocks = nn.ModuleList(MixerBlock(16, 24) for _ in range(depth))
        self.head = nn.Linear(24, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean(1))
        return logits


class Iterated(nn.Module):
    """One residual layer, applied many times, as in a deep equilibrium model."""

    def __init__(self, times: int = 16) -> None:
        super().__init__()
        self.lift, self.cell, self.head = nn.Linear(64, 40), nn.Linear(40, 40), nn.Linear(40, 10)
        self.times = times
        nn.init.normal_(self.cell.weight, std=0.05)

    def forward(self, images: Tensor) -> Tensor:
        given = h = F.relu(self.lift(images.flatten(1)))
        for _ in range(self.times):
            h = given + F.relu(self.cell(h))
        logits: Tensor = self.head(h)
        return logits


class Dense(nn.Module):
    """Each convolution is given what all before it returned."""

    def __init__(self, depth: int = 4, growth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Conv2d(1 + growth * i, growth, 3, padding=1) for i in range(depth)
        )
        self.head = nn.Linear(1 + growth * depth, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for layer in self.layers:
            x = torch.cat([x, F.relu(layer(x))], 1)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class SumGraph(nn.Module):
    """Graph isomorphism network: each node adds up its neighbors, times ``share``."""

    def __init__(self, width: int = 24, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
            for _ in range(depth)
        )
        self.head, self.share = nn.Linear(width, 3), 0.1

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x + self.share * edges @ x)
        logits: Tensor = self.head(x)
        return logits


class ConvAutoencoder(nn.Module):
    """Strided convolutions down, transposed ones up."""

    def __init__(self, code: nn.Module | None = None) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()
        )
        self.squeeze, self.code = nn.Linear(64, 16), code or nn.Identity()
        self.expand = nn.Linear(16, 64)
        self.decoder = nn.Sequential(
            nn.ReLU(), nn.Unflatten(1, (16, 2, 2)), nn.ConvTranspose2d(16, 8, 2, 2), nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 2, 2),
        )  # fmt: skip
        self.gate = 1.0

    def forward(self, images: Tensor) -> Tensor:
        code = self.code(self.squeeze(self.gate * self.encoder(images)))
        restored: Tensor = self.decoder(self.expand(code))
        return restored


class BagOfTokens(nn.Module):
    """Mean of embeddings, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(200, 24)
        self.hidden, self.act, self.head = nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.act(self.hidden(self.embedding(tokens))))
        return logits


def topics(g: torch.Generator, size: int = 32) -> tuple[Tensor, Tensor]:
    """Twelve tokens each, half of them from the 50 of their topic."""
    topic = torch.randint(4, (size,), generator=g)
    own = 50 * topic[:, None] + torch.randint(50, (size, 12), generator=g)
    other = torch.randint(200, (size, 12), generator=g)
    return torch.where(torch.rand(size, 12, generator=g) < 0.5, own, other), topic


class TwoViews(nn.Module):
    """The halves of a digit meet in a bilinear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.upper = nn.Sequential(nn.Flatten(), nn.Linear(32, 24), nn.Tanh())
        self.lower = nn.Sequential(nn.Flatten(), nn.Linear(32, 24), nn.Tanh())
        self.meet, self.head = nn.Bilinear(24, 24, 32), nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        upper, lower = self.upper(images[:, :, :4]), self.lower(images[:, :, 4:])
        logits: Tensor = self.head(F.relu(self.meet(upper, lower)))
        return logits


class Temporal(nn.Module):
    """Dilated residual convolutions over the 64 pixels in a row."""

    def __init__(self, depth: int = 4, width: int = 16, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.stem = nn.Conv1d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv1d(width, width, 3, padding=2**i, dilation=2**i), act())
            for i in range(depth)
        )
        self.head = nn.Linear(width, 10)
        self.skip = 1.0

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images.flatten(2))
        for block in self.blocks:
            x = self.skip * x + block(x)
        logits: Tensor = self.head(x.mean(2))
        return logits


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * grad, None


class Reverse(nn.Module):
    """Identity whose gradients are multiplied by ``factor``, as in domain adaptation."""

    factor = -0.1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Scaled.apply(x, self.factor)
        return y


class Adversarial(nn.Module):
    """Classes of digits from features that should be invariant to mirrored pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU()
        )
        self.classes = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 10))
        self.reverse = Reverse()
        self.domain = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        h = self.features(images)
        return self.classes(h), self.domain(self.reverse(h))[:, 0]


class Spread(nn.Module):
    """Deviation of each row by its moments: without ``eps`` rounding may bring it below 0."""

    eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        variance = x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square()
        return torch.cat([x, (variance + self.eps).sqrt()], -1)


class MaskedMean(nn.Module):
    """Mean of the tokens that count."""

    least = 1e-6

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        total = (x * mask[..., None]).sum(1)
        return total / mask.sum(1, keepdim=True).clamp(min=self.least)


class Pooled(nn.Module):
    """Rows of a digit that count, read one by one and pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.pool = nn.Sequential(nn.Linear(8, 32), nn.ReLU()), MaskedMean()
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, images: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.head(self.pool(self.read(images[:, 0]), mask))
        return logits


class Unit(nn.Module):
    """Vectors of length 1."""

    eps = 1e-8

    def forward(self, x: Tensor) -> Tensor:
        length: Tensor = x.norm(dim=-1, keepdim=True)
        return x / (length + self.eps)


class Towers(nn.Module):
    """Similarities of the halves of digits, times a learned scale."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Flatten(), nn.Linear(32, 48, bias=False), nn.ReLU())
        self.right = nn.Sequential(nn.Flatten(), nn.Linear(32, 48, bias=False), nn.ReLU())
        self.out_left, self.out_right = (nn.Linear(48, 16, bias=False) for _ in range(2))
        self.unit_left, self.unit_right = Unit(), Unit()
        self.log_scale = nn.Parameter(torch.tensor(math.log(5.0)))

    def forward(self, images: Tensor) -> Tensor:
        a = self.unit_left(self.out_left(self.left(images[:, :, :4])))
        b = self.unit_right(self.out_right(self.right(images[:, :, 4:])))
        logits: Tensor = self.log_scale.exp() * a @ b.T
        return logits


class Prototypes(nn.Module):
    """Distances to a center of each class, below 0."""

    eps = 1e-6

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(classes, width))

    def forward(self, x: Tensor) -> Tensor:
        distances: Tensor = ((x[:, None] - self.centers).square().sum(-1) + self.eps).sqrt()
        return -distances


class Centers(nn.Module):
    """An embedding and prototypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16))
        self.prototypes = Prototypes(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.prototypes(self.embed(images))
        return logits


class PowerMean(nn.Module):
    """Generalized mean over a feature map."""

    least = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(min=self.least).pow(2.5).mean((2, 3)).pow(0.4)


class PowerPooled(nn.Module):
    """A convolution, batch norm, the generalized mean."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.conv2, self.gem = nn.Conv2d(16, 24, 3, padding=1), PowerMean()
        self.head = nn.Linear(24, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv2(F.relu(self.norm1(self.conv1(images))))
        logits: Tensor = self.head(self.gem(x))
        return logits


class Attend(nn.Module):
    """A few learned queries attend to the input, at a learned temperature."""

    def __init__(self, width: int, queries: int = 4) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(queries, width))
        self.key, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.temperature = nn.Parameter(torch.tensor(width**0.5))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.queries @ self.key(x).transpose(1, 2) / self.temperature
        attended: Tensor = (logits.softmax(-1) @ self.value(x)).flatten(1)
        return attended


class Perceiver(nn.Module):
    """Cross attention from learned queries to the rows of a digit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(8, 24), nn.Parameter(0.5 * torch.randn(8, 24))
        self.attend = Attend(24)
        self.head = nn.Sequential(nn.Linear(96, 32), nn.GELU(), nn.Linear(32, 10))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.attend(self.embed(images[:, 0]) + self.place))
        return logits


class Reader(nn.Module):
    """Reads the rows of a digit with a gated recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru = nn.Linear(8, 24), nn.GRU(24, 40, batch_first=True)
        self.head = nn.Linear(40, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.gru(self.embed(images[:, 0]))[0][:, -1])
        return logits


class WideAndDeep(nn.Module):
    """Separate linear part for a table next to the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU()
        )
        self.wide, self.head = nn.Linear(6, 8), nn.Linear(32, 10)

    def forward(self, images: Tensor, table: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.cat([self.deep(images), self.wide(table)], 1))
        return logits


class Sample(nn.Module):
    """Draws from a normal distribution."""

    def forward(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        return mean + torch.randn_like(mean) * (0.5 * log_variance).exp()


class Variational(nn.Module):
    """Autoencoder of pixels in two layers each way."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ELU())
        self.mean, self.log_variance, self.sample = nn.Linear(48, 8), nn.Linear(48, 8), Sample()
        self.decoder1, self.decoder2 = nn.Linear(8, 48), nn.Linear(48, 64)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.encoder(images)
        mean, log_variance = self.mean(h), self.log_variance(h)
        code = self.sample(mean, log_variance)
        return self.decoder2(F.relu(self.decoder1(code))), mean, log_variance


class SigmoidNet(nn.Module):
    """Eight convolutions, each with a sigmoid; batch norms between them or none."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(8 if i else 1, 8, 3, padding=1),
                nn.BatchNorm2d(8) if norm else nn.Identity(),
                nn.Sigmoid(),
            )
            for i in range(8)
        )
        self.head = nn.Linear(8 * 64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = images
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x.flatten(1))
        return logits


class Softsigns(nn.Module):
    """Deep layers with an activation that is no module, and weights ``gain`` times the usual."""

    def __init__(self, depth: int, gain: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64 if i == 0 else 32, 32) for i in range(depth))
        self.head = nn.Linear(32, 10)
        with torch.no_grad():
            for layer in self.layers:
                nn.init.orthogonal_(layer.get_parameter("weight"), gain)
                nn.init.zeros_(layer.get_parameter("bias"))

    def forward(self, images: Tensor) -> Tensor:
        x = images.flatten(1)
        for layer in self.layers:
            x = F.softsign(layer(x))
        logits: Tensor = self.head(x)
        return logits


class Recommender(nn.Module):
    """Users and items, each with a separate tower."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(60, 16), nn.Embedding(80, 16)
        self.user_tower = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.item_tower = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        a, b = self.user_tower(self.users(users)), self.item_tower(self.items(items))
        rating: Tensor = (a * b).sum(-1)
        return rating


class GatedBlock(nn.Module):
    """Pre-norm attention and a feed-forward layer with a ReLU gate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.gate, self.up = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        h = self.norm2(x)
        y: Tensor = x + self.down(F.relu(self.gate(h)) * self.up(h))
        return y


class GatedRows(Rows):
    """The same of gated blocks."""

    def __init__(self) -> None:
        super().__init__(width=24)

    def block(self, width: int, rezero: bool) -> nn.Module:
        return GatedBlock(width)


class TopExpert(nn.Module):
    """Each token goes to one of eight linear experts, times the router's share."""

    def __init__(self, width: int = 32, experts: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        w, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            j = (chosen == index).nonzero()[:, 0]
            if len(j):
                out[j] = w[j, None] * expert(flat[j])
        return out.view_as(x)


class ExpertText(nn.Module):
    """Embedding, attention, experts, head."""

    def __init__(self, words: int = 8, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.experts, self.head = TopExpert(width), nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False, is_causal=True)[0]
        logits: Tensor = self.head(x + self.experts(x))
        return logits


class Denoiser(nn.Module):
    """Predicts the noise in points of the plane, given how much there is."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU())
        self.lift, self.hidden = nn.Linear(2, width), nn.Linear(width, width)
        self.out = nn.Linear(width, 2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = F.silu(self.lift(x)) + self.time(t)
        noise: Tensor = self.out(F.silu(self.hidden(h)))
        return noise


class Policy(nn.Module):
    """Two networks of tanh layers, one for the actions and one for the value."""

    def __init__(self, given: int, actions: int) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(given, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(given, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.action, self.value = nn.Linear(64, actions), nn.Linear(64, 1)
        for layer in (*self.policy, *self.critic, self.action, self.value):
            if isinstance(layer, nn.Linear):
                gain = {self.action: 0.01, self.value: 1.0}.get(layer, 2**0.5)
                nn.init.orthogonal_(layer.weight, gain)
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.action(self.policy(x)), self.value(self.critic(x))[:, 0]


class Adapter(nn.Module):
    """A linear layer that stays as it is, and a change of low rank."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + 2 * self.up(self.down(x))
        return y
