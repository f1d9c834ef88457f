"""Inputs and outputs of modules in one step: statistics, fingerprints and pictures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from telemetry.capture.captured_step import CapturedStep
from telemetry.capture.hooks import ForwardHook
from telemetry.capture.nested import tensors_in
from telemetry.capture.observations import Observation
from telemetry.capture.parameters import local
from telemetry.capture.state import State, Target
from telemetry.measure import fingerprint, images
from telemetry.records import Output
from telemetry.torch_private import is_being_traced
from telemetry.torch_private.host_copy import HostCopy

# Tensors of one step that have a fingerprint; the step may have very many micro-batches.
_FINGERPRINTS = 64


class Activations:
    """Adds what modules receive and return to a step, and the gradients of their outputs."""

    def __init__(self, captured: CapturedStep, target: Target, state: State) -> None:
        self._captured, self._target, self._state = captured, target, state
        self._detail, self._tensors = captured.detail, captured.detail.observations
        images_of_sample = target.has_sample and not captured.phase
        self._draws = target.content.images and not images_of_sample
        self._given: set[int] = set()  # identities of the tensors of the batch
        self._convolution: ForwardHook | None = None  # that ran first
        self._unit_axes: dict[tuple[int, ...], int] = {}

    def add_batch(self, given: list[Tensor]) -> None:
        """Measure the arguments of the model."""
        self._given.clear()
        sizes = [t.size(0) for t in given if t.dim() and not is_being_traced(t)]
        self._detail.examples += sizes[0] if sizes else 0
        self.add_inputs("", given)

    def add_inputs(self, name: str, given: list[Tensor]) -> None:
        """Measure tensors from outside, each once, though a module passes it on."""
        target, ranks, captured = self._target, self._state.ranks, self._captured
        counts = ranks is None or ranks.takes_inputs(captured.ranks, name, target.model())
        if captured.phase or not target.content.activations or not counts:
            return
        for tensor in given:
            if id(tensor) in self._given or is_being_traced(tensor):
                continue
            self._given.add(id(tensor))
            values = local(tensor.detach())
            if len(self._detail.fingerprints) < _FINGERPRINTS:
                self._detail.fingerprints += map(HostCopy, fingerprint(values))
            if not _is_discrete(tensor):
                self._tensors.add("inputs", name, values, self._tensors.all)

    def add_output(
        self, hook: ForwardHook, tensor: Tensor, place: int, *, in_graph: bool = False
    ) -> None:
        """Measure an output of a module; ``in_graph``: a compiled graph has reported it."""
        if not self._target.content.activations or _is_discrete(tensor):
            return
        output = Output(hook.name, place) if place else hook.output
        values = local(tensor)
        axis = self._unit_axis(hook, values)
        ranks, notes = self._state.ranks, self._captured.ranks
        if ranks is None or ranks.takes_output(notes, output, tensor, axis):
            into = self._tensors.all
            observation = self._tensors.add("outputs", output, values, into, unit_axis=axis)
            if in_graph:
                self._check(observation, tensor)

    def add_grad(
        self,
        hook: ForwardHook,
        grad: Tensor,
        place: int,
        into: list[Observation],
        *,
        in_graph: bool,
    ) -> None:
        """Measure the gradient of an output of a module."""
        output = Output(hook.name, place) if place else hook.output
        ranks, notes = self._state.ranks, self._captured.ranks
        if ranks is None or ranks.takes_output_grad(notes, output, grad):
            observed = self._tensors.add("output_grads", output, local(grad), into, scaled=True)
            if in_graph:
                self._check(observed, grad)

    def _unit_axis(self, hook: ForwardHook, tensor: Tensor) -> int | None:
        """Return the axis that counts units or channels.

        An activation function has the axis of the latest output of the same shape.
        """
        dim = tensor.dim()
        if dim < 2 or tensor.is_nested:
            return None
        if hook.units == "unknown":
            return self._unit_axes.get(tuple(tensor.shape), 1 if dim > 3 else dim - 1)
        axis = 1 if hook.units == "first" else dim - 1
        self._unit_axes[tuple(tensor.shape)] = axis
        return axis

    def _check(self, observation: Observation | None, tensor: Tensor) -> None:
        """Have some tensors of compiled graphs reduced by PyTorch, too."""
        if observation is None or not tensor.numel():
            return
        left = self._target.totals.checks_left
        if left[observation.kind] and tensor.dtype in (torch.float32, torch.bfloat16):
            left[observation.kind] -= 1
            self._tensors.check(observation, tensor)

    # --- pictures ---------------------------------------------------------------------------------

    def take_images(self, hook: ForwardHook, given: Any, output: Any) -> None:
        """Sample feature maps and the input, each once in a step."""
        detail = self._detail
        if hook.convolves:
            self._convolution = self._convolution or hook
        if not self._draws:
            return
        if hook.pictured and hook.name not in detail.feature_maps:
            sample = next(map(images.sample_feature_maps, tensors_in(output)), None)
            if sample is not None:
                detail.feature_maps[hook.name] = HostCopy(sample)
        if given and detail.input is None:
            sample = next(map(images.sample_inputs, tensors_in(given)), None)
            if sample is not None:
                detail.input = HostCopy(sample)

    def take_filters(self) -> None:
        """Sample the filters of the first convolution, before the optimizer changes them."""
        if self._convolution is None or self._detail.filters:
            return
        module = self._convolution.module()
        weight: Any = None if module is None else module.weight
        sample = None if weight is None else images.sample_filters(local(weight.detach()))
        if sample is not None:
            self._detail.filters[self._convolution.name] = HostCopy(sample)


def _is_discrete(tensor: Tensor) -> bool:
    """Whether the elements are indices, counts or masks, of which no statistics are taken."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized)
