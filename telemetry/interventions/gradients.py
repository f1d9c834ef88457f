"""Changes gradients of parameters as they arrive in the backward pass.

A hook is called once in each backward pass, with the sum over all uses of its parameter, before
that sum is added to ``parameter.grad``. With accumulation, it changes what each backward pass adds,
not what ``grad`` already holds. ``torch.autograd.grad`` also returns changed gradients. Under
``DistributedDataParallel``, gradients are changed before they are averaged.

A ``GradScaler`` multiplies the loss, so gradients arrive with its factor. Parameters that do not
require a gradient are skipped. Gradients of parameters that ``fully_shard`` has split do not arrive
this way and are not changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from telemetry.interventions.intervention import Intervention, check_number
from telemetry.selection import Selectors, select_parameters
from telemetry.torch_private import scaler_state


def clip_gradients(
    model: nn.Module,
    select: Selectors | None = None,
    *,
    max_norm: float | None = None,
    max_value: float | None = None,
    scaler: GradScaler | None = None,
) -> Intervention:
    """Bound the gradient of each parameter tensor as it arrives.

    ::

        with clip_gradients(model, max_norm=1.0):
            train()

    Each gradient is bounded separately: the norm over all ``k`` parameters, which
    ``clip_grad_norm_`` bounds, is then at most ``max_norm * sqrt(k)``. NaN and infinity stay:
    ``max_norm`` does not change a gradient that has any, and ``max_value`` does not change those
    elements. Nothing waits for an accelerator.

    Args:
        model: The model whose gradients are bounded.
        select: Which parameters; default: all.
        max_norm: Largest L2 norm of one tensor: larger ones are scaled down to it.
        max_value: Largest magnitude of an element: larger ones are set to it, with their sign.
        scaler: The scaler that multiplies the loss; the bound is then on gradients without its
            factor.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A glob matches nothing, all selected parameters are frozen, the bound is not
            positive, or not exactly one of ``max_norm`` and ``max_value`` is given.
    """
    _check_bounds(select, max_norm, max_value, scaler)
    clip = partial(_clip, max_norm=max_norm, max_value=max_value, scaler=scaler)
    return _on_gradients(model, select, clip, caller="clip_gradients")


def zero_gradients(model: nn.Module, select: Selectors) -> Intervention:
    """Set gradients to zero as they arrive, NaN and infinity included.

    ::

        with zero_gradients(model, "fc*.bias"):
            train()

    The parameters still have a gradient, of zeros, so momentum of earlier steps and weight decay
    may still move them. To freeze a parameter, use ``requires_grad_(False)``.

    Args:
        model: The model whose gradients are set to zero.
        select: Which parameters.

    Raises:
        TypeError: ``select`` has the wrong type.
        ValueError: A glob matches nothing, or all selected parameters are frozen.
    """
    return _on_gradients(model, select, torch.zeros_like, caller="zero_gradients")


def scale_gradients(model: nn.Module, select: Selectors, factor: float) -> Intervention:
    """Multiply gradients as they arrive, for layers that learn more slowly or, below 0, in reverse.

    Optimizers that normalize by the gradient's size, such as Adam, cancel a constant factor.

    Args:
        model: The model whose gradients are multiplied.
        select: Which parameters.
        factor: Any finite number.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A glob matches nothing, all selected parameters are frozen, or ``factor`` is not
            finite.
    """
    if not math.isfinite(check_number("scale_gradients", "factor", factor)):
        raise ValueError(f"scale_gradients(factor={factor}): must be finite")
    return _on_gradients(model, select, lambda grad: grad * factor, caller="scale_gradients")


def _on_gradients(
    model: nn.Module, select: Selectors | None, change: Callable[[Tensor], Tensor], *, caller: str
) -> Intervention:
    selected = select_parameters(model, select, caller=caller)
    trained = [parameter for parameter in selected.values() if parameter.requires_grad]
    if not trained:
        raise ValueError(
            f"{caller}(select=...): all {len(selected)} selected parameters are frozen; "
            "call it after requires_grad_(True)"
        )
    # Copies and saved files of a parameter are without its tensor hooks.
    return Intervention([partial(parameter.register_hook, change) for parameter in trained])


def _check_bounds(select: object, max_norm: object, max_value: object, scaler: object) -> None:
    if isinstance(select, int | float):
        raise TypeError(
            f"clip_gradients(select={select!r}): must select parameters; give a bound as "
            f"max_norm={select!r} or max_value={select!r}"
        )
    if (max_norm is None) == (max_value is None):
        raise ValueError("clip_gradients(): needs either max_norm=... or max_value=...")
    name, limit = ("max_value", max_value) if max_norm is None else ("max_norm", max_norm)
    if not check_number("clip_gradients", name, limit) > 0:
        raise ValueError(f"clip_gradients({name}={limit}): must be positive")
    if not isinstance(scaler, GradScaler | None):
        raise TypeError("clip_gradients(scaler=...): must be a torch.amp.GradScaler")


def _clip(
    grad: Tensor, *, max_norm: float | None, max_value: float | None, scaler: GradScaler | None
) -> Tensor:
    factor = _factor(scaler, grad)
    if max_norm is not None:
        return _bound_norm(grad, max_norm * factor)
    assert max_value is not None
    return _bound_values(grad, max_value * factor)


def _bound_norm(grad: Tensor, limit: float | Tensor) -> Tensor:
    values = grad.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    # Squares of exploding gradients overflow float32; only Apple's devices have nothing wider.
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    norm = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, wide))
    too_large = (norm > limit) & norm.isfinite()
    factor = torch.where(too_large, limit / norm, 1.0)
    # In half precision the factor would be rounded or underflow.
    exact = torch.promote_types(grad.dtype, torch.float32)
    return (grad.to(exact) * factor).to(grad.dtype)


def _bound_values(grad: Tensor, limit: float | Tensor) -> Tensor:
    if grad.is_sparse:
        grad = grad.coalesce()
        bounded = _bound_values(grad.values(), limit)
        return torch.sparse_coo_tensor(
            grad.indices(), bounded, grad.shape, is_coalesced=True, check_invariants=False
        )
    too_large = (grad.abs() > limit) & grad.isfinite()
    return torch.where(too_large, grad.sgn() * limit, grad).to(grad.dtype)


def _factor(scaler: GradScaler | None, grad: Tensor) -> float | Tensor:
    """The factor by which ``scaler`` has multiplied the loss, on the gradient's device."""
    state = scaler_state(scaler) if scaler is not None else None
    return 1.0 if state is None else state[0].to(grad.device, non_blocking=True).reshape(())
