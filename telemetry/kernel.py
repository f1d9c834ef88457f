"""Whether the C extension that measures tensors in CPU memory is available."""

from __future__ import annotations

import logging
import os

log = logging.getLogger("telemetry")

available = False
"""Whether ``telemetry._native`` is installed and not switched off by ``TELEMETRY_NATIVE=0``."""

native = "NumPy, because TELEMETRY_NATIVE is 0"
"""What measures tensors in CPU memory, in words."""

if os.environ.get("TELEMETRY_NATIVE") != "0":
    try:
        from telemetry import _native
    except ImportError as error:
        native = f"NumPy, because the C extension cannot be loaded: {error}"
        log.info(
            "telemetry: the C extension cannot be loaded (%s), so measuring tensors in CPU memory "
            "takes 5 to 80 times as long. Reinstall telemetry with a C compiler, or set "
            "TELEMETRY_NATIVE=0 to silence this message",
            error,
        )
    else:
        available = True
        native = f"C extension {_native.__file__} ({_native.instructions()[-1]})"
