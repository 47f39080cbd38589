"""Q/DQ nodes as the planner reads them: grids of 8-bit codes, and integer weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compress.engines.cuda.onnx_ops import apply
from compress.engines.cuda.plan.graph import QUANTIZERS, Graph, Node, without_dead
from compress.errors import EngineError

MOVES = frozenset({"Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Dropout"})
"""Operations of one input whose result holds the same values in another shape or order."""
TAKES = frozenset({"Slice", "Split", "Gather", "Expand", "Tile", "DepthToSpace", "SpaceToDepth"})
"""Operations whose results hold values of their first input, each any number of times."""


@dataclass(frozen=True)
class Grid:
    """Which integer a real value becomes: round(x / scale) + zero, limited to low ... high, within -128 and 127.

    Attributes:
        scale: one number, or one of each channel.
    """

    scale: tuple[float, ...]
    zero: int = 0
    low: int = -128
    high: int = 127

    def __post_init__(self) -> None:
        bad = [s for s in self.scale if not (np.isfinite(s) and s > 0)]
        if bad:
            raise EngineError(f"a scale of {bad[0]} is not positive and finite: calibrate the model again")


class QuantizedConstant(NamedTuple):
    """A weight as integers.

    Attributes:
        codes: int8, in the shape that its consumer reads.
        scale: one number, or one for each index along `axis`; float64.
        axis: None for one scale.
    """

    codes: Tensor
    scale: Tensor
    axis: int | None


@dataclass(frozen=True, kw_only=True)
class QuantizedGraph:
    """A graph whose Q/DQ nodes are resolved.

    Attributes:
        graph: with nodes `Quantize` and `Dequantize`, each with the attribute `grid`; codes are int8.
        weights: integer constants, by tensor.
    """

    graph: Graph
    weights: Mapping[str, QuantizedConstant]


def resolve_quantizers(graph: Graph) -> QuantizedGraph:
    """Turn QuantizeLinear and DequantizeLinear into `Quantize`, `Dequantize`, integer weights and constants.

    Raises:
        EngineError: a quantizer is not INT8, a scale is computed or not positive, or another node reads the integers.
    """
    weights: dict[str, QuantizedConstant] = {}
    constants = dict(graph.constants)
    nodes = []
    for node in graph.nodes:
        if node.op not in QUANTIZERS:
            moved = _moved_constant(node, weights)
            if moved is not None:
                weights[node.outputs[0]] = moved
            else:
                nodes.append(node)
            continue
        if node.op == "QuantizeLinear" and node.inputs[0] in constants:
            constants[node.outputs[0]] = _codes(graph, node, constants[node.inputs[0]])
            continue
        if node.op == "DequantizeLinear" and node.inputs[0] in constants:
            found = _constant(graph, node, constants[node.inputs[0]])
            if isinstance(found, QuantizedConstant):
                weights[node.outputs[0]] = found
            else:
                constants[node.outputs[0]] = found
            continue
        nodes.append(replace(node, op=node.op.removesuffix("Linear"), attributes={"grid": _grid(graph, node)}))
    dtypes = {**graph.dtypes, **{n.outputs[0]: torch.int8 for n in nodes if n.op == "Quantize"}}
    resolved = replace(graph, nodes=tuple(nodes), constants=constants, dtypes=dtypes)
    _check_codes(resolved)
    resolved = _fold_clips(resolved)
    kept = without_dead(resolved)
    used = {name for node in kept.nodes for name in node.inputs}
    return QuantizedGraph(graph=kept, weights={name: w for name, w in weights.items() if name in used})


def real_weight(weight: QuantizedConstant) -> Tensor:
    """The dequantized values of an integer weight, float32."""
    return (weight.codes.double() * along(weight.scale, weight.axis, weight.codes.dim())).float()


def along(vector: Tensor, axis: int | None, rank: int) -> Tensor:
    """A vector shaped to multiply a tensor of `rank` axes along `axis`; a single number as it is."""
    return vector if axis is None else vector.reshape([-1 if i == axis else 1 for i in range(rank)])


# Reading Q and DQ nodes -----------------------------------------------------------------------------------------------


def _parameters(graph: Graph, node: Node) -> tuple[Tensor, Tensor | None]:
    """(scale, zero point) of a Q or DQ node."""
    for name in node.inputs[1:]:
        if name and name not in graph.constants:
            raise EngineError(
                f"{node.name}: its {'scale' if name == node.inputs[1] else 'zero point'} is computed while the network "
                "runs (dynamic quantization): only static Q/DQ is supported; quantize with calibration"
            )
    zero = node.given(2)
    return graph.constants[node.inputs[1]], graph.constants[zero] if zero else None


def _type(graph: Graph, node: Node, zero: Tensor | None) -> torch.dtype:
    integers = node.outputs[0] if node.op == "QuantizeLinear" else node.inputs[0]
    dtype = graph.dtypes[integers] if zero is None else zero.dtype
    if dtype not in (torch.int8, torch.uint8):
        raise EngineError(
            f"{node.name}: it quantizes to {str(dtype).removeprefix('torch.')}: the cuda engine computes in INT8; "
            "quantize activations to 8 bits, or run the file with 'onnxruntime'"
        )
    return dtype


def _codes(graph: Graph, node: Node, values: Tensor) -> Tensor:
    """The integers of a constant that the file holds as values and quantizes."""
    scale, zero = _parameters(graph, node)
    dtype, axis = _type(graph, node, zero), int(node.attributes.get("axis", 1)) % max(values.dim(), 1)
    _check_blocks(node)
    Grid(tuple(scale.double().reshape(-1).tolist()))  # refuses scales that are none
    axis_of = None if scale.numel() == 1 else axis
    steps = values.float() / along(scale.float().reshape(-1), axis_of, values.dim())
    shift = 0.0 if zero is None else along(zero.float().reshape(-1), axis_of, values.dim())
    limits = torch.iinfo(dtype)
    return (steps.round() + shift).clamp(limits.min, limits.max).to(dtype)


def _check_blocks(node: Node) -> None:
    if node.attributes.get("block_size", 0):
        raise EngineError(
            f"{node.name}: a weight with a scale for each block is not supported; use one for a channel, or run the "
            "file with 'onnxruntime'"
        )


def _grid(graph: Graph, node: Node) -> Grid:
    scale, zero = _parameters(graph, node)
    dtype = _type(graph, node, zero)
    if scale.numel() != 1:
        raise EngineError(
            f"{node.name}: an activation with {scale.numel()} scales: the cuda engine takes one scale for a tensor of "
            "activations; quantize activations per tensor, or run the file with 'onnxruntime'"
        )
    number = 0 if zero is None else int(zero.reshape(-1)[0])
    return Grid((float(scale.double().reshape(-1)[0]),), number - 128 if dtype == torch.uint8 else number)


def _constant(graph: Graph, node: Node, codes: Tensor) -> QuantizedConstant | Tensor:
    """A dequantized constant: 8-bit integers, or real values (an INT32 bias)."""
    scale, zero = _parameters(graph, node)
    axis = None if scale.numel() == 1 else int(node.attributes.get("axis", 1)) % max(codes.dim(), 1)
    _check_blocks(node)
    flat = scale.double().reshape(-1)
    grid = Grid(tuple(flat.tolist()))  # refuses scales that are none
    offset = torch.zeros(1) if zero is None else zero.double().reshape(-1)
    offset = offset[:1] if axis is None else offset
    if codes.dtype == torch.uint8 and bool((offset == 128).all()):
        codes, offset = (codes.int() - 128).to(torch.int8), torch.zeros(1)
    vector = torch.tensor(grid.scale, dtype=torch.float64)
    vector = vector[0] if axis is None else vector
    if codes.dtype == torch.int8 and bool((offset == 0).all()):
        return QuantizedConstant(codes, vector, axis)
    shift = offset[0] if axis is None or offset.numel() == 1 else along(offset, axis, codes.dim())
    return ((codes.double() - shift) * along(vector, axis, codes.dim())).float()


def _moved_constant(node: Node, weights: Mapping[str, QuantizedConstant]) -> QuantizedConstant | None:
    weight = weights.get(node.given(0))
    if weight is None or node.op not in MOVES or (weight.axis is not None and node.op not in {"Transpose", "Identity"}):
        return None
    codes = apply(node.op, node.attributes, (weight.codes,))[0] if len(node.inputs) == 1 else None
    if codes is None:
        return None
    if weight.axis is None or node.op == "Identity":
        return weight._replace(codes=codes)
    order = list(node.attributes.get("perm", range(weight.codes.dim() - 1, -1, -1)))
    return QuantizedConstant(codes, weight.scale, order.index(weight.axis))


def _check_codes(graph: Graph) -> None:
    consumers, moving = graph.consumers(), MOVES | TAKES | {"Dequantize", "MaxPool", "Concat"}
    for node in graph.nodes:
        if node.op != "Quantize":
            continue
        name = node.outputs[0]
        readers = [reader for reader in consumers.get(name, []) if reader.op not in moving]
        if readers or name in graph.outputs:
            what = f"{readers[0].name} ({readers[0].op}) reads" if readers else "the network returns"
            raise EngineError(f"{what} the integers of {node.name}: only DequantizeLinear may read them")


def _fold_clips(graph: Graph) -> Graph:
    """A Clip before a Quantize that only narrows its integers (fewer than 8 bits) becomes the grid's limits."""
    producers, consumers = graph.producers(), graph.consumers()
    nodes = []
    for node in graph.nodes:
        clip = producers.get(node.inputs[0]) if node.op == "Quantize" else None
        bounds = None
        if clip is not None and clip.op == "Activation":
            bounds = clip.attributes["activation"]
        if clip is not None and bounds is not None and bounds.kind == "clip" and len(consumers[node.inputs[0]]) == 1:
            grid: Grid = node.attributes["grid"]
            steps = [bound / grid.scale[0] for bound in (bounds.lower, bounds.upper)]
            whole = [float(np.rint(s)) if np.isfinite(s) else s for s in steps]
            if all(abs(a - b) < 1e-3 or a == b for a, b in zip(steps, whole, strict=True)):
                low, high = max(grid.low, whole[0] + grid.zero), min(grid.high, whole[1] + grid.zero)
                narrowed = replace(grid, low=int(low), high=int(high))
                node = replace(
                    node, inputs=clip.inputs[:1], attributes={"grid": narrowed}, origins=(*clip.origins, *node.origins)
                )
        nodes.append(node)
    return without_dead(graph, nodes)
