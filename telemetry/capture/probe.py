"""Probe forward passes, which leave the model and its training unchanged."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from telemetry.capture.captured_step import Detail
from telemetry.capture.nested import map_tensors, tensors_in
from telemetry.measure import images
from telemetry.plain_text import type_of
from telemetry.torch_private import NO_TASK, backward_task
from telemetry.torch_private.compiler import is_compiled
from telemetry.torch_private.host_copy import HostCopy
from telemetry.torch_private.ranks import has_flat_shards, spec_of


class Sample:
    """Fixed sample whose feature maps are drawn at every full step.

    ``given``: a batch in the form of the model's arguments: a tensor, a tuple of arguments, or a
    mapping of keyword arguments. It is copied; feature maps are those of its first sample.
    """

    def __init__(self, model: nn.Module, given: Any) -> None:
        if not isinstance(given, Tensor | tuple | Mapping) or not tensors_in(given):
            raise TypeError(
                "HookLogger(sample=...): must be a tensor, a tuple of arguments or a dict of "
                f"keyword arguments of the model, not {type_of(given)}"
            )
        if reason := _refusal(model):
            raise ValueError(f"HookLogger(sample=...): {reason}; remove this argument")
        given = dict(given) if isinstance(given, Mapping) else given
        self._given = map_tensors(given, lambda tensor: tensor.detach().clone())

    def run(
        self,
        model: nn.Module,
        pictured: Mapping[str, nn.Module],
        detail: Detail,
        *,
        between: bool,
    ) -> str:
        """Run the sample in evaluation mode, and add its picture and feature maps to ``detail``.

        While it runs, memory holds copies of all parameters and buffers. Hooks other than PyTorch's
        own (``weight_norm``), gradients, autocast and other modes are off.

        Args:
            pictured: The modules whose outputs are drawn, by name.
            between: Whether no forward pass of the model is running.

        Returns:
            The reason why the sample was not run; empty if it was.
        """
        if not pictured:
            return "no watched module is a convolution"
        if not between or backward_task() != NO_TASK:
            return "this step ends inside of another pass"
        if reason := _refusal(model):
            return reason
        while isinstance(model, nn.DataParallel | DistributedDataParallel):
            model = model.module  # it runs on this rank alone

        def take(name: str, module: nn.Module, args: Any, output: Any) -> None:
            maps = next(map(images.sample_feature_maps, tensors_in(output)), None)
            if maps is not None and name not in detail.feature_maps:
                detail.feature_maps[name] = HostCopy(maps)

        device = next(model.parameters()).device
        given = map_tensors(self._given, lambda tensor: tensor.to(device))
        batches = (images.sample_inputs(tensor[:1]) for tensor in tensors_in(given) if tensor.dim())
        own = next((batch for batch in batches if batch is not None), None)
        with ExitStack() as stack:
            stack.enter_context(unchanged(model))
            for module in model.modules():
                module.training = False
                stack.enter_context(_without_hooks(module))
            for name, module in pictured.items():
                stack.callback(module.register_forward_hook(partial(take, name)).remove)
            call(model, given)
        detail.input = None if own is None else HostCopy(own)
        return ""


def _refusal(model: nn.Module) -> str:
    """Return the reason why the model cannot run a sample; empty if it can."""
    if has_flat_shards(model) or any(map(spec_of, model.parameters())):
        return "the model is sharded, and a forward pass of one rank would wait for the others"
    if is_compiled(*model.modules()):
        return "the model is compiled, and a pass in evaluation mode would compile it again"
    return ""


def call(model: nn.Module, inputs: Any) -> Any:
    """Return the model's output for copies of the inputs: it may change them in place."""
    inputs = pytree.tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
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


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Remove hooks that are not PyTorch's own, which may have side effects, during the body."""
    kept = [(hooks, dict(hooks)) for hooks in (module._forward_hooks, module._forward_pre_hooks)]
    for hooks, before in kept:
        for key, hook in before.items():
            if not (getattr(hook, "__module__", None) or "").startswith("torch."):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)
