"""A tensor's values on their way to the host, without the training thread waiting for them."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """The values that ``tensor`` has now, to be read later and from any thread.

    The values of a CPU tensor are copied at once. Those of an accelerator's tensor are copied to
    pinned memory by its current stream; :meth:`wait` waits for that.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.Event | None = None
        if tensor.device.type == "cpu":
            self._values = tensor.detach().clone()
            return
        self._values = tensor.detach().to("cpu", non_blocking=True)
        self._event = torch.Event(device=tensor.device)
        self._event.record()

    @property
    def nbytes(self) -> int:
        """Host memory that the values take."""
        return self._values.nbytes

    def wait(self) -> Tensor:
        """The values, on the CPU; same shape and dtype."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values
