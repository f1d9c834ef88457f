"""A fixed sample is drawn at full steps and leaves training alone."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm

from telemetry import HookLogger
from tests.helpers.twins import assert_left_alone, run

SAMPLE = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8)


class Net(nn.Module):
    """Model that counts, draws random numbers and changes parameters, buffers and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.scripted = torch.jit.script(nn.BatchNorm2d(4))
        self.drop = nn.Dropout(0.3)
        self.head = weight_norm(nn.Linear(4 * 36, 2))
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("mean", torch.zeros(2))
        self.calls = 0
        self.latest: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        with torch.no_grad():
            self.conv.weight.data.mul_(0.99)
            self.seen += 1
        noise = torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002
        hidden = torch.relu(self.scripted(self.norm(self.conv(x))))
        out: Tensor = self.head(self.drop(hidden).flatten(1)) * noise
        self.mean = 0.9 * self.mean + 0.1 * out.detach().mean(0)
        self.latest = out
        return out


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))


def batches(model: nn.Module, logger: HookLogger | None, *, lr: float = 0.05) -> Iterator[Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3, 8, 8)).square().mean()
        loss.backward()
        optimizer.step()
        yield loss
        for parameter in model.parameters():
            yield parameter.grad
            yield parameter


def test_training_is_left_alone_bit_for_bit(tmp_path: Path) -> None:
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        kept.append(output)

    def make() -> nn.Module:
        model = Net()
        model.drop.eval()
        model.norm.register_forward_hook(keep)
        return model

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterable[Any]:
        assert isinstance(model, Net)
        for value in batches(model, logger):
            yield value
            hooks = [[h for h in m._forward_hooks.values() if h is keep] for m in model.modules()]
            yield model.latest
            yield model.calls, len(kept) % 5, [len(of_module) for of_module in hooks]
            yield [module.training for module in model.modules()]

    watched = assert_left_alone(make, loop, tmp_path, sample=SAMPLE, every_n_steps=2)
    assert len(kept) == 10  # outputs of training, with and without recording
    assert [bool(record.feature_maps) for record in watched.full] == [True] * 3


def test_pictures_of_the_sample_are_those_of_its_own_training_at_each_step(tmp_path: Path) -> None:
    def still(model: nn.Module, logger: HookLogger | None) -> Iterable[Any]:
        return batches(model, logger, lr=0.0)

    def on_the_sample(model: nn.Module, logger: HookLogger | None) -> Iterable[Any]:
        model(SAMPLE[:1]).square().mean().backward()
        yield torch.optim.SGD(model.parameters(), lr=0.0).step()

    watched = run(plain, still, tmp_path / "sample", sample=(SAMPLE.clone(),)).full
    [wanted] = run(plain, on_the_sample, tmp_path / "trained").full
    assert len(watched) == 5
    for record in watched:
        np.testing.assert_array_equal(record.feature_maps["0"], wanted.feature_maps["0"])
        np.testing.assert_array_equal(record.input, wanted.input)
    others = run(plain, still, tmp_path / "other").full  # the batches differ
    assert len({record.feature_maps["0"].tobytes() for record in others}) == 5


def test_a_sample_that_does_not_fit_is_logged_once_and_training_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watched = assert_left_alone(Net, batches, tmp_path, sample={"y": SAMPLE})
    assert not any(record.feature_maps for record in watched.full)
    assert len(watched.full) == 5
    messages = [record.getMessage() for record in caplog.records]
    assert len([text for text in messages if "failed to run the sample" in text]) == 1


def test_a_retained_graph_can_run_after_the_step(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.register_buffer("mask", torch.ones(3, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.conv(x * self.mask)
            return out

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterable[Any]:
        x = torch.randn(1, 3, 8, 8, requires_grad=True)
        out = model.mask * x  # type: ignore[operator]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).sum().backward()
        optimizer.step()
        yield torch.autograd.grad(out.sum(), x)[0]

    watched = assert_left_alone(Masked, loop, tmp_path, sample=SAMPLE)
    assert watched.full[0].feature_maps


def test_a_model_without_convolutions_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 2))

    run(make, batches, tmp_path, sample=SAMPLE)
    assert "no watched module is a convolution" in caplog.text


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sample": "x"}, TypeError, "a tensor, a tuple of arguments or a dict .*, not str"),
        ({"sample": {}}, TypeError, "not dict"),
        ({"sample": (1, 2)}, TypeError, "not tuple"),
        ({"sample": SAMPLE, "images": False}, ValueError, "images=False draws no pictures"),
    ],
)
def test_an_invalid_sample_is_refused(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        HookLogger(Net(), tmp_path, **options)


def test_a_compiled_model_is_refused_also_when_it_is_compiled_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    with HookLogger(model, tmp_path, sample=SAMPLE, every_n_steps=1, alerts=()):
        model._compiled_call_impl = model._call_impl  # as compile() does
        for _ in batches(model, None):
            pass
    assert "the model is compiled" in caplog.text
    with pytest.raises(ValueError, match="the model is compiled, and a pass in evaluation mode"):
        HookLogger(model, tmp_path, sample=SAMPLE)


@pytest.mark.usefixtures("process_group")
def test_a_ddp_model_is_drawn_and_an_fsdp_model_is_refused(tmp_path: Path) -> None:
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    watched = run(lambda: DistributedDataParallel(plain()), batches, tmp_path, sample=SAMPLE)
    assert all(record.feature_maps for record in watched.full)
    if hasattr(fsdp, "fully_shard"):  # since PyTorch 2.6
        model = plain()
        fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match="the model is sharded"):
            HookLogger(model, tmp_path / "other", sample=SAMPLE)
