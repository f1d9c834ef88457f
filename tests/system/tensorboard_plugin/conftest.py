"""The Telemetry page in Chromium, inside of the real TensorBoard.

A module's ``write(logdir)`` writes the runs; it may parametrize ``loader``, indirectly.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tensorboard_data_server

from tests.helpers.browser import SIZE, TelemetryPage, open_browser, serve

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with open_browser() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def loader(request: pytest.FixtureRequest) -> str:
    """TensorBoard's loader that reads the files: the fast one, if the platform has it."""
    has_fast = tensorboard_data_server.server_binary() is not None
    name: str = getattr(request, "param", None) or ("fast" if has_fast else "slow")
    return name


@pytest.fixture(scope="module")
def logdir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    request.module.write(folder)
    return folder


@pytest.fixture(scope="module")
def address(
    logdir: Path, loader: str, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "log"
    with serve(logdir, log, fast=loader == "fast") as url:
        yield url


@pytest.fixture(scope="module")
def tab(browser: Browser, address: str) -> Iterator[TelemetryPage]:
    """A tab for the module's ``address``, in which TensorBoard stays open."""
    context = browser.new_context(viewport=SIZE)
    yield TelemetryPage(context.new_page(), address)
    context.close()


@pytest.fixture
def page(tab: TelemetryPage) -> Iterator[TelemetryPage]:
    """The Telemetry page of the module's ``address``; its console must show no error."""
    tab.forget()
    yield tab
    assert tab.errors == []
