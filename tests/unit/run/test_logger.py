"""HookLogger: arguments, life cycle, and the data in TensorBoard."""

from __future__ import annotations

import gc
import json
import logging
import os
import pickle
import pty
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from tensorboard.util.tensor_util import make_ndarray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter

import telemetry
from telemetry import Alert, HookLogger, Rule, TelemetryAlert
from telemetry.alerts.nonfinite import Nonfinite
from telemetry.commands import cli
from telemetry.events import list_event_files, read_events
from telemetry.events.page_format import (
    END_PREFIX,
    LAYOUT_PREFIX,
    PLUGIN_NAME,
    decode_end,
    session_of,
)
from telemetry.reading.run import NoTelemetryError
from telemetry.reading.run_data import RunData
from telemetry.reading.sources import FileSource
from telemetry.records import StepRecord
from telemetry.tag_names import TOTAL_GRAD_NORM
from tests.helpers.disks import FreezableDisk
from tests.helpers.paths import ROOT
from tests.helpers.plain_events import EventAccumulator
from tests.helpers.twins import Recorder, assert_left_alone


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(4 * 6 * 6, 5),
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def train(model: nn.Module, logger: HookLogger | None = None, steps: int = 5) -> Iterator[Tensor]:
    """Train on images if the model starts with a convolution, else on three features."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    is_cnn = isinstance(next(model.children()), nn.Conv2d)
    for _ in range(steps):
        inputs = torch.rand(8, 1, 8, 8) if is_cnn else torch.rand(8, 3)
        loss = F.cross_entropy(model(inputs), torch.randint(0, 2, (8,)))
        optimizer.zero_grad()
        loss.backward()
        if logger is not None:
            logger.log(loss=loss)
        optimizer.step()
        yield loss


def run_through(iterator: Iterator[object]) -> None:
    for _ in iterator:
        pass


def load(log_dir: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(log_dir), size_guidance={"tensors": 0, "scalars": 0})
    return accumulator.Reload()


def scalars(log_dir: Path, tag: str) -> dict[int, float]:
    return {event.step: event.value for event in load(log_dir).Scalars(tag)}


def histogram_at(log_dir: Path, tag: str, step: int) -> np.ndarray:
    [event] = [event for event in load(log_dir).Tensors(tag) if event.step == step]
    return make_ndarray(event.tensor_proto)


# --- training is left alone ----------------------------------------------------------------------


@pytest.mark.parametrize("every_n_steps", [1, 2])
def test_training_is_the_same_bit_for_bit(tmp_path: Path, every_n_steps: int) -> None:
    outcome = assert_left_alone(small_cnn, train, tmp_path, every_n_steps=every_n_steps)
    assert [record.step for record in outcome.records] == [0, 1, 2, 3, 4]
    assert [record.step for record in outcome.full] == list(range(0, 5, every_n_steps))


def test_hooks_are_on_the_model_only_at_full_steps(tmp_path: Path) -> None:
    model = small_cnn()

    def hooks() -> int:
        on_modules = sum(len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules())
        on_parameters = sum(
            len(p._post_accumulate_grad_hooks or ()) + len(p._backward_hooks or ())
            for p in model.parameters()
        )
        return on_modules + on_parameters

    counts = []
    with HookLogger(model, tmp_path, every_n_steps=3):
        counts.append(hooks() > 0)
        for _ in train(model, steps=6):
            counts.append(hooks() > 0)
    assert counts == [True, False, False, True, False, False, True]
    assert hooks() == 0


def test_hooks_are_removed_when_the_body_raises(tmp_path: Path) -> None:
    model = mlp()
    with pytest.raises(KeyError), HookLogger(model, tmp_path):
        raise KeyError
    assert not any(module._forward_hooks for module in model.modules())


def test_an_internal_error_is_logged_once_and_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken_rule(record: StepRecord) -> list[Alert]:
        raise RuntimeError("planted")

    model = mlp()
    with HookLogger(model, tmp_path, alerts=[broken_rule]):
        run_through(train(model))
    assert caplog.text.count("telemetry failed to apply the rule 'broken_rule'") == 1
    assert len(scalars(tmp_path, "grad_norm/total")) == 5


@pytest.mark.parametrize("found", ["diverged", None, {"step": 1}, [1]])
def test_a_rule_that_does_not_return_alerts_is_logged_once_with_its_result(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, found: object
) -> None:
    model = mlp()
    with HookLogger(model, tmp_path, alerts=[lambda record: found]):
        run_through(train(model))
    assert caplog.text.count(f"must return alerts, () for none; it returned {found!r}") == 1
    assert len(scalars(tmp_path, "grad_norm/total")) == 5


# --- contents of a run ---------------------------------------------------------------------------


class HookedTensors:
    """Tensors of a step that hooks of the test captured."""

    def __init__(self, model: nn.Sequential) -> None:
        self.outputs: dict[str, np.ndarray] = {}
        self.output_grads: dict[str, np.ndarray] = {}
        for name, module in model.named_children():
            module.register_forward_hook(lambda m, a, out, name=name: self._take(name, out))

    def _take(self, name: str, output: Tensor) -> None:
        self.outputs[name] = output.detach().double().numpy()
        output.register_hook(
            lambda grad: self.output_grads.__setitem__(name, grad.double().numpy().copy())
        )


def test_logged_values_are_those_that_numpy_computes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    captured = HookedTensors(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with HookLogger(model, tmp_path, alerts=()):
        F.cross_entropy(model(torch.rand(8, 3)), torch.randint(0, 2, (8,))).backward()
        before = {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}
        grads = {name: p.grad.double().numpy().copy() for name, p in model.named_parameters()}
        optimizer.step()
    after = {name: p.detach().double().numpy() for name, p in model.named_parameters()}

    def scalar(tag: str) -> float:
        return scalars(tmp_path, tag)[0]

    total = np.sqrt(sum(np.square(grad).sum() for grad in grads.values()))
    assert scalar("grad_norm/total") == pytest.approx(total, rel=1e-6)
    assert scalar("learning_rate/0") == pytest.approx(0.5)
    for name, grad in grads.items():
        tag = f"{int(name[0]):04d}.{name}"
        norm = np.linalg.norm
        moved = norm(after[name] - before[name]) / norm(before[name])
        assert scalar(f"grad_norm/{tag}") == pytest.approx(norm(grad), rel=1e-6)
        assert scalar(f"weight_norm/{tag}") == pytest.approx(norm(before[name]), rel=1e-6)
        assert scalar(f"update_ratio/{tag}") == pytest.approx(moved, rel=1e-4)
        assert_histogram_of(grad, histogram_at(tmp_path, f"grad/{tag}", 0))
        assert_histogram_of(before[name], histogram_at(tmp_path, f"weight/{tag}", 0))
    for name, output in captured.outputs.items():
        tag = f"{int(name):04d}.{name}"
        dead = np.mean((output == 0).all(axis=0))
        assert scalar(f"activation_mean/{tag}") == pytest.approx(output.mean(), rel=1e-5)
        assert scalar(f"activation_rms/{tag}") == pytest.approx(np.sqrt((output**2).mean()))
        assert scalar(f"activation_min/{tag}") == pytest.approx(output.min())
        assert scalar(f"activation_max/{tag}") == pytest.approx(output.max())
        assert scalar(f"zero_fraction/{tag}") == pytest.approx(np.mean(output == 0))
        assert scalar(f"dead_units/{tag}") == pytest.approx(dead)
        assert_histogram_of(output, histogram_at(tmp_path, f"activation/{tag}", 0))
        grad = captured.output_grads[name]
        assert_histogram_of(grad, histogram_at(tmp_path, f"activation_grad/{tag}", 0))


def assert_histogram_of(values: np.ndarray, buckets: np.ndarray) -> None:
    """``buckets`` ``[k, 3]`` hold left edge, right edge and count of ``values``."""
    values = values.ravel()
    assert buckets[:, 2].sum() == values.size
    assert buckets[0, 0] == pytest.approx(values.min())
    assert buckets[-1, 1] == pytest.approx(values.max())
    for left, right, count in buckets[1:-1]:
        assert count == np.sum((left <= values) & (values < right))


def test_images_show_feature_maps_filters_and_input(tmp_path: Path) -> None:
    model = small_cnn()
    with HookLogger(model, tmp_path, every_n_steps=2):
        run_through(train(model))
    accumulator = load(tmp_path)
    for tag in ("feature_maps/0000.0", "filters/0000.0", "input"):
        events = accumulator.Tensors(tag)
        assert [event.step for event in events] == [0, 2, 4]
        width, height, png = events[0].tensor_proto.string_val
        assert int(width) > 8
        assert int(height) > 8
        assert png.startswith(b"\x89PNG")


def test_names_are_numbered_in_forward_order(tmp_path: Path) -> None:
    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(4, 2)
            self.first = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    model = Reversed()
    recorder = Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder]):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.rand(2, 3)).sum().backward()
        optimizer.step()
    assert [m.name for m in recorder.records[0].layout.modules] == ["first", "second"]
    tags = load(tmp_path).Tags()["scalars"]
    assert "grad_norm/0000.first.weight" in tags
    assert "grad_norm/0001.second.weight" in tags


def test_many_parameters_show_twelve_layers_and_their_range(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(40)])
    with HookLogger(model, tmp_path, alerts=()):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.rand(2, 2)).sum().backward()
        optimizer.step()
    tags = load(tmp_path).Tags()
    curves = {tag.partition("/")[2] for tag in tags["scalars"] if tag.startswith("grad_norm/")}
    assert {"total", "min", "median", "max"} < curves
    assert sum(curve[0].isdigit() for curve in curves) == 12
    assert "0000.0.weight" in curves
    assert "0039.39.bias" in curves
    assert sum(tag.startswith("grad/") for tag in tags["tensors"]) == 80


def test_every_step_has_its_gradient_norms(tmp_path: Path) -> None:
    model, recorder = mlp(), Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder], every_n_steps=100):
        expected = []
        for _ in train(model, steps=4):
            expected.append([p.grad.double().norm().item() for p in model.parameters()])
    np.testing.assert_allclose([r.grad_norms for r in recorder.records], expected, rtol=1e-6)
    assert list(scalars(tmp_path, "grad_norm/total")) == [0, 1, 2, 3]


def test_norms_distinguish_overflowing_squares_from_infinite_gradients(tmp_path: Path) -> None:
    model, recorder = nn.Linear(2, 1), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with HookLogger(model, tmp_path, alerts=[recorder]):
        for value in (1e25, float("inf"), float("nan")):
            model.weight.grad = torch.tensor([[value, 0.0]])
            optimizer.step()
    large, infinite, nan = recorder.records
    assert large.grad_norms[0] == pytest.approx(1e25)
    assert large.grad_finite.all()
    assert not infinite.grad_finite[0]
    assert not nan.grad_finite[0]


def test_user_scalars_are_written_at_the_current_step(tmp_path: Path) -> None:
    model = mlp()
    recorder = Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder]) as logger:
        losses = [loss.item() for loss in train(model, logger, steps=3)]
        logger.log(accuracy=0.5, epoch=np.int64(1))
    assert scalars(tmp_path, "loss") == pytest.approx(dict(enumerate(losses)))
    assert scalars(tmp_path, "accuracy") == {3: 0.5}
    assert [record.loss for record in recorder.records] == pytest.approx(losses)


def test_hyperparameters_are_written_into_the_run(tmp_path: Path) -> None:
    model = mlp()
    with HookLogger(model, tmp_path) as logger:
        logger.hparams({"lr": 0.1, "optimizer": "adam", "nesterov": False})
        with pytest.raises(TypeError, match=r"not set; pass str\(value\), or leave it out"):
            logger.hparams({"lr": {0.1}})
    assert "_hparams_/session_start_info" in load(tmp_path).Tags()["tensors"]


def test_hyperparameters_that_are_none_or_lists_become_texts(tmp_path: Path) -> None:
    model = mlp()
    with HookLogger(model, tmp_path) as logger:
        logger.hparams({"resume": None, "betas": (0.9, 0.99), "widths": [32, 16], "lr": 0.1})
        run_through(train(model, steps=1))
    texts = {"resume": "None", "betas": "(0.9, 0.99)", "widths": "[32, 16]", "lr": 0.1}
    assert telemetry.read(tmp_path).hparams == texts


MAKES_THREE_LOGGERS = """
    import logging, sys
    from torch import nn
    from telemetry import HookLogger
    if sys.argv[2] != "unset":
        logging.basicConfig(level=sys.argv[2])
    for number in range(3):
        HookLogger(nn.Linear(2, 1), f"{sys.argv[1]}/{number}")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("terminal", "level", "expected"),
    [
        (True, "WARNING", ["tensorboard --logdir {}"]),
        (True, "INFO", ["INFO:telemetry:tensorboard --logdir {}"]),
        (False, "WARNING", []),
        (False, "unset", ["tensorboard --logdir {}"]),
    ],
)
def test_the_command_that_shows_the_runs_is_logged_once_in_a_process(
    tmp_path: Path, terminal: bool, level: str, expected: list[str]
) -> None:
    screen, stderr = pty.openpty() if terminal else os.pipe()
    script = textwrap.dedent(MAKES_THREE_LOGGERS)
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), level], check=True, stderr=stderr, timeout=120
    )
    os.close(stderr)
    lines = read_all(screen).decode().splitlines()
    assert [line for line in lines if "tensorboard" in line] == [
        s.format(tmp_path) for s in expected
    ]


