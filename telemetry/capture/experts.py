"""Routers of mixtures of experts: their modules, and the number of tokens of each expert."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

_NAMES = frozenset({"router", "gate"})
_COUNTS = (
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "num_routed_experts",
    "n_experts",
)
_CHOSEN = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "topk", "k")


@dataclass(frozen=True, kw_only=True)
class Router:
    """Module that chooses the experts of each token.

    Attributes:
        experts: Number of experts.
        chosen: Experts of each token; 1 if the model does not have the number.
        by_output: Whether the largest outputs are the choice. If not, a bias is added afterwards,
            and only returned indices show the choice.
    """

    experts: int
    chosen: int
    by_output: bool = True


def routers(model: nn.Module) -> dict[int, Router]:
    """Return the routers of a model by the identities of their modules.

    A router has the name ``router`` or ``gate``. Its number of experts is an attribute of the
    router, its parent or their ``config``, or that of the experts that its parent has, too.
    """
    routers_by_module: dict[int, Router] = {}
    for parent in model.modules():
        for name, child in parent.named_children():
            if name not in _NAMES:
                continue
            owners = [
                child,
                parent,
                getattr(child, "config", None),
                getattr(parent, "config", None),
            ]
            experts = _number(_COUNTS, owners) or _beside(parent)
            if experts < 2:
                continue
            corrected = _has_correction(child, experts) or _has_correction(parent, experts)
            router = Router(
                experts=experts,
                chosen=min(_number(_CHOSEN, owners) or 1, experts),
                by_output=not corrected,
            )
            # A router may be code around a layer that returns the logits.
            for module in (child, [*child.modules()][-1]):
                routers_by_module.setdefault(id(module), router)
    return routers_by_module


def _number(names: Iterable[str], owners: Iterable[object]) -> int:
    """Return the first of these attributes that is a positive whole number; 0 without one."""
    values = (getattr(owner, name, None) for owner in owners for name in names)
    return next((value for value in values if type(value) is int and value > 0), 0)


def _beside(parent: nn.Module) -> int:
    """Return the number of experts among a module's children; 0 without experts."""
    children = dict(parent.named_children())
    lists = {n: c for n, c in children.items() if isinstance(c, (nn.ModuleList, nn.ModuleDict))}
    if lists:
        return len(lists[max(lists, key=lambda name: "expert" in name)])
    fused = [p for n, c in children.items() if "expert" in n for p in c.parameters()]
    return next((len(p) for p in fused if p.dim() == 3), 0)


def _has_correction(owner: nn.Module, experts: int) -> bool:
    """Whether a module has a bias per expert that its router's output does not include."""
    tensors = [*owner.named_buffers(recurse=False), *owner.named_parameters(recurse=False)]
    return any("bias" in n and n != "bias" and t.shape == (experts,) for n, t in tensors)


Loads: TypeAlias = dict[tuple[bool, int], Tensor]
"""Numbers of tokens of each expert in one step, int64 ``[experts]`` on the device.

Each output of a router that shows the choice has a sum. The one with the lowest key counts: indices
and masks take precedence over logits, and earlier outputs over later ones.
"""


def add_tokens(loads: Loads, router: Router, tensor: Tensor, place: int) -> None:
    """Count the tokens of a router's output; others than those that show the choice are ignored."""
    key = tensor.is_floating_point(), place
    if key > min(loads, default=key):
        return
    if (counts := tokens_per_expert(tensor.detach(), router)) is not None:
        loads[key] = counts + loads[key] if key in loads else counts


def tokens_per_expert(output: Tensor, router: Router) -> Tensor | None:
    """Return the number of tokens of each expert, int64 ``[experts]``, on the device.

    Args:
        output: Logits ``[..., experts]``, a mask of that shape, or indices ``[..., chosen]`` of
            any integer dtype. Other indices are those of dropped tokens.
        router: Module that returned it.

    Returns:
        None: the output is none of these.
    """
    if output.is_nested or output.dim() < 2 or output.is_complex():
        return None
    last, experts = output.shape[-1], router.experts
    if output.is_floating_point():
        if last != experts or not router.by_output:
            return None
        indices = output.topk(router.chosen, dim=-1).indices
    elif last == experts != router.chosen:
        return output.flatten(0, -2).ne(0).sum(0)
    elif last == router.chosen and output.dtype != torch.bool:
        indices = output
    else:
        return None
    flat = indices.flatten().long()
    # Not by bincount, which waits for a GPU.
    flat = torch.where((flat >= 0) & (flat < experts), flat, experts)
    counts = flat.new_zeros(experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
    return counts[:experts]
