"""ONNX files with Q/DQ as PT2E programs and back, and as files for ExecuTorch and Core ML, with the same integers.

PT2E is torch's form of quantized networks (`torch.export` with operators of `quantized_decomposed`); its backends fuse
a layer only between pairs of its own, so pairs are repeated where the ONNX file has one for several operators.
"""

from __future__ import annotations

import json
import operator
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import onnx
import torch
from torch import Tensor, fx, nn

from compress.data.base import Preprocessing
from compress.engines import coreml
from compress.engines.base import TensorInfo
from compress.engines.executorch import INFORMATION, imported, run_program
from compress.errors import ExportError
from compress.export.names import PREPROCESSING_KEY, input_names, output_names
from compress.export.onnx import export_onnx, looked_up_once, quiet
from compress.export.targets import clean, finish_for
from compress.graph.compare import alone
from compress.graph.inputs import Inputs, flat_tensors, named_tensors
from compress.onnx_graph import OnnxGraph, attribute, replacing_model, write_model
from compress.onnx_ptq.canonical import canonical
from compress.onnx_ptq.source import FloatSession, Index, SourceFile, inputs_of_file, load_source
from compress.onnx_ptq.to_torch import OPSET, Place, network_of, random_feed
from compress.quantization.numerics import QuantFormat
from compress.quantization.quantizer import quantized_layer
from compress.quantization.sensitivity import sqnr
from compress.support.libraries import library_errors

_QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"
_DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.default"
_DEQUANTIZE_WEIGHT = "quantized_decomposed.dequantize_per_channel.default"
_PAIR_LIBRARIES = ("quantized_decomposed.", "torchao.")
_READ = frozenset({_QUANTIZE, _DEQUANTIZE, _DEQUANTIZE_WEIGHT, _DEQUANTIZE_WEIGHT.replace("dequantize", "quantize")})
_LAYERS = frozenset(f"aten.{name}" for name in ("conv1d", "conv2d", "conv3d", "conv_transpose2d", "linear"))
# Activations that a backend fuses into the layer before them.
_BOUNDED = frozenset({"aten.relu", "aten.hardtanh", "aten.relu6", "aten.clamp"})
# Operators whose results hold only numbers of their input, or 0.
_MOVES = frozenset(
    f"aten.{name}"
    for name in [
        "view",
        "reshape",
        "flatten",
        "permute",
        "transpose",
        "t",
        "select",
        "slice",
        "squeeze",
        "unsqueeze",
        "expand",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "max_pool2d",
        "dropout",
        "clone",
        "contiguous",
        "pixel_shuffle",
        "upsample_nearest2d",
        "index_select",
        "relu",
        "alias",
    ]
)
# Further arguments of a padding by 0, which every grid has.
_PADS = ((), ("constant",), ("constant", None), ("constant", 0.0))
# Below this signal to noise a file computes something else; random deep networks have 15 or more.
_LOWEST_DB = 5.0


@alone
def to_pt2e(
    model: nn.Module | Path | str, example_inputs: Inputs | None = None, *, batch_size: int = 1
) -> torch.export.ExportedProgram:
    """Return a network as a PT2E program with the scales, zero points and integers of its ONNX file.

    Args:
        model: quantized by compress, best for `target: litert`, or float; or an ONNX file of `export_onnx` or
            `quantize_onnx`.
        example_inputs: of a module: a tensor, or a sequence or mapping of tensors; their batch is the program's.
        batch_size: of a file with an open batch; all sizes of the program are fixed.

    Returns:
        A program of ATen operators and `quantized_decomposed` pairs, signed, one for each reader.

    Raises:
        AuditError: the file is missing, truncated or not valid ONNX.
        ModelError: an operator has no counterpart, which the message names.
        ExportError: torch cannot export it, a module is given without inputs, or the program computes something else.

    Examples:
        >>> qmodel = compress.quantize(model, images[:1], batches, spec=compress.QuantSpec(target="litert"))
        >>> program = compress.to_pt2e(qmodel, images[:2])
        >>> program.module()(images[:2]).shape
        torch.Size([2, 4])
    """
    if isinstance(model, nn.Module):
        if example_inputs is None:
            raise ExportError("to_pt2e of a module needs example_inputs, which it is exported with")
        with tempfile.TemporaryDirectory() as folder:
            return to_pt2e(export_onnx(model, example_inputs, Path(folder, "model.onnx"), dynamic_batch=False))
    return _program(load_source(model, quantized=True), batch_size)[0]


