"""Exports PyTorch models to ONNX with Q/DQ: torch's exporter, then passes over the file, metadata, and a check."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import logging
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from compress.data.base import Preprocessing
from compress.errors import CompressWarning, ExportError
from compress.export import ExportSpec
from compress.export.casting import Ranges, cast_model
from compress.export.names import LABELS_KEY, PREPROCESSING_KEY, TARGET_KEY, input_names, output_names
from compress.export.prepare import NOT_HALF, prepare
from compress.export.targets import OPSET, clean, finish_for, pads_into_convolutions, shape_for
from compress.export.tensorrt import scales_on_outputs
from compress.graph.compare import alone
from compress.graph.inputs import Inputs, as_inputs, each_input, flat_tensors, named_tensors
from compress.graph.report import leaves_of, report_of
from compress.graph.trace import check_module
from compress.onnx_graph import drop_unread, replacing_model
from compress.quantization.quantizer import quantizers
from compress.quantization.report import QuantizationReport
from compress.support.validation import validate

_LARGEST = 2**31 - 1
_LOGGERS = ("torch.onnx", "onnxscript", "onnx_ir", "torch.fx.experimental.symbolic_shapes")


@alone
def export_onnx(
    model: nn.Module,
    example_inputs: Inputs,
    path: Path | str,
    *,
    precision: str = "fp32",
    dynamic_batch: bool = True,
    opset: int = 19,
    channel_scales: str = "weight",
    preprocessing: Preprocessing | None = None,
    labels: Sequence[str] = (),
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write `model` as ONNX: weights INT8, activations as Q/DQ pairs, bias float, BatchNorm folded.

    Inputs and outputs are named by `export.names`: `input`, `logits`. Weights of up to 4 bits are INT4 from opset 21
    on; all others below 8 bits are INT8 of a narrower range, and activations below 8 bits are Q/DQ after a Clip. E4M3
    is FLOAT8E4M3FN throughout.

    Args:
        model: quantized by compress, or float; not changed.
        example_inputs: a tensor, or a sequence or mapping of tensors, float32.
        path: file to write; whole or not at all.
        precision: `fp32`, or `fp16` to write all that is not quantized in float16. Inputs, outputs and what float16
            does not hold stay float32, by the values of calibration and of `example_inputs` (`export.casting`).
        dynamic_batch: leave the first dimension of all inputs open (named `batch`).
        opset: 19 or later.
        channel_scales: `weight`, or `output` for TensorRT-RTX (see `compress.export.tensorrt`).
        preprocessing: of its input; written into the metadata.
        labels: names of the classes; written into the metadata.
        metadata: further entries, key to text.

    Returns:
        `path`.

    Raises:
        ModelError: the model is no module.
        ExportError: bad arguments or inputs, a quantizer without ranges, or an operation that cannot be exported.

    Examples:
        >>> qmodel = compress.quantize(model, images[:1], batches)
        >>> print(compress.export_onnx(qmodel, images[:1], "int8.onnx", precision="fp16"))
        int8.onnx
    """
    asked = {"opset": opset, "precision": precision, "dynamic_batch": dynamic_batch, "channel_scales": channel_scales}
    spec = ExportSpec(**asked)  # type: ignore[arg-type]
    check_export(spec)
    _check_model(model)
    inputs = as_inputs(example_inputs)
    spec = _for_wide(spec, model)
    proto = _export(prepare(model, inputs, precision=spec.precision), inputs, spec)
    report = report_of(model)
    target = report.placement.target if isinstance(report, QuantizationReport) else ""
    _apply_passes(proto, inputs, spec, target=target)
    proto.producer_name, proto.producer_version = "compress", ""
    onnx.helper.set_model_props(proto, metadata_entries(preprocessing, labels, metadata or {}, target))
    _check(proto)
    with replacing_model(path) as temporary:
        temporary.write_bytes(proto.SerializeToString())
    return Path(path)


