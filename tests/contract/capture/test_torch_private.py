"""A missing private function of PyTorch is logged once and costs detail, never a run."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import utils as dynamo_utils
from torch.utils import _python_dispatch

from telemetry import HookLogger, torch_private
from tests.helpers.applied import Applied
from tests.helpers.hand import by_hand, check, selective_checkpoint
from tests.helpers.paths import ROOT
from tests.helpers.require import needs_observable_graphs
from tests.helpers.twins import assert_left_alone, batch, loss_of, mlp, scaled_loop, training


@pytest.fixture(autouse=True)
def nothing_logged_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "_logged", set())


def messages_about(caplog: pytest.LogCaptureFixture, name: str) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if f"has no {name};" in message]


def hide(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Hide a name from this package that PyTorch itself needs."""
    find = torch_private.find

    def find_others(owner: object, wanted: str, consequence: str) -> Any:
        return find(None if wanted == name else owner, wanted, consequence)

    monkeypatch.setattr(torch_private, "find", find_others)


MISSING_NAMES = [
    (torch._C, "_len_torch_dispatch_stack"),
    (torch._C, "_len_torch_function_stack"),
    (torch._C, "_is_any_autocast_enabled"),
    (torch._C, "DisableTorchFunction"),
    (torch._C._functorch, "maybe_current_level"),
    (torch, "_foreach_norm"),
    (torch, "_disable_dynamo"),
    (_python_dispatch, "_disable_current_modes"),
    (dynamo_utils, "counters"),
]


@pytest.mark.parametrize(("owner", "name"), MISSING_NAMES, ids=[name for _, name in MISSING_NAMES])
def test_an_ordinary_loop_is_logged_in_full_without_a_private_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: object,
    name: str,
) -> None:
    def in_autocast(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            yield from training()(model, logger)

    monkeypatch.delattr(owner, name)
    check(mlp, in_autocast, tmp_path)
    assert len(messages_about(caplog, name)) <= 1
    assert "telemetry failed" not in caplog.text


def test_without_task_numbers_probes_count_as_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def probed(model: nn.Module) -> Tensor:
        x = batch().requires_grad_()
        loss = loss_of(model, x)
        torch.autograd.grad(loss, x, retain_graph=True)
        return loss

    monkeypatch.delattr(torch._C, "_current_graph_task_id")
    for module in ("loop", "passes"):
        name = f"telemetry.capture.{module}.backward_task"
        monkeypatch.setattr(name, torch_private._unknown_task)
    outcome = assert_left_alone(mlp, training(probed, 2), tmp_path)
    assert outcome.full[0].activation_grads["2"].calls == 2
    [message] = messages_about(caplog, "_current_graph_task_id")
    assert "probes by autograd.grad" in message


def test_without_a_queue_of_callbacks_there_are_no_norms_before_clipping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hide(monkeypatch, "queue_callback")
    outcome, _ = check(mlp, training(), tmp_path)
    assert outcome.full[0].total_grad_norm_before_clipping is None
    assert outcome.full[0].clipped_fraction is None
    [message] = messages_about(caplog, "queue_callback")
    assert "before clipping" in message


def test_without_a_way_to_leave_modes_modules_in_selective_checkpointing_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> nn.Module:
        forward = lambda m, x: m.head(selective_checkpoint(m.block, x))  # noqa: E731
        return Applied(forward, block=mlp(), head=nn.Linear(2, 2))

    monkeypatch.delattr(_python_dispatch, "_disable_current_modes")
    outcome = assert_left_alone(make, training(), tmp_path)
    assert list(outcome.full[0].activations) == ["head"]
    assert outcome.full[0].grad_present.all()
    [message] = messages_about(caplog, "_disable_current_modes")
    assert "selective checkpointing" in message


@pytest.mark.parametrize("name", ["_scale", "_growth_tracker"])
def test_without_the_scalers_state_gradients_are_logged_as_it_leaves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    loop = scaled_loop(partial(torch.optim.SGD, lr=0.1, momentum=0.9), iterations=3)
    hide(monkeypatch, name)
    outcome = assert_left_alone(mlp, loop, tmp_path)
    assert [record.loss_scale for record in outcome.records] == [None] * 3
    for record, hand in zip(outcome.full, by_hand(mlp, training()), strict=True):
        norms = [grad for grads in hand.grads.values() for grad in grads]
        assert record.grad_norms == pytest.approx([(n**2).sum() ** 0.5 for n in norms])
    [message] = messages_about(caplog, name)
    assert "skipped steps are not counted" in message


@needs_observable_graphs
def test_without_effects_a_compiled_model_still_trains(tmp_path: Path) -> None:
    script = """
        import sys, torch
        from torch import nn
        from torch._higher_order_ops import effects
        del effects._register_effectful_op
        from telemetry import HookLogger
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with HookLogger(model, sys.argv[1], every_n_steps=1):
            for _ in range(2):
                compiled(torch.ones(4, 2)).sum().backward()
                optimizer.step()
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.count("has no _register_effectful_op") == 1
