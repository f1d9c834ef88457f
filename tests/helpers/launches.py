"""Guard of measuring on a device: what is launched there, and that nothing waits or writes."""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "bincount",
    "_unique2", "unique_dim", "unique_consecutive", "_coalesce",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts what a GPU launches, and refuses operations that read a value or write to a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result, name = function(*args, **(kwargs or {})), function.overloadpacket.__name__
        assert name not in WAITING, f"{function} waits for the device"
        assert torch.Tag.data_dependent_output not in function.tags, function
        assert torch.Tag.dynamic_output_shape not in function.tags, function
        assert torch.Tag.nondeterministic_seeded not in function.tags, function
        assert not function._schema.is_mutable, f"{function} writes to a tensor"
        if not function.is_view and name not in ("detach", "alias"):
            self.by_name[name] += self._launches(name, args[0])
        return result

    @staticmethod
    def _launches(name: str, given: Any) -> int:
        if name in ("cat", "stack"):
            return ceil(len(given) / 128)
        if name == "_foreach_norm":  # blocks of 65,536 elements, 320 in a launch; and one to add up
            return 1 + ceil(sum(ceil(tensor.numel() / 65_536) for tensor in given) / 320)
        return 1

    @property
    def total(self) -> int:
        return sum(self.by_name.values())
