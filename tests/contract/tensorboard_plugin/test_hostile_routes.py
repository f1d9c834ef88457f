"""The plugin's answers for untrusted directories, with both loaders."""

from __future__ import annotations

import logging

import pytest

from tests.helpers.client import Client, OpenClient
from tests.helpers.hostile_runs import CURVE, KINDS, STEPS, Kind, hostile_run

# On these TensorBoard itself hangs, takes minutes or ends, with one of its loaders or both.
FATAL_TO_TENSORBOARD = {"fifo for events", "no event", "event of 3 GiB", "picture of 300 MB"}
# TensorBoard itself skips this before it calls a plugin.
SKIPPED_BY_TENSORBOARD = {"corrupted event"}
# The page reads no curves of event files, and the log has the first 50 lines alone.
NOT_IN_THE_LOG = {name for name, kind in KINDS.items() if kind.said in (CURVE, "more")}
SLOW = [name for name in KINDS if name not in FATAL_TO_TENSORBOARD]
# Run logs are the same with the other loader.
FAST = ["negative shape", "product of 0 mod 2**64", "histogram of odd bytes", "picture of SVG"]
CASES = [("slow", name) for name in SLOW] + [("fast", name) for name in FAST]


@pytest.mark.parametrize(("open_client", "name"), CASES, indirect=["open_client"])
def test_every_route_answers_for_an_untrusted_directory(
    open_client: OpenClient, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with hostile_run(name) as (log_dir, kind):
        client = open_client(log_dir.parent)
        caplog.clear()
        assert "run" in [run["name"] for run in client.json("runs")]
        check_run(client, kind)
    log = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    if name not in SKIPPED_BY_TENSORBOARD | NOT_IN_THE_LOG:
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
    assert "run" in [row["name"] for row in client.json("runs")]
    assert client.json("onsets", run="run", step=STEPS - 1)["layers"] <= len(kind.layers)
    for layer in kind.layers[:10]:
        client.arrays("layer", run="run", layer=layer)
        client.arrays("units", run="run", layer=layer)
        client.arrays("histograms", run="run", layer=layer)
        for item in client.json("images", run="run", layer=layer):
            for step in item["steps"]:
                query = {"run": "run", "tag": item["tag"], "step": step}
                assert client.request("image", query).status_code in (200, 404)
