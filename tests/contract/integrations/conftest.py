"""Each test runs in a directory of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def silent(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """The test fails if this package logs anything."""
    yield
    records = caplog.get_records("call")
    assert [r.getMessage() for r in records if r.name.startswith("telemetry")] == []
