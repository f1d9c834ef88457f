"""``telemetry.SummaryWriter`` takes the place of torch's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.compat.proto.event_pb2 import Event
from torch.utils import tensorboard

from telemetry import SummaryWriter
from tests.helpers.board import ReadBoard
from tests.helpers.tiny_run import event_files, events_of

LAYOUT = {"loss": {"all": ["Multiline", ["loss/train", "loss/test"]]}}
CURVE = [[1, 2], [0, 1], [2, 1], [1, 0], [0.5, 0.6], [0.7, 0.8]]

Add = Callable[[tensorboard.SummaryWriter], None]

# A call of every method that adds something.
CALLS: dict[str, Add] = {
    "float": lambda w: w.add_scalar("loss", 0.1, 7, 5.0),
    "no step": lambda w: w.add_scalar("loss", 0.1, walltime=5.0),
    "int": lambda w: w.add_scalar("loss", 3, 7, 5.0),
    "tensor": lambda w: w.add_scalar("loss", torch.tensor([0.1]), 7, 5.0),
    "nan": lambda w: w.add_scalar("loss", -np.inf, np.int64(7), 5.0),
    "new style": lambda w: w.add_scalar("loss", 0.1, 7, 5.0, new_style=True),
    "double": lambda w: w.add_scalar("loss", 0.1, 7, 5.0, True, True),
    "scalars": lambda w: w.add_scalars("loss/all", {"train": 0.1, "test": torch.ones(1)}, 7, 5.0),
    "tensor data": lambda w: w.add_tensor("data", torch.arange(6.0).view(2, 3), 7, 5.0),
    "histogram": lambda w: w.add_histogram("grad", torch.linspace(-1, 2, 50), 7, walltime=5.0),
    "raw histogram": lambda w: w.add_histogram_raw("grad", 0, 1, 3, 2, 2, [0, 1], [1, 2], 7, 5.0),
    "few bins": lambda w: w.add_histogram("grad", np.arange(50.0), 7, walltime=5.0, max_bins=20),
    "other bins": lambda w: w.add_histogram("grad", np.arange(50.0), 7, "auto", 5.0),
    "infinite": lambda w: w.add_histogram("grad", np.array([1, np.inf]), 7, walltime=5.0),
    "raw arrays": lambda w: w.add_histogram_raw(
        "grad", 0, 1, 3, 2, 2, np.arange(2.0), torch.arange(2), 7, 5.0
    ),
    "image": lambda w: w.add_image("maps", torch.zeros(3, 4, 5), 7, 5.0),
    "images": lambda w: w.add_images("maps", torch.zeros(2, 3, 4, 5), 7, 5.0),
    "boxes": lambda w: w.add_image_with_boxes(
        "boxes", torch.zeros(3, 8, 8), torch.tensor([[1, 1, 4, 4]]), 7, 5.0
    ),
    "audio": lambda w: w.add_audio("tone", torch.zeros(1, 20), 7, walltime=5.0),
    "text": lambda w: w.add_text("note", "**fine**", 7, 5.0),
    "onnx": lambda w: w._get_file_writer().add_onnx_graph(Event(step=1), 5.0),
    "graph": lambda w: w._get_file_writer().add_graph((Event(step=1), Event(step=2)), 5.0),
    "curve": lambda w: w.add_pr_curve("pr", np.arange(3) > 1, np.arange(3) / 3, 7, 9, None, 5.0),
    "raw curve": lambda w: w.add_pr_curve_raw("pr", *CURVE, 7, 2, walltime=5.0),
    "mesh": lambda w: w.add_mesh("mesh", torch.zeros(1, 3, 3), global_step=7, walltime=5.0),
    "custom": lambda w: w.add_custom_scalars(LAYOUT),
    "multiline": lambda w: w.add_custom_scalars_multilinechart(["a", "b"]),
    "margin": lambda w: w.add_custom_scalars_marginchart(["a", "b", "c"]),
    "hparams": lambda w: w.add_hparams(
        {"lr": 0.1, "deep": True, "kind": "adam"}, {"best": 0.5}, run_name="trial", global_step=7
    ),
    "event": lambda w: w.file_writer.add_event(Event(graph_def=b"graph"), 7, 5.0),
}


def values_of(log_dir: Path) -> list[tuple[str, int, Any]]:
    """Return all values with their run and step, without the head of a file and random names."""
    return [
        (str(path.parent.relative_to(log_dir)), event.step, value)
        for path in sorted(log_dir.rglob("*tfevents*"))
        for event in events_of(path)
        if event.WhichOneof("what") not in {"file_version", "session_log"}
        for value in event.summary.value or [event]
    ]


@pytest.mark.parametrize("add", CALLS.values(), ids=CALLS)
def test_every_method_writes_what_torch_writes(tmp_path: Path, add: Add) -> None:
    for name, writer_type in [("torch", tensorboard.SummaryWriter), ("ours", SummaryWriter)]:
        torch.manual_seed(0)
        with writer_type(tmp_path / name) as writer:
            add(writer)
    ours = values_of(tmp_path / "ours")
    assert ours == values_of(tmp_path / "torch")
    assert ours


def test_a_resumed_run_is_one_curve_and_files_follow_each_other(
    tmp_path: Path, read_board: ReadBoard
) -> None:
    run = tmp_path / "run"
    for first, value in ((0, 1.0), (50, 2.0), (60, 3.0)):
        with SummaryWriter(run, purge_step=first) as writer:
            for step in range(first, 80, 10):
                writer.add_scalar("loss", value, step)
                writer.close()
    assert len(event_files(run)) == 13
    shown = read_board(tmp_path).scalars()["run"]["loss"]
    ones = [(step, 1.0) for step in range(0, 50, 10)]
    assert shown == [*ones, (50, 2.0), (60, 3.0), (70, 3.0)]


def test_a_full_disk_raises_nothing_in_training(tiny_disk: Path) -> None:
    writer = SummaryWriter(tiny_disk / "run")
    (tiny_disk / "ballast").write_bytes(bytes(110_000))
    for step in range(60):
        writer.add_text("note", "x" * 1000, step)
        writer.add_scalars("all", {"train": 1.0}, step)
    writer.flush()
    (tiny_disk / "ballast").unlink()
    writer.close()
    runs = [run for run, _, _ in values_of(tiny_disk / "run")]
    assert (runs.count("."), runs.count("all_train")) == (60, 60)
