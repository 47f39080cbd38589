import io
import itertools
import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import combinations, pairwise

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image
from torch import nn

from analysis.roofline_layers.run import Block, convolution_rows, draw_blocks, draw_convolutions, network_blocks
from compress import QuantSpec, insert_quantizers
from compress.errors import QuantizationError
from compress.plots.layers import (
    clipped_share,
    draw_block,
    draw_bytes,
    draw_sqnr,
    expected_sqnr_db,
    interesting,
    largest,
    lay_out,
    sqnr_series,
    weight_groups,
    worst,
)
from compress.plots.results import Point, draw_tradeoff, place_labels
from compress.plots.roofline import draw_ceilings, draw_roofline, draw_rooflines, family, roofline_caption
from compress.plots.style import (
    DARK,
    LIGHT,
    NARROW,
    WIDE,
    save_figure,
    settle,
    styled,
    to_inline_svg,
    to_png,
    variant_colours,
)
from compress.quantization.block_graph import block_graph, typical_block
from compress.records.files import Histogram, LayerRow
from compress.roofline_model import Ceiling, Ceilings, Sample, find_device, roofline_of, workload
from tests.networks import Net, TinyResNet


def histogram_of(values, *, bins=1024, amax, signed=True):
    counts, edges = np.histogram(values, bins=bins)
    return Histogram(name="x", counts=tuple(counts), bin_edges=tuple(edges), amax=amax, signed=signed)


def layer(name, sqnr=None, *, before=0, after=None):
    return LayerRow(
        name=name, kind="conv", float_weight_bytes=before, quantized_weight_bytes=after, activation_sqnr_db=sqnr
    )


@pytest.mark.parametrize("amax", [0.5, 1.0, 2.0, 3.5, 10.0])
def test_clipped_share_is_that_of_the_values(amax):
    values = np.random.default_rng(0).normal(size=20_000)
    for sample in (values, np.abs(values)):
        truth = float((np.abs(sample) > amax).mean())
        assert clipped_share(histogram_of(sample, amax=amax)) == pytest.approx(truth, abs=2e-3)


def test_two_edges_stand_for_equal_bins():
    counts = (5.0, 3.0, 2.0, 1.0)
    full = Histogram(name="x", counts=counts, bin_edges=(0.0, 1.0, 2.0, 3.0, 4.0), amax=2.5)
    short = Histogram(name="x", counts=counts, bin_edges=(0.0, 4.0), amax=2.5)
    assert clipped_share(full) == clipped_share(short) == pytest.approx((0.5 * 2 + 1) / 11)
    assert largest(short) == 4.0


@pytest.mark.parametrize("amax", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("signed", [True, False])
def test_expected_sqnr_is_that_of_fake_quantization(amax, signed):
    values = torch.randn(50_000) if signed else torch.randn(50_000).abs()
    low, high = (-127, 127) if signed else (0, 255)
    quantized = torch.fake_quantize_per_tensor_affine(values, amax / high, 0, low, high)
    truth = 10 * math.log10(float(values.square().sum() / (values - quantized).square().sum()))
    histogram = histogram_of(values.numpy(), bins=4096, amax=amax, signed=signed)
    assert expected_sqnr_db(histogram) == pytest.approx(truth, abs=0.1)


def test_interesting_leaves_out_what_cannot_be_drawn():
    good = Histogram(name="good", counts=(4.0, 1.0), bin_edges=(0.0, 2.0), amax=1.0)
    never = Histogram(name="never ran", counts=(0.0, 0.0), bin_edges=(0.0, 2.0), amax=1.0)
    zero = Histogram(name="zero", counts=(4.0, 0.0), bin_edges=(0.0, 0.0), amax=0.0)
    assert interesting([never, good, zero]) == (good,)


def test_worst_layers_are_the_lowest():
    series = sqnr_series([layer(str(i), float(i % 10)) for i in range(30)] + [layer("inf", math.inf), layer("none")])
    (values,) = series.values()
    assert len(values) == 30
    assert [value for _, value in worst(values)] == [0.0, 0.0, 0.0, 1.0, 1.0]


def test_groups_keep_every_byte_and_float_layers_count_alike():
    rows = [layer(f"features.{i}.conv", before=400, after=None if i == 3 else 110) for i in range(40)]
    groups = weight_groups([*rows, layer("fc", before=4000, after=1010)])
    assert len(groups) <= 12
    assert sum(g[1] for g in groups) == 40 * 400 + 4000
    assert sum(g[2] for g in groups) == 39 * 110 + 400 + 1010


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 800), st.integers(0, 400)), min_size=1, max_size=14), st.integers(20, 90))
def test_labels_keep_clear_of_each_other_of_points_and_of_the_edge(points, width):
    boxes = place_labels(points, [(width, 12)] * len(points), bounds=(-150, -60, 950, 460))
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    for (x0, y0, x1, y1), (x, y) in itertools.product(boxes, points):
        assert not (x0 < x < x1 and y0 < y < y1)
    for x0, y0, x1, y1 in boxes:
        assert (x0, y0) >= (-150, -60) and x1 <= 950 and y1 <= 460 and y0 >= -60


