"""Reading what flows through modules."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from twins import Recorder, assert_left_alone

from telemetry import HookLogger
from telemetry.interventions import capture, clip_gradients, prune_activations


class Net(nn.Module):
    """Convolutions with an in-place activation after the first and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 2, 3)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(2, 3, 3)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(3 * 4 * 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.relu(self.conv1(x)))
        x += 1
        return self.fc(self.drop(x).flatten(1))


def by_hand(model: Net, x: Tensor) -> dict[str, Tensor]:
    """Values and gradients of the intermediate results, taken without hooks."""
    first = model.conv1(x)
    first.retain_grad()
    second = model.conv2(first.relu())
    second.retain_grad()
    (model.drop(second + 1).flatten(1) @ model.fc.weight.T + model.fc.bias).sum().backward()
    return {"conv1": first, "conv2": second}


def test_values_and_gradients_are_those_of_the_network() -> None:
    model, x = Net(), torch.randn(4, 1, 8, 8)
    torch.manual_seed(1)
    expected = by_hand(model, x)
    torch.manual_seed(1)
    with capture(model, "conv*") as captured:
        model(x).sum().backward()
    assert list(captured) == ["conv1", "conv2"]
    for name, value in expected.items():
        [output], [grad] = captured[name].outputs, captured[name].grad_outputs
        assert torch.equal(output, value), "not what in-place operations made of it"
        assert torch.equal(grad, value.grad)
        assert not output.requires_grad
    assert torch.equal(captured["conv1"].inputs[0], x)
    assert torch.equal(captured["conv2"].inputs[0], expected["conv1"].relu())


def test_an_input_is_that_from_before_the_module_changed_it() -> None:
    model = nn.ReLU(inplace=True)
    with capture(model) as captured:
        model(torch.tensor([-1.0, 2.0]))
    assert list(captured) == [""]
    assert captured[""].inputs[0].tolist() == [-1.0, 2.0]
    assert captured[""].outputs[0].tolist() == [0.0, 2.0]


