"""Runs opened with each of the three readers: the files themselves, and TensorBoard's loaders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import tensorboard_data_server

from telemetry.reading.run_data import RunData
from telemetry.reading.sources import FileSource
from telemetry.tensorboard_plugin.provider_source import ProviderSource
from tests.helpers.board import open_fast, open_slow
from tests.helpers.known_runs import OpenRun


@pytest.fixture(params=["files", "slow", "fast"])
def open_run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenRun]:
    """Read a run's directory; the test runs once with each reader."""
    if request.param == "files":
        yield lambda log_dir: RunData(FileSource(log_dir))
    elif request.param == "slow":
        yield lambda log_dir: RunData(ProviderSource(open_slow(log_dir), "", "."))
    elif tensorboard_data_server.server_binary() is None:
        pytest.skip("no fast loader for this platform")
    else:
        with ExitStack() as stack:

            def read(log_dir: Path) -> RunData:
                port_file = tmp_path_factory.mktemp("server") / "port"
                return RunData(ProviderSource(open_fast(log_dir, port_file, stack), "", "."))

            yield read
