import itertools
import math
from dataclasses import replace

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image
from torch import nn

from analysis.roofline_layers.run import Block, convolution_rows, draw_blocks, draw_convolutions, network_blocks
from compress.plots.roofline import draw_ceilings, draw_roofline, draw_rooflines, family, roofline_caption
from compress.plots.style import save_figure, styled
from compress.roofline_model import Ceiling, Ceilings, Sample, find_device, roofline_of, workload
from tests.networks import Net


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
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert [t.splitlines()[0] for t in titles] == [p.device.title for p in panels]
    assert "on the roof that bounds it" in roofline_caption(panels[0])
    path = save_figure(draw_roofline(panels[0]), tmp_path / "one.png")
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert len(image.convert("RGB").getcolors(2**24)) > 20


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
    def sample(rate):
        return Sample(size=2048, rate=rate, arithmetic_intensity=300)

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
                samples=(Sample(size=256, rate=rate / 2, arithmetic_intensity=40), sample(rate)),
            )
            for name, rate in roofs.items()
        ),
    )
    figure = draw_ceilings(ceilings)
    assert overlapping_texts(figure) == []
    texts = " ".join(t.get_text() for t in figure.findobj(Text))
    assert "int8: 300 Gop/s" in texts
    assert "fp32: 90 Gflop/s" in texts  # the faster of both kernels is the roof
    assert "20 GB/s" in texts


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
