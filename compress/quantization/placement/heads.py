"""Detection heads, found from the graph: the parts of them that 8 bits harm more than they gain in time.

A layer is final if no other layer follows it. A graph has a detection head if final convolutions at one resolution lead
to different results (boxes and classes), if a convolution follows a softmax, or if results of final convolutions are
computed with tensors that do not depend on the image (anchors, grids, strides). Final convolutions that are summed, as
in segmentation, lead to one result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from scipy.cluster.hierarchy import DisjointSet

from compress.graph.ops import PASSING, kinds
from compress.quantization import Head
from compress.quantization.placement.view import GraphView, Node, of_inputs

_LAYERS = kinds(lambda t: t.category in {"weighted", "product"})
_MOVED = PASSING | kinds(lambda t: t.category == "movement")
_DECODING = kinds(lambda t: t.category == "arithmetic") | {"sigmoid", "softmax", "softplus", "tanh"}
_CONVOLUTIONS = frozenset({"conv", "conv_transpose"})

_MOST_OF_A_HEAD = 0.5
"""Share of the multiply-accumulates from which on last convolutions at one resolution are no head of the network."""
_EXPECTATION = (
    "a product with a softmax's result takes the mean of a distribution (DFL of YOLO's boxes): small probabilities "
    "that 8 bits drop move the box"
)
_BOXES = "decoding of boxes and scores: exp, sigmoid, anchors and strides have ranges that 256 steps do not hold"
_NMS = "non-maximum suppression sorts and compares boxes, which no engine does in 8 bits"


@dataclass(frozen=True)
class FloatPart:
    """Why an operation of a head stays float."""

    rule: str
    reason: str


def head_parts(view: GraphView, head: Head) -> Mapping[Node, FloatPart]:
    """The operations of a detection head that stay float; see the head of this file and `QuantSpec.head`."""
    found = {node: FloatPart("NMS stays float", _NMS) for node in view.nodes if node.kind == "nms"}
    if head == "quantize":
        return found
    means = {node for node in view.nodes if _is_expectation(node)}
    tail = _tail(view, means)
    finals = [node for node in view.nodes if node.kind in _CONVOLUTIONS and node in tail and node not in means]
    inner = {node.path for node in view.nodes if node.path and node not in tail}
    finals = [node for node in finals if node.path and node.path not in inner]  # others are called before layers too
    found |= {node: FloatPart("expectation stays float", _EXPECTATION) for node in means}
    sources = _sources(view, finals, tail)
    detects = bool(means) or _leads_apart(finals, sources) or _uses_anchors(view, finals, sources)
    if detects:
        decoding = [node for node in sources if node.kind in _DECODING and node.floating and node not in means]
        found |= {node: FloatPart("box decoding stays float", _BOXES) for node in decoding}
    price = sum(map(_macs, finals)) / (sum(map(_macs, view.nodes)) or 1)
    levels = {(node.shape or ())[2:] for node in finals}
    small = price < _MOST_OF_A_HEAD or len(levels) > 1
    if head == "float" or (detects and small and _has_trunk(view, finals)):
        reason = (
            f"a last convolution of a head, whose errors no layer makes up for; all {len({n.path for n in finals})} "
            f"together have {price:.1%} of the network's multiply-accumulates (head: quantize takes them in)"
        )
        found |= {node: FloatPart("last convolution of a head", reason) for node in finals}
    return found


def _has_trunk(view: GraphView, finals: list[Node]) -> bool:
    last, leads = set(finals), dict[Node, bool]()
    for node in view.nodes:
        leads[node] = any(leads.get(source, False) or source.kind in _LAYERS for source in node.inputs)
    return any(leads[node] for node in last)


def _is_expectation(node: Node) -> bool:
    """True for a product of a softmax's result with constants: DFL."""
    if node.kind not in _LAYERS or not node.tensors:
        return False
    activations = [source for source in node.tensors if source.kind != "constant"]
    if len(activations) != 1:
        return False  # attention multiplies two activations
    source = activations[0]
    while source.kind in _MOVED and source.tensors:
        source = source.tensors[0]
    return source.kind == "softmax"


def _tail(view: GraphView, means: set[Node]) -> set[Node]:
    """The nodes that no layer follows, expectations aside."""
    leads: dict[Node, bool] = {}
    for node in reversed(view.nodes):
        leads[node] = any((user.kind in _LAYERS and user not in means) or leads[user] for user in node.consumers)
    return {node for node in view.nodes if not leads[node]}


def _sources(view: GraphView, finals: list[Node], tail: set[Node]) -> dict[Node, frozenset[str]]:
    """The final layers that each node of the tail depends on; nodes that depend on none are left out."""
    sources = {node: frozenset({node.path}) for node in finals}
    for node in view.nodes:
        if node in tail and node not in sources:
            found = frozenset[str]().union(*(sources.get(source, frozenset()) for source in node.inputs))
            if found:
                sources[node] = found
    return sources


def _leads_apart(finals: list[Node], sources: Mapping[Node, frozenset[str]]) -> bool:
    """True if final layers at one resolution lead to different results."""
    groups = DisjointSet({node.path for node in finals})
    for node in sources:
        if node.traits.category == "arithmetic":
            apart = {sources[source] for source in node.inputs if source in sources}
            together = sorted(frozenset[str]().union(*apart)) if len(apart) > 1 else []
            for path in together[1:]:
                groups.merge(together[0], path)
    by_size: dict[tuple[int, ...], set[str]] = {}
    for node in finals:
        by_size.setdefault((node.shape or ())[2:], set()).add(groups[node.path])
    return any(len(found) > 1 for found in by_size.values())


def _uses_anchors(view: GraphView, finals: list[Node], sources: Mapping[Node, frozenset[str]]) -> bool:
    """True if results of final layers are computed with tensors that do not depend on the image."""
    of_image = of_inputs(view)
    return any(
        node.traits.category == "arithmetic"
        and any(s not in of_image and s.shape and not _is_affine(s, node) for s in node.tensors)
        for node in sources
        if node not in finals
    )


def _is_affine(constant: Node, node: Node) -> bool:
    """True for one number a channel of an image, as a frozen BatchNorm has them; anchors differ by position."""
    rank, shape = len(node.shape or ()), constant.shape or ()
    return rank >= 4 and len(shape) in {rank - 1, rank} and math.prod(shape[2 - rank :]) == 1


def _macs(node: Node) -> int:
    weight = node.parameters.weight() if node.parameters is not None and node.kind in _LAYERS else None
    if weight is None or not node.tensors:
        return 0
    whole = node.tensors[0].shape if node.kind == "conv_transpose" else node.shape
    places = (whole or ())[:1] + ((whole or ())[2:] if node.kind in _CONVOLUTIONS else (whole or ())[1:-1])
    return math.prod(places) * math.prod(weight.shape)