def _for_wide(spec: ExportSpec, model: nn.Module) -> ExportSpec:
    """The form with the opset that activations of more than 8 bits need."""
    if not any(quantizer.format.wide for _, quantizer in quantizers(model)):
        return spec
    if spec.precision != "fp32":
        raise ExportError(f"precision is {spec.precision}: {NOT_HALF}")
    return replace(spec, opset=max(spec.opset, OPSET))


def _cast(proto: onnx.ModelProto, inputs: tuple[Tensor, ...], precision: str) -> None:
    """Write the float32 part of a graph in half precision, in place, by its tensors on the example inputs."""
    casting = cast_model(proto, precision, ranges=_ranges(proto, inputs, precision))
    products = [row for row in casting.kept if row.product]
    if products:
        notes = "; ".join(replace(casting, kept=tuple(products)).notes())
        warnings.warn(CompressWarning(f"{len(products)} products stay float32: {notes}"), stacklevel=4)


def _ranges(proto: onnx.ModelProto, inputs: tuple[Tensor, ...], precision: str) -> Ranges | None:
    """Measure the tensors of a graph on ONNX Runtime; None if it does not compute them, as FP8."""
    import onnxruntime  # lazy: half a second, which files in float32 do without

    ranges, shown = Ranges(proto.graph, precision), onnx.ModelProto()
    shown.CopyFrom(proto)
    del shown.graph.output[:]
    names = dict.fromkeys(
        name for node in proto.graph.node if node.op_type != "Constant" for name in node.output if name
    )
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    feeds = {value.name: x.detach().cpu().numpy() for value, x in zip(proto.graph.input, inputs, strict=True)}
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(shown.SerializeToString(), options, providers=["CPUExecutionProvider"])
        found = session.run(None, feeds)
    except Exception:  # ONNX Runtime's errors have no other base
        return None
    ranges.add(feeds | {k: v for k, v in zip(names, found, strict=True) if isinstance(v, np.ndarray)})
    return ranges


def _check_model(model: nn.Module) -> None:
    """Refuse anything but a Python module, and parameters of a type that files are not written in."""
    check_module(model)
    if report_of(model).for_training:
        raise ExportError(
            "the model is what fuse_for_training returned, a graph for training steps: export the model that it was "
            "given, whose parameters it shares"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise ExportError(f"the model is a {type(model).__name__}: give the module that it was scripted or traced from")
    for name, parameter in model.named_parameters():
        if parameter.dtype in {torch.bfloat16, torch.float64}:
            raise ExportError(
                f"the model's parameters are {parameter.dtype} ({name}): export it in float32 (model.float()); "
                "precision='fp16' writes the remainder in half precision"
            )


def _apply_passes(proto: onnx.ModelProto, inputs: tuple[Tensor, ...], spec: ExportSpec, *, target: str) -> None:
    """Rewrite torch's ONNX in place for the target that its quantizers were placed for; "" for a float model."""
    if spec.precision != "fp32":
        _cast(proto, inputs, spec.precision)
    pads_into_convolutions(proto)
    shape_for(proto, target)
    clean(proto)
    finish_for(proto, target)
    drop_unread(proto.graph)  # biases that were replaced
    if spec.channel_scales == "output":
        scales_on_outputs(proto)


def _check(proto: onnx.ModelProto) -> None:
    if proto.ByteSize() > _LARGEST:
        raise ExportError(f"the ONNX model has {proto.ByteSize()} bytes; files of one piece hold at most {_LARGEST}")
    try:
        onnx.checker.check_model(proto, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError, ValueError) as error:
        raise ExportError(f"the exported model does not pass onnx.checker: {error}") from error


def check_export(spec: ExportSpec) -> None:
    """Refuse a form that no file can have, or that the installed onnx does not know."""
    validate(spec, ExportSpec, section="export", error=ExportError)
    newest = onnx.defs.onnx_opset_version()
    if spec.opset > newest:
        raise ExportError(f"export.opset is {spec.opset}: the installed onnx knows opsets from 19 to {newest}")


def _export(model: nn.Module, inputs: tuple[Tensor, ...], spec: ExportSpec) -> onnx.ModelProto:
    if spec.dynamic_batch:  # torch.export takes a batch of one for a constant
        inputs = each_input(lambda x: x.repeat(2, *[1] * (x.dim() - 1)) if len(x) == 1 else x, inputs)
    batch = torch.export.Dim("batch", min=1)
    names = input_names(len(inputs))
    try:
        with torch.no_grad():
            output = model(*inputs)
    except Exception as error:  # the model is the user's code
        got = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in inputs)
        raise ExportError(
            f"the model fails on example_inputs of {got}: {_cause(error)}; export it in float32 (model.float(); "
            "precision='fp16' writes the file in half) with inputs that it takes, on its device"
        ) from error
    results = output_names([key for key, _ in named_tensors(output)], taken=names)
    if not results:
        raise ExportError(f"the model returned {type(output).__name__}, which holds no tensor that a file could return")
    numbers = any(isinstance(leaf, (int, float, str)) for leaf in tree_leaves(output))
    if numbers or is_dataclass(output) or not isinstance(output, (Tensor, tuple, list, dict)):
        model = _TensorsOf(model)  # torch.export knows no other containers, and torch.onnx no numbers
    shapes: Any = tuple({0: batch} for _ in inputs) if spec.dynamic_batch else None
    if shapes is not None and model.forward.__code__.co_flags & inspect.CO_VARARGS:
        shapes = (shapes,)  # torch.export sees *args as one argument that is a tuple
    try:
        with quiet(), torch.no_grad(), looked_up_once(), _ExactNumbers():
            program = torch.onnx.export(
                model,
                tuple(inputs),
                dynamo=True,
                opset_version=spec.opset,
                dynamic_shapes=shapes,
                input_names=names,
                output_names=results,
                verbose=False,
            )
    except Exception as error:  # torch.onnx runs the user's code, and raises whatever its passes do
        raise ExportError(f"torch.onnx cannot export the model: {_cause(error)}{_suspects(model)}") from error
    if program is None:
        raise ExportError("torch.onnx returned no model")
    if spec.dynamic_batch:
        _check_batch(program.model_proto)
    return program.model_proto


