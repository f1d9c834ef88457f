from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.compat.proto.event_pb2 import Event
from torch.utils import tensorboard

from telemetry.events import list_event_files, read_events, summary_writer
from telemetry.events.summary_writer import SummaryWriter
from tests.helpers.board import ReadBoard
from tests.helpers.disks import FreezableDisk

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


def read_runs(log_dir: Path) -> dict[str, list[Event]]:
    """Return the added values per run: all events but the head of a file, without random names."""
    runs: dict[str, list[Event]] = {}
    for path in sorted(log_dir.rglob("*tfevents*")):
        events = [e for e in read_events(path) if e.WhichOneof("what") not in HEAD]
        runs.setdefault(str(path.parent.relative_to(log_dir)), []).extend(events)
    return runs


HEAD = {"file_version", "session_log"}


def flatten(runs: dict[str, list[Event]]) -> list[tuple[str, int, Any]]:
    """Values with their run and step: an event may hold one or several."""
    return [
        (run, event.step, value)
        for run, events in runs.items()
        for event in events
        for value in event.summary.value or [event]
    ]


@pytest.mark.parametrize("add", CALLS.values(), ids=CALLS)
def test_every_method_writes_what_torch_writes(tmp_path: Path, add: Add) -> None:
    for name, writer_type in [("torch", tensorboard.SummaryWriter), ("ours", SummaryWriter)]:
        torch.manual_seed(0)
        with writer_type(tmp_path / name) as writer:
            add(writer)

    ours = flatten(read_runs(tmp_path / "ours"))
    assert ours == flatten(read_runs(tmp_path / "torch"))
    assert ours


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_model_graph_is_shown(tmp_path: Path, read_board: ReadBoard) -> None:
    with SummaryWriter(tmp_path / "run") as writer:
        writer.add_graph(torch.nn.Linear(3, 2), torch.zeros(1, 3))

    assert "__run_graph__" in read_board(tmp_path).blobs("graphs")["run"]


def test_files_exist_once_the_writer_is_built(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path / "run", filename_suffix=".suffix")

    (path,) = list_event_files(tmp_path / "run")

    assert path.name.endswith(".suffix")
    assert list(read_events(path))
    assert writer.get_logdir() == tmp_path / "run"
    writer.close()


def test_the_default_directory_is_that_of_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with SummaryWriter(comment="-tuned") as writer:
        assert writer.log_dir.startswith("runs/")

    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.endswith("-tuned")


@pytest.mark.parametrize("earlier", [SummaryWriter, tensorboard.SummaryWriter])
def test_a_resumed_run_is_one_curve(
    tmp_path: Path, read_board: ReadBoard, earlier: type[tensorboard.SummaryWriter]
) -> None:
    run = tmp_path / "run"
    with earlier(str(run)) as writer:
        for step in range(0, 100, 10):
            writer.add_scalar("loss", 1.0, step)
    with SummaryWriter(run, purge_step=50) as writer:
        for step in range(50, 80, 10):
            writer.add_scalar("loss", 2.0, step)
    with SummaryWriter(run, purge_step=60) as writer:
        for step in range(60, 80, 10):
            writer.add_scalar("loss", 3.0, step)

    shown = read_board(tmp_path).scalars()["run"]["loss"]

    assert shown == [
        *[(step, 1.0) for step in range(0, 50, 10)],
        (50, 2.0),
        (60, 3.0),
        (70, 3.0),
    ]


def test_torch_can_resume_a_run_of_ours(
    tmp_path: Path, read_board: ReadBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    # Of two files of one second, torch's need not be named like the later one.
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: 1.7e9)
        with SummaryWriter(run) as writer:
            for step in range(5):
                writer.add_scalar("loss", 1.0, step)
    with tensorboard.SummaryWriter(str(run), purge_step=3) as writer:
        writer.add_scalar("loss", 2.0, 3)

    shown = read_board(tmp_path).scalars()["run"]["loss"]

    assert shown == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 2.0)]


def test_a_closed_writer_starts_a_new_file(tmp_path: Path, read_board: ReadBoard) -> None:
    writer = SummaryWriter(tmp_path / "run", purge_step=0)
    for step in range(3):
        writer.add_scalar("loss", 1.0, step)
        writer.close()
        writer.close()

    assert len(list_event_files(tmp_path / "run")) == 3
    shown = read_board(tmp_path).scalars()["run"]["loss"]
    assert [step for step, _ in shown] == [0, 1, 2]


