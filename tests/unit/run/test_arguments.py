"""Arguments of HookLogger and its methods: defaults, environment, and what is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from telemetry import HookLogger
from tests.helpers.loops import batches, measured_steps, mlp, scalars, train
from tests.helpers.rules import rule

SGD = torch.optim.SGD
PLACE_OF_RULES = "is the name of a rule; .* {'dead_units': None}"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "mlp"}, TypeError, r"HookLogger\(model=...\): must be a torch.nn.Module"),
        ({"model": nn.ReLU()}, ValueError, "has no parameters"),
        ({"log_dir": 3}, TypeError, r"HookLogger\(log_dir=...\): must be a directory or a torch"),
        ({"log_dir": "a\0b"}, ValueError, r"log_dir='a\\x00b'\): must not contain .* NUL"),
        ({"log_dir": ""}, ValueError, "must name a directory"),
        ({"log_dir": SGD(mlp().parameters(), lr=1)}, TypeError, "not torch.optim.sgd"),
        ({"every_n_steps": 0}, ValueError, r"HookLogger\(every_n_steps=0\): must be at least 1"),
        ({"every_n_steps": 0.5}, TypeError, r"every_n_steps=0.5\): must be an int"),
        ({"every_n_steps": True}, TypeError, r"every_n_steps=True\): must be an int"),
        ({"first_step": 2**53}, ValueError, "must be from 0 to 2"),
        ({"first_step": -1}, ValueError, r"first_step=-1\): must be from 0 to 2"),
        ({"first_step": "last"}, TypeError, "first_step="),
        ({"optimizer": "adam"}, TypeError, r"optimizer=...\): must be a torch.optim.Optimizer"),
        ({"optimizer": SGD}, TypeError, "not the class torch.optim.sgd.SGD"),
        ({"optimizer": SGD(mlp().parameters(), lr=1)}, ValueError, "holds none of the model's"),
        ({"modules": mlp().modules()}, TypeError, r"modules=Sequential\(...\)\): must be a glob"),
        ({"modules": mlp().named_modules()}, TypeError, "must be a glob over names"),
        ({"alerts": "all"}, TypeError, r"HookLogger\(alerts='all'\)"),
        ({"alerts": {"dead_unit": None}}, ValueError, "no rule has this name; .*dead_units"),
        ({"alerts": [1]}, TypeError, "1 is not a rule"),
        ({"alerts": ["dead_units"]}, TypeError, PLACE_OF_RULES),
        ({"alerts": [type(rule("nonfinite"))]}, TypeError, r"is a class; .*: Nonfinite\(\)"),
        ({"alerts": rule("nonfinite")}, TypeError, "must be a list of rules"),
        ({"measure": "image"}, ValueError, r"measure='image'\): must be .*or \"images\""),
        ({"measure": ["!weight"]}, ValueError, r"measure='!weight'\): must be \"activations\""),
        ({"measure": ["!images", "weights"]}, ValueError, "what is measured, or with !"),
        ({"measure": None}, TypeError, r"measure=None\): must be \"activations\""),
        ({"resume": 1}, TypeError, r"resume=1\): must be True or False"),
        ({"enabled": 1}, TypeError, r"enabled=1\): must be True or False"),
        ({"on_alert": "halt"}, ValueError, 'must be a callable, "raise" or "stop"'),
        ({"on_alert": 1}, TypeError, 'must be a callable, "raise" or "stop"'),
        ({"ranks": "all"}, ValueError, r"HookLogger\(ranks='all'\): must be"),
        ({"ranks": 1}, TypeError, r"HookLogger\(ranks=1\): must be"),
        *(({"max_overhead": share}, ValueError, r"HookLogger\(max_overhead=.*must be above 0")
          for share in (0, -0.1, 1.5, math.nan)),
        *(({"max_overhead": share}, TypeError, r"HookLogger\(max_overhead=.*must be a number")
          for share in ("1%", True)),
        *(({"loss_tag": tag}, error, r"loss_tag=.*must be the tag of a logged scalar")
          for tag, error in ((3, TypeError), ("", ValueError), (["loss"], TypeError))),
    ],
)  # fmt: skip
def test_an_invalid_argument_is_named(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        HookLogger(**{"model": mlp(), "log_dir": tmp_path, **options})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda logger: logger.phase(3), TypeError, r"phase\(name=3\): must be a text"),
        (lambda logger: logger.phase(""), ValueError, r"name=''\): must be a text: the first part"),
        (lambda logger: logger.phase("\ud800"), ValueError, "surrogate"),
        (lambda logger: logger.hparams("lr=1"), TypeError, "must be a dict of values by name"),
        (lambda logger: logger.hparams({1: 2}), TypeError, r"hparams\({1: ...}\): a name must be"),
        (lambda logger: logger.hparams({"a": "\ud800"}), ValueError, "surrogate"),
        (lambda logger: logger.hparams({"a": 1}, metrics="loss"), TypeError,
         r"metrics='loss'\): must be several tags, such as \['loss'\]"),
        (lambda logger: logger.log("loss", 0.3, 3), TypeError, r"log\('loss', 0.3, 3\): must be"),
        *((lambda logger, value=value: logger.log(value), TypeError,
           r"must be numbers by tag, such as log\(loss=0.5\)")
          for value in (0.5, "loss", [("loss", 0.5)])),
    ],
)  # fmt: skip
def test_an_invalid_argument_of_a_method_is_named_and_training_continues(
    tmp_path: Path, call: Callable[[HookLogger], object], error: type[Exception], message: str
) -> None:
    model = mlp()
    with HookLogger(model, tmp_path) as logger:
        with pytest.raises(error, match=message):
            call(logger)
        train(model)
    assert len(scalars(tmp_path)) == 5


@pytest.mark.parametrize(
    ("refused", "error", "message"),
    [
        ({"loss": torch.zeros(2)}, ValueError, r"log\(loss=...\): must have one element, not 2"),
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
        logger.log({name: 4})
    assert scalars(tmp_path, "loss") == {0: 1.0}
    assert scalars(tmp_path, name) == {0: 4.0}


def test_integers_of_numpy_are_accepted(tmp_path: Path) -> None:
    model, ten = mlp(), np.int64(10)
    with HookLogger(model, tmp_path, every_n_steps=ten, first_step=ten):
        train(model, steps=2)
    assert sorted(scalars(tmp_path)) == [10, 11]


def test_a_directory_that_cannot_be_written_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    message = r"HookLogger\(log_dir='.*file/run'\): the directory cannot be written"
    with pytest.raises(OSError, match=message):
        HookLogger(mlp(), tmp_path / "file" / "run")
    assert caplog.messages == []


def test_a_remote_directory_is_refused_with_both_ways_out() -> None:
    with pytest.raises(ValueError, match=r"'s3://bucket/run'\): must be a local") as error_info:
        HookLogger(mlp(), "s3://bucket/run")
    assert "copy it there" in str(error_info.value)
    assert "SummaryWriter that writes there" in str(error_info.value)


# --- what the code leaves out --------------------------------------------------------------------


def test_environment_variables_set_what_the_code_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to = {"EVERY_N_STEPS": "3", "LOSS_TAG": "ce", "ON_ALERT": "stop", "MAX_OVERHEAD": "inf"}
    for name, value in {"LOG_DIR": str(tmp_path / "run"), **set_to}.items():
        monkeypatch.setenv(f"TELEMETRY_{name}", value)
    torch.manual_seed(0)  # with other weights, a rule may request a full step
    model = mlp()
    with HookLogger(model) as logger:
        for step, _ in enumerate(batches(model, steps=20)):
            logger.log(ce=1.0 if step < 8 else torch.nan)
            logger.flush()
    assert logger.should_stop
    assert logger.log_dir == str(tmp_path / "run")
    assert measured_steps(tmp_path / "run")[:3] == [0, 3, 6]

    model = mlp()
    with HookLogger(model, tmp_path / "given", every_n_steps=2, alerts=()):
        train(model)
    assert measured_steps(tmp_path / "given") == [0, 2, 4]


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


def test_a_model_alone_is_measured_every_100_steps_in_a_new_directory(in_tmp_path: Path) -> None:
    model = mlp()
    with HookLogger(model, alerts=()):
        train(model, steps=202)
    [run] = (in_tmp_path / "runs").iterdir()
    assert measured_steps(run) == [0, 100, 200]