def _program(
    source: SourceFile,
    batch_size: int,
    *,
    pairs_only: bool = True,
    half: bool = False,
    pixels: Preprocessing | None = None,
) -> tuple[torch.export.ExportedProgram, tuple[Tensor, ...], list[Any]]:
    """Return the program of a file, random inputs, and its outputs for them.

    `pairs_only` leaves float weights where a layer has no pair before or after it, `half` rounds scales to float16,
    and with `pixels` the program normalizes its only input, pixels from 0 to 255, itself.
    """
    import torch.ao.quantization.fx._decomposed  # lazy: registers the operators of PT2E

    file, source = source.path, canonical(source, opset=OPSET)[0]
    feed = random_feed(source, batch_size=batch_size, refusal=_without_size)
    found = network_of(source, feed)
    network: nn.Module = found.network.eval()
    index = Index(source)
    nodes = {node.name: node for node in source.proto.graph.node}
    for path, places in found.places.items():
        weight = _integers(index, nodes[places["weight"].node], places["weight"]) if "weight" in places else None
        if weight is not None:
            layer: Any = quantized_layer(network.get_submodule(path), QuantFormat(), name=path)
            layer.weight_quantizer = weight
            network.set_submodule(path, layer)
    inputs = tuple(torch.from_numpy(np.asarray(value)) for value in feed.values())
    if pixels is not None:
        inputs = (torch.randint(256, inputs[0].shape, generator=torch.Generator().manual_seed(0)).float(),)
        feed = dict.fromkeys(feed, pixels.normalize(inputs[0] / 255).numpy())
        network = _FromPixels(network, pixels)
    program = _exported(file, network, inputs)
    apart = _not_whole(program) if pairs_only else []
    if apart:
        for path in apart:
            cast(Any, network.get_submodule(path)).weight_quantizer = nn.Identity()
        program = _exported(file, network, inputs)
    _one_reader_each(program.graph)
    if half:
        _round_scales(program)
    program.graph.lint()
    program.graph_module.recompile()
    names = [value.name for value in source.proto.graph.output]
    expected = FloatSession(source, names).run(feed)
    with torch.no_grad():
        found_here = [value.numpy() for value in flat_tensors(program.module()(*inputs))]
    _compare(file, [expected[name] for name in names], found_here, "as a PT2E program")
    return program, inputs, found_here


@alone
def from_pt2e(program: torch.export.ExportedProgram, path: Path | str) -> Path:
    """Write a program quantized by PT2E, as with XNNPACKQuantizer, as ONNX with its scales and integers.

    Args:
        program: exported from the result of `convert_pt2e`.
        path: file to write, whole or not at all.

    Raises:
        ExportError: nothing is quantized, or ranges are found at run time; an operator has no form in ONNX, or the file
            computes something else.

    Examples:
        >>> program = compress.to_pt2e("int8.onnx")
        >>> print(compress.from_pt2e(program, "again.onnx"))
        again.onnx
    """
    import torch.ao.quantization.fx._decomposed  # lazy: registers the operators of PT2E

    _check_pairs(program)
    given, named = program.example_inputs or ((), {})
    with library_errors(ExportError, "the program does not run on its example inputs: "), torch.no_grad():
        result = program.module()(*given, **named)
    inputs = flat_tensors((given, named))
    names = input_names(len(inputs))
    results = output_names([key for key, _ in named_tensors(result)], taken=names)
    with library_errors(ExportError, "torch.onnx cannot export the program: "), quiet(), looked_up_once():
        exported: Any = torch.onnx.export(
            program, dynamo=True, opset_version=19, input_names=names, output_names=results, verbose=False
        )
    proto = exported.model_proto
    clean(proto)
    finish_for(proto, "litert")
    proto.producer_name, proto.producer_version = "compress", ""
    with replacing_model(path) as temporary:
        temporary.write_bytes(proto.SerializeToString())
        feed = {name: value.detach().numpy() for name, value in zip(names, inputs, strict=True)}
        found = FloatSession(load_source(temporary, quantized=True), results).run(feed)
        wanted = [value.detach().numpy() for value in flat_tensors(result)]
        _compare(Path(path), wanted, [found[name] for name in results], "of the program")
    return Path(path)