@pytest.mark.parametrize("form", [WIDE, NARROW])
def test_no_text_of_the_tradeoff_figure_lies_on_another_or_outside(form):
    points = [
        Point(variant=v, engine=e, batch_size=1, score=t + 0.02 * k, p50_ms=ms * s)
        for k, (e, s) in enumerate({"openvino (f32)": 1.0, "openvino (bf16)": 0.55, "onnxruntime": 1.6}.items())
        for v, t, ms in (("float", 76.1, 10.0), ("ptq", 75.2, 3.0), ("qat", 76.0, 3.0), ("qat-2:4", 75.1, 2.2))
    ]
    with styled():
        figure = settle(draw_tradeoff(points, form))
        drawn = {t.text for t in ET.fromstring(to_inline_svg(figure, key="k", label="")).iter("text")}
        figure.draw_without_rendering()  # back at the figure's own resolution
        texts = [t for t in figure.findobj(Text) if t.get_text() in drawn]  # without ticks beyond the axes
        extents = [t.get_window_extent() for t in texts]
    assert sum("QAT" in t.get_text() for t in texts) == 3
    for (a, box_a), (b, box_b) in itertools.combinations(zip(texts, extents, strict=True), 2):
        shared = min(box_a.x1, box_b.x1) - max(box_a.x0, box_b.x0), min(box_a.y1, box_b.y1) - max(box_a.y0, box_b.y0)
        assert min(shared) <= 1.0, f"{a.get_text()!r} lies on {b.get_text()!r}"
    width, height = figure.bbox.width, figure.bbox.height
    for text, box in zip(texts, extents, strict=True):
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text.get_text()


def test_svg_is_well_formed_themed_and_keeps_its_words():
    label = 'a "quoted" <label> & more'
    with styled():
        name = "rate #0072b2 3.14159265 url(#a) $x^2$ <b>"
        figure = draw_sqnr({name: [("a", 30.0), ("b", 20.0), ("c", 25.0)]}, WIDE)
        svg = to_inline_svg(figure, key="k", label=label)
    root = ET.fromstring(svg)
    assert root.attrib["aria-label"] == label
    assert name in ["".join(t.itertext()).strip() for t in root.iter("text")]
    attributes = " ".join(value for element in root.iter() for value in element.attrib.values())
    assert "var(--blue)" in attributes and "var(--alarm)" in attributes
    assert not any(colour in attributes for colour in LIGHT.values())
    assert all(e.attrib["id"].startswith("k-") for e in root.iter() if "id" in e.attrib)


def test_png_is_an_image_of_the_figures_size():
    with styled():
        figure = draw_bytes([], [("float", 4e6), ("qat", 1e6)], NARROW)
        image = Image.open(io.BytesIO(to_png(figure, dpi=100)))
    assert image.width == round(100 * NARROW.width)
    assert image.convert("L").getextrema()[0] < 100  # something dark is drawn on it


