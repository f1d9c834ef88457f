"""Makes the still pictures of ``docs/understand/page.md`` and ``docs/language-models.md``.

    python docs/images/pages.py [--runs FOLDER]

Five real runs of small networks on scikit-learn's digits, some of them with a fault, and the runs
of that page; then TensorBoard in Chromium. Needs Chromium and Playwright.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from walk import HERE, SIZE, Block, browser, settle

from telemetry import HookLogger

SMALL = {"width": 1000, "height": 560}

Change = Callable[[torch.optim.Optimizer], None]


class ConvBlock(nn.Module):
    """Adds to its input what two convolutions make of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.conv2(self.conv1(x.relu()).relu())
        return x + added


def residual() -> nn.Module:
    parts = {
        "image": nn.Unflatten(1, (1, 8, 8)),
        "stem": nn.Conv2d(1, 16, 3, padding=1),
        "blocks": nn.Sequential(*(ConvBlock(16) for _ in range(4))),
        "flat": nn.Flatten(),
        "head": nn.Linear(16 * 64, 10),
    }
    return nn.Sequential(OrderedDict(parts))


def plain(activation: type[nn.Module]) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(64, 64), activation()]
    for _ in range(7):
        layers += [nn.Linear(64, 64), activation()]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def deep() -> nn.Module:
    """Two hundred layers with parameters: 66 blocks of three, and two around them."""
    parts = {
        "embed": nn.Linear(64, 32),
        "blocks": nn.Sequential(*(Block(32) for _ in range(66))),
        "head": nn.Linear(32, 10),
    }
    return nn.Sequential(OrderedDict(parts))


def train(
    log_dir: Path,
    model: nn.Module,
    groups: Iterable[dict[str, Any]],
    make: Callable[..., torch.optim.Optimizer],
    *,
    steps: int,
    at: int = -1,
    change: Change = lambda optimizer: None,
) -> None:
    """Train, and change something about the optimizer before one of the steps."""
    torch.set_num_threads(1)
    dice = torch.Generator().manual_seed(1)
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().flatten(1) / 16
    labels = torch.from_numpy(digits.target)
    optimizer = make(list(groups))
    with HookLogger(model, log_dir, every_n_steps=20) as logger:
        for step in range(steps):
            if step == at:
                change(optimizer)
            batch = torch.randint(0, len(images), (64,), generator=dice)
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            logger.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def set_rate(rate: float) -> Change:
    def change(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = rate

    return change


@torch.no_grad()
def enlarge(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[1]["params"]:
        parameter.mul_(30)


def sgd(rate: float) -> Callable[..., torch.optim.Optimizer]:
    return lambda groups: torch.optim.SGD(groups, lr=rate, momentum=0.9)


def adam(groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=1e-3)


def all_of(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters())}]


def make_runs(runs: Path) -> None:
    for name, at in (("healthy/steady", -1), ("exploding/warmup-bug", 200)):
        torch.manual_seed(0)
        model = residual()
        groups = all_of(model)
        train(runs / name, model, groups, sgd(0.01), steps=400, at=at, change=set_rate(0.4))
    for name, activation in (("two/relu", nn.ReLU), ("two/sigmoid", nn.Sigmoid)):
        torch.manual_seed(0)
        model = plain(activation)
        train(runs / name, model, all_of(model), adam, steps=300)
    torch.manual_seed(0)
    model = deep()
    one = list(model.get_submodule("blocks.43.fc1").parameters())
    others = [p for p in model.parameters() if all(p is not its for its in one)]
    groups = [{"params": others}, {"params": one}]
    train(runs / "deep/blocks-200", model, groups, sgd(0.002), steps=600, at=400, change=enlarge)
    text = (HERE.parent / "language-models.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)
        shutil.copytree(Path(folder, "runs/gpt"), runs / "language/gpt")


def picture(
    chromium: Any,
    address: str,
    name: str,
    *,
    compared: str = "",
    dark: bool = False,
    size: dict[str, int] = SIZE,
    **link: str,
) -> None:
    page = browser.TelemetryPage(chromium.new_page(viewport=size), address)
    page.open(dark=dark, **link)
    settle(page)
    if compared:
        page.locator("button[aria-label='Compare with: none']").click()
        page.locator(f".runs tr:has-text('{compared}')").click()
        page.locator(".panel").nth(1).wait_for()
        settle(page)
    page.page.screenshot(path=HERE / f"{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path, help="folder of the runs, if they are there already")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = args.runs or Path(folder) / "runs"
        if not runs.exists():
            make_runs(runs)
        pictures: list[tuple[str, str, dict[str, Any]]] = [
            ("healthy", "page-healthy", {}),
            ("exploding", "page-exploding", {}),
            ("two", "page-two-runs", {"compared": "relu"}),
            ("deep", "page-200-layers", {"dark": True}),
            ("language", "page-language-model", {"statistic": "grad_share", "size": SMALL}),
            (
                "language",
                "page-language-model-attention",
                {"statistic": "attention_logit_max", "size": SMALL},
            ),
        ]
        with browser.open_browser() as chromium:
            for group, name, how in pictures:
                log = Path(folder) / "log"
                wanted = len(list((runs / group).iterdir()))
                with browser.serve(runs / group, log, fast=True, wanted=wanted) as address:
                    picture(chromium, address, name, **how)


if __name__ == "__main__":
    main()
