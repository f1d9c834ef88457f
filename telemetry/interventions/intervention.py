"""What all interventions share: the handle that removes their hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the hooks. Harmless when repeated."""
        remove_all(self._handles)


def remove_all(handles: list[RemovableHandle]) -> None:
    """Remove hooks, and empty the list of their handles."""
    while handles:
        handles.pop().remove()


def check_number(caller: str, name: str, value: object) -> float:
    """The argument ``name`` of a public function, if it is a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{caller}({name}={value!r}): must be a number")
    return value
