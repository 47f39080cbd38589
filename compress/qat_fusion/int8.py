"""Training on INT8 tensor cores: convolutions of a fused graph read and write codes; the gradient is the float one."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn

from compress.graph.ops import node_kind
from compress.kernels.triton.conv_int8 import Geometry, Layer, codes_of, convolve, stem_fits
from compress.kernels.triton.launch import HAS_TRITON
from compress.qat_fusion.chain import codes_of_weight, is_live, is_plain, weight_dtype
from compress.quantization.numerics import QuantFormat
from compress.quantization.quantizer import QuantConv2d, Quantizer

Forward = Literal["float", "int8"]

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_CHANNELS = 16  # channel counts of the kernel are its multiples
_LARGEST = 2**30  # elements: with those of a rearranged stem, indices have 32 bits


class CodesChain(nn.Module):
    """A fused chain that begins at a convolution, computed on codes if it gets them, else by `chain`."""

    is_quantizer = True

    def __init__(self, chain: nn.Module, x_quantizer: Quantizer, residual_quantizer: Quantizer | None) -> None:
        super().__init__()
        self.chain = chain
        self.quantizers = (x_quantizer, residual_quantizer)  # not registered: other modules of the graph own them
        self.emits = False  # whether the codes have a consumer

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        weight: Tensor | None = None,
        codes: Tensor | None = None,
        residual_codes: Tensor | None = None,
        weight_codes: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(The quantized result, its codes (int8) or None = unknown)."""
        chain: Any = self.chain
        layer, quantizer = chain.layer, chain.quantizer
        by_weight = layer.weight_quantizer
        if codes is None or not (_runs_on(x) and self._counts(x) and is_live(quantizer) and is_live(by_weight)):
            return chain(x, residual, weight), None
        if weight is None or weight_codes is None:
            raw = layer.weight
            weight = by_weight(raw) if weight is None else weight
            weight_codes = codes_by_torch(raw.detach(), by_weight.amax, by_weight.format)
        of_x, of_residual = self.quantizers
        of_added = quantizer if of_residual is None else of_residual
        dtype = weight_dtype(x)
        of = Layer(
            geometry=Geometry(layer.stride, layer.padding, layer.dilation),
            stem=weight.shape[1] < _CHANNELS,
            highs=(of_x.format.high, by_weight.format.high, of_added.format.high),
            epilogue=chain.epilogue,
            window=chain.window,
            emits=self.emits,
        )
        value, found = convolve(
            x.to(dtype),
            weight.to(dtype),
            layer.bias,
            residual,
            codes,
            weight_codes,
            residual_codes,
            of_x.amax,
            by_weight.amax,
            of_added.amax,
            quantizer.amax,
            of,
        )
        return value, found if self.emits else None

    def _counts(self, x: Tensor) -> bool:
        """True if indices of 32 bits suffice for the tensor that is pooled."""
        chain: Any = self.chain
        pixels = x.numel() // x.shape[1] // math.prod(chain.layer.stride)
        return chain.window is None or pixels * int(chain.layer.out_channels) < _LARGEST


class CodesOf(nn.Module):
    """The exact codes of quantized values; None while the quantizer is off or where the kernels do not run."""

    def __init__(self, quantizer: Quantizer) -> None:
        super().__init__()
        self.quantizers = (quantizer,)  # not registered: another module of the graph owns it

    def forward(self, value: Tensor) -> Tensor | None:
        (quantizer,) = self.quantizers
        if not (_runs_on(value) and is_live(quantizer)):
            return None
        if torch.compiler.is_compiling():
            return codes_by_torch(value.detach(), quantizer.amax, quantizer.format)
        return codes_of(value.detach(), quantizer.amax, quantizer.format.high)


def codes_by_torch(x: Tensor, amax: Tensor, quant_format: QuantFormat) -> Tensor:
    """The integers that `fake_quantize` rounds `x` to, int8; signed, with one range or one per row."""
    scale = amax / quant_format.high
    scale = scale if quant_format.axis is None else scale.reshape(-1, *(1,) * (x.dim() - 1))
    return torch.round(x.float() / scale).clamp(quant_format.low, quant_format.high).to(torch.int8)


