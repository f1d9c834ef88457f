"""Outputs of modules: every kind is measured and none is changed."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import telemetry
from telemetry import HookLogger, Output
from telemetry.testing import capture_run
from tests.helpers.applied import Applied
from tests.helpers.hand import assert_logged, assert_tensor, by_hand, check, not_training
from tests.helpers.loops import finish
from tests.helpers.twins import assert_left_alone, batch, loss_of, run, training

plain = training(steps=2)


# --- changed after the module returned ------------------------------------------------------------


def written_to(module: nn.Module, x: Tensor) -> Tensor:
    x += 1.0
    x[:, 0] = x[:, 0] * 2
    return x.mul_(3.0)


def clamped(module: nn.Module, x: Tensor) -> Tensor:
    """A change that PyTorch does not notice."""
    x.data.clamp_(-0.1, 0.1)
    return x


def views() -> nn.Module:
    """Outputs that are views of other outputs, and views that are written to."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.identity(m.unflatten(m.flatten(m.first(x))))
        half = x[:, :3]
        half.mul_(2.0)
        return m.last(half)

    return Applied(
        forward, first=nn.Linear(4, 6), flatten=nn.Flatten(0), unflatten=nn.Unflatten(0, (6, 6)),
        identity=nn.Identity(), last=nn.Linear(3, 2),
    )  # fmt: skip


CHANGED: dict[str, Callable[[], nn.Module]] = {
    "by an activation": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), mlp()),
    "by a module": lambda: nn.Sequential(nn.Linear(4, 4), Applied(written_to), nn.Linear(4, 2)),
    "unnoticed": lambda: nn.Sequential(nn.Linear(4, 4), Applied(clamped), nn.Linear(4, 2)),
    "through views": views,
}


@pytest.mark.parametrize("name", CHANGED)
def test_outputs_that_change_are_logged_as_they_were_returned(tmp_path: Path, name: str) -> None:
    check(CHANGED[name], plain, tmp_path)


# --- inputs of the model --------------------------------------------------------------------------


