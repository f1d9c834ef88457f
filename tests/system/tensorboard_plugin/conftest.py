"""The Telemetry page in Chromium, inside of the real TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import tensorboard_data_server

from tests.helpers.browser import SIZE, TelemetryPage, open_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with open_browser() as chromium:
        yield chromium


@pytest.fixture(scope="module", params=["slow", "fast"])
def loader(request: pytest.FixtureRequest) -> str:
    """TensorBoard's loader that reads the files."""
    if request.param == "fast" and tensorboard_data_server.server_binary() is None:
        pytest.skip("no fast loader for this platform")
    name: str = request.param
    return name


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
