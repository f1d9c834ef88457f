"""Measures one call of ``scaled_dot_product_attention``: logits and entropy of each head."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Queries that are measured, evenly spaced up to the last one.
MOST_QUERIES = 64

# Limit of the float32 elements of one intermediate tensor: heads beyond it are measured in turn.
_MOST_ELEMENTS = 1 << 22

# Keys with a float mask at or below this cannot be attended to: -10,000, ``finfo.min`` and minus
# infinity are in use.
_MASKED = -9999.0

# Added to masked logits. It is finite, so that the product with their weight of 0 is 0.
_LOWEST = -1e30


def attention_figures(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    """Return the largest logit of each head, and the mean entropy of its queries' weights.

    The first sample of the batch is measured, with :data:`MOST_QUERIES` queries and all of their
    keys. Logits have the scale and a float mask, as the softmax receives them.

    Args:
        query: ``[..., heads, queries, width]``; with fewer than four axes there is one head.
        key: ``[..., heads, keys, width]``; of fewer heads, each serves several successive ones.
        mask: As PyTorch defines it; shapes broadcast.
        is_causal: Whether query ``i`` attends to the keys up to ``i``.
        scale: Factor of the logits; None: ``1 / sqrt(width)``.

    Returns:
        float32 ``[2, heads]`` on the same device. The entropy is a share of ``ln n`` for a query
        with ``n`` keys; with fewer than two keys it does not count, and NaN if no query counts.
        Without any key the logit is below -1e29.
    """
    axes = query.dim()
    query, key = _first_sample(query, axes), _first_sample(key, axes)
    length, count, width = query.size(1), key.size(1), key.size(2)
    chosen = _chosen(length)
    query = query[:, chosen].expand(max(len(query), len(key)), -1, -1)
    if mask is None:
        bias, weights = _without_mask(length, count, is_causal, query.device)
    else:
        mask = _first_sample(mask, axes).expand(-1, length, count)[:, chosen]
        is_bool = mask.dtype == torch.bool
        bias, weights = _terms(*((mask, 0.0) if is_bool else (mask > _MASKED, mask.float())))
    heads, rows, _ = query.shape
    shared = heads // len(key)
    # Queries that share a key stand side by side: [key heads, shared * rows, ...].
    if len(bias) == 1:
        bias = bias.repeat(1, shared, 1) if shared > 1 else bias
    else:
        bias = bias.reshape(len(key), -1, count)
    at_once = max(1, _MOST_ELEMENTS // (count * max(width, shared * rows)))
    factor = 1 / math.sqrt(width) if scale is None else scale
    parts: list[tuple[Tensor, Tensor]] = []
    for first in range(0, len(key), at_once):
        keys = key[first : first + at_once].float()
        queries = query[first * shared : (first + len(keys)) * shared].float()
        queries = queries.reshape(len(keys), -1, width)
        own = bias if len(bias) == 1 else bias[first : first + at_once]
        logits = torch.baddbmm(own, queries, keys.mT, alpha=factor).view(-1, rows, count)
        entropies = torch.linalg.vecdot(logits.softmax(-1), logits.log_softmax(-1))
        parts.append((logits.amax((1, 2)), entropies))
    largest, entropies = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    return torch.stack([largest, torch.linalg.vecdot(entropies, weights)])


def _chosen(length: int) -> slice:
    step = -(-length // MOST_QUERIES)
    return slice((length - 1) % step, None, step)


def _terms(allowed: Tensor, bias: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return the term of each logit, and the factors of negative entropies for their mean share.

    Args:
        allowed: Whether a query may attend to a key, bool ``[1 or heads, queries, keys]``.
        bias: Term of the keys to which it may attend, same shape.
    """
    counts = allowed.sum(-1)
    known = counts > 1
    weights = known / -counts.clamp(min=2).log() / known.sum(-1, keepdim=True)
    return torch.where(allowed, bias, _LOWEST), weights


def _without_mask(
    length: int, count: int, is_causal: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    positions = torch.arange(length, device=device)[_chosen(length)]
    keys = torch.arange(count, device=device)
    last = positions[:, None] if is_causal else count
    return _terms((keys <= last).expand(1, len(positions), -1), 0.0)


def _first_sample(tensor: Tensor, axes: int) -> Tensor:
    """Return the first sample, ``[heads, rows, columns]``; fewer than four ``axes``: one head."""
    dim = tensor.dim()
    tensor = tensor[(None,) * (3 - dim) + (0,) * (dim - 3)]
    return tensor if axes > 3 else tensor[:1]
