"""TensorBoard's own dashboards show our tags, in Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from telemetry import HookLogger
from tests.helpers.browser import PATIENCE_S, TelemetryPage
from tests.helpers.loops import batches, fault_at, finish, small_cnn


def write(logdir: Path) -> None:
    """Twenty full steps of a small model, an alert, hyperparameters and a curve of the user."""
    model = small_cnn()
    with HookLogger(model, logdir / "demo", every_n_steps=1, alerts=[fault_at(7)]) as logger:
        logger.hparams({"lr": 0.25, "opt": "sgd"})
        logger.log({"valid/z": 1.0})
        finish(batches(model, logger, steps=20))


@pytest.fixture
def dashboard(page: TelemetryPage) -> Any:
    """Open one of TensorBoard's dashboards and find elements in it."""

    def open_dashboard(fragment: str, selector: str) -> Any:
        page.page.goto(f"{page.address}#{fragment}")
        found = page.page.locator(selector).first
        found.wait_for(state="attached", timeout=PATIENCE_S * 1000)
        return page.page.locator(selector)

    yield open_dashboard
    page.errors.clear()  # errors of TensorBoard itself do not count


def tags_of(locator: Any) -> list[str]:
    tags: list[str] = locator.evaluate_all("nodes => nodes.map((node) => node.tag)")
    return tags


@pytest.mark.parametrize("kind", ["histogram", "distribution"])
def test_histograms_and_distributions_have_our_tags(dashboard: Any, kind: str) -> None:
    tags = tags_of(dashboard(f"{kind}s", f"tf-{kind}-loader"))
    assert "~~activation/0000.0" in tags


def test_images_and_the_heatmap_are_shown(dashboard: Any) -> None:
    loaders = dashboard("images", "tf-image-loader")
    assert "~~feature_maps/0000.0" in tags_of(loaders)
    loaders.first.locator("img").first.wait_for(state="attached")


def test_alerts_are_shown_as_texts(dashboard: Any) -> None:
    loaders = dashboard("text", "tf-text-loader")
    assert tags_of(loaders) == ["~alerts/0000.nonfinite.0"]
    loaders.first.locator("text=planted fault in module 0").wait_for()


def test_the_hparams_dashboard_shows_hyperparameters(dashboard: Any) -> None:
    view = dashboard("hparams", "tf-hparams-main, hparams-main, tf-hparams-table-view")
    view.first.locator("text=sgd").first.wait_for(state="attached")


def test_each_kind_is_a_folded_group_behind_those_of_the_user_and_the_run(
    dashboard: Any, page: TelemetryPage
) -> None:
    groups = dashboard("timeseries", "metrics-card-groups .group-title")
    *first, run = groups.all_inner_texts()[:3]
    assert (first, run) == (["loss", "valid"], "~run")
    others = groups.all_inner_texts()[3:]
    assert {"~~activation", "~~activation_rms", "~~feature_maps", "~~grad"} <= set(others)
    assert all(name.startswith("~~") for name in others)
    page.page.goto(f"{page.address}?tagFilter=grad_norm%2Ftotal#timeseries")
    page.page.locator('[title="~run/grad_norm/total"]').first.wait_for(state="attached")
