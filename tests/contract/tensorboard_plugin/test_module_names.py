"""Modules with unusual names are measured, found on the page and named in alerts."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telemetry import Alert, HookLogger, Output, StepRecord
from tests.helpers.applied import Applied
from tests.helpers.client import OpenClient
from tests.helpers.known_runs import alert_at
from tests.helpers.shell import call, records
from tests.helpers.twins import descend

PUNCTUATION = string.punctuation.replace(".", "")  # PyTorch forbids only a dot
FORGED = "fc\nCRITICAL:telemetry:all is lost"
NAMES = [
    *PUNCTUATION,
    *(f"a{character}1" for character in PUNCTUATION),
    *("pair", "pair[1]", "pair[1][1]", "pair[0]", "a[0", "a]0[", "[1]"),
    *(FORGED, "\n", "\t", "\x00", "\x1b[31m", " ", "\u200b", "\u2028", "größe", "層", "\ud800"),
    "x" * 5000,
]


def pair(size: int) -> nn.Module:
    """A module that returns two different tensors."""
    module = Applied(lambda m, x: (x * m.weight, -x * m.weight))
    module.weight = nn.Parameter(torch.full((4,), float(size)))
    return module


def net() -> nn.Module:
    """A module of every name, side by side: no output depends on another's."""

    def forward(m: Any, x: Tensor) -> Tensor:
        pairs = [part(x) for part in m.parts.values()]
        return torch.stack([first.tanh() - second.sin() for first, second in pairs])

    parts = {name: pair(1 + place) for place, name in enumerate(NAMES)}
    return Applied(forward, parts=nn.ModuleDict(parts))


def train(
    log_dir: Path, *, steps: int = 3, bad: str | None = None, **options: object
) -> HookLogger:
    """Train on ones, so that a module's outputs are its size; one module may become NaN."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with HookLogger(model, log_dir, every_n_steps=2, **options) as logger:  # type: ignore[arg-type]
        for step in range(steps):
            if bad is not None and step == steps - 1:
                nn.init.constant_(model.parts[bad].weight, torch.nan)
            descend(model, torch.ones(2, 4), optimizer)
    return logger


def printable(name: str) -> str:
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
    return "".join(escaped)


def layer_of(name: str) -> str:
    return f"parts.{name}"


def test_every_output_of_every_module_is_measured_and_no_rule_can_forge_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[StepRecord] = []

    def rule(record: StepRecord) -> list[Alert]:
        seen.append(record)
        return [
            alert_at(0, name, kind="mine", severity="warning", summary=f"{name} is bad")
            for name in record.activations
            if record.step == 0 and name.isascii()
        ]

    train(tmp_path / "run", alerts=[rule])
    messages = [record.getMessage() for record in caplog.records]
    assert {message[:8] for message in messages} == {"mine in "}
    lines = "\n".join(messages).splitlines()
    assert f"mine in parts.{printable(FORGED)} at step 0: parts.fc" in lines
    assert "  CRITICAL:telemetry:all is lost is bad." in lines
    assert not any(line.startswith("CRITICAL") for line in lines)
    record = seen[0]
    assert set(record.activations) == set(map(layer_of, NAMES))
    for size, name in enumerate(map(layer_of, NAMES), 1):
        assert record.activations[name].sketch.min == size
        assert record.outputs[Output(name, 1)].sketch.max == -size
        assert record.output_grads[Output(name, 1)].calls == 1
        assert record.weights[f"{name}.weight"].sketch.max == size


def written(name: str) -> str:
    """Return a name as the run log has it: UTF-8 has no half of a surrogate pair."""
    return name.encode(errors="backslashreplace").decode()


def test_the_page_has_the_outputs_of_each_layer_and_no_others(
    tmp_path: Path, open_client: OpenClient
) -> None:
    train(tmp_path / "run")
    client = open_client(tmp_path)
    layers = client.json("run", run="run")["layers"]
    assert [layer["name"] for layer in layers] == [
        "model input",
        *map(written, map(layer_of, NAMES)),
    ]
    for name in map(layer_of, NAMES):
        if name in map(layer_of, ("\x00", "\ud800")):
            continue  # cannot be part of an address
        header, arrays = client.arrays("histograms", run="run", layer=name)
        found = [(item["kind"], item["name"]) for item in header["histograms"]]
        outputs = [printable(name), f"{printable(name)}[1]"]
        assert sorted(shown for kind, shown in found if kind == "outputs") == outputs
        assert len(found) == 6, "two outputs, their gradients, a parameter and its gradient"
        size = 1 + NAMES.index(name.removeprefix("parts."))
        for number, (kind, shown) in enumerate(found):
            middle = arrays[f"edges{number}"].mean()
            if kind == "outputs":
                assert middle == pytest.approx(size if shown == outputs[0] else -size, rel=0.1)
    header, _ = client.arrays("layer", run="run", layer=layer_of("a[1"))
    assert header["parameters"] == ["parts.a[1.weight"]


@pytest.mark.parametrize("bad", ["pair[1]", "[", "a[0", FORGED, "\x1b[31m", "\ud800", NAMES[-1]])
def test_a_fault_is_reported_by_its_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: str
) -> None:
    logger = train(tmp_path / "run", bad=bad)
    assert [alert.module_name for alert in logger.alerts] == [layer_of(bad)]
    messages = [record.getMessage() for record in caplog.records]
    assert printable(layer_of(bad)) in messages[0]
    lines = "\n".join(messages).splitlines()
    assert not any(line.startswith("CRITICAL") or "\x1b" in line for line in lines)
    run = tmp_path / "run"
    [fault] = records("explain", run)
    assert fault["first_bad_module"] == written(layer_of(bad))
    before = fault["profiles"][0]
    assert before["activation_rms"][1:] == [1.0 + i for i in range(len(NAMES))]
    assert set(before["nonfinite"]) == {0}
    assert f"first bad module: {printable(layer_of(bad))}\n" in call("explain", run).stdout
    found = call("alerts", run, "--fail-on", "error")
    assert (found.returncode, "nonfinite" in found.stdout) == (1, True)
    assert call("summary", run).returncode == 0
    assert call("report", run, "-o", tmp_path / "report.html").returncode == 0
