"""Activations that a kernel's epilogue computes, and how they are recognized in a graph."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from compress.engines.cuda.onnx_ops import apply
from compress.engines.cuda.plan.graph import Graph, Node, without_dead

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "hard_sigmoid": F.hardsigmoid,
    "hard_swish": F.hardswish,
    "mish": F.mish,
    "elu": F.elu,
    "softplus": F.softplus,
}


@dataclass(frozen=True)
class Activation:
    """An elementwise function: `clip` has bounds (ReLU: 0 to infinity), `leaky_relu` the slope of negative values."""

    kind: str = "none"
    lower: float = -math.inf
    upper: float = math.inf
    slope: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        if self.kind == "none":
            return x
        if self.kind == "clip":
            return x.clamp(self.lower, self.upper)
        if self.kind == "leaky_relu":
            return F.leaky_relu(x, self.slope)
        return _FUNCTIONS[self.kind](x)

    @property
    def scales(self) -> bool:
        """True if the function of s x is s times one of the same kind of x, for positive s."""
        return self.kind in {"none", "clip", "leaky_relu"}

    def scaled(self, factor: float) -> Activation:
        """The function g with g(factor x) = factor f(x), of one that `scales`."""
        return replace(self, lower=self.lower * factor, upper=self.upper * factor)


NONE = Activation()
RELU = Activation("clip", 0.0, math.inf)

_ELEMENTWISE = frozenset(
    "Relu Clip LeakyRelu Sigmoid Tanh HardSigmoid HardSwish Gelu Elu Softplus Mish Erf Exp Log Neg Abs Sqrt Reciprocal "  # noqa: SIM905
    "Add Sub Mul Div Pow Min Max Identity Softsign".split()
)
_LARGEST_GROUP = 16


def recognize_activations(graph: Graph) -> Graph:
    """Replace groups of operations that compute a known activation by one node `Activation`."""
    producers, consumers = graph.producers(), graph.consumers()
    replaced: dict[str, Node] = {}
    covered: set[str] = set()
    for node in reversed(graph.nodes):
        if node.op not in _ELEMENTWISE or node.name in covered:
            continue
        found = _largest_match(graph, node, producers, consumers)
        if found is None:
            continue
        activation, source, group = found
        covered.update(member.name for member in group)
        replaced[node.name] = Node(
            op="Activation",
            name=node.name,
            inputs=(source,),
            outputs=node.outputs,
            attributes={"activation": activation},
            origins=tuple(o for m in reversed(group) for o in m.origins),
        )
    return without_dead(graph, [replaced.get(node.name, node) for node in graph.nodes])


def _largest_match(
    graph: Graph, node: Node, producers: Mapping[str, Node], consumers: Mapping[str, list[Node]]
) -> tuple[Activation, str, list[Node]] | None:
    """(the activation that ends in `node`, the tensor that it is a function of, its nodes)."""
    group, best = [node], None
    while True:
        sources = _sources(graph, group)
        if len(sources) == 1:
            activation = _known(graph, group, sources[0])
            if activation is not None:
                best = activation, sources[0], list(group)
        names = {member.name for member in group}
        added = next(
            (
                producers[source]
                for source in sources
                if source in producers
                and producers[source].op in _ELEMENTWISE
                and source not in graph.outputs
                and all(reader.name in names for reader in consumers[source])
            ),
            None,
        )
        if added is None or len(group) >= _LARGEST_GROUP:
            return best
        group.append(added)


def _sources(graph: Graph, group: list[Node]) -> list[str]:
    """Tensors that a group reads and does not compute; single numbers left out."""
    inside = {name for member in group for name in member.outputs}
    found: dict[str, None] = {}
    for member in group:
        for name in member.inputs:
            constant = graph.constants.get(name)
            number = constant is not None and constant.numel() == 1
            if name and name not in inside and not number:
                found[name] = None
    return list(found)


def _known(graph: Graph, group: list[Node], source: str) -> Activation | None:
    if source in graph.constants or graph.shapes[source] != graph.shapes[group[0].outputs[0]]:
        return None
    if not graph.dtypes[source].is_floating_point:
        return None
    if len(group) == 1:
        simple = _simple(graph, group[0])
        if simple is not None:
            return simple
    y = _run(graph, group, source, _AT)
    if y is None or not bool(torch.isfinite(y[: len(_NEAR)]).all()):
        return None
    for kind, expected in _expected().items():
        if _is_same(y, expected, _MOST_APART):
            return Activation(kind)
    lower, upper = float(y.min()), float(y.max())
    for bounds in ((-math.inf, math.inf), (lower, math.inf), (-math.inf, upper), (lower, upper)):
        if bounds[0] < bounds[1] and _is_same(y, _AT.clamp(*bounds), 1e-6, least=0.0):
            return Activation("clip", *bounds) if math.isfinite(min(map(abs, bounds))) else NONE
    return None


# Where functions are compared: exp overflows beyond 700, and a bound may be anywhere in float32.
_NEAR = torch.linspace(-12, 12, 4801, dtype=torch.float64)
_FAR = torch.logspace(math.log10(12), 38, 1200, dtype=torch.float64)
_AT = torch.cat([_NEAR, _FAR, -_FAR])
_MOST_APART = 2e-4  # an exporter's tanh form of GELU is 5e-4 from the exact one


@functools.cache
def _expected() -> dict[str, Tensor]:
    return {kind: function(_AT) for kind, function in _FUNCTIONS.items()}


def _is_same(y: Tensor, expected: Tensor, most: float, least: float = 1.0) -> bool:
    # An error is relative to the expected value, or to `least` where that is larger. A group may compute an infinity
    # on its way, as log(1 + exp(x)) does, where the function itself is finite: such places are not compared.
    apart = (y - expected).abs() <= most * expected.abs().clamp(min=least)
    return bool((apart | ~torch.isfinite(y)).all())


def _simple(graph: Graph, node: Node) -> Activation | None:
    a = node.attributes
    if node.op == "Relu":
        return RELU
    if node.op == "LeakyRelu":
        return Activation("leaky_relu", slope=float(a.get("alpha", 0.01)))
    if node.op == "Clip":
        bounds = [a.get("min"), a.get("max")]
        for i in (1, 2):
            name = node.given(i)
            if name:
                if name not in graph.constants:
                    return None
                bounds[i - 1] = graph.constants[name].item()
        lower, upper = bounds
        return Activation("clip", -math.inf if lower is None else lower, math.inf if upper is None else upper)
    return None


def _run(graph: Graph, group: list[Node], source: str, x: Tensor) -> Tensor | None:
    values = {source: x}
    for member in reversed(group):  # consumers were added first
        inputs: list[Tensor | None] = []
        for name in member.inputs:
            value = values.get(name)
            if value is None and name in graph.constants:
                value = graph.constants[name].reshape(()).double()
            if name and value is None:
                return None
            inputs.append(value)
        try:
            values[member.outputs[0]] = apply(member.op, member.attributes, inputs)[0]
        except (RuntimeError, TypeError):
            return None
    return values[group[0].outputs[0]]
