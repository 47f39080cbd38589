"""Audits an engine by its file: finds and reads its layers.

Readers are of TensorRT's build log (a line a layer) and of its inspector's JSON, of what LiteRT and ExecuTorch run of
.tflite and .pte files, of Core ML packages, and of the plan that our own engine `cuda` makes of an ONNX file, without
a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from compress.audit.engine import EngineAudit, EngineLayer, EngineListing, EngineTensor, audit_listing, type_name
from compress.audit.onnx import sparse_nodes
from compress.engines import coreml, executorch, litert
from compress.engines.base import BuildOptions, TensorInfo, read_onnx
from compress.engines.cuda.executor import dtype_name
from compress.engines.cuda.plan.layout import Layout, lay_out
from compress.engines.cuda.plan.lower import make_plan
from compress.engines.cuda.plan.steps import Convolution, Linear, Operation, Product, Step
from compress.engines.tensorrt.metadata import (
    check_fresh,
    check_whole,
    layers_path,
    log_path,
    metadata_path,
    read_metadata,
)
from compress.errors import AuditError, EngineError
from compress.files import parse_json, path_of, read_regular
from compress.support.imports import any_failure
from compress.support.limits import JSON_BYTES


def read_operators(path: Path) -> EngineListing:
    if path.suffix == ".mlpackage":
        source, (given, returned, operators) = "Core ML, as the package says", coreml.operators(path)
    else:
        source = f"{'ExecuTorch' if path.suffix == '.pte' else 'LiteRT'} on this CPU"
        with (executorch if path.suffix == ".pte" else litert).load(path, BuildOptions()) as engine:
            operators = engine.runtime_layers()
        given, returned = ([tensor.name for tensor in tensors] for tensors in (engine.inputs, engine.outputs))
    layers = tuple(
        EngineLayer(
            name=op.outputs[0].name if op.outputs else f"{op.kind} {i}",
            kind=op.kind.title().replace("_", "") if op.kind.isupper() else op.kind,
            onnx_nodes=tuple(tensor.name for tensor in op.outputs[:1]),
            inputs=tuple(map(_tensor_of_operator, op.inputs)),
            outputs=tuple(map(_tensor_of_operator, op.outputs)),
            constants=tuple(map(_tensor_of_operator, op.constants)),
            tactic=op.kernel,
            out_channels=op.outputs[0].shape[1 if path.suffix == ".mlpackage" else -1]
            if "CONV" in op.kind.upper() and op.outputs
            else None,
        )
        for i, op in enumerate(operators)
    )
    return EngineListing(source=source, layers=layers, inputs=tuple(given), outputs=tuple(returned))


def _tensor_of_operator(tensor: TensorInfo) -> EngineTensor:
    return EngineTensor(name=tensor.name, dtype=type_name(tensor.dtype), shape=tensor.shape)


# Kinds whose own name does not say what is computed.
_STEP_KINDS = {"Linear": "MatMul", "PackImage": "QuantizeImage", "LayerNorm": "ReduceLayerNorm"}


def read_cuda_layers(path: Path | str, *, sides: Sequence[int] = ()) -> EngineListing:
    """Plan an ONNX file for one image, and list the steps (EngineError: the engine cannot run it).

    `sides` are sizes left open after the batch.
    """
    inputs = read_onnx(path).inputs if sides else ()
    shapes = {tensor.name: tensor.with_batch(1).with_sides(sides).shape for tensor in inputs}
    layout = lay_out(make_plan(path, shapes, batch_size=1))
    if not layout.steps:
        raise EngineError(f"{path}: the network computes nothing")
    plan = layout.plan
    return EngineListing(
        source="plan of the cuda engine, one image",
        layers=tuple(_layer_of_step(step, layout) for step in layout.steps),
        inputs=tuple(plan.inputs),
        outputs=tuple(plan.outputs.values()),
    )


def _layer_of_step(step: Step, layout: Layout) -> EngineLayer:
    kind = step.op if isinstance(step, Operation) else type(step).__name__
    constants: tuple[EngineTensor, ...] = ()
    if isinstance(step, Product):
        shape = tuple(step.weight.shape)
        constants = (EngineTensor(name=f"{step.name}/weight", dtype="int8", shape=shape),)
    return EngineLayer(
        name=step.name,
        kind=_STEP_KINDS.get(kind, kind),
        onnx_nodes=step.origins,
        inputs=tuple(_tensor_of_step(name, layout) for name in step.reads),
        outputs=tuple(_tensor_of_step(name, layout) for name in step.writes if _is_result(name, layout)),
        constants=constants,
        tactic="" if isinstance(step, Product) else "torch" if isinstance(step, Operation) else "",
        out_channels=step.weight.shape[0] if isinstance(step, (Convolution, Linear)) else None,
    )


def _is_result(name: str, layout: Layout) -> bool:
    """False for a second view of what the step writes, in which pixels overlap."""
    place = layout.places.get(name)
    if place is None:
        return True
    size = place.dtype.itemsize * torch.Size(place.shape).numel()
    return size <= layout.buffer_bytes.get(place.buffer, size)


def _tensor_of_step(name: str, layout: Layout) -> EngineTensor:
    """A tensor with its bytes in memory: one whose pixels overlap counts as its buffer."""
    place = layout.places.get(name)
    shape = place.shape if place is not None else layout.plan.tensors[name].shape
    if place is not None and not _is_result(name, layout):
        shape = (1, layout.buffer_bytes[place.buffer] // place.dtype.itemsize)
    return EngineTensor(name=name, dtype=_TYPES.get(dtype_name(name, layout), "unknown"), shape=shape)


_TYPES = {
    name: type_name(long)
    for name, long in {
        "i8": "int8",
        "u8": "uint8",
        "f16": "half",
        "bf16": "bf16",
        "f32": "float",
        "f64": "double",
        "i32": "int32",
        "i64": "int64",
        "bool": "bool",
    }.items()
}


UNKNOWN = "?"
_STUB = "__myelin_CASK_STUB"
_READ = frozenset(
    "Name LayerType ParameterType Inputs Outputs Constants TacticName Metadata Weights OutMaps HasSparseWeights "  # noqa: SIM905
    "AllowSparse StreamId".split()
)
# Start of the names of cache controls, which some layers list among their inputs.
_CONTROL = "l2_cache_"

_AGAIN = "build the engine with profiling verbosity DETAILED (trtexec --profilingVerbosity=detailed) and export again"

_TENSOR_KEY = r"(?:Name|Location|Dimensions|Strides|StrideOrder|Datatype|Format/Datatype|Format)"
_TENSOR_ITEM = re.compile(rf"({_TENSOR_KEY}): (.*?)(?=, {_TENSOR_KEY}: |$)")
# A line may be long and hostile: `str.partition` and one pass take it apart, in time that grows with its length alone.


def parse_build_log(text: str) -> EngineListing:
    """Read the layers of the last engine in a verbose build log (AuditError: it lists none, and what to do)."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if line.split()[-1:] == ["Layers:"]]
    block = lines[starts[-1] + 1 :] if starts else []
    layers = [engine_layer(keys) for line in block if (keys := _keys(line)) is not None]
    if not layers:
        others = sum("LayerType: " in line for line in lines)
        raise AuditError(
            f"the build log lists no engine layer ({len(lines)} lines, {others} of them with a layer in another form); "
            "it must be verbose, with profiling verbosity DETAILED; `python -m compress build onnx` keeps such a log"
        )
    inputs, outputs = _names_of_log(block, layers)
    return EngineListing(
        source="build log",
        layers=without_constants(layers, {*inputs, *outputs}),
        inputs=inputs,
        outputs=outputs,
    )


