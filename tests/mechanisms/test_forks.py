"""Forks while the worker computes: the new process may use the same classes in a run of its own."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import cached_property

from telemetry import HookLogger


def test_a_forked_process_waits_for_no_value_that_a_thread_was_computing() -> None:
    """Locks of cached properties in Python 3.10 and 3.11: a fork would leave one locked."""
    package = HookLogger.__module__.partition(".")[0]
    locks = {
        f"{name}.{member.attrname}": getattr(member, "lock", nullcontext())
        for name, module in list(sys.modules.items())
        if name.startswith(f"{package}.") and ".reading" not in name  # no worker reads runs
        for defined in vars(module).values()
        if isinstance(defined, type) and defined.__module__ == name
        for member in vars(defined).values()
        if isinstance(member, cached_property)
    }
    assert len(locks) > 20
    assert [name for name, lock in locks.items() if not isinstance(lock, nullcontext)] == []
