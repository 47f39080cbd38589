"""Compares results for the same images: of two networks, of an engine layer by layer, of a quantized file and float."""

from __future__ import annotations

import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx.utils import Extractor
from torch import Tensor, fx

from compress.engines import Engine
from compress.engines.base import Arrays, existing_file, load_onnx, read_onnx
from compress.engines.registry import ENGINES, build_engine
from compress.errors import CompressError, EngineError
from compress.export.casting import widened
from compress.export.names import quantized_tensor, shifted_tensor
from compress.graph.compare import Noise
from compress.graph.inputs import flat_tensors
from compress.graph.ops import layer_name, node_kind, walk
from compress.kernels.memory_format import along_axis
from compress.onnx_graph import WEIGHTED_OPS, all_nodes, subgraphs
from compress.onnx_ptq.source import (
    FloatSession,
    feeds,
    images_of,
    inputs_of_file,
    known_results,
    load_source,
    open_batch,
    unknown_to_runtime,
)
from compress.quantization.quantizer import Quantizer
from compress.support.meters import decibel
from compress.support.process import NO_VNNI, sums_bytes_in_16_bits


@dataclass(frozen=True, kw_only=True)
class Parity:
    """Comparison of two sets of logits.

    Attributes:
        agreement: share of images (of pixels, for segmentation) whose highest logit is of the same class, 0 to 1; None
            for outputs that decide for no class.
        sqnr_db: signal to quantization noise ratio of all logits as one tensor, in dB; inf if they are equal.
    """

    agreement: float | None
    sqnr_db: float
    max_abs_difference: float
    images: int


def compare_logits(reference: NDArray[Any], logits: NDArray[Any]) -> Parity:
    _check(reference, logits)
    difference = np.abs(reference.astype(np.float64) - logits.astype(np.float64))
    return Parity(
        agreement=agreement(reference, logits),
        sqnr_db=sqnr_db(reference, logits),
        max_abs_difference=float(difference.max()),
        images=len(reference),
    )


def compare_batches(
    reference: Sequence[Any], outputs: Sequence[Any], *, classes: Callable[[Any], Any] | None = None
) -> Parity:
    """Compare outputs of any form, tensors or structures of tensors, all batches together.

    `classes` returns the decided classes of a batch's outputs; None = no agreement is counted.
    """
    if not reference or len(reference) != len(outputs):
        raise EngineError(f"there are outputs of {len(reference)} and {len(outputs)} batches to compare")
    noise, largest = Noise(), 0.0
    same = places = images = 0
    for expected, got in zip(reference, outputs, strict=True):
        pairs = list(zip(flat_tensors(expected), flat_tensors(got), strict=True))
        for a, b in pairs:
            if a.shape != b.shape:
                raise EngineError(f"cannot compare shapes {tuple(a.shape)} and {tuple(b.shape)}: they must be equal")
            largest = max(largest, (a.double() - b.double()).abs().max().item())
        noise.add(expected, got)
        images += len(pairs[0][0])
        if classes is not None:
            equal = classes(expected) == classes(got)
            same, places = same + int(equal.sum()), places + equal.numel()
    return Parity(
        agreement=same / places if places else None,
        sqnr_db=noise.decibel,
        max_abs_difference=largest,
        images=images,
    )


def agreement(reference: NDArray[Any], logits: NDArray[Any]) -> float:
    """The share of rows whose largest element, the first of equal ones, is in the same column; both (N, C)."""
    _check(reference, logits)
    if reference.ndim != 2:
        raise EngineError(f"agreement compares logits (images, classes), got shape {reference.shape}")
    return float(np.mean(reference.argmax(axis=1) == logits.argmax(axis=1)))


def sqnr_db(reference: NDArray[Any], value: NDArray[Any]) -> float:
    """10 log10(sum reference^2 / sum (reference - value)^2) in dB; inf if equal, -inf if only the reference is zero."""
    _check(reference, value)
    signal = float(np.square(reference.astype(np.float64)).sum())
    noise = float(np.square(reference.astype(np.float64) - value.astype(np.float64)).sum())
    return decibel(signal, noise)


