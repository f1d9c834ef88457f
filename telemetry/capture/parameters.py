"""Parameters of a model, and which of them an optimizer has."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from telemetry.measure.tensors import values_of
from telemetry.records import Parameter
from telemetry.selection import Selection, clean_name, cleaned
from telemetry.torch_private import undisturbed
from telemetry.torch_private.ranks import spec_of

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
