"""TensorBoard's loaders show each tag, step and value that a run has written."""

from __future__ import annotations

import struct
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import telemetry
from telemetry import HookLogger
from tests.helpers.board import ReadBoard
from tests.helpers.known_runs import alert_at
from tests.helpers.tiny_run import TinyRun, whole_run
from tests.helpers.twins import descend

EVERY_CHARACTER = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]


@pytest.mark.slow
def test_tags_of_every_character_are_shown(tmp_path: Path, read_board: ReadBoard) -> None:
    tags = [f"tag {''.join(EVERY_CHARACTER[i : i + 999])}" for i in range(0, 0x10F800, 999)]
    whole_run(tmp_path / "run", scalars=dict.fromkeys(tags, 1.0))
    shown = read_board(tmp_path).scalars()["run"]
    assert {tag: shown[tag] for tag in tags} == {tag: [(0, 1.0)] for tag in tags}


def test_a_tag_of_ten_thousand_characters_and_large_steps_are_shown(
    tmp_path: Path, read_board: ReadBoard
) -> None:
    tag = "ß/" * 5000
    for step in (2**31, 2**32, 2**53 - 2):
        whole_run(tmp_path / "run", 2, {tag: 1.0}, first_step=step)
    shown = read_board(tmp_path).scalars()["run"][tag]
    assert [step for step, _ in shown] == [
        *(2**31, 2**31 + 1, 2**32, 2**32 + 1, 2**53 - 2, 2**53 - 1)
    ]


def test_numbers_of_every_kind_are_shown(tmp_path: Path, read_board: ReadBoard) -> None:
    values = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 3.4e38]
    run = TinyRun(tmp_path / "run")
    for value in values:
        run.train(1, metric=value)
    run.logger.close()
    shown = [value for _, value in read_board(tmp_path).scalars()["run"]["metric"]]
    np.testing.assert_array_equal(np.float32(shown), np.float32(values))
    assert np.signbit(shown[1])


@pytest.mark.slow
@settings(max_examples=30)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1).map("tag {}".format),
        st.floats(width=32),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 2**53 - 1),
)
def test_logged_values_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, scalars: dict[str, float], step: int
) -> None:
    log_dir = tmp_path_factory.mktemp("run")
    whole_run(log_dir, scalars=scalars, first_step=step)
    table = telemetry.read(log_dir).scalars
    for tag, value in scalars.items():
        [row] = table[table.tag == tag].itertuples()
        assert row.step == step
        np.testing.assert_array_equal(row.value, value)


def test_histograms_pictures_and_texts_are_shown(tmp_path: Path, read_board: ReadBoard) -> None:
    def rule(record: telemetry.StepRecord) -> list[telemetry.Alert]:
        summary = "loss is **NaN** ↯"
        return [alert_at(record.step, None, kind="planted", severity="warning", summary=summary)]

    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 16, 1))
    with HookLogger(model, tmp_path / "run", alerts=[rule]) as logger:
        weight = model[2].weight.detach().clone()
        descend(model, torch.rand(3, 1, 6, 6))
        logger.flush()
        board = read_board(tmp_path)
    [(step, table)] = board.tensors("histograms")["run"]["weight/0002.2.weight"]
    assert step == 0
    assert table[:, 2].sum() == weight.numel()
    pictures = board.blobs("images")["run"]
    assert {"filters/0000.0", "input"} <= pictures.keys()
    [(step, picture)] = pictures["feature_maps/0000.0"]
    assert step == 0
    width_and_height = struct.unpack(">2I", picture[2][16:24])  # of a PNG
    assert tuple(map(int, picture[:2])) == width_and_height
    assert picture[2].startswith(b"\x89PNG")
    texts = board.tensors("text")["run"]
    assert any("loss is **NaN** ↯" in text[0].decode() for [(_, text)] in texts.values())


def test_a_given_writer_may_write_to_a_remote_directory(tmp_path: Path) -> None:
    with SummaryWriter("memory://logs/run") as writer:
        run = TinyRun(writer)
        run.train(3)
        run.logger.flush()
        run.train(1)
        run.logger.close()
    try:
        shown = EventAccumulator("memory://logs/run").Reload().Scalars("count")
        assert [event.step for event in shown] == [0, 1, 2, 3]
    finally:
        fsspec.filesystem("memory").rm("/logs", recursive=True)
