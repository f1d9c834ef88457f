"""Tags and values of a run in TensorBoard's dashboards, and what the page reads of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from torch import Tensor, nn

import telemetry
from telemetry import Alert, HookLogger, StepRecord
from tests.helpers.board import Board, open_slow
from tests.helpers.known_runs import alert_at
from tests.helpers.small_runs import fit
from tests.helpers.tiny_run import TinyRun, whole_run
from tests.helpers.twins import mlp, run, scaled_loop


def train(log_dir: Path, model: nn.Module, *batches: Tensor, **options: Any) -> Board:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"every_n_steps": 2, "alerts": (), "measure": "!images", **options}
    with HookLogger(model, log_dir, **options) as logger:
        with torch.no_grad(), logger.phase("validation"):
            model(batches[0])
        fit(logger, len(batches), lambda step: model(batches[step]).square().mean(), optimizer)
    return Board(open_slow(log_dir))


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Board:
    """A run of three steps, whose last batch is full of NaN."""
    batch, model = torch.rand(5, 4), nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    batches = batch, batch, torch.full_like(batch, torch.nan)
    return train(tmp_path_factory.mktemp("run"), model, *batches)


def test_tensors_without_a_finite_value_have_no_histogram_and_their_values_are_counted(
    board: Board,
) -> None:
    activations = board.tensors("histograms")["."]["activation/0001.1"]
    assert [step for step, _ in activations] == [0]
    of_output, of_parameters = 5 * 2, 3 * 2 + 2
    count = 2 * of_output + of_parameters  # also of the gradients
    assert board.scalars()["."]["nonfinite/0001.1"] == [(2, count)]


def test_a_phase_has_only_activations_under_its_name(
    board: Board,
) -> None:
    tags = {*board.scalars()["."], *board.tensors("histograms")["."]}
    of_phase = {tag for tag in tags if tag.startswith("validation/")}
    assert "validation/activation_rms/0001.1" in of_phase
    assert not any("grad" in tag or "weight" in tag for tag in of_phase)


def test_scaler_and_clipping_have_curves(tmp_path: Path) -> None:
    loop = scaled_loop(partial(torch.optim.SGD, lr=0.01), overflow_at=(1,), iterations=3, clip=1e-3)
    [first, _] = run(mlp, loop, tmp_path).records
    curves = Board(open_slow(tmp_path)).scalars()["."]
    scales = [scale for _, scale in curves["scaler/scale"]]
    assert (scales[0], scales[-1]) == (1024, 512)
    assert curves["scaler/skipped_steps"][-1][1] == 1
    before = [value for _, value in curves["grad_norm/total_before_clipping"]]
    assert before[0] == pytest.approx(first.total_grad_norm_before_clipping, rel=1e-4)
    assert max(value for _, value in curves["grad_norm/total"][:1]) <= 1.01e-3
    assert {value for _, value in curves["grad_norm/clipped_fraction"][:1]} == {1.0}


def test_a_large_model_has_a_limited_number_of_curves_of_each_statistic(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(70)])
    board = train(tmp_path, model, torch.rand(2, 1))
    curves = board.scalars()["."]
    for statistic in ("grad_norm", "weight_norm", "weight_rms", "activation_rms"):
        of_layers = [tag for tag in curves if re.match(rf"{statistic}/(\d|min|median|max)", tag)]
        of_input = [tag for tag in of_layers if tag.endswith(".model input")]
        assert len(of_input) == (statistic == "activation_rms")
        assert len(of_layers) - len(of_input) == 12 + 3, statistic
    assert {"grad_norm/0000.0.weight", "grad_norm/0069.69.bias"} < set(curves)
    histograms = board.tensors("histograms")["."]
    assert sum(tag.startswith("grad/") for tag in histograms) == 2 * 70


def test_each_alert_has_a_separate_tag_and_is_read_back_as_it_was(tmp_path: Path) -> None:
    names = ("out", None)

    def rule(record: StepRecord) -> Iterator[Alert]:
        for name in names if record.step == 1 else ():
            yield alert_at(
                1, name, kind="planted", value=float("inf"), stage="escalated",
                summary="<img src=x onerror=alert(1)>", advice=("line two \ud800",),
            )  # fmt: skip

    tiny = whole_run(tmp_path, 3, alerts=[rule])
    texts = Board(open_slow(tmp_path)).tensors("text")["."]
    assert {"0000.planted.out", "0001.planted"} == {tag.split("/")[-1] for tag in texts}
    for [(step, [text])] in texts.values():
        assert step == 1
        assert text.decode().startswith("**error** at step 1\n\n<img src=x onerror=alert(1)>")
        assert r"line two \ud800" in text.decode()
    read = telemetry.read(tmp_path).alerts
    assert [replace(alert, advice=()) for alert in read] == [
        replace(alert, advice=()) for alert in tiny.logger.alerts
    ]
    assert [alert.advice for alert in read] == [(r"line two \ud800",)] * 2


def test_hyperparameters_of_all_types_are_shown(tmp_path: Path) -> None:
    given = {"lr": 0.1, "layers": 3, "norm": True, "optimizer": "sgd"}
    others = {"resume": None, "betas": (0.9, 0.99), "widths": [32, 16]}
    texts = {"resume": "None", "betas": "(0.9, 0.99)", "widths": "[32, 16]"}
    tiny = TinyRun(tmp_path)
    tiny.logger.hparams(given | others, metrics=["count", "accuracy"])
    tiny.train()
    with pytest.raises(TypeError, match=r"layers=\{1\}.*not set; pass str\(value\), or leave"):
        tiny.logger.hparams({"layers": {1}})
    tiny.logger.close()
    accumulator = EventAccumulator(str(tmp_path)).Reload()
    content = accumulator.summary_metadata["_hparams_/experiment"].plugin_data.content
    written = metadata.parse_experiment_plugin_data(content)
    assert [info.name for info in written.hparam_infos] == [*given, *others]
    assert [info.name.tag for info in written.metric_infos] == ["count", "accuracy"]
    assert "_hparams_/session_start_info" in accumulator.Tags()["tensors"]
    assert telemetry.read(tmp_path).hparams == given | texts
    assert telemetry.read(tmp_path).hparams["norm"] is True
