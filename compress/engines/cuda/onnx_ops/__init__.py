"""ONNX operations as torch functions, also on tensors without data."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence

from torch import Tensor

from compress.engines.cuda.onnx_ops import arithmetic, layers, shapes
from compress.engines.cuda.onnx_ops.shapes import Attributes, Operation, given
from compress.errors import EngineError, near_misses

OPERATIONS: dict[str, Operation] = {**arithmetic.OPERATIONS, **layers.OPERATIONS, **shapes.OPERATIONS}
"""Operators of ONNX's default domain, by name."""

_READ_BY_THE_HOST: dict[str, tuple[int, ...]] = {
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Upsample": (1,),
    "Split": (1,),
    "Slice": (1, 2, 3, 4),
    "Expand": (1,),
    "Tile": (1,),
    "Pad": (1, 2, 3),
    "ConstantOfShape": (0,),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
    "Clip": (1, 2),
    "CumSum": (1,),
    "TopK": (1,),
    "Range": (0, 1, 2),
    "Trilu": (1,),
    "OneHot": (1,),
}


def is_read_by_the_host(kind: str, index: int, value: Tensor) -> bool:
    """Return True if an operation reads input number `index` on the host; that input must not lie on a GPU."""
    if kind == "Gather":
        return index == 1 and value.numel() == 1
    return index in ((1,) if kind.startswith("Reduce") else _READ_BY_THE_HOST.get(kind, ()))


@functools.cache
def _inputs_needed(operation: Operation) -> int:
    """The number of inputs without which an operation cannot run."""
    _, *inputs = inspect.signature(operation).parameters.values()
    return sum(x.default is x.empty and x.kind is not x.VAR_POSITIONAL for x in inputs)


def apply(kind: str, attributes: Attributes, inputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Run one ONNX operation, such as `Softmax`; an input that is left out is None.

    Raises:
        EngineError: an operator, or a form of one, that is not in the table.
    """
    operation = OPERATIONS.get(kind)
    if operation is None:
        raise EngineError(
            f"the operator {kind} is not supported{near_misses(kind, OPERATIONS)}; run the file with 'onnxruntime'"
        )
    for index in range(_inputs_needed(operation)):
        if given(inputs, index) is None:
            raise EngineError(f"input {index} of an operator is missing: the file is not a valid ONNX model")
    result = operation(attributes, *inputs)
    return result if isinstance(result, tuple) else (result,)
