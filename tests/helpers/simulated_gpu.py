"""Simulated GPU: tensors in CPU memory that claim to be on ``cuda:0``, and its streams.

It refuses operations that would block on a GPU. It finds unordered accesses on different streams
and memory that may be reused while another stream reads it. A copy to the host has its values when
the host has waited for it.

PyTorch's own code sees tensors of the meta device, whose gradients the calling thread computes.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

from telemetry.capture import parameters
from telemetry.measure import cuda, tensors
from telemetry.torch_private import host_copy
from tests.helpers import stubbed

DEVICE = torch.device("cuda", 0)


class WaitError(RuntimeError):
    """An operation would have blocked on a GPU."""


class RaceError(RuntimeError):
    """Nothing orders two accesses on different streams."""


# --- streams -------------------------------------------------------------------------------------

_handles = count()


class Stream:
    """Stream with a vector clock: the work of each stream that precedes its own."""

    def __init__(self, device: object = None) -> None:
        self.seen: Counter[Stream] = Counter()
        self.cuda_stream = next(_handles)

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
    def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
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
        for copy in [*on_the_way]:
            target, source, stream, time = copy
            if time <= self.seen[stream]:
                target.copy_(source)
                on_the_way.remove(copy)

    def elapsed_time(self, end: Event) -> float:
        return 1.0


default_stream = Stream()  # the handle is 0
_local = threading.local()


def current_stream(device: object = None) -> Stream:
    return getattr(_local, "stream", default_stream)


@contextlib.contextmanager
def use_stream(stream: Stream) -> Iterator[None]:
    before, _local.stream = current_stream(), stream
    try:
        yield
    finally:
        _local.stream = before


# --- tensors -------------------------------------------------------------------------------------

guarded = False
transfers: list[int] = []
"""Bytes of each copy to the host."""
on_the_way: list[tuple[Tensor, Tensor, Stream, int]] = []
"""Copies that the host has not waited for: target, values, stream and time there."""
operations: Counter[str] = Counter()
"""Number of calls of each operation."""

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


class GpuTensor(Tensor):
    """Tensor on the device; represents ``inner``, which is in CPU memory."""

    inner: Tensor
    device, is_cuda, is_cpu, is_meta = DEVICE, True, False, False  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: Tensor) -> GpuTensor:
        assert not inner.is_meta, "PyTorch has made a tensor by itself"
        tensor = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",
        )
        tensor.inner = inner
        return tensor

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def is_neg(self) -> bool:
        return self.inner.is_neg()

    def as_subclass(self, cls: Any) -> Any:
        return cls(self.inner)

    def to(self, *args: Any, **options: Any) -> Any:
        """PyTorch's, whose code does not know that the tensor is on the device already."""
        args = tuple(value for value in args if value != DEVICE)
        if options.get("device") == DEVICE:
            del options["device"]
        return super().to(*args, **options) if args or options else self

    def record_stream(self, stream: Stream) -> None:  # type: ignore[override]
        _memory_of(self.inner).kept_for.add(stream)

    # Not a class method: telemetry compares it to recognize wrappers.
    @staticmethod
    def __torch_dispatch__(
        func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        operations[name] += 1
        if guarded and _waits(name, args, kwargs):
            raise WaitError(f"{func} waits for the device")
        inner_args, inner_kwargs = pytree.tree_map_only(
            GpuTensor, lambda tensor: tensor.inner, (args, kwargs)
        )
        if not func.is_view:
            _note_accesses(func, args, kwargs)
        if kwargs.get("device") is not None:
            inner_kwargs["device"] = torch.device("cpu")
            if kwargs["device"].type == "cpu":
                return _to_host(func(*inner_args, **inner_kwargs), kwargs.get("non_blocking"))
        result = func(*inner_args, **inner_kwargs)
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], GpuTensor):
            return args[0]
        known = set(map(_place, pytree.tree_leaves((inner_args, inner_kwargs))))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and _place(tensor) not in known:
                _memory_of(tensor, new=True)
        wrapped = pytree.tree_map_only(Tensor, GpuTensor, result)
        return return_and_correct_aliasing(func, args, kwargs, wrapped)


def on_gpu(inner: Tensor) -> GpuTensor:
    """A tensor on the device in memory that the current stream has just taken."""
    _memory_of(inner, new=True)
    return GpuTensor(inner)


def _to_host(values: Tensor, non_blocking: bool | None) -> Tensor:
    transfers.append(values.nbytes)
    if not non_blocking:
        return values
    stream, target = current_stream(), torch.empty_like(values)
    target.untyped_storage().fill_(0xA5)
    on_the_way.append((target, values, stream, stream.seen[stream]))
    return target