def _check(reference: NDArray[Any], value: NDArray[Any]) -> None:
    if reference.shape != value.shape:
        raise EngineError(f"cannot compare shapes {reference.shape} and {value.shape}: they must be equal")
    if not reference.size:
        raise EngineError(f"there is nothing to compare: the shape is {reference.shape}")
    for name, array in (("reference", reference), ("value", value)):
        if not np.isfinite(array).all():
            raise EngineError(f"the {name} holds NaN or infinite numbers, so a comparison says nothing")


# Signal to noise below which a tensor differs; differences of rounding, single steps, stay above it.
LEAST_DB = 25.0


@dataclass(frozen=True, kw_only=True)
class LayerDifference:
    """One tensor on the engine against the file.

    Attributes:
        sqnr_db: signal to noise of the engine's, in dB; inf if they are equal, -inf if the engine's is not finite.
        before_db: the least of those before it; far above `sqnr_db` if this layer is at fault.
    """

    node: str
    op_type: str
    tensor: str
    sqnr_db: float
    before_db: float = float("inf")


def cut_file(model: onnx.ModelProto, outputs: list[str], target: Path) -> Path:
    typed = onnx.shape_inference.infer_shapes(model)
    known = {value.name for value in (*typed.graph.value_info, *typed.graph.input, *typed.graph.output)}
    for name in set(outputs) - known:  # results of operators that onnx cannot infer
        typed.graph.value_info.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    cut = Extractor(typed).extract_model([value.name for value in typed.graph.input], outputs)
    del cut.graph.value_info[:]  # engines infer the shapes of what is left
    onnx.save(cut, str(target))
    return target


def probe_file(onnx_path: Path | str, out: Path | str) -> tuple[LayerDifference, ...]:
    """Write a copy of an ONNX file whose inner tensors are outputs too, and return those in the order of the nodes.

    They are the inputs of quantizers (without these, the outputs of convolutions and products) and the file's outputs.
    """
    model = onnx.load(str(existing_file(onnx_path)))
    graph = model.graph
    produced = {name: node for node in graph.node for name in node.output}
    quantized = {node.input[0] for node in graph.node if node.op_type == "QuantizeLinear"} & set(produced)
    inner = quantized or {node.output[0] for node in graph.node if node.op_type in WEIGHTED_OPS}
    own = {value.name for value in graph.output}
    types = {value.name: value for value in onnx.shape_inference.infer_shapes(model).graph.value_info}
    graph.output.extend(types[name] for name in produced if name in inner - own and name in types)
    onnx.save(model, str(out))
    given = {value.name for value in graph.output}
    return tuple(
        LayerDifference(node=node.name or name, op_type=node.op_type, tensor=name, sqnr_db=float("inf"))
        for name, node in produced.items()
        if name in given
    )


def _outputs_of(engine: Engine, images: NDArray[Any]) -> Arrays:
    if len(engine.inputs) != 1:
        raise EngineError(f"{engine.info.label} has {len(engine.inputs)} inputs; layers are compared on images alone")
    return engine.run({engine.inputs[0].name: images})


def _compared(probe: LayerDifference, expected: Arrays, got: Arrays) -> LayerDifference:
    finite = np.isfinite(got[probe.tensor]).all()
    return replace(probe, sqnr_db=sqnr_db(expected[probe.tensor], got[probe.tensor]) if finite else float("-inf"))