def test_the_style_leaves_no_trace():
    before = dict(matplotlib.rcParams)
    with styled():
        pass
    assert dict(matplotlib.rcParams) == before


def contrast(a: str, b: str) -> float:
    # WCAG 2.1 contrast ratio of two #rrggbb colours.
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    first, second = sorted((luminance(a), luminance(b)), reverse=True)
    return (first + 0.05) / (second + 0.05)


@pytest.mark.parametrize("palette", [LIGHT, DARK])
def test_text_can_be_read_and_marks_can_be_seen(palette):
    assert set(palette) == set(LIGHT)
    for name in ("ink", "muted"):
        assert contrast(palette[name], palette["paper"]) >= 4.5  # WCAG AA for text
    for name in ("grey", "blue", "green", "purple", "alarm"):
        assert contrast(palette[name], palette["paper"]) >= 3.0  # WCAG AA for graphics


def test_well_known_variants_keep_their_colour():
    alone, among = variant_colours(("float", "qat")), variant_colours(("float", "a", "ptq", "qat", "b"))
    assert alone["qat"] == among["qat"] and alone["float"] == among["float"]
    assert len(set(among.values())) == 5


@settings(max_examples=25)
@given(st.sets(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=9))
def test_a_label_is_nearest_to_its_own_point(cells):
    # Where there is room; on crowded figures a thin line leads from the label to its point.
    points = [(120.0 * x, 60.0 * y) for x, y in sorted(cells)]
    boxes = place_labels(points, [(50, 12)] * len(points), bounds=(-150, -80, 700, 400))
    for i, (x0, y0, x1, y1) in enumerate(boxes):
        distances = [math.dist((x, y), (min(max(x, x0), x1), min(max(y, y0), y1))) for x, y in points]
        assert min(distances) == distances[i] and sorted(distances)[1] > distances[i]


# The figure of a block: which boxes and edges, and that the layout can be read.


@pytest.fixture(scope="module")
def qmodel():
    return insert_quantizers(TinyResNet(), torch.randn(2, 3, 16, 16), QuantSpec(target="openvino"))


def test_a_residual_block_shows_what_is_quantized(qmodel):
    graph = block_graph(qmodel, "block1")
    boxes = graph.boxes
    assert (graph.block, graph.target) == ("block1", "openvino")
    kinds = {name: box.kind for name, box in boxes.items()}
    assert kinds["block1_conv1"] == kinds["block1_conv2"] == kinds["add"] == "int8"
    assert kinds["maxpool"] == kinds["block2_conv1"] == "outside"
    assert (boxes["block1_conv1"].title, boxes["add"].title) == ("conv1 + relu", "add + relu")
    assert not {"block1_relu", "block1_relu_1"} & set(boxes)
    assert [box.title for box in boxes.values() if box.kind == "quantizer"] == ["uint8", "int8", "uint8"]
    assert {b for a, b in graph.edges if a == "maxpool"} == {"block1_conv1", "add"}
    passed = {name for name, box in boxes.items() if box.integers}
    assert passed == {"maxpool"} | {name for name, box in boxes.items() if box.kind == "quantizer"}
    edges = block_graph(qmodel, "block2").edges
    assert {b for a, b in edges if a == "quantizers_block1_relu_1"} == {"block2_conv1", "block2_downsample_0"}


def test_the_residual_add_is_in_the_kernel_of_its_layer_where_the_target_fuses_it():
    # TensorRT: conv + add + ReLU are one kernel, as the identity alone is quantized.
    qmodel = insert_quantizers(TinyResNet(), torch.randn(2, 3, 16, 16), QuantSpec(target="tensorrt"))
    graph = block_graph(qmodel, "block2")
    boxes, order = graph.boxes, list(graph.boxes)
    titles = {box.title for box in boxes.values() if box.kind == "int8"}
    assert titles == {"conv1 + relu", "conv2 + add + relu", "downsample.0"}
    into = [boxes[a].kind for a, b in graph.edges if b == "block2_conv2"]
    assert into == ["quantizer", "quantizer"] and not any(box.kind == "float" for box in boxes.values())
    assert all(order.index(a) < order.index(b) for a, b in graph.edges)


