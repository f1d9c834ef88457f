"""Responses of the plugin with both loaders, and requests that it refuses."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest
from tensorboard.plugins.base_plugin import TBContext
from torch import nn

from telemetry import HookLogger
from tests.helpers.board import loader
from tests.helpers.client import Client, OpenClient
from tests.helpers.hostile_runs import png
from tests.helpers.known_runs import COLUMN, alert_at, layout_of, write_dashboards, write_run
from tests.helpers.paths import ROOT

HOSTILE = "<img src=x onerror=alert(1)>"
PNG = png(2, 2)


def write_demo(run: Path) -> None:
    """Write 40 steps of two layers, of which one has a hostile name."""
    extremes = np.array([[0, 0], [-1, 2], [-10, 10]], np.float32)
    write_run(
        run, layout_of(["a", HOSTILE]), steps=range(40), every=10,
        norms=lambda step: np.array([step, 2 * step], np.float32),
        matrices=lambda step: np.full((2, len(COLUMN)), 0.5, np.float32),
        units=lambda step: extremes if step < 30 else None,
        alerts=[alert_at(7, HOSTILE, summary=HOSTILE, value=float("inf"))],
        hparams={"lr": 0.5, "n": "a"},
    )  # fmt: skip
    edges = np.linspace(-1, 1, 11)
    buckets = (edges[:-1], edges[1:], np.ones(10))
    pictures = {"feature_maps/0000.a": PNG, "filters/0000.a": b"<svg>", "~~input": PNG}
    write_dashboards(
        run, histograms={"activation/0000.a": {0: buckets, 10: buckets}},
        pictures={tag: {0: picture, 10: picture} for tag, picture in pictures.items()},
    )  # fmt: skip


@pytest.fixture(scope="module", params=["slow", "fast"])
def client(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """One run, ``demo``, which no test changes."""
    logdir = tmp_path_factory.mktemp("logdir")
    write_demo(logdir / "demo")
    with loader(request.param, tmp_path_factory) as open_with:
        yield Client(open_with(logdir), logdir)


def test_runs_are_listed_with_status_last_step_hparams_loss_and_alert(client: Client) -> None:
    [run] = client.json("runs")
    assert (run["name"], run["status"], run["lastStep"]) == ("demo", "live", 39)
    assert run["hparams"] == {"lr": 0.5, "n": "a"}
    least = pytest.approx(0.05)
    assert run["loss"] == {"tag": "loss", "last": least, "best": least}
    alert = {"kind": "exploding_gradient", "severity": "error", "step": 7, "module_name": HOSTILE}
    assert (run["alert"], run["alertCount"]) == (alert | {"resolved": False}, 1)
    assert client.json("runs") == [run]


def test_onsets_are_empty_at_a_late_step_and_null_at_an_early_one(client: Client) -> None:
    found = client.json("onsets", run="demo", step=39)
    assert found == {"onsets": [], "count": 0, "layers": 2}
    assert client.json("onsets", run="demo", step=5)["onsets"] is None


def test_the_overview_of_a_run_has_its_layers_statistics_and_alerts(client: Client) -> None:
    run = client.json("run", run="demo")
    assert [layer["name"] for layer in run["layers"]] == ["a", HOSTILE]
    assert run["layers"][0]["role"] == run["layers"][0]["type"] == "Linear"
    assert run["layers"][0]["parameters"] == [{"name": "a.weight", "shape": [2, 3]}]
    names = {statistic["name"] for statistic in run["statistics"]}
    assert {"grad_norm", "grad_rms", "grad_share", "activation_rms", "update_ratio"} <= names
    assert run["alerts"][0]["value"] == "inf"
    assert run["alerts"][0]["module_name"] == HOSTILE


def test_the_units_of_a_layer_are_served(client: Client) -> None:
    header, arrays = client.arrays("units", run="demo", layer="a", first_step=5)
    assert arrays["steps"].tolist() == [10, 20]
    assert arrays["extremes"].tolist() == [[[0, 0], [-1, 2], [-10, 10]]] * 2
    assert header["dead"] == ["0"] * 2
    assert header["saturated"] == [""] * 2
    assert header["omitted"] == [0] * 2
    _, arrays = client.arrays("units", run="demo", layer=HOSTILE)
    assert arrays["extremes"].shape == (0, 0, 2)


def test_histograms_and_pictures_of_a_layer_are_found(client: Client) -> None:
    header, arrays = client.arrays("histograms", run="demo", layer="a")
    assert [item["kind"] for item in header["histograms"]] == ["outputs"]
    assert arrays["shares0"].sum(axis=1).tolist() == pytest.approx([1, 1])
    pictures = client.json("images", run="demo", layer="a")
    assert [picture["kind"] for picture in pictures] == ["feature maps", "filters", "input"]
    assert pictures[0]["steps"] == [0, 10]
    assert client.json("images", run="demo", layer=HOSTILE) == []
    query = {"run": "demo", "tag": pictures[0]["tag"], "step": 10}
    response = client.request("image", query)
    assert response.data == PNG
    assert response.content_type == "image/png"
    assert response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("route", "query", "status"),
    [
        ("run", {}, 400),
        ("run", {"run": "nothing"}, 404),
        ("run", {"run": "../demo"}, 404),
        ("run", {"run": "demo\0"}, 400),
        ("matrix", {"run": "demo"}, 400),
        ("matrix", {"run": "demo", "statistic": "nonsense"}, 400),
        ("matrix", {"run": "demo", "statistic": "activation_mean"}, 400),  # TensorBoard's alone
        ("matrix", {"run": "demo", "statistic": "grad_norm", "first_step": "-1"}, 400),
        ("matrix", {"run": "demo", "statistic": "grad_norm", "first_step": "1e3"}, 400),
        ("matrix", {"run": "demo", "statistic": "grad_norm", "last_layer": "٣"}, 400),
        ("matrix", {"run": "demo", "statistic": "grad_norm", "last_layer": "9" * 30}, 400),
        ("onsets", {"run": "demo"}, 400),
        ("onsets", {"run": "demo", "step": "-1"}, 400),
        ("onsets", {"run": "nothing", "step": "1"}, 404),
        ("layer", {"run": "demo", "layer": "nothing"}, 404),
        ("layer", {"run": "demo"}, 400),
        ("units", {"run": "demo", "layer": "nothing"}, 404),
        ("units", {"run": "demo", "layer": "a", "last_step": "x"}, 400),
        ("histograms", {"run": "demo", "layer": HOSTILE + "x"}, 404),
        ("image", {"run": "demo", "tag": "feature_maps/0000.a"}, 400),
        ("image", {"run": "demo", "tag": "feature_maps/0000.a", "step": "3"}, 404),
        ("image", {"run": "demo", "tag": "nothing", "step": "0"}, 404),
        ("image", {"run": "demo", "tag": "filters/0000.a", "step": "10"}, 404),  # no PNG file
    ],
)
def test_invalid_requests_are_refused_in_one_line(
    client: Client, route: str, query: dict[str, str], status: int
) -> None:
    response = client.request(route, query)
    assert response.status_code == status
    assert set(response.json) == {"error"}
    assert "Traceback" not in response.text
    assert "\n" not in response.json["error"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("route", ["runs", "static/index.js"])
def test_only_get_requests_are_answered(client: Client, method: str, route: str) -> None:
    assert client.request(route, method=method).status_code == 405


def test_a_failure_response_contains_no_details(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a secret path")

    monkeypatch.setattr(type(client.provider), "list_tensors", fail)
    response = client.request("histograms", {"run": "demo", "layer": "a"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "a secret path" in caplog.text


def test_the_page_is_listed_and_served_with_its_modules(client: Client) -> None:
    listed = client.get("/data/plugins_listing").json["telemetry"]
    assert (listed["enabled"], listed["tab_name"]) == (True, "Telemetry")
    assert listed["loading_mechanism"]["module_path"] == "/data/plugin/telemetry/static/index.js"
    response = client.request("static/index.js")
    assert response.status_code == 200
    assert response.content_type.startswith("text/javascript")
    keywords = re.findall(r"^(import .*|export .*)", response.text, re.MULTILINE)
    # All modules are in one request.
    assert keywords == ["export const { render, renderReport } = $app;"]
    assert client.request("static/state.js").status_code == 200
    assert client.request("static/style.css").content_type.startswith("text/css")


@pytest.mark.parametrize(
    ("route", "query"),
    [
        ("static/index.js", {}),
        ("runs", {}),
        ("matrix", {"run": "demo", "statistic": "grad_norm"}),
    ],
)
def test_what_has_not_changed_is_not_sent_again(
    client: Client, route: str, query: dict[str, str]
) -> None:
    first = client.request(route, query)
    assert first.headers["Cache-Control"].startswith("no-cache")
    known = {"If-None-Match": first.headers["ETag"]}
    again = client.request(route, query, headers=known)
    assert (again.status_code, again.data) == (304, b"")
    assert client.request(route, query, headers={"If-None-Match": '"other"'}).data == first.data


@pytest.mark.parametrize(
    ("site", "status"),
    [(None, 200), ("none", 200), ("same-origin", 200), ("same-site", 403), ("cross-site", 403)],
)
def test_no_other_site_can_have_a_report_made(
    client: Client, site: str | None, status: int
) -> None:
    headers = {} if site is None else {"Sec-Fetch-Site": site}
    assert client.request("report", {"run": "demo"}, headers=headers).status_code == status


def test_a_run_that_was_deleted_is_not_found(open_client: OpenClient, tmp_path: Path) -> None:
    write_demo(tmp_path / "demo")
    client = open_client(tmp_path)
    matrix = {"run": "demo", "statistic": "grad_norm"}
    assert client.request("matrix", matrix).status_code == 200
    shutil.rmtree(tmp_path / "demo")
    assert client.json("runs") == []
    assert client.request("matrix", matrix).status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "static/../plugin.py",
        "static/..%2fplugin.py",
        "static/%2e%2e/plugin.py",
        "static/..%5cplugin.py",
        "static//etc/passwd",
        "static/%2fetc%2fpasswd",
        "static/",
        "static/index.js/",
        "static/index.js%00.css",
        "static/__init__.py",
    ],
)
def test_no_other_file_can_be_read(client: Client, path: str) -> None:
    response = client.get("/data/plugin/telemetry/" + path)
    assert response.status_code in (301, 308, 400, 404)
    assert "import" not in response.text


def test_a_log_directory_without_our_data_has_no_runs(
    tmp_path: Path, open_client: OpenClient
) -> None:
    write_dashboards(tmp_path / "other", scalars={"loss": {0: 1.0}})
    client = open_client(tmp_path)
    assert client.json("runs") == []
    assert not client.get("/data/plugins_listing").json["telemetry"]["enabled"]
    assert client.request("run", {"run": "other"}).status_code == 404


def test_a_run_with_an_alert_and_no_step_is_served(tmp_path: Path, open_client: OpenClient) -> None:
    model = nn.Linear(2, 1)
    with HookLogger(model, tmp_path / "early") as logger:
        for _ in range(100):
            logger.log(loss=0.5)
    client = open_client(tmp_path)
    run = client.json("run", run="early")
    assert (run["layers"], len(run["alerts"])) == ([], 1)
    [row] = client.json("runs")
    assert (row["status"], row["alertCount"]) == ("ended", 1)
    assert row["started"] > 1e9
    matrix = {"run": "early", "statistic": "grad_norm"}
    assert client.request("matrix", matrix).status_code == 200
    assert client.json("onsets", run="early", step=0)["layers"] == 0


def test_tensorboard_loads_the_declared_plugin() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert config["options.package_data"]["telemetry.tensorboard_plugin"] == "static/*"
    declared = config["options.entry_points"]["tensorboard_plugins"]
    loader = resolve_name(declared.split("=")[1].strip())
    assert loader().load(TBContext()) is None, "without a data provider"
