"""CustomOp: a caller's expression, compiled into the all-reduce by AllReduce.create_op."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from onehop._errors import ArgumentError
from onehop._handles import Handles

if TYPE_CHECKING:
    from onehop._fused import FusedCalls

custom_ops: "Handles[CustomOp]" = Handles("that of a CustomOp that is there")


class CustomOp:
    """What `AllReduce.create_op` makes and `AllReduce.all_reduce_op` takes; goes when nothing holds it.

    Calls that were made, and graphs, go on without it.
    """

    def __init__(
        self,
        ar: "FusedCalls",
        compiled: object,
        expression: str,
        dtype: torch.dtype,
        row_length: int,
        scalars: tuple[str, ...],
        arrays: dict[str, torch.dtype],
    ) -> None:
        self.ar, self.compiled = ar, compiled
        self.expression = expression
        self.dtype = dtype
        """Of the messages."""
        self.row_length = row_length
        self.scalars = scalars
        """Names of numbers."""
        self.arrays = arrays
        """Names of tensors, and their types."""
        self.handle = custom_ops.add(self)
        """The number that torch.ops.onehop.all_reduce_op takes for this object."""

    def __repr__(self) -> str:
        return f"CustomOp({self.expression!r}, {self.dtype})"

    def sort(self, values: Mapping[str, float | torch.Tensor] | None) -> tuple[list[float], list[torch.Tensor]]:
        """The values of its scalars and of its arrays, in its order; raises unless each name has one of its kind."""
        given = values or {}
        expected = [*self.scalars, *self.arrays]
        if set(given) != set(expected):
            raise ArgumentError(
                f"values: expected {', '.join(expected) or 'none'}, found {', '.join(map(str, given)) or 'none'}"
            )
        scalars: list[float] = []
        arrays: list[torch.Tensor] = []
        for name in expected:
            value = given[name]
            if isinstance(value, torch.Tensor) != (name in self.arrays):
                kind = "a tensor" if name in self.arrays else "a number"
                raise ArgumentError(f"values: expected {kind} for {name}, found {type(value).__name__}")
            if isinstance(value, torch.Tensor):
                arrays.append(value)
            else:
                scalars.append(float(value))
        return scalars, arrays