def _waits(name: str, args: Any, kwargs: Any) -> bool:
    if name == "_to_copy":
        to_host = kwargs.get("device") is not None and kwargs["device"].type == "cpu"
        return to_host and not kwargs.get("non_blocking")
    if name == "copy_":
        return isinstance(args[0], GpuTensor) != isinstance(args[1], GpuTensor)
    if name in ("index", "index_put_", "index_put"):
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return name in _WAITING


# --- accesses of memory --------------------------------------------------------------------------


class _Memory:
    """Last read and write of one storage by each stream."""

    def __init__(self) -> None:
        self.made_on = current_stream()
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


def _note_read(tensor: Tensor) -> None:
    """Note that the current stream reads a tensor by other means than PyTorch's operations."""
    stream = current_stream()
    _note_access("a kernel", stream, stream.tick(), tensor, False)


def _note_accesses(func: Any, args: Any, kwargs: Any) -> None:
    stream = current_stream()
    now = stream.tick()
    for argument, value in zip(func._schema.arguments, args, strict=False):
        _note_access(func, stream, now, value, _is_written(argument))
    for argument in func._schema.arguments:
        _note_access(func, stream, now, kwargs.get(argument.name), _is_written(argument))


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _note_access(what: object, stream: Stream, now: int, value: object, writes: bool) -> None:
    for tensor in pytree.tree_leaves(value):
        if not isinstance(tensor, GpuTensor):
            continue
        memory = _memory_of(tensor.inner)
        if not (memory.written | (memory.read if writes else Counter())) <= stream.seen:
            raise RaceError(f"{what} on another stream, and nothing orders them")
        (memory.written if writes else memory.read)[stream] = now


# --- PyTorch's functions --------------------------------------------------------------------------

_FACTORIES = ("arange", "empty", "full", "linspace", "ones", "rand", "randint", "tensor", "zeros")


def _on_device(name: str) -> Callable[..., Tensor]:
    make = getattr(torch, name)

    def made(*args: Any, device: Any = None, **options: Any) -> Tensor:
        if device is None or torch.device(device).type != DEVICE.type:
            return make(*args, device=device, **options)
        if guarded and name == "tensor":
            raise WaitError("the device waits for numbers from the host")
        values = make(*args, **options)
        if name == "empty":
            values.untyped_storage().fill_(0xA5)
        return on_gpu(values)

    return made


_where = torch.where


def _where_on_device(condition: Tensor, *values: Any) -> Tensor:
    """PyTorch's makes tensors of numbers by itself."""
    return _where(
        condition, *(v if isinstance(v, Tensor) else on_gpu(torch.tensor(v)) for v in values)
    )


def take_as_plain(patches: pytest.MonkeyPatch, plain_type: type[Tensor]) -> None:
    """Make telemetry treat tensors of this type as plain tensors."""
    for module in (tensors, parameters):
        patches.setattr(module, "Tensor", plain_type)


def install(patches: pytest.MonkeyPatch) -> None:
    """Have PyTorch make tensors on the device, and its operations measure them."""
    memory = {"allocated_bytes": {"all": {"current": 0, "peak": 0}}}
    for name, value in {
        "Event": Event,
        "Stream": Stream,
        "current_stream": current_stream,
        "is_current_stream_capturing": lambda: False,
        "memory_stats_as_nested_dict": lambda device: memory,
        "stream": use_stream,
    }.items():
        patches.setattr(torch.cuda, name, value)
    patches.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    # Else integers are counted by an operation that the CPU does not have.
    patches.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    for name in _FACTORIES:
        patches.setattr(torch, name, _on_device(name))
    patches.setattr(torch, "where", _where_on_device)
    patches.setattr(cuda, "_gpus", {0: None})
    take_as_plain(patches, GpuTensor)
    host_copy._outbox.cache_clear()
    for known in (transfers, on_the_way, operations, _memories, _all_memories):
        known.clear()


def install_with_kernels(patches: pytest.MonkeyPatch, directory: Path) -> stubbed.Driver:
    """Have kernels measure the tensors."""
    enter = cuda._Buffer.enter

    def noted(buffer: cuda._Buffer, stream: int) -> object:
        # The rows of kernels on different streams are different ones: only clearing is a write.
        handle = enter(buffer, stream)
        _note_read(buffer._memory)
        buffer._memory.record_stream(current_stream())  # it is never freed
        return handle

    install(patches)
    patches.setattr(cuda._Buffer, "enter", noted)
    patches.setattr(cuda, "raw_stream", lambda index: current_stream().cuda_stream)
    return stubbed.install(patches, directory, (GpuTensor, nn.Parameter))