NOTES = """
import sys, torch
from telemetry import HookLogger
model = torch.nn.Linear(8, 2)
optimizer, batch = torch.optim.SGD(model.parameters(), 0.01), torch.randn(16, 8)
with HookLogger(model, sys.argv[1], every_n_steps=1, max_overhead=float("inf")) as logger:
    for step in range(300):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
"""


def test_the_kinds_of_notes_are_printed_at_the_end_without_logging(tmp_path: Path) -> None:
    command = [sys.executable, "-c", NOTES, str(tmp_path)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("telemetry: notes: same_batch")
    assert last.endswith(f". Read them: telemetry alerts {tmp_path}")


def read_all(descriptor: int) -> bytes:
    """Return the text written to a pipe or terminal whose other end is closed, up to 64 KiB."""
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux raises it for a closed terminal
        return b""
    finally:
        os.close(descriptor)


# --- selecting -----------------------------------------------------------------------------------


def test_content_can_be_switched_off(tmp_path: Path) -> None:
    model = small_cnn()
    switches = ("activations", "activation_gradients", "gradients", "weights", "images")
    with HookLogger(model, tmp_path, **dict.fromkeys(switches, False)):
        run_through(train(model))
    tensors = load(tmp_path).Tags()["tensors"]
    assert not any(tag.startswith(("activation", "grad", "weight")) for tag in tensors)
    tags = {tag.partition("/")[0] for tag in load(tmp_path).Tags()["scalars"]}
    assert tags == {"alerts", "depth", "full_steps", "grad_norm", "learning_rate", "memory"}


def test_only_selected_modules_are_watched(tmp_path: Path) -> None:
    model, recorder = small_cnn(), Recorder()
    with HookLogger(model, tmp_path, modules=nn.Module, exclude=["0", nn.Flatten, nn.Sequential]):
        pass
    with HookLogger(model, tmp_path, modules="[12]", alerts=[recorder]):
        run_through(train(model, steps=1))
    assert list(recorder.records[0].activations) == ["1", "2"]


def test_parameters_of_unselected_modules_are_only_in_totals_and_in_records_for_rules(
    tmp_path: Path,
) -> None:
    for every_n_steps in (1, 3):
        model, recorder, log_dir = small_cnn(), Recorder(), tmp_path / str(every_n_steps)
        options: Any = {"every_n_steps": every_n_steps, "alerts": [recorder]}
        with HookLogger(model, log_dir, modules="[05]", exclude="5", **options):
            run_through(train(model, steps=5))
        run = telemetry.read(log_dir)
        for record in recorder.records:
            assert [p.recorded for p in record.layout.parameters] == 2 * [True] + 4 * [False]
            assert record.grad_present.all()
            assert len(record.weights) == len(record.update_ratios) == 6 * record.full
        assert run.modules.module_name.tolist() == ["0"]
        assert set(run.layers.module_name) == {"0"}
        curves = run.scalars
        names = curves.tag.str.partition("/")
        of_layers = names[names[2].str.match(r"\d{4}\.")]
        assert set(of_layers[2]) == {"0000.0", "0000.0.weight", "0000.0.bias"}
        assert {"grad_norm", "weight_norm", "update_ratio", "weight_rms"} <= set(of_layers[0])
        total = curves[curves.tag == "grad_norm/total"].value.tolist()
        expected = [np.linalg.norm(record.grad_norms) for record in recorder.records]
        assert total == pytest.approx(expected, rel=1e-6)
        norms = run.layers[run.layers.statistic == "grad_norm"].value.tolist()
        own = [np.linalg.norm(record.grad_norms[:2]) for record in recorder.records]
        assert norms == pytest.approx(own, rel=1e-6)
        tensors = load(log_dir).Tags()["tensors"]
        histograms = {t.partition("/")[2] for t in tensors if t.startswith(("grad/", "weight/"))}
        assert histograms == {"0000.0.weight", "0000.0.bias"}


# --- steps ---------------------------------------------------------------------------------------


def test_the_first_optimizer_of_this_model_counts_the_steps(tmp_path: Path) -> None:
    model, other, recorder = mlp(), mlp(), Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder]) as logger:
        run_through(train(other, steps=3))
        assert logger.current_step == 0
        run_through(train(model, steps=2))
        assert logger.current_step == 2
    assert [record.step for record in recorder.records] == [0, 1]


