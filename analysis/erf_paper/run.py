"""The figures of Luo et al., "Understanding the Effective Receptive Field" (arXiv 1701.04128), reproduced on a CPU.

Networks are stacks of 3 x 3 convolutions without bias. `uniform`: one channel, all weights 1/9. `random`: 16 channels,
normal weights of variance 1/fan-in (2/fan-in with ReLU), the mean over --runs networks, each on a fresh noise image.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from analysis.common.study import Row, option, study_options
from analysis.erf_gallery.run import draw_gallery
from compress.files import write_json
from compress.plots.erf import DECADES, HEAT, draw_box
from compress.plots.style import LIGHT, caption, plain_ticks, save_figure, styled
from compress.receptive import EffectiveReceptiveField, ErfOptions, effective_receptive_field
from compress.receptive.effective import THRESHOLD, above_threshold, distances, erf_metrics, second_moment

DEPTHS = (5, 10, 20, 40)
CHANNELS = 16


_COLOURS = ("blue", "alarm", "green", "amber", "purple")


def uniform_profile(layers: int, kernel: int) -> Tensor:
    """The influence, of sum 1, of equal linear convolutions along one axis (Luo et al., section 2.2)."""
    profile = torch.ones(1, dtype=torch.float64)
    for _ in range(layers):
        padded = torch.nn.functional.pad(profile, (kernel - 1, kernel - 1))
        profile = padded.unfold(0, kernel, 1).mean(1)
    return profile / profile.sum()


def uniform_sigma(layers: int, kernel: int) -> float:
    """The sigma of `uniform_profile`, sqrt(n (k^2 - 1) / 12) (Luo et al., section 2.2)."""
    return math.sqrt(layers * (kernel**2 - 1) / 12)


def gaussian_size(sigma: float) -> float:
    """A Gaussian's `size`: the root of its disc's area above `THRESHOLD`, pixels."""
    return sigma * math.sqrt(2 * math.pi * math.log(1 / THRESHOLD))


def mean_field(fields: Sequence[EffectiveReceptiveField]) -> EffectiveReceptiveField:
    heat, row = torch.stack([f.heat / f.heat.sum() for f in fields]).mean(0), fields[0].theoretical
    metrics = erf_metrics(heat, fields[0].centre, theoretical=row.local_size if row else None)
    return replace(fields[0], heat=heat, images=sum(f.images for f in fields), metrics=metrics)


@dataclass(frozen=True, kw_only=True)
class PowerLaw:
    """y = factor * x^exponent."""

    exponent: float
    factor: float


def power_law(x: Sequence[float], y: Sequence[float]) -> PowerLaw:
    """The least squares of logarithms, positive points.

    >>> power_law([1, 2, 4], [3, 12, 48])
    PowerLaw(exponent=2.0, factor=3.0)
    """
    logs = [(math.log(a), math.log(b)) for a, b in zip(x, y, strict=True)]
    mean_x, mean_y = (sum(column) / len(logs) for column in zip(*logs, strict=True))
    exponent = sum((a - mean_x) * (b - mean_y) for a, b in logs) / sum((a - mean_x) ** 2 for a, _ in logs)
    return PowerLaw(exponent=round(exponent, 9), factor=round(math.exp(mean_y - exponent * mean_x), 9))


def draw_depth(
    sizes: Mapping[str, Sequence[tuple[int, float]]],
    closed: Mapping[str, Sequence[tuple[int, float]]],
    theory: Mapping[int, int],
    text: str,
) -> Figure:
    """Size against depth, and its share of the theoretical field.

    Args:
        sizes: name -> (layers, measured size in pixels).
        closed: name -> (layers, size by a closed form), drawn as lines.
        theory: layers -> theoretical size.
        text: what to see.
    """
    with styled():
        figure = Figure(figsize=(10.6, 4.7), layout="constrained")
        left, right = figure.subplots(ncols=2)
        for name, points in closed.items():
            style = "-" if "equal" in name else ":"
            left.plot(*zip(*points, strict=True), color=LIGHT["muted"], linestyle=style, linewidth=1.2, label=name)
            share = [(n, size / theory[n]) for n, size in points]
            right.plot(*zip(*share, strict=True), color=LIGHT["muted"], linestyle=style, linewidth=1.2)
        for place, (name, points) in enumerate(sizes.items()):
            colour, marker = LIGHT[_COLOURS[place]], "os^Dv"[place]
            law = power_law(*zip(*points, strict=True))
            shares = [(n, size / theory[n]) for n, size in points]
            falling = power_law(*zip(*shares, strict=True))
            left.plot(
                *zip(*points, strict=True), marker, color=colour, markersize=6, label=f"{name}: n^{law.exponent:.2f}"
            )
            right.plot(
                *zip(*shares, strict=True),
                marker,
                color=colour,
                markersize=6,
                label=f"{name}: n^{falling.exponent:.2f}",
            )
        left.set(xlabel="convolutions of 3 × 3", ylabel="side of the effective field, px")
        right.set(xlabel="convolutions of 3 × 3", ylabel="side over that of the theoretical field")
        left.set_title("It grows with the square root of the depth")
        right.set_title("Its share of the theoretical field falls")
        for axes in (left, right):
            _plain_logs(axes, [n for points in sizes.values() for n, _ in points])
            axes.legend(fontsize=7.5)
        caption(figure, text)
        return figure


def _plain_logs(axes: Axes, ticks: Sequence[float]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.set_xticks(sorted(set(ticks)))
    for axis in (axes.xaxis, axes.yaxis):
        plain_ticks(axis)


def ring_share(field: EffectiveReceptiveField, ring: tuple[float, float]) -> float:
    distance = distances(field.heat.shape, field.centre)
    inside = (distance >= ring[0]) & (distance <= ring[1])
    return float(field.heat[inside].sum() / field.heat.sum())


def draw_training(
    fields: Sequence[tuple[int, float, EffectiveReceptiveField]], *, ring: tuple[float, float], text: str
) -> Figure:
    """A field while a network learns, with the ring that holds the answer.

    Args:
        fields: (step, accuracy in percent, field); first and last are drawn as maps.
        ring: least and largest distance, pixels.
        text: what to see.
    """
    with styled():
        figure = Figure(figsize=(10.6, 4.3), layout="constrained")
        first, last, right = figure.subplots(ncols=3, width_ratios=(1, 1, 1.25))
        for axes, (step, accuracy, field) in ((first, fields[0]), (last, fields[-1])):
            scale = axes.imshow(field.normalized.clamp_min(10**-DECADES).log10(), cmap=HEAT, vmin=-DECADES, vmax=0)
            draw_box(axes, field, "white")
            axes.grid(visible=False)
            axes.set(xlabel="column, px", ylabel="row, px")
            axes.set_title(f"step {step}: {accuracy:.0f} % right", fontsize=9.5)
            angles = [2 * math.pi * i / 180 for i in range(181)]
            for radius in ring:
                axes.plot(
                    [field.centre[1] + radius * math.cos(a) for a in angles],
                    [field.centre[0] + radius * math.sin(a) for a in angles],
                    color=LIGHT["sky"],
                    linewidth=1,
                )
        figure.colorbar(scale, ax=[first, last], location="bottom", shrink=0.6, label="log10 of the influence")
        steps = [step for step, _, _ in fields]
        shares = [100 * ring_share(field, ring) for _, _, field in fields]
        right.plot(steps, shares, color=LIGHT["blue"], marker="o", markersize=3)
        right.set(xlabel="training step", ylabel="influence inside the ring, %", ylim=(0, 1.15 * max(shares)))
        right.yaxis.label.set_color(LIGHT["blue"])
        other = right.twinx()
        other.plot(steps, [accuracy for _, accuracy, _ in fields], color=LIGHT["alarm"], linestyle="--")
        other.set_ylabel("right answers, % (dashed)", color=LIGHT["alarm"])
        other.set_ylim(0, 101)
        other.grid(visible=False)
        right.set_title("It learns to look where the answer is", fontsize=9.5)
        caption(figure, text)
        return figure


class Dropout(nn.Module):
    """Dropout that is active in evaluation too, because its effect on the gradient is measured."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=True)


