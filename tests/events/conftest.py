"""Fixtures: TensorBoard's own two loaders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import tensorboard_data_server
from board import Board, ReadBoard, open_fast, open_slow


@pytest.fixture(params=["slow", "fast"])
def read_board(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ReadBoard]:
    """Opens a log directory as TensorBoard would; runs the test once with each loader."""
    if request.param == "slow":
        yield lambda logdir: Board(open_slow(logdir))
        return
    if tensorboard_data_server.server_binary() is None:
        pytest.skip("no fast loader for this platform")
    with ExitStack() as stack:

        def read(logdir: Path) -> Board:
            port_file = tmp_path_factory.mktemp("server") / "port"
            return Board(open_fast(logdir, port_file, stack))

        yield read
