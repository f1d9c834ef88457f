"""Process groups that many tests share: healthy ranks that train one model after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.members import Ranks, form_group, ranks


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two ranks of one process group."""
    yield from _meeting(tmp_path_factory, 2)


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four ranks of one process group."""
    yield from _meeting(tmp_path_factory, 4)


def _meeting(tmp_path_factory: pytest.TempPathFactory, count: int) -> Iterator[Ranks]:
    folder = tmp_path_factory.mktemp("group")
    with ranks(folder, count) as processes:
        form_group(processes, folder)
        yield processes
        for process in processes:
            assert process.occurrences("telemetry failed") == 0, process.log.read_text()
