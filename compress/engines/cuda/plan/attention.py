"""Attention on codes: softmax(scale q k + mask) v with a quantizer after the softmax, as one step."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from compress.engines.cuda.plan.graph import Node
from compress.engines.cuda.plan.steps import Attention, Source
from compress.engines.cuda.plan.view import View, number_of


def match_attention(view: View, node: Node) -> tuple[Attention, int] | None:
    """The step that begins with the product of queries and keys, and the place of its last node; else None."""
    if node.op != "MatMul":
        return None
    q, k = _symmetric(view, node.inputs[0]), _symmetric(view, node.inputs[1])
    scores = _Scores([node], 1.0, None) if q is not None and k is not None else None
    while scores is not None:
        reader = view.only_consumer(scores.nodes[-1].outputs[0])
        if reader is not None and reader.op == "Softmax":
            same = view.shape(reader.outputs[0]) == view.shape(node.outputs[0])
            nodes = [*scores.nodes, reader]
            return _from_softmax(view, q, k, nodes, scores.scale, scores.mask) if q and k and same else None
        scores = None if reader is None else _followed(view, scores, reader)
    return None


class _Scores(NamedTuple):
    """The scores after some nodes."""

    nodes: list[Node]
    scale: float
    mask: Tensor | None


def _followed(view: View, scores: _Scores, node: Node) -> _Scores | None:
    """The scores after one more node: a factor, a constant that is added, windows apart from images, or joined."""
    current, nodes, mask = scores.nodes[-1].outputs[0], [*scores.nodes, node], scores.mask
    before, after = view.shape(current), view.shape(node.outputs[0])
    if node.op == "Reshape" and node.inputs[0] == current:
        if mask is None:
            return scores._replace(nodes=nodes) if before[-2:] == after[-2:] else None
        mask = _regrouped(mask, before, after)
        return None if mask is None else scores._replace(nodes=nodes, mask=mask)
    if node.op not in {"Mul", "Div", "Add"} or before != after:
        return None
    constant = view.graph.constants.get(node.inputs[1 - node.inputs.index(current)])
    number = number_of(constant)
    if node.op == "Add":
        mask = None if constant is None else _added(mask, constant.float(), len(before))
        return None if mask is None else scores._replace(nodes=nodes, mask=mask)
    if number is None or mask is not None or (node.op == "Div" and node.inputs[1] == current):
        return None
    return scores._replace(nodes=nodes, scale=scores.scale * (number if node.op == "Mul" else 1 / number))


def _added(mask: Tensor | None, constant: Tensor, rank: int) -> Tensor | None:
    constant = constant.reshape([1] * (rank - constant.dim()) + list(constant.shape))
    if mask is None:
        return constant
    return mask + constant if len({len(mask), len(constant)} - {1}) < 2 else None


def _regrouped(mask: Tensor, before: tuple[int, ...], after: tuple[int, ...]) -> Tensor | None:
    """A mask after a reshape that splits the first axis (windows) into (images, windows), or joins these."""
    if len(after) == len(before) + 1 and after[2:] == before[1:]:
        return mask[None] if len(mask) in (1, after[1]) else None
    if len(after) == len(before) - 1 == 4 and before[2:] == after[1:]:
        return mask[0] if len(mask) == 1 else None
    return None


def _from_softmax(
    view: View, q: Source, k: Source, nodes: list[Node], scale: float, mask: Tensor | None
) -> tuple[Attention, int] | None:
    softmax = nodes[-1]
    rank = len(view.shape(softmax.outputs[0]))
    quantize = view.only_consumer(softmax.outputs[0])
    back = view.only_consumer(quantize.outputs[0]) if quantize is not None and quantize.op == "Quantize" else None
    product = view.only_consumer(back.outputs[0]) if back is not None and back.op == "Dequantize" else None
    if quantize is None or back is None or product is None or product.op != "MatMul":
        return None
    v = _symmetric(view, product.inputs[1])
    grid = quantize.attributes["grid"]
    over_keys = int(softmax.attributes.get("axis", -1)) % rank == rank - 1
    if (
        v is None
        or product.inputs[0] != back.outputs[0]
        or not over_keys
        or grid.scale != back.attributes["grid"].scale
    ):
        return None
    shapes = [view.shape(source.name) for source in (q, k, v)]
    if any(len(shape) != rank or shape[:-2] != shapes[0][:-2] for shape in shapes) or grid.zero != 0:
        return None
    nodes = [*nodes, quantize, back, product]
    view.absorbed.update(n.name for n in nodes[1:])
    step = Attention(
        name=product.name,
        origins=tuple(o for n in nodes for o in n.origins),
        x=q,
        k=k,
        v=v,
        scale=scale,
        mask=mask,
        probabilities=grid,
        out=view.output(product.outputs[0]),
    )
    return step, view.index[product.name]


def _symmetric(view: View, name: str) -> Source | None:
    """The codes of a tensor, on a grid around 0."""
    found = view.codes(name)
    return found if found is not None and found.grid is not None and found.grid.zero == 0 else None