def _check_batch(proto: onnx.ModelProto) -> None:
    """Refuse a file of one batch size where an open one is asked for: torch fixes what Python computed with."""
    for value in proto.graph.input:
        first = value.type.tensor_type.shape.dim[:1]
        if first and first[0].HasField("dim_value"):
            raise ExportError(
                f"the batch size of {value.name} cannot be left open: the model's Python uses it as a number, such as "
                "int(x.shape[0]), range(len(x)) or a size that is written out, such as x.reshape(8, -1). Write "
                "x.shape[0] in its place, or fix the size to that of example_inputs (dynamic_batch=False; "
                "export.dynamic_batch: false in a recipe)"
            )


class _ExactNumbers(TorchFunctionMode):
    """Gives `clamp(x, 0, 0.5)` two limits of one type, and an epsilon a dimension.

    torch.export finds no operator for two types (2.15), and onnxscript's optimizer (0.7) drops sums with scalars of
    1e-8 or less, after which zero is divided by zero.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        given = {**dict(zip(("min", "max"), args[1:], strict=False)), **kwargs}
        if name in _CLAMPS and {type(limit) for limit in given.values()} == {int, float}:
            return func(args[0], **{name: float(limit) for name, limit in given.items()})
        if name.strip("_") in _SUMS and len(args) == 2 and isinstance(args[1], float) and 0 < abs(args[1]) <= _DROPPED:
            x = args[0]
            if isinstance(x, Tensor) and x.ndim and x.is_floating_point():
                return func(x, x.new_full((1,), args[1]), **kwargs)
        return func(*args, **kwargs)


_SUMS = frozenset({"add", "radd", "iadd", "sub", "isub"})
_DROPPED = 1e-8
_CLAMPS = frozenset({"clamp", "clamp_", "clip", "clip_"})


class _TensorsOf(nn.Module):
    """Returns the tensors of a model whose result is a dataclass, or holds numbers too, in order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(flat_tensors(self.model(*inputs)))


