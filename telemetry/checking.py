"""Check of a model before training: one forward and backward pass, judged like a step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from rich.text import Text
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from telemetry.alert import Alert, located
from telemetry.alerts import shared
from telemetry.alerts.detector import Detector
from telemetry.alerts.engine import Engine
from telemetry.alerts.exploding import ExplodingGradient
from telemetry.alerts.inactive_units import DeadUnits, SaturatedUnits
from telemetry.alerts.mistakes import (
    ONE_SHAPE,
    BatchLeak,
    CheckKind,
    EvalMode,
    InputIgnored,
    InputScale,
    LossAtStart,
    WrongLossInput,
    unusual_inputs,
)
from telemetry.alerts.no_learning import UntrainedParameters
from telemetry.alerts.nonfinite import Nonfinite
from telemetry.alerts.vanishing_gradient import VanishingGradient
from telemetry.layers import table
from telemetry.plain_text import called, figure, html_table, printable, type_of
from telemetry.records import StepRecord
from telemetry.records.moments import norm_of
from telemetry.records.tensor import figures_of
from telemetry.selection import check_model
from telemetry.tables import Column, new_console, number, print_table
from telemetry.testing import capture_run

__all__ = ["CheckResult", "check"]


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Result of :func:`check`.

    Attributes:
        findings: Alerts of step 0, causes first. :mod:`telemetry.alerts.mistakes` has the kinds
            that no rule reports.
        skipped: Checks that were not possible, and the reason; a sentence each.
        loss: Loss of the batch.
        record: All measurements.
    """

    findings: tuple[Alert, ...]
    skipped: tuple[str, ...]
    loss: float
    record: StepRecord = field(repr=False)

    @property
    def exit_code(self) -> int:
        """1 if there are warnings or errors, else 0; for ``sys.exit``."""
        return int(any(found.severity != "note" for found in self.findings))

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        rows: dict[str, str] = {"loss": figure(self.loss, 4)}
        rows |= {f"{alert.severity}: {alert.title}": alert.message for alert in self.findings}
        return html_table("check", {**rows, "skipped": "\n".join(self.skipped) or "none"})

    def print(self) -> None:
        """Print a table of the layers and the findings to stdout."""
        console, layers = new_console(), table(self.record)
        rows = np.flatnonzero(layers.known.any(axis=1)).tolist()
        modules = [self.record.layout.modules[row] for row in rows]
        columns = [Column("class", [Text(printable(module.type_name)) for module in modules], 0)]
        for title, name in _SHOWN.items():
            values = [number(layers.value(row, name)) for row in rows]
            columns.append(Column(title, values, 1, is_number=True))
        print_table(console, "layer", [called(module.name) for module in modules], columns)
        console.print(f"\nloss {figure(self.loss, 4)}")
        sizes, trainable = self.record.layout.sizes, self.record.trainable
        count, total = int(sizes[trainable].sum()), int(sizes.sum())
        console.print(f"{count:,} of {total:,} parameters are trainable ({count / total:.0%})")
        for found in self.findings:
            console.print(f"{found.severity}: {found.kind.replace('_', ' ')}{found.where}")
            console.print(f"  {found.message}".replace("\n", "\n  "))
        for reason in self.skipped:
            console.print(f"skipped: {reason}")
        if not self.findings:
            console.print("nothing found")


_SHOWN = {
    "output RMS": "activation_rms",
    "gradient RMS": "activation_grad_rms",
    "weight RMS": "weight_rms",
    "dead": "dead_units",
    "saturated": "saturation",
}