class Skip(nn.Module):
    """A residual block of two convolutions, scaled so that the variance is preserved."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.layers(x)) / math.sqrt(2)


def conv(inputs: int, outputs: int, *, gain: float = 2.0, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    """Return a 3 x 3 convolution with normal weights of variance gain / fan-in that preserves the size of the map."""
    layer = nn.Conv2d(inputs, outputs, 3, stride, dilation, dilation, bias=False)
    nn.init.normal_(layer.weight, std=math.sqrt(gain / (9 * inputs)))
    return layer


def stack(
    depth: int = 20,
    *,
    act: Callable[[], nn.Module] | None = nn.ReLU,
    gain: float = 2.0,
    dropout: bool = False,
    stride: Callable[[int], int] = lambda layer: 1,
    dilation: Callable[[int], int] = lambda layer: 1,
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i in range(depth):
        inputs = 1 if i == 0 else CHANNELS
        layers.append(conv(inputs, CHANNELS, gain=gain, stride=stride(i), dilation=dilation(i)))
        layers += [*([act()] if act else []), *([Dropout()] if dropout else [])]
    return nn.Sequential(*layers)


def uniform(depth: int) -> nn.Sequential:
    layers = [nn.Conv2d(1, 1, 3, padding=1, bias=False) for _ in range(depth)]
    for layer in layers:
        nn.init.constant_(layer.weight, 1 / 9)
    return nn.Sequential(*layers)


def measure(make: Callable[[], nn.Module], side: int, runs: int, *, label: str) -> EffectiveReceptiveField:
    fields = []
    for run in range(runs):
        torch.manual_seed(run)
        model, image = make(), torch.randn(1, 1, side, side)
        fields.append(effective_receptive_field(model, image, options=ErfOptions(double=True, seed=run)))
    return EffectiveReceptiveField(**{**vars(mean_field(fields)), "layer": label})


def numbers(field: EffectiveReceptiveField) -> Row:
    return {
        "size_px": field.metrics.size,
        "sigma_moment_px": second_moment(field.heat)[0],
        "sigma_fit_px": field.metrics.gaussian.sigma[0],
        "gaussian_r_squared": field.metrics.gaussian.r_squared,
        "share_of_theoretical": field.metrics.theoretical_share,
    }


def growth(out: Path, runs: int) -> None:
    kinds: dict[str, Callable[[int], Callable[[], nn.Module]]] = {
        "equal weights": lambda n: lambda: uniform(n),
        "random, linear": lambda n: lambda: stack(n, act=None, gain=1.0),
        "random, ReLU": lambda n: lambda: stack(n),
        "random, tanh": lambda n: lambda: stack(n, act=nn.Tanh, gain=1.0),
    }
    fields = {
        kind: [measure(make(n), 2 * n + 9, 1 if kind == "equal weights" else runs, label=f"{n} layers") for n in DEPTHS]
        for kind, make in kinds.items()
    }
    sizes = {kind: [(n, f.metrics.size) for n, f in zip(DEPTHS, row, strict=True)] for kind, row in fields.items()}
    exact = []
    for n in range(DEPTHS[0], DEPTHS[-1] + 1):
        profile = uniform_profile(n, 3)
        exact.append((n, math.sqrt(above_threshold(profile[:, None] * profile[None]))))
    wider = [(n, gaussian_size(math.sqrt(2) * uniform_sigma(n, 3))) for n, _ in exact]
    laws = {kind: power_law(*zip(*points, strict=True)).exponent for kind, points in sizes.items()}
    text = (
        "Mean field side (square root of the pixels above 4.55 % of the largest). With equal weights the sizes are "
        "those of the closed form to the pixel: 8.31, 11.70, 16.16, 22.74. With random weights the gradient's "
        "variance, not the gradient, is that Gaussian, and so its magnitude is wider, by the square root of 2 in the "
        "limit of many runs and layers (dotted). "
        "All grow with about the square root of the depth, while the theoretical field grows with the depth."
    )
    figure = draw_depth(
        sizes,
        {"closed form, equal weights": exact, "Gaussian, σ · √2": wider},
        {n: 2 * n + 1 for n, _ in exact},
        text,
    )
    print(save_figure(figure, out / "paper_growth.png"))
    text = (
        "One row for each kind of network, from 5 to 40 layers; the dashed box is the theoretical field. The field is "
        "a Gaussian that fills less and less of the box. Each column has its own scale."
    )
    print(save_figure(draw_gallery(list(fields.items()), text=text), out / "paper_maps.png"))
    found = {
        kind: {str(n): numbers(f) for n, f in zip(DEPTHS, row, strict=True)} | {"growth_exponent": laws[kind]}
        for kind, row in fields.items()
    }
    write_json(out / "paper_growth.json", {"runs": runs, "channels": CHANNELS, "kinds": found})


def residual() -> nn.Module:
    blocks: list[nn.Module] = [conv(1, CHANNELS), nn.ReLU()]
    for i in range(10):
        first = [] if i == 0 else [conv(CHANNELS, CHANNELS), nn.ReLU()]
        blocks.append(Skip(*first, conv(CHANNELS, CHANNELS)))
        blocks.append(nn.ReLU())
    return nn.Sequential(*blocks)


def architecture(out: Path, runs: int) -> None:
    variants: dict[str, Callable[[], nn.Module]] = {
        "plain": stack,
        "dropout 0.5": lambda: stack(dropout=True),
        "skip connections": residual,
        "dilation": lambda: stack(dilation=lambda i: 1 if i < 8 else 2 if i < 14 else 4),
        "subsampling": lambda: stack(stride=lambda i: 2 if i in (6, 13) else 1),
    }
    fields = [measure(make, 161, runs, label=name) for name, make in variants.items()]
    text = (
        "Twenty 3 × 3 convolutions with ReLU and random weights, the same scale of pixels everywhere. Dropout hardly "
        "changes it; skip connections make the field smaller, as short paths weigh most; dilation and subsampling "
        "widen it to more than twice the side with the same number of weights."
    )
    print(save_figure(draw_gallery([("20 layers", fields)], text=text), out / "paper_architecture.png"))
    write_json(out / "paper_architecture.json", {"runs": runs, "variants": {f.layer: numbers(f) for f in fields}})


RING = (10.0, 14.0)
SIDE = 33


def compass(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return noise images with a bright spot 10 to 14 pixels from the centre, and which of 8 directions it lies in."""
    images = 0.3 * torch.randn(count, 1, SIDE, SIDE, generator=generator)
    targets = torch.randint(0, 8, (count,), generator=generator)
    radius = RING[0] + (RING[1] - RING[0]) * torch.rand(count, generator=generator)
    angle = targets * (math.pi / 4) + 0.3 * (torch.rand(count, generator=generator) - 0.5)
    rows = (SIDE // 2 + radius * angle.sin()).round().long()
    columns = (SIDE // 2 + radius * angle.cos()).round().long()
    for i in range(count):
        images[i, 0, rows[i] - 1 : rows[i] + 2, columns[i] - 1 : columns[i] + 2] += 2.0
    return images, targets


def training(out: Path, steps: int) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(15):
        layer = conv(1 if i == 0 else CHANNELS, CHANNELS)
        layer.padding = (0, 0)  # 33 pixels become 3, so that only the central units are computed
        layers += [layer, nn.BatchNorm2d(CHANNELS), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(CHANNELS, 8, 1))
    generator = torch.Generator().manual_seed(1)
    test_images, test_targets = compass(256, torch.Generator().manual_seed(2))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)
    looks = sorted({0, *(round(steps * i / 10) for i in range(11))})
    found = []
    for step in range(steps + 1):
        if step in looks:
            field = effective_receptive_field(model, test_images[:64], options=ErfOptions(batch_size=64))
            found.append((step, accuracy(model, test_images, test_targets), field))
        if step < steps:
            images, targets = compass(64, generator)
            loss = F.cross_entropy(model.train()(images)[:, :, 1, 1], targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    shares = [100 * ring_share(f, RING) for _, _, f in found]
    text = (
        "15 convolutions, of which the central unit learns to name the direction of a spot that lies between the blue "
        f"circles. Before training, {shares[0]:.0f} % of its influence lies there; after it, {shares[-1]:.0f} %, and "
        f"the side has grown from {found[0][2].metrics.size:.0f} to {found[-1][2].metrics.size:.0f} px: a network "
        "learns to look where the answer is, within its theoretical field (dashed)."
    )
    print(save_figure(draw_training(found, ring=RING, text=text), out / "paper_training.png"))
    write_json(
        out / "paper_training.json",
        {
            "steps": [
                {"step": s, "accuracy_percent": a, "ring_share": ring_share(f, RING), **numbers(f)} for s, a, f in found
            ]
        },
    )


def accuracy(model: nn.Module, images: Tensor, targets: Tensor) -> float:
    with torch.no_grad():
        predicted = model.eval()(images)[:, :, 1, 1].argmax(1)
    return 100 * float((predicted == targets).float().mean())


def main() -> None:
    arguments = study_options(
        __doc__,
        option("--part", choices=("growth", "architecture", "training"), default=None),
        option("--runs", type=int, default=20),
        option("--steps", type=int, default=600),
        out="results/receptive_field",
    )
    if arguments.part in (None, "growth"):
        growth(arguments.out, arguments.runs)
    if arguments.part in (None, "architecture"):
        architecture(arguments.out, arguments.runs)
    if arguments.part in (None, "training"):
        training(arguments.out, arguments.steps)


if __name__ == "__main__":
    main()