def first_difference(
    onnx_path: Path | str,
    engine: str,
    images: NDArray[Any],
    *,
    precision: str | None = None,
    least_db: float = LEAST_DB,
    **options: Any,
) -> LayerDifference | None:
    """Find the first layer whose output on an engine is not ONNX Runtime's within `least_db`, node by node."""
    with tempfile.TemporaryDirectory() as folder:
        probed = Path(folder) / "probed.onnx"
        probes = probe_file(onnx_path, probed)

        def build(path: Path | str) -> Engine:
            return build_engine(path, engine, batch_size=len(images), precision=precision, **options)

        with build_engine(probed, "onnxruntime", fuse="no") as reference, build(probed) as judged:
            expected, got = _outputs_of(reference, images), _outputs_of(judged, images)
        before = float("inf")
        for row in (_compared(probe, expected, got) for probe in probes):
            if row.sqnr_db < least_db:
                return replace(row, before_db=before)
            before = min(before, row.sqnr_db)

        model = onnx.load(str(onnx_path))

        def alone(probe: LayerDifference) -> LayerDifference:
            with build(cut_file(model, [probe.tensor], Path(folder) / "cut.onnx")) as judged:
                return _compared(probe, expected, _outputs_of(judged, images))

        return _first_of_parts(probes, alone, least_db)


def _first_of_parts(
    probes: Sequence[LayerDifference], alone: Callable[[LayerDifference], LayerDifference], least_db: float
) -> LayerDifference | None:
    """Search by halving for the first part of the file that differs; None if the whole file does not."""
    bad, good, low, high = alone(probes[-1]), None, -1, len(probes) - 1
    if bad.sqnr_db >= least_db:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        row = alone(probes[middle])
        if row.sqnr_db < least_db:
            bad, high = row, middle
        else:
            good, low = row, middle
    return replace(bad, before_db=float("inf") if good is None else good.sqnr_db)


# Share of a tensor's elements that may be more than one step apart.
TOLERANCE = 1e-3

# Share of values one step apart that ties cannot explain: a quantization is omitted, or done in another place.
TIES = 0.02

Floats = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class PointParity:
    """One quantized tensor: the engine's against fake quantization's.

    Attributes:
        operations: between the quantizers before it and this one, in graph order.
        one_step: share of the elements that are one step apart: rounding.
        more_steps: share of them that are further apart.
        sqnr_db: of the engine's tensor against torch's of the same inputs.
        diverges: True if `more_steps` is over the tolerance.
    """

    quantizer: str
    tensor: str
    operations: tuple[str, ...]
    scale: float
    elements: int
    one_step: float
    more_steps: float
    largest_steps: int
    sqnr_db: float
    diverges: bool


@dataclass(frozen=True, kw_only=True)
class LayerParity:
    """All points of a network on one engine.

    Attributes:
        tolerance: share of elements that may be more than one step apart.
        missing: quantizers whose tensor the exporter removed.
        method: how the engine's values were read.
        logits: of the whole file against torch's.
    """

    engine: str
    tolerance: float
    points: tuple[PointParity, ...]
    missing: tuple[str, ...]
    method: str
    logits: Parity

    @property
    def first(self) -> PointParity | None:
        """The first point that diverges; None if all differences are rounding."""
        return next((point for point in self.points if point.diverges), None)

    @property
    def verdict(self) -> str:
        """One sentence on the first point that diverges, or on the rounding."""
        first = self.first
        if first is not None:
            return (
                f"{self.engine} diverges first at {first.tensor} ({first.quantizer}), after "
                f"{', '.join(first.operations) or 'the input'}: {first.more_steps:.2%} of its values are more than one "
                f"step away, up to {first.largest_steps} steps (tolerated: {self.tolerance:.2%})"
            )
        most = max((point.one_step for point in self.points), default=0.0)
        text = (
            f"{self.engine} computes what fake quantization does at all {len(self.points)} quantizers: at most "
            f"{most:.2%} of the values of a tensor are one step apart, which is rounding"
        )
        fused = next((point for point in self.points if point.one_step > TIES), None)
        if fused is None:
            return text
        return (
            f"{text}; at {fused.tensor} it is first more than ties explain: the engine rounds at another place within "
            f"{', '.join(fused.operations)}, as it does if it fuses a quantizer into a sum"
        )


