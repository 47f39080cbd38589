"""Q/DQ nodes as integers on grids, and `Quantize` and `Dequantize` moved to where products can compute on codes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from compress.engines.cuda.onnx_ops import apply, pads_of
from compress.engines.cuda.plan.graph import QUANTIZERS, Graph, Node, sorted_nodes, without_dead
from compress.errors import EngineError

# Operations of one input whose result holds the same values in another shape or order.
MOVES = frozenset({"Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Dropout"})
# Operations whose results hold values of their first input, each any number of times.
TAKES = frozenset({"Slice", "Split", "Gather", "Expand", "Tile", "DepthToSpace", "SpaceToDepth"})


@dataclass(frozen=True)
class Grid:
    """Which integer a real value becomes: round(x / scale) + zero, limited to low ... high, within -128 and 127."""

    scale: tuple[float, ...]
    zero: int = 0
    low: int = -128
    high: int = 127

    def __post_init__(self) -> None:
        bad = [s for s in self.scale if not (np.isfinite(s) and s > 0)]
        if bad:
            raise EngineError(f"a scale of {bad[0]} is not positive and finite: calibrate the model again")


class QuantizedConstant(NamedTuple):
    """A weight as int8 codes in the shape that its consumer reads; float64 scales along `axis`, None for one."""

    codes: Tensor
    scale: Tensor
    axis: int | None


@dataclass(frozen=True, kw_only=True)
class QuantizedGraph:
    """A graph with nodes `Quantize` and `Dequantize`, each with its `grid`; codes are int8. Weights by tensor."""

    graph: Graph
    weights: Mapping[str, QuantizedConstant]


def resolve_quantizers(graph: Graph) -> QuantizedGraph:
    """Turn QuantizeLinear and DequantizeLinear into `Quantize`, `Dequantize`, integer weights and constants."""
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
    return (weight.codes.double() * along(weight.scale, weight.axis, weight.codes.dim())).float()


def along(vector: Tensor, axis: int | None, rank: int) -> Tensor:
    """Shaped to multiply a tensor of `rank` axes along `axis`; a single number as it is."""
    return vector if axis is None else vector.reshape([-1 if i == axis else 1 for i in range(rank)])


# Reading Q and DQ nodes -----------------------------------------------------------------------------------------------


def _parameters(graph: Graph, node: Node) -> tuple[Tensor, Tensor | None]:
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


_PRODUCTS = frozenset({"Conv", "MatMul", "Gemm"})


def move_quantizers(graph: Graph) -> Graph:
    """Move every Dequantize down and every Quantize up as far as they go; join those that are equal."""
    graph = _move_down(_joined(graph))
    for _ in range(len(graph.nodes)):
        moved = _move_up(graph) or _split_columns(graph)
        if moved is None:
            break
        graph = moved
    return _move_down(_joined(graph))


def _joined(graph: Graph) -> Graph:
    """One node for all Quantize (or Dequantize) nodes of one tensor and one grid."""
    seen: dict[tuple[str, str, Grid], str] = {}
    same: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        node = replace(node, inputs=tuple(same.get(name, name) for name in node.inputs))
        if node.op in {"Quantize", "Dequantize"} and node.outputs[0] not in graph.outputs:
            key = (node.op, node.inputs[0], node.attributes["grid"])
            if key in seen:
                same[node.outputs[0]] = seen[key]
                continue
            seen[key] = node.outputs[0]
        nodes.append(node)
    return without_dead(graph, nodes)


def _move_down(graph: Graph) -> Graph:
    dequantizers = {n.outputs[0]: n for n in graph.nodes if n.op == "Dequantize"}
    nodes: list[Node] = []
    dtypes, shapes = dict(graph.dtypes), dict(graph.shapes)
    for node in graph.nodes:
        found = _commuting_inputs(graph, node, dequantizers)
        if found is None:
            nodes.append(node)
            continue
        codes, grid = found
        outputs = tuple(f"{name}/codes" if name else "" for name in node.outputs)
        nodes.append(replace(node, inputs=(*codes, *node.inputs[len(codes) :]), outputs=outputs))
        for name, code in zip(node.outputs, outputs, strict=True):
            if name:
                dtypes[code], shapes[code] = torch.int8, graph.shapes[name]
                after = Node(
                    op="Dequantize",
                    name=f"{name}/Dequantize",
                    inputs=(code,),
                    outputs=(name,),
                    attributes={"grid": grid},
                    origins=(),
                )
                dequantizers[name] = after
                nodes.append(after)
    return without_dead(replace(graph, dtypes=dtypes, shapes=shapes), nodes)


def _commuting_inputs(
    graph: Graph, node: Node, dequantizers: Mapping[str, Node]
) -> tuple[tuple[str, ...], Grid] | None:
    """(the integers of a node's dequantized data inputs, their grid) if it may compute on them."""
    data = node.inputs if node.op == "Concat" else node.inputs[:1]
    if not data or any(name not in dequantizers for name in data):
        return None
    grids = {dequantizers[name].attributes["grid"] for name in data}
    if len(grids) != 1 or not _commutes(graph, node, next(iter(grids))):
        return None
    return tuple(dequantizers[name].inputs[0] for name in data), next(iter(grids))


def _commutes(graph: Graph, node: Node, grid: Grid) -> bool:
    """True if an operation gives the same whether its input or its result is put on `grid`."""
    if len(grid.scale) != 1:
        return False
    if node.op in MOVES | {"Concat"} or (node.op in TAKES and all(n in graph.constants for n in node.inputs[1:] if n)):
        return True
    if node.op == "MaxPool":
        return len([name for name in node.outputs if name]) == 1
    if node.op == "Pad":
        value = graph.constants.get(node.given(2))
        number = float(node.attributes.get("value", 0.0)) if value is None else float(value)
        return node.attributes.get("mode", "constant") == "constant" and number == 0.0 and grid.zero == 0
    return node.op == "Resize" and node.attributes.get("mode", "nearest") == "nearest"


def _move_up(graph: Graph) -> Graph | None:
    producers, consumers = graph.producers(), graph.consumers()
    for node in graph.nodes:
        above = producers.get(node.inputs[0]) if node.op == "Quantize" else None
        if above is None or node.inputs[0] in graph.outputs:
            continue
        grid: Grid = node.attributes["grid"]
        alike = all(r.op == "Quantize" and r.attributes["grid"] == grid for r in consumers[node.inputs[0]])
        if not alike or len(grid.scale) != 1:
            continue
        factor = _scalar_factor(graph, above)
        if factor is not None:
            source, number = factor
            scaled = replace(grid, scale=(grid.scale[0] / number,))
            moved = replace(
                node, inputs=(source,), attributes={"grid": scaled}, origins=(*above.origins, *node.origins)
            )
            return without_dead(graph, [moved if n is node else n for n in graph.nodes])
        keeps = above.op in MOVES | {"Concat", "MaxPool", "Pad", "Resize", "Expand", "Tile"}
        data = above.inputs if above.op == "Concat" else above.inputs[:1]
        if keeps and _commutes(graph, above, grid) and not any(name in graph.constants for name in data):
            return _exchanged(graph, above, node)
    return None


def _scalar_factor(graph: Graph, node: Node) -> tuple[str, float] | None:
    """(input, factor) of a product with, or a division by, one positive number."""
    if node.op not in {"Mul", "Div"}:
        return None
    for i in (0, 1) if node.op == "Mul" else (1,):
        constant = graph.constants.get(node.inputs[i])
        if constant is not None and constant.numel() == 1 and float(constant) > 0:
            number = float(constant)
            same = graph.shapes[node.inputs[1 - i]] == graph.shapes[node.outputs[0]]
            return (node.inputs[1 - i], number if node.op == "Mul" else 1 / number) if same else None
    return None


def _exchanged(graph: Graph, above: Node, quantize: Node) -> Graph:
    count = len(above.inputs) if above.op == "Concat" else 1
    dtypes, shapes, added = dict(graph.dtypes), dict(graph.shapes), []
    codes = []
    for i, name in enumerate(above.inputs[:count]):
        code = f"{quantize.outputs[0]}/{above.op}_{i}"
        dtypes[code], shapes[code] = torch.int8, graph.shapes[name]
        codes.append(code)
        added.append(replace(quantize, name=f"{quantize.name}/{i}", inputs=(name,), outputs=(code,)))
    moved = replace(
        above,
        name=f"{above.name}/codes",
        inputs=(*codes, *above.inputs[count:]),
        outputs=quantize.outputs,
        attributes={**above.attributes},
        origins=above.origins,
    )
    dtypes[quantize.outputs[0]] = torch.int8
    nodes: list[Node] = []
    for node in graph.nodes:
        nodes.extend([*added, moved] if node is quantize else [node])
    return without_dead(replace(graph, dtypes=dtypes, shapes=shapes), nodes)


# One product whose columns are quantized apart (query, key and value of attention) ------------------------------------


def _split_columns(graph: Graph) -> Graph | None:
    producers, consumers = graph.producers(), graph.consumers()
    for node in graph.nodes:
        name = node.outputs[0]
        if not _is_product(graph, node, producers) or len(consumers.get(name, [])) == 0 or name in graph.outputs:
            continue
        first = consumers[name]
        if all(r.op == "Quantize" for r in first) or not all(r.op in MOVES | TAKES for r in first):
            continue
        leaves = _leaves(graph, name, consumers, 1.0)
        if leaves is None or len(leaves) < 2:
            continue
        moved = _on_columns(graph, node, leaves)
        if moved is not None:
            return moved
    return None


def _is_product(graph: Graph, node: Node, producers: Mapping[str, Node]) -> bool:
    if node.op in {"Add", "Sub"}:
        parts = [name for name in node.inputs if name not in graph.constants]
        above = producers.get(parts[0]) if len(parts) == 1 else None
        return above is not None and above.op in _PRODUCTS and _is_product(graph, above, producers)
    return node.op in _PRODUCTS and (node.inputs[1] in graph.constants or node.inputs[1] not in producers)


def _leaves(
    graph: Graph, name: str, consumers: Mapping[str, list[Node]], factor: float
) -> list[tuple[Node, list[Node], float]] | None:
    """(Quantize, the nodes before it, factor) of each leaf of a tree of moves; else None."""
    found: list[tuple[Node, list[Node], float]] = []
    for reader in consumers.get(name, []):
        scalar = _scalar_factor(graph, reader)
        if reader.op == "Quantize":
            found.append((reader, [], factor))
            continue
        number = 1.0 if scalar is None else scalar[1]
        movable = scalar is not None or reader.op in MOVES | (TAKES - {"Expand", "Tile"})
        if not movable or len(reader.outputs) != 1 or reader.outputs[0] in graph.outputs:
            return None
        below = _leaves(graph, reader.outputs[0], consumers, factor * number)
        if below is None:
            return None
        found += [(leaf, [reader, *path], f) for leaf, path, f in below]
    return found


def _on_columns(graph: Graph, product: Node, leaves: list[tuple[Node, list[Node], float]]) -> Graph | None:
    name = product.outputs[0]
    shape = graph.shapes[name]
    axis = 1 if len(shape) == 4 else len(shape) - 1
    size = shape[axis]
    probe = torch.arange(size, dtype=torch.int32).reshape([-1 if i == axis else 1 for i in range(len(shape))])
    probe = probe.expand(shape)
    scales = torch.zeros(size, dtype=torch.float64)
    grids: list[Grid] = [leaf.attributes["grid"] for leaf, _, _ in leaves]
    if len({(g.zero, g.low, g.high, len(g.scale)) for g in grids}) != 1:
        return None
    for (_, path, factor), grid in zip(leaves, grids, strict=True):
        columns = _columns(graph, path, probe, size)
        if bool((scales[columns] != 0).any()):
            return None
        scales[columns] = grid.scale[0] / factor
    scales[scales == 0] = 1.0
    joint = Grid(tuple(scales.tolist()), grids[0].zero, grids[0].low, grids[0].high)
    code = f"{name}/codes"
    dtypes, shapes = {**graph.dtypes, code: torch.int8}, {**graph.shapes, code: shape}
    added = [
        Node(
            op="Quantize",
            name=f"{name}/Quantize",
            inputs=(name,),
            outputs=(code,),
            attributes={"grid": joint},
            origins=tuple(o for leaf, _, _ in leaves for o in leaf.origins),
        )
    ]
    same = {name: code}
    removed: dict[str, Node] = {}
    for leaf, path, _ in leaves:
        for node in path:
            if node.outputs[0] not in same:
                if node.op in {"Mul", "Div"}:
                    source = next(n for n in node.inputs if n not in graph.constants)
                    same[node.outputs[0]] = same[source]
                    continue
                moved = f"{node.outputs[0]}/codes"
                same[node.outputs[0]] = moved
                dtypes[moved], shapes[moved] = torch.int8, graph.shapes[node.outputs[0]]
                inputs = (same[node.inputs[0]], *node.inputs[1:])
                added.append(replace(node, name=f"{node.name}/codes", inputs=inputs, outputs=(moved,)))
        removed[leaf.outputs[0]] = leaf
        same[leaf.outputs[0]] = same[leaf.inputs[0]]
    kept = [n for n in graph.nodes if n.outputs[0] not in removed]
    for i, node in enumerate(kept):
        renamed = tuple(same[n] if n in removed else n for n in node.inputs)
        if renamed != node.inputs:
            kept[i] = replace(node, inputs=renamed)
    place = kept.index(product) + 1
    graph = replace(graph, dtypes=dtypes, shapes=shapes)
    ordered = sorted_nodes([*kept[:place], *added, *kept[place:]], [*graph.constants, *graph.inputs])
    return without_dead(graph, ordered)


def _columns(graph: Graph, path: list[Node], probe: Tensor, size: int) -> Tensor:
    """Which of the columns 0 to `size` arrive at the end of a path; a mask."""
    for node in path:
        if node.op not in {"Mul", "Div"}:
            inputs = (probe, *(graph.constants[name] if name else None for name in node.inputs[1:]))
            probe = apply(node.op, node.attributes, inputs)[0]
    for axis, stride in enumerate(probe.stride()):
        probe = probe.narrow(axis, 0, 1) if stride == 0 else probe  # images are alike
    seen = torch.zeros(size, dtype=torch.bool)
    seen[probe.reshape(-1).long()] = True
    return seen


def padding_of(graph: Graph, node: Node) -> list[tuple[int, int]]:
    """(before, after) of each axis of a Pad whose amounts are constant."""
    inputs = (None, *(graph.constants.get(name) for name in node.inputs[1:]))
    return pads_of(node.attributes, inputs, len(graph.shapes[node.outputs[0]]))