def takes_many() -> nn.Module:
    """Two inputs, one of them in a dict, and labels, which are no floating-point numbers."""

    def forward(m: Any, features: dict[str, Tensor], *, extra: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(m.layer(features["x"] + extra), labels)

    return Applied(forward, layer=nn.Linear(4, 4))


def test_inputs_of_all_micro_batches_are_logged(tmp_path: Path) -> None:
    batches = torch.randn(2, 2, 6, 4)

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, extra in batches:
            loss = model({"x": x}, extra=extra, labels=torch.arange(6) % 4)
            loss.backward()
        optimizer.step()
        yield loss

    [record] = assert_left_alone(takes_many, loop, tmp_path).records
    given, summed = record.inputs[""], record.inputs["layer"]
    assert_tensor(given, list(batches.flatten(0, 1).double().numpy()))
    assert_tensor(summed, list(batches.sum(1).double().numpy()))


@pytest.mark.parametrize("called", [True, False])
def test_inputs_are_those_of_the_model_or_of_its_first_layer_if_it_is_not_called(
    tmp_path: Path, called: bool
) -> None:
    """They are measured once, though the model passes them to its layer."""
    loop = training(lambda model: loss_of(model if called else model[0]), 1)
    [record] = assert_left_alone(lambda: nn.Sequential(nn.Linear(4, 2)), loop, tmp_path).records
    assert {name: one.sketch.count for name, one in record.inputs.items()} == {
        "" if called else "0": 24
    }


# --- what a module returns ------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    hidden: Tensor
    extra: Any = None


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """Output of transformers: a mapping whose values are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


Pair = namedtuple("Pair", ["first", "second"])


def packing(pack: Callable[[Tensor, Tensor], Any]) -> nn.Module:
    """A leaf module that packs two tensors by ``pack``."""
    inner = Applied(lambda m, x: pack((x @ m.weight).tanh(), (x @ m.weight).sigmoid()))
    inner.weight = nn.Parameter(torch.randn(4, 3))
    return nn.ModuleDict({"inner": inner})


PACKS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], list[Tensor]]]] = {
    "tuple": (lambda a, b: (a, b), list),
    "list": (lambda a, b: [a, None, b], lambda out: [out[0], out[2]]),
    "dict": (lambda a, b: {"a": a, "b": b, "name": "x"}, lambda out: [out["a"], out["b"]]),
    "nested": (lambda a, b: ({"a": [a]}, (b, 3)), lambda out: [out[0]["a"][0], out[1][0]]),
    "namedtuple": (Pair, list),
    "dataclass": (lambda a, b: Result(a, extra={"b": b}), lambda o: [o.hidden, o.extra["b"]]),
    "model output": (lambda a, b: ModelOutput(a=a, b=b), lambda out: [out.a, out.b]),
}


@pytest.mark.parametrize("name", PACKS)
def test_tensors_inside_any_container_are_logged(tmp_path: Path, name: str) -> None:
    pack, flatten = PACKS[name]
    loop = training(lambda m: sum(t.square().mean() for t in flatten(m["inner"](batch()))), 2)
    outcome, _ = check(lambda: packing(pack), loop, tmp_path, flatten=flatten)
    record = outcome.full[0]
    assert list(record.outputs) == [Output("inner"), Output("inner", 1)]
    assert set(record.output_grads) == {Output("inner"), Output("inner", 1)}
    assert list(record.activations) == ["inner"]
    assert record.activations["inner"].sketch.sum == record.outputs[Output("inner")].sketch.sum


def storing() -> nn.Module:
    """A model that stores its result and accepts keyword arguments only."""

    def forward(m: Any, *, x: Tensor) -> None:
        m.result = m.linear(input=x)
        m.sink(input=x)

    return Applied(forward, linear=nn.Linear(4, 2), sink=Applied(lambda m, input: None))


def test_a_call_by_keyword_and_an_output_of_none_are_left_alone(tmp_path: Path) -> None:
    def step(model: Any) -> Tensor:
        assert model(x=batch()) is None
        return model.result.square().mean()

    check(storing, training(step, 2), tmp_path)


def table() -> nn.Module:
    """A module that returns its parameter, with names that wrappers give to what they wrap."""
    model = Applied(
        lambda m, x: m._orig_mod(m.module(x)) * m.values(m.table),
        module=nn.Linear(4, 4), _orig_mod=nn.Linear(4, 4), values=nn.Identity(),
    )  # fmt: skip
    model.table = nn.Parameter(torch.ones(4))
    return model


def test_a_parameter_that_a_module_returns_is_logged_and_gets_no_hook(tmp_path: Path) -> None:
    outcome, _ = check(table, plain, tmp_path)
    assert list(outcome.full[0].activations) == ["module", "_orig_mod", "values"]
    assert not any(p._backward_hooks for p in outcome.model.parameters())


# --- called several times -------------------------------------------------------------------------


def shared() -> nn.Module:
    """One layer under two names, called four times, and weights that are tied."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.embed(x)
        for _ in range(2):
            x = m.again(m.layer(x).tanh()).tanh()
        return m.head(x)

    embed, layer, head = (nn.Linear(4, 4, bias=bias) for bias in (False, True, False))
    head.weight = embed.weight
    return Applied(forward, embed=embed, layer=layer, again=layer, head=head)


def test_calls_of_a_shared_module_are_merged_and_counted(tmp_path: Path) -> None:
    outcome, _ = check(shared, plain, tmp_path)
    record = outcome.full[0]
    assert record.activations["layer"].calls == 4
    assert record.activation_grads["layer"].calls == 4
    assert "again" not in record.activations
    names = [parameter.name for parameter in record.layout.parameters]
    assert names == ["embed.weight", "layer.weight", "layer.bias"]


def test_outputs_of_an_rnn_are_logged_separately(tmp_path: Path) -> None:
    loop = training(lambda model: loss_of(lambda x: model["rnn"](x[..., None])[0]), 2)
    make = lambda: nn.ModuleDict({"rnn": nn.LSTM(1, 3, batch_first=True)})  # noqa: E731
    outcome, _ = check(make, loop, tmp_path)
    assert list(outcome.full[0].outputs) == [Output("rnn", place) for place in range(3)]


def gated(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights, experts = x.softmax(-1).topk(2)
    return experts, weights, x > 0


def indexing() -> nn.Module:
    """Modules that return indices, counts and masks in addition to their outputs."""

    def forward(m: Any, x: Tensor) -> Tensor:
        pooled, _ = m.pool(m.conv(x[:, None]))
        packed = pack_padded_sequence(pooled.transpose(1, 2), [99, 50, 7], batch_first=True)
        return m.gate(m.rnn(packed)[0].data)[1]

    pool, rnn = nn.MaxPool1d(2, return_indices=True), nn.LSTM(4, 3, batch_first=True)
    return Applied(forward, conv=nn.Conv1d(1, 4, 3), pool=pool, rnn=rnn, gate=Applied(gated))


def test_indices_counts_and_masks_do_not_count_in_statistics_of_a_layer(tmp_path: Path) -> None:
    loop = training(lambda model: model(torch.randn(3, 200)).square().sum(), 1)
    outcome, [step] = check(indexing, loop, tmp_path)
    assert [*step.activations] == ["conv", "pool", "rnn", "rnn[2]", "rnn[3]", "gate[1]"]
    returned: dict[str, list[np.ndarray]] = {}
    for output, [values] in step.activations.items():
        returned.setdefault(output.partition("[")[0], []).append(values)
    layers = telemetry.read(tmp_path).layers
    rms = layers[layers["statistic"] == "activation_rms"].set_index("module_name")["value"]
    assert set(rms.index) == {"model input", *returned}
    for name, parts in returned.items():
        values = np.concatenate([part.ravel() for part in parts])
        assert rms[name] == pytest.approx(np.sqrt((values**2).mean()), rel=1e-5), name
        largest = pytest.approx(parts[0].max(), rel=1e-6)
        assert outcome.full[0].activations[name].sketch.max == largest


# --- changing models ------------------------------------------------------------------------------


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "added": lambda model: model.insert(2, nn.Linear(6, 6)),
    "removed": lambda model: model.__delitem__(slice(2, 4)),
    "replaced": lambda model: model.__setitem__(4, nn.Linear(6, 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["before", "after forward", "after backward"])
@pytest.mark.parametrize("every_n_steps", [2, 3])  # step 2 is measured, or is not
def test_figures_belong_to_the_model_that_ran_the_step_even_if_layers_change(
    change: str, when: str, every_n_steps: int
) -> None:
    layers = nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with capture_run(model, every_n_steps=every_n_steps) as captured:
        for step in range(5):
            optimizer.zero_grad()
            for moment in ("before", "after forward", "after backward"):
                if step == 2 and moment == when:
                    CHANGES[change](model)
                    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
                if moment == "before":
                    widths = {n: getattr(m, "out_features", 0) for n, m in model.named_children()}
                    loss = model(torch.randn(3, 4)).square().sum()
                elif moment == "after forward":
                    loss.backward()
                    before = float(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            used = math.hypot(*(p.grad.norm() for p in model.parameters() if p.grad is not None))
            optimizer.step()
            record = captured.records[-1]
            assert record.step == step
            assert record.total_grad_norm == pytest.approx(used, rel=1e-4)
            if record.full:
                counts = {o.module_name: one.sketch.count for o, one in record.outputs.items()}
                assert counts.keys() == widths.keys()
                assert all(counts[name] == 3 * width for name, width in widths.items() if width)
                clipped = record.total_grad_norm_before_clipping
                if (step, when) != (2, "before") and step == 2:
                    assert clipped is None  # of removed parameters
                else:
                    assert clipped == pytest.approx(before, rel=1e-4)


def test_frozen_weights_that_no_optimizer_holds_and_no_replaced_module_are_measured() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    old = model[1]
    with capture_run(model, every_n_steps=2) as captured:
        model[1] = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(3, 4)).sum().backward()
            old(torch.randn(3, 4)).sum().backward()
            optimizer.step()
    assert [len(record.weights) for record in captured.records] == [4, 0]
    assert captured.records[0].activations["1"].calls == 1
    frozen = captured.records[0].weights["0.weight"].sketch
    assert frozen.sum_squares == pytest.approx(model[0].weight.square().sum().item(), rel=1e-5)


def test_changed_layers_are_logged_and_written_with_their_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "telemetry")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with HookLogger(model, tmp_path, every_n_steps=2):
        finish(plain(model, None))
        model.insert(1, nn.Linear(4, 4))
        finish(plain(model, None))
    message = "changed before step 2; added: ['2.weight', '2.bias']; reshaped: ['1.weight'"
    assert message in caplog.text
    [events] = tmp_path.glob("*tfevents*")
    assert message.encode() in events.read_bytes()
    layers = telemetry.read(tmp_path).layers
    norms = layers[layers.statistic == "grad_norm"]
    for name, steps in (("0", [0, 1, 2, 3]), ("2", [2, 3])):
        assert norms[norms.module_name == name].step.tolist() == steps


def bypassed() -> nn.Module:
    """Modules of real models: without parameters, used for these only, or called by others."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = nn.functional.linear(m.used(x), m.lends.weight)
        return m.attention(x, x, x)[0]

    return Applied(
        forward, used=nn.Linear(4, 4), lends=nn.Linear(4, 4), unused=nn.Linear(4, 4),
        attention=nn.MultiheadAttention(4, 1), dropout=nn.Dropout(0.1), branch=nn.Sequential(),
    )  # fmt: skip


@pytest.mark.slow
def test_only_modules_with_parameters_are_named_once_if_they_did_not_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(1, 2))  # something else
    caplog.set_level(logging.INFO, "telemetry")
    outcome = assert_left_alone(bypassed, plain, tmp_path)
    assert set(outcome.full[0].activations) == {"used", "attention"}
    [record] = [r for r in caplog.records if "did not run" in r.getMessage()]
    assert record.levelno == logging.INFO
    assert "2 of 6 watched modules did not run at step 0" in record.getMessage()
    assert record.getMessage().endswith(": lends, unused")


def hiding() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.inner.layers:
            x = layer(x)
        with torch.no_grad():
            wanted = m.teacher[0](x)
        return m.heads["first"](m.known(x)) - wanted

    model: Any = Applied(forward, known=nn.Linear(4, 4), inner=nn.Module())
    model.inner.layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    model.heads = {"first": nn.Linear(4, 4), "unused": nn.Linear(4, 4)}
    model.teacher = [nn.Linear(4, 4)]
    model.again = [model.known, 3, None]
    return model


def test_layers_in_plain_lists_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert_left_alone(hiding, plain, tmp_path)
    [record] = [r for r in caplog.records if "ModuleList" in r.getMessage()]
    assert record.levelno == logging.WARNING
    assert (
        "modules in heads, inner.layers get gradients and are not registered" in record.getMessage()
    )


# --- interrupted and parallel passes --------------------------------------------------------------


def test_the_pass_after_an_exception_in_forward_is_logged(tmp_path: Path) -> None:
    def step(model: Any) -> Tensor:
        with pytest.raises(RuntimeError):
            nn.Sequential(model[0], model[0], model[2], model[2])(batch())  # of other shapes
        return loss_of(model)

    outcome, _ = check(mlp, training(step, 2), tmp_path)
    calls = {name: tensor.calls for name, tensor in outcome.full[0].activations.items()}
    assert calls == {"0": 3, "1": 1, "2": 2}  # those before the failed one were calls, too


def test_an_exception_in_backward_drops_the_measurements_of_the_pass(tmp_path: Path) -> None:
    def fail(grad: Tensor) -> None:
        raise ArithmeticError("planted")

    def step(model: Any) -> Tensor:
        between = model[0](batch()).clone()
        between.register_hook(fail)
        with pytest.raises(ArithmeticError):
            model[2](between).sum().backward()
        model.zero_grad()
        return loss_of(model)

    outcome = assert_left_alone(mlp, training(step, 2), tmp_path)
    assert outcome.full[0].activations["2"].calls == 2
    assert outcome.full[0].activation_grads["2"].calls == 1


def test_forwards_on_other_threads_are_not_logged(tmp_path: Path) -> None:
    def step(model: nn.Module) -> Tensor:
        def elsewhere() -> None:
            with not_training():
                model(torch.full((6, 4), 100.0))

        loss = loss_of(model)
        in_thread(elsewhere)
        return loss

    check(mlp, training(step, 2), tmp_path)


def in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_training_on_a_separate_thread_is_logged(tmp_path: Path) -> None:
    def loop(model: nn.Module, logger: HookLogger | None) -> list[Tensor]:
        losses: list[Tensor] = []
        in_thread(lambda: losses.extend(plain(model, logger)))
        return losses

    outcome = assert_left_alone(mlp, loop, tmp_path)
    assert [len(record.activations) for record in outcome.full] == [3, 3]


def test_passes_of_a_second_thread_are_not_logged_once_a_thread_has_stepped(tmp_path: Path) -> None:
    steps = itertools.count()

    def step(model: nn.Module) -> Tensor:
        if next(steps):
            in_thread(lambda: model(torch.full((6, 4), 100.0)))
        return loss_of(model)

    outcome = run(mlp, training(step, 2), tmp_path)
    expected = by_hand(mlp, plain)
    for record, hand in zip(outcome.full, expected, strict=True):
        assert_logged(record, hand)


def test_passes_on_other_threads_than_the_optimizer_are_logged_once_no_others_are_seen(
    tmp_path: Path,
) -> None:
    def step(model: nn.Module) -> Tensor:
        losses: list[Tensor] = []
        in_thread(lambda: losses.append(loss_of(model)))
        return losses[0]

    outcome = run(mlp, training(step, 5), tmp_path)
    assert [len(record.activations) for record in outcome.full] == [3, 0, 3, 3, 3]


# --- the user's own hooks -------------------------------------------------------------------------


def test_no_message_is_logged_for_an_ordinary_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "telemetry"):
        assert_left_alone(mlp, plain, tmp_path)
    # But the directory of the run, and the number of full steps.
    expected = ("writing to ", "full steps: ")
    assert [line for line in caplog.messages if not line.startswith(expected)] == []


def test_a_model_that_trains_in_evaluation_mode_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Models from a hub come in evaluation mode."""
    loop = training(lambda model: loss_of(model.eval()))
    outcome = assert_left_alone(mlp, loop, tmp_path)
    [message] = [record.getMessage() for record in caplog.records]
    assert "no watched module was seen running at step 0" in message
    assert "not in training mode" in message
    assert all(record.grad_present.all() for record in outcome.full)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_scripted_submodule_has_no_activations_and_one_message_names_the_compiler(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> nn.Module:
        return nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2))

    outcome = assert_left_alone(make, plain, tmp_path)
    assert list(outcome.full[0].activations) == ["1", "2"]
    assert outcome.full[0].grad_present.all()
    [message] = [record.getMessage() for record in caplog.records]
    assert "torch.jit has compiled" in message
