from __future__ import annotations

import torch
from torch import nn

from telemetry.alerts.mistakes import EvalMode
from tests.helpers.figures import figures
from tests.helpers.small_runs import net, train


def test_a_model_left_in_evaluation_mode_is_noted_until_it_trains_again() -> None:
    model = net()

    def switch(step: int) -> None:
        if step in (15, 60):
            model.train(step == 60)

    begin, end = train(EvalMode(), 70, model=model, before=switch)
    assert (begin.severity, begin.step, begin.stage) == ("note", 34, "started")
    assert "Dropout" in begin.summary
    assert (end.severity, end.step, end.stage) == ("note", 60, "resolved")


def test_validation_between_steps_is_not_noted() -> None:
    model = net()

    def validate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            model(torch.randn(2, 8))
        model.train()

    assert train(EvalMode(), 60, model=model, before=validate) == []


def test_a_single_module_in_evaluation_mode_is_not_noted() -> None:
    model = net()
    model[2].eval()
    assert train(EvalMode(), 60, model=model) == []


def test_a_model_that_is_the_same_in_both_modes_is_not_noted() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)).eval()
    assert train(EvalMode(), 60, model=model) == []


def with_norms() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 3)
    )


def test_new_batch_norms_that_evaluate_from_the_start_are_noted_once() -> None:
    model = with_norms()
    model[1].eval()
    model[3].eval()
    (note,) = train(EvalMode(), 60, model=model)
    assert (note.severity, note.step, note.module_name) == ("note", 0, "1")
    assert figures(note.summary)[:2] == [2, 2]


def test_batch_norms_that_train_or_were_trained_before_are_not_noted() -> None:
    model = with_norms()
    assert train(EvalMode(), 30, model=model) == []
    model[1].eval()
    model[3].eval()
    assert train(EvalMode(), 30, model=model) == []


def test_batch_norms_that_train_on_nearly_constant_batches_are_not_noted() -> None:
    for size in (0.0, 1e-3):
        model, classes = with_norms(), torch.arange(16) % 3
        batch = size * torch.randn(16, 8), classes
        assert train(EvalMode(), 3, model=model, batch=lambda step, batch=batch: batch) == []
