"""Names of tags in TensorBoard's own dashboards, for writing and reading."""

from __future__ import annotations

import re

from telemetry.plain_text import printable

RUN, KIND = "~run/", "~~"
"""Beginnings of our tags. TensorBoard sorts groups, the first part of tags, by ASCII and opens the
first two: the user's own, then that of the run. Each kind of statistics and tensors of layers is a
group behind them, such as ``~~activation_rms/...``, which stays folded."""
# Group of our texts.
ALERTS = "~alerts/"
GROUPS = RUN, KIND, ALERTS

# L2 norm of all gradients, at every step.
TOTAL_GRAD_NORM = f"{RUN}grad_norm/total"
# Counts at the end of a run.
FULL_STEPS = f"{RUN}full_steps/scheduled", f"{RUN}full_steps/requested"

# Parts of a step's time, and memory; keys of :attr:`StepRecord.usage`, without the group.
TIMES = "time/data_wait_s", "time/forward_s", "time/backward_s", "time/optimizer_s"
TOKENS_PER_S = "time/tokens_per_s"
ALLOCATED_BYTES, PEAK_BYTES = "memory/allocated_bytes", "memory/peak_bytes"
HOST_BYTES, HOST_OWN_BYTES = "memory/host_rss_bytes", "memory/host_own_bytes"
MEMORY = {ALLOCATED_BYTES: "allocated", PEAK_BYTES: "peak", HOST_BYTES: "host memory"}

_GROUP = re.compile(f"{RUN}|{KIND}")
_NUMBERED = re.compile(r"(\w+)/(\d{4,9})\.(.*)", re.DOTALL)


def plain(tag: str) -> str:
    """Return a tag without its group."""
    found = _GROUP.match(tag)
    return tag[found.end() :] if found else tag


def numbered(place: int, name: str) -> str:
    """Return ``NNNN.name``, so that TensorBoard sorts layers in the forward order; printable."""
    return f"{place:04d}.{printable(name)}"


def parse_numbered(tag: str) -> tuple[str, int, str] | None:
    """Return statistic, position and name of ``statistic/NNNN.name``; None for other tags."""
    found = _NUMBERED.fullmatch(plain(tag))
    return (found[1], int(found[2]), found[3]) if found else None
