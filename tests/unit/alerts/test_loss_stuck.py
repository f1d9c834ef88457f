from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import SGD

from telemetry.alerts.no_learning import LossStuck
from tests.helpers.figures import figures
from tests.helpers.small_runs import draw, net, train


@pytest.mark.slow
def test_targets_that_do_not_belong_to_their_inputs_are_noted_once() -> None:
    model = net()
    optimizer = SGD(model.parameters(), 0.01)
    [alert] = train(LossStuck(), 300, model=model, optimizer=optimizer, batch=_random)
    assert (alert.severity, alert.stage) == ("note", "started")
    assert alert.step == 200
    assert 3 in figures(alert.summary)  # ln 3


@pytest.mark.slow
def test_a_run_that_learns_is_not_stuck() -> None:
    assert train(LossStuck(), 500) == []


@pytest.mark.slow
def test_weights_that_hardly_move_are_not_a_stuck_loss() -> None:
    model = net()
    assert train(LossStuck(), 300, model=model, optimizer=SGD(model.parameters(), 1e-9)) == []


@pytest.mark.slow
def test_outputs_that_are_the_same_for_all_batches_are_noted() -> None:
    model = net()
    model.append(Off())

    def dies(step: int) -> None:
        model[-1].on = step < 120

    [alert] = train(LossStuck(), 400, model=model, before=dies)
    assert alert.step == 300
    assert "batches differ" in alert.summary


@pytest.mark.slow
def test_weights_that_are_restored_after_each_step_are_the_cause() -> None:
    def cause_is_named(written_back: bool) -> bool:
        model = net()
        kept = copy.deepcopy(model.state_dict())
        optimizer = SGD(model.parameters(), 0.01)

        def before(step: int) -> None:
            if written_back:
                model.load_state_dict(kept)

        [alert] = train(
            LossStuck(), 300, model=model, optimizer=optimizer, batch=_random, before=before
        )
        return "writes the old weights back" in (alert.cause or "")

    assert cause_is_named(True)
    assert not cause_is_named(False)


def _random(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return draw()[0], torch.randint(3, (32,))


class Off(torch.nn.Module):
    """A gate that closes, so that all outputs are the same."""

    on = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.on else 0 * x
