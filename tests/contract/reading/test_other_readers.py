"""Other readers of a run: TensorBoard's accumulator, tbparse and wandb."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import tbparse
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from wandb.proto import wandb_internal_pb2

from telemetry import HookLogger
from tests.helpers.paths import ROOT
from tests.helpers.scripts import run_script
from tests.helpers.small_runs import fit

FOR_WANDB = """
import sys, wandb
from pathlib import Path
from torch.utils.tensorboard import SummaryWriter
from tests.contract.reading import test_other_readers
folder = Path(sys.argv[1])
settings = wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True, silent=True)
run = wandb.init(
    project="p", mode="offline", sync_tensorboard=True, dir=folder, settings=settings
)
writer = SummaryWriter(folder / "run")
test_other_readers.train(writer)
writer.close()
run.finish()
"""


def train(writer: SummaryWriter | Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    optimizer = torch.optim.Adam(model.parameters())
    with HookLogger(model, writer, every_n_steps=1, alerts=()) as logger:
        fit(logger, 3, lambda step: model(torch.randn(4, 3, 8, 8)).square().mean(), optimizer)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(folder)
    return folder


def test_tbparse_finds_histograms(run: Path) -> None:
    frame = tbparse.SummaryReader(str(run)).tensors
    of_weights = frame[frame.tag == "~~weight/0003.3.weight"]
    assert of_weights.step.tolist() == [0, 1, 2]
    assert of_weights.value.iloc[0][:, 2].sum() == 432


@pytest.mark.slow
def test_wandb_syncs_a_run_offline(tmp_path: Path) -> None:
    paths = {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    run_script(tmp_path, FOR_WANDB, tmp_path, env=paths)
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found: dict[str, str] = {}
    for content in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(content)
        found |= {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
    assert json.loads(found["~~grad/0003.3.weight/_type"]) == "histogram"
    assert sum(json.loads(found["~~grad/0003.3.weight/values"])) == 432
    assert json.loads(found["~~feature_maps/0000.0/_type"]) == "images/separated"
    assert {"loss", "~run/grad_norm/total"} <= set(found)


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records in wandb's file: LevelDB's log format behind 7 bytes."""
    place, whole, block = 7, b"", 32768
    while place + 7 <= len(data):
        _, size, kind = struct.unpack_from("<IHB", data, place)
        if block - place % block < 7 or kind == 0:
            place += block - place % block
            continue
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""
