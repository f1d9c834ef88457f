"""An operator that lets compiled graphs show a tensor to the module hooks.

torch.compile traces a hook only if it finds it at the first compiled call, and would either break
the graph at what our hooks do or trace it into the graph. So under the compiler a hook emits
``telemetry::observe``, which the compiler takes as opaque and runs as it is.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from telemetry.torch_private.compiler import keep_in_graph

if TYPE_CHECKING:
    from telemetry.capture.hooks import ForwardHook

_SCHEMA = "observe(Tensor x, Tensor number, int index, bool backward) -> ()"


_observers: weakref.WeakValueDictionary[int, ForwardHook] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(observer: ForwardHook) -> Tensor:
    """A number for the hook that is shown the tensors, to give to :func:`observe`; held weakly.

    It is a tensor of shape ``[]``: an int would be a constant of the graph, and each of several
    equal layers would be compiled anew.
    """
    number = next(_numbers)
    _observers[number] = observer
    return torch.tensor(number, device="cpu")


def observe(output: Tensor, number: Tensor, index: int) -> None:
    """Emit an operator that shows ``output``; the compiler traces this."""
    torch.ops.telemetry.observe(output, number, index, False)


def observe_gradient(output: Tensor, number: Tensor, index: int) -> None:
    """Emit an operator that shows the gradient of ``output``; to be traced by the compiler."""

    def show_gradient(grad: Tensor) -> Tensor:
        torch.ops.telemetry.observe(grad, number, index, True)
        return grad

    output.register_hook(show_gradient)


def _show(x: Tensor, number: Tensor, index: int, backward: bool) -> None:
    observer = _observers.get(int(number))
    if observer is not None:
        observer.in_graph(x, index, backward)


def _define() -> tuple[torch.library.Library, Callable[..., None]]:
    library = torch.library.Library("telemetry", "DEF")
    # A graph that is replayed runs no Python. Before PyTorch 2.8 there is no such tag.
    unsafe = getattr(torch.Tag, "cudagraph_unsafe", None)
    library.define(_SCHEMA, tags=() if unsafe is None else (unsafe,))
    library.impl("observe", _show, "CompositeExplicitAutograd")
    library.impl("observe", lambda x, number, index, backward: None, "Meta")
    operator = torch.ops.telemetry.observe.default
    keep_in_graph(operator)
    return library, operator


_LIBRARY, _OPERATOR = _define()
