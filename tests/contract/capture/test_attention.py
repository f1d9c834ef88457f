"""Attention of ``scaled_dot_product_attention``: figures of each head, and training left alone."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import BaseTorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import telemetry
from telemetry import HookLogger
from telemetry.testing import capture_run
from tests.helpers.applied import Applied
from tests.helpers.loops import finish
from tests.helpers.require import needs_observable_graphs, require
from tests.helpers.twins import assert_left_alone, descend, loss_of, one_step, run, training

BATCH, LENGTH, WIDTH, HEADS = 3, 12, 16, 4


class Attention(nn.Module):
    """Keeps the queries and keys of its latest call."""

    def __init__(self, heads: int = HEADS, kv_heads: int = HEADS, **options: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.options = heads, kv_heads, options
        size = WIDTH // heads
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * kv_heads * size)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.seen: tuple[Tensor, Tensor]

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
        k, v = self.kv(x).unflatten(-1, (2 * self.kv_heads, -1)).transpose(-3, -2).chunk(2, -3)
        self.seen = q.detach(), k.detach()
        options = {name: o(length) if callable(o) else o for name, o in self.options.items()}
        mixed = functional.scaled_dot_product_attention(q, k, v, **options)
        return self.out(mixed.transpose(-3, -2).flatten(-2))


class Net(nn.Module):
    def __init__(self, attention: Callable[[], nn.Module] = Attention, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.attn = attention(**options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.embed(x))


def batch(length: int = LENGTH) -> Tensor:
    return 2 * torch.randn(BATCH, length, WIDTH)


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def one_row(length: int) -> Tensor:
    return torch.arange(length)[None] < 5


def banded(length: int) -> Tensor:
    """Mask of each sample and head."""
    torch_rows = torch.arange(length)[:, None] - torch.arange(length)
    widths = 1 + torch.arange(BATCH * HEADS).view(BATCH, HEADS, 1, 1)
    return (torch_rows >= 0) & (torch_rows < widths)


def sloped(length: int) -> Tensor:
    """Float mask of each head, as ALiBi adds it; masked keys have ``finfo.min``."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    slopes = 0.5 ** torch.arange(1.0, HEADS + 1)
    bias = -slopes[:, None, None] * distance
    return bias.masked_fill(distance < 0, torch.finfo(torch.float32).min)