def test_the_named_optimizer_counts_the_steps(tmp_path: Path) -> None:
    model, recorder = mlp(), Recorder()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with HookLogger(model, tmp_path, optimizer=second, alerts=[recorder]):
        for _ in range(2):
            model(torch.rand(4, 3)).sum().backward()
            first.step()
            second.step()
    assert [record.step for record in recorder.records] == [0, 1]
    assert all(record.grad_present.all() for record in recorder.records)


def test_a_resumed_run_continues_its_steps(tmp_path: Path) -> None:
    model, recorder = mlp(), Recorder()
    with HookLogger(model, tmp_path, alerts=(), every_n_steps=2):
        run_through(train(model, steps=5))
    with HookLogger(model, tmp_path, alerts=[recorder], every_n_steps=2, first_step=3):
        run_through(train(model, steps=4))
    assert list(scalars(tmp_path, "grad_norm/total")) == [0, 1, 2, 3, 4, 5, 6]
    assert [(r.step, r.full) for r in recorder.records] == [
        (3, False),
        (4, True),
        (5, False),
        (6, True),
    ]


def test_logger_step_counts_steps_without_an_optimizer(tmp_path: Path) -> None:
    model, recorder = mlp(), Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder], every_n_steps=2) as logger:
        for _ in range(3):
            model(torch.rand(4, 3)).sum().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            logger.step()
            model.zero_grad()
    assert [record.step for record in recorder.records] == [0, 1, 2]
    assert [record.full for record in recorder.records] == [True, False, True]
    assert recorder.records[2].activations
    assert all(record.total_grad_norm > 0 for record in recorder.records)


# --- life cycle ----------------------------------------------------------------------------------


