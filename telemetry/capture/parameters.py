"""The model's parameters around an optimizer step: gradient norms, and how far they moved."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from telemetry.host_copy import HostCopy
from telemetry.measure import block_sample
from telemetry.records import Parameter
from telemetry.selection import clean_name

SMALL = 65_536
"""Elements up to which a parameter's update is measured in full; above, a sample of as many."""


class ParameterTable:
    """Which parameters a model has, and where an optimizer's parameters stand among them.

    Parameters are known by identity. Wrappers that replace them (``fully_shard``) are followed by
    calling :meth:`refresh`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._index_of: dict[int, int] = {}
        self._bound: weakref.WeakKeyDictionary[Optimizer, _Binding] = weakref.WeakKeyDictionary()
        self.parameters: tuple[Parameter, ...] = ()
        self.refresh(model)

    def refresh(self, model: nn.Module) -> bool:
        """Read the model's parameters again; whether they are others than before."""
        named = dict(model.named_parameters())
        index_of = {id(parameter): index for index, parameter in enumerate(named.values())}
        if index_of == self._index_of:
            return False
        self._index_of = index_of
        self._bound.clear()
        self.parameters = tuple(
            Parameter(
                name=clean_name(name),
                module_name=clean_name(name.rpartition(".")[0]),
                shape=tuple(parameter.shape),
            )
            for name, parameter in named.items()
        )
        return True

    def holds(self, optimizer: Optimizer) -> bool:
        """Whether any of the optimizer's parameters is the model's."""
        return self._bind(optimizer).any_known

    def of(self, optimizer: Optimizer) -> list[tuple[int, Tensor]]:
        """The optimizer's parameters that are the model's, each with its index."""
        pairs = zip(self._bind(optimizer).indices, _parameters(optimizer), strict=True)
        return [(index, parameter) for index, parameter in pairs if index >= 0]

    def _bind(self, optimizer: Optimizer) -> _Binding:
        bound = self._bound.get(optimizer)
        if bound is None or len(bound.indices) != sum(
            len(group["params"]) for group in optimizer.param_groups
        ):
            indices = [self._index_of.get(id(p), -1) for p in _parameters(optimizer)]
            bound = _Binding(indices=indices, any_known=any(i >= 0 for i in indices))
            self._bound[optimizer] = bound
        return bound


@dataclass(frozen=True, kw_only=True)
class _Binding:
    """Index of each of an optimizer's parameters among the model's, −1 for foreign ones."""

    indices: list[int]
    any_known: bool


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def local(tensor: Tensor) -> Tensor:
    """The values of ``tensor`` that this process holds: of a DTensor its shard."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def plain(tensor: Tensor) -> Tensor:
    """The values that this process holds, dense and real: of a sparse tensor those that are set."""
    if type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_complex():
        return tensor
    tensor = local(tensor.detach())
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class NormReading:
    """Gradient norms of some parameters, perhaps still on their way to the host.

    ``norms`` holds the L2 norms ``[k]``; on an accelerator a second row ``[2, k]`` with the largest
    magnitudes, which stay finite where the sum of squares overflows float32.
    """

    indices: tuple[int, ...]
    norms: HostCopy
    largest_known: bool

    @property
    def known_nonfinite(self) -> bool:
        """Whether a norm is not finite, as far as that is known without waiting."""
        return not self.largest_known and not bool(self.norms.wait().isfinite().all())

    def read(self) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Norms, float64 ``[k]``, and whether all elements were finite, ``[k]``."""
        values = self.norms.wait().to(torch.float64).numpy()
        if not self.largest_known:
            return values, np.isfinite(values)
        return values[0], np.isfinite(values[1])


def read_norms(grads: Sequence[tuple[int, Tensor]]) -> list[NormReading]:
    """L2 norm of every gradient, without waiting for an accelerator; one reading per device."""
    by_device: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for index, grad in grads:
        if grad.numel():
            by_device.setdefault(grad.device, []).append((index, plain(grad)))
    return [_read_device(device, pairs) for device, pairs in by_device.items()]


def _read_device(device: torch.device, grads: list[tuple[int, Tensor]]) -> NormReading:
    tensors = [grad for _, grad in grads]
    norms = _stacked_norms(tensors, 2)
    on_host = device.type == "cpu"
    if not on_host:
        norms = torch.stack([norms, _stacked_norms(tensors, torch.inf)])
    elif not torch.isfinite(norms.sum()):
        # Squares beyond 3e38 overflow float32: an infinite norm does not tell infinite elements.
        exact = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors]
        norms = torch.stack(exact)
    return NormReading(
        indices=tuple(index for index, _ in grads),
        norms=HostCopy(norms),
        largest_known=not on_host,
    )


def _stacked_norms(tensors: list[Tensor], order: float) -> Tensor:
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    norms = torch._foreach_norm(tensors, order, dtype=wide)
    return torch.stack([norm.to(wide) for norm in norms])


class UpdateProbe:
    """How far one optimizer step moved each parameter, relative to its size.

    ``||after − before|| / ||before||`` over all elements of parameters of up to 65,536 elements and
    over a fixed sample of as many elements of larger ones (within 1 % of the full ratio).
    """

    def __init__(self, parameters: Sequence[tuple[int, Tensor]]) -> None:
        self._parameters = [(i, p) for i, p in parameters if p.numel() and p.is_floating_point()]
        self._before = [_sample(p).clone() for _, p in self._parameters]

    def read(self) -> list[UpdateReading]:
        """Compare with the parameters as they are now; one reading per device."""
        by_device: dict[torch.device, list[tuple[int, Tensor, Tensor]]] = {}
        for (index, parameter), before in zip(self._parameters, self._before, strict=True):
            after = _sample(parameter)
            by_device.setdefault(after.device, []).append((index, after - before, before))
        self._parameters, self._before = [], []
        return [
            UpdateReading(
                indices=tuple(index for index, _, _ in items),
                norms=HostCopy(
                    _stacked_norms([d for _, d, _ in items] + [b for _, _, b in items], 2)
                ),
            )
            for items in by_device.values()
        ]


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateReading:
    """Norms of some parameters' updates and of the parameters before them, ``[2 k]``."""

    indices: tuple[int, ...]
    norms: HostCopy

    def read(self) -> NDArray[np.float64]:
        """Update ratios, float64 ``[k]``: inf if a parameter of zeros moved, NaN if it stayed."""
        moved, before = np.split(self.norms.wait().to(torch.float64).numpy(), 2)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios: NDArray[np.float64] = moved / before
        return ratios


def _sample(parameter: Tensor) -> Tensor:
    values = plain(parameter)
    return values if values.numel() <= SMALL else block_sample(values)
