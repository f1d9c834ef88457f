"""The names of tags in TensorBoard's own dashboards on which writing and reading must agree."""

from __future__ import annotations

import re

from telemetry.plain_text import printable

TOTAL_GRAD_NORM = "grad_norm/total"
"""The L2 norm of all gradients together, at every step."""

_NUMBERED = re.compile(r"(\w+)/(\d{4,9})\.(.*)", re.DOTALL)


def numbered(place: int, name: str) -> str:
    """``NNNN.name``: TensorBoard sorts tags by name, and so layers in the forward order.

    Args:
        place: Of the module in the forward order, from 0.
        name: Of the module, its output or its parameter; escaped where it does not print.
    """
    return f"{place:04d}.{printable(name)}"


def parse_numbered(tag: str) -> tuple[str, int, str] | None:
    """Statistic, place and name of ``statistic/NNNN.name``; None for any other tag."""
    found = _NUMBERED.fullmatch(tag)
    # Older versions did not escape names.
    return (found[1], int(found[2]), printable(found[3])) if found else None
