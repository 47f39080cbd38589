"""The graph as placement sees it: small typed nodes, read from torch.fx (`insert.read_fx`) or from another format.

Placement reads nothing else, so that one algorithm decides for all formats. What is known of values: tensors that are
never negative, or never below a value, need integers without a sign, or with few below zero. No
calibration image reaches tensors that are always zero because of a weight (timm's `zero_init_last`, torchvision's
`zero_init_residual`, pruned branches), and any range is right for them.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field

from torch import Tensor

from compress.graph.ops import TRAITS, Traits
from compress.graph.report import Leaf

# Biases of no smaller magnitude are masks, if they are far from the others.
_MASK = 1e4


@dataclass(frozen=True, kw_only=True, eq=False)
class Parameters:
    """The constants of a layer, read when called for, because they may be computed or in a file.

    Attributes:
        weight: reads (out, in / groups, k...); (in, out / groups, k...) of transposed convolutions; (C,) of a
            BatchNorm, where None means ones.
        bias: reads (out,); None means zeros.
        mean: reads (C,), the running mean of a BatchNorm; None means zeros.
        axis: axis of the weight that holds its output channels.
    """

    weight: Callable[[], Tensor | None]
    bias: Callable[[], Tensor | None]
    mean: Callable[[], Tensor | None] = lambda: None
    axis: int = 0
    groups: int = 1


def mask_in(bias: Tensor | None) -> str:
    """Why a layer with this bias stays float: some results are switched off, which no 8-bit scale holds; "" if none."""
    if bias is None or not bias.numel():
        return ""
    bias = bias.detach().float()
    finite = bias[bias.isfinite()].abs()
    usual = float(finite.median()) if finite.numel() else 0.0
    masked = bias.isfinite().logical_not() | (bias.abs() > max(_MASK, 1e4 * usual))
    return f"has a bias of {bias[masked][0]:g}, a mask that no 8-bit scale holds" if bool(masked.any()) else ""


@dataclass(kw_only=True, eq=False)
class Node:
    """An operation, or an input, output or constant of the graph; nodes are compared by identity.

    Attributes:
        name: unique name of the node and of the tensor that it computes; `path`: of its module, "" if it is none.
        inputs, consumers: each once, in order.
        floating: True if its result is a floating-point tensor.
        parameters: of a layer with constants of its own; None for other operations.
        refusal: why the weight of a layer cannot be quantized; "" if it can.
        note: why it is in the graph in one piece.
        numbers: numbers among the operands of an arithmetic operation.
        factor: largest positive constant that a `mul` multiplies by; 0.0 if none.
        axes: of a reduction, counted from the front; None means all, or unknown.
        cast: type of an explicit cast, such as `float32`; `converts`: its result has another type than its input.
        filling: what it pads with; 0.0 if that is taken from the tensor.
        window: largest side of its kernel, or 0.
    """

    name: str
    kind: str
    path: str = ""
    inputs: tuple[Node, ...] = ()
    consumers: list[Node] = field(default_factory=list)
    shape: tuple[int, ...] | None = None
    floating: bool = False
    parameters: Parameters | None = None
    refusal: str = ""
    note: str = ""
    leaf: Leaf | None = None
    numbers: tuple[float, ...] = ()
    factor: float = 0.0
    axes: frozenset[int] | None = None
    low: float = float("-inf")
    mode: str = ""
    cast: str = ""
    converts: bool = False
    filling: float = 0.0
    window: int = 0

    @property
    def layer(self) -> str:
        return self.path or self.name

    @property
    def traits(self) -> Traits:
        return TRAITS[self.kind]

    @property
    def tensors(self) -> list[Node]:
        return [node for node in self.inputs if node.shape is not None]


@dataclass(frozen=True, kw_only=True)
class GraphView:
    """A graph in topological order; `leaves` are opaque submodules, each with its reason."""

    nodes: tuple[Node, ...]
    leaves: tuple[Leaf, ...] = ()


def of_inputs(view: GraphView) -> set[Node]:
    """The nodes whose values depend on those of the network's inputs, and not on their sizes alone."""
    return _collected(
        view,
        lambda node, found: (
            node.kind == "input" or (node.traits.category != "shape" and not found.isdisjoint(node.inputs))
        ),
    )


def _collected(view: GraphView, belongs: Callable[[Node, set[Node]], bool]) -> set[Node]:
    """The nodes that belong to a set, as those before them tell."""
    found: set[Node] = set()
    for node in view.nodes:
        if belongs(node, found):
            found.add(node)
    return found


# Categories of operations whose results are no lower than the lowest of their inputs, or than a padding zero.
_KEEP = frozenset({"movement", "join", "pool", "passing"})


def never_negative(view: GraphView) -> set[Node]:
    """The nodes whose values are known to be at least 0 for every input of the model."""
    return _collected(view, _is_never_negative)


def lowest_values(view: GraphView, positive: Set[Node]) -> dict[Node, float]:
    """The other nodes that are never below a known value: activations, and copies and means of them."""
    found: dict[Node, float] = {}
    for node in view.nodes:
        if node in positive:
            continue
        tensors = _read(node)
        sources = [source for source in tensors if source.kind != "constant"]
        known = bool(sources) and all(source in found or source in positive for source in sources)
        least = min((found.get(source, 0.0) for source in sources), default=0.0)
        if node.traits.lowest:
            found[node] = node.traits.lowest
        elif known and node.kind == "mul" and node.factor:
            found[node] = least * node.factor
        elif known and len(sources) == len(tensors) and (node.traits.category in _KEEP or node.kind == "mean"):
            found[node] = least
    return found


def _read(node: Node) -> list[Node]:
    """Return the tensors that a node consumes, and what takes one apart or some of its parts, which have no shape."""
    return [source for source in node.inputs if source.shape is not None or source.kind in ("split", "getitem")]


def _is_never_negative(node: Node, known: set[Node]) -> bool:
    if node.traits.non_negative == "always" or (node.kind == "clamp" and node.low >= 0):
        return True
    if node.kind == "pow" and any(number > 0 and number % 2 == 0 for number in node.numbers):
        return True
    if node.mode == "bicubic" or any(number < 0 for number in node.numbers):
        return False  # cubic weights are negative in places
    sources = _read(node)
    if node.kind == "pad":
        return node.filling >= 0 and bool(sources) and known.issuperset(sources)
    return node.traits.non_negative == "if inputs are" and bool(sources) and known.issuperset(sources)


def always_zero(view: GraphView) -> list[Node]:
    """The nodes whose tensors are provably zero for every input, in graph order."""
    dead = _collected(view, _is_zero)
    return [node for node in view.nodes if node in dead]


def _is_zero(node: Node, dead: set[Node]) -> bool:
    known, parameters = [source in dead for source in node.inputs], node.parameters
    if parameters is not None:
        if not _zero(parameters.bias()):
            return False
        weight = parameters.weight()
        multiplies_by_zero = weight is not None and not weight.detach().any()
        return multiplies_by_zero or (all(known) and _zero(parameters.mean()))
    if node.kind == "zeros":
        return True
    if node.traits.multiplies:
        return any(known)
    return node.traits.keeps_zero and bool(known) and all(known) and not any(node.numbers)


def _zero(values: Tensor | None) -> bool:
    return values is None or not values.detach().any()
