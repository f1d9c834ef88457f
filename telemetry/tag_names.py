"""The names of tags in TensorBoard's own dashboards on which writing and reading must agree."""

from __future__ import annotations

import re

from telemetry.plain_text import printable

RUN, LAYERS, HISTOGRAMS, IMAGES = "~run/", "~layers/", "~histograms/", "~images/"
"""What our tags begin with. TensorBoard shows as one group what has the same first part, sorted by
ASCII: these few come after whatever the user calls theirs, and each says what is in it."""
# What the tags of our texts begin with.
ALERTS = "~alerts/"

# The L2 norm of all gradients together, at every step.
TOTAL_GRAD_NORM = f"{RUN}grad_norm/total"
FULL_STEPS = f"{RUN}full_steps/scheduled", f"{RUN}full_steps/requested"  # at the end of a run

_GROUP = re.compile(f"{RUN}|{LAYERS}|{HISTOGRAMS}|{IMAGES}")
_NUMBERED = re.compile(r"(\w+)/(\d{4,9})\.(.*)", re.DOTALL)


def plain(tag: str) -> str:
    """A tag without the group that TensorBoard shows it in."""
    found = _GROUP.match(tag)
    return tag[found.end() :] if found else tag


def numbered(place: int, name: str) -> str:
    """``NNNN.name``: TensorBoard sorts tags by name, and so layers in the forward order.

    The name is of a module, its output or its parameter; it is escaped where it does not print.
    """
    return f"{place:04d}.{printable(name)}"


def parse_numbered(tag: str) -> tuple[str, int, str] | None:
    """Statistic, place and name of ``statistic/NNNN.name`` in any group; None for other tags."""
    found = _NUMBERED.fullmatch(plain(tag))
    return (found[1], int(found[2]), found[3]) if found else None