def test_the_typical_block_is_the_smallest_in_which_branches_join(qmodel):
    # The second block has a layer more, in its shortcut.
    assert typical_block(qmodel) == block_graph(qmodel, "block1")
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    graph = typical_block(insert_quantizers(plain, torch.randn(2, 3, 8, 8)))
    assert graph is not None and graph.block == ""
    assert [box.title for box in graph.boxes.values() if box.kind == "int8"] == ["0 + relu", "3"]
    deep = nn.Sequential(*(layer for _ in range(25) for layer in (nn.Conv2d(3, 3, 1), nn.ReLU())))
    assert typical_block(insert_quantizers(deep, torch.randn(2, 3, 8, 8))) is None


@pytest.mark.parametrize("form", [WIDE, NARROW], ids=lambda form: form.name)
def test_text_on_coloured_boxes_is_dark_on_every_screen(qmodel, form):
    # On dark pages the ink is bright, and so are the colours of the boxes.
    figure = draw_block(block_graph(qmodel, "block1"), form)
    assert figure.get_figwidth() >= form.width
    svg = to_inline_svg(figure, key="k", label="a block")
    assert svg.count("fill: #10161e") == 2 * 6 and "fill: var(--sky)" in svg


def test_refusals(qmodel):
    with pytest.raises(QuantizationError, match="no block 'block3', did you mean 'block"):
        block_graph(qmodel, "block3")
    with pytest.raises(QuantizationError, match="holds no placement"):
        block_graph(TinyResNet(), "block1")


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


def small_network():
    # One layer of each family, so that every colour occurs.
    def run(net, x):
        x = net.pool(net.point(torch.relu(net.depthwise(net.stem(x))))).flatten(2).transpose(1, 2)
        return net.head(net.attention(x, x, x, need_weights=False)[0].mean(1))

    return Net(
        run,
        stem=nn.Conv2d(3, 32, 3, padding=1),
        depthwise=nn.Conv2d(32, 32, 3, padding=1, groups=32),
        point=nn.Conv2d(32, 64, 1),
        pool=nn.AdaptiveAvgPool2d(2),
        attention=nn.MultiheadAttention(64, 4, batch_first=True),
        head=nn.Linear(64, 10),
    )


@pytest.fixture(scope="module")
def work():
    return replace(workload(small_network(), torch.randn(2, 3, 32, 32), fused=True), model="network")


def overlapping_texts(figure):
    with styled():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        renderer = canvas.get_renderer()
        hidden = _labels_off_the_axes(figure)
        texts = [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and id(t) not in hidden]
        boxes = [(t.get_text(), t.get_window_extent(renderer).padded(-1.5)) for t in texts]
    frame = figure.bbox
    outside = [(name, "the edge") for name, b in boxes if b.x0 < 0 or b.y0 < 0 or b.x1 > frame.x1 or b.y1 > frame.y1]
    return outside + [(a, b) for (a, x), (b, y) in itertools.combinations(boxes, 2) if x.overlaps(y)]


def _labels_off_the_axes(figure):
    hidden = set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.majorTicks, *axis.minorTicks):
                if not low <= tick.get_loc() <= high:
                    hidden |= {id(tick.label1), id(tick.label2)}
    return hidden


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("t4", "fp32"),
        ("rtx4090", "int8-2:4"),
        ("orin-nano", "fp16"),
    ],
)
def test_no_text_lies_on_another(work, device, precision):
    assert overlapping_texts(draw_roofline(roofline_of(work, device=device, precision=precision))) == []