def _cause(error: BaseException) -> str:
    """Return the first paragraph of the innermost error on one line, without the exporter's own advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip().partition("\n\n")[0]
    return f"{type(error).__name__}: {' '.join(text.split())[:500]}"


def _suspects(model: nn.Module) -> str:
    """Name modules that torch.fx could not trace either: their code often stops both tracers."""
    leaves = [leaf for m in model.modules() if isinstance(m, fx.GraphModule) for leaf in leaves_of(m)]
    named = ", ".join(f"{leaf.path} ({leaf.kind}: {leaf.reason})" for leaf in leaves[:3])
    return f"; look first at what torch.fx kept whole: {named}" if leaves else ""


class _OfThread(type):
    """The class of a category that holds all warnings of one thread."""

    thread: int

    def __subclasscheck__(cls, subclass: type) -> bool:
        return threading.get_ident() == cls.thread


class _Printed:
    """The standard error without the text that the thread which made this object writes."""

    def __init__(self) -> None:
        self._stream, self._thread = sys.stderr, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporter's warnings and the graphs that it prints when it fails: they are not about the model.

    What other threads print and warn of is left alone.
    """
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    levels = [logger.level for logger in loggers]
    ignored: Any = _OfThread("Ignored", (Warning,), {"thread": threading.get_ident()})
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        warnings.simplefilter("ignore", ignored)
        with contextlib.redirect_stderr(_Printed()):
            yield
    finally:
        with contextlib.suppress(ValueError):  # the exporter reset all filters
            warnings.filters.remove(("ignore", None, ignored, None, 0))  # type: ignore[attr-defined]
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def metadata_entries(
    preprocessing: Preprocessing | None, labels: Sequence[str], metadata: Mapping[str, str], target: str = ""
) -> dict[str, str]:
    """Return the metadata of a file: preprocessing of its input, names of its classes, target, and further entries."""
    entries = dict(metadata) | ({TARGET_KEY: target} if target else {})
    if preprocessing is not None:
        entries[PREPROCESSING_KEY] = preprocessing.to_json()
    if labels:
        entries[LABELS_KEY] = json.dumps(list(labels), ensure_ascii=False)
    return entries


_BUILT: dict[tuple[int | None, frozenset[str]], Any] = {}
_REGISTERING = frozenset({"torchvision", "torch.ao.quantization.fx._decomposed"})
"""Modules whose import gives torch operators that its table has functions for: without them it is built without."""


@contextmanager
def looked_up_once() -> Iterator[None]:
    """Let one `torch.onnx.export` take tables from here that it builds in each export; inside of `alone`.

    They are most of the time that a small network's export takes: torch.onnx reads the source of some 500 functions for
    its table, and torch.export asks for its composite operators 64 times (2.15). A torch that keeps them elsewhere is
    left alone.
    """
    with table_built_once(), operators_named_once():
        yield


@contextmanager
def operators_named_once() -> Iterator[None]:
    """Let torch.export ask for its composite operators once while the context lasts."""
    try:
        from torch._export import utils  # optional: private, moves with torch

        named = utils.__dict__["_materialize_cpp_cia_ops"]
    except (ImportError, KeyError):
        yield
        return
    module: Any = utils
    module._materialize_cpp_cia_ops = functools.cache(named)
    try:
        yield
    finally:
        module._materialize_cpp_cia_ops = named


@contextmanager
def table_built_once() -> Iterator[None]:
    """Let `torch.onnx.export` take its table of ONNX functions from here while the context lasts."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry  # optional: private, moves with torch

        build = ONNXRegistry.__dict__["from_torchlib"]
    except (ImportError, AttributeError, KeyError):
        yield
        return

    def copied(**options: int) -> object:
        key = options.get("opset_version"), _REGISTERING.intersection(sys.modules)
        if key not in _BUILT:
            _BUILT[key] = build.__get__(None, ONNXRegistry)(**options)
        table = ONNXRegistry()
        table.__dict__.update(_BUILT[key].__dict__)
        table.functions = {target: list(rows) for target, rows in _BUILT[key].functions.items()}
        return table

    registry: Any = ONNXRegistry
    registry.from_torchlib = staticmethod(copied)
    try:
        yield
    finally:
        registry.from_torchlib = build
