"""What torch does to a file: methods beyond calibration, and fine-tuning, come back into the file's own graph.

Weights, biases and factors of norms change, and ReLU6 becomes ReLU. `Trained` is a network that was fine-tuned with
quantizers (`quantize(from_onnx(file), ...)`).
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import helper
from torch import Tensor, nn

from compress.engines.base import Arrays
from compress.errors import ModelError, QuantizationError
from compress.export.names import added_tensor
from compress.onnx_ptq.index import Index
from compress.onnx_ptq.load import SourceFile
from compress.onnx_ptq.run import inputs_of_file
from compress.onnx_ptq.to_torch import Converted, Place, compare_network, converted
from compress.quantization import QuantSpec, Rule
from compress.quantization.placement.decisions import ActivationSite, Placement
from compress.quantization.placement.insert import float_graph
from compress.quantization.ptq.improve import kept, smoothed
from compress.quantization.ptq.quantize import quantize
from compress.quantization.quantizer import Quantizer, quantizers
from compress.quantization.report import CalibrationReport, placement_of, quantization_report_of
from compress.support.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Improved:
    """Result of the methods beyond calibration.

    `later` are parameters that make up for rounding: ranges are calibrated without them.
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


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A fine-tuned network with quantizers, and `made`, the file that holds its parameters now as a torch network."""

    network: nn.Module
    made: Converted

    def lowest(self) -> dict[str, float]:
        """Return the values that tensors of the file are not expected below, which images showed before."""
        sites = placement_of(self.network).activations
        found = {name: self._quantizer(site.name).format.lowest for site in sites for name in _tensors(site, self.made)}
        return {name: least for name, least in found.items() if least}

    def ranges(self, placement: Placement) -> CalibrationReport:
        """Return the ranges of the network's quantizers under the names of the file's."""
        own = {_tensors(site, self.made): site for site in placement_of(self.network).activations}
        amax: dict[str, Tensor] = {}
        for site in placement.activations:
            trained = own.pop(frozenset(tensor for tensor, _ in site.edges), None)
            if trained is None or self._quantizer(trained.name).format != site.format:
                raise _other_placement(site.name)
            amax[site.name] = self._amax(trained.name)
        if own:
            raise _other_placement(next(iter(own.values())).name)
        formats = {site.path: site.format for site in placement_of(self.network).weights}
        for weight in placement.weights:
            path = self.made.path.get(weight.path, weight.path)
            if formats.pop(path, None) != weight.format:
                raise _other_placement(weight.path)
            amax[f"{weight.path}.weight_quantizer"] = self._amax(f"{path}.weight_quantizer")
        if formats:
            raise _other_placement(next(iter(formats)))
        seen = quantization_report_of(self.network).calibration
        return CalibrationReport(images=seen.images if seen else 0, amax=amax, histograms={})

    def _amax(self, path: str) -> Tensor:
        return self._quantizer(path).amax.detach().float().cpu()

    def _quantizer(self, path: str) -> Quantizer:
        found = self.network.get_submodule(path)
        if not isinstance(found, Quantizer):
            raise _other_placement(path)
        return found


def write_trained(source: SourceFile, network: nn.Module, feed: Arrays) -> Trained:
    """Write the parameters of a fine-tuned network into the file that it came from; in place.

    The float file is in canonical form, and is compared with the network on a batch, `feed`.
    """
    placement_of(network)
    network = copy.deepcopy(network).cpu().eval()
    made = converted(source, feed)
    index = Index(source)
    for path, places in made.places.items():
        for name, place in places.items():
            old, new = (_parameter(model, path, name) for model in (made.network, network))
            if new is not None and (old is None or not torch.equal(old, new)):
                if old is not None and old.shape != new.shape:
                    raise _not_of(source, f"{path}.{name} has the shape {tuple(new.shape)}, there {tuple(old.shape)}")
                write_parameter(index, place, new)
    _compare_float(source, network, feed)
    return Trained(network=network, made=made)


def _parameter(network: nn.Module, path: str, name: str) -> Tensor | None:
    try:
        value = getattr(network.get_submodule(path), name, None)
    except AttributeError:
        return None
    return value.detach().float() if isinstance(value, Tensor) else None


def _compare_float(source: SourceFile, network: nn.Module, feed: Arrays) -> None:
    """Refuse a network that computes something else without its quantizers than the file with its parameters."""
    plain = copy.deepcopy(network)
    for _, quantizer in quantizers(plain):
        quantizer.enabled = False
    try:
        compare_network(source, plain, feed)
    except ModelError as error:
        raise _not_of(
            source, f"its parameters in the file do not compute what it does without quantizers: {error}"
        ) from None


def _tensors(site: ActivationSite, made: Converted) -> frozenset[str]:
    return frozenset(made.origin.get(tensor, tensor) for tensor, _ in site.edges)


def _not_of(source: SourceFile, text: str) -> QuantizationError:
    return QuantizationError(
        f"the trained network cannot be written into {source.path}: {text}. Train the network that "
        "compress.from_onnx(file) returns, quantized by compress.quantize without methods that change what it computes"
    )


def _other_placement(name: str) -> QuantizationError:
    return QuantizationError(
        f"the trained network and the specification differ at quantizer {name!r}: one of them has none there, or of "
        "another format. Give the specification that the network was quantized with"
    )
