"""The public API is the committed one."""

from __future__ import annotations

from tests.helpers import public_api


def test_public_names_arguments_and_defaults_are_the_committed_ones() -> None:
    """A difference is an incompatible change, or an addition to write into the list."""
    committed = public_api.COMMITTED.read_text(encoding="utf-8").splitlines()
    assert [*public_api.lines()] == committed, "python -m tests.helpers.public_api writes the list"
