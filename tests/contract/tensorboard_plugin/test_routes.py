"""Responses of the plugin with both loaders, and requests that it refuses."""

from __future__ import annotations

import argparse
import re
from configparser import ConfigParser
from pathlib import Path

import numpy as np
import pytest

from telemetry.events import FileWriter, summaries
from telemetry.events.page_format import PLUGIN_NAME, Chunk, layout_tag
from telemetry.layers import MATRIX_STATISTICS, PAGE_STATISTICS
from telemetry.layers.record import Group
from telemetry.layers.units import encode_units
from telemetry.reading import payloads
from telemetry.records.rows import Rows
from telemetry.records.sketch import Sketch
from telemetry.tensorboard_plugin import plugin
from telemetry.tensorboard_plugin.loader import TelemetryLoader
from telemetry.writing import hparams
from telemetry.writing.page import PageWriter
from tests.helpers import serialized
from tests.helpers.client import Client, OpenClient
from tests.helpers.hostile_runs import png
from tests.helpers.known_runs import alert_at, layout_of, write_run
from tests.helpers.paths import ROOT

HOSTILE = "<img src=x onerror=alert(1)>"
PNG = png(1, 1)


def norms(step: int) -> np.ndarray:
    return np.array([step, 2 * step], np.float32)


def matrices(step: int) -> np.ndarray:
    return np.full((2, len(MATRIX_STATISTICS)), 0.5, np.float32)


@pytest.fixture
def client(tmp_path: Path, open_client: OpenClient) -> Client:
    """One run, ``demo``, of 40 steps, with two layers, of which one has a hostile name."""
    run = tmp_path / "demo"
    write_run(
        run, layout_of(["a", HOSTILE]), steps=range(40), norms=norms, matrices=matrices, every=10,
        alerts=[alert_at(7, HOSTILE, summary=HOSTILE, value=float("inf"))],
    )  # fmt: skip
    writer = FileWriter(run)
    edges = np.linspace(-1, 1, 11)
    for step in (0, 10):
        buckets = serialized.histogram("activation/0000.a", edges[:-1], edges[1:], np.ones(10))
        picture = summaries.image("feature_maps/0000.a", [PNG], 1, 1)
        no_picture = summaries.image("filters/0000.a", [b"<svg onload=alert(1)>"], 1, 1)
        given = summaries.image("~tensors/input", [PNG], 1, 1)
        writer.write_values([buckets, picture, no_picture, given], step)
    tag = Chunk(kind="u", session="20260101-000000.000-aaaa", layout=0, number=0).tag
    extremes = np.array([[0, 0], [-1, 2], [-10, 10]], np.float32)
    rows = Rows.of([Sketch.empty()], units=[extremes])
    units = encode_units(Group(rows=rows, modules=np.array([0]), size=2))
    for step in (0, 10, 20):
        writer.write_values([summaries.tensor(tag, units, PLUGIN_NAME)], step)
    writer.write_values(hparams.values_of({"lr": 0.5, "n": "a"}, ["loss"]), 0)
    writer.close()
    return open_client(tmp_path)


def test_runs_are_listed_with_their_last_step(client: Client) -> None:
    [run] = client.json("runs")
    assert (run["name"], run["lastStep"]) == ("demo", 39)


def test_the_table_of_runs_has_status_hparams_loss_and_alert(client: Client) -> None:
    [run] = client.json("run_table")
    assert (run["name"], run["status"], run["hparams"]) == ("demo", "live", {"lr": 0.5, "n": "a"})
    least = pytest.approx(0.05)
    assert run["loss"] == {"tag": "loss", "last": least, "best": least}
    alert = {"kind": "exploding_gradient", "severity": "error", "step": 7, "module_name": HOSTILE}
    assert (run["alert"], run["alertCount"]) == (alert, 1)
    assert client.json("run_table") == [run]


def test_onsets_are_empty_at_a_late_step_and_null_at_an_early_one(client: Client) -> None:
    found = client.json("onsets", run="demo", step=39)
    assert found == {"onsets": [], "count": 0, "layers": 2}
    assert client.json("onsets", run="demo", step=5)["onsets"] is None


def test_the_overview_of_a_run_has_its_layers_statistics_and_alerts(client: Client) -> None:
    run = client.json("run", run="demo")
    assert [layer["name"] for layer in run["layers"]] == ["a", HOSTILE]
    assert run["layers"][0]["parameters"] == [{"name": "a.weight", "shape": [2, 3]}]
    assert [statistic["name"] for statistic in run["statistics"]] == [
        s.name for s in PAGE_STATISTICS if not s.measured_in
    ]
    assert run["alerts"][0]["value"] == "inf"
    assert run["alerts"][0]["module_name"] == HOSTILE


def test_a_matrix_has_the_written_values(client: Client) -> None:
    header, arrays = client.arrays("matrix", run="demo", statistic="grad_norm")
    assert header["rows"] == 2
    np.testing.assert_array_equal(arrays["steps"], np.arange(40))
    np.testing.assert_array_equal(arrays["values"], [norms(step) for step in range(40)])


