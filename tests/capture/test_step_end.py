"""When a step ends: whatever optimizers there are, each step holds what was computed in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hand import TwoParts, array, assert_tensor
from torch import Tensor, nn
from twins import Recorder, seed

from telemetry import HookLogger

BATCHES = 14


# Which part is stepped, after how many batches, and in which of them; in this order.
SCHEDULES: dict[str, list[tuple[str, int, int]]] = {
    "one optimizer": [("", 1, 0)],
    "one part first": [("first", 1, 0), ("second", 1, 0)],
    "the other part first": [("second", 1, 0), ("first", 1, 0)],
    "the rare one last": [("first", 1, 0), ("second", 4, 3)],
    "the rare one first": [("second", 4, 3), ("first", 1, 0)],
    "the rare one last, in the first batch": [("first", 1, 0), ("second", 4, 0)],
    "the rare one first, in the first batch": [("second", 4, 0), ("first", 1, 0)],
}


def by_plain_hooks(
    name: str, log_dir: Path, optimizer: str | None = None
) -> tuple[list[Any], list[list[np.ndarray]], list[dict[str, float]], list[int]]:
    """The records; of each batch an output and the gradients that were used, and where it ended."""
    seed(0)
    model, recorder = TwoParts(), Recorder()
    of = {p: torch.optim.SGD(model.get_submodule(p).parameters(), 0.1) for p, *_ in SCHEDULES[name]}
    outputs: list[list[np.ndarray]] = []
    model.first.register_forward_hook(lambda m, a, output: outputs.append([array(output)]))
    used: list[dict[str, float]] = [{} for _ in range(BATCHES + 1)]
    steps, after = [], 0
    options: Any = {} if optimizer is None else {"optimizer": of[optimizer]}
    with HookLogger(model, log_dir, alerts=[recorder], every_n_steps=1, **options) as logger:
        for batch in range(BATCHES):
            model(torch.randn(3, 4)).square().mean().backward()
            ended = False
            for part, every, at in SCHEDULES[name]:
                if batch % every == at:
                    # What steps after the one that steps always is in the next step.
                    late = every > 1 and ended and batch > after
                    for own, parameter in model.named_parameters():
                        if own.startswith(part):
                            assert parameter.grad is not None
                            used[batch + late][own] = float(parameter.grad.norm())
                    of[part].step()
                    of[part].zero_grad()
                ended = ended or every == 1
            steps.append(logger.current_step)
    return recorder.records, outputs, used, steps


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_holds_its_batch_and_the_gradients_that_were_used(tmp_path: Path, name: str) -> None:
    records, outputs, used, steps = by_plain_hooks(name, tmp_path)
    # Only later batches show that the second optimizer does not step at each.
    settled = 5 if name == "the rare one last, in the first batch" else 0
    assert [record.step for record in records] == list(range(BATCHES))
    first = max(settled, 1)  # in the first batch there may be gradients for another optimizer
    assert steps[first:] == list(range(first + 1, BATCHES + 1))
    for record in records[settled:]:
        assert_tensor(record.activations["first"], outputs[record.step])
        norms = zip(record.layout.parameters, record.grad_norms, record.grad_present, strict=True)
        found = {parameter.name: norm for parameter, norm, present in norms if present}
        assert found == pytest.approx(used[record.step])


def test_the_optimizer_that_is_named_ends_the_steps(tmp_path: Path) -> None:
    records, _, _, steps = by_plain_hooks("the rare one last", tmp_path, optimizer="second")
    assert [record.step for record in records] == [0, 1, 2]
    assert steps == [batch // 4 for batch in range(1, BATCHES + 1)]


def test_gradients_of_a_gan_are_those_of_each_models_own_step(tmp_path: Path) -> None:
    seed(0)
    models = {
        "generator": nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)),
        "discriminator": nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)),
    }
    generator, discriminator = models.values()
    of = {name: torch.optim.Adam(model.parameters()) for name, model in models.items()}
    recorders = {name: Recorder() for name in models}
    loggers = [
        HookLogger(models[n], tmp_path / n, alerts=[recorders[n]], every_n_steps=2) for n in models
    ]
    used: dict[str, list[list[float]]] = {name: [] for name in models}

    def step(name: str, loss: Tensor) -> None:
        of[name].zero_grad()
        loss.backward()
        used[name].append([float(p.grad.norm()) for p in models[name].parameters()])
        of[name].step()

    for _ in range(5):
        for _ in range(2):
            fake = generator(torch.randn(3, 4))
            real = discriminator(torch.randn(3, 4)).mean()
            step("discriminator", discriminator(fake.detach()).mean() - real)
        step("generator", -discriminator(fake).mean())
    for logger in loggers:
        logger.close()
    for name, recorder in recorders.items():
        assert [record.step for record in recorder.records] == list(range(len(used[name])))
        for record, norms in zip(recorder.records, used[name], strict=True):
            np.testing.assert_allclose(record.grad_norms, norms, rtol=1e-5)


def test_each_parameter_has_the_rate_of_its_group(tmp_path: Path) -> None:
    model, recorder = TwoParts(), Recorder()
    first = torch.optim.SGD([{"params": [p]} for p in model.first.parameters()], 0.1)
    second = torch.optim.SGD(model.second.parameters(), 0.2)
    first.param_groups[1]["lr"] = 0.3
    frozen = next(model.second.parameters()).requires_grad_(False)
    second.param_groups[0]["params"] = [p for p in model.second.parameters() if p is not frozen]
    with HookLogger(model, tmp_path, alerts=[recorder], every_n_steps=1):
        for _ in range(3):
            model(torch.randn(3, 4)).square().mean().backward()
            first.step()
            second.step()
    for record in recorder.records[1:]:
        assert record.learning_rates == (0.1, 0.3, 0.2)
        names = [parameter.name for parameter in record.layout.parameters]
        groups = dict(zip(names, record.groups.tolist(), strict=True))
        expected = {"first.weight": 0, "first.bias": 1, "second.weight": -1, "second.bias": 2}
        assert {name: groups[name] for name in expected} == expected