def _keys(line: str) -> dict[str, Any] | None:
    """The keys of a layer's line; None for any other line."""
    name, found, rest = line.partition("Name: ")[2].partition(", LayerType: ")
    kind, begun, rest = rest.partition(", Inputs: [")
    ends = [at for mark in ("], Constants: [", "], Outputs: [") if (at := rest.find(mark)) >= 0]
    if not found or not begun or not re.fullmatch(r"\w+", kind) or not ends:
        return None
    inputs, rest = rest[: min(ends)], rest[min(ends) + 3 :]
    constants, inner, after = rest.removeprefix("Constants: [").partition("], Outputs: [")
    if not rest.startswith("Constants: ["):
        constants, after = "", rest.removeprefix("Outputs: [")
    elif not inner:
        return None
    outputs, closed, after = ("", "]", after[1:]) if after.startswith("]") else after.partition("}]")
    if not closed or (after and not after.startswith(", ")):
        return None
    others, _, metadata = after.partition(", Metadata:")
    row: dict[str, Any] = {key: _value(value) for key, value in _items(others.removeprefix(", "))}
    blocks = {"Inputs": inputs, "Constants": constants, "Outputs": outputs}
    return (
        row
        | {key: list(_tensors_of_log(value)) for key, value in blocks.items()}
        | {"Name": name, "LayerType": kind, "Metadata": metadata.removeprefix(" ") or None}
    )


