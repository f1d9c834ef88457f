"""Parameters of a model: which of them an optimizer holds, and norms of gradients and updates."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from telemetry.measure import block_sample, native
from telemetry.measure import device as accelerators
from telemetry.measure.native import TENSORS
from telemetry.measure.tensors import values_of
from telemetry.records import Parameter
from telemetry.records.sketch import SAMPLE_ELEMENTS
from telemetry.selection import Selection, clean_name, cleaned
from telemetry.torch_private import in_function_mode, norms_of, undisturbed
from telemetry.torch_private.host_copy import HostCopy
from telemetry.torch_private.ranks import spec_of

if native.available:
    from telemetry.measure import _native

Indexed: TypeAlias = Sequence[tuple[int, Tensor]]
"""Parameters, or tensors of parameters, each with the index of its parameter."""


class Held:
    """The model's parameters that an optimizer holds.

    Attributes:
        number: Number of all parameters of the optimizer; and ``groups`` that of its groups.
        indices: Indices of the model's among them.
        identities: Address and index, or -1, of each of all; int64.
        row: Memory for a rate of each group and a norm of each of the model's parameters; and
            ``address`` where it begins.
    """

    def __init__(self, optimizer: Optimizer, index_of: Mapping[int, int]) -> None:
        pairs = [(id(p), index_of.get(id(p), -1)) for p in parameters_of(optimizer)]
        self.number, self.groups = len(pairs), len(optimizer.param_groups)
        self.indices = frozenset([index for _, index in pairs if index >= 0])
        self.identities = np.array(pairs, np.int64).tobytes()
        self.row = np.empty(self.groups + len(index_of))
        self.address = self.row.ctypes.data


class ParameterTable:
    """The model's parameters in the order of ``named_parameters()``, known by identity.

    The table holds not even weak references, because PyTorch refuses to swap the contents of a
    tensor that has one. So call :meth:`refresh` whenever parameters may have been replaced.
    """

    def __init__(self, model: nn.Module, selection: Selection) -> None:
        self._model = weakref.ref(model)
        self._selection = selection
        self._index_of: dict[int, int] = {}
        self._names: list[str] = []
        self._any_lazy = False
        self._held: weakref.WeakKeyDictionary[Optimizer, Held] = weakref.WeakKeyDictionary()
        self.parameters: tuple[Parameter, ...] = ()
        self.device = _CPU  # of the first parameter
        self.refresh()

    def refresh(self) -> bool:
        """Read the model's parameters again; whether they have changed."""
        model = self._model()
        if model is None:
            return False
        named = dict(model.named_parameters())
        if self._names and not named:  # DDP over a slice of a mesh replaces them in the first pass
            return False
        index_of = {id(parameter): index for index, parameter in enumerate(named.values())}
        names = list(named)
        if names:
            self.device = named[names[0]].device
        if index_of == self._index_of and names == self._names and not self._any_lazy:
            return False
        self._index_of, self._names = index_of, names
        self._any_lazy = any(map(is_lazy, named.values()))
        self.parameters = (*_described(model, named, self._selection.parameters(model)),)
        self._held.clear()
        return True

    def held_by(self, optimizer: Optimizer) -> Held:
        """Return which parameters an optimizer holds, read again if it has more than before.

        Where it holds others than the model's, the model's may have been replaced.
        """
        number = sum([len(group["params"]) for group in optimizer.param_groups])
        held = self._held.get(optimizer)
        if held is None or held.number != number:
            held = Held(optimizer, self._index_of)
            if len(held.indices) < number and self.refresh():
                held = Held(optimizer, self._index_of)
            self._held[optimizer] = held
        return held

    @undisturbed(always=True)
    def all_among(self, stepped: Collection[int]) -> bool:
        """Whether ``stepped`` has the index of every parameter that has a gradient."""
        model = self._model()
        return model is None or all(
            self._index_of.get(id(parameter)) in stepped
            for parameter in model.parameters()
            if parameter.grad is not None
        )

    def all(self) -> list[tuple[int, Tensor]]:
        """Return the model's parameters, each with its index."""
        model = self._model()
        return list(enumerate(model.parameters())) if model is not None else []

    def of(self, optimizer: Optimizer) -> list[tuple[int, Tensor]]:
        """Return the optimizer's parameters that are the model's, each with its index."""
        index_of = self._index_of
        return [(index_of[id(p)], p) for p in parameters_of(optimizer) if id(p) in index_of]

    def groups_of(self, optimizer: Optimizer) -> dict[int, int]:
        """Return the parameter group of each of those, by the parameter's index."""
        return {
            self._index_of[id(p)]: number
            for number, group in enumerate(optimizer.param_groups)
            for p in group["params"]
            if id(p) in self._index_of
        }

    def grads_of(self, parameters: Iterable[Tensor]) -> list[tuple[int, Tensor]]:
        """Return the gradients of the parameters that are the model's, each with its index."""
        indexed = [(self._index_of.get(id(p)), p.grad) for p in parameters]
        return [(i, grad) for i, grad in indexed if i is not None and grad is not None]


def _described(
    model: nn.Module, named: dict[str, nn.Parameter], recorded: Collection[int]
) -> Iterator[Parameter]:
    chosen = cleaned((name, name) for name, _ in model.named_modules())
    shown = {full: short for short, full in chosen.items()}
    for name, parameter in named.items():
        whole = spec_of(parameter) or parameter
        owner, _, own = name.rpartition(".")
        module_name = shown.get(owner, clean_name(owner))  # of a wrapper, that of its module
        yield Parameter(
            name=f"{module_name}.{own}" if module_name else own,
            module_name=module_name,
            shape=() if is_lazy(parameter) else tuple(whole.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            recorded=id(parameter) in recorded,
        )


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer, group after group."""
    parameters: list[Tensor] = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def local(tensor: Tensor) -> Tensor:
    """Return the values of ``tensor`` in this process: of a DTensor its shard.

    Waits for the collective that delivers them, as the model does when it uses them.
    """
    if type(tensor) in PLAIN:
        return tensor
    if hasattr(tensor, "to_local"):  # DTensor
        tensor = tensor.to_local()
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        tensor = tensor.wait()  # type: ignore[attr-defined]
    return tensor


def plain(tensors: Iterable[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    """Return the values in this process of each tensor that has any, as dense float tensors.

    A sparse tensor has its specified values, a complex one real and imaginary parts. Integers are
    omitted, as are quantized, nested, fake and meta tensors, and sparse ones on an accelerator that
    are not coalesced.
    """
    dense: list[tuple[int, Tensor]] = []
    for index, tensor in tensors:
        values: Tensor | None = tensor
        if (type(tensor), tensor.layout) not in _STRIDED or tensor.dtype not in _NORMED:
            values = _made_plain(tensor)
        if values is not None and not values.is_meta:
            dense.append((index, values))
    return dense


def _made_plain(tensor: Tensor) -> Tensor | None:
    values = None if is_lazy(tensor) else values_of(local(tensor.detach()), None)
    if values is None:
        return None
    stored = values.tensor
    if stored.is_complex():
        stored = torch.view_as_real(stored.resolve_conj())
    if not stored.is_floating_point():
        return None
    return stored if stored.dtype in _NORMED else stored.to(torch.float32)


_CPU = torch.device("cpu")
PLAIN = (Tensor, nn.Parameter)
_STRIDED = {(kind, torch.strided) for kind in PLAIN}
_NORMED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


# --- norms ----------------------------------------------------------------------------------------

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
