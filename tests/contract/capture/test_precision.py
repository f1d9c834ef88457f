"""Numbers of every kind: half precision, scaled gradients, sparse and missing ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from telemetry import HookLogger
from tests.helpers.applied import Applied
from tests.helpers.hand import array, assert_logged, assert_tensor, by_hand, check
from tests.helpers.twins import assert_left_alone, batch, loss_of, scaled_loop, training


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 2))


# --- autocast -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("all_inside", [False, True])
def test_a_model_under_autocast_is_logged_and_left_alone(
    tmp_path: Path, dtype: torch.dtype, all_inside: bool
) -> None:
    """Backward pass and step may run inside of it, too."""

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype):
            y = model(batch())
            assert y.dtype == dtype
            return y.float().square().mean()

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        optimizer = partial(torch.optim.AdamW, lr=0.1)
        with torch.autocast("cpu", dtype, enabled=all_inside):
            yield from training(loss, optimizer=optimizer)(model, logger)

    check(mlp, loop, tmp_path)


# --- GradScaler -----------------------------------------------------------------------------------

OPTIMIZERS = {
    "not fused": partial(torch.optim.AdamW, lr=0.01),
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
}


def unscaled_loop(kind: str) -> Callable[..., Any]:
    """The same without a scaler: its gradients are the true ones, as scales are powers of two."""
    return training(steps=6, optimizer=OPTIMIZERS[kind])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_gradients_are_logged_without_the_scale(tmp_path: Path, kind: str) -> None:
    outcome = assert_left_alone(mlp, scaled_loop(OPTIMIZERS[kind]), tmp_path)
    assert [record.loss_scale for record in outcome.records] == [1024, 1024, 2048, 2048, 4096, 4096]
    for record, hand in zip(outcome.full, by_hand(mlp, unscaled_loop(kind)), strict=True):
        assert_logged(record, hand)
        assert record.total_grad_norm_before_clipping == pytest.approx(record.total_grad_norm)
    assert [record.skipped_steps for record in outcome.records] == [0] * 6


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_that_overflow_are_counted_and_marked_or_not_logged(
    tmp_path: Path, kind: str
) -> None:
    """A scaler skips the step of an optimizer; a fused one skips its own step."""
    loop = scaled_loop(OPTIMIZERS[kind], overflow_at=(2, 3))
    records = assert_left_alone(mlp, loop, tmp_path).full
    fused = kind == "fused"
    assert [record.step for record in records] == list(range(6 if fused else 4))
    assert [record.skipped for record in records] == [fused and r.step in (2, 3) for r in records]
    skipped_steps = [0, 0, 1, 2, 2, 2] if fused else [0, 0, 2, 2]
    assert [record.skipped_steps for record in records] == skipped_steps
    for record in records:
        assert record.grad_finite.all() == np.isfinite(record.total_grad_norm) != record.skipped
        assert record.activations["0"].calls == record.activation_grads["0"].calls == 1
        nonfinite = record.activation_grads["0"].sketch.nonfinite_count
        assert nonfinite == 0 or record.skipped


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_skipped_steps_before_the_first_one_are_counted(tmp_path: Path, micro_batches: int) -> None:
    """The first steps of a run overflow at the initial scale."""
    loop = scaled_loop(
        OPTIMIZERS["not fused"],
        overflow_at=(0, 1),
        iterations=4,
        micro_batches=micro_batches,
        scale=65536.0,
    )
    outcome = assert_left_alone(mlp, loop, tmp_path)
    assert [record.skipped_steps for record in outcome.records] == [2, 2]
    for record in outcome.full:
        assert record.activations["0"].calls == micro_batches
        assert record.activation_grads["0"].calls == micro_batches
        assert record.activation_grads["0"].sketch.max < 1


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_clipping_under_a_scaler_is_logged_with_unscaled_norms(tmp_path: Path, kind: str) -> None:
    loop = scaled_loop(OPTIMIZERS[kind], clip=0.01, iterations=3)
    outcome = assert_left_alone(mlp, loop, tmp_path)
    [first, *_] = by_hand(mlp, unscaled_loop("not fused"))
    true = np.sqrt(sum(np.square(grad).sum() for [grad] in first.grads.values()))
    assert outcome.full[0].total_grad_norm_before_clipping == pytest.approx(true)
    for record in outcome.full:
        assert record.total_grad_norm == pytest.approx(0.01, rel=1e-3)
        assert record.clipped_fraction == 1


def test_a_disabled_scaler_has_no_loss_scale(tmp_path: Path) -> None:
    outcome, _ = check(mlp, scaled_loop(OPTIMIZERS["fused"], enabled=False), tmp_path)
    assert [record.loss_scale for record in outcome.records] == [None] * 6


def test_gradients_of_two_optimizers_of_one_scaler_are_logged_without_the_scale(
    tmp_path: Path,
) -> None:
    """One optimizer unscales by itself, the scaler unscales for the other."""

    def loop(model: Any, logger: HookLogger | None) -> Iterator[Tensor]:
        fused = OPTIMIZERS["fused"](model[0].parameters())
        other = OPTIMIZERS["not fused"](model[1:].parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(6):
            model.zero_grad()
            loss = model(batch()).square().mean()
            scaler.scale(loss).backward()
            scaler.step(fused)
            scaler.step(other)
            scaler.update()
            yield loss

    outcome = assert_left_alone(mlp, loop, tmp_path)
    for record, hand in zip(
        outcome.full[:2], by_hand(mlp, unscaled_loop("not fused"))[:2], strict=True
    ):
        assert_logged(record, hand)


# --- dtypes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_models_of_other_dtypes_are_logged_and_left_alone(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    loop = training(lambda model: model(batch().to(dtype)).float().square().mean())
    check(lambda: mlp().to(dtype), loop, tmp_path)


FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def mixed_dtypes() -> nn.Module:
    """Parameters of five dtypes in one optimizer, complex ones among them."""

    def forward(m: Any, x: Tensor) -> Tensor:
        outputs = [layer(x.to(layer.weight.dtype)) for layer in m.layers]
        return sum(out.abs().double().square().mean() for out in outputs)

    return Applied(forward, layers=nn.ModuleList(nn.Linear(4, 4, dtype=dtype) for dtype in FLOATS))


def test_parameters_of_several_dtypes_in_one_optimizer_are_logged(tmp_path: Path) -> None:
    outcome, _ = check(mixed_dtypes, training(lambda m: m(batch())), tmp_path)
    assert len(outcome.full[0].update_ratios) == 10


def casting(change: Callable[[Tensor], Tensor]) -> nn.Module:
    """A model with a module that returns another tensor than the trained ones."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.linear(x)
        m.cast(y.detach())
        return y

    return Applied(forward, linear=nn.Linear(4, 2), cast=Applied(lambda _, y: change(y)))


DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
    "float8_e4m3fn", "float8_e5m2", "complex64", "complex128",
]  # fmt: skip


@pytest.mark.parametrize("name", DTYPES)
def test_outputs_of_every_dtype_are_logged_and_left_alone(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    make = partial(casting, lambda x: (x * 3).abs().to(dtype))
    check(make, training(), tmp_path)


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_outputs_that_cannot_be_measured_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = partial(casting, lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8))
    outcome = assert_left_alone(make, training(), tmp_path)
    assert list(outcome.full[0].activations) == ["linear"]
    assert caplog.text.count("outputs of cast are not measured: Tensor of torch.qint8") == 1


def unsupported(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the text after the logger's name in the only lines that it may have written."""
    assert [r.exc_info for r in caplog.records if r.exc_info] == []
    messages = [r.getMessage() for r in caplog.records if r.name == "telemetry"]
    return [m.partition(" are not measured: ")[2] for m in messages]


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:.*prototype")
def test_nested_tensors_are_reported_once_for_each_layout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, layout: torch.layout
) -> None:
    if layout is torch.jagged and torch.__version__.startswith("2.4"):
        pytest.skip("PyTorch 2.4 cannot train on jagged tensors")

    def loss(model: nn.Module) -> Tensor:
        rows = [torch.randn(length, 4) for length in (2, 3, 5)]
        y = model(torch.nested.nested_tensor(rows, layout=layout))
        return torch.nested.to_padded_tensor(y, 0.0).square().mean()

    make = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))  # noqa: E731
    outcome = assert_left_alone(make, training(loss), tmp_path)
    [reason] = unsupported(caplog)
    assert reason == f"nested tensor of torch.float32 ({layout}, cpu) is not supported"
    assert [list(record.activations) for record in outcome.full] == [[]] * 3
    assert list(outcome.full[-1].grads) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert set(outcome.full[-1].update_ratios) == set(outcome.full[-1].grads)


