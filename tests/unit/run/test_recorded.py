"""Content of a run: its numbers, histograms, images and names, as TensorBoard reads them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.util.tensor_util import make_ndarray
from torch import nn

import telemetry
from telemetry import HookLogger
from tests.helpers.applied import Applied
from tests.helpers.hand import array, check
from tests.helpers.loops import batches, load, mlp, scalars, small_cnn, train
from tests.helpers.shell import records
from tests.helpers.twins import Recorder, assert_left_alone, loss_of, seed, training


@pytest.mark.parametrize("every_n_steps", [1, 2])
def test_training_is_the_same_bit_for_bit(tmp_path: Path, every_n_steps: int) -> None:
    outcome = assert_left_alone(small_cnn, batches, tmp_path, every_n_steps=every_n_steps)
    assert [record.step for record in outcome.records] == [0, 1, 2, 3, 4]
    assert [record.step for record in outcome.full] == list(range(0, 5, every_n_steps))


def test_logged_values_are_those_that_numpy_computes(tmp_path: Path) -> None:
    loss = lambda model: loss_of(model, torch.rand(8, 3))  # noqa: E731
    loop = training(loss, steps=1, optimizer=partial(torch.optim.SGD, lr=0.5))
    outcome, [step] = check(mlp, loop, tmp_path)
    seed(0)
    before = {name: array(parameter) for name, parameter in mlp().named_parameters()}
    after = {name: array(parameter) for name, parameter in outcome.model.named_parameters()}
    board, norm = load(tmp_path), np.linalg.norm

    def check_curve(tag: str, expected: float, rel: float = 1e-6) -> None:
        [event] = board.Scalars(tag)
        assert event.value == pytest.approx(expected, rel=rel), tag

    def check_histogram(tag: str, values: np.ndarray) -> None:
        [event] = board.Tensors(tag)
        assert_histogram_of(values, make_ndarray(event.tensor_proto))

    squares = [np.square(grad).sum() for [grad] in step.grads.values()]
    check_curve("grad_norm/total", np.sqrt(sum(squares)))
    check_curve("learning_rate/0", 0.5)
    for name, [grad] in step.grads.items():
        tag = f"{int(name[0]):04d}.{name}"
        check_curve(f"grad_norm/{tag}", norm(grad))
        check_curve(f"weight_norm/{tag}", norm(before[name]))
        moved = norm(after[name] - before[name]) / norm(before[name])
        check_curve(f"update_ratio/{tag}", moved, rel=1e-4)
        check_histogram(f"grad/{tag}", grad)
        check_histogram(f"weight/{tag}", before[name])
    for name, [output] in step.activations.items():
        tag = f"{int(name):04d}.{name}"
        check_curve(f"activation_mean/{tag}", output.mean(), rel=1e-5)
        check_curve(f"activation_rms/{tag}", np.sqrt((output**2).mean()))
        check_curve(f"activation_min/{tag}", output.min())
        check_curve(f"activation_max/{tag}", output.max())
        check_curve(f"zero_fraction/{tag}", np.mean(output == 0))
        check_curve(f"dead_units/{tag}", np.mean((output == 0).all(axis=0)))
        check_histogram(f"activation/{tag}", output)
        check_histogram(f"activation_grad/{tag}", step.activation_grads[name][0])


def assert_histogram_of(values: np.ndarray, buckets: np.ndarray) -> None:
    """``buckets`` ``[k, 3]`` hold left edge, right edge and count of ``values``."""
    values = values.ravel()
    assert buckets[:, 2].sum() == values.size
    assert buckets[0, 0] == pytest.approx(values.min())
    assert buckets[-1, 1] == pytest.approx(values.max())
    for left, right, count in buckets[1:-1]:
        assert count == np.sum((left <= values) & (values < right))


INPUT_CURVES = [*(f"activation_{name}" for name in ("mean", "std", "min", "max")), "nonfinite"]


def test_the_input_and_the_channels_of_its_images_are_rows_above_the_layers(tmp_path: Path) -> None:
    model, recorder = nn.Sequential(nn.Hardtanh(), nn.Conv2d(3, 2, 3)), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    images = torch.rand(6, 3, 5, 5) * torch.tensor([1.0, 2.0, 4.0])[:, None, None] - 1
    images[0, 2, 0, 0] = torch.inf
    with HookLogger(model, tmp_path, every_n_steps=3, alerts=[recorder]) as logger:
        for step in range(4):
            model(images.roll(step, 0)).sum().backward()
            optimizer.step()
            if step == 1:
                with logger.phase("validation"), torch.no_grad():
                    model(images)
    assert {m.name for r in recorder.records for m in r.layout.modules} == {"0", "1"}
    run = telemetry.read(tmp_path)
    assert "2 layers, steps 0 to 3" in repr(run)
    rows = {"model input": images, **{f"model input.{i}": images[:, i] for i in range(3)}}
    assert run.modules.module_name.tolist() == [*rows, "0", "1"]
    curves = run.scalars.set_index(["tag", "step"])["value"]
    for name, x in rows.items():
        known, finite = x.double().numpy(), x[x.isfinite()].double().numpy()
        lost = int((~np.isfinite(known)).sum())
        for step in (0, 3):
            at = {s: float(curves.get((f"{s}/0000.{name}", step), 0.0)) for s in INPUT_CURVES}
            expected = [finite.mean(), finite.std(), finite.min(), finite.max(), lost]
            if lost:
                expected[:2] = np.inf, np.inf
            assert list(at.values()) == pytest.approx(expected, rel=1e-5), name
        of_page = run.layers[(run.layers.module_name == name) & (run.layers.step == 3)]
        of_page = of_page.set_index("statistic")["value"]
        assert of_page["activation_rms"] == pytest.approx(np.sqrt((known**2).mean()), rel=1e-5)
        assert of_page["nonfinite"] == lost
        assert f"activation/0000.{name}" in run.histogram_tags
    of_step = run.layers[(run.layers.statistic == "activation_rms") & (run.layers.step == 3)]
    sizes = of_step.set_index("module_name")["value"][["0", "1"]]
    middle = curves["depth/log10_activation_rms/median", 3]
    assert middle == pytest.approx(np.log10(sizes).mean(), rel=1e-5)


def test_a_model_of_indices_has_no_input_among_the_layers(tmp_path: Path) -> None:
    make = lambda: nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1))  # noqa: E731
    assert_left_alone(make, training(lambda m: loss_of(m, torch.arange(5)), 2), tmp_path)
    assert telemetry.read(tmp_path).modules.module_name.tolist() == ["0", "1"]


def test_names_are_numbered_in_forward_order(tmp_path: Path) -> None:
    layers = {"second": nn.Linear(4, 2), "first": nn.Linear(3, 4)}
    model = Applied(lambda m, x: m.second(m.first(x)), **layers)
    with HookLogger(model, tmp_path, alerts=()):
        train(model, steps=1)
    names = telemetry.read(tmp_path).modules.module_name.tolist()
    assert names == ["model input", "first", "second"]
    tags = load(tmp_path).Tags()["scalars"]
    assert "grad_norm/0000.first.weight" in tags
    assert "grad_norm/0001.second.weight" in tags


def test_user_scalars_are_written_at_the_current_step(tmp_path: Path) -> None:
    model, recorder = mlp(), Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder]) as logger:
        losses = [loss.item() for loss in batches(model, logger, steps=3)]
        logger.log({"loss/train set": 1, "both": 2}, both=3, accuracy=0.5, epoch=np.int64(1))
    assert scalars(tmp_path, "loss") == pytest.approx(dict(enumerate(losses)))
    assert [record.loss for record in recorder.records] == pytest.approx(losses)
    expected = {"accuracy": 0.5, "epoch": 1.0, "loss/train set": 1.0, "both": 3.0}
    assert {tag: scalars(tmp_path, tag) for tag in expected} == {
        tag: {3: value} for tag, value in expected.items()
    }


def test_content_can_be_switched_off(tmp_path: Path) -> None:
    model = small_cnn()
    with HookLogger(model, tmp_path, measure=()):
        train(model)
    tags = load(tmp_path).Tags()
    assert not any(tag.startswith(("activation", "grad", "weight")) for tag in tags["tensors"])
    groups = {tag.partition("/")[0] for tag in tags["scalars"]}
    assert groups == {"alerts", "depth", "full_steps", "grad_norm", "learning_rate", "memory"}


@pytest.mark.parametrize("every_n_steps", [1, 3])
def test_parameters_of_unselected_modules_are_only_in_totals_and_in_records_for_rules(
    tmp_path: Path, every_n_steps: int
) -> None:
    model, recorder = small_cnn(), Recorder()
    options: Any = {"every_n_steps": every_n_steps, "alerts": [recorder]}
    with HookLogger(model, tmp_path, modules=["[05]", "!5"], **options):
        train(model)
    for record in recorder.records:
        assert [p.recorded for p in record.layout.parameters] == 2 * [True] + 4 * [False]
        assert record.grad_present.all()
        assert len(record.weights) == len(record.update_ratios) == 6 * record.full
    run = telemetry.read(tmp_path)
    assert run.modules.module_name.tolist() == ["model input", "0"]
    names = run.scalars.tag.str.partition("/")
    of_layers = names[names[2].str.match(r"\d{4}\.\d")]
    assert set(of_layers[2]) == {"0000.0", "0000.0.weight", "0000.0.bias"}
    assert {"grad_norm", "weight_norm", "update_ratio", "weight_rms"} <= set(of_layers[0])
    expected = [np.linalg.norm(record.grad_norms) for record in recorder.records]
    assert list(scalars(tmp_path).values()) == pytest.approx(expected, rel=1e-6)
    norms = run.layers[run.layers.statistic == "grad_norm"].value.tolist()
    own = [np.linalg.norm(record.grad_norms[:2]) for record in recorder.records]
    assert norms == pytest.approx(own, rel=1e-6)
    found = {t.partition("/")[2] for t in run.histogram_tags if t.startswith(("grad/", "weight/"))}
    assert found == {"0000.0.weight", "0000.0.bias"}


def test_the_last_step_is_that_of_the_training_though_its_norms_were_not_measured(
    tmp_path: Path,
) -> None:
    model = nn.Linear(3, 2)
    with HookLogger(model, tmp_path, alerts=(), max_overhead=1e-6):
        train(model, steps=50)
    read = telemetry.read(tmp_path)
    assert read.layers.step.max() < 49
    assert "steps 0 to 49" in repr(read)
    [row] = records("runs", tmp_path)
    assert row["last_step"] == 49