def _check_pairs(program: torch.export.ExportedProgram) -> None:
    """Refuse a program without pairs, or with some that ONNX lacks."""
    nodes = program.graph.nodes if isinstance(program, torch.export.ExportedProgram) else ()
    called = {node: str(node.target) for node in nodes if node.op == "call_function"}
    quantizing = {node: name for node, name in called.items() if name.startswith(_PAIR_LIBRARIES)}
    if not quantizing:
        raise ExportError("the program has no pair of quantized_decomposed: give what convert_pt2e returned, exported")
    for node, name in quantizing.items():
        if name not in _READ:
            raise ExportError(
                f"{node.name} is {name}: pairs with fixed ranges for a tensor or for each channel are read; "
                "quantize with is_dynamic=False, and weights of 8 bits"
            )
        limits = torch.iinfo(node.args[5]) if name == _QUANTIZE else None
        if limits is not None and node.args[3:5] != (limits.min, limits.max):
            raise ExportError(
                f"{node.name} rounds to integers from {node.args[3]} to {node.args[4]}, and ONNX's QuantizeLinear to "
                f"all of {node.args[5]}: give the quantizer of activations the whole range"
            )


@alone
def export_executorch(file: Path | str, path: Path | str, *, batch_size: int = 1) -> Path:
    """Write an ONNX file as an ExecuTorch file for XNNPACK, with its own scales, zero points and integers.

    Args:
        file: what `export_onnx` or `quantize_onnx` wrote, best for `target: litert`; float or with Q/DQ.
        path: the .pte file; whole or not at all.
        batch_size: of an open batch; the file has fixed shapes.

    Returns:
        `path`. Names of inputs and outputs and the metadata are those of the ONNX file, in its method `information`.

    Raises:
        EngineUnavailableError: ExecuTorch is not installed.
        ExportError: ExecuTorch has no operator for a node, or runs the file wrong; and all that `to_pt2e` raises.

    Examples:
        >>> print(compress.export_executorch("int8.onnx", "int8.pte"))  # doctest: +SKIP
        int8.pte
    """
    lower = imported("executorch.exir").to_edge_transform_and_lower
    partitioner = imported("executorch.backends.xnnpack.partition.xnnpack_partitioner").XnnpackPartitioner
    imported("executorch.kernels.quantized")  # pairs outside XNNPACK
    source = _source_of_8_bits(file, "XNNPACK")
    program, inputs, expected = _program(source, batch_size)
    information = {
        "inputs": [tensor.name for tensor in inputs_of_file(source)],
        "outputs": [value.name for value in source.proto.graph.output],
        "metadata": {entry.key: entry.value for entry in source.proto.metadata_props},
    }
    written = torch.frombuffer(bytearray(json.dumps(information).encode()), dtype=torch.uint8)
    with library_errors(ExportError, f"{file}: ExecuTorch does not take it: "), looked_up_once():
        edge = lower(program, partitioner=[partitioner()], constant_methods={INFORMATION: written})
        content = edge.to_executorch().buffer
    with library_errors(ExportError, f"{file}: ExecuTorch does not run what it made of it: "):
        found = run_program(content, inputs)
    _compare(source.path, expected, found, "as an ExecuTorch file")
    return write_model(path, content)


@alone
def export_coreml(
    file: Path | str, path: Path | str, *, batch_size: int = 1, precision: Literal["fp16", "fp32"] = "fp16"
) -> Path:
    """Write an ONNX file as a Core ML package (iOS 17, macOS 14), with its own scales, zero points and integers.

    Nothing runs it on this system: it is compared as a program, before coremltools writes it.

    Args:
        file: as for `export_executorch`.
        path: the .mlpackage, a folder; whole or not at all.
        batch_size: of an open batch; the package has fixed shapes.
        precision: of what is computed between integers. The Neural Engine takes `fp16` alone, in which scales are
            rounded to float16.

    Returns:
        `path`. Names (`_` for what is no letter) and metadata are the file's. With the preprocessing of RGB images in
        the metadata the input is an image, normalized inside.

    Raises:
        EngineUnavailableError: coremltools is not installed.
        ExportError: coremltools has no operator for a node, or scales in float16 compute something else; and all that
            `to_pt2e` raises.

    Examples:
        >>> print(compress.export_coreml("int8.onnx", "int8.mlpackage"))  # doctest: +SKIP
        int8.mlpackage
    """
    path = Path(path)
    if path.suffix != ".mlpackage" or (path.exists() and not (path / "Manifest.json").is_file()):
        raise ExportError(f"{path} is no name for a Core ML package, or is there and is none: give NAME.mlpackage")
    ct = coreml.library()
    source = _source_of_8_bits(file, "Core ML")
    metadata = {entry.key: entry.value for entry in source.proto.metadata_props}
    names = [_identifier(tensor.name) for tensor in inputs_of_file(source)]
    pixels = Preprocessing.from_json(metadata[PREPROCESSING_KEY]) if PREPROCESSING_KEY in metadata else None
    if pixels is not None and (batch_size > 1 or len(names) > 1 or pixels.channels != "RGB"):
        pixels = None
    program, inputs, _ = _program(source, batch_size, pairs_only=False, half=precision == "fp16", pixels=pixels)
    kind = ct.TensorType if pixels is None else ct.ImageType
    given = [kind(name=name, shape=tuple(value.shape)) for name, value in zip(names, inputs, strict=True)]
    passes = ct.PassPipeline.DEFAULT
    passes.remove_passes(["common::distributive_quantized_binary_op_scale_normalization"])  # it changes scales of sums
    with library_errors(ExportError, f"{file}: coremltools does not take it: "), quiet():
        model = ct.convert(
            program.run_decompositions({}),
            inputs=given,
            minimum_deployment_target=ct.target.iOS17,
            compute_precision=ct.precision.FLOAT16 if precision == "fp16" else ct.precision.FLOAT32,
            pass_pipeline=passes,
            skip_model_load=True,
        )
        spec = model.get_spec()
        for output, value in zip(list(spec.description.output), source.proto.graph.output, strict=True):
            ct.utils.rename_feature(spec, output.name, _identifier(value.name), rename_inputs=False)
        spec.description.metadata.userDefined.update(metadata)
        _save_package(ct.models.MLModel(spec, weights_dir=model.weights_dir, skip_model_load=True), path)
    return path


