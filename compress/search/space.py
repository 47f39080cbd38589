"""What may be taken from a network, and the choices; configurations to begin with, by an integer program."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, fx, nn

from compress.errors import QuantizationError, SearchError
from compress.graph.canonical import check_float_model, drop_assertions, preserve_input
from compress.graph.compare import Reference
from compress.graph.functional import functions_to_modules
from compress.graph.inputs import Inputs, as_inputs
from compress.graph.layers import Layer
from compress.graph.layers import layers as layer_table
from compress.graph.ops import WEIGHTED, modules_above, node_kind, walk
from compress.graph.trace import propagate_shapes, trace
from compress.quantization.sensitivity import choose_formats
from compress.search import SearchSpec
from compress.sparsity.channels import Shrinkable, shrinkable

LARGEST_UNIT = 6  # weighted layers of a module that share one format at most; larger modules are whole stages


@dataclass(frozen=True, kw_only=True)
class Block:
    """A residual block: node `add` sums node `identity` and a branch that depends on it alone."""

    name: str
    add: str
    identity: str
    layers: tuple[str, ...]


def residual_blocks(graph: fx.Graph) -> tuple[Block, ...]:
    """Blocks x + f(x) whose f has weights and feeds only the sum."""
    found: list[Block] = []
    for node in graph.nodes:
        operands = [x for x in node.args[:2] if isinstance(x, fx.Node)] if node_kind(node) == "add" else []
        if len(operands) != 2 or operands[0].meta.get("shape") != operands[1].meta.get("shape"):
            continue
        for identity, end in (operands, operands[::-1]):
            branch = _branch(identity, end)
            if branch is None or any(user not in branch and user is not node for x in branch for user in x.users):
                continue
            layers = tuple(
                str(n.target) for n in graph.nodes if n in branch and n.op == "call_module" and node_kind(n) in WEIGHTED
            )
            if layers:
                name = _common(layers) or node.name
                name = f"{name} ({node.name})" if name in {block.name for block in found} else name
                found.append(Block(name=name, add=node.name, identity=identity.name, layers=layers))
                break
    return tuple(found)


def leave_out(module: fx.GraphModule, block: Block) -> None:
    """Replace a block by its identity, in place; the caller removes dead code.

    An operation that overwrote the sum returns a new tensor from here on.
    """
    nodes = {node.name: node for node in module.graph.nodes}
    if block.add in nodes and block.identity in nodes:
        for consumer in nodes[block.add].users:
            preserve_input(module, consumer)
        nodes[block.add].replace_all_uses_with(nodes[block.identity])


def units(layers: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Blocks that share a format: the deepest module with several layers that is no stage.

    >>> units(["conv1", "layer1.0.conv1", "layer1.0.conv2", "fc"])
    {'conv1': ('conv1',), 'layer1.0': ('layer1.0.conv1', 'layer1.0.conv2'), 'fc': ('fc',)}
    """
    counts = Counter(prefix for layer in layers for prefix in modules_above(layer))
    grouped: dict[str, list[str]] = {}
    for layer in layers:
        deepest = next((prefix for prefix in reversed(modules_above(layer)) if counts[prefix] > 1), "")
        name = deepest if deepest and counts[deepest] <= LARGEST_UNIT else layer
        grouped.setdefault(name, []).append(layer)
    return {name: tuple(own) for name, own in grouped.items()}


def _branch(identity: fx.Node, end: fx.Node) -> set[fx.Node] | None:
    """Nodes after `identity` to `end`; None if `end` depends on anything else."""
    seen = set(walk([end], lambda node: () if node is identity else node.all_input_nodes))
    branch = seen - {identity}
    apart = identity not in seen or any(node.op == "placeholder" for node in branch)
    return None if apart or end is identity else branch


def _common(paths: Sequence[str]) -> str:
    if len(paths) == 1:
        return paths[0]
    shared = []
    for parts in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


@dataclass(frozen=True, kw_only=True)
class Structure(Shrinkable):
    """A traced float network and all that may be taken from it.

    Attributes:
        graph: in evaluation mode, not to be changed.
        blocks: that may be left out, by name.
        layers: weighted, with costs, in order.
    """

    graph: fx.GraphModule
    inputs: tuple[Tensor, ...]
    blocks: Mapping[str, Block]
    units: Mapping[str, tuple[str, ...]]
    layers: tuple[Layer, ...]


