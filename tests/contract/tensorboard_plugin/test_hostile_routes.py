"""The plugin's answers for untrusted directories, with both loaders."""

from __future__ import annotations

import logging

import pytest

from tests.helpers.client import Client, OpenClient
from tests.helpers.hostile_runs import KINDS, STEPS, Kind, hostile_run

# On these TensorBoard itself hangs, takes minutes or ends, with one of its loaders or both.
FATAL_TO_TENSORBOARD = {
    "fifo", "no event", "giant length", "record of 3 GiB", "3000 damaged files",
    "picture of 300 MB", "layout of 100 MB", "flight of 100 MB",
}  # fmt: skip
# TensorBoard itself skips these before it calls a plugin.
SKIPPED_BY_TENSORBOARD = {
    "socket", "directory", "endless device", "terminal", "link to itself", "link to nothing",
    "unreadable file", "corrupted record", "text for a scalar", "many values for a scalar",
    "odd bytes for a scalar",
}  # fmt: skip
SLOW = [name for name in KINDS if name not in FATAL_TO_TENSORBOARD]
# It takes 40 ms for a response, and data other than tensors is the same with the other loader.
FAST = [
    "negative shape", "odd byte count", "dimensions beyond memory", "product of 0 mod 2**64",
    "one value for all", "no dimension", "text for numbers", "no text at all", "objects",
    "last step of all", "NaN as step of norms", "histogram of odd bytes", "picture of SVG",
]  # fmt: skip
CASES = [("slow", name) for name in SLOW] + [("fast", name) for name in FAST]


@pytest.mark.parametrize(("open_client", "name"), CASES, indirect=["open_client"])
def test_every_route_answers_for_an_untrusted_directory(
    open_client: OpenClient, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with hostile_run(name) as (log_dir, kind):
        client = open_client(log_dir.parent)
        assert "run" in [run["name"] for run in client.json("runs")]
        caplog.clear()
        check_run(client, kind)
    log = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    if name not in SKIPPED_BY_TENSORBOARD and not kind.in_flight:
        assert len([line for line in log if kind.said in line]) == bool(kind.said), log


def check_run(client: Client, kind: Kind) -> None:
    """Check that the valid part is served and that no route fails."""
    overview = client.json("run", run="run")
    assert [layer["name"] for layer in overview["layers"]] == list(kind.layers)
    assert 7 in [alert["step"] for alert in overview["alerts"]]
    for statistic in ("grad_norm", "weight_norm"):
        _, arrays = client.arrays("matrix", run="run", statistic=statistic)
        assert arrays["steps"].tolist() == list(range(STEPS))
    client.arrays("scalars", run="run")
    assert "run" in [row["name"] for row in client.json("run_table")]
    assert client.json("onsets", run="run", step=STEPS - 1)["layers"] <= len(kind.layers)
    for layer in kind.layers:
        if layer == "\ud800":
            continue  # cannot be part of an address
        client.arrays("layer", run="run", layer=layer)
        client.arrays("histograms", run="run", layer=layer)
        for item in client.json("images", run="run", layer=layer):
            for step in item["steps"]:
                query = {"run": "run", "tag": item["tag"], "step": step}
                assert client.request("image", query).status_code in (200, 404)
