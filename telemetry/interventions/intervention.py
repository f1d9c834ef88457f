"""The handle that removes an intervention's hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar

from torch.utils.hooks import RemovableHandle

Self = TypeVar("Self", bound="Intervention")


class Intervention:
    """Hooks on a model, active until :meth:`remove` or the end of the ``with`` block.

    It does not keep the model alive. Copies and saved files of the model are without the hooks.
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
        """Remove the hooks. Harmless when repeated."""
        while self._handles:
            self._handles.pop().remove()