def test_closing_twice_raises_nothing(tmp_path: Path) -> None:
    logger = HookLogger(mlp(), tmp_path)
    logger.close()
    logger.close()


def test_removing_and_attaching_again_continues_the_count(tmp_path: Path) -> None:
    model, recorder = mlp(), Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder]) as logger:
        run_through(train(model, steps=2))
        logger.remove()
        assert not any(module._forward_hooks for module in model.modules())
        run_through(train(model, steps=2))
        logger.attach()
        run_through(train(model, steps=1))
    assert [record.step for record in recorder.records] == [0, 1, 2]


class Requests(Rule):
    """Rule that requests a full step after each step and reports nothing."""

    requests_full_step = True

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        return ()


@pytest.mark.parametrize(
    ("rules", "every_n_steps", "level", "counts"),
    [
        ([], 10, logging.INFO, (2, 0)),
        ([Requests()], 5, logging.INFO, (3, 3)),
        ([Requests()], 10, logging.WARNING, (2, 3)),
        ([Requests()], 100, logging.INFO, (1, 3)),
    ],
)
def test_closing_logs_the_numbers_of_scheduled_and_requested_full_steps(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    rules: list[Rule],
    every_n_steps: int,
    level: int,
    counts: tuple[int, int],
) -> None:
    caplog.set_level(logging.INFO)
    model = small_cnn()
    logger = HookLogger(model, tmp_path, every_n_steps=every_n_steps, alerts=rules)
    for _ in train(model, logger, steps=11):
        logger.flush()
    logger.close()
    [message] = [line for line in caplog.records if "full steps" in line.getMessage()]
    assert isinstance(message.args, tuple)
    assert (message.levelno, message.args[:2]) == (level, counts)
    matrix = RunData(FileSource(tmp_path)).matrix("weight_rms")
    assert len(matrix.steps) == sum(counts)
    assert cli.main(["summary", str(tmp_path)]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert [int(number) for number in re.findall(r"\d+", line)] == [*counts]


def test_a_closed_logger_cannot_be_attached(tmp_path: Path) -> None:
    model = mlp()
    logger = HookLogger(model, tmp_path)
    logger.close()
    with pytest.raises(ValueError, match=r"attach\(\): the logger is closed; make a new one"):
        logger.attach()
    with pytest.raises(ValueError, match=r"^with HookLogger: the logger is closed"), logger:
        pass


def test_integers_of_numpy_are_accepted(tmp_path: Path) -> None:
    model, ten = mlp(), np.int64(10)
    with HookLogger(model, tmp_path, every_n_steps=ten, first_step=ten, max_bytes_per_step=ten):
        run_through(train(model, steps=2))
    assert sorted(scalars(tmp_path, "grad_norm/total")) == [10, 11]


def test_two_loggers_of_one_model_record_at_their_own_intervals(tmp_path: Path) -> None:
    model, recorders = mlp(), [Recorder(), Recorder()]
    with (
        HookLogger(model, tmp_path / "a", alerts=[recorders[0]], every_n_steps=1),
        HookLogger(model, tmp_path / "b", alerts=[recorders[1]], every_n_steps=2),
    ):
        run_through(train(model, steps=3))
    one, two = (recorder.records for recorder in recorders)
    assert [record.full for record in one] == [True, True, True]
    assert [record.full for record in two] == [True, False, True]
    assert one[2].activations["0"].sketch.sum == two[2].activations["0"].sketch.sum


WRITERS = pytest.mark.parametrize("kind", [SummaryWriter, telemetry.SummaryWriter])
"""SummaryWriter of torch and of this package."""


@WRITERS
def test_a_given_writer_stays_open(tmp_path: Path, kind: type[SummaryWriter]) -> None:
    writer = kind(tmp_path)
    model = mlp()
    with HookLogger(model, writer):
        run_through(train(model))
    writer.add_scalar("after", 1.0, 0)
    writer.close()
    assert scalars(tmp_path, "after") == {0: 1.0}
    assert len(scalars(tmp_path, "grad_norm/total")) == 5


@WRITERS
def test_all_steps_are_in_the_file_when_a_given_writer_is_flushed_or_closed(
    tmp_path: Path, kind: type[SummaryWriter], caplog: pytest.LogCaptureFixture
) -> None:
    writer = kind(tmp_path)
    model = mlp()
    with HookLogger(model, writer):
        run_through(train(model, steps=6))
        writer.flush()
        assert list(scalars(tmp_path, "grad_norm/total")) == list(range(6))
        run_through(train(model, steps=3))
        writer.close()
        assert list(scalars(tmp_path, "grad_norm/total")) == list(range(9))
    assert len(list_event_files(tmp_path)) == 1
    assert caplog.text == ""


@WRITERS
def test_a_given_writer_that_is_closed_continues_in_a_new_file(
    tmp_path: Path, kind: type[SummaryWriter], caplog: pytest.LogCaptureFixture
) -> None:
    writer = kind(tmp_path)
    model = mlp()
    with HookLogger(model, writer):
        run_through(train(model, steps=9))
        writer.close()
        run_through(train(model, steps=11))
    writer.close()
    with HookLogger(model, writer, first_step=20):
        run_through(train(model, steps=5))
    writer.close()
    # PyTorch numbers the files of one second without leading zeros: file 10 sorts before file 9.
    assert sorted(scalars(tmp_path, "grad_norm/total")) == list(range(25))
    tags = [
        [value.tag for event in read_events(path) for value in event.summary.value]
        for path in list_event_files(tmp_path)
    ]
    assert [any(tag.startswith(END_PREFIX) for tag in of_file) for of_file in tags] == [True] * 3
    assert caplog.text == ""


@WRITERS
def test_two_loggers_may_share_a_writer(tmp_path: Path, kind: type[SummaryWriter]) -> None:
    models, writer = [mlp(), mlp()], kind(tmp_path)
    before = dict(vars(writer))
    loggers = [HookLogger(model, writer, alerts=()) for model in models]
    for model in models:
        run_through(train(model, steps=4))
    writer.flush()
    steps = [event.step for event in load(tmp_path).Scalars("grad_norm/total")]
    assert sorted(steps) == [0, 0, 1, 1, 2, 2, 3, 3]
    for logger in loggers:
        logger.close()
    assert vars(writer) == before
    writer.close()


@pytest.mark.slow
def test_a_logger_without_references_continues_until_the_model_is_deleted(tmp_path: Path) -> None:
    model = mlp()
    HookLogger(model, tmp_path)
    run_through(train(model, steps=2))
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    assert len(scalars(tmp_path, "grad_norm/total")) == 2


@pytest.mark.slow
def test_a_script_that_never_closes_the_logger_loses_no_step(tmp_path: Path) -> None:
    script = """
        import sys, torch
        from torch import nn
        from telemetry import HookLogger
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        HookLogger(model, sys.argv[1])
        for _ in range(3):
            model(torch.rand(4, 2)).sum().backward()
            optimizer.step()
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], check=True, timeout=120
    )
    assert list(scalars(tmp_path, "grad_norm/total")) == [0, 1, 2]


# --- alerts --------------------------------------------------------------------------------------


def fault_at(step: int) -> Callable[[StepRecord], Iterable[Alert]]:
    def rule(record: StepRecord) -> Iterator[Alert]:
        if record.step == step:
            yield Alert(
                kind="nonfinite",
                severity="error",
                step=record.step,
                module_name="0",
                value=1.0,
                threshold=0.0,
                summary="planted fault in module 0",
                advice=("try to remove it",),
            )

    return rule


def test_an_alert_is_kept_logged_written_and_passed_to_callbacks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, received = mlp(), []
    with HookLogger(model, tmp_path, alerts=[fault_at(1)], on_alert=received.append) as logger:
        run_through(train(model))
        [alert] = logger.alerts
    assert (alert.kind, alert.step, alert.module_name) == ("nonfinite", 1, "0")
    assert received == [alert]
    [message] = [r for r in caplog.records if "planted fault" in r.getMessage()]
    assert message.levelno == logging.ERROR
    [tag] = [tag for tag in load(tmp_path).Tags()["tensors"] if tag.startswith("~alerts/")]
    assert tag == "~alerts/0000.nonfinite.0"
    count = [(event.step, event.value) for event in load(tmp_path).Scalars("alerts/count")]
    assert count == [(0, 0), (1, 0), (1, 1), (4, 1)], "steps, up to the end"


def test_an_alert_is_a_line_of_json_and_an_error_leaves_a_flight_file(tmp_path: Path) -> None:
    model = mlp()
    with HookLogger(model, tmp_path, alerts=[fault_at(1)]):
        run_through(train(model, steps=3))
    [line] = (tmp_path / "alerts.jsonl").read_text().splitlines()
    assert json.loads(line)["kind"] == "nonfinite"
    assert json.loads(line)["step"] == 1
    assert (tmp_path / "flight-1.json").exists()


def test_a_remote_directory_gets_no_lines_of_alerts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = mlp()
    with HookLogger(model, "memory://alerts", alerts=[fault_at(1)]):
        run_through(train(model, steps=3))
    assert list(tmp_path.iterdir()) == []


def test_an_alert_is_reported_and_written_without_a_later_step(tmp_path: Path) -> None:
    model, reported = mlp(), threading.Event()
    with HookLogger(
        model, tmp_path, every_n_steps=100, alerts=[fault_at(17)], on_alert=lambda _: reported.set()
    ):
        run_through(train(model, steps=18))
        assert reported.wait(20)

        def is_written() -> bool:
            try:
                return bool(telemetry.read(tmp_path).alerts)
            except NoTelemetryError:  # the first event is on its way to the disk
                return False

        assert any(is_written() for _ in range(2000))


def test_lines_of_alerts_have_the_session_of_the_page_and_the_time_of_the_step(
    tmp_path: Path,
) -> None:
    records: list[StepRecord] = []

    def rule(record: StepRecord) -> Iterator[Alert]:
        records.append(record)
        yield from fault_at(1)(record)

    model = mlp()
    for _ in range(2):
        with HookLogger(model, tmp_path, alerts=[rule]):
            run_through(train(model, steps=3))
    lines = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert [line["wall_time"] for line in lines] == [r.wall_time for r in records if r.step == 1]
    tags = FileSource(tmp_path).tags(PLUGIN_NAME)
    sessions = sorted(session_of(tag) for tag in tags if tag.startswith(LAYOUT_PREFIX))
    assert [line["session"] for line in lines] == sessions
    assert len(set(sessions)) == 2


def test_alerts_do_not_block_on_the_disk(freezable_disk: FreezableDisk) -> None:
    model = mlp()
    log_dir = freezable_disk.path / "run"
    log_dir.mkdir()
    writer = SummaryWriter(freezable_disk.path.parent / "elsewhere")
    writer.log_dir = str(log_dir)  # alerts and flight files are written to the frozen disk
    with HookLogger(model, writer, alerts=[fault_at(1), fault_at(3)]) as logger:
        with freezable_disk.frozen():
            run_through(train(model, steps=5))
            assert [alert.step for alert in logger.alerts] == [1, 3]
        logger.flush()
        assert len((log_dir / "alerts.jsonl").read_text().splitlines()) == 2
        assert (log_dir / "flight-1.json").exists()
    writer.close()


@pytest.mark.parametrize(
    ("exception", "recorded"),
    [(None, None), (KeyError("a"), "KeyError"), (SystemExit(1), None), (StopIteration(), None)],
)
def test_a_run_records_how_it_ended(
    tmp_path: Path, exception: BaseException | None, recorded: str | None
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with suppress(KeyError, SystemExit, StopIteration), HookLogger(model, tmp_path):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if exception:
            raise exception
    source = FileSource(tmp_path)
    [tag] = [tag for tag in source.tags(PLUGIN_NAME) if tag.startswith(END_PREFIX)]
    [(_, text)] = source.read(PLUGIN_NAME, [tag])[tag]
    assert decode_end(text) == recorded


def test_an_exception_in_the_body_leaves_a_flight_file(tmp_path: Path) -> None:
    model = mlp()

    def fail_after_two_steps() -> None:
        with HookLogger(model, tmp_path, alerts=()):
            run_through(train(model, steps=2))
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fail_after_two_steps()
    assert (tmp_path / "flight-2.json").exists()


def test_a_resolved_alert_does_not_raise(tmp_path: Path) -> None:
    def rule(record: StepRecord) -> Iterator[Alert]:
        for alert in fault_at(1)(record):
            yield replace(alert, stage="resolved")

    model = mlp()
    with HookLogger(model, tmp_path, alerts=[rule], on_alert="raise") as logger:
        run_through(train(model))
        assert len(logger.alerts) == 1


def test_an_alert_raises_between_two_steps_if_requested(tmp_path: Path) -> None:
    model = mlp()
    with (
        pytest.raises(TelemetryAlert, match="planted fault") as raised,
        HookLogger(model, tmp_path, alerts=[fault_at(1)], on_alert="raise") as logger,
    ):
        run_through(logger.flush() for _ in train(model, steps=100))
    assert raised.value.alert.step == 1
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)
    assert str(raised.value).startswith("nonfinite in module 0 at step 1: planted fault")
    assert not any(module._forward_hooks for module in model.modules())


def test_an_alert_requests_a_stop_between_two_steps_if_configured(tmp_path: Path) -> None:
    model, seen = mlp(), []
    with HookLogger(model, tmp_path, alerts=[fault_at(1)], on_alert="stop") as logger:
        for _ in train(model, steps=4):
            seen.append(logger.should_stop)
            logger.flush()
    assert seen[0] is False
    assert seen[2:] == [True, True]
    with HookLogger(model, tmp_path, alerts=[fault_at(1)], on_alert=print) as logger:
        run_through(train(model, steps=4))
    assert not logger.should_stop


def test_histograms_and_pictures_of_a_step_stay_within_their_bytes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with HookLogger(model, tmp_path, every_n_steps=1, alerts=(), max_bytes_per_step=9_000):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 3, 8, 8)).square().mean().backward()
            optimizer.step()
    sizes: Counter[int] = Counter()
    for path in list_event_files(tmp_path):
        for event in read_events(path):
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name in ("histograms", "images"):
                    sizes[event.step] += value.ByteSize()
    assert all(6_000 < size <= 9_000 for size in sizes.values())
    assert len(sizes) == 3


@pytest.mark.slow
def test_a_notebook_cell_can_run_again_and_continues_the_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The cell runs with the same model, a new one, and after a restart of the kernel."""
    page = (ROOT / "docs" / "howto" / "trainers.md").read_text(encoding="utf-8")
    code = page.partition("## Notebooks")[2].partition("```python\n")[2].partition("```")[0]
    code = code.replace("runs/first", str(tmp_path))
    cell = {"HookLogger": HookLogger, "train": lambda model: run_through(train(model, steps=3))}
    cell["model"] = mlp()
    exec(code, cell)
    exec(code, cell)
    cell["model"] = mlp()
    exec(code, cell)
    cell["logger"].close()
    after_restart = f"""
import torch
from telemetry import HookLogger
def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 2)).sum().backward()
        optimizer.step()
model = torch.nn.Linear(2, 2)
{code}
"""
    subprocess.run([sys.executable, "-c", after_restart], check=True)
    steps = [
        event.step
        for path in list_event_files(tmp_path)
        for event in read_events(path)
        if any(value.tag == TOTAL_GRAD_NORM for value in event.summary.value)
    ]
    assert steps == list(range(12))
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        f"telemetry: a new HookLogger replaces the one that watched the same model and wrote to "
        f"{tmp_path}; that one is now closed"
    ]