def check(
    model: nn.Module,
    inputs: Any,
    loss_function: Callable[..., Any] | None = None,
    *,
    targets: Any = None,
    show: bool = True,
) -> CheckResult:
    """Check a model before training.

    ::

        telemetry.check(model, images, nn.CrossEntropyLoss(), targets=classes)
        telemetry.check(gpt, {"input_ids": tokens, "labels": tokens})

    The default rules judge one forward and backward pass: growth of activations and gradients over
    depth, dead and saturated units, NaN and infinity and their origin, parameters without a
    gradient, new batch norms in evaluation mode. It also checks

    - that the inputs are about standardized: not pixels up to 255, nor divided twice;
    - that the outputs depend on the inputs;
    - that no sample's output depends on another sample: in evaluation mode, by gradients, from the
      first floating-point tensor with one row per sample;
    - that outputs and targets do not broadcast to more elements: ``[64, 1]`` and ``[64]``;
    - that the cross entropy does not get probabilities;
    - that the cross entropy is at most six times ln C, the loss of a guess among C classes.

    Parameters, buffers, gradients, training flags, hooks, inputs, and the random states of torch,
    NumPy and Python are restored bit for bit, also if the model raises. Call it before a
    :class:`HookLogger` watches the model, which would count it as a step.

    Args:
        model: In the mode in which it will be trained.
        inputs: Inputs of the model: a tensor, a tuple of arguments, or a mapping of keyword
            arguments. 16 samples or more distinguish dead units from rarely active ones.
        loss_function: Function of the model's output, and of ``targets`` if given, that returns a
            scalar or one loss per sample. None: the model returns its loss, as a scalar or as
            ``loss`` of its output.
        targets: Targets of the loss function.
        show: Whether to print the result.

    Raises:
        TypeError: The model is no module, or the inputs or the loss function are another argument.
        ValueError: No loss was found, it does not depend on any parameter, or all are frozen, or
            the model has lazy modules that were not called.
    """
    check_model(model, "check")
    if any(map(is_lazy, model.parameters())):
        raise ValueError(
            "check(model=...): a lazy module has no parameters yet; call the model once before"
        )
    if isinstance(inputs, nn.Module):
        raise TypeError(f"check(inputs=...): must be a batch, not {type_of(inputs)}")
    if loss_function is not None and not callable(loss_function):
        raise TypeError(
            f"check(loss_function=...): must be a function of the output, not "
            f"{type_of(loss_function)}; targets are given by name: check(..., targets=classes)"
        )
    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs
    with _unchanged(model):
        output: list[Any] = []

        def run() -> Tensor:
            output[:] = [_call(model, inputs)]
            return _loss_of(output[0], loss_function, targets)

        record, loss = _measured(model, run)
        judged: list[Alert | str | None] = [*_of_training(record)]
        # Parameters without a gradient.
        judged += UntrainedParameters(steps=1, evaluations=1)(record)
        judged.append(_of_inputs(record))
        judged.append(_of_shapes(output[0], loss_function, targets))
        judged.append(_of_loss(output[0], loss_function, targets, inputs, loss))
        for parameter in model.parameters():
            parameter.grad = None
        judged.append(_of_samples(model, inputs, record))
    findings = [located(f, record.layout) for f in judged if isinstance(f, Alert)]
    skipped = tuple([why for why in judged if isinstance(why, str)])
    result = CheckResult(findings=tuple(findings), skipped=skipped, loss=loss, record=record)
    if show:
        result.print()
    return result


def _call(model: nn.Module, inputs: Any) -> Any:
    """Return the model's output for copies of the inputs: it may change them in place."""
    inputs = pytree.tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the model and the generators of random numbers after the body."""
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().clone() for tensor in tensors]
    modules = [*model.modules()]
    eager = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    registered = [(own, dict(own)) for m in eager for own in (m._parameters, m._buffers)]
    attributes = [(vars(module), dict(vars(module))) for module in modules]
    training = [module.training for module in modules]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - the user's, perhaps
    for parameter, _ in gradients:
        parameter.grad = None
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=[device.index or 0 for device in devices]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                # An expanded tensor cannot be written. A graph that is kept may refer to a buffer.
                if tensor.layout != torch.strided or 0 not in tensor.stride():
                    tensor.data.copy_(value)
        for now, before in (*attributes, *registered):  # what a forward pass has put there
            for name in now.keys() - before.keys():
                del now[name]
            now.update(before)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, is_training in zip(modules, training, strict=True):
            module.training = is_training


def _loss_of(output: Any, loss_function: Callable[..., Any] | None, targets: Any) -> Tensor:
    if loss_function is not None:
        loss = loss_function(output) if targets is None else loss_function(output, targets)
    elif isinstance(output, Mapping):
        loss = output.get("loss")
    else:
        loss = getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or (loss_function is None and loss.numel() != 1):
        if loss_function is not None:
            raise ValueError(f"check(loss_function=...): must return a tensor, not {type_of(loss)}")
        shape = f" of shape {[*output.shape]}" if isinstance(output, Tensor) else ""
        raise ValueError(
            f"check(): the model returns {type_of(output)}{shape} and no loss; pass the loss "
            "function and targets: check(model, inputs, nn.CrossEntropyLoss(), targets=classes)"
        )
    if not loss.requires_grad:
        raise ValueError(
            "check(): the loss does not depend on any parameter; look for detach(), no_grad() and "
            "item() between them"
        )
    return loss.mean()


class _NoOptimizer(Optimizer):
    """Optimizer whose steps change nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def _measured(model: nn.Module, run: Callable[[], Tensor]) -> tuple[StepRecord, float]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise ValueError("check(): the model has no parameter that requires a gradient")
    optimizer = _NoOptimizer(trainable, {})
    with capture_run(model, optimizer=optimizer, rules=()) as captured:
        loss = run()
        captured.log(loss=loss)
        loss.backward(inputs=trainable)  # a loss may have parameters, as a discriminator has
        optimizer.step()
    return captured.records[0], loss.item()