def layer_parity(
    qmodel: fx.GraphModule,
    path: Path | str,
    images: Tensor,
    *,
    engine: str = "onnxruntime",
    precision: str | None = None,
) -> LayerParity:
    """Compare an engine with fake quantization at every quantizer, computed from the engine's values before it."""
    calls = [node for node in qmodel.graph.nodes if node_kind(node) == "quantizer"]
    if not calls:
        raise EngineError("the network has no quantizers to compare at; give one that compress.quantize made")
    held = {name for node in load_onnx(path).graph.node for name in node.output}
    watched = {node: (name, shifted_tensor(name)) for node, name in _tensor_names(calls).items()}
    found = {node: next(name for name in names if name in held) for node, names in watched.items() if held & {*names}}
    if not found:
        raise EngineError(f"{path} holds none of the network's {len(calls)} quantizers: it is of another network")
    inputs = images.numpy()
    label, plain = _run(Path(path), inputs, engine, precision)
    with tempfile.TemporaryDirectory() as folder:
        values, method = _watch(Path(path), list(found.values()), inputs, plain, (engine, precision, Path(folder)))
    for node in (node for node, name in found.items() if name == watched[node][1]):
        quantizer = _quantizer(qmodel, node)
        values[found[node]] = values[found[node]] - quantizer.zero_point * quantizer.scale.detach().numpy()
    training = qmodel.training
    forced = _Forced(qmodel.eval(), {node: torch.from_numpy(values[name]) for node, name in found.items()})
    with torch.no_grad():
        whole = flat_tensors(qmodel(images))[0].numpy()
        forced.run(images)
    qmodel.train(training)
    points = [_point(qmodel, node, forced.computed[node], values[name]) for node, name in found.items()]
    return LayerParity(
        engine=label,
        tolerance=TOLERANCE,
        points=tuple(points),
        missing=tuple(str(node.target) for node in calls if node not in found),
        method=method,
        logits=compare_logits(whole, next(iter(plain.values()))),
    )


def _quantizer(qmodel: fx.GraphModule, node: fx.Node) -> Quantizer:
    quantizer = qmodel.get_submodule(str(node.target))
    assert isinstance(quantizer, Quantizer)  # as its node's kind says
    return quantizer


class _Forced(fx.Interpreter):
    """Computes every quantized tensor from the engine's values before it."""

    def __init__(self, module: fx.GraphModule, values: Mapping[fx.Node, Tensor]) -> None:
        super().__init__(module)
        self.values = values
        self.computed: dict[fx.Node, Tensor] = {}

    def run_node(self, n: fx.Node) -> object:
        result = super().run_node(n)
        if n not in self.values:
            return result
        self.computed[n] = result
        return self.values[n].reshape(result.shape) if self.values[n].numel() == result.numel() else result


def _tensor_names(calls: list[fx.Node]) -> dict[fx.Node, str]:
    seen: Counter[str] = Counter()
    names = {}
    for node in calls:
        quantizer = str(node.target)
        names[node] = quantized_tensor(quantizer, seen[quantizer])
        seen[quantizer] += 1
    return names


def _watch(
    path: Path, names: list[str], images: Floats, plain: Mapping[str, Floats], where: tuple[str, str | None, Path]
) -> tuple[dict[str, Floats], str]:
    """The engine's tensors `names`, read without changing its results, and how they were read."""
    engine, precision, folder = where
    model = onnx.load(str(path))
    result = model.graph.output[0].name
    _, values = _run(cut_file(model, [result, *names], folder / "watched.onnx"), images, engine, precision)
    if np.array_equal(values[result], plain[result]):
        return dict(values), "all tensors as outputs of one file, whose logits stay what they were"
    found = {}
    for name in names:
        _, only = _run(cut_file(model, [name], folder / "cut.onnx"), images, engine, precision)
        found[name] = only[name]
    return found, "each tensor from a file that ends there, because more outputs change what the engine fuses"


def _run(path: Path, images: Floats, engine: str, precision: str | None) -> tuple[str, Mapping[str, Floats]]:
    with build_engine(path, engine, precision=precision) as built:
        results = built.run({built.inputs[0].name: images})
        return built.info.label, {key: np.asarray(value, dtype=np.float32) for key, value in results.items()}


