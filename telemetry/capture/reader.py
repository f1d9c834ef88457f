"""Reads gradients, parameters and buffers around the optimizer's steps."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from numbers import Real

import torch
from torch import Tensor
from torch.optim import Optimizer

from telemetry import images
from telemetry.capture.hooks import CONVOLUTIONS
from telemetry.capture.norms import UpdateProbe, take_norms
from telemetry.capture.parameters import described, local
from telemetry.capture.scaler import read_scaler
from telemetry.capture.watch import Watch
from telemetry.capture.window import Kind, OptimizerReading, Tally, Window
from telemetry.selection import cleaned
from telemetry.torch_private import calling_scaler
from telemetry.torch_private.host_copy import HostCopy

Indexed = Sequence[tuple[int, Tensor]]
"""Parameters or gradients, each with its index among the model's parameters."""

_BY_HAND = 0
"""Stands for the optimizer in a loop that has none."""


class StepReader:
    """Fills windows with what the optimizers are given and what they do to the parameters.

    Its methods are to be called where nothing of the caller's is disturbed.

    Attributes:
        by_hand: Whether the loop has no optimizer.
    """

    def __init__(self, watch: Watch) -> None:
        self.by_hand = False
        self._watch = watch
        self._table = watch.table
        self._content = watch.content
        self._probes: dict[int, UpdateProbe] = {}
        # Those that have stepped, in the order of their first steps.
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, None] = weakref.WeakKeyDictionary()

    def begin(self, window: Window) -> None:
        """Read the random states, and what no optimizer will say when it is about to change."""
        self._table.refresh()
        window.random_states = _random_states()
        if self.by_hand and self._content.weights:
            self._probes[_BY_HAND] = UpdateProbe(self._counting(self._table.all()))

    def end_pass(self, window: Window, tally: Tally, parameters: Iterable[Tensor]) -> None:
        """A backward pass is over: gradients are reduced over ranks and not clipped yet."""
        window.end_pass(tally, take_norms(self._table.grads_of(parameters)))

    def before_step(self, window: Window, optimizer: Optimizer) -> None:
        """Read what an optimizer is about to use and to change, at its first step in a window."""
        if id(optimizer) in window.optimizers:
            return
        # Parameters may have been replaced. Those of a step are known by their indices.
        look = not window.optimizers and (window.full or self._table.lacks(optimizer))
        if look and self._table.refresh():
            window.before_clipping.clear()
        window.parameters = window.parameters or self._table.parameters
        scaler = calling_scaler()
        if scaler is not None:
            window.scaler = read_scaler(scaler, optimizer, window.step)
        self._read_learning_rates(window, optimizer)
        parameters = self._table.of(optimizer)
        self._read(
            window,
            id(optimizer),
            parameters,
            # A fused optimizer divides by this itself.
            scaled=getattr(optimizer, "grad_scale", None) is not None,
        )
        if window.full and self._content.weights:
            self._probes[id(optimizer)] = UpdateProbe(self._counting(parameters))

    def reads_alone(self, optimizer: Optimizer) -> bool:
        """Whether no other optimizer has stepped so far."""
        return list(self._optimizers) == [optimizer]

    def after_step(self, window: Window, optimizer: Optimizer) -> None:
        """Read what an optimizer's first step in a window has changed."""
        if self._read_update(window, id(optimizer)):
            # Not by its brackets: the optimizer's state is a defaultdict.
            states = [(i, optimizer.state.get(p, {})) for i, p in self._table.of(optimizer)]
            moments = [(i, s["exp_avg_sq"]) for i, s in states if "exp_avg_sq" in s]
            self._observe(window, "second_moments", self._counting(moments))

    def step_by_hand(self, window: Window) -> None:
        """Read everything after a step that no optimizer took."""
        if window.full and self._table.refresh():
            window.before_clipping.clear()
        window.parameters = self._table.parameters
        self._read(window, _BY_HAND, self._table.all(), scaled=False)
        self._read_update(window, _BY_HAND)

    def forget(self) -> None:
        """Keep no parameter beyond the end of a step."""
        self._probes.clear()

    def _read(
        self,
        window: Window,
        optimizer: int,
        parameters: Indexed,
        *,
        scaled: bool,
    ) -> None:
        """Norms of all gradients; on full steps the gradients and parameters themselves."""
        full = window.full
        grads = [(i, grad) for i, p in parameters if (grad := p.grad) is not None]
        norms = take_norms(grads)
        window.optimizers[optimizer] = OptimizerReading(
            norms=[group.sent() for group in norms], scaled=scaled
        )
        weights = [(i, p) for i, p in parameters if p.requires_grad]
        if full and not window.held:  # with the first optimizer: none may hold them
            weights += [(i, p) for i, p in self._table.all() if not p.requires_grad]
        if self._watch.ranks is not None:
            self._watch.ranks.note_grads(window.ranks, grads)
            if full and self._content.weights:
                self._watch.ranks.note_parameters(window.ranks, weights)
        window.square += sum(group.known_square or 0.0 for group in norms)
        # After the step all is NaN; only now does a broken parameter differ from a bad batch.
        look = full or not math.isfinite(window.square)
        if look and not (full and self._content.weights):
            window.parameter_norms += [group.sent() for group in take_norms(parameters)]
        if look:
            self._read_buffers(window)
        if not full:
            return
        window.held.update(dict(parameters))
        for index, parameter in self._table.all():
            if parameter.requires_grad:
                window.trainable.add(index)
                if parameter.grad is not None:
                    window.reached.add(index)
        if self._content.gradients:
            self._observe(window, "grads", self._counting(grads), scaled=scaled)
        if self._content.weights:
            self._observe(window, "weights", self._counting(weights))
        if self._content.images:
            self._take_filters(window)

    def _counting(self, tensors: Indexed) -> Indexed:
        """Those of the parameters that this rank measures."""
        ranks = self._watch.ranks
        return tensors if ranks is None else ranks.counting(tensors)

    def _observe(
        self, window: Window, kind: Kind, tensors: Indexed, *, scaled: bool = False
    ) -> None:
        parameters = self._table.parameters
        named = {parameters[index].name: local(tensor) for index, tensor in tensors}
        for name in window.observe_parameters(kind, named, scaled=scaled):
            what = described(named[name])
            self._watch.failures.log_once(
                f"{kind} of {name} are not measured: {what} cannot be", kind=what
            )

    def _read_learning_rates(self, window: Window, optimizer: Optimizer) -> None:
        """Of all optimizers, so that each keeps its place where one steps more rarely.

        Of one that has stepped in this window they stay as they were: a schedule may have changed
        them since.
        """
        self._optimizers.setdefault(optimizer)
        for known in self._optimizers:
            if id(known) not in window.optimizers:
                rates = [group.get("lr") for group in known.param_groups]
                window.learning_rates[id(known)] = [_rate(rate) for rate in rates]

    def _read_update(self, window: Window, optimizer: int) -> bool:
        """How far the parameters have moved; whether that was waited for."""
        probe = self._probes.pop(optimizer, None)
        if probe is not None:
            window.updates += probe.read()
        return probe is not None

    def _read_buffers(self, window: Window) -> None:
        model = self._watch.model()
        if model is not None and not window.buffer_names:
            buffers = cleaned(model.named_buffers())
            window.buffer_names = tuple(buffers)
            window.buffer_norms = [g.sent() for g in take_norms(enumerate(buffers.values()))]

    def _take_filters(self, window: Window) -> None:
        """The weights of the convolution that ran first."""
        model = self._watch.model()
        if window.filters or model is None:
            return
        modules = cleaned(model.named_modules())
        for name in window.order:
            module = modules.get(name)
            if isinstance(module, CONVOLUTIONS):
                sample = images.sample_filters(local(module.weight.detach()))
                if sample is not None:
                    window.filters[name] = HostCopy(sample)
                return


def _rate(value: object) -> float | HostCopy:
    """A learning rate; NaN where the optimizer has none, or works it out itself."""
    if isinstance(value, Tensor):
        return HostCopy(value)
    return float(value) if isinstance(value, Real) else math.nan


def _random_states() -> dict[str, bytes]:
    """States of torch's default generators: the CPU's and that of each GPU that is in use.

    5 kB for the CPU and 16 bytes for a GPU, which need not be waited for: its generator counts on
    the host. ``torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))`` puts
    one back.
    """
    states = {"cpu": torch.get_rng_state()}
    # While a CUDA graph is recorded, its generator's state is not known.
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        states |= {
            f"cuda:{index}": torch.cuda.get_rng_state(index)
            for index in range(torch.cuda.device_count())
        }
    return {device: state.numpy().tobytes() for device, state in states.items()}
