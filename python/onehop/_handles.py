"""Numbers that operators of PyTorch take for objects, since a graph cannot hold these."""

import itertools
import weakref
from typing import Generic, TypeVar

from onehop._errors import ArgumentError
from onehop._types import Result

T = TypeVar("T")


class Handles(Generic[T]):
    """Objects by number. A number is never used twice, and keeps no object alive."""

    def __init__(self, expected: str) -> None:
        self._expected = expected
        self._numbers = itertools.count(1)
        self._objects: dict[int, weakref.ref[T]] = {}

    def add(self, thing: T) -> int:
        """The number of an object from now on."""
        handle = next(self._numbers)
        self._objects[handle] = weakref.ref(thing)
        weakref.finalize(thing, self.drop, handle).atexit = False
        return handle

    def drop(self, handle: int) -> None:
        """It stands for nothing any more. Twice is once."""
        self._objects.pop(handle, None)

    def find(self, handle: int) -> T:
        """The object; raises if it is gone."""
        kept = self._objects.get(handle)
        found = kept() if kept else None
        if found is None:
            raise ArgumentError(f"handle: expected {self._expected}, found {handle}", Result.STATE)
        return found