def carry_codes(graph_module: fx.GraphModule, chains: Mapping[fx.Node, Any]) -> set[Quantizer]:
    """Make convolutions of a fused graph read and write codes where they can; return their quantizers."""
    carrier = _Carrier(graph_module, chains)
    for node, chain in chains.items():
        carrier.visit(node, chain)
    return {chains[node].quantizer for node in carrier.coded}


class _Carrier:
    def __init__(self, graph_module: fx.GraphModule, chains: Mapping[fx.Node, Any]) -> None:
        self._module, self._graph, self._chains = graph_module, graph_module.graph, chains
        self._values: dict[fx.Node, fx.Node] = {}  # a value's node -> that of the chain on codes that gives it
        self._codes: dict[fx.Node, fx.Node] = {}  # a value's node -> that of its codes
        self.coded: dict[fx.Node, CodesChain] = {}

    def visit(self, node: fx.Node, chain: Any) -> None:
        x, *rest = cast("tuple[fx.Node, ...]", node.args)
        of_x = self._quantizer_of(x)
        if of_x is None or chain.smooth or not _is_int8(chain.quantizer) or not _reads_codes(chain.layer):
            return
        known = [added for added in rest if added in self._values or added in self._codes]
        module = CodesChain(chain, of_x, self._quantizer_of(known[0]) if known else None)
        node.kwargs = {
            **node.kwargs,
            "codes": self._codes_of(x, of_x),
            "residual_codes": self._codes_of(known[0], of_x) if known else None,
            "weight_codes": codes_of_weight(self._module, node),
        }
        self._module.add_submodule(f"coded_chains.{node.name}", module)
        node.target = f"coded_chains.{node.name}"
        value = self._item(node, 0)
        node.replace_all_uses_with(value, delete_user_cb=lambda user: user is not value)
        self._values[value] = node
        self.coded[node] = module

    def _quantizer_of(self, node: fx.Node) -> Quantizer | None:
        while node_kind(node) == "max_pool" and "return_indices" not in node.kwargs:
            node = node.all_input_nodes[0]
        chain = self._chains.get(self._values.get(node, node))
        return chain.quantizer if chain is not None and _is_int8(chain.quantizer) else None

    def _codes_of(self, value: fx.Node, quantizer: Quantizer) -> fx.Node:
        """The node of the codes of a value, created at its first use."""
        if value in self._codes:
            return self._codes[value]
        source = self._values.get(value)
        if source is not None:
            self.coded[source].emits = True
            self._codes[value] = self._item(source, 1)
        else:
            name = f"codes.{value.name}"
            self._module.add_submodule(name, CodesOf(quantizer))
            with self._graph.inserting_after(value):
                self._codes[value] = self._graph.call_module(name, (value,))
        return self._codes[value]

    def _item(self, node: fx.Node, index: int) -> fx.Node:
        with self._graph.inserting_after(node):
            return self._graph.call_function(operator.getitem, (node, index))


def _is_int8(quantizer: Quantizer) -> bool:
    return is_plain(quantizer) and quantizer.format.signed and quantizer.format.axis is None


def _reads_codes(layer: nn.Module | None) -> bool:
    if not isinstance(layer, QuantConv2d) or layer.groups != 1 or isinstance(layer.padding, str):
        return False
    by_weight = layer.weight_quantizer
    if not is_plain(by_weight) or not by_weight.format.signed or by_weight.format.axis != 0:
        return False
    weight = layer.weight
    stem = stem_fits(weight, *(cast("tuple[int, int]", pair) for pair in (layer.stride, layer.padding, layer.dilation)))
    whole = weight.shape[0] % _CHANNELS == 0 and (stem or weight.shape[1] % _CHANNELS == 0)
    return whole and layer.padding_mode == "zeros"


def _runs_on(x: Tensor) -> bool:
    there = (x.is_cuda and HAS_TRITON) or (_INTERPRETED and not torch.compiler.is_compiling())
    laid_out = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return there and laid_out and x.dtype in _FLOATS and 0 < x.numel() < _LARGEST