@pytest.mark.parametrize("by_variable", [False, True])
def test_a_disabled_logger_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    monkeypatch.setenv("TELEMETRY_DISABLED", "1" if by_variable else "0")
    model, log_dir = mlp(), tmp_path / "run"
    threads = threading.active_count()
    logger = HookLogger(model, log_dir, every_n_steps=1, on_alert="stop", enabled=by_variable)
    with logger:
        for _ in train(model, steps=3):
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
            logger.log(loss=torch.nan, size=torch.ones(3))
            with logger.phase("validation"):
                model(torch.randn(2, 3))
        logger.step()
        logger.hparams({"lr": 0.1})
        logger.flush()
    logger.load_state_dict({"step": 7})
    assert (logger.current_step, logger.state_dict()) == (7, {"step": 7})
    assert (logger.alerts, logger.should_stop, logger.log_dir) == ((), False, str(log_dir))
    assert not log_dir.exists()
    assert threading.active_count() == threads
    logger.attach()
    logger.remove()
    logger.close()
    with pytest.raises(RuntimeError, match="of the user"), logger:
        raise RuntimeError("of the user")


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_logger_is_disabled_if_the_system_refuses_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, allowed: int
) -> None:
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with HookLogger(mlp(), tmp_path / "run", first_step=3) as logger:
        logger.log(loss=1.0)
    assert (logger.current_step, logger.log_dir) == (3, str(tmp_path / "run"))
    assert ["logger is disabled" in message for message in caplog.messages] == [True]
    assert not any(thread.is_alive() for thread in started)