def _tensors_of_log(text: str) -> Iterator[dict[str, Any]]:
    """Yield the tensors of `{ Name: ...}, { Name: ...}`."""
    for part in text.strip().removeprefix("{").removesuffix("}").split("}, {"):
        if part.strip().startswith("Name: "):
            yield {name: _value(value) for name, value in _TENSOR_ITEM.findall(part.strip())}


def _items(text: str) -> Iterator[tuple[str, str]]:
    """Yield key and value of `key: value, key: {...}, key: [...]`."""
    depth = begun = 0
    for at, letter in enumerate(f"{text}, "):
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth <= 0 and text[at + 1 : at + 2] in ("", " "):
            key, found, value = text[begun:at].strip().partition(": ")
            if found and key.isidentifier():
                yield key, value
            begun = at + 1


def _value(text: str) -> object:
    """The number, list or object that a text holds; else the text."""
    if not re.match(r"[\[{\d-]", text):
        return text
    try:
        return parse_json(text)
    except ValueError:
        return text


def _names_of_log(block: Sequence[str], layers: Sequence[EngineLayer]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    io = [line.partition("Name: ")[2].partition(", IOMode: ") for line in block if ", IOMode: " in line]
    if io:
        inputs, outputs = (
            tuple(name for name, _, after in io if after.startswith(f"{mode}, DataType: "))
            for mode in ("Input", "Output")
        )
        return inputs, outputs
    at = next((i for i, line in enumerate(block) if line.rstrip().endswith("Bindings:")), len(block))
    known = {tensor.name for layer in layers for tensor in (*layer.inputs, *layer.outputs)}
    return split_bindings([line.strip() for line in block[at + 1 :] if line.strip() in known], layers)


def parse_inspector(text: str) -> EngineListing:
    """Read the inspector's JSON of one engine, built with profiling verbosity DETAILED."""
    try:
        document = parse_json(text)
    except ValueError as error:
        raise AuditError(
            f"the layer information cannot be read ({error}); give the file that --exportLayerInfo wrote"
        ) from None
    rows = document.get("Layers") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not rows:
        raise AuditError("the JSON has no list `Layers`; give the file of EngineInspector or trtexec --exportLayerInfo")
    if any(not isinstance(layer, dict) for layer in rows):
        raise AuditError(f"the JSON holds the names of {len(rows)} layers and no more; {_AGAIN}")
    if not any("Inputs" in layer or "Outputs" in layer for layer in rows):
        raise AuditError(f"none of the {len(rows)} layers in the JSON has inputs or outputs; {_AGAIN}")
    chosen = [layer for layer in rows if not re.search(r"\[profile \d+\]", str(layer.get("Name", "")))]
    others = len(rows) - len(chosen)  # of later profiles
    notes = omissions(chosen)
    if others:
        notes += (f"the engine has several optimization profiles: {others} layers of the later ones are left out",)
    layers = [engine_layer(layer) for layer in chosen]
    inputs, outputs = _names_of_json(document, layers)
    tensors = [t for layer in chosen for key in ("Inputs", "Outputs") for t in layer.get(key) or ()]
    typed = any(isinstance(t, dict) and ("Datatype" in t or "DataType" in t) for t in tensors)
    new_form = "I/O Tensors" in document or typed
    return EngineListing(
        source=f"inspector JSON ({'11.x' if new_form else '10.x'} form)",
        layers=without_constants(layers, {*inputs, *outputs}),
        inputs=inputs,
        outputs=outputs,
        notes=notes,
    )


def _names_of_json(
    document: Mapping[str, Any], layers: Sequence[EngineLayer]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    named = [t for t in document.get("I/O Tensors") or () if isinstance(t, dict) and "Name" in t]
    if named:
        by_mode = {
            mode: tuple(str(t["Name"]) for t in named if str(t.get("IOMode")).lower() == mode)
            for mode in ("input", "output")
        }
        return by_mode["input"], by_mode["output"]
    return split_bindings([str(name) for name in document.get("Bindings") or ()], layers)


def engine_layer(row: Mapping[str, Any]) -> EngineLayer:
    weights = row.get("Weights")
    weights = weights if isinstance(weights, Mapping) else {}
    sparse = row.get("HasSparseWeights", row.get("AllowSparse"))
    tactic = str(row.get("TacticName") or "").strip()
    return EngineLayer(
        name=str(row.get("Name", UNKNOWN)),
        kind=str(row.get("LayerType") or row.get("ParameterType") or UNKNOWN),
        onnx_nodes=onnx_nodes(str(row.get("Metadata") or "")),
        inputs=_tensors(row.get("Inputs")),
        outputs=_tensors(row.get("Outputs")),
        constants=_tensors(row.get("Constants")),
        tactic="" if tactic == _STUB else tactic,
        weight_elements=_count(weights.get("Count")),
        weight_type=type_name(str(weights["Type"])) if "Type" in weights else "",
        out_channels=_count(row.get("OutMaps")),
        sparse_weights=None if sparse is None else bool(sparse),
        more={key: value for key, value in row.items() if key not in _READ},
    )


def onnx_nodes(metadata: str) -> tuple[str, ...]:
    r"""The ONNX nodes that a layer's metadata name, each once.

    >>> onnx_nodes("[ONNX Layer: /conv1/Conv]\x1e[ONNX Layer: a [b]]__gemm_from_conv1x1")
    ('/conv1/Conv', 'a [b]')
    """
    parts = metadata.split("[ONNX Layer: ")[1:]
    return tuple(dict.fromkeys(part.rpartition("]")[0] for part in parts))


def omissions(layers: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Count the layers that lack a key, for each key that an audit needs, as sentences."""
    notes = []
    for key in ("Name", "LayerType", "Inputs", "Outputs"):
        count = sum(key not in layer and not (key == "LayerType" and "ParameterType" in layer) for layer in layers)
        if count:
            notes.append(f"{count} of {len(layers)} layers are listed without their {key}")
    return tuple(notes)


def without_constants(layers: Sequence[EngineLayer], borders: Collection[str]) -> tuple[EngineLayer, ...]:
    """Move weights and biases that are listed among a layer's inputs, as by TensorRT 10, to its constants.

    Without `borders`, the network's inputs and outputs, the layers are returned unchanged.
    """
    if not borders:
        return tuple(layers)
    known = {*borders, *(tensor.name for layer in layers for tensor in layer.outputs)}
    return tuple(
        replace(
            layer,
            inputs=tuple(tensor for tensor in layer.inputs if tensor.name in known),
            constants=(*layer.constants, *(tensor for tensor in layer.inputs if tensor.name not in known)),
        )
        for layer in layers
    )


def split_bindings(names: Sequence[str], layers: Sequence[EngineLayer]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (inputs, outputs) of the network: the bindings that a layer writes are outputs."""
    written = {tensor.name for layer in layers for tensor in layer.outputs}
    return tuple(n for n in names if n not in written), tuple(n for n in names if n in written)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _tensors(items: Any) -> tuple[EngineTensor, ...]:
    found = [_tensor(item) for item in items or () if isinstance(item, Mapping)]
    return tuple(tensor for tensor in found if not tensor.name.startswith(_CONTROL))


def _tensor(item: Mapping[str, Any]) -> EngineTensor:
    together = item.get("Format/Datatype", item.get("Format/DataType"))
    dtype = together if together is not None else item.get("Datatype", item.get("DataType", ""))
    layout = together if together is not None else item.get("Format", "")
    shape = _sizes(item.get("Dimensions"))
    return EngineTensor(
        name=str(item.get("Name", UNKNOWN)),
        dtype=type_name(str(dtype)),
        shape=shape or (),
        format=str(layout),
        strides=_sizes(item.get("Strides")) or (),
        rows=None if shape is None else 1,
    )


def _sizes(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(isinstance(size, int) for size in value):
        return None
    return tuple(value)


def audit_engine(path: Path | str, *, onnx: Path | str | None = None, sides: Sequence[int] = ()) -> EngineAudit:
    """Audit an engine: the type of every layer, the bytes that it moves, and what is wrong with either.

    Args:
        path: a built engine with its log or the inspector's JSON beside it, or one of these files; a .tflite,
            .pte or .mlpackage file; an ONNX file stands for the plan that the engine `cuda` makes of it.
        onnx: the file that the engine was built from; None = the file beside the engine, if it is there and unchanged.
        sides: of an ONNX file: sizes that its inputs leave open after the batch, such as height and width.

    Raises:
        AuditError: there is no such file, nothing lists the engine's layers, or a built engine is given sides.
        EngineError: the engine is truncated, or another than was built.

    Examples:
        >>> compress.audit_engine("int8.onnx").share("int8", "uint8")  # of an ONNX file: the plan of the engine `cuda`
        1.0
    """
    path = path_of(path)
    planned = path.suffix == ".onnx" and path.is_file()  # the engine cuda runs the file itself
    if sides and not planned:
        raise AuditError(
            f"{path}: sides are for ONNX files with open ones, and a built engine has its own; leave them out"
        )
    if path.suffix in {".tflite", ".pte", ".mlpackage"}:
        return audit_listing(read_operators(path))
    listing = read_cuda_layers(path, sides=sides) if planned else read_engine_layers(path)
    source = onnx or (path if planned else onnx_beside(path))
    return audit_listing(listing, onnx=source, sparse_nodes=() if source is None else sparse_nodes(source))


def read_engine_layers(path: Path | str) -> EngineListing:
    """The layers of an engine with `<engine>.layers.json` (preferred) or `.log` beside it, or of such a file."""
    path = path_of(path)
    if not path.is_file():
        raise AuditError(f"{path} does not exist; give an engine, its build log or the inspector's JSON")
    if path.suffix == ".onnx":
        raise AuditError(f"{path} is a model, not an engine of it: --onnx shows what is in it, build makes an engine")
    if path.suffix == ".json":
        return _parsed(parse_inspector, path)
    if path.suffix in {".log", ".txt"}:
        return _parsed(parse_build_log, path)
    if metadata_path(path).is_file():
        check_whole(path, read_metadata(path))
    layers, log = layers_path(path), log_path(path)
    for beside in (layers, path.with_suffix(".layers.json"), log, path.with_suffix(".log")):
        if beside.is_file():
            return read_engine_layers(beside)
    raise AuditError(
        f"no file beside {path} lists its layers (looked for {layers.name} and {log.name}). Build it with "
        f"`python -m compress build onnx`, which keeps the log; or write {layers.name} with "
        f"trtexec --loadEngine={path} --profilingVerbosity=detailed --exportLayerInfo={layers.name}"
    )


def onnx_beside(path: Path | str) -> Path | None:
    """The ONNX file that an engine was built from, if it is beside the engine and unchanged."""
    path = Path(path)
    for engine in (path, path.with_suffix("")):  # the second if `path` is the engine's log
        try:
            metadata = read_metadata(engine)
            onnx = engine.with_name(metadata.onnx)
            check_fresh(engine, metadata, onnx)
        except (EngineError, OSError):
            continue
        return onnx
    return None


def _parsed(parse: Callable[[str], EngineListing], path: Path) -> EngineListing:
    with any_failure(lambda error: AuditError(f"{path} cannot be read: {error}")):
        text = read_regular(path, JSON_BYTES).decode("utf-8", "replace")
    try:
        return parse(text)
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError) as error:
        raise AuditError(
            f"{path} lists its layers in a form that is not known ({type(error).__name__}: {error}); write it again "
            "with trtexec, or build the engine again"
        ) from error
