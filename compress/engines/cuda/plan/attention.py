"""Attention on codes: softmax(scale q k + mask) v with a quantizer after the softmax, as one step."""

from __future__ import annotations

from torch import Tensor

from compress.engines.cuda.plan.graph import Node
from compress.engines.cuda.plan.steps import Attention, Source
from compress.engines.cuda.plan.view import View, number_of


def match_attention(view: View, node: Node) -> tuple[Attention, int] | None:
    """The step that begins with the product of queries and keys, and the place of its last node; else None."""
    if node.op != "MatMul":
        return None
    q, k = _symmetric(view, node.inputs[0]), _symmetric(view, node.inputs[1])
    if q is None or k is None:
        return None
    nodes, scale, mask, current = [node], 1.0, None, node.outputs[0]
    reader = view.only_consumer(current)
    while reader is not None and reader.op in {"Mul", "Div", "Add"}:
        constant = view.graph.constants.get(reader.inputs[1 - reader.inputs.index(current)])
        number = number_of(constant)
        if reader.op == "Add":
            if constant is None or mask is not None:
                return None
            mask = constant.float()
        elif number is None or mask is not None or (reader.op == "Div" and reader.inputs[1] == current):
            return None
        else:
            scale *= number if reader.op == "Mul" else 1 / number
        nodes.append(reader)
        current = reader.outputs[0]
        reader = view.only_consumer(current)
    if reader is None or reader.op != "Softmax":
        return None
    return _from_softmax(view, q, k, [*nodes, reader], scale, mask)


def _from_softmax(
    view: View, q: Source, k: Source, nodes: list[Node], scale: float, mask: Tensor | None
) -> tuple[Attention, int] | None:
    """The step, of nodes that end in the softmax."""
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
        name=product.name, origins=tuple(o for n in nodes for o in n.origins), x=q, k=k, v=v, scale=scale, mask=mask,
        probabilities=grid, out=view.output(product.outputs[0]),
    )  # fmt: skip
    return step, view.index[product.name]


def _symmetric(view: View, name: str) -> Source | None:
    """The codes of a tensor, on a grid around 0; None if there are none."""
    found = view.codes(name)
    return found if found is not None and found.grid is not None and found.grid.zero == 0 else None