def analyse(model: nn.Module, example_inputs: Inputs) -> Structure:
    """Trace a copy of a float32 network and find what may be taken from it."""
    check_float_model(model)
    inputs = as_inputs(example_inputs)
    graph = _modules_of(copy.deepcopy(model).eval(), inputs)
    rows = tuple(row for row in layer_table(graph) if row.path and row.weight_macs)
    found = shrinkable(graph, inputs)
    return Structure(
        graph=graph,
        inputs=inputs,
        axes=found.axes,
        groups=found.groups,
        blocks={block.name: block for block in residual_blocks(graph.graph)},
        units=units([row.path for row in rows]),
        layers=rows,
        left=found.left,
    )


def _modules_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> fx.GraphModule:
    reference = Reference.of(model, inputs)
    graph = trace(model, inputs).eval()
    drop_assertions(graph)
    if functions_to_modules(graph):
        propagate_shapes(graph, inputs)
    reference.check(graph, "making modules of the layers of its graph")
    return graph


def shares_of_axes(structure: Structure) -> dict[tuple[str, str], Counter[str]]:
    owner = {number: name for name, group in structure.groups.items() for number in group.classes}
    return {
        (axis.path, axis.role): Counter(owner.get(number, "") for number in axis.classes.tolist())
        for axis in structure.axes
    }


# Choice by element: {"width layer1.0.conv1": "48", "format layer1.0": "int8", "block layer1.1": "left out"}.
Configuration = Mapping[str, str]

WIDTH, FORMAT, SPARSE, BLOCK = "width", "format", "sparse", "block"
FLOAT, DENSE, SPARSE_24, KEPT, LEFT_OUT = "float", "dense", "2:4", "kept", "left out"

_SPARSE_ENGINES = {"tensorrt", "tensorrt-rtx"}


@dataclass(frozen=True, kw_only=True)
class Space:
    """All configurations of a search.

    Attributes:
        elements: choices that change least first.
        notes: what was left out, and why.
    """

    elements: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> float:
        count = 1.0
        for choices in self.elements.values():
            count *= len(choices)
        return count

    def largest(self) -> dict[str, str]:
        return {element: choices[0] for element, choices in self.elements.items()}


def make_space(structure: Structure, spec: SearchSpec, engine: str, *, block: int = 8) -> Space:
    """Return the choices that a specification allows for a network on an engine.

    Widths are multiples of `block` unless the specification names another.
    """
    elements: dict[str, tuple[str, ...]] = {}
    notes = [f"channels of {layer} stay: they {reason}" for layer, reason in structure.left.items()]
    multiple = spec.multiple or block
    for name, group in structure.groups.items():
        elements[f"{WIDTH} {name}"] = _counts(len(group.classes), spec.widths, multiple)
    for name in structure.units:
        elements[f"{FORMAT} {name}"] = spec.formats
        if spec.sparsity or (spec.sparsity is None and engine in _SPARSE_ENGINES):
            elements[f"{SPARSE} {name}"] = (DENSE, SPARSE_24)
    if spec.sparsity and engine not in _SPARSE_ENGINES:
        notes.append(f"{engine} has no kernels for 2:4, so 2:4 can cost accuracy and win no time there")
    if spec.blocks:
        elements |= {f"{BLOCK} {name}": (KEPT, LEFT_OUT) for name in structure.blocks}
    if not any(len(choices) > 1 for choices in elements.values()):
        raise SearchError(
            "the space is empty: no width, format, sparsity or block of this network can be chosen (search.widths "
            f"{spec.widths} in multiples of {multiple}, search.formats {spec.formats}, search.blocks {spec.blocks}); "
            "allow more in the recipe's `search` section" + ("; " + "; ".join(notes[:3]) if notes else "")
        )
    return Space(elements=elements, notes=tuple(notes))


def key_of(configuration: Configuration) -> str:
    return json.dumps(dict(sorted(configuration.items())))


def widths_of(configuration: Configuration) -> dict[str, int]:
    return {name: int(choice) for name, choice in part(configuration, WIDTH).items()}


