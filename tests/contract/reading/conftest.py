"""Runs opened by ``telemetry.read``, and by the page with each of TensorBoard's loaders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.board import loader
from tests.helpers.client import Client
from tests.helpers.views import OpenView, PageView, ReadView


@pytest.fixture(params=["read", "slow", "fast"])
def view(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenView]:
    """Open a run's directory; the test runs once with each way."""
    if request.param == "read":
        yield ReadView
    else:
        with loader(request.param, tmp_path_factory) as open_with:
            yield lambda log_dir: PageView(Client(open_with(log_dir), log_dir))