def _identifier(name: str) -> str:
    return re.sub(r"^(?=\d)|\W", "_", name, flags=re.ASCII)


def _save_package(model: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".", suffix=".part") as folder:
        whole = Path(folder, "new.mlpackage")
        model.save(str(whole))
        if path.exists():
            path.rename(Path(folder, "old.mlpackage"))
        whole.rename(path)


def _source_of_8_bits(file: Path | str, engine: str) -> SourceFile:
    source = load_source(file, quantized=True)
    view = OnnxGraph(source.proto.graph)
    wide = next((node.name for node in source.proto.graph.node if _is_wide(node, view)), "")
    if wide:
        raise ExportError(
            f"{file}: {wide} has 16 bits, and {engine} computes with 8: quantize with activations of 8 bits, or leave "
            "such layers float (enable: false); LiteRT and ONNX Runtime run this file"
        )
    return source


def _is_wide(node: onnx.NodeProto, view: OnnxGraph) -> bool:
    zero = view.array(node.input[2]) if node.op_type == "QuantizeLinear" and len(node.input) > 2 else None
    return zero is not None and zero.dtype.itemsize > 1


def _without_size(path: Path, tensor: TensorInfo) -> ExportError:
    return ExportError(
        f"{path}: input {tensor.name!r} has the shape {tensor.shape}: the program has fixed sizes; "
        "export the ONNX file for one image size"
    )


class _Weight(nn.Module):
    """Gives a layer the integers of the file, dequantized, in place of its float weight."""

    q: Tensor
    scale: Tensor
    zero: Tensor

    def __init__(self, q: Tensor, scale: Tensor, axis: int) -> None:
        super().__init__()
        self.axis, self.bounds = axis, (torch.iinfo(q.dtype).min, torch.iinfo(q.dtype).max)
        self.register_buffer("q", q)
        self.register_buffer("scale", scale)
        self.register_buffer("zero", torch.zeros(len(scale), dtype=torch.int64))

    def forward(self, weight: Tensor) -> Tensor:
        return torch.ops.quantized_decomposed.dequantize_per_channel.default(
            self.q, self.scale, self.zero, self.axis, *self.bounds, self.q.dtype
        )