def _point(qmodel: fx.GraphModule, node: fx.Node, expected: Tensor, got: Floats) -> PointParity:
    quantizer = _quantizer(qmodel, node)
    scale = along_axis(quantizer.scale.detach(), expected, quantizer.format.axis).double().numpy()
    reference: Floats = expected.numpy()
    if reference.shape != got.shape:
        raise EngineError(f"{node.target} has shape {reference.shape} in torch and {got.shape} on the engine")
    apart = np.abs(np.rint((got.astype(np.float64) - reference) / scale))
    more = float(np.mean(apart > 1))
    (source,) = node.all_input_nodes
    return PointParity(
        quantizer=str(node.target),
        tensor=source.name,
        operations=_operations(source),
        scale=float(np.max(scale)),
        elements=reference.size,
        one_step=float(np.mean(apart == 1)),
        more_steps=more,
        largest_steps=int(apart.max()) if apart.size else 0,
        sqnr_db=sqnr_db(reference, got),
        diverges=more > TOLERANCE,
    )


def _operations(node: fx.Node) -> tuple[str, ...]:
    """The operations between `node` and the quantized tensors before it."""
    ends = {"quantizer", "input", "constant"}
    found = set(walk([node], lambda n: () if node_kind(n) in ends else n.all_input_nodes))
    return tuple(layer_name(n) for n in node.graph.nodes if n in found and node_kind(n) not in ends)


# Largest number of images that are compared.
IMAGES = 8
# Signal to noise below which a quantized file is called far from float: a third of the signal is noise.
LOW_DB = 10.0
# An engine that stays below the first, and that far below the file itself, computes something else: differences of
# rounding, single steps, are smaller.
FAULT_DB, FAULT_LOSS_DB = 25.0, 6.0
_TRY = "Try a fixed batch, or keep layers in float (quantization.rules)"
_COMPILE_IN_SECONDS = ("openvino", "onnxruntime")


@dataclass(frozen=True, kw_only=True)
class FileCheck:
    """Comparison of a quantized file with its float file.

    Attributes:
        written_db: signal to noise of the file run as it is written, in dB; the least of its outputs.
        engine: the target's; "" if it is not installed, or the target has none that compiles in seconds.
        engine_db: the same on that engine; None without one.
        warning: what is wrong and what to do; "" if nothing is.
    """

    images: int
    written_db: float | None
    engine: str
    engine_db: float | None
    warning: str = ""


def check_onnx(
    float_path: Path | str, path: Path | str, batch: Any, *, target: str, ops: Sequence[Path | str] = ()
) -> FileCheck:
    """Compare a quantized file with float on the first images of a batch.

    Outputs that are no floats, whose size depends on values, or that are zero in float are left out.

    Args:
        float_path: file that it was made from.
        path: quantized file.
        batch: as `quantize_onnx` takes it.
        target: that the file was quantized for.
        ops: libraries of operators for ONNX Runtime; OpenVINO does not run such files.

    Examples:
        >>> spec = compress.QuantSpec(target="onnxruntime")
        >>> path = compress.quantize_onnx("float.onnx", [images], spec=spec, out="new.onnx")
        >>> compress.check_onnx("float.onnx", path, images, target="onnxruntime").warning
        ''
    """
    source = load_source(float_path, ops=ops)
    piece = next(feeds([batch], inputs_of_file(source)))
    if all(open_batch(value) for value in source.proto.graph.input if value.name in piece):
        piece = {name: value[:IMAGES] for name, value in piece.items()}
    engine = target if target in _COMPILE_IN_SECONDS and ENGINES[target].availability().available else ""
    found = FileCheck(images=images_of(piece), written_db=None, engine=engine, engine_db=None)
    names = known_results(source)
    if not names:
        why = next(iter(unknown_to_runtime(source).values()), "it has no result")
        return replace(found, engine="", warning=f"not compared with float: {why}")
    own = {"ops": os.pathsep.join(str(one.absolute()) for one in source.ops)} if ops else {}
    try:
        expected = {k: v for k, v in _run_file(float_path, "onnxruntime", piece, **own).items() if k in names}
        found = replace(found, written_db=_least(expected, _as_written(path, piece, names, own)))
    except CompressError as error:
        return replace(found, engine="", warning=f"not compared with float: {error}")
    try:
        on_engine = (
            _least(expected, _run_file(path, engine, piece, **own if engine == "onnxruntime" else {}))
            if engine
            else None
        )
    except CompressError as error:
        return replace(found, warning=str(error))
    return replace(found, engine_db=on_engine, warning=_warning(found.written_db, on_engine, engine))