def test_a_matrix_can_be_requested_from_a_step_on(client: Client) -> None:
    query = {"run": "demo", "statistic": "grad_norm", "first_step": 38}
    _, arrays = client.arrays("matrix", **query)
    assert arrays["steps"].tolist() == [38, 39]


def test_a_large_matrix_is_reduced(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "MAX_CELLS", 10)
    monkeypatch.setattr(plugin, "MAX_ROWS", 1)
    header, arrays = client.arrays("matrix", run="demo", statistic="grad_norm")
    assert (header["layerFactor"], header["stepFactor"]) == (2, 4)
    assert arrays["values"].reshape(-1).tolist() == [2.0 * step for step in range(3, 40, 4)]


def test_loss_and_learning_rates_are_served(client: Client) -> None:
    header, arrays = client.arrays("scalars", run="demo")
    kinds = [curve["kind"] for curve in header["curves"]]
    assert kinds == ["loss", "learning rate"]
    assert arrays["values0"][0] == 2.0


def test_a_layer_is_served_over_time(client: Client) -> None:
    header, arrays = client.arrays("layer", run="demo", layer="a")
    number = header["statistics"].index("update_ratio")
    assert arrays[f"statistics{number}.steps"].tolist() == [0, 10, 20, 30]
    assert header["parameters"] == ["a.weight"]


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


def test_only_png_data_is_served_as_a_picture(client: Client) -> None:
    query = {"run": "demo", "tag": "filters/0000.a", "step": 10}
    assert client.request("image", query).status_code == 404


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
    def fail(*_: object) -> None:
        raise RuntimeError("a secret path")

    monkeypatch.setattr(payloads, "overview", fail)
    response = client.request("run", {"run": "demo"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert "a secret path" in caplog.text


def test_the_page_and_its_modules_are_served(client: Client) -> None:
    response = client.request("static/index.js")
    assert response.status_code == 200
    assert response.content_type.startswith("text/javascript")
    keywords = re.findall(r"^(import .*|export .*)", response.text, re.MULTILINE)
    assert keywords == ["export const { render } = $index;"]  # all modules in one request
    assert client.request("static/permalink.js").status_code == 200
    assert client.request("static/style.css").content_type.startswith("text/css")


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


def test_data_of_a_newer_format_is_reported(tmp_path: Path, open_client: OpenClient) -> None:
    writer = FileWriter(tmp_path / "future")
    tag = layout_tag("20990101-000000.000000-aaaa", 0)
    writer.write_values([summaries.tensor(tag, b'{"format": 2}', PLUGIN_NAME)], 0)
    writer.close()
    answer = open_client(tmp_path).json("run", run="future")
    assert "format 2" in answer["newerFormat"]


def test_a_log_directory_without_our_data_has_no_runs(
    tmp_path: Path, open_client: OpenClient
) -> None:
    writer = FileWriter(tmp_path / "other")
    writer.write_values([summaries.scalar("loss", 1.0)], 0)
    writer.close()
    client = open_client(tmp_path)
    assert client.json("runs") == []
    assert client.request("run", {"run": "other"}).status_code == 404


def test_a_run_with_an_alert_and_no_step_is_served(tmp_path: Path, open_client: OpenClient) -> None:
    page, writer = PageWriter(), FileWriter(tmp_path / "early")
    writer.write_values([page.alert_value(alert_at(0, None), 0)], 0)
    end = page.end_value(None)
    assert end is not None
    writer.write_values([end], 0)
    writer.close()
    client = open_client(tmp_path)
    run = client.json("run", run="early")
    assert (run["layers"], len(run["alerts"])) == ([], 1)
    [row] = client.json("run_table")
    assert (row["status"], row["alertCount"]) == ("ended", 1)
    assert row["started"] > 1e9
    matrix = {"run": "early", "statistic": "grad_norm"}
    assert client.request("matrix", matrix).status_code == 200
    assert client.json("onsets", run="early", step=0)["layers"] == 0


def test_the_page_is_in_the_list_of_plugins(client: Client) -> None:
    listed = client.get("/data/plugins_listing").json["telemetry"]
    assert listed["enabled"]
    assert listed["tab_name"] == "Telemetry"
    assert listed["loading_mechanism"]["module_path"] == "/data/plugin/telemetry/static/index.js"


def test_tensorboard_keeps_every_step_unless_the_user_sets_a_limit() -> None:
    flags = argparse.Namespace(samples_per_plugin={"images": 5})
    TelemetryLoader().fix_flags(flags)
    assert flags.samples_per_plugin == {"images": 5, "telemetry": 0}
    flags = argparse.Namespace(samples_per_plugin={"telemetry": 7})
    TelemetryLoader().fix_flags(flags)
    assert flags.samples_per_plugin == {"telemetry": 7}


def test_the_entry_point_and_the_static_files_are_declared() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    declared = config["options.entry_points"]["tensorboard_plugins"]
    assert declared.split("=")[1].strip() == (
        f"{TelemetryLoader.__module__}:{TelemetryLoader.__qualname__}"
    )
    assert config["options.package_data"]["telemetry.tensorboard_plugin"] == "static/*"
