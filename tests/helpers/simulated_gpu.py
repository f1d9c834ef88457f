"""Simulated GPU: a device with tensors in CPU memory and separate streams.

It refuses operations that would block on a GPU. It finds unordered accesses on different streams
and memory that may be reused while another stream reads it.

Importing this registers the device, for the whole process.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

NAME = "simulated"


class WaitError(RuntimeError):
    """An operation would have blocked on a GPU."""


class RaceError(RuntimeError):
    """Nothing orders two accesses on different streams."""


class Stream:
    """Stream with a vector clock: the work of each stream that precedes its own."""

    def __init__(self, device: object = None) -> None:
        self.seen: Counter[Stream] = Counter()

    def tick(self) -> int:
        self.seen[self] += 1
        return self.seen[self]

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.seen |= event.seen

    def wait_stream(self, stream: Stream) -> None:
        self.seen |= stream.seen


class Event:
    def __init__(self, blocking: bool = False) -> None:
        self.seen: Counter[Stream] = Counter()
        self.queries = 0

    def record(self, stream: Stream) -> None:
        self.seen, self.queries = stream.seen.copy(), 0

    def query(self) -> bool:
        """Whether the work is done: true from the third query on."""
        self.queries += 1
        if self.queries == 3:
            self.synchronize()
        return self.queries >= 3

    def synchronize(self) -> None:
        copied_to_host.update(self.seen)


default_stream = Stream()
copied_to_host: Counter[Stream] = Counter()
_local = threading.local()


class Backend(_DummyBackendModule, ModuleType):
    Stream, Event = Stream, Event

    def current_stream(self, device: object = None) -> Stream:
        return getattr(_local, "stream", default_stream)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, _local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            _local.stream = before

    def is_current_stream_capturing(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def device(self, device: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.get_rng_state()  # random numbers are the CPU's

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        torch.set_rng_state(state)


backend = Backend(NAME)
_setup_privateuseone_for_python_backend(NAME, backend_module=backend)
DEVICE = torch.device(NAME, 0)

guarded = False
transfers: list[int] = []
"""Bytes of each copy to the host."""

_WAITING = {
    "_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "bincount",
    "_unique2", "unique_dim", "unique_consecutive", "_coalesce",
}  # fmt: skip


@contextlib.contextmanager
def no_syncs() -> Iterator[None]:
    """Refuse to block on the device meanwhile, on every thread."""
    global guarded
    guarded = True
    try:
        yield
    finally:
        guarded = False


class SimulatedTensor(Tensor):
    """Tensor on the device; represents ``inner``, which is in CPU memory."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> SimulatedTensor:
        tensor = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        tensor.inner = inner
        return tensor

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        _memory_of(self.inner).kept_for.add(stream)

    # Not a class method: telemetry compares it to recognize wrappers.
    @staticmethod
    def __torch_dispatch__(
        func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if guarded and _waits(name, args, kwargs):
            raise WaitError(f"{func} waits for the device")
        inner_args, inner_kwargs = pytree.tree_map_only(
            SimulatedTensor, lambda tensor: tensor.inner, (args, kwargs)
        )
        if not func.is_view:
            _note_accesses(func, args, kwargs)
        if kwargs.get("device") is not None:
            inner_kwargs["device"] = torch.device("cpu")
            if kwargs["device"].type == "cpu":
                copy = func(*inner_args, **inner_kwargs)
                transfers.append(copy.numel() * copy.element_size())
                return copy
        result = func(*inner_args, **inner_kwargs)
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], SimulatedTensor):
            return args[0]
        known = set(map(_place, pytree.tree_leaves((inner_args, inner_kwargs))))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and _place(tensor) not in known:
                _memory_of(tensor, new=True)
        wrapped = pytree.tree_map_only(Tensor, SimulatedTensor, result)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)


# --- accesses of memory --------------------------------------------------------------------------


class _Memory:
    """Last read and write of one storage by each stream."""

    def __init__(self) -> None:
        self.made_on = backend.current_stream()
        self.written: Counter[Stream] = Counter({self.made_on: self.made_on.tick()})
        self.read: Counter[Stream] = Counter()
        self.kept_for: set[Stream] = set()


_memories: dict[int | None, _Memory] = {}
_all_memories: list[_Memory] = []


def given_away() -> int:
    """Number of storages whose memory may be reused while another stream reads it."""
    return sum(bool({*m.read} - m.kept_for - {m.made_on}) for m in _all_memories)


def _place(value: object) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else None


def _memory_of(inner: Tensor, *, new: bool = False) -> _Memory:
    place = _place(inner)
    if new or place not in _memories:
        _memories[place] = _Memory()
        _all_memories.append(_memories[place])
    return _memories[place]


def made(inner: Tensor) -> SimulatedTensor:
    """A tensor on the device in memory that the current stream has just taken."""
    _memory_of(inner, new=True)
    return SimulatedTensor(inner)


def note_read(tensor: SimulatedTensor) -> None:
    """Note that the current stream reads a tensor by other means than PyTorch's operations."""
    stream = backend.current_stream()
    _note_access("a kernel", stream, stream.tick(), tensor, False)


def _note_accesses(func: Any, args: Any, kwargs: Any) -> None:
    stream = backend.current_stream()
    now = stream.tick()
    for argument, value in zip(func._schema.arguments, args, strict=False):
        _note_access(func, stream, now, value, _is_written(argument))
    for argument in func._schema.arguments:
        _note_access(func, stream, now, kwargs.get(argument.name), _is_written(argument))


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _note_access(what: object, stream: Stream, now: int, value: object, writes: bool) -> None:
    for tensor in pytree.tree_leaves(value):
        if not isinstance(tensor, SimulatedTensor):
            continue
        memory = _memory_of(tensor.inner)
        if not (memory.written | (memory.read if writes else Counter())) <= stream.seen:
            raise RaceError(f"{what} on another stream, and nothing orders them")
        (memory.written if writes else memory.read)[stream] = now


def _waits(name: str, args: Any, kwargs: Any) -> bool:
    if name == "_to_copy":
        to_host = kwargs.get("device") is not None and kwargs["device"].type == "cpu"
        return to_host and not kwargs.get("non_blocking")
    if name == "copy_":
        return isinstance(args[0], SimulatedTensor) != isinstance(args[1], SimulatedTensor)
    if name in ("index", "index_put_", "index_put"):
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return name in _WAITING


_LIBRARY = torch.library.Library("aten", "IMPL")


def _made_on_device(function: Any) -> Any:
    def make(
        *args: Any, device: object = None, pin_memory: object = None, **options: Any
    ) -> Tensor:
        inner = function(*args, **{k: v for k, v in options.items() if v is not None})
        return made(inner)

    return make


for _name, _function in {
    "empty.memory_format": torch.empty,
    "empty_strided": torch.empty_strided,
    "arange.start_step": torch.arange,
    "arange.start": torch.arange,
    "arange": torch.arange,
}.items():
    _LIBRARY.impl(_name, _made_on_device(_function), "PrivateUse1")


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Implementation behind ``torch.tensor(..., device=...)``."""
    if guarded:
        raise WaitError("the device waits for numbers from the host")
    target.inner.copy_(source)  # type: ignore[attr-defined]
    return target


_LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
