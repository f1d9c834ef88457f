"""The state of torch's random numbers, without drawing any."""

from __future__ import annotations

import torch


def read_random_states() -> dict[str, bytes]:
    """States of torch's default generators: the CPU's and that of each GPU that is in use.

    5 kB for the CPU and 16 bytes for a GPU, which need not be waited for: its generator counts on
    the host. ``torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))`` puts
    one back.
    """
    states = {"cpu": torch.get_rng_state()}
    # While a CUDA graph is recorded, its generator's state is not known.
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        states |= {
            f"cuda:{index}": torch.cuda.get_rng_state(index)
            for index in range(torch.cuda.device_count())
        }
    return {device: state.numpy().tobytes() for device, state in states.items()}