def train(model: nn.Module, logger: HookLogger | None = None) -> Iterator[Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        loss = F.cross_entropy(model(torch.rand(4, 1, 8, 8)), torch.randint(0, 2, (4,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


def test_capturing_changes_nothing_bit_for_bit(tmp_path: Path) -> None:
    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        if logger is None:
            yield from train(model)
            return
        with capture(model, nn.Module) as captured:
            yield from train(model)
        assert captured["fc"].grad_outputs[0] is not None

    assert_left_alone(Net, loop, tmp_path)


@dataclass
class Answer:
    logits: Tensor
    hidden: dict[str, Tensor]


class Structured(nn.Module):
    def forward(self, x: Tensor, *, scale: Tensor, words: str = "") -> Answer:
        return Answer(logits=x * scale, hidden={"square": x * x, "index": x.argmax()})


def test_structures_and_keyword_arguments_are_looked_into() -> None:
    model = Structured()
    x = torch.randn(3, requires_grad=True)
    with capture(model) as captured:
        answer = model(x, scale=torch.tensor(2.0), words="words")
        (answer.logits.sum() + 3 * answer.logits.sum()).backward()
    call = captured[""]
    assert [t.tolist() for t in call.inputs] == [x.tolist(), 2.0]
    assert [t.tolist() for t in call.outputs] == [
        answer.logits.tolist(),
        answer.hidden["square"].tolist(),
        answer.hidden["index"].tolist(),
    ]
    assert call.grad_outputs[0].tolist() == [4.0] * 3
    assert call.grad_outputs[1:] == (None, None)


def test_the_latest_calls_of_a_shared_module_are_kept() -> None:
    model = nn.Linear(2, 2)
    x = torch.randn(1, 2)
    with capture(model, calls=2) as captured:
        values = [x]
        for _ in range(3):
            values.append(model(values[-1]))
            values[-1].retain_grad()
        values[-1].sum().backward()
    calls = captured.calls("")
    assert captured[""] is calls[-1]
    assert len(calls) == 2
    for call, given, returned in zip(calls, values[1:-1], values[2:], strict=True):
        assert torch.equal(call.inputs[0], given)
        assert torch.equal(call.outputs[0], returned)
        assert torch.equal(call.grad_outputs[0], returned.grad)


def test_gradients_of_several_backward_passes_add_up() -> None:
    model = nn.Linear(2, 2)
    with capture(model) as captured:
        y = model(torch.randn(1, 2))
        y.sum().backward(retain_graph=True)
        (2 * y).sum().backward()
    assert captured[""].grad_outputs[0].tolist() == [[3.0, 3.0]]


def test_without_gradients_only_values_are_captured() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    for mode in (torch.no_grad, torch.inference_mode):
        with capture(model) as captured, mode():
            y = model(torch.randn(1, 2))
        assert torch.equal(captured["0"].outputs[0], y)
        assert not captured["0"].outputs[0].is_inference()
        assert captured["0"].grad_outputs == (None,)


def test_a_parameter_that_is_handed_through_has_no_gradient() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.ones(2))

        def forward(self) -> Tensor:
            return self.rows

    model = Table()
    with capture(model) as captured:
        model().sum().backward()
    assert captured[""].grad_outputs == (None,)
    assert not model.rows._backward_hooks


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_each_call_its_gradient(use_reentrant: bool) -> None:
    layer, drop = nn.Linear(2, 2), nn.Dropout(0.5)
    x = torch.randn(3, 2, requires_grad=True)

    def twice(v: Tensor) -> Tensor:
        return layer(drop(layer(v)))

    def run(*, checkpointed: bool) -> list[tuple[Tensor, Tensor | None]]:
        torch.manual_seed(2)
        model = nn.ModuleDict({"layer": layer})
        with capture(model, "layer", calls=9) as captured:
            y = x
            for _ in range(2):
                y = checkpoint(twice, y, use_reentrant=use_reentrant) if checkpointed else twice(y)
            y.square().sum().backward()
        calls = captured.calls("layer")
        return [(call.outputs[0], call.grad_outputs[0]) for call in calls]

    plain, checkpointed = run(checkpointed=False), run(checkpointed=True)
    assert len(plain) == len(checkpointed) == 4
    for expected, got in zip(plain, checkpointed, strict=True):
        assert torch.equal(expected[0], got[0])
        assert torch.equal(expected[1], got[1])


def test_equal_calls_under_checkpointing_are_told_apart() -> None:
    model = nn.Linear(1, 1)
    x = torch.ones(1, 1, requires_grad=True)
    with capture(model, calls=2) as captured:
        first, second = (checkpoint(model, x, use_reentrant=True) for _ in range(2))
        (first + 10 * second).sum().backward()
    assert [call.grad_outputs[0].item() for call in captured.calls("")] == [1.0, 10.0]


def test_a_captured_gradient_does_not_change_with_the_parameter_that_it_became_that_of() -> None:
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.by

    model = Shift()
    with capture(model) as captured:
        (model(torch.ones(2)) * torch.tensor([1.0, 2.0])).sum().backward()
        model.by.grad += 5
    assert captured[""].grad_outputs[0].tolist() == [1.0, 2.0]


def test_a_failed_call_is_not_kept_nor_are_its_inputs() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor, depth: int) -> Tensor:
            if depth == 0:
                raise ArithmeticError
            if depth < 0:
                return x + 1
            try:
                return self(x + 1, depth - 1)
            except ArithmeticError:
                return x

    model = Fails()
    with capture(model, lambda name, module: True, calls=9) as captured:
        with pytest.raises(ArithmeticError):
            model(torch.zeros(1), 0)
        model(torch.zeros(1), 2)
        model(torch.ones(1), -1)
    assert [[c.inputs[0].item(), c.outputs[0].item()] for c in captured.calls("")] == [
        [1.0, 1.0],
        [0.0, 1.0],
        [1.0, 2.0],
    ]


def test_threads_do_not_mix_up_their_inputs() -> None:
    model, turn = nn.Sequential(nn.Identity()), threading.Barrier(2, timeout=20)

    def meet(module: nn.Module, args: object) -> None:
        turn.wait()

    with capture(model, calls=2) as captured:
        model[0].register_forward_pre_hook(meet)
        threads = [threading.Thread(target=model, args=[torch.full((1,), k)]) for k in (1.0, 2.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    calls = captured.calls("0")
    assert {c.inputs[0].item() for c in calls} == {1.0, 2.0}
    assert all(torch.equal(c.inputs[0], c.outputs[0]) for c in calls)


# --- with others ---------------------------------------------------------------------------------


def test_it_sees_what_other_interventions_and_the_logger_see(tmp_path: Path) -> None:
    model, recorder = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 1)), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with (
        HookLogger(model, tmp_path, every_n_steps=1, alerts=[recorder]),
        capture(model) as captured,
        prune_activations(model, "1", threshold=0.5),
        clip_gradients(model, max_norm=1e-3),
    ):
        model(torch.randn(8, 3)).sum().backward()
        optimizer.step()
    [record] = recorder.records
    zeros = (captured["1"].outputs[0] == 0).double().mean().item()
    assert zeros > 0.1
    assert record.activations["1"].sketch.zero_fraction == pytest.approx(zeros)
    assert torch.equal(captured["2"].inputs[0], captured["1"].outputs[0])
    grad = captured["1"].grad_outputs[0].double().norm().item()
    assert record.activation_grads["1"].sketch.norm == pytest.approx(grad, rel=1e-5)
    assert record.grad_norms.max() == pytest.approx(1e-3)


# The compiler looks at it of every tensor that crosses a break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled_before", [False, True])
def test_a_compiled_model_can_be_looked_into(compiled_before: bool) -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(4, 3)
    if compiled_before:
        compiled(x)
    plain = model(x)
    for _ in range(2):
        with capture(compiled) as captured:
            y = compiled(x)
            y.sum().backward()
        assert list(captured) == ["0", "1", "2"]
        assert torch.equal(y, plain)
        assert torch.equal(captured["2"].outputs[0], y)
        assert torch.equal(captured["1"].outputs[0], model[:2](x))
        assert torch.equal(captured["1"].grad_outputs[0], model[2].weight.expand(4, 3))
        assert torch.equal(compiled(x), plain)


def test_a_full_graph_cannot_be_captured() -> None:
    torch.compiler.reset()
    says_why = "reason" in inspect.signature(torch.compiler.disable).parameters
    message = "compile without fullgraph=True" if says_why else "_Hook.__call__"
    model = torch.compile(nn.Linear(3, 3), backend="aot_eager", fullgraph=True)
    with capture(model), pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        model(torch.ones(1, 3))
    assert model(torch.ones(1, 3)).shape == (1, 3)


def test_transforms_are_passed_over() -> None:
    model = nn.Linear(2, 2)
    with capture(model) as captured:
        torch.func.vmap(model)(torch.ones(3, 2))
    assert not captured


# --- life cycle ----------------------------------------------------------------------------------


def hooks_on(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_removing_takes_off_every_hook_also_those_in_the_graph() -> None:
    model = Net()

    def fail(y: Tensor) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), capture(model) as captured:
        fail(y := model(torch.randn(4, 1, 8, 8)))
    assert hooks_on(model) == 0
    y.sum().backward()
    captured.remove()
    assert len(captured) == 5
    assert all(call.grad_outputs == (None,) for call in captured.values())


def test_dropping_the_result_takes_off_the_hooks() -> None:
    model = Net()
    capture(model)
    gc.collect()
    assert hooks_on(model) == 0


def test_neither_the_model_nor_its_graph_is_kept_alive() -> None:
    model = Net()
    captured = capture(model)
    x = torch.randn(4, 1, 8, 8, requires_grad=True)
    gone = weakref.ref(model), weakref.ref(x)
    model(x)
    del model, x
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert len(captured) == 5


def test_a_call_that_is_no_longer_kept_has_no_hooks() -> None:
    model = nn.Linear(1, 1)
    with capture(model) as captured:
        first = model(torch.ones(1, 1))
        earlier = captured[""]
        model(torch.ones(1, 1))
        first.sum().backward()
    assert earlier.grad_outputs == (None,)
    assert not first._backward_hooks


def test_copies_of_the_model_are_not_captured(tmp_path: Path) -> None:
    model = Net()
    with capture(model) as captured:
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
            other(torch.randn(4, 1, 8, 8)).sum().backward()
    assert len(captured) == 0


def test_faults_of_ours_do_not_reach_the_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(value: object) -> Iterator[Tensor]:
        raise RuntimeError("planted")

    monkeypatch.setattr("telemetry.interventions.capturing.tensors_in", broken)
    model = nn.Linear(1, 1)
    with capture(model) as captured:
        for _ in range(2):
            model(torch.ones(1, 1)).sum().backward()
    assert not captured
    assert caplog.text.count("telemetry failed to capture the inputs of the model") == 1
    assert caplog.text.count("telemetry failed to capture the outputs of the model") == 1


def test_what_is_not_there_is_named() -> None:
    model = Net()
    with capture(model, "conv*") as captured:
        with pytest.raises(KeyError, match="'conv1' has not run since"):
            captured["conv1"]
        with pytest.raises(KeyError, match="'fc' is not captured; choose from conv1, conv2"):
            captured["fc"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"calls": 0}, ValueError, r"capture\(calls=0\): must be at least 1"),
        ({"calls": 1.5}, TypeError, r"capture\(calls=1.5\): must be an int"),
        ({"select": "konv*"}, ValueError, r'capture\(select="konv\*"\): .* closest names are conv'),
        ({"select": 3}, TypeError, r"capture\(select=3\)"),
    ],
)
def test_bad_arguments_are_named(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    model = Net()
    with pytest.raises(error, match=message):
        capture(model, **options)
    assert hooks_on(model) == 0