def expected(
    q: Tensor, k: Tensor, *, scale: float | None = None, mask: Tensor | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return largest logits and entropies by loops over heads, queries and keys, in float64."""
    heads, length, width = q.shape
    bool_mask = mask is not None and mask.dtype == torch.bool
    largest, entropies = np.full(heads, -np.inf), np.full(heads, np.nan)
    step = math.ceil(length / 64)
    rows = [i for i in range(length) if (length - 1 - i) % step == 0]
    for head in range(heads):
        own = None if mask is None else mask.expand(heads, length, len(k[0]))[head].numpy()
        keys = k[head * len(k) // heads].double().numpy()
        shares = []
        for row in rows:
            logits = keys @ q[head, row].double().numpy()
            logits = logits * (1 / math.sqrt(width) if scale is None else scale)
            if own is not None:
                logits = logits if bool_mask else logits + own[row].astype(np.float64)
                logits = logits[own[row] if bool_mask else own[row] > -1e30]
            if not len(logits):
                continue
            largest[head] = max(largest[head], logits.max())
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            if len(logits) > 1:
                shares.append(-(weights * np.log(weights)).sum() / math.log(len(logits)))
        if shares:
            entropies[head] = np.mean(shares)
    return largest, entropies


def assert_heads(heads: Any, wanted: tuple[Any, Any], rtol: float = 2e-5) -> None:
    np.testing.assert_allclose(heads.logit_max, wanted[0], rtol=rtol, atol=1e-6)
    np.testing.assert_allclose(heads.entropy, wanted[1], rtol=rtol, atol=1e-6)


def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Any]:
    optimizer = partial(torch.optim.AdamW, lr=0.01)
    for loss in training(lambda m: m(batch()).float().square().mean(), 4, optimizer)(model, logger):
        yield loss
        yield from (p.grad for p in model.parameters())


# --- figures --------------------------------------------------------------------------------------

# Options of queries in groups; PyTorch before 2.5 has none.
HAS_GROUPS = "enable_gqa" in (functional.scaled_dot_product_attention.__doc__ or "")
GROUPED: dict[str, Any] = {"kv_heads": 2, "enable_gqa": True} if HAS_GROUPS else {}

CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all keys": ({}, {}),
    "causal": ({"is_causal": True}, {"mask": causal}),
    "bool mask": ({"attn_mask": banded}, {"mask": lambda length: banded(length)[0]}),
    "float mask": ({"attn_mask": sloped}, {"mask": sloped}),
    "mask of one row": ({"attn_mask": one_row}, {"mask": one_row}),
    "scale": ({"scale": 3.0}, {"scale": 3.0}),
}
if GROUPED:
    CALLS["grouped queries"] = ({**GROUPED, "is_causal": True}, {"mask": causal})


@pytest.mark.parametrize("length", [LENGTH, 130])
@pytest.mark.parametrize("name", CALLS)
def test_figures_are_those_of_explicit_logits(name: str, length: int) -> None:
    options, oracle = CALLS[name]
    model = Net(**options)
    record = one_step(model, batch(length))
    q, k = model.attn.seen
    oracle = {key: o(length) if callable(o) else o for key, o in oracle.items()}
    assert_heads(record.attention["attn"], expected(q[0], k[0], **oracle))


def single(keys: Tensor | None = None) -> nn.Module:
    """Attention without an axis for heads, or with one, to the inputs or to fixed keys."""

    def forward(m: Any, x: Tensor) -> Tensor:
        k = x if keys is None else keys
        m.seen = (q := m.q(x)).detach(), k
        return functional.scaled_dot_product_attention(q, k, k)

    return Applied(forward, q=nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("axes", [2, 3])
def test_tensors_with_fewer_axes_have_one_head(axes: int) -> None:
    model, x = single(), batch()
    record = one_step(model, x if axes == 3 else x[0])
    q, k = (o if axes == 3 else o[None] for o in model.seen)
    assert_heads(record.attention[""], expected(q[:1], k[:1]))


def test_heads_of_many_keys_are_measured_in_turn() -> None:
    """A head's logits alone are more numbers than one intermediate tensor may have."""
    model = single(torch.randn(1, HEADS, 70_000, WIDTH))
    record = one_step(model, torch.randn(1, HEADS, LENGTH, WIDTH))
    q, k = model.seen
    assert_heads(record.attention[""], expected(q[0], k[0]), rtol=1e-4)


def test_nan_is_not_hidden_and_rows_with_one_key_do_not_count() -> None:
    model = Net(attn_mask=lambda length: torch.eye(length, dtype=torch.bool))
    record = one_step(model, batch())
    assert np.isnan(record.attention["attn"].entropy).all()
    x = batch()
    x[0, 3, 2] = math.nan
    record = one_step(Net(), x)
    assert np.isnan(record.attention["attn"].logit_max).any()


def self_attention(mask: Tensor | None) -> nn.Module:
    return Applied(
        lambda m, x: m.self_attn(x, x, x, attn_mask=mask, need_weights=False)[0],
        self_attn=nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
    )


@pytest.mark.parametrize("kind", ["attention", "masked attention", "encoder layers"])
def test_calls_inside_of_multihead_attention_are_measured(kind: str) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
    allowed = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    layers: list[nn.Module] = [layer, copy.deepcopy(layer)]
    if kind != "encoder layers":
        allowed = causal(LENGTH) if kind == "masked attention" else allowed
        layers = [self_attention(~allowed if kind == "masked attention" else None)]
    model, x = nn.Sequential(*layers), batch()
    before, [sample, *_] = copy.deepcopy(layers[0].self_attn), x
    record = one_step(model, x)
    assert [*record.attention] == [f"{place}.self_attn" for place in range(len(layers))]
    weight, bias = before.in_proj_weight.detach(), before.in_proj_bias.detach()
    q, k, _ = (sample @ weight.T + bias).chunk(3, -1)
    q, k = (o.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(0, 1) for o in (q, k))
    assert_heads(record.attention["0.self_attn"], expected(q, k, mask=allowed))


@pytest.mark.parametrize("heads", [(HEADS, HEADS, HEADS), (2, HEADS)])
def test_several_calls_are_merged(heads: tuple[int, ...]) -> None:
    """Heads that a call does not have are those of the others."""
    model = Net()
    largest, entropies = np.full((2, len(heads), HEADS), np.nan)

    def note(attention: Attention, args: Any) -> None:
        attention.heads = attention.kv_heads = heads[note.calls]

    def compare(attention: Attention, args: Any, output: Tensor) -> None:
        (q, k), count = attention.seen, heads[note.calls]
        largest[note.calls, :count], entropies[note.calls, :count] = expected(q[0], k[0])
        note.calls += 1

    note.calls = 0
    model.attn.register_forward_pre_hook(note)
    model.attn.register_forward_hook(compare)
    record = one_step(model, *(batch() for _ in heads))
    merged = np.nanmax(largest, axis=0), np.nanmean(entropies, axis=0)
    assert_heads(record.attention["attn"], merged)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_measures_the_first_call(reentrant: bool) -> None:
    calls = []

    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            y = x + checkpoint(self.attn, x, use_reentrant=reentrant)
            self.first = self.attn.seen
            return self.attn.out(y)

    model = Model()
    model.attn.q.register_forward_pre_hook(lambda *args: calls.append(1))
    record = one_step(model, batch())
    assert len(calls) == 2
    q, k = model.first
    assert_heads(record.attention["attn"], expected(q[0], k[0]))


def test_under_autocast_the_logits_are_those_of_the_given_tensors() -> None:
    model = Net(is_causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        record = one_step(model, batch())
    q, k = model.attn.seen
    assert q.dtype == torch.bfloat16
    assert_heads(record.attention["attn"], expected(q[0], k[0], mask=causal(LENGTH)))


@pytest.mark.parametrize("has_attention", [True, False])
def test_a_written_run_has_the_statistics_of_attention_where_there_is_some(
    tmp_path: Path, has_attention: bool
) -> None:
    watched = run(Net if has_attention else lambda: nn.Linear(WIDTH, WIDTH), loop, tmp_path)
    layers = telemetry.read(tmp_path).layers
    heads = [record.attention["attn"] for record in watched.full if has_attention]
    wanted = {
        "attention_logit_max": [one.logit_max.max() for one in heads],
        "attention_entropy": [np.nanmean(one.entropy) for one in heads],
    }
    for name, values in wanted.items():
        found = layers[layers["statistic"] == name]
        assert found["module_name"].tolist() == ["attn"] * (4 if has_attention else 0)
        np.testing.assert_allclose(found["value"], values, rtol=1e-6)
    if heads:  # the units of attention are its heads
        units = telemetry.read(tmp_path).units("attn")
        low_and_high = np.stack([heads[-1].logit_max] * 2, axis=1)
        np.testing.assert_allclose(units.extremes[-1], low_and_high, rtol=2**-7)


# --- when -----------------------------------------------------------------------------------------


def test_only_full_steps_of_training_are_measured() -> None:
    def loss(model: nn.Module) -> Tensor:
        with torch.no_grad():
            model(batch())
        return loss_of(model, batch())

    with capture_run(model := Net(), every_n_steps=2) as run:
        finish(training(loss, 4)(model, None))
    assert ["attn" in record.attention for record in run.records] == [True, False, True, False]


@pytest.mark.parametrize("selected", ["attn", "attn.out", "embed"])
def test_attention_outside_of_the_selection_is_not_measured(selected: str) -> None:
    record = one_step(Net(), batch(), modules=selected)
    assert [*record.attention] == (["attn"] if selected == "attn" else [])


@pytest.mark.parametrize(("name", "seen"), [("SelfAttention", True), ("Mixer", False)])
def test_models_without_attention_are_soon_left_alone(name: str, seen: bool) -> None:
    modes: list[int] = []

    class AttendsLate(Net):
        def forward(self, x: Tensor) -> Tensor:
            modes.append(len(_get_current_function_mode_stack()))
            return super().forward(x) if len(modes) > 15 else self.embed(x)

    model = AttendsLate(type(name, (Attention,), {}))
    with capture_run(model, every_n_steps=1) as run:
        finish(training(lambda m: loss_of(m, batch()), 20)(model, None))
    assert modes == [1] * 20 if seen else [1] * 10 + [0] * 10
    assert ("attn" in run.records[-1].attention) is seen


class Fails(Net):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error: type[BaseException] | None = error

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        assert len(_get_current_function_mode_stack()) == 1
        if self.error is not None:
            raise self.error("planted")
        return y


def test_a_forward_that_raises_leaves_no_mode() -> None:
    model = Fails(RuntimeError)
    with capture_run(model) as run:
        with pytest.raises(RuntimeError, match="planted"):
            model(batch())
        assert _get_current_function_mode_stack() == []
        model.error = None
        descend(model, batch())
        assert _get_current_function_mode_stack() == []
    assert "attn" in run.records[0].attention
    assert not torch.nn.modules.module._global_forward_hooks_always_called


def test_a_mode_that_is_still_active_at_the_end_is_left() -> None:
    model = Fails(KeyboardInterrupt)
    with capture_run(model):
        with pytest.raises(KeyboardInterrupt):
            model(batch())
        assert len(_get_current_function_mode_stack()) == 1
    assert _get_current_function_mode_stack() == []


def test_modes_of_the_user_are_kept() -> None:
    outer, inner = BaseTorchFunctionMode(), BaseTorchFunctionMode()

    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            inner.__enter__()  # type: ignore[no-untyped-call]
            return y

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture_run(model) as run:
        with outer:
            y = model(batch())
            assert _get_current_function_mode_stack() == [outer, inner]
            inner.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        y.square().mean().backward()
        optimizer.step()
    assert "attn" in run.records[0].attention


# --- training is left alone -----------------------------------------------------------------------


class Deep(nn.Module):
    """Attention of each kind, dropout, and checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Net(is_causal=True, dropout_p=0.1)
        self.second = Net(**GROUPED)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.second, self.first(x), use_reentrant=False)
        return self.encoder(x)


def autocast_loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Any]:
    with torch.autocast("cpu", torch.bfloat16):
        yield from loop(model, logger)


def ddp() -> nn.Module:
    return DistributedDataParallel(Deep())


def sharded() -> nn.Module:
    model = Deep()
    for part in (model.first, model.second, model.encoder, model):
        require("torch.distributed.fsdp.fully_shard")(
            part, mesh=dist.device_mesh.init_device_mesh("cpu", (1,))
        )
    return model


@pytest.mark.parametrize("make", [Deep, ddp, sharded])
@pytest.mark.parametrize("each", [loop, autocast_loop])
@pytest.mark.usefixtures("process_group")
def test_training_is_left_alone(
    tmp_path: Path, make: Callable[[], nn.Module], each: Callable[..., Iterator[Any]]
) -> None:
    watched = assert_left_alone(make, each, tmp_path)
    names = {"first.attn", "second.attn", "encoder.self_attn"}
    assert [set(record.attention) for record in watched.full] == [names] * 4


def test_frozen_modules_in_evaluation_mode_keep_their_fused_path(tmp_path: Path) -> None:
    class Frozen(Net):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, batch_first=True)
            self.encoder = layer.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            self.encoder.eval()  # also where it is entered in training mode
            return super().forward(self.encoder(x))

    watched = assert_left_alone(Frozen, loop, tmp_path)
    assert not any(record.attention for record in watched.full)


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["module", pytest.param("function", marks=needs_observable_graphs)]
)
def test_compiled_code_is_left_alone_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            if what == "module":
                self.embed.compile(backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(doubled(x) if what == "function" else x)

    @torch.compile(backend="eager")
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    torch._dynamo.reset()
    with caplog.at_level(logging.INFO):
        watched = assert_left_alone(Model, loop, tmp_path)
    assert not any(record.attention for record in watched.full[1:])
    assert len([m for m in caplog.messages if "entropy of attention" in m]) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_flex_attention_is_left_alone_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class FlexAttention(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q = x.detach().unflatten(-1, (HEADS, -1)).transpose(1, 2)  # its backward needs a GPU
            mixed: Any = flex(q, q, q)
            return self.out(mixed.transpose(1, 2).flatten(-2))

    flex_attention = require("torch.nn.attention.flex_attention.flex_attention")
    flex = torch.compile(flex_attention, backend="eager")
    torch._dynamo.reset()
    with caplog.at_level(logging.INFO):
        watched = assert_left_alone(lambda: Net(FlexAttention), loop, tmp_path)
    assert not any(record.attention for record in watched.full)
    assert len([m for m in caplog.messages if "entropy of attention" in m]) == 1


def test_warnings_of_pytorch_are_attributed_to_the_users_code() -> None:
    # dropout2d of 2-D, and no ``dim``
    warns = Applied(lambda m, x: functional.softmax(functional.dropout2d(x)))
    model = nn.Sequential(nn.Linear(4, 4), warns)

    def places() -> list[tuple[str, int]]:
        with pytest.warns(UserWarning, match="dropout2d|dimension") as found:
            model(torch.ones(2, 4))
        return [(warning.filename, warning.lineno) for warning in found]

    bare = places()
    with capture_run(model):
        assert places() == bare
    assert Path(__file__) in [Path(name) for name, _ in bare]  # of PyTorch 2.4, one of the two