def test_panels_and_captions(work, tmp_path):
    panels = [roofline_of(work, device=d, precision="int8") for d in ("t4", "a100", "h200", "orin")]
    figure = draw_rooflines(panels)
    assert overlapping_texts(figure) == []
    titles = [axes.get_title(loc="left").splitlines()[0] for axes in figure.axes]
    assert titles == [p.device.title for p in panels]
    assert "on the roof that bounds it" in roofline_caption(panels[0])
    path = save_figure(draw_roofline(panels[0]), tmp_path / "one.png")
    with Image.open(path) as image:
        assert image.format == "PNG" and len(image.convert("RGB").getcolors(2**24)) > 20


def test_families_of_layers(work):
    found = {row.name: family(row) for row in roofline_of(work, device="t4", precision="fp16").rows}
    assert found == {
        "stem": "wider convolution",
        "depthwise": "depthwise or grouped",
        "point": "1x1 convolution",
        "pool": "no products",
        "attention": "attention, matmul",
        "mean": "no products",
        "head": "linear",
    }


def test_measured_roofs_are_drawn():
    roofs = {
        "fp8": 3.2e11,
        "fp16-2:4": 2.9e11,
        "tf32": 8.5e10,
        "copy": 2e10,
        "fp32": 8e10,
        "fp32 conv": 9e10,
        "bf16": 2e11,
        "int8": 3e11,
    }
    ceilings = Ceilings(
        backend="cpu",
        title="A processor",
        threads=2,
        rounds=3,
        torch_version="2.11",
        load_average=(),
        ceilings=tuple(
            Ceiling(
                name=name,
                rate=rate,
                unit="bytes/s" if name == "copy" else "flops/s",
                method="m",
                samples=(
                    Sample(size=256, rate=rate / 2, arithmetic_intensity=40),
                    Sample(size=2048, rate=rate, arithmetic_intensity=300),
                ),
            )
            for name, rate in roofs.items()
        ),
    )
    figure = draw_ceilings(ceilings)
    assert overlapping_texts(figure) == []
    texts = " ".join(t.get_text() for t in figure.findobj(Text))
    for roof in ("int8: 300 Gop/s", "fp32: 90 Gflop/s", "20 GB/s"):  # of fp32 the faster of both kernels
        assert roof in texts


def test_convolutions_by_closed_form():
    device = find_device("h200")
    settings = {"device": device, "precision": "int8", "batch_size": 2, "size": 14}
    for name, side in (("1x1", 1), ("3x3", 3), ("5x5", 5)):
        for row, c in zip(convolution_rows(name, **settings, channels=(8, 64)), (8, 64), strict=True):
            pixels = 2 * 14 * 14
            expected = 2 * pixels * c * c * side**2 / (2 * pixels * c + c * c * side**2)
            assert row.arithmetic_intensity == pytest.approx(expected)
    for row in convolution_rows("3x3 depthwise", **settings):
        assert row.arithmetic_intensity < 9  # 18 flops a value, which is read and written
    assert overlapping_texts(draw_convolutions(device)) == []


def test_blocks_gather_costs_and_fields(work):
    result = roofline_of(work, device="h200", precision="int8")
    fields = {"stem": 3.0, "depthwise": 5.0, "pool": float("inf")}
    blocks = network_blocks(result, fields, {"stem": 2.5, "depthwise": 3.5}, depth=1)
    assert [b.name for b in blocks] == ["stem", "depthwise", "point", "pool", "attention", "head"]
    assert [b.receptive_field for b in blocks] == [3, 5, 5, float("inf"), float("inf"), float("inf")]
    assert [b.effective_field for b in blocks[:2]] == [2.5, 3.5]
    assert all(math.isnan(b.effective_field) for b in blocks[2:])
    assert sum(b.flops for b in blocks) == result.flops / 2
    assert sum(b.least_time_ms for b in blocks) == pytest.approx(result.least_time_ms / 2)
    other = [Block(name="a", flops=1e8, least_time_ms=0.1, receptive_field=7)]
    figure = draw_blocks({"one": blocks, "two": other}, input_size=32, device_title="H200", precision="int8")
    assert overlapping_texts(figure) == []
