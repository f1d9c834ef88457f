"""The model as records see it: its modules and parameters, by name and in order."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Module:
    """One module of the model: its name in ``named_modules()`` and the name of its class."""

    name: str
    type_name: str


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter: its name in ``named_parameters()``, the module that owns it, its shape."""

    name: str
    module_name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The model as the records see it. Records of one layout share one object.

    Attributes:
        modules: Modules that are watched or own a parameter, in forward order as far as known.
        parameters: In the order of ``named_parameters()``, which is that of
            :attr:`StepRecord.grad_norms`.
    """

    modules: tuple[Module, ...]
    parameters: tuple[Parameter, ...]

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Place of each module in the forward order, by name."""
        return {module.name: index for index, module in enumerate(self.modules)}

    @cached_property
    def owners(self) -> NDArray[np.intp]:
        """For each parameter the index of its module, shape ``[parameters]``."""
        positions = [self.position[parameter.module_name] for parameter in self.parameters]
        return np.array(positions, dtype=np.intp)

    @cached_property
    def owned(self) -> Sequence[Sequence[int]]:
        """For each module the indices of its own parameters."""
        owned: list[list[int]] = [[] for _ in self.modules]
        for index, owner in enumerate(self.owners.tolist()):
            owned[owner].append(index)
        return owned

    @cached_property
    def owning(self) -> NDArray[np.intp]:
        """Indices of the modules that own parameters, ascending."""
        return np.unique(self.owners)

    @cached_property
    def matrices(self) -> frozenset[str]:
        """Names of the parameters with more than one dimension."""
        return frozenset(p.name for p in self.parameters if len(p.shape) > 1)

    @cached_property
    def depth_order(self) -> NDArray[np.intp]:
        """Indices into :attr:`parameters`, sorted by the forward position of their modules."""
        return np.argsort(self.owners, kind="stable")