def left_out(configuration: Configuration) -> set[str]:
    return {name for name, choice in part(configuration, BLOCK).items() if choice == LEFT_OUT}


def formats_of(structure: Structure, configuration: Configuration) -> dict[str, str]:
    chosen = part(configuration, FORMAT)
    return {layer: chosen.get(unit, FLOAT) for unit, layers in structure.units.items() for layer in layers}


def sparse_layers(structure: Structure, configuration: Configuration) -> list[str]:
    chosen = part(configuration, SPARSE)
    return [layer for unit, own in structure.units.items() if chosen.get(unit) == SPARSE_24 for layer in own]


def part(configuration: Configuration, kind: str) -> dict[str, str]:
    prefix = f"{kind} "
    return {
        element.removeprefix(prefix): choice for element, choice in configuration.items() if element.startswith(prefix)
    }


def _counts(size: int, shares: tuple[float, ...], multiple: int) -> tuple[str, ...]:
    """Channels that may be kept, the most first.

    >>> _counts(64, (0.75, 0.5, 0.25), 8), _counts(20, (0.75, 0.5), 8), _counts(16, (0.5,), 16)
    (('64', '48', '32', '16'), ('20', '16', '8'), ('16',))
    """
    counts = {max(multiple, round(share * size / multiple) * multiple) for share in shares}
    return tuple(str(count) for count in sorted({size, *(c for c in counts if c < size)}, reverse=True))


Predict = Callable[[Configuration], float]
_STEPS, _FULL = 8, 0.985


@dataclass(frozen=True, kw_only=True)
class Otherwise:
    """The predicted effect of another choice of one element.

    Attributes:
        time: change in times of the float network.
        distance: change of its error.
    """

    element: str
    chosen: str
    choice: str
    time: float
    distance: float


def best_within(
    space: Space, distances: Mapping[str, Mapping[str, float]], predict: Predict, budget: float
) -> Configuration | None:
    """Least sum of distances within a predicted time, or None."""
    current: dict[str, str] = space.largest()
    best: tuple[float, dict[str, str]] | None = None
    limit = budget
    for _ in range(_STEPS):
        now = predict(current)
        times = {
            element: {choice: predict({**current, element: choice}) - now for choice in space.elements[element]}
            for element in distances
        }
        least = {element: min(row.values()) for element, row in times.items()}
        shifted = {e: {c: value - least[e] for c, value in row.items()} for e, row in times.items()}
        try:
            chosen = choose_formats(distances, shifted, budget=max(limit - now - sum(least.values()), 0.0))
            current = {**current, **chosen.formats}
        except QuantizationError:
            current = {**current, **{e: min(row, key=lambda c: row[c]) for e, row in times.items()}}
        got = predict(current)
        far = sum(row[current[element]] for element, row in distances.items())
        if got <= budget and (best is None or far < best[0]):
            best = (far, dict(current))
        if _FULL * budget <= got <= budget:
            break
        limit *= min(max(budget / got, 0.8), 1.1)
    return None if best is None else _filled(distances, predict, budget, best[1])


def _filled(
    distances: Mapping[str, Mapping[str, float]], predict: Predict, budget: float, chosen: dict[str, str]
) -> Configuration:
    """Change choices for better ones while time allows, largest gain first."""
    while True:
        gains = sorted(
            (
                (row[chosen[element]] - error, element, choice)
                for element, row in distances.items()
                for choice, error in row.items()
                if error < row[chosen[element]]
            ),
            reverse=True,
        )
        for _, element, choice in gains:
            if predict({**chosen, element: choice}) <= budget:
                chosen = {**chosen, element: choice}
                break
        else:
            return chosen


def uniform(space: Space, *, width: float = 1.0, format_: str = "", sparse: bool = False) -> Configuration:
    """One share of the channels, one format, 2:4 or not, everywhere."""
    chosen: dict[str, str] = {}
    for element, choices in space.elements.items():
        kind = element.partition(" ")[0]
        if kind == WIDTH:
            full = int(choices[0])
            chosen[element] = min(choices, key=lambda c: abs(int(c) - width * full))
        elif kind == FORMAT:
            chosen[element] = format_ if format_ in choices else choices[0]
        elif kind == SPARSE:
            chosen[element] = choices[-1] if sparse else choices[0]
        elif kind == BLOCK:
            chosen[element] = choices[0]
    return chosen