def _of_training(record: StepRecord) -> Iterator[Alert]:
    """Yield the alerts of rules that judge the same step twice, since some need confirmation.

    Dead units need half as many samples, since the second time adds none.
    """
    detectors: list[Detector] = [
        SaturatedUnits(evaluations=1), ExplodingGradient(),
        DeadUnits(batches=1, samples=DeadUnits.samples / 2),
        VanishingGradient(factor=_FAINT, steps=2), Nonfinite(),
        EvalMode(steps=1),
    ]  # fmt: skip
    engine = Engine(detectors)
    sizes = figures_of(record.weights, norm_of)
    norms = dict(zip((p.name for p in record.layout.parameters), record.grad_norms, strict=True))
    ratios = {name: norms[name] / size for name, size in sizes.items() if size > 0}
    for step in (0, 1):
        for alert in engine(replace(record, step=step, update_ratios=ratios)):
            if alert.stage == "started":
                yield replace(alert, step=0)


# Adam moves layers with small gradients, unless they are far below its epsilon: 1e-8, compared with
# gradients of 1e-4 or more.
_FAINT = 1e4


def _of_inputs(record: StepRecord) -> Alert | None:
    """Return an alert if the inputs of the model are far from standardized."""
    summary, size = unusual_inputs(record)
    return InputScale.alert(summary, size, threshold=InputScale.largest) if summary else None


def _of_loss(
    output: Any, loss_function: Any, targets: Any, inputs: Any, loss: float
) -> Alert | str | None:
    """Return an alert if a cross entropy gets probabilities or is far too high, or a reason."""
    axis = 1
    if loss_function is None and isinstance(output, Mapping | tuple) and hasattr(output, "logits"):
        logits, of = output.logits, inputs.get("labels") if isinstance(inputs, Mapping) else None
        axis, classes = -1, logits.shape[-1]
    elif isinstance(loss_function, nn.CrossEntropyLoss) or (
        loss_function is functional.cross_entropy
    ):
        logits, of = output, targets
        classes = logits.shape[1] if logits.dim() > 1 else 0
    else:
        return "loss compared with ln C: it is not known to be a cross entropy"
    if not isinstance(of, Tensor) or of.is_floating_point() or classes < 2:
        return "loss compared with ln C: the targets are no classes"
    if bool((logits >= 0).all() and (logits.sum(axis) - 1).abs().max() < _ROUNDED):
        summary = "The outputs are probabilities, and the cross entropy takes their softmax again"
        return _SoftmaxTwice.alert(summary, 1.0)
    if getattr(loss_function, "reduction", "mean") == "sum":
        loss /= of.numel()
    guess = math.log(classes)
    limit = LossAtStart.factor * guess
    if not loss > limit:
        return None
    summary = (
        f"The loss is {figure(loss, 4)}, and {figure(guess)} (ln {classes}) for a random guess"
    )
    return LossAtStart.alert(summary, loss, threshold=limit)


_ROUNDED = 0.01  # of a sum of numbers in half precision


def _of_shapes(output: Any, loss_function: Any, targets: Any) -> Alert | None:
    """Return an alert if outputs and targets broadcast to more elements than either has.

    A note if the loss function is not known to compare them element by element.
    """
    if not (isinstance(output, Tensor) and isinstance(targets, Tensor)):
        return None
    try:
        shape = torch.broadcast_shapes(output.shape, targets.shape)
    except RuntimeError:
        return None
    if math.prod(shape) <= max(output.numel(), targets.numel()):
        return None
    given, of = [*output.shape], [*targets.shape]
    alert = _Broadcast.alert(f"Outputs {given} and targets {of} broadcast to {[*shape]}", 1.0)
    is_known = isinstance(loss_function, _ELEMENTWISE) or loss_function in _FUNCTIONS
    return alert if is_known else replace(alert, severity="note")


_ELEMENTWISE = nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss
_FUNCTIONS = [getattr(functional, f"{name}_loss") for name in ("mse", "l1", "smooth_l1", "huber")]


class _Broadcast(CheckKind):
    """Reported like the rule :class:`~telemetry.alerts.mistakes.WrongLossInput`."""

    kind = WrongLossInput.kind
    threshold = 1.0
    advice = ONE_SHAPE


