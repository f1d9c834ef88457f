"""One function chooses the logged scalar that is the loss, for all parts of the package."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.plugins.hparams import metadata
from torch import nn

from telemetry import HookLogger
from telemetry.events.page_format import PLUGIN_NAME, chosen_loss
from telemetry.reading.builtin_tags import scalar_curves
from telemetry.reading.comparison import compare
from telemetry.reading.run import open_run
from telemetry.records.loss import _WORDS, LOSS_TAGS, LossChoice, loss_among
from telemetry.testing import capture_run
from tests.helpers.paths import ROOT
from tests.helpers.plain_events import EventAccumulator
from tests.helpers.twins import Recorder

LOSSES = [
    *("loss", "Loss", "train_loss", "train/loss", "Loss/train", "loss/total", "training_loss"),
    *("loss_train", "train/total_loss", "train_loss_step", "train_loss_epoch", "trainLoss"),
    *(
        "losses/total",
        "training/batchloss",
        "epoch_loss",
        "running_loss",
        "train.loss",
        "Train Loss",
    ),
]
OTHERS = [
    *("val_loss", "val/loss", "Loss/test", "loss_eval", "validation/loss", "train/val_loss"),
    *("loss_kl", "loss/kl", "aux_loss", "train/loss/kl", "loss_d", "loss_0", "d_loss", "train"),
    *(
        "blossom",
        "lossless",
        "loss_scale",
        "~run/loss",
        "~statistics/weight_rms/0000.loss",
        "",
        "eval_loss",
    ),
]


@pytest.mark.parametrize("tag", LOSSES)
def test_names_of_the_loss_are_recognized(tag: str) -> None:
    assert loss_among([*OTHERS, tag]) == tag


def test_validation_test_and_component_losses_never_count() -> None:
    assert loss_among(OTHERS) is None


@pytest.mark.parametrize(
    ("tags", "best"),
    [
        (["train/loss", "loss"], "loss"),
        (["train_loss_epoch", "train_loss_step"], "train_loss_step"),
        (["train/loss", "train/batch_loss"], "train/batch_loss"),
        (["running_loss", "train_loss"], "train_loss"),
        (["train/total_loss", "train/loss"], "train/loss"),
    ],
)
def test_a_loss_logged_at_each_step_is_preferred(tags: list[str], best: str) -> None:
    assert loss_among(tags) == loss_among(tags[::-1]) == best


def test_a_very_long_name_is_refused_quickly() -> None:
    assert loss_among(["train_" * 5000 + "los", "loss" + "_" * 20_000 + "x"]) is None


def test_the_loss_is_chosen_at_the_first_step_with_one_and_stays() -> None:
    choice = LossChoice()
    choice.add(0, ["accuracy"])
    choice.add(3, ["train_loss_epoch"])
    choice.add(3, ["train_loss_step"])
    assert not choice.is_final(2)
    assert choice.is_final(3)
    choice.add(4, ["loss"])
    assert choice.tag == "train_loss_step"
    resumed = LossChoice()
    resumed.load_state_dict(choice.state_dict())
    resumed.add(5, ["loss", "train_loss_step"])
    assert resumed.tag == "train_loss_step"
    given = LossChoice("ce")
    given.load_state_dict("loss")
    given.add(5, ["loss", "ce"])
    assert given.tag == "ce"


def test_a_loss_whose_first_value_follows_the_first_step_is_logged_after_the_step() -> None:
    for logged, delay in ((0, 0), (1, 1), (2, 0), (10, 0)):
        choice = LossChoice()
        for step in range(logged):
            choice.step_ended(step)
        choice.add(logged, ["loss"])
        choice.step_ended(logged)
        choice.add(logged + 1, ["loss"])
        assert choice.delay == delay
    resumed = LossChoice()
    resumed.load_state_dict("loss")
    resumed.step_ended(700)
    resumed.add(701, ["loss"])
    assert resumed.delay == 1


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
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            logger.log(
                {tag: v * (1e4 if tag == spike and step == 80 else 1) for tag, v in values.items()}
            )
            kept = logger.state_dict() if step == steps - 1 else {}
            optimizer.step()
    return kept


def curves(log_dir: Path) -> Sequence[str]:
    return [tag for kind, tag in scalar_curves(open_run(log_dir).source) if kind == "loss"]


@pytest.mark.slow
def test_rules_receive_a_loss_under_any_of_its_names() -> None:
    found = {}
    for tag in ("loss", "train/loss", "val/loss"):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        with capture_run(model) as run:
            for step in range(120):
                optimizer.zero_grad()
                loss = model(torch.randn(8, 4)).square().mean()
                loss.backward()
                run.log({tag: loss.item() * (1e4 if step == 80 else 1)})
                optimizer.step()
        found[tag] = [(alert.kind, alert.step) for alert in run.alerts]
    assert found["loss"] == found["train/loss"] != []
    assert found["val/loss"] == []


def test_rules_records_page_hparams_and_diff_have_the_same_loss(tmp_path: Path) -> None:
    recorder = Recorder()
    values = {"val_loss": 9.0, "train_loss_epoch": 2.0, "train_loss_step": 1.0, "loss_kl": 3.0}
    train(tmp_path / "a", values, options={"alerts": [recorder]})
    assert {record.loss for record in recorder.records} == {1.0}
    assert dict(recorder.records[0].scalars) == values
    assert curves(tmp_path / "a") == ["train_loss_step"]
    metadata_of = EventAccumulator(str(tmp_path / "a"), {"tensors": 0}).Reload().SummaryMetadata
    content = metadata_of(metadata.EXPERIMENT_TAG).plugin_data.content
    [metric] = metadata.parse_experiment_plugin_data(content).metric_infos
    assert metric.name.tag == "train_loss_step"
    train(tmp_path / "b", {"loss": 1.0}, spike="loss")
    found = compare(open_run(tmp_path / "a"), open_run(tmp_path / "b")).differences
    assert [(d.statistic, d.step) for d in found if d.module_name is None] == [("loss", 80)]


def test_loss_tag_names_the_loss(tmp_path: Path) -> None:
    recorder = Recorder()
    train(tmp_path, {"loss": 1.0, "ce": 2.0}, options={"loss_tag": "ce", "alerts": [recorder]})
    assert {record.loss for record in recorder.records} == {2.0}
    assert curves(tmp_path) == ["ce"]


def test_a_resumed_run_keeps_its_loss(tmp_path: Path) -> None:
    state = train(tmp_path, {"train/loss": 1.0}, steps=5)
    recorder = Recorder()
    train(
        tmp_path,
        {"loss": 5.0, "train/loss": 1.0},
        steps=5,
        state=state,
        options={"alerts": [recorder]},
    )
    assert {record.loss for record in recorder.records} == {1.0}
    source = open_run(tmp_path).source
    assert chosen_loss(source.tags(PLUGIN_NAME)) == "train/loss"
    assert curves(tmp_path) == ["train/loss"]


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
    assert curves(tmp_path) == []


@pytest.mark.parametrize(
    ("first", "steps", "count"), [(0, 3, 0), (0, 49, 0), (0, 120, 1), (70, 3, 0)]
)
def test_a_missing_loss_is_reported_after_fifty_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: int, steps: int, count: int
) -> None:
    train(tmp_path, {}, steps=steps, options={"max_overhead": 0.5, "first_step": first})
    lines = [record for record in caplog.records if "logger.log(loss=loss)" in record.message]
    assert [line.levelname for line in lines] == ["WARNING"] * count


@pytest.mark.parametrize(
    ("loss", "error"), [(3, TypeError), ("", ValueError), (["loss"], TypeError)]
)
def test_a_loss_that_is_not_a_tag_is_refused(
    tmp_path: Path, loss: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"HookLogger\(loss_tag=.*must be the tag of a logged scalar"):
        HookLogger(nn.Linear(1, 1), tmp_path, loss_tag=loss)


def test_the_docs_list_all_words_of_a_loss_tag() -> None:
    page = (ROOT / "docs" / "reference" / "logger.md").read_text(encoding="utf-8")
    section = page.partition("## The loss")[2].partition(": such as")[0]
    assert sorted(re.findall(r"\*(\w+)\*", section)) == sorted(_WORDS)


def test_the_pattern_of_the_loss_chart_matches_the_same_tags() -> None:
    assert [tag for tag in LOSSES + OTHERS if re.compile(LOSS_TAGS).match(tag)] == LOSSES