def test_environment_variables_set_what_the_code_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "LOG_DIR": str(tmp_path / "run"),
        "EVERY_N_STEPS": "3",
        "LOSS_TAG": "ce",
        "ON_ALERT": "stop",
        "MAX_OVERHEAD": "inf",
    }.items():
        monkeypatch.setenv(f"TELEMETRY_{name}", value)
    torch.manual_seed(0)  # with other weights, a rule may request a full step
    model = mlp()
    with HookLogger(model) as logger:
        for step, _ in enumerate(train(model, steps=20)):
            logger.log(ce=1.0 if step < 8 else torch.nan)
            logger.flush()
    assert logger.should_stop
    assert logger.log_dir == str(tmp_path / "run")
    assert list(RunData(FileSource(tmp_path / "run")).matrix("weight_rms").steps[:3]) == [0, 3, 6]

    model = mlp()
    with HookLogger(model, tmp_path / "given", every_n_steps=2, alerts=()) as logger:
        run_through(train(model, steps=5))
    assert list(RunData(FileSource(tmp_path / "given")).matrix("weight_rms").steps) == [0, 2, 4]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("EVERY_N_STEPS", "0"),
        ("EVERY_N_STEPS", "often"),
        ("MAX_OVERHEAD", "2"),
        ("ON_ALERT", "stopp"),
        ("DISABLED", "perhaps"),
    ],
)
def test_a_wrong_environment_variable_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"TELEMETRY_{name}", value)
    with pytest.raises(ValueError, match=f"TELEMETRY_{name}='{value}': must be "):
        HookLogger(mlp(), tmp_path)


def test_a_model_alone_is_measured_every_100_steps_in_a_new_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = mlp()
    with HookLogger(model, alerts=()):
        run_through(train(model, steps=202))
    [run] = (tmp_path / "runs").iterdir()
    assert list(RunData(FileSource(run)).matrix("weight_rms").steps) == [0, 100, 200]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_notebook_shows_state_step_directory_and_alerts(tmp_path: Path, enabled: bool) -> None:
    log_dir, model = tmp_path / "a<b", mlp()
    options: dict[str, Any] = {"alerts": [fault_at(1)], "enabled": enabled}
    with HookLogger(model, log_dir, **options) as logger:
        run_through(train(model, steps=3))
        alerts = [alert.kind for alert in logger.alerts]
        table = ElementTree.fromstring(logger._repr_html_())
    cells = {row[0].text: row[1].text or "" for row in table.iter("tr")}
    assert cells["log_dir"] == str(log_dir)
    assert (cells["state"], cells["step"]) == (("attached", "3") if enabled else ("removed", "0"))
    assert len(alerts) == enabled
    assert all(kind in cells["alerts"] for kind in alerts)