class Int8(Tensor):
    """Quantized weights as torchao makes them: a subclass that stands for its product."""

    @staticmethod
    def __new__(cls, values: Tensor, scale: Tensor) -> Int8:
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)

    def __init__(self, values: Tensor, scale: Tensor) -> None:
        self.values_, self.scale = values, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values_, args[0].scale)
        args, kwargs = tree_map_only(cls, lambda t: t.values_ * t.scale, (args, kwargs or {}))
        return func(*args, **kwargs)


def test_quantized_weights_are_reported_once_for_each_class(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Plain integers, as other libraries for fine-tuning hold them, are measured."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
        for layer in (model[0], model[2]):
            scale = layer.weight.detach().abs().max() / 127
            values = (layer.weight.detach() / scale).round().to(torch.int8)
            layer.weight = nn.Parameter(Int8(values, scale), requires_grad=False)
        model.register_parameter("frozen", nn.Parameter(values, requires_grad=False))
        return model

    outcome = assert_left_alone(make, training(), tmp_path)
    assert unsupported(caplog) == ["Int8 of torch.float32 (torch.strided, cpu) is not supported"]
    record = outcome.full[0]
    assert {*record.weights} == {"frozen", "0.bias", "2.bias", "3.weight", "3.bias"}
    assert_tensor(record.weights["frozen"], [array(outcome.model.frozen)])
    assert len(record.activations) == 4


# --- values that are not numbers ------------------------------------------------------------------


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nonfinite_values_are_logged_as_they_are(tmp_path: Path, value: float) -> None:
    loop = training(lambda m: loss_of(m, batch().index_fill(0, torch.tensor(0), value)))
    outcome, _ = check(lambda: nn.Sequential(nn.Linear(4, 2)), loop, tmp_path)
    assert not outcome.full[0].grad_finite.all()


# --- gradients that are special or missing --------------------------------------------------------


def test_sparse_gradients(tmp_path: Path) -> None:
    """Indices come more than once: gradients are not coalesced."""
    loop = training(lambda m: m((batch() * 10).long().abs() % 50).mean())
    make = lambda: nn.Sequential(nn.Embedding(50, 4, sparse=True))  # noqa: E731
    outcome, _ = check(make, loop, tmp_path)
    assert outcome.full[0].grads["0.weight"].sketch.count == 200
    assert outcome.full[0].update_ratios["0.weight"] > 0


def test_empty_batches(tmp_path: Path) -> None:
    outcome, _ = check(mlp, training(lambda model: model(torch.zeros(0, 4)).sum()), tmp_path)
    assert outcome.full[0].total_grad_norm == 0


def partly_trained() -> nn.Module:
    """A frozen layer, an unused one, an empty parameter, and one that gets zeros."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.trained(m.frozen(x)) + 0 * m.muted
        return y.square().mean() + m.empty.sum()

    frozen = nn.Linear(4, 4).requires_grad_(False)
    model = Applied(forward, frozen=frozen, trained=nn.Linear(4, 4), unused=nn.Linear(4, 4))
    model.empty, model.muted = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(4))
    return model


def test_frozen_unused_empty_and_zero_gradients(tmp_path: Path) -> None:
    outcome = assert_left_alone(partly_trained, training(lambda m: m(batch())), tmp_path)
    record = outcome.full[0]
    names = np.array([parameter.name for parameter in record.layout.parameters])
    with_grads = {*names[record.grad_present]}
    assert with_grads == {"trained.weight", "trained.bias", "empty", "muted"}
    assert record.grads["muted"].sketch.zero_count == 4
    assert record.grads["empty"].sketch.count == 0
    assert record.activations["frozen"].sketch.count == 24
    assert "frozen" not in record.activation_grads
    assert "unused.weight" in record.weights
    assert record.update_ratios["muted"] == 0


def test_buffers_with_a_nan_are_named(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = mlp()
        model.register_buffer("state", torch.tensor([1.0, torch.nan]))
        model.register_buffer("count", torch.tensor(3))
        return model

    outcome = assert_left_alone(make, training(), tmp_path)
    assert outcome.full[0].nan_buffers == ("state",)