def test_flush_writes_everything_to_the_files(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path, flush_secs=3600)
    writer.add_scalar("loss", 1.0, 3)
    writer.add_scalars("all", {"train": 1.0}, 3)

    writer.flush()

    assert {run: len(events) for run, events in read_runs(tmp_path).items()} == {
        ".": 1,
        "all_train": 1,
    }
    writer.close()
    writer.flush()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(OSError, match="file"):
        SummaryWriter(tmp_path / "file" / "run")


def test_a_full_disk_raises_nothing_in_training(tiny_disk: Path) -> None:
    writer = SummaryWriter(tiny_disk / "run")
    (tiny_disk / "ballast").write_bytes(bytes(110_000))

    for step in range(60):
        writer.add_text("note", "x" * 1000, step)
        writer.add_scalars("all", {"train": 1.0}, step)
    writer.flush()
    writer.add_hparams({"lr": 0.1}, {"best": 0.5})
    (tiny_disk / "ballast").unlink()
    writer.close()

    runs = read_runs(tiny_disk / "run")
    assert len(runs["."]) == len(runs["all_train"]) == 60


def test_a_hanging_disk_costs_the_timeout_once_for_all_files(
    freezable_disk: FreezableDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary_writer, "PATIENCE_S", 0.5)
    writer = SummaryWriter(freezable_disk.path / "run")
    writer.add_scalars("all", {str(number): 1.0 for number in range(6)}, 0)
    writer.flush()

    with freezable_disk.frozen():
        writer.add_scalars("all", {str(number): 1.0 for number in range(6)}, 1)
        start = time.monotonic()
        writer.close()
        assert 0.5 <= time.monotonic() - start < 2.5  # there are seven


@pytest.mark.parametrize("wrong", [{"tag": 3}, {"scalar_value": "high"}, {"global_step": "first"}])
def test_wrong_arguments_raise_as_with_torch(tmp_path: Path, wrong: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"tag": "loss", "scalar_value": 1.0, "global_step": 3, **wrong}
    torch_writer = tensorboard.SummaryWriter(str(tmp_path / "torch"))
    with torch_writer, pytest.raises(Exception) as caught:  # noqa: PT011
        torch_writer.add_scalar(**arguments)
    with SummaryWriter(tmp_path / "ours") as writer, pytest.raises(caught.type):
        writer.add_scalar(**arguments)


@pytest.mark.parametrize(
    "add",
    [
        lambda w: w.add_histogram("grad", torch.empty(0)),
        lambda w: w.add_histogram("grad", [0.5]),
        lambda w: w.add_histogram("grad", torch.tensor([np.nan])),
        lambda w: w.add_histogram(3, torch.ones(3)),
        lambda w: w.add_histogram_raw("grad", 0, 1, 1, 1, 1, [1.0], ["many"]),
        lambda w: w.add_histogram_raw("grad", 0, 1, 1, 1, 1, [1.0], [1.0, 2.0]),
        lambda w: w.add_histogram_raw("grad", "low", 1, 1, 1, 1, [1.0], [1.0]),
    ],
)
def test_wrong_histograms_raise_as_with_torch(tmp_path: Path, add: Add) -> None:
    torch_writer = tensorboard.SummaryWriter(str(tmp_path / "torch"))
    with torch_writer, pytest.raises(Exception) as caught:  # noqa: PT011
        add(torch_writer)
    with SummaryWriter(tmp_path / "ours") as writer, pytest.raises(caught.type):
        add(writer)


def test_hparams_that_are_not_a_dictionary_are_refused(tmp_path: Path) -> None:
    with SummaryWriter(tmp_path) as writer, pytest.raises(TypeError, match="dictionary"):
        writer.add_hparams([("lr", 0.1)], {})  # type: ignore[arg-type]


def test_a_deep_copied_model_that_holds_a_writer_writes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SummaryWriter(tmp_path) as writer:
        model = torch.nn.Linear(2, 2)
        model.writer = writer
        twin = copy.deepcopy(model)

        twin.writer.add_scalar("loss", 1.0, 3)
        twin.writer.add_scalars("all", {"train": 1.0}, 3)
        twin.writer.add_hparams({"lr": 0.1}, {"best": 0.5})
        twin.writer.flush()
        twin.writer.close()
        twin.writer.add_scalar("loss", 1.0, 4)

    assert read_runs(tmp_path) == {".": []}
    assert "writes nothing" in caplog.text