@WRITERS
@pytest.mark.parametrize("method", ["flush", "close"])
def test_a_callback_may_flush_or_close_the_writer(
    tmp_path: Path, kind: type[SummaryWriter], method: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, writer = mlp(), kind(tmp_path)

    def on_alert(alert: Alert) -> None:
        getattr(writer, method)()

    with HookLogger(model, writer, alerts=[fault_at(1)], on_alert=on_alert):
        run_through(train(model))
    writer.close()
    # By names, torch's tenth file of a second comes before its ninth.
    assert sorted(scalars(tmp_path, "grad_norm/total")) == [0, 1, 2, 3, 4]
    assert "failed" not in caplog.text


def test_closing_on_two_threads_at_once_raises_nothing(tmp_path: Path) -> None:
    model = mlp()
    for number in range(5):
        logger = HookLogger(model, tmp_path / str(number), alerts=())
        run_through(train(model, steps=2))
        with ThreadPoolExecutor(4) as pool:
            for closed in [pool.submit(logger.close) for _ in range(4)]:
                closed.result()
        assert len(scalars(tmp_path / str(number), "grad_norm/total")) == 2


def test_a_callback_may_close_the_logger_and_queued_steps_are_checked(tmp_path: Path) -> None:
    model, recorder, closed = mlp(), Recorder(), threading.Event()
    may_start = threading.Event()

    def blocked(record: StepRecord) -> Iterable[Alert]:
        assert may_start.wait(30)
        return fault_at(1)(record)

    def on_alert(alert: Alert) -> None:
        logger.close()
        closed.set()

    logger = HookLogger(model, tmp_path, alerts=[blocked, recorder], on_alert=on_alert)
    run_through(train(model, steps=9))
    may_start.set()
    assert closed.wait(30)
    logger.close()  # returns after the callback's close()
    assert [record.step for record in recorder.records] == list(range(9))
    assert list(scalars(tmp_path, "grad_norm/total")) == list(range(9))


def test_a_failing_callback_is_logged_and_training_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()

    def broken(alert: Alert) -> None:
        raise RuntimeError("planted in the callback")

    with HookLogger(model, tmp_path, alerts=[fault_at(1)], on_alert=broken):
        run_through(train(model))
    assert "planted in the callback" in caplog.text


# --- failures of the disk ------------------------------------------------------------------------


def test_a_run_whose_directory_is_removed_continues_and_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, run = mlp(), tmp_path / "run"
    with HookLogger(model, run, every_n_steps=2, alerts=[fault_at(6)]) as logger:
        logger.hparams({"lr": 0.01})
        batches = train(model, logger, steps=8)
        for _ in range(4):
            next(batches)
        logger.flush()
        shutil.rmtree(run)
        run_through(batches)

    data = RunData(FileSource(run))
    assert [layer.name for layer in data.overview().layers] == ["0", "1", "2"]
    assert data.matrix("weight_norm").steps.tolist() == [4, 6]
    assert data.matrix("grad_norm").steps.tolist() == [4, 5, 6, 7]
    assert [alert.step for alert in data.overview().alerts] == [6]
    assert cli.main(["summary", str(run)]) == 0
    assert "3 layers, steps 0 to 7, alerts: 1" in capsys.readouterr().out
    tags = load(run).Tags()["tensors"]
    assert {"_hparams_/session_start_info", "custom_scalars__config__"} <= set(tags)
    assert (run / "alerts.jsonl").exists()


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "mlp"}, TypeError, r"HookLogger\(model=...\): must be a torch.nn.Module"),
        ({"model": nn.ReLU()}, ValueError, "has no parameters"),
        ({"writer": 3}, TypeError, r"HookLogger\(writer=...\): must be .* or a log directory"),
        ({"every_n_steps": 0}, ValueError, r"HookLogger\(every_n_steps=0\): must be at least 1"),
        ({"every_n_steps": 0.5}, TypeError, r"every_n_steps=0.5\): must be an int"),
        ({"every_n_steps": True}, TypeError, r"every_n_steps=True\): must be an int"),
        ({"writer": "a\0b"}, ValueError, r"writer='a\\x00b'\): must not contain .* NUL"),
        ({"optimizer": "adam"}, TypeError, r"optimizer=...\): must be a torch.optim.Optimizer"),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1)},
            ValueError,
            "holds none of the model's parameters",
        ),
        ({"modules": "1x"}, ValueError, "matches none of the 4 modules; the closest names are"),
        ({"modules": 7}, TypeError, r"HookLogger\(modules=7\)"),
        ({"exclude": nn.Module}, ValueError, "leaves none"),
        ({"alerts": "all"}, TypeError, r"HookLogger\(alerts='all'\)"),
        ({"alerts": {"dead_unit": None}}, ValueError, "no rule has this name; .*dead_units"),
        ({"alerts": [1]}, TypeError, "1 is not a rule"),
        ({"alerts": ["dead_units"]}, TypeError, "is the name of a rule; .* {'dead_units': None}"),
        ({"alerts": [Nonfinite]}, TypeError, r"is a class; pass an instance: Nonfinite\(\)"),
        ({"alerts": Nonfinite()}, TypeError, "must be a list of rules"),
        ({"optimizer": torch.optim.SGD}, TypeError, "not the class torch.optim.sgd.SGD"),
        (
            {"modules": mlp().modules()},
            TypeError,
            r"modules=Sequential\(...\)\): must be a glob",
        ),
        ({"modules": mlp().named_modules()}, TypeError, "must be a glob over names"),
        ({"images": "no"}, TypeError, r"HookLogger\(images='no'\): must be True or False"),
        ({"writer": ""}, ValueError, "must name a log directory"),
        ({"writer": torch.optim.SGD(mlp().parameters(), lr=1)}, TypeError, "not torch.optim.sgd"),
        ({"first_step": 2**63}, ValueError, "must be from 0 to 2"),
        ({"first_step": -1}, ValueError, r"first_step=-1\): must be from 0 to 2"),
        ({"max_bytes_per_step": 0}, ValueError, r"max_bytes_per_step=0\): must be at least 1"),
        ({"max_bytes_per_step": 1e6}, TypeError, "must be an int or None"),
        ({"enabled": 1}, TypeError, r"enabled=1\): must be True or False"),
        ({"histograms": "torch"}, ValueError, 'must be "tensor" or "classic"'),
        ({"on_alert": "halt"}, ValueError, 'must be a callable, "raise" or "stop"'),
        ({"on_alert": 1}, TypeError, 'must be a callable, "raise" or "stop"'),
        ({"ranks": "all"}, ValueError, r"HookLogger\(ranks='all'\): must be"),
        ({"ranks": 1}, TypeError, r"HookLogger\(ranks=1\): must be"),
    ],
)
def test_an_invalid_argument_is_named(
    tmp_path: Path, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        HookLogger(**{"model": mlp(), "writer": tmp_path, **options})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda logger: logger.phase(3), TypeError, r"phase\(name=3\): it must be a string"),
        (lambda logger: logger.phase(""), ValueError, "must not be empty"),
        (lambda logger: logger.phase("\ud800"), ValueError, "surrogate"),
        (lambda logger: logger.hparams("lr=1"), TypeError, "must be a dict of values by name"),
        (
            lambda logger: logger.hparams({1: 2}),
            TypeError,
            r"hparams\({1: ...}\): a name must be a",
        ),
        (lambda logger: logger.hparams({"a": "\ud800"}), ValueError, "surrogate"),
        (
            lambda logger: logger.hparams({"a": 1}, metrics="loss"),
            TypeError,
            r"metrics='loss'\): must be several tags, such as \['loss'\]",
        ),
    ],
)
def test_an_invalid_argument_of_a_method_is_named_and_training_continues(
    tmp_path: Path, call: Callable[[HookLogger], object], error: type[Exception], message: str
) -> None:
    model = mlp()
    with HookLogger(model, tmp_path) as logger:
        with pytest.raises(error, match=message):
            call(logger)
        run_through(train(model))
    assert len(scalars(tmp_path, "grad_norm/total")) == 5


