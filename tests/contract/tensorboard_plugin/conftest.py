"""TensorBoard's web application without a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import tensorboard_data_server
from tensorboard.data.provider import DataProvider

from tests.helpers.board import open_fast, open_slow
from tests.helpers.client import Client, OpenClient


@pytest.fixture(params=["slow", "fast"])
def open_client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenClient]:
    """Return a client of TensorBoard for a log directory; the test runs once with each loader."""
    if request.param == "fast" and tensorboard_data_server.server_binary() is None:
        pytest.skip("no fast loader for this platform")
    with ExitStack() as stack:

        def provider_of(logdir: Path) -> DataProvider:
            if request.param == "slow":
                return open_slow(logdir)
            return open_fast(logdir, tmp_path_factory.mktemp("server") / "port", stack)

        yield lambda logdir: Client(provider_of(logdir))
