"""Reads log directories back with TensorBoard's own two loaders."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tensorboard_data_server
from tensorboard import context
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.data import grpc_provider
from tensorboard.data.provider import DataProvider

from telemetry.tag_names import plain

ALL = 10**9  # no downsampling
PLUGINS = ["scalars", "histograms", "images", "text", "telemetry"]
CONTEXT = context.RequestContext()

Points = list[tuple[int, Any]]


class Board:
    """Content of a log directory as TensorBoard shows it."""

    def __init__(self, provider: DataProvider) -> None:
        self.provider = provider

    def runs(self) -> list[str]:
        return [run.run_id for run in self.provider.list_runs(CONTEXT, experiment_id="")]

    def scalars(self) -> dict[str, dict[str, Points]]:
        """All scalars: run -> tag -> (step, value), in the order of the file.

        Tags here and below are without the groups of ours.
        """
        series = self.provider.read_scalars(
            CONTEXT, experiment_id="", plugin_name="scalars", downsample=ALL
        )
        return _points(series, lambda datum: datum.value)

    def tensors(self, plugin_name: str) -> dict[str, dict[str, Points]]:
        """All of a plugin's tensors: run -> tag -> (step, array)."""
        series = self.provider.read_tensors(
            CONTEXT, experiment_id="", plugin_name=plugin_name, downsample=ALL
        )
        return _points(series, lambda datum: np.asarray(datum.numpy))

    def blobs(self, plugin_name: str) -> dict[str, dict[str, Points]]:
        """All of a plugin's blob sequences: run -> tag -> (step, list of bytes)."""
        series = self.provider.read_blob_sequences(
            CONTEXT, experiment_id="", plugin_name=plugin_name, downsample=ALL
        )
        return _points(series, self._blob_bytes)

    def plugin_content(self, plugin_name: str, run: str, tag: str) -> bytes:
        listing = self.provider.list_tensors(CONTEXT, experiment_id="", plugin_name=plugin_name)
        return listing[run][tag].plugin_content

    def _blob_bytes(self, datum: Any) -> list[bytes]:
        return [self.provider.read_blob(CONTEXT, blob_key=ref.blob_key) for ref in datum.values]


ReadBoard = Callable[[Path], Board]


def _points(series: Any, value_of: Callable[[Any], Any]) -> dict[str, dict[str, Points]]:
    return {
        run: {
            plain(tag): [(datum.step, value_of(datum)) for datum in data]
            for tag, data in tags.items()
        }
        for run, tags in series.items()
    }


def open_slow(logdir: Path) -> DataProvider:
    """The loader written in Python."""
    multiplexer = EventMultiplexer(
        size_guidance={"tensors": 0}, tensor_size_guidance=dict.fromkeys(PLUGINS, 0)
    )
    multiplexer.AddRunsFromDirectory(str(logdir))
    multiplexer.Reload()
    return MultiplexerDataProvider(multiplexer, str(logdir))


def open_fast(logdir: Path, port_file: Path, stack: ExitStack) -> DataProvider:
    """The loader written in Rust; serves until the stack is closed."""
    server = subprocess.Popen(
        [
            tensorboard_data_server.server_binary(),
            f"--logdir={logdir}",
            f"--port-file={port_file}",
            "--samples-per-plugin=" + ",".join(f"{plugin}=all" for plugin in PLUGINS),
            "--port=0",
            "--reload=once",
            "--die-after-stdin",
            "--verbose",
        ],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    stack.enter_context(server)  # leaving closes stdin, which ends the server
    while "Finished load cycle" not in (line := server.stderr.readline()):
        assert line, "the data server ended before it had loaded"
    address = f"localhost:{port_file.read_text().strip()}"
    options = [("grpc.max_receive_message_length", 1 << 28)]  # as TensorBoard sets it
    channel = grpc.secure_channel(address, grpc.local_channel_credentials(), options)
    stack.enter_context(channel)
    return grpc_provider.GrpcDataProvider(address, grpc_provider.make_stub(channel))


@contextmanager
def loader(name: str, folders: pytest.TempPathFactory) -> Iterator[Callable[[Path], DataProvider]]:
    """Yield a function that opens a log directory with the loader ``slow`` or ``fast``."""
    if name == "slow":
        yield open_slow
    elif tensorboard_data_server.server_binary() is None:
        pytest.skip("no fast loader for this platform")
    else:
        with ExitStack() as stack:
            yield lambda logdir: open_fast(logdir, folders.mktemp("server") / "port", stack)
