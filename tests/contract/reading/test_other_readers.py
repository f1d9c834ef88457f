"""Other readers of a run: TensorBoard's accumulator, tbparse and wandb."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tbparse
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from wandb.proto import wandb_internal_pb2

import telemetry
from telemetry import HookLogger
from tests.helpers.paths import ROOT

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
test_other_readers.train(writer, histograms="classic")
writer.close()
run.finish()
"""


def train(writer: SummaryWriter | Path, **options: object) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    optimizer = torch.optim.Adam(model.parameters())
    with HookLogger(model, writer, every_n_steps=1, alerts=(), **options) as logger:
        for _ in range(3):
            loss = model(torch.randn(4, 3, 8, 8)).square().mean()
            logger.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@pytest.fixture(scope="module")
def classic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("classic")
    train(folder, histograms="classic")
    return folder


def test_tensorboards_accumulator_finds_histograms_and_images(classic: Path) -> None:
    found = EventAccumulator(str(classic), size_guidance={"histograms": 0}).Reload()
    assert {f"~tensors/{tag}" for tag in ("activation/0000.0", "grad_log10/0000.0.weight")} <= set(
        found.Tags()["histograms"]
    )
    weights = found.Histograms("~tensors/weight/0003.3.weight")
    assert [event.step for event in weights] == [0, 1, 2]
    assert weights[0].histogram_value.num == sum(weights[0].histogram_value.bucket) == 432
    assert weights[0].histogram_value.bucket_limit[-1] == weights[0].histogram_value.max
    image = found.Images("~tensors/feature_maps/0000.0")[0]
    assert image.encoded_image_string.startswith(b"\x89PNG")
    assert "~tensors/input" in found.Tags()["images"]


def test_tbparse_finds_histograms(classic: Path) -> None:
    frame = tbparse.SummaryReader(str(classic)).histograms
    of_weights = frame[frame.tag == "~tensors/weight/0003.3.weight"]
    assert of_weights.step.tolist() == [0, 1, 2]
    assert sum(of_weights.counts.iloc[0]) == 432


def test_both_formats_give_the_same_data(classic: Path, tmp_path: Path) -> None:
    train(tmp_path)
    ours, theirs = telemetry.read(tmp_path), telemetry.read(classic)
    assert set(ours.histogram_tags) == set(theirs.histogram_tags)
    for tag in ours.histogram_tags:
        for step, table in ours.histogram(tag).items():
            assert theirs.histogram(tag)[step] == pytest.approx(table)


@pytest.mark.slow
def test_wandb_syncs_a_run_offline(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", FOR_WANDB, str(tmp_path)],
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
        check=True,
    )
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found: dict[str, str] = {}
    for content in wandb_records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(content)
        found |= {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
    assert json.loads(found["~tensors/grad/0003.3.weight/_type"]) == "histogram"
    assert sum(json.loads(found["~tensors/grad/0003.3.weight/values"])) == 432
    assert json.loads(found["~tensors/feature_maps/0000.0/_type"]) == "images/separated"
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
