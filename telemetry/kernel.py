"""Whether there is the C extension that reads tensors in CPU memory."""

from __future__ import annotations

import logging
import os

log = logging.getLogger("telemetry")

available = False
"""Whether ``telemetry._native`` is there and wanted: ``TELEMETRY_NATIVE=0`` does without it."""

native = "NumPy, because TELEMETRY_NATIVE is 0"
"""What measures tensors in CPU memory, in words."""

if os.environ.get("TELEMETRY_NATIVE") != "0":
    try:
        from telemetry import _native
    except ImportError as error:
        native = f"NumPy, because there is no C extension: {error}"
        log.info(
            "telemetry: measuring tensors in CPU memory takes 5 to 80 times as long as it could, "
            "because there is no C extension (%s). Install telemetry anew where there is a C "
            "compiler, or set TELEMETRY_NATIVE=0 to log this no more",
            error,
        )
    else:
        available = True
        native = f"C extension {_native.__file__}"