def _run_file(path: Path | str, engine: str, feed: Arrays, **options: Any) -> Arrays:
    precision = "f32" if engine == "openvino" else None
    with build_engine(path, engine, precision=precision, **options) as built:
        return built.run(feed)


def _as_written(path: Path | str, feed: Arrays, names: list[str], own: Mapping[str, str]) -> Arrays:
    """One in bfloat16, which ONNX Runtime does not take, is run with results that are rounded to it."""
    if "bf16" not in read_onnx(path).float_types:
        return _run_file(path, "onnxruntime", feed, fuse="no", **own)
    source = load_source(path, quantized=True)
    return FloatSession(replace(source, proto=widened(source.proto)), names, plain=True).run(feed)


def _least(expected: Mapping[str, Any], got: Mapping[str, Any]) -> float | None:
    """The least signal to noise of the comparable outputs; None if there is none."""
    found = []
    for name, value in expected.items():
        a, b = np.asarray(value), np.asarray(got.get(name))
        if a.dtype.kind != "f" or a.shape != b.shape or not np.isfinite(a).all() or not a.any():
            continue
        found.append(sqnr_db(a, b) if np.isfinite(b).all() else -math.inf)
    return min(found, default=None)


def _warning(written: float | None, on_engine: float | None, engine: str) -> str:
    if written is not None and on_engine is not None and on_engine < min(FAULT_DB, written - FAULT_LOSS_DB):
        saturates = engine == "openvino" and sums_bytes_in_16_bits()
        return (
            f"{engine} computes something else than the file says: {on_engine:.1f} dB against float, the file itself "
            f"{written:.1f} dB; do not use it there as it is. {NO_VNNI if saturates else _TRY}"
        )
    if written is not None and written < LOW_DB:
        return (
            f"the quantized network is far from float ({written:.1f} dB); `python -m compress inspect parity --onnx "
            "FILE --data DATA --mend-sqnr 20` finds the layers that cost it, and the smallest change that helps"
        )
    return ""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of an ONNX model on disk, with external data, and of its initializers and constants."""

    file_bytes: int
    weight_bytes: int


def model_sizes(path: Path | str) -> Sizes:
    path, model = Path(path), load_onnx(path)
    tensors = list(_tensors(model))
    entries = (entry for tensor in tensors for entry in tensor.external_data if entry.key == "location")
    files = [path, *map(existing_file, sorted({path.parent / entry.value for entry in entries}))]
    return Sizes(file_bytes=sum(file.stat().st_size for file in files), weight_bytes=sum(map(_bytes, tensors)))


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    nodes = [*all_nodes(model.graph.node), *(one for each in model.functions for one in all_nodes(each.node))]
    for graph in (model.graph, *subgraphs(nodes)):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
    for node in nodes:
        yield from (own.t for own in node.attribute if node.op_type == "Constant" and own.HasField("t"))


def _bytes(tensor: onnx.TensorProto) -> int:
    if tensor.data_type == onnx.TensorProto.STRING:
        return sum(map(len, tensor.string_data))
    import onnx_ir  # lazy: half a second, and most comparisons are of networks in memory

    return math.ceil(math.prod(tensor.dims) * onnx_ir.DataType(tensor.data_type).itemsize)
