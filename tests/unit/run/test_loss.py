"""One of the logged scalars is the loss, and it is the same one for all parts of the package."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.plugins.hparams import metadata
from torch import nn

from telemetry import HookLogger, StepRecord
from telemetry.testing import capture_run
from tests.helpers.board import open_slow
from tests.helpers.client import Client
from tests.helpers.loops import load
from tests.helpers.paths import ROOT
from tests.helpers.shell import records
from tests.helpers.twins import Recorder, descend

LOSSES = [
    *("loss", "Loss", "train_loss", "train/loss", "Loss/train", "loss/total", "training_loss"),
    *("loss_train", "train/total_loss", "train_loss_step", "train_loss_epoch", "trainLoss"),
    *("losses/total", "training/batchloss", "epoch_loss", "running_loss", "train.loss"),
    "Train Loss",
]
OTHERS = [
    *("val_loss", "val/loss", "Loss/test", "loss_eval", "validation/loss", "train/val_loss"),
    *("loss_kl", "loss/kl", "aux_loss", "train/loss/kl", "loss_d", "loss_0", "d_loss", "train"),
    *("blossom", "lossless", "loss_scale", "eval_loss"),
]


def records_of(*steps: Mapping[str, float]) -> list[StepRecord]:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with capture_run(model, rules=[]) as captured:
        for scalars in steps:
            captured.log(scalars)
            descend(model, torch.ones(1, 1), optimizer)
    return captured.records


def losses_of(*steps: Mapping[str, float]) -> list[float | None]:
    return [record.loss for record in records_of(*steps)]


@pytest.mark.parametrize("tag", LOSSES)
def test_names_of_the_loss_are_recognized(tag: str) -> None:
    assert losses_of({**dict.fromkeys(OTHERS, 2.0), tag: 1.0}) == [1.0]


def test_validation_test_and_component_losses_never_count() -> None:
    assert losses_of(dict.fromkeys(OTHERS, 2.0)) == [None]


@pytest.mark.parametrize(
    ("best", "other"),
    [
        ("loss", "train/loss"),
        ("train_loss_step", "train_loss_epoch"),
        ("train/batch_loss", "train/loss"),
        ("train_loss", "running_loss"),
        ("train/loss", "train/total_loss"),
    ],
)
def test_a_loss_logged_at_each_step_is_preferred(best: str, other: str) -> None:
    assert losses_of({best: 1.0, other: 2.0}) == losses_of({other: 2.0, best: 1.0}) == [1.0]


def test_a_very_long_name_is_refused_and_does_not_hang() -> None:
    long = ["train_" * 5000 + "los", "loss" + "_" * 20_000 + "x"]
    assert losses_of(dict.fromkeys(long, 1.0)) == [None]


def test_the_loss_is_chosen_at_the_first_step_with_one_and_stays() -> None:
    both = {"train_loss_epoch": 2.0, "train_loss_step": 1.0}
    steps = [{"accuracy": 0.5}, both, {"loss": 3.0, "train_loss_step": 1.5}, {"loss": 3.0}]
    assert losses_of(*steps) == [None, 1.0, 1.5, None]


@pytest.mark.parametrize(("first", "delay"), [(0, 0), (1, 1), (2, 0), (10, 0)])
def test_a_loss_whose_first_value_follows_the_first_step_is_logged_after_the_step(
    first: int, delay: int
) -> None:
    records = records_of(*[{}] * first, {"loss": 1.0}, {"loss": 1.0})
    assert records[-1].loss_delay == delay


def test_the_docs_list_the_words_of_a_loss_tag() -> None:
    page = (ROOT / "docs" / "reference" / "logger.md").read_text(encoding="utf-8")
    section = page.partition("## The loss")[2].partition(": such as")[0]
    words = re.findall(r"\*(\w+)\*", section)
    assert {"train", "total", "batch", "epoch", "running"} <= set(words)
    for word in words:
        assert losses_of({f"{word}_loss": 1.0}) == [1.0], word


# --- in a written run ----------------------------------------------------------------------------


def train(
    log_dir: Path,
    values: Mapping[str, float],
    *,
    steps: int = 120,
    spike: str = "",
    options: Mapping[str, Any] | None = None,
    state: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Log these at each step, one of them with a spike; returns the state before the last step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with HookLogger(model, log_dir, every_n_steps=50, **(options or {})) as logger:
        if state is not None:
            logger.load_state_dict(state)
        logger.hparams({"lr": 0.01})
        for step in range(steps):
            logger.log(
                {tag: v * (1e4 if tag == spike and step == 80 else 1) for tag, v in values.items()}
            )
            kept = logger.state_dict() if step == steps - 1 else {}
            descend(model, torch.randn(8, 4), optimizer)
    return kept


def shown(log_dir: Path) -> list[str]:
    """Return the tags that the page draws as the loss."""
    header, _ = Client(open_slow(log_dir), log_dir).arrays("scalars", run=".")
    return [curve["tag"] for curve in header["curves"] if curve["kind"] == "loss"]


def test_rules_records_page_hparams_and_diff_have_the_same_loss(tmp_path: Path) -> None:
    recorder = Recorder()
    values = {"val_loss": 9.0, "train_loss_epoch": 2.0, "train_loss_step": 1.0, "loss_kl": 3.0}
    train(tmp_path / "a", values, options={"alerts": [recorder]})
    assert {record.loss for record in recorder.records} == {1.0}
    assert dict(recorder.records[0].scalars) == values
    assert shown(tmp_path / "a") == ["train_loss_step"]
    content = load(tmp_path / "a").SummaryMetadata(metadata.EXPERIMENT_TAG).plugin_data.content
    first, *others = metadata.parse_experiment_plugin_data(content).metric_infos
    assert first.name.tag == "train_loss_step"
    assert [other.name.tag for other in others] == sorted({*values} - {"train_loss_step"})
    train(tmp_path / "b", {"loss": 1.0}, spike="loss")
    found = records("diff", tmp_path / "a", tmp_path / "b", status=1)
    assert [(d["statistic"], d["step"]) for d in found] == [("loss", 80)]


def test_loss_tag_names_the_loss(tmp_path: Path) -> None:
    recorder = Recorder()
    train(tmp_path, {"loss": 1.0, "ce": 2.0}, options={"loss_tag": "ce", "alerts": [recorder]})
    assert {record.loss for record in recorder.records} == {2.0}
    assert shown(tmp_path) == ["ce"]


@pytest.mark.parametrize("given", [None, "loss"])
def test_a_resumed_run_keeps_its_loss_unless_it_names_one(
    tmp_path: Path, given: str | None
) -> None:
    state = train(tmp_path, {"train/loss": 1.0}, steps=5)
    recorder = Recorder()
    options = {"alerts": [recorder], "loss_tag": given}
    values = {"loss": 5.0, "train/loss": 1.0}
    train(tmp_path, values, steps=5, state=state, options=options)
    tag = given or "train/loss"
    assert {record.loss for record in recorder.records} == {values[tag]}
    assert shown(tmp_path) == [tag]


@pytest.mark.parametrize(
    ("steps", "options", "expected"),
    [
        (3, {}, r"\(val_loss, loss_kl\).*HookLogger\(loss_tag="),
        (250, {}, r"\(val_loss, loss_kl\).*HookLogger\(loss_tag="),
        (3, {"loss_tag": "ce"}, r"the loss 'ce' is not .*: val_loss, loss_kl"),
    ],
)
def test_one_line_reports_that_no_logged_scalar_is_a_loss(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    steps: int,
    options: dict[str, Any],
    expected: str,
) -> None:
    with caplog.at_level(logging.WARNING, "telemetry"):
        train(tmp_path, {"val_loss": 1.0, "loss_kl": 2.0}, steps=steps, options=options)
    [line] = caplog.messages
    assert re.search(expected, line)
    assert shown(tmp_path) == []


@pytest.mark.parametrize(("first", "steps", "count"), [(0, 49, 0), (0, 120, 1), (70, 3, 0)])
def test_a_missing_loss_is_reported_after_fifty_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: int, steps: int, count: int
) -> None:
    train(tmp_path, {}, steps=steps, options={"max_overhead": 0.5, "first_step": first})
    lines = [record for record in caplog.records if "logger.log(loss=loss)" in record.message]
    assert [line.levelname for line in lines] == ["WARNING"] * count


def test_the_checkpoint_that_is_loaded_last_names_the_loss(tmp_path: Path) -> None:
    states = [train(tmp_path / tag, {tag: 1.0}, steps=3) for tag in ("loss", "train_loss")]
    model = nn.Linear(4, 1)
    with HookLogger(model, tmp_path / "resumed") as logger:
        for state in states:
            logger.load_state_dict(state)
        assert logger.state_dict()["loss"] == "train_loss"
