"""Draw the figures of the documentation's concept pages with the code that they explain."""

import torch
import torchvision
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from torch import Tensor

from analysis.common.study import study_options
from compress.measure.parity import sqnr_db
from compress.plots.layers import draw_block
from compress.plots.style import LIGHT, caption, compact, save_figure, styled
from compress.quantization import QuantSpec
from compress.quantization.block_graph import block_graph
from compress.quantization.calibration.calibrators import make_calibrator
from compress.quantization.numerics import QuantFormat, fake_quantize, scale_from_amax
from compress.quantization.placement.insert import insert_quantizers
from compress.sparsity.parametrization import nm_mask

CALIBRATORS = ("max", "percentile", "mse", "entropy")
_COLOURS = ("alarm", "amber", "green", "purple")


def activation(count: int = 400_000) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    bulk = torch.randn(count, generator=generator)
    tail = 4 * torch.randn(count // 400, generator=generator)
    return torch.cat([bulk, tail]).relu()


def ranges(x: Tensor, num_bits: int) -> dict[str, tuple[float, float]]:
    """Return (amax, SQNR in dB of the values quantized with it) of each calibrator, unsigned integers."""
    quant_format = QuantFormat(num_bits=num_bits, signed=False)
    found = {}
    for name in CALIBRATORS:
        calibrator = make_calibrator(name, num_bits=num_bits, signed=False)
        calibrator.collect(x)
        amax = calibrator.compute_amax()
        quantized = fake_quantize(x, scale_from_amax(amax, quant_format), quant_format)
        found[name] = (float(amax), sqnr_db(x.numpy(), quantized.numpy()))
    return found


def draw_calibration() -> Figure:
    """Draw one histogram, and for 8 and for 4 bits the range and the SQNR of each calibrator."""
    x = activation()
    with styled():
        figure = Figure(figsize=(9.4, 4.2), layout="constrained")
        for axes, num_bits in zip(figure.subplots(ncols=2, sharey=True), (8, 4), strict=True):
            axes.hist(x[x > 0].numpy(), bins=160, color=LIGHT["sky"])
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(FuncFormatter(compact))
            axes.yaxis.set_minor_locator(NullLocator())
            chosen = ranges(x, num_bits)
            for (name, (amax, ratio)), colour in zip(chosen.items(), _COLOURS, strict=True):
                axes.axvline(amax, color=LIGHT[colour], linewidth=1.6, label=f"{name}: amax {amax:.2f}, {ratio:.1f} dB")
            axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
            axes.set_xlabel("value after ReLU")
            axes.set_title(f"{num_bits} bits, unsigned", pad=36)
        figure.axes[0].set_ylabel("values in a bin")
        caption(
            figure,
            "One tensor, two widths; the legend gives the range that each calibrator chooses and the signal to noise "
            "of the quantized values. Values right of a line are clipped to it; values left of it are rounded to steps "
            "of amax / 255 or amax / 15. With 8 bits the steps are fine and clipping costs most; with 4 bits the steps "
            "cost most, and a range that clips the tail is better.",
        )
    return figure


def draw_two_four() -> Figure:
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    mask = nm_mask(weight, 2, 4)
    with styled():
        figure = Figure(figsize=(9.4, 3.3), layout="constrained")
        left, right = figure.subplots(ncols=2)
        _weight(left, weight, torch.ones_like(mask))
        _weight(right, weight, mask)
        left.set_title("dense")
        kept = float((weight * mask).abs().sum() / weight.abs().sum())
        right.set_title(f"2:4, {100 * kept:.0f} % of the magnitude kept")
        caption(
            figure,
            "Of every four weights along the input channels (between the lines) the two of least magnitude become "
            "zero. The GPU stores the two that are left and two bits for the place of each.",
        )
    return figure


def _weight(axes: Axes, weight: Tensor, mask: Tensor) -> None:
    shown = torch.where(mask.bool(), weight, torch.nan)
    axes.imshow(shown, cmap="RdBu_r", vmin=-2.5, vmax=2.5)
    for column in range(4, 16, 4):
        axes.axvline(column - 0.5, color=LIGHT["ink"], linewidth=1.4)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set(xlabel="input channels", ylabel="output channels")
    axes.grid(visible=False)


def main() -> None:
    out = study_options(__doc__, out="docs/figures").out
    torch.manual_seed(0)
    example = torch.randn(1, 3, 64, 64)
    for target in ("tensorrt", "openvino"):
        network = torchvision.models.resnet18()
        placed = insert_quantizers(network, example, QuantSpec(target=target))
        print(save_figure(draw_block(block_graph(placed, "layer2.0")), out / f"block_{target}.png"))
    print(save_figure(draw_calibration(), out / "calibration.png"))
    print(save_figure(draw_two_four(), out / "two_four.png"))


if __name__ == "__main__":
    main()
