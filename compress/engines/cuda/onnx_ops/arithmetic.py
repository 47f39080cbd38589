"""Element by element: arithmetic, comparisons, activations, types; and reductions."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.engines.cuda.onnx_ops.shapes import DTYPES, Attributes, Operation, axes_of
from compress.errors import EngineError


def alike(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Operands of one type: a float32 constant beside float16 activations becomes float16."""
    if x.dtype != y.dtype and x.is_floating_point() and y.is_floating_point():
        lower = x.dtype if x.element_size() <= y.element_size() else y.dtype
        return x.to(lower), y.to(lower)
    return x, y


def mean_of(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    """A mean that is summed in float32 at least."""
    return x.mean(axes, keepdim=keep, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)


def _unary(function: Callable[[Tensor], Tensor]) -> Operation:
    return lambda attributes, x, *others: function(x)


def _binary(function: Callable[[Tensor, Tensor], Tensor]) -> Operation:
    return lambda attributes, x, y: function(*alike(x, y))


def _variadic(function: Callable[[Tensor, Tensor], Tensor]) -> Operation:
    return lambda attributes, *inputs: functools.reduce(lambda x, y: function(*alike(x, y)), inputs)


def _divide(x: Tensor, y: Tensor) -> Tensor:
    """A quotient; integers are divided with truncation towards zero."""
    return x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")


def _modulo(attributes: Attributes, x: Tensor, y: Tensor) -> Tensor:
    function = torch.fmod if attributes.get("fmod", 0) else torch.remainder
    return function(x, y)


def _clip(attributes: Attributes, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    bounds = [attributes.get("min"), attributes.get("max")]
    for i, bound in enumerate((low, high)):
        if bound is not None:
            bounds[i] = bound.item() if not bound.is_meta else None
            if bound.is_meta and not x.is_meta:
                raise EngineError("the bounds of a Clip are computed from the network's input: they must be constants")
    return x if bounds == [None, None] else torch.clamp(x, *bounds)


def _gelu(attributes: Attributes, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=attributes.get("approximate", "none"))


def _prelu(attributes: Attributes, x: Tensor, slope: Tensor) -> Tensor:
    x, slope = alike(x, slope)
    return torch.where(x < 0, x * slope, x)


def _hard_sigmoid(attributes: Attributes, x: Tensor) -> Tensor:
    return torch.clamp(attributes.get("alpha", 0.2) * x + attributes.get("beta", 0.5), 0, 1)


def _softmax(function: Callable[[Tensor, int], Tensor]) -> Operation:
    return lambda attributes, x: function(x, int(attributes.get("axis", -1)))


def _cast(attributes: Attributes, x: Tensor) -> Tensor:
    number = int(attributes["to"])
    if number not in DTYPES:
        raise EngineError(f"Cast to ONNX type {number} is not supported; the types are {sorted(DTYPES)}")
    return x.to(DTYPES[number])


def _where(attributes: Attributes, condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(condition.bool(), *alike(x, y))


def _reduce(function: Callable[[Tensor, list[int], bool], Tensor]) -> Operation:
    def run(attributes: Attributes, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        axes = axes_of(attributes, chosen)
        if not axes and attributes.get("noop_with_empty_axes", 0):
            return x
        return function(x, axes or list(range(x.dim())), bool(attributes.get("keepdims", 1)))

    return run


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((a % x.dim() for a in axes), reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


def _arg(function: Callable[..., Tensor]) -> Operation:
    def run(attributes: Attributes, x: Tensor) -> Tensor:
        if attributes.get("select_last_index", 0):
            raise EngineError(
                "ArgMax and ArgMin with select_last_index are not supported; run the file with 'onnxruntime'"
            )
        return function(x, int(attributes.get("axis", 0)), bool(attributes.get("keepdims", 1)))

    return run


def _cumulative_sum(attributes: Attributes, x: Tensor, axis: Tensor) -> Tensor:
    if attributes.get("exclusive", 0) or attributes.get("reverse", 0):
        raise EngineError("CumSum that is exclusive or reversed is not supported; run the file with 'onnxruntime'")
    return x.cumsum(int(axis.item()))


def _top_k(attributes: Attributes, x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Stable order: of equal values the first comes first."""
    axis, count = int(attributes.get("axis", -1)), int(k.item())
    largest = bool(attributes.get("largest", 1))
    values, places = torch.sort(x, dim=axis, descending=largest, stable=True)
    return values.narrow(axis, 0, count), places.narrow(axis, 0, count)


def _selu(attributes: Attributes, x: Tensor) -> Tensor:
    alpha, gamma = (
        attributes.get("alpha", 1.67326319217681884765625),
        attributes.get("gamma", 1.05070102214813232421875),
    )
    return gamma * F.elu(x, alpha)


OPERATIONS: dict[str, Operation] = {
    **{
        name: _unary(getattr(torch, name.lower()))
        for name in (
            "Abs",
            "Acos",
            "Asin",
            "Atan",
            "Ceil",
            "Cos",
            "Erf",
            "Exp",
            "Floor",
            "Log",
            "Neg",
            "Reciprocal",
            "Round",
            "Sigmoid",
            "Sign",
            "Sin",
            "Sqrt",
            "Tan",
            "Tanh",
            "IsNaN",
        )
    },
    "Relu": _unary(F.relu),
    "Softplus": _unary(F.softplus),
    "Softsign": _unary(F.softsign),
    "Mish": _unary(F.mish),
    "HardSwish": _unary(F.hardswish),
    "Not": _unary(torch.logical_not),
    "Identity": _unary(lambda x: x),
    "Dropout": _unary(lambda x: x),
    "Gelu": _gelu,
    "PRelu": _prelu,
    "HardSigmoid": _hard_sigmoid,
    "LeakyRelu": lambda a, x: F.leaky_relu(x, a.get("alpha", 0.01)),
    "Elu": lambda a, x: F.elu(x, a.get("alpha", 1.0)),
    "Celu": lambda a, x: F.celu(x, a.get("alpha", 1.0)),
    "Selu": _selu,
    "Clip": _clip,
    "Cast": _cast,
    "Where": _where,
    "Add": _binary(torch.add),
    "Sub": _binary(torch.sub),
    "Mul": _binary(torch.mul),
    "Div": _binary(_divide),
    "Mod": _modulo,
    "Pow": lambda a, x, y: torch.pow(x, y).to(x.dtype),
    "And": _binary(torch.logical_and),
    "Or": _binary(torch.logical_or),
    "Xor": _binary(torch.logical_xor),
    "Equal": _binary(torch.eq),
    "Greater": _binary(torch.gt),
    "GreaterOrEqual": _binary(torch.ge),
    "Less": _binary(torch.lt),
    "LessOrEqual": _binary(torch.le),
    "Min": _variadic(torch.minimum),
    "Max": _variadic(torch.maximum),
    "Sum": _variadic(torch.add),
    "Softmax": _softmax(lambda x, axis: F.softmax(x, axis)),
    "LogSoftmax": _softmax(lambda x, axis: F.log_softmax(x, axis)),
    "ReduceMean": _reduce(mean_of),
    "ReduceSum": _reduce(lambda x, axes, keep: x.sum(axes, keepdim=keep)),
    "ReduceMax": _reduce(lambda x, axes, keep: x.amax(axes, keepdim=keep)),
    "ReduceMin": _reduce(lambda x, axes, keep: x.amin(axes, keepdim=keep)),
    "ReduceProd": _reduce(_product),
    "ReduceL1": _reduce(lambda x, axes, keep: x.abs().sum(axes, keepdim=keep)),
    "ReduceL2": _reduce(lambda x, axes, keep: x.square().sum(axes, keepdim=keep).sqrt()),
    "ReduceSumSquare": _reduce(lambda x, axes, keep: x.square().sum(axes, keepdim=keep)),
    "ReduceLogSumExp": _reduce(lambda x, axes, keep: x.logsumexp(axes, keepdim=keep)),
    "ArgMax": _arg(torch.argmax),
    "ArgMin": _arg(torch.argmin),
    "CumSum": _cumulative_sum,
    "TopK": _top_k,
}
