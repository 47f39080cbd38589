"""A network that was fine-tuned with quantizers (`quantize(from_onnx(file), ...)`), back in the file's own graph."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.engines.base import Arrays
from compress.errors import ModelError, QuantizationError
from compress.onnx_ptq.improve import write_parameter
from compress.onnx_ptq.index import Index
from compress.onnx_ptq.load import SourceFile
from compress.onnx_ptq.to_torch.network import Converted, compare_network, converted
from compress.quantization.placement.decisions import ActivationSite, Placement
from compress.quantization.quantizer import Quantizer, quantizers
from compress.quantization.report import CalibrationReport, placement_of, quantization_report_of


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
        """Return the ranges of the network's quantizers under the names of the file's.

        Raises:
            QuantizationError: the placement is another one than the network's.
        """
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

    Raises:
        ModelError: the file cannot become a torch network.
        QuantizationError: the network was not quantized, is not of this file, or has changes that the file cannot hold.
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
