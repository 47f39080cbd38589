"""Checks of a model before it is quantized: anything but a plain module in float32 is refused, with advice."""

from __future__ import annotations

from types import FunctionType

import torch
from torch import fx, nn

from compress.errors import ModelError, QuantizationError
from compress.graph.trace import check_module, unwrapped

_TAKE_FLOAT = "quantize the float model"
_TAKES_OVER = "compress.from_pytorch_quantization takes it over with its ranges"
_OTHERS = (
    "modelopt.torch.quantization",
    "torchao.quantization",
    "torch.ao.quantization",
    "torch.ao.nn.qat",
    "torch.ao.nn.intrinsic.qat",
    "bitsandbytes",
    "brevitas",
    "optimum.quanto",
)
"""Packages whose modules quantize, and whose ranges cannot be taken over."""

_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_STUBS = frozenset({"QuantStub", "DeQuantStub", "QuantWrapper", "FloatFunctional", "FXFloatFunctional"})
"""Modules of torch.ao that compute in float; what prepares them for quantization adds observers, which are refused."""


def check_float_model(model: nn.Module) -> None:
    """Refuse anything but a plain float32 module.

    Raises:
        ModelError: no module at all, or a wrapper that cannot be traced.
        QuantizationError: the model is quantized already, or not in float32.
    """
    check_module(model)
    wrapped = _unwrapped(model)
    if wrapped:
        raise ModelError(f"the model is a {type(model).__name__}, which cannot be traced: give {wrapped}")
    for name, module in model.named_modules():
        advice = _quantizes(type(module))
        if advice:
            kind = f"{type(module).__module__}.{type(module).__name__}"
            raise QuantizationError(f"{name or 'the model'} is a {kind}: the model is quantized already; {advice}")
        if isinstance(module, _PARALLEL):
            raise ModelError(
                f"{name} is a {type(module).__name__}, which cannot be traced: put its .module in its place"
            )
        _check_hooks(name, module)
        _check_forward(name, module)
    _check_parameters(dict(model.named_parameters()))


def _unwrapped(model: nn.Module) -> str:
    """Say which module to give instead of a wrapper; "" for a plain module."""
    if isinstance(model, _PARALLEL):
        return "its .module, and wrap the quantized model"
    if isinstance(model, fx.GraphModule) and any(
        isinstance(n.target, torch._ops.OpOverload) for n in model.graph.nodes
    ):
        return "the module that torch.export exported: its layers are calls of aten here"
    return unwrapped(model)


def _quantizes(kind: type) -> str:
    path = kind.__module__
    if kind.__name__ in _STUBS and _is_of(path, "torch.ao"):
        return ""
    if ".quantized" in path:  # torch.ao.nn.quantized and similar
        return _TAKE_FLOAT
    if _is_of(path, "pytorch_quantization"):
        return _TAKES_OVER
    return _TAKE_FLOAT if any(_is_of(path, package) for package in _OTHERS) else ""


def _is_of(path: str, package: str) -> bool:
    return path == package or path.startswith(f"{package}.")


def _check_hooks(name: str, module: nn.Module) -> None:
    """Refuse a weight that a hook computes before every call."""
    for hook in module._forward_pre_hooks.values():
        kind = type(hook).__module__
        if kind == "torch.nn.utils.prune":
            raise ModelError(
                f"{name or 'the model'} has parameters pruned by a hook of {kind}, which computes them in every call: "
                "take it off with torch.nn.utils.prune.remove (the zeros stay)"
            )
        if kind in {"torch.nn.utils.weight_norm", "torch.nn.utils.spectral_norm"}:
            made = kind.rpartition(".")[2]
            raise ModelError(
                f"the weight of {name or 'the model'} is computed by a hook of {kind}: take it off with "
                f"torch.nn.utils.remove_{made}, or use torch.nn.utils.parametrizations.{made}, which is followed"
            )


def _check_forward(name: str, module: nn.Module) -> None:
    """Refuse a `forward` that is a plain function set on an instance, which no copy runs."""
    if isinstance(vars(module).get("forward"), FunctionType):
        raise ModelError(
            f"{name or 'the model'} has a forward of its own, a function set on the instance, which calls the module "
            "that it was made for, also in a copy: quantizing the copy would change nothing. Take it off, or make it a "
            "method of a subclass"
        )


def _check_parameters(parameters: dict[str, nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        if nn.parameter.is_lazy(parameter):
            raise ModelError(f"{name} has no shape yet (a lazy module): run the model once, then quantize it")
        if type(parameter) is not nn.Parameter:
            kind = f"{type(parameter).__module__}.{type(parameter).__name__}"
            raise QuantizationError(
                f"{name} is a {kind}, not a plain tensor: quantize the model before its weights are packed or spread"
            )
    other = [n for n, p in parameters.items() if p.is_floating_point() and p.dtype != torch.float32]
    if other:
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        raise QuantizationError(
            f"the model's parameters are {parameters[other[0]].dtype} ({other[0]}{more}); quantize it in float32 "
            "(model.float()); the remainder can be written in half precision at export (precision='fp16')"
        )
