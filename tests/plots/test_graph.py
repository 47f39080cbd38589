"""The figure of a block: which boxes and edges, and that the layout can be read."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from compress import QuantSpec, insert_quantizers
from compress.errors import QuantizationError
from compress.plots.graph import draw_block, lay_out
from compress.plots.style import NARROW, WIDE, to_inline_svg, to_png
from compress.quantization.block_graph import block_graph, typical_block
from tests.networks import TinyResNet


@pytest.fixture(scope="module")
def qmodel():
    return insert_quantizers(TinyResNet(), torch.randn(2, 3, 16, 16), QuantSpec(target="openvino"))


def test_a_residual_block_shows_what_is_quantized(qmodel):
    graph = block_graph(qmodel, "block1")
    boxes, edges = graph.boxes, graph.edges
    assert (graph.block, graph.target) == ("block1", "openvino")
    kinds = {name: box.kind for name, box in boxes.items()}
    assert kinds["block1_conv1"] == kinds["block1_conv2"] == kinds["add"] == "int8"
    assert kinds["maxpool"] == kinds["block2_conv1"] == "outside"
    assert (boxes["block1_conv1"].title, boxes["add"].title) == ("conv1 + relu", "add + relu")
    assert not {"block1_relu", "block1_relu_1"} & set(boxes)
    assert [box.title for box in boxes.values() if box.kind == "quantizer"] == ["uint8", "int8", "uint8"]
    assert {b for a, b in edges if a == "maxpool"} == {"block1_conv1", "add"}
    passed = {name for name, box in boxes.items() if box.integers}
    assert passed == {"maxpool"} | {name for name, box in boxes.items() if box.kind == "quantizer"}
    edges = block_graph(qmodel, "block2").edges
    assert {b for a, b in edges if a == "quantizers_block1_relu_1"} == {"block2_conv1", "block2_downsample_0"}


def test_the_residual_add_is_in_the_kernel_of_its_layer_where_the_target_fuses_it():
    """TensorRT: conv + add + ReLU are one kernel, as the identity alone is quantized."""
    qmodel = insert_quantizers(TinyResNet(), torch.randn(2, 3, 16, 16), QuantSpec(target="tensorrt"))
    graph = block_graph(qmodel, "block2")
    boxes, edges = graph.boxes, graph.edges
    kernels = {name: box for name, box in boxes.items() if box.kind == "int8"}
    titles = {box.title for box in kernels.values()}
    assert titles == {"conv1 + relu", "conv2 + add + relu", "downsample.0"}
    into = [boxes[a].kind for a, b in edges if b == "block2_conv2"]
    assert into == ["quantizer", "quantizer"] and not any(box.kind == "float" for box in boxes.values())
    order = list(boxes)
    assert all(order.index(a) < order.index(b) for a, b in edges)


def test_a_png_is_drawn(qmodel):
    assert to_png(draw_block(block_graph(qmodel, "block2"))).startswith(b"\x89PNG")


def test_the_typical_block_is_the_smallest_in_which_branches_join(qmodel):
    """The second block has a layer more, in its shortcut."""
    assert typical_block(qmodel) == block_graph(qmodel, "block1")
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    graph = typical_block(insert_quantizers(plain, torch.randn(2, 3, 8, 8)))
    assert graph is not None and graph.block == ""
    assert [box.title for box in graph.boxes.values() if box.kind == "int8"] == ["0 + relu", "3"]
    deep = nn.Sequential(*(layer for _ in range(25) for layer in (nn.Conv2d(3, 3, 1), nn.ReLU())))
    assert typical_block(insert_quantizers(deep, torch.randn(2, 3, 8, 8))) is None


@pytest.mark.parametrize("form", [WIDE, NARROW], ids=lambda form: form.name)
def test_text_on_coloured_boxes_is_dark_on_every_screen(qmodel, form):
    """On dark pages the ink is bright, and so are the colours of the boxes."""
    figure = draw_block(block_graph(qmodel, "block1"), form)
    assert figure.get_figwidth() >= form.width
    svg = to_inline_svg(figure, key="k", label="a block")
    assert svg.count("fill: #10161e") == 2 * 6 and "fill: var(--sky)" in svg


def test_refusals(qmodel):
    with pytest.raises(QuantizationError, match="no block 'block3', did you mean 'block"):
        block_graph(qmodel, "block3")
    with pytest.raises(QuantizationError, match="holds no placement"):
        block_graph(TinyResNet(), "block1")


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 12).flatmap(lambda n: st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)))))
def test_boxes_do_not_overlap_and_edges_go_down(pairs):
    edges = [(f"n{min(p)}", f"n{max(p)}") for p in sorted(pairs) if p[0] != p[1]]
    nodes = sorted({n for e in edges for n in e}, key=lambda n: int(n[1:]))
    if not edges:
        return
    layout = lay_out(nodes, edges)
    for (ax, ay), (bx, by) in combinations(layout.places.values(), 2):
        assert ay != by or abs(ax - bx) > 0.99
    for edge, route in layout.routes.items():
        assert (route[0], route[-1]) == (layout.places[edge[0]], layout.places[edge[1]])
        assert all(a[1] < b[1] for a, b in pairwise(route))
        for point in route[1:-1]:
            assert all(point[1] != y or abs(point[0] - x) > 0.7 for x, y in layout.places.values())