class _SoftmaxTwice(CheckKind):
    """Reported like the rule :class:`~telemetry.alerts.mistakes.WrongLossInput`."""

    kind = WrongLossInput.kind
    threshold = 1.0
    advice = ("Return logits: CrossEntropyLoss has its own softmax",)


def _of_samples(model: nn.Module, inputs: Any, record: StepRecord) -> Alert | str | None:
    """Return an alert if a sample's output depends on other samples, or a reason."""
    sizes = [t.shape[0] for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor) and t.dim()]
    samples = sizes[0] if sizes else 0
    if samples < 2 or any(size != samples for size in sizes):
        return "samples: the inputs are no batch of two or more"
    given: list[Tensor] = []

    def take(tensor: Any) -> Any:
        fits = isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dim() > 1
        if given or not fits or tensor.shape[0] != samples:
            return tensor
        given.append(tensor.detach().clone().requires_grad_())
        return given[0].clone()  # which the next layer may change in place

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return output if given else pytree.tree_map(take, output)

    model.eval()
    with ExitStack() as stack:
        # cuDNN's recurrent layers have no backward pass in evaluation mode.
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        inputs = pytree.tree_map(take, inputs)
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
                stack.callback(module.register_forward_hook(hook).remove)
        with torch.enable_grad():
            outputs = pytree.tree_leaves(_call(model, inputs))
    tensors = (t for t in outputs if isinstance(t, Tensor) and t.is_floating_point() and t.dim())
    output = next((t for t in tensors if t.shape[0] == samples), None)
    if not given or output is None:
        return "samples: no floating-point input and output with one row per sample was found"
    if not output.requires_grad:
        return "samples: in evaluation mode the outputs have no gradient"
    flat = output.float().flatten(1) if output.dim() > 1 else output[:, None]
    # Different weights, so that outputs that add up to a constant (softmax) do not cancel out.
    weights = torch.linspace(0.5, 1.5, flat.shape[1], device=flat.device)
    rows = [0, samples - 1]
    depends = torch.stack([_influence(flat[row] @ weights, given[0]) for row in rows])
    if not depends.isfinite().all():
        return "samples: gradients in evaluation mode are not finite"
    own = depends[range(2), rows]
    depends[range(2), rows] = 0
    leaks = depends > 0
    if not bool((own > 0).any() | leaks.any()):
        matrices = (w for name, w in record.weights.items() if name in record.layout.matrices)
        if any(weight.sketch.min == weight.sketch.max == 0 for weight in matrices):
            return "dependence on the inputs: a weight matrix starts at zero"
        # Under no_grad(), or behind a function without a gradient, they may depend on them.
        if (flat - flat[0]).abs().max() > shared.EXACT * flat.abs().max():
            return "samples: no gradient of the outputs reaches the inputs"
        return InputIgnored.alert("The outputs do not depend on the inputs", 0.0)
    if not leaks.any():
        return None
    row, other = leaks.nonzero()[0].tolist()
    summary = f"The output of sample {rows[row]} depends on sample {other} of the batch"
    largest = float(depends.max() / max(float(own.max()), 1e-30))
    found = BatchLeak.alert(summary, largest)
    has_square = any(map(_is_square, (*pytree.tree_leaves(inputs), output)))
    if has_square or _is_sequence_first(output, given[0]):
        return replace(found, severity="note", advice=(_INTENDED, *found.advice))
    return found


_INTENDED = "Ignore it if the first axis is time, or if the model relates samples to each other"


def _is_square(value: Any) -> bool:
    """Whether it may be a relation between samples: a graph, or similarities."""
    return isinstance(value, Tensor) and value.dim() == 2 and value.shape[0] == value.shape[1]


def _is_sequence_first(output: Tensor, given: Tensor) -> bool:
    """Whether the second axis may be that of samples: its elements are independent."""
    if min(output.dim(), given.dim()) < 3 or not 1 < output.shape[1] == given.shape[1]:
        return False
    output, ends = output.float().flatten(2), (0, output.shape[1] - 1)
    weights = torch.linspace(0.5, 1.5, output.shape[2], device=output.device)
    first, last = (_influence((output[:, end] @ weights).sum(), given, axis=1) for end in ends)
    return bool(first[ends[1]] == 0 and last[ends[0]] == 0)


def _influence(output: Tensor, given: Tensor, axis: int = 0) -> Tensor:
    """Return the largest gradient with respect to each sample along the axis, ``[samples]``."""
    (gradient,) = torch.autograd.grad(output, given, retain_graph=True, allow_unused=True)
    if gradient is None:
        return torch.zeros(given.shape[axis])
    return gradient.abs().transpose(0, axis).flatten(1).amax(1).float().cpu()