def otherwise(
    space: Space, distances: Mapping[str, Mapping[str, float]], predict: Predict, chosen: Configuration
) -> tuple[Otherwise, ...]:
    now = predict(chosen)
    rows: list[Otherwise] = []
    for element, choices in space.elements.items():
        if len(choices) < 2 or element not in chosen:
            continue
        place = choices.index(chosen[element])
        rows += [
            Otherwise(
                element=element,
                chosen=chosen[element],
                choice=other,
                time=predict({**chosen, element: other}) - now,
                distance=distances[element][other] - distances[element][chosen[element]],
            )
            for other in choices[max(place - 1, 0) : place] + choices[place + 1 : place + 2]
        ]
    return tuple(rows)


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Work of a layer for one image.

    Attributes:
        kind: `conv`, `pointwise`, `depthwise`, `grouped`, `linear`, ...
        format: of the weight, such as `int8 2:4`.
        read, written, weights: elements.
        inputs, outputs: channels; 0 = none may go.
    """

    path: str
    kind: str
    format: str
    macs: float
    read: float
    written: float
    weights: float
    inputs: float = 0.0
    outputs: float = 0.0

    def padded(self, block: int) -> LayerCost:
        """The work of an engine that fills up blocks of so many channels."""
        if block == 1:
            return self
        read, written = _padding(self.inputs, block), _padding(self.outputs, block)
        both = read if self.kind == "depthwise" else read * written
        return replace(
            self,
            macs=both * self.macs,
            read=read * self.read,
            written=written * self.written,
            weights=both * self.weights,
        )


class Costs:
    """Costs of a float network's layers under any configuration."""

    def __init__(self, structure: Structure) -> None:
        self.structure = structure
        self._sizes = {name: len(group.classes) for name, group in structure.groups.items()}
        self._axes = shares_of_axes(structure)
        self._batch = max(1, len(structure.inputs[0]))

    def of(self, configuration: Configuration) -> tuple[LayerCost, ...]:
        widths, gone = {**self._sizes, **widths_of(configuration)}, left_out(configuration)
        formats = formats_of(self.structure, configuration)
        sparse = set(sparse_layers(self.structure, configuration))
        skipped = {layer for name in gone for layer in self.structure.blocks[name].layers}
        return tuple(
            self._cost(row, widths, f"{formats[row.path]} {SPARSE_24}" if row.path in sparse else formats[row.path])
            for row in self.structure.layers
            if row.path not in skipped
        )

    def _cost(self, row: Layer, widths: dict[str, int], name: str) -> LayerCost:
        weight = f"{row.path}.weight"
        kind = kind_of(row)
        roles = ("vector", "vector") if kind == "depthwise" else ("in", "out")
        (read, inputs), (written, outputs) = (self._channels((weight, role), widths) for role in roles)
        both = read if kind == "depthwise" else read * written
        return LayerCost(
            path=row.path,
            kind=kind,
            format=name,
            macs=both * row.weight_macs / self._batch,
            read=read * math.prod(row.input_shapes[0]) / self._batch,
            written=written * math.prod(row.output_shape or ()) / self._batch,
            weights=both * row.weight_elements,
            inputs=inputs,
            outputs=outputs,
        )

    def _channels(self, axis: tuple[str, str], widths: dict[str, int]) -> tuple[float, float]:
        """Share of an axis that is left, and its channels; 0 of an axis that stays whole."""
        counts: Counter[str] = self._axes.get(axis, Counter())
        if not any(counts):
            return 1.0, 0.0
        left = sum(n * (widths[name] / self._sizes[name] if name else 1.0) for name, n in counts.items())
        return left / sum(counts.values()), left


def kind_of(row: Layer) -> str:
    if row.kind != "conv":
        return row.kind
    if row.groups > 1:
        return "depthwise" if row.input_shapes[0][1] == row.groups else "grouped"
    return "pointwise" if all(size == 1 for size in row.kernel) else "conv"


def _padding(count: float, block: int) -> float:
    """Channels that are computed for each one that is there."""
    return math.ceil(count / block) * block / count if count else 1.0
