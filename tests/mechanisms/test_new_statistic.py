"""A statistic that can be computed from a sketch is one entry in one file."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import telemetry

pytestmark = pytest.mark.slow

ENTRY = '''    Statistic(
        name="activation_span",
        title="Activation span",
        description="Largest less smallest of what the layer returned.",
        of=formulas.of_output(lambda sketch: sketch.max - sketch.min),
        over_depth=True,
    ),
)
"""All statistics, in the order in which they are shown."""
'''

SCRIPT = """
import sys
from pathlib import Path
import torch
from tests.helpers.board import open_slow
from tests.helpers.client import Client
from telemetry import HookLogger
from telemetry.commands.cli import main
from tests.helpers.loops import EventAccumulator

run = Path(sys.argv[1])
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with HookLogger(model, run, every_n_steps=1):
    for _ in range(2):
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()

tags = EventAccumulator(str(run)).Reload().Tags()["scalars"]
assert {"activation_span/0000.0", "depth/log10_activation_span/median"} <= set(tags), tags
client = Client(open_slow(run), run)
shown = {statistic["name"]: statistic for statistic in client.json("run", run=".")["statistics"]}
assert shown["activation_span"]["title"] == "Activation span"
assert (client.arrays("matrix", run=".", statistic="activation_span")[1]["values"] > 0).all()
assert main(["summary", str(run), "--statistic", "activation_span"]) == 0
assert main(["report", str(run), "-o", str(run / "report.html")]) == 0
assert 'activation_span":"' in (run / "report.html").read_text()
"""


def test_a_new_statistic_is_one_entry_and_is_shown_everywhere(tmp_path: Path) -> None:
    package = Path(telemetry.__file__).parent
    shutil.copytree(package, tmp_path / "telemetry")
    table = tmp_path / "telemetry" / "layers" / "table.py"
    end = ENTRY[ENTRY.index(')\n"""All statistics') :]
    before = table.read_text()
    assert before.count(end) == 1
    table.write_text(before.replace(end, ENTRY))
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")],
        cwd=tmp_path,  # Python searches there first
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "Activation span" in result.stdout
