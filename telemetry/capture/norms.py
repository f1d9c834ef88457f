"""L2 norms of gradients, parameters and updates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer

from telemetry.capture.parameters import Held, Indexed, plain
from telemetry.measure import block_sample, native
from telemetry.measure import device as accelerators
from telemetry.measure.native import TENSORS
from telemetry.records.sketch import SAMPLE_ELEMENTS
from telemetry.torch_private import in_function_mode, norms_of
from telemetry.torch_private.host_copy import HostCopy

if native.available:
    from telemetry.measure import _native

OVERFLOW = math.sqrt(torch.finfo(torch.float32).max)
"""Instead of a norm that an accelerator has added up in float32, and that is infinite."""

_OVERFLOWING = (torch.float32, torch.bfloat16)
_ABSENT = -1.0  # instead of the norm of a missing gradient


class Norms:
    """Norms of some tensors of one device.

    Attributes:
        indices: Indices of their parameters.
        square: Sum of their squares; 0 on an accelerator, where it is not known without waiting.
    """

    def __init__(
        self,
        indices: Sequence[int] | NDArray[np.intp],
        values: NDArray[np.float64] | Tensor,
        square: float = 0.0,
        *,
        may_overflow: bool = False,
    ) -> None:
        self.indices, self.square = indices, square
        self._values, self._may_overflow = values, may_overflow
        self._copy = HostCopy(values, owned=True) if isinstance(values, Tensor) else None

    def read(self) -> NDArray[np.float64]:
        """Return the norms; NaN or infinite where an element is. Waits for an accelerator.

        A norm may be infinite in float32 although all elements are finite. It is then
        :data:`OVERFLOW`: a full step knows the true one, and after an infinite gradient the
        parameters are NaN or infinite.
        """
        if not isinstance(self._values, Tensor):
            return self._values
        assert self._copy is not None
        norms: NDArray[np.float64] = self._copy.wait().double().numpy()
        return np.where(np.isposinf(norms), OVERFLOW, norms) if self._may_overflow else norms

    def nonfinite(self) -> bool | HostCopy:
        """Whether any norm is not finite, maybe of an accelerator."""
        if not isinstance(self._values, Tensor):
            return not math.isfinite(self.square)
        return HostCopy(self._values.isfinite().all().logical_not())


def take_norms(tensors: Iterable[tuple[int, Tensor]], order: float = 2) -> list[Norms]:
    """Return norms without waiting for an accelerator, by devices and dtypes.

    Tensors without a norm (see :func:`~telemetry.capture.parameters.plain`) are omitted.

    Args:
        order: 2; or infinity, if the norms are to show NaN and infinities only.
    """
    on_host: list[tuple[int, Tensor]] = []
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for index, values in plain(tensors):
        if accelerators.is_on_host(values) and values.dtype in native.DTYPES:
            on_host.append((index, values.contiguous()))
        else:
            values = values if values.numel() else values.new_zeros(1)
            groups.setdefault((values.device, values.dtype), []).append((index, values))
    norms: list[Norms] = []
    if on_host:
        indices, parts = zip(*on_host, strict=True)
        squares = native.squared_norms(parts)
        norms.append(Norms(indices, np.sqrt(squares), float(squares.sum())))
    for (_, dtype), some in groups.items():
        indices, parts = zip(*some, strict=True)
        if accelerators.is_on_host(parts[0]):
            wide = torch.stack(norms_of(parts, order, torch.float64)).numpy()
            norms.append(Norms(indices, wide, float(np.square(wide).sum())))
            continue
        on_device = torch.stack(norms_of(parts, order, _wide(dtype)))
        overflows = order == 2 and dtype in _OVERFLOWING
        norms.append(Norms(indices, on_device, may_overflow=overflows))
    return norms


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def unscales_itself(optimizer: Optimizer | None) -> bool:
    """Whether an optimizer divides the gradients by a ``GradScaler``'s factor, as fused ones do."""
    return getattr(optimizer, "grad_scale", None) is not None


def norms_at_once(optimizer: Optimizer, held: Held) -> tuple[list[float], Norms] | None:
    """Return learning rates and gradient norms of an optimizer by one call of the C extension.

    The norm of a missing gradient is negative. None where a gradient is not finite, on an
    accelerator, sparse or of a tensor subclass, a learning rate is a tensor, or the optimizer holds
    other parameters now.
    """
    groups, row = optimizer.param_groups, held.row
    is_known = TENSORS is not None and len(groups) == held.groups
    if not is_known or unscales_itself(optimizer) or in_function_mode():
        return None
    row.fill(_ABSENT)
    square = _native.take_norms(groups, held.identities, Tensor, TENSORS, held.address)
    if not 0 <= square < math.inf:
        return None
    norms = row[held.groups :].copy()
    return row[: held.groups].tolist(), Norms(np.arange(len(norms)), norms, square)


# --- updates --------------------------------------------------------------------------------------


class Updates:
    """Update ratio ``||after − before|| / ||before||`` of each parameter over one optimizer step.

    For large parameters it is that of a fixed sample (:func:`~telemetry.measure.block_sample`),
    within 2 % of the full ratio where all elements move alike.
    """

    def __init__(self, parameters: Indexed) -> None:
        self._parameters = parameters
        self._before = _joined_samples(parameters)
        self._norms: list[Norms] = []  # of the updates, then of the parameters before

    def compare(self) -> None:
        """Compare after the step, and drop the parameters."""
        moved: list[tuple[int, Tensor]] = []
        sizes: list[tuple[int, Tensor]] = []
        after = _joined_samples(self._parameters)
        for key, (lengths, before) in self._before.items():
            if key in after and after[key][0] == lengths:  # else one has another size now
                counts = [*lengths.values()]
                updates = (after[key][1] - before).split(counts)
                moved += zip(lengths, updates, strict=True)
                sizes += zip(lengths, before.split(counts), strict=True)
        self._norms = take_norms(moved + sizes)
        self._parameters, self._before = (), {}

    def read(self) -> Iterator[tuple[int, float, float, float]]:
        """Yield index, norm of the update, norm before the step and update ratio of parameters.

        The ratio is inf if zeros moved, NaN if they stayed. Waits for an accelerator.
        """
        for group in self._norms:
            moved, before = np.split(group.read(), 2)
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios = moved / before
            columns = moved.tolist(), before.tolist(), ratios.tolist()
            yield from zip(group.indices[: len(moved)], *columns, strict=True)


def _joined_samples(parameters: Indexed) -> dict[object, tuple[dict[int, int], Tensor]]:
    """Copy samples of all parameters that have values, ``[k]`` or ``[k, 16]``.

    Returns:
        Lengths by index, and the samples in one tensor. On an accelerator those of one shape and
        dtype are joined, because it needs few operations; on the CPU large copies take longer.
    """
    groups: dict[object, tuple[dict[int, int], list[Tensor]]] = {}
    for index, values in plain(parameters):
        is_small = values.numel() <= SAMPLE_ELEMENTS
        sample = values.reshape(-1) if is_small else block_sample(values)
        if sample.numel():
            alone = index if accelerators.is_on_host(sample) else None
            key = alone, sample.device, sample.dtype, sample.dim()
            lengths, samples = groups.setdefault(key, ({}, []))
            lengths[index] = len(sample)
            samples.append(sample)
    return {key: (lengths, torch.cat(samples)) for key, (lengths, samples) in groups.items()}