def test_a_directory_that_cannot_be_written_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        OSError, match=r"HookLogger\(writer='.*file/run'\): the log directory cannot be written"
    ):
        HookLogger(mlp(), tmp_path / "file" / "run")
    assert caplog.messages == []


def test_a_store_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class StoreError(OSError):
        def __init__(self, host: str, reason: str) -> None:
            super().__init__(host, reason)

    def fail(*args: object, **options: object) -> None:
        raise StoreError("host", "down")

    monkeypatch.setattr(MemoryFileSystem, "makedirs", fail)
    with pytest.raises(OSError, match=r"HookLogger\(writer='memory://x'\): the log directory can"):
        HookLogger(mlp(), "memory://x")


def test_scalars_can_be_passed_as_a_mapping(tmp_path: Path) -> None:
    model = mlp()
    with HookLogger(model, tmp_path) as logger:
        logger.log({"loss/train set": 1, "both": 2}, both=3)
    assert scalars(tmp_path, "loss/train set") == {0: 1.0}
    assert scalars(tmp_path, "both") == {0: 3.0}


@pytest.mark.parametrize(
    ("refused", "error", "message"),
    [
        ({"loss": torch.zeros(2)}, ValueError, r"log\(loss=...\): must have one element, not 2"),
        ({"loss": "low"}, TypeError, r"log\(loss='low'\): must be a number"),
        ({"loss": "1"}, TypeError, r"log\(loss='1'\): must be a number"),
        ({"loss": b"1"}, TypeError, r"log\(loss=b'1'\): must be a number"),
        ({"loss": None}, TypeError, r"log\(loss=None\): must be a number"),
        ({"loss": list(range(10**5))}, TypeError, r"log\(loss=\[0, 1, 2.{,30}\]\): must be a num"),
        ({"loss": 10**400}, TypeError, "must be a number"),
        ({"loss": torch.tensor(1j)}, TypeError, "must be a real number"),
        ({"loss": torch.zeros(1, device="meta")}, TypeError, "must be a real number"),
        ({"": 1.0}, ValueError, r"log\({'': ...}\): a tag must neither be empty nor begin"),
        ({"~run/x": 1.0}, ValueError, r"log\({'~run/x': ...}\): .* choose another name"),
        ({1: 2.0}, TypeError, r"log\({1: ...}\): a tag must be a string"),
        ({"\ud800": 1.0}, ValueError, r"log\({'\\ud800': ...}\): .* surrogate"),
    ],
)
def test_values_that_cannot_be_logged_are_refused_and_the_others_written(
    tmp_path: Path, refused: dict[str, float], error: type[Exception], message: str
) -> None:
    model = mlp()
    with HookLogger(model, tmp_path) as logger, pytest.raises(error, match=message):
        logger.log({**refused, "after": 2})
    assert scalars(tmp_path, "after") == {0: 2.0}


@pytest.mark.parametrize("name", ["step", "global_step", "walltime", "commit"])
def test_arguments_of_other_loggers_are_not_tags(tmp_path: Path, name: str) -> None:
    message = rf"log\({name}=3\): is not an argument.*logger.current_step.*log\({{'{name}': ...}}\)"
    model = mlp()
    with HookLogger(model, tmp_path) as logger:
        with pytest.raises(TypeError, match=message):
            logger.log({"loss": 1.0}, **{name: 3})
        with pytest.raises(TypeError, match=r"log\('loss', 0.3, 3\): must be numbers by tag"):
            logger.log("loss", 0.3, 3)  # type: ignore[arg-type]
        logger.log({name: 4})
    assert scalars(tmp_path, "loss") == {0: 1.0}
    assert scalars(tmp_path, name) == {0: 4.0}


@pytest.mark.parametrize("value", [0.5, "loss", [("loss", 0.5)]])
def test_scalars_without_tags_are_refused(tmp_path: Path, value: object) -> None:
    model = mlp()
    with (
        HookLogger(model, tmp_path) as logger,
        pytest.raises(TypeError, match=r"must be numbers by tag, such as log\(loss=0.5\)"),
    ):
        logger.log(value)


def test_logging_after_close_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    with HookLogger(model, tmp_path) as logger:
        run_through(train(model, steps=1))
    for _ in range(2):
        logger.log(test_accuracy=0.9)
        logger.batch([1])
        logger.hparams({"lr": 0.1})
        with logger.phase("validation"):
            model(torch.randn(2, 3))
    methods = ["log", "batch", "hparams", "phase"]
    messages = [record.getMessage() for record in caplog.records]
    assert [f"{name}() after close() writes nothing" in m
            for name, m in zip(methods, messages, strict=True)] == [True] * 4  # fmt: skip
