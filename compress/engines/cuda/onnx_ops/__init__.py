"""ONNX operations as torch functions: the float part of a plan, constant folding and the shapes of a graph.

Each operation is a function of its attributes and its inputs. It runs on real tensors, on any device and in any
floating-point type, and on `meta` tensors, which hold no data: run on those, the table infers shapes. Inputs that
decide about a shape (the target of a Reshape, say) must be real.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from compress.engines.cuda.onnx_ops import arithmetic, layers, shapes
from compress.engines.cuda.onnx_ops.table import Attributes, Operation
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
    """Whether an operation reads an input's values on the host, such as the target of a Reshape.

    Such an input must not lie on a GPU, where reading it would wait for all work, and fail in a CUDA graph.

    Args:
        kind: ONNX operator.
        index: of the input.
        value: the input.
    """
    if kind == "Gather":
        return index == 1 and value.numel() == 1
    return index in ((1,) if kind.startswith("Reduce") else _READ_BY_THE_HOST.get(kind, ()))


def apply(kind: str, attributes: Attributes, inputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Run one operation.

    Args:
        kind: ONNX operator, such as `Softmax`.
        attributes: of the node.
        inputs: in the order of the operator; None for one that is left out.

    Raises:
        EngineError: an operator, or a form of one, that is not in the table.
    """
    operation = OPERATIONS.get(kind)
    if operation is None:
        raise EngineError(
            f"the operator {kind} is not supported{near_misses(kind, OPERATIONS)}; run the file with 'onnxruntime'"
        )
    result = operation(attributes, tuple(inputs))
    return result if isinstance(result, tuple) else (result,)
