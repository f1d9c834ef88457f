"""TensorBoard's web application without a server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.board import loader
from tests.helpers.client import Client, OpenClient


@pytest.fixture(params=["slow", "fast"])
def open_client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenClient]:
    """Return a client of TensorBoard for a log directory; the test runs once with each loader."""
    with loader(request.param, tmp_path_factory) as open_with:
        yield lambda logdir: Client(open_with(logdir), logdir)
