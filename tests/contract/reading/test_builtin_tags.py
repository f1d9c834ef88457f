"""The page finds histograms, pictures and curves of TensorBoard's dashboards by their tags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from telemetry import Layout, Module
from tests.helpers.board import open_slow
from tests.helpers.client import Client
from tests.helpers.hostile_runs import png
from tests.helpers.known_runs import layout_of, write_dashboards, write_run

NAMES = ["encoder.0", "other", "encoder.1", "encoder.1[1]", "a\nb", "last"]
BUCKETS = {0: ([0.0], [1.0], [2.0])}


def write(
    log_dir: Path,
    layout: Layout | None = None,
    loss_tag: str | None = None,
    logged: Mapping[str, Mapping[int, float]] | None = None,
    **data: object,
) -> Client:
    layout = layout or layout_of(NAMES)
    write_run(log_dir, layout, steps=[0], losses=False, loss_tag=loss_tag, logged=logged)
    write_dashboards(log_dir, **data)  # type: ignore[arg-type]
    return Client(open_slow(log_dir), log_dir)


def histograms(client: Client, layer: str) -> list[tuple[str, str]]:
    """Return kind and name of each."""
    header, _ = client.arrays("histograms", run=".", layer=layer)
    return [(item["kind"], item["name"]) for item in header["histograms"]]


def test_histograms_of_outputs_come_before_those_of_parameters(tmp_path: Path) -> None:
    tags = [
        "grad/0002.encoder.1.weight",
        "activation_grad/0002.encoder.1",
        "activation/0002.encoder.1[0]",
        "weight/0002.encoder.1.weight",
        "activation/0012.encoder.11",
        "activation/0002.encoder.1.inner",
        "validation/activation/0002.encoder.1",
        "activation/0002.encoder.1[1]",
        "activation/0003.encoder.1[1]",  # another layer, which is called like that output
        "activation/0004.a\\nb",
        "activation/0004.a\\nb[1]",
    ]
    client = write(tmp_path, histograms=dict.fromkeys(tags, BUCKETS))
    assert histograms(client, "encoder.1") == [
        ("outputs", "encoder.1[1]"), ("outputs", "encoder.1[0]"),
        ("gradients of outputs", "encoder.1"),
        ("gradients", "encoder.1.weight"), ("parameters", "encoder.1.weight"),
    ]  # fmt: skip
    assert histograms(client, "encoder.1[1]") == [("outputs", "encoder.1[1]")]
    assert histograms(client, "a\nb") == [("outputs", "a\\nb[1]"), ("outputs", "a\\nb")]
    assert histograms(client, "last") == []
    model = Layout(modules=(Module(name="", type_name="Net"),), parameters=())
    tags = ["activation/0000.Net", "activation/0001.encoder.1"]
    client = write(tmp_path / "model", model, histograms=dict.fromkeys(tags, BUCKETS))
    assert histograms(client, "") == [("outputs", "Net")]


def test_pictures_are_found_by_name(tmp_path: Path) -> None:
    tags = ["feature_maps/0002.encoder.1", "sample/feature_maps/0002.encoder.1"]
    tags += ["filters/0002.encoder.1", "input", "x"]
    client = write(tmp_path, pictures={key: {0: png(2, 2)} for key in tags})
    found = client.json("images", run=".", layer="encoder.1")
    assert [item["tag"] for item in found] == tags[:4]
    assert found[1]["kind"] == "feature maps of sample"
    assert client.json("images", run=".", layer="last") == []


def curves(client: Client) -> list[tuple[str, str]]:
    header, _ = client.arrays("scalars", run=".")
    return [(curve["kind"], curve["tag"]) for curve in header["curves"]]


def scalars(*tags: str) -> dict[str, dict[int, float]]:
    return {key: {0: 1.0} for key in tags}


@pytest.mark.parametrize(
    ("tags", "chosen", "shown"),
    [
        (["train/loss", "loss", "ce", "blossom"], None, ["loss"]),
        (["train/loss", "loss", "ce", "blossom"], "ce", ["ce"]),
        (["train/loss", "loss", "ce", "blossom"], "gone", ["loss"]),
        (["blossom", "val_loss"], None, []),
    ],
)
def test_the_loss_and_the_learning_rates_are_shown(
    tmp_path: Path, tags: list[str], chosen: str | None, shown: list[str]
) -> None:
    rates = ["learning_rate/0", "learning_rate/1"]
    client = write(tmp_path, loss_tag=chosen, scalars=scalars(*tags, *rates))
    assert curves(client) == [
        *(("loss", tag) for tag in shown), *(("learning rate", tag) for tag in rates)
    ]  # fmt: skip


def test_times_are_shown_if_all_are_known(tmp_path: Path) -> None:
    times = [f"~run/time/{part}_s" for part in ("data_wait", "forward", "backward", "optimizer")]
    memory = "~run/memory/host_rss_bytes"
    tags = [memory, *reversed(times), "~run/time/tokens_per_s"]
    client = write(tmp_path / "all", logged=scalars(*tags))
    expected = [("time", tag.removeprefix("~run/")) for tag in times]
    assert curves(client) == [*expected, ("memory", "memory/host_rss_bytes")]
    client = write(tmp_path / "some", logged=scalars(memory, *times[1:]))
    assert curves(client) == []
