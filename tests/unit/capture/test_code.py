"""Source locations of modules: wrapped, compiled, without a source, and their alerts."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import telemetry
from telemetry import HookLogger, Module
from tests.helpers import shell
from tests.helpers.small_runs import fit
from tests.helpers.twins import one_step

HERE = Path(__file__).relative_to(Path.cwd()).as_posix()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


BLOCK = f"{HERE}:{Block.forward.__code__.co_firstlineno} (Block.forward)"
LINEAR = f"torch/nn/modules/linear.py:{nn.Linear.forward.__code__.co_firstlineno}"


def modules_of(model: nn.Module) -> dict[str, Module]:
    record = one_step(model, torch.ones(1, 4))
    return {module.name: module for module in record.layout.modules}


def test_a_layer_of_torch_has_its_own_line_and_the_nearest_user_code() -> None:
    modules = modules_of(nn.Sequential(Block(), nn.ReLU()))
    layer = modules["0.layers.0"]
    assert (layer.forward, str(layer.user_code), layer.code) == (LINEAR, BLOCK, BLOCK)
    assert modules["1"].user_code is None
    assert modules["1"].code == ""  # a line of torch is not the source location


def test_a_line_of_a_library_is_the_source_location_without_user_code() -> None:
    library = "timm/models/resnet.py:9"
    assert Module(name="", type_name="A", forward=library).code == library


def wraps(module: nn.Module) -> Callable[..., Any]:
    forward = module.forward

    @functools.wraps(forward)
    def wrapper(*args: Any) -> Any:
        return forward(*args)

    return wrapper


def as_accelerate_does(module: nn.Module) -> Callable[..., Any]:
    return functools.update_wrapper(functools.partial(module.forward), module.forward)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap",
    [
        wraps,
        as_accelerate_does,
        lambda module: functools.partial(module.forward),
        lambda module: torch.compile(module.forward, backend="eager"),
        lambda module: functools.partial(functools.partial(Block.forward, module)),
    ],
)
def test_wrappers_of_forward_are_unwrapped(wrap: Callable[[nn.Module], Any]) -> None:
    block = Block()
    block.forward = wrap(block)  # type: ignore[method-assign]
    assert str(modules_of(block)["layers.0"].user_code) == BLOCK


class Endless:
    """Wrapper around itself."""

    def __init__(self, block: Block) -> None:
        self.__wrapped__ = self
        self.block = block

    def __call__(self, x: Tensor) -> Tensor:
        return Block.forward(self.block, x)


@pytest.mark.parametrize(
    "forward",
    [Endless, lambda block: eval("lambda x: block.layers[0](x)", {"block": block})],
)
def test_forwards_without_a_source_have_no_line(forward: Callable[[Block], Any]) -> None:
    block = Block()
    block.__dict__["forward"] = forward(block)
    assert modules_of(block)["layers.0"].user_code is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.:FutureWarning")
def test_compiled_models_have_a_location_and_traced_models_have_none() -> None:
    block = Block()
    compiled = torch.compile(block, backend="eager")
    assert str(modules_of(compiled)["layers.0"].user_code) == BLOCK
    modules = modules_of(torch.fx.symbolic_trace(Block()))
    assert {module.user_code for module in modules.values()} == {None}


def test_alert_explanation_and_table_name_the_line_of_a_nan(
    in_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("nets.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.fc = nn.Linear(4, 4)\n\n"
        "    def forward(self, x):\n        return self.fc(x / (x - x))\n"
    )
    monkeypatch.syspath_prepend(os.fspath(in_tmp_path))
    import nets

    monkeypatch.delitem(sys.modules, "nets")
    model = nets.Net()
    with HookLogger(model, "run") as logger:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fit(logger, 3, lambda step: model(torch.ones(2, 4)).sum(), optimizer)
    run = telemetry.read("run")
    user_code = dict(zip(run.modules["module_name"], run.modules["user_code"], strict=True))["fc"]
    assert user_code == "nets.py:9 (Net.forward)"
    alert = next(alert for alert in run.alerts if alert.module_name == "fc")
    assert str(alert.location) == user_code
    assert f"Code: {user_code}" in alert.message.splitlines()
    assert user_code in "".join(shell.lines("explain", "run"))
