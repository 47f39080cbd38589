"""Methods beyond calibration on files: they work on the file as a torch network, and its parameters come back.

They change weights, biases, factors of norms, and ReLU6 to ReLU, so that the file keeps its own graph.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper
from torch import Tensor

from compress.engines.base import Arrays
from compress.export.names import added_tensor
from compress.onnx_ptq.index import Index
from compress.onnx_ptq.load import SourceFile
from compress.onnx_ptq.run import inputs_of_file
from compress.onnx_ptq.to_torch.builder import Place
from compress.onnx_ptq.to_torch.network import Converted, converted
from compress.quantization.placement.insert import float_graph
from compress.quantization.ptq.guard import kept
from compress.quantization.ptq.improve import smoothed
from compress.quantization.ptq.quantize import quantize
from compress.quantization.report import quantization_report_of
from compress.quantization.spec import QuantSpec, Rule
from compress.support.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Improved:
    """Result of the methods beyond calibration.

    Attributes:
        later: parameters that make up for rounding, (place, value); ranges are calibrated without them.
        notes: what was done, and what was taken back.
    """

    later: tuple[tuple[Place, Tensor], ...] = ()
    notes: tuple[str, ...] = ()

    def finish(self, index: Index) -> None:
        for place, value in self.later:
            write_parameter(index, place, value)


def improve_file(
    source: SourceFile, batches: list[Arrays], spec: QuantSpec, *, progress: Progress | None = None
) -> Improved:
    """Apply the methods of a specification to the parameters of a float file in canonical form; in place.

    Equalization, smoothing and ReLU instead of ReLU6 are written at once. AdaRound and bias correction belong to the
    quantized network: the caller writes them when the ranges are calibrated.

    Raises:
        ModelError: the file cannot become a torch network; names the operator.
        QuantizationError: a method finds nothing to work on.
    """
    made, order = converted(source, batches[0]), [tensor.name for tensor in inputs_of_file(source)]
    data = [tensors_of_feed(feed, order) for feed in batches]
    auto: dict[str, Any] = {name: None for name in ("smooth", "bias_correction") if getattr(spec, name) == "auto"}
    own = for_network(replace(spec, **auto), made, Index(source))  # they are of the file itself
    qmodel = quantize(made.network, data[0], data, spec=own, progress=progress)
    ready, _ = smoothed(made.network, data[0], data, kept(qmodel, own))
    rescaled, prepared = float_graph(ready, data[0], replace(kept(qmodel, own), bias_correction=None))
    index, later = Index(source), []
    for path, places in made.places.items():
        before, between, after = (net.get_submodule(path) for net in (made.network, rescaled, qmodel))
        for name, place in places.items():
            old, middle, new = (getattr(layer, name, None) for layer in (before, between, after))
            if not isinstance(new, Tensor):
                continue
            middle = torch.zeros_like(new) if middle is None else middle
            if old is None or not torch.equal(old, middle):
                place = write_parameter(index, place, middle.detach())
            if not torch.equal(middle, new):
                later.append((place, new.detach()))
    replaced = {made.origin[name] for name in prepared.relu6}
    for node in index.graph.node:
        if replaced.intersection(node.output):
            node.op_type = "Relu"
            del node.input[1:]
            del node.attribute[:]
    return Improved(later=tuple(later), notes=tuple(quantization_report_of(qmodel).notes()))


def tensors_of_feed(feed: Arrays, order: Iterable[str]) -> tuple[Tensor, ...]:
    """Return the inputs of a batch in the order of the file, floats in float32."""
    found = [torch.from_numpy(np.asarray(feed[name])) for name in order]
    return tuple(x.float() if x.is_floating_point() else x for x in found)


def for_network(spec: QuantSpec, made: Converted, index: Index) -> QuantSpec:
    """Return a specification whose rules match the operations of the network that the file's rules match."""
    names = file_names(made, index)
    rules: list[Rule] = []
    for rule in spec.rules:
        matched = [own for own, name in names.items() if fnmatch.fnmatchcase(name, rule.match)]
        rules += [replace(rule, match=own) for own in matched] or [rule]
    return replace(spec, rules=tuple(rules))


def file_names(made: Converted, index: Index) -> dict[str, str]:
    """Return the name of the file's node by that of the network's operation: a layer's path, or a node's name."""
    found = {path: name for name, path in made.path.items()}
    for node in made.network.graph.nodes:
        producer = index.producers.get(made.origin.get(node.name, ""))
        if producer is not None and node.op != "call_module":
            found[node.name] = producer.name
    return found


def write_parameter(index: Index, place: Place, value: Tensor) -> Place:
    """Give a node of the file a parameter of its own, and return the place where it is now."""
    node = next(node for node in index.graph.node if node.name == place.node)
    reads = node.input[place.input] if place.input < len(node.input) else ""
    like = index.value(reads if reads else node.input[1])
    array: NDArray[Any] = (value.T if place.transposed and value.dim() == 2 else value).contiguous().numpy()
    if reads and like is not None and like.size == array.size:
        array = array.reshape(like.shape)
    wanted = added_tensor(node.output[0], f"improved_{place.input}")
    name = index.add_constant(wanted, array.astype(np.float32 if like is None else like.dtype))
    if place.input < len(node.input):
        node.input[place.input] = name
    elif node.op_type == "MatMul":
        return _added_after(index, node, name)
    else:
        node.input.append(name)
    return place


def _added_after(index: Index, node: onnx.NodeProto, bias: str) -> Place:
    result = node.output[0]
    node.output[0] = index.free(added_tensor(result, "product"))
    add = helper.make_node("Add", [node.output[0], bias], [result], name=added_tensor(node.name, "bias"))
    index.replace_nodes(
        part for old in list(index.graph.node) for part in ((old, add) if old.name == node.name else (old,))
    )
    return Place(node=add.name, input=1)
