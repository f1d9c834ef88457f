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
from telemetry import HookLogger
from telemetry.capture.layouts import places_in_code
from telemetry.commands.cli import main
from telemetry.events.page_format import decode_layout, encode_layout
from telemetry.records import CodeLocation, Module
from telemetry.testing import capture_run

HERE = Path(__file__).relative_to(Path.cwd()).as_posix()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


LINE = f"{HERE}:{Block.forward.__code__.co_firstlineno}"
BLOCK = CodeLocation(file=HERE, line=Block.forward.__code__.co_firstlineno, class_name="Block")


def location_of(module: nn.Module) -> tuple[str, CodeLocation | None]:
    return places_in_code({"": module})[""]


def test_a_layer_of_torch_has_its_own_line_and_the_nearest_user_code() -> None:
    model = nn.Sequential(Block(), nn.ReLU())
    locations = places_in_code(dict(model.named_modules()))
    assert locations["0"] == (LINE, BLOCK)
    forward, user_code = locations["0.layers.0"]
    line = nn.Linear.forward.__code__.co_firstlineno
    assert forward == f"torch/nn/modules/linear.py:{line}"
    assert user_code == BLOCK
    assert locations["0.layers"] == ("", user_code)  # never called
    assert locations["1"][1] is None


def test_a_line_of_torch_is_not_the_source_location() -> None:
    torch_line, library = "torch/nn/modules/linear.py:124", "timm/models/resnet.py:9"
    own = CodeLocation(file=HERE, line=7, class_name="Block")
    where = [(torch_line, None), (library, None), (torch_line, own), ("", None)]
    modules = [Module(name="", type_name="A", forward=f, user_code=u) for f, u in where]
    assert [module.code for module in modules] == ["", library, f"{HERE}:7 (Block.forward)", ""]


def wraps(module: nn.Module) -> Callable[..., Any]:
    forward = module.forward

    @functools.wraps(forward)
    def wrapper(*args: Any) -> Any:
        return forward(*args)

    return wrapper


def as_accelerate_does(module: nn.Module) -> Callable[..., Any]:
    return functools.update_wrapper(functools.partial(print, module), module.forward)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap",
    [
        wraps,
        as_accelerate_does,
        lambda module: functools.partial(module.forward),
        lambda module: torch.compile(module.forward),
        lambda module: functools.partial(functools.partial(Block.forward, module)),
    ],
)
def test_wrappers_of_forward_are_unwrapped(wrap: Callable[[nn.Module], Any]) -> None:
    module = Block()
    module.forward = wrap(module)  # type: ignore[method-assign]
    assert location_of(module) == (LINE, BLOCK)


class Endless:
    """Wrapper around the same object, whose other attributes raise."""

    def __init__(self) -> None:
        self.__wrapped__ = self

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_forwards_without_a_source_have_no_line() -> None:
    for forward in (torch.relu, len, None, Endless(), eval("lambda x: x")):
        module = Block()
        module.__dict__["forward"] = forward
        assert location_of(module) == ("", None)


@pytest.mark.filterwarnings("ignore:.torch.jit.:FutureWarning")
def test_compiled_models_have_a_location_and_traced_models_have_none() -> None:
    block = Block()
    assert location_of(torch.compile(block)._orig_mod) == (LINE, BLOCK)
    for module in (torch.fx.symbolic_trace(block), torch.jit.trace(block, torch.ones(1, 4))):
        assert all(
            user is None for _, user in places_in_code(dict(module.named_modules())).values()
        )


def test_a_layout_with_source_locations_is_decoded_unchanged() -> None:
    block = Block()
    with capture_run(block) as recorded:
        optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
        block(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    layout = recorded.records[0].layout
    text = encode_layout(layout, ())
    assert decode_layout(text)[0] == layout


def test_alert_explanation_and_table_name_the_line_of_a_nan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.fc = nn.Linear(4, 4)\n\n"
        "    def forward(self, x):\n        return self.fc(x / (x - x))\n"
    )
    monkeypatch.syspath_prepend(os.fspath(tmp_path))
    import nets

    monkeypatch.delitem(sys.modules, "nets")
    model = nets.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with HookLogger(model, "run") as logger:
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).sum()
            logger.log(loss=loss)
            loss.backward()
            optimizer.step()
    run = telemetry.read("run")
    table = run.modules
    [user_code] = table["user_code"]
    assert list(table["module_name"]) == ["fc"]
    assert user_code == "nets.py:9 (Net.forward)"
    alert = next(alert for alert in run.alerts if alert.module_name == "fc")
    assert alert.location == CodeLocation(file="nets.py", line=9, class_name="Net")
    assert f"Code: {user_code}" in alert.message.splitlines()
    assert main(["explain", "run"]) == 0
    assert user_code in capsys.readouterr().out