class _FromPixels(nn.Module):
    """A network that normalizes its images itself."""

    factor: Tensor
    offset: Tensor

    def __init__(self, network: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.network = network
        mean, std = (torch.tensor(value).reshape(-1, 1, 1) for value in (preprocessing.mean, preprocessing.std))
        self.register_buffer("factor", 1 / (255 * std))
        self.register_buffer("offset", -mean / std)

    def forward(self, image: Tensor) -> Tensor:
        return self.network(image * self.factor + self.offset)


def _round_scales(program: torch.export.ExportedProgram) -> None:
    for node in program.graph.nodes:
        if str(node.target) in {_QUANTIZE, _DEQUANTIZE}:
            node.args = (node.args[0], float(np.float16(node.args[1])), *node.args[2:])
    for name, value in program.named_buffers():
        if name.endswith("weight_quantizer.scale"):
            value.copy_(value.half())


def _integers(index: Index, node: onnx.NodeProto, place: Place) -> _Weight | None:
    """Return the weight that a layer reads as symmetric integers; None for a float one."""
    pair, flipped = index.producers.get(node.input[place.input]), place.transposed
    if pair is not None and pair.op_type == "Transpose" and list(attribute(pair, "perm", [1, 0])) == [1, 0]:
        pair, flipped = index.producers.get(pair.input[0]), not flipped
    if pair is None or pair.op_type != "DequantizeLinear":
        return None
    q, scale, zero = (index.value(name) if name else None for name in [*pair.input, ""][:3])
    if q is None or scale is None or q.dtype != np.int8 or (zero is not None and zero.any()):
        return None
    axis = attribute(pair, "axis", 1) % q.ndim if scale.size > 1 else 0
    if flipped:
        q, axis = q.T, 1 - axis
    scale = np.broadcast_to(scale.reshape(-1), (q.shape[axis],)).astype(np.float32)
    return _Weight(torch.from_numpy(q.copy()), torch.from_numpy(scale.copy()), axis)


def _named(node: fx.Node) -> str:
    """Return the name of an operator without its overload, such as `aten.view`."""
    return str(node.target).rpartition(".")[0] if node.op == "call_function" else ""


def _pair_after_moves(graph: fx.Graph) -> None:
    """Repeat the pair before an operator that only moves numbers after it: they are on its grid already."""
    for node in list(graph.nodes):
        moved = node.args[0] if node.target is operator.getitem else node
        if not isinstance(moved, fx.Node):
            continue
        if _named(moved) in _MOVES or (_named(moved) == "aten.pad" and moved.args[2:] in _PADS):
            sources = [moved.args[0]]
        elif _named(moved) == "aten.cat":
            sources = list(moved.args[0])  # type: ignore[arg-type]
        else:
            continue
        if moved is node and any(user.target is operator.getitem for user in node.users):
            continue
        pairs = [source for source in sources if isinstance(source, fx.Node) and str(source.target) == _DEQUANTIZE]
        readers = [user for user in node.users if user.op != "output" and str(user.target) != _QUANTIZE]
        if not readers or len(pairs) != len(sources) or len({pair.args[1:] for pair in pairs}) > 1:
            continue
        quantize: Any = pairs[0].args[0]
        with graph.inserting_after(node):
            integers = graph.call_function(quantize.target, (node, *pairs[0].args[1:]))
        with graph.inserting_after(integers):
            again = graph.call_function(pairs[0].target, (integers, *pairs[0].args[1:]))  # type: ignore[arg-type]
        again.meta = dict(node.meta)
        integers.meta = {**node.meta, "val": node.meta["val"].to(pairs[0].args[-1])}
        for user in readers:
            user.replace_input_with(node, again)


def _exported(file: Path, network: nn.Module, inputs: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    with library_errors(ExportError, f"{file}: torch.export does not take it: "), torch.no_grad(), looked_up_once():
        program = torch.export.export(network, inputs)
    _pair_after_moves(program.graph)
    return program


def _not_whole(program: torch.export.ExportedProgram) -> list[str]:
    """Return the layers with integers that have no pair before or after them: XNNPACK computes such wrong (1.5)."""
    held, found = program.graph_signature.inputs_to_buffers, []
    for node in program.graph.nodes:
        if str(node.target) != _DEQUANTIZE_WEIGHT:
            continue
        for layer in node.users:
            last = layer
            while len(last.users) == 1 and _named(next(iter(last.users))) in _BOUNDED:
                last = next(iter(last.users))
            before = isinstance(layer.args[0], fx.Node) and str(layer.args[0].target) == _DEQUANTIZE
            after = bool(last.users) and all(str(user.target) == _QUANTIZE for user in last.users)
            if not (_named(layer) in _LAYERS and before and after):
                found.append(held[node.args[0].name].removesuffix(".weight_quantizer.q"))
    return found


def _one_reader_each(graph: fx.Graph) -> None:
    """Repeat a dequantization for each operator that reads it: a backend fuses those that nobody else reads."""
    for node in list(graph.nodes):
        if str(node.target) not in {_DEQUANTIZE, _DEQUANTIZE_WEIGHT}:
            continue
        for user in list(node.users)[1:]:
            with graph.inserting_before(user):
                user.replace_input_with(node, graph.node_copy(node))


def _compare(file: Path, expected: Iterable[Any], found: Iterable[Any], form: str) -> None:
    for wanted, got in zip(expected, found, strict=True):
        if not np.issubdtype(wanted.dtype, np.floating):
            continue
        quality = sqnr(torch.from_numpy(wanted), torch.from_numpy(got))
        if not quality >= _LOWEST_DB:
            raise ExportError(f"{file} {form} computes something else ({quality:.1f} dB): no file is written")
