"""A tensor's values on their way to the host, without the training thread waiting for them."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """The values that ``tensor`` has now, to be read later and from any thread.

    The values of a CPU tensor are copied at once. Those of an accelerator's tensor are copied to
    pinned memory by its current stream; :meth:`wait` waits for that.

    Attributes:
        nbytes: Host memory that the values take.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.Event | None = None
        self.nbytes = tensor.numel() * tensor.element_size()
        if tensor.device.type == "cpu":
            self._values = tensor.detach().clone()
            return
        self._values = tensor.detach().to("cpu", non_blocking=True)
        self._event = torch.Event(device=tensor.device)
        self._event.record()

    def wait(self) -> Tensor:
        """The values, on the CPU; same shape and dtype."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values
