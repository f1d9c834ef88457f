"""The handle of hooks that are on a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar

from torch.utils.hooks import RemovableHandle

Self = TypeVar("Self", bound="Intervention")


class Intervention:
    """Hooks on a model, in force until :meth:`remove` or the end of the ``with`` block.

    It holds neither the model nor its parameters; the hooks go with the model. Copies of the model
    and files it is saved to are without them.
    """

    def __init__(self, install: Iterable[Callable[[], RemovableHandle]]) -> None:
        self._handles: list[RemovableHandle] = []
        try:
            for put_on in install:
                self._handles.append(put_on())
        except BaseException:
            self.remove()
            raise

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Take the hooks off; harmless when done twice."""
        while self._handles:
            self._handles.pop().remove()
