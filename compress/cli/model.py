"""Commands that look at a model: `inspect model`, `roofline`, `receptive-field`, `erf`."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from torch import Tensor, nn

from compress.cli.console import OUT, print_json, print_next, print_table, progress
from compress.cli.options import JsonOption, ModelChoice, RecipeChoice, SetOption
from compress.cli.plan import weights_text
from compress.data.base import BatchPlan
from compress.data.load import class_count, load_data
from compress.errors import RecipeError
from compress.graph.canonical import canonical_graph, check_float_model
from compress.graph.layers import layers, total_macs
from compress.graph.report import leaves_of
from compress.graph.trace import trace
from compress.models.by_name import build_model
from compress.plots.roofline import draw_ceilings, draw_roofline
from compress.plots.style import save_figure
from compress.quantization import QuantSpec
from compress.recipe.tree import Recipe, load_recipe, parse_recipe
from compress.roofline_model import (
    SparseLayer,
    ceilings_text,
    measure_ceilings,
    rows_text,
    sparse_bound,
    summary_text,
    what_if_text,
)
from compress.roofline_model.counting import count
from compress.roofline_model.model import find_device, roofline_of, scenarios
from compress.sparsity import SparsitySpec
from compress.sparsity.eligibility import NOTEWORTHY_CHANNELS, Eligibility, eligibility, large_enough
from compress.support.limits import COUNT, IMAGE_SIDE
from compress.support.text import image_size_text

if TYPE_CHECKING:
    from compress.quantization.placement.decisions import Decision

IMAGENET_CLASSES = 1000


@dataclass(frozen=True, kw_only=True)
class Network:
    """Options that name a network."""

    recipe: RecipeChoice = None
    model: ModelChoice = None
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights", help="With --model: a file, or a name such as IMAGENET1K_V2; default: random weights."
        ),
    ] = None
    image_size: Annotated[
        int,
        typer.Option("--image-size", min=8, max=IMAGE_SIDE, help="Side of the input in pixels, without a recipe."),
    ] = 224
    set_: SetOption = None

    def read(self, *further: str) -> Recipe:
        """The recipe, with these changes too."""
        changes = [*(self.set_ or ()), *further]
        if (self.recipe is None) == (self.model is None):
            raise RecipeError("give one of --recipe and --model")
        if self.recipe is not None:
            if self.weights is not None:
                raise RecipeError("--weights goes with --model; for a recipe use --set model.weights=...")
            return load_recipe(self.recipe, changes)
        data = {"name": "shapes", "image_size": self.image_size}
        tree = {"model": {"name": self.model, "weights": self.weights, "num_classes": IMAGENET_CLASSES}, "data": data}
        return parse_recipe(tree, changes, source="--model")


def network_of(recipe: Recipe, *, weights: bool = True) -> nn.Module:
    """The network that training starts from, in evaluation mode.

    Args:
        recipe: its data need not be on this machine, unless only its folders name the number of classes.
        weights: load the recipe's weights; False leaves those from the seed.
    """
    spec = recipe.model if weights else dataclasses.replace(recipe.model, weights=None)
    torch.manual_seed(recipe.train.seed)
    return build_model(spec, num_classes=spec.num_classes or class_count(recipe.data), task=recipe.task).eval()


def blank_images(recipe: Recipe, count: int = 2) -> Tensor:
    channels = 3 if recipe.data.mean is None else len(recipe.data.mean)
    return torch.zeros(count, channels, *recipe.data.height_width)


def inspect_model(
    recipe: RecipeChoice = None,
    model: ModelChoice = None,
    sparsity: Annotated[
        bool, typer.Option("--sparsity", metavar="", help="Which layers 2:4 could make faster, at most.")
    ] = False,
    device: Annotated[str, typer.Option(help="With --sparsity: device whose roofs bound the time.")] = "h200",
    precision: Annotated[str, typer.Option(help="With --sparsity: int8, fp16, bf16.")] = "int8",
    batch_size: Annotated[int, typer.Option(min=1, max=COUNT, help="With --sparsity: images of one run.")] = 32,
    draw: Annotated[
        str | None, typer.Option("--draw", help="A block, such as layer1.0: its graph with Q/DQ as a PNG; see --out.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="With --draw: the file to write.")] = Path("block.png"),
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    parsed = Network(recipe=recipe, model=model, set_=set_).read()
    if draw is not None:
        _draw(parsed, draw, out)
    elif sparsity:
        _show_sparsity(parsed, device, precision, batch_size, as_json)
    else:
        _show_model(parsed, as_json)
    if not as_json:
        print_next(f"ptq --recipe {recipe}" if recipe else f"init --model {model}")


def _example(recipe: Recipe) -> torch.Tensor:
    return torch.randn_like(blank_images(recipe))


def _draw(recipe: Recipe, block: str, out: Path) -> None:
    from compress.plots.layers import draw_block  # lazy: roofline, in this file too, has its answer sooner
    from compress.quantization.block_graph import block_graph  # lazy: as draw_block
    from compress.quantization.placement.insert import insert_quantizers  # lazy: as draw_block

    network = network_of(recipe, weights=False)
    placed = insert_quantizers(network, _example(recipe), _spec(recipe).for_target())
    save_figure(draw_block(block_graph(placed, block)), out)
    OUT.print(f"{out}")


def _spec(recipe: Recipe) -> QuantSpec:
    return recipe.quantization or QuantSpec()


def _show_model(recipe: Recipe, as_json: bool) -> None:
    from compress.quantization.placement.insert import read_fx  # lazy: as draw_block
    from compress.quantization.placement.place import place  # lazy: as draw_block

    name, network = recipe.model.name, network_of(recipe, weights=False)
    check_float_model(network)
    graph = canonical_graph(network, _example(recipe))
    items = [layer for layer in layers(graph) if layer.weight_elements or layer.macs]
    spec = _spec(recipe)
    placements = [place(read_fx(graph), spec.for_target(target)) for target in spec.targets]
    if as_json:
        print_json(
            {
                "layers": [asdict(layer) for layer in items],
                "leaves": [asdict(leaf) for leaf in leaves_of(graph)],
                "placement": [asdict(row) for row in placements[0].decisions],
                "placements": {p.target: [asdict(row) for row in p.decisions] for p in placements},
            }
        )
        return
    rows = [
        (
            n.path or n.name,
            n.kind,
            "x".join(map(str, (n.output_shape or ())[1:])),
            n.weight_elements,
            "unknown" if n.macs is None else f"{n.macs // 2:,}",
        )
        for n in items
    ]
    title = f"{name}: layers, one image of {image_size_text(recipe.data.image_size)}"
    print_table(title, ("layer", "kind", "output", "weights", "macs"), rows)
    macs, unknown = total_macs(tuple(items))
    OUT.print(f"{macs // 2:,} macs an image" + (f"; unknown: {', '.join(unknown)}" if unknown else ""))
    for leaf in leaves_of(graph):
        OUT.print(f"leaf {leaf.path} ({leaf.kind}): {leaf.reason}")
    for placement in placements:
        decisions = [(d.tensor, d.layer, _format(d), d.rule, d.reason) for d in placement.decisions]
        columns = ("tensor", "asked by", "decision", "rule", "reason")
        print_table(f"{name}: placement for {placement.target}", columns, decisions)


def _format(row: Decision) -> str:
    if row.decision == "float":
        return "float"
    return f"{'int' if row.signed else 'uint'}{row.num_bits}" + ("" if row.axis is None else f" axis {row.axis}")


def _show_sparsity(recipe: Recipe, device: str, precision: str, batch_size: int, as_json: bool) -> None:
    spec = recipe.sparsity or SparsitySpec()
    if spec.pattern != "2:4":
        raise RecipeError(f"sparsity.pattern is {spec.pattern!r}: devices have faster kernels for 2:4 only")
    network, x = network_of(recipe, weights=False), blank_images(recipe, 1)
    checks = {row.layer: row for row in eligibility(network, spec, example_inputs=x)}
    masked = [path for path, row in checks.items() if row.eligible]
    large = [path for path in masked if large_enough(checks[path].shape)]
    bound = sparse_bound(network, x, masked=masked, device=device, precision=precision, batch_size=batch_size)
    some = bound.speedup_with(large)
    if as_json:
        reasons = [asdict(check) for check in checks.values()]
        print_json({**bound.as_dict(), "speedup_of_large_layers": some, "reasons": reasons})
        return
    rows = [_sparse_row(row, checks.get(row.layer)) for row in bound.rows]
    title = f"{recipe.model.name}: largest gain of 2:4, {bound.precision} on {device}, batch {bound.batch_size}"
    numbers = ("share", "dense ms", "at most x")
    print_table(title, ("layer", "weight", "bound by", *numbers, "why"), rows, numbers=numbers)
    OUT.print(
        f"{len(masked)} of {len(checks)} layers would be masked. The network: at most {bound.speedup:.2f}x; with 2:4 "
        f"kernels for the {len(large)} layers of {NOTEWORTHY_CHANNELS} channels and more alone, at most {some:.2f}x "
        f"({bound.dense_ms:.4f} ms dense). Roofs of the maker's sheet, fused as an engine does: a bound, not a promise."
    )
    if bound.unknown:
        OUT.print(f"unknown, not in these figures: {', '.join(bound.unknown)}")


def _sparse_row(row: SparseLayer, check: Eligibility | None) -> tuple[str, ...]:
    return (
        row.layer,
        "x".join(map(str, check.shape)) if check is not None else row.kind,
        row.bound,
        f"{row.share:.1%}",
        f"{row.dense_ms:.4f}",
        f"{row.speedup:.2f}" if row.masked else "-",
        _why(row, check),
    )


def _why(row: SparseLayer, check: Eligibility | None) -> str:
    if check is None:
        return "no weight of its own that can be masked"
    memory = row.masked and row.bound == "memory" and row.speedup < 1.05
    return "bound by memory, and its weights are few of the bytes" if memory else check.reason


def roofline(
    network: Network,
    device: Annotated[
        str, typer.Option(help="Such as h200, a100, thor, xeon-8480; or machine, after --measure.")
    ] = "h200",
    precision: Annotated[str, typer.Option(help="fp32, tf32, fp16, bf16, int8, int8-2:4, fp8.")] = "int8",
    batch_size: Annotated[int, typer.Option(min=1, max=COUNT, help="Images of one run.")] = 32,
    unfused: Annotated[
        bool, typer.Option("--unfused", metavar="", help="Each operation alone, not fused as in an engine.")
    ] = False,
    measure: Annotated[str | None, typer.Option("--measure", help="cpu or cuda: measure this machine's roofs.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the figures.")] = Path("runs/roofline"),
    as_json: JsonOption = False,
) -> None:
    if measure is not None:
        _measure(measure, out, as_json)
        return
    parsed = network.read()
    find_device(device).peak_flops_per_s(precision)  # an unknown name is refused before the network is built
    name, images = parsed.model.name, blank_images(parsed, 1)
    torch.set_num_threads(1)  # several wait for each other on a busy machine: 10 s in the place of 1
    graph = trace(network_of(parsed), images)
    plain, fused = (count(graph, images, fused=fuse).with_batch(batch_size) for fuse in (False, True))
    bound = roofline_of(replace(plain if unfused else fused, model=name), device=device, precision=precision)
    figure = save_figure(draw_roofline(bound), out / f"{name.replace(':', '-')}-{device}-{precision}.png")
    if as_json:
        print_json({"figure": str(figure), "roofline": bound.as_dict(), "weights": weights_text(parsed)})
        return
    OUT.print(f"network: {name}, {weights_text(parsed)}", highlight=False, soft_wrap=True)
    OUT.print(
        "\n\n".join((summary_text(bound), rows_text(bound), what_if_text(scenarios(plain, fused, device=device))))
    )
    OUT.print(f"figure: {figure}", highlight=False)
    print_next(f"ptq --recipe {network.recipe}" if network.recipe else f"init --model {name}")


def _measure(device: str, out: Path, as_json: bool) -> None:
    if device not in {"cpu", "cuda"}:
        raise RecipeError(f"--measure is {device!r}; allowed are cpu and cuda")
    measured = measure_ceilings("cuda" if device == "cuda" else "cpu")
    measured.save()
    path = measured.save(out / f"ceilings_{device}.json")
    figure = save_figure(draw_ceilings(measured), out / f"ceilings_{device}.png")
    if as_json:
        print_json({"file": str(path), "figure": str(figure)})
    else:
        OUT.print(ceilings_text(measured))
        OUT.print(f"figure: {figure}", highlight=False)
        print_next("roofline --model resnet50 --device machine")


def receptive_field(
    network: Network,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the table and the figure.")] = Path("runs/fields"),
    as_json: JsonOption = False,
) -> None:
    from compress.report.receptive_field import receptive_field_report  # lazy: as draw_block

    parsed = network.read()
    name = parsed.model.name
    written = receptive_field_report(network_of(parsed), blank_images(parsed), out=out, name=name)
    if as_json:
        print_json(
            {"files": [str(p) for p in written.paths], "rows": written.table.records(), "weights": weights_text(parsed)}
        )
        return
    keys = ("size", "effective_stride", "effective_padding")
    rows = [
        (r["path"], r["kind"], *(_axes(r[key]) for key in keys), _remarks(r))
        for r in written.table.records()
        if r["path"]
    ]
    print_table(
        f"{name}, {weights_text(parsed)}: receptive fields",
        ("layer", "kind", "size", "stride", "padding", "notes"),
        rows,
    )
    OUT.print("\n".join(map(str, written.paths)), highlight=False)
    print_next(f"erf --recipe {network.recipe}" if network.recipe else f"erf --model {name}")


def _remarks(record: dict[str, Any]) -> str:
    status = "" if record["status"] == "exact" else f"{record['status']}: "
    return "; ".join(part for part in (f"{status}{record['reason']}", *record["notes"]) if part)


def _axes(value: object) -> str:
    if not isinstance(value, (list, tuple)):
        return "" if value is None else str(value)
    return "x".join("-" if v is None else f"{v:g}" for v in value)


def erf(
    network: Network,
    run: Annotated[
        Path | None, typer.Option("--run", help="A run folder: compare its float network with each compressed one.")
    ] = None,
    layer: Annotated[
        list[str] | None, typer.Option("--layer", help="Repeat for several; default: some of each depth.")
    ] = None,
    images: Annotated[int, typer.Option(min=1, max=COUNT, help="How many images to average over.")] = 16,
    data: Annotated[str, typer.Option(help="Without a recipe: shapes, digits or noise.")] = "shapes",
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the figures.")] = Path("runs/erf"),
    as_json: JsonOption = False,
) -> None:
    if run is not None:
        if network.recipe is not None or network.model is not None or network.weights is not None:
            raise RecipeError("--run has a model of its own; leave out --recipe, --model and --weights")
        _drift(run, layer or [], images, out, as_json)
        return
    from compress.receptive import ErfOptions  # lazy: as draw_block
    from compress.report.receptive_field import erf_report  # lazy: as draw_block

    recipe, noise = network.recipe, network.recipe is None and data == "noise"
    parsed = network.read(*([f"data.name={data}"] if recipe is None and not noise else []))
    built, batch = network_of(parsed), _images(parsed, images, noise=noise)
    with progress() as bars:
        written = erf_report(
            built,
            batch,
            out=out,
            name=parsed.model.name,
            weights=weights_text(parsed),
            layers=layer,
            options=ErfOptions(),
            progress=bars,
        )
    if as_json:
        files = {"picture": str(written.picture), "page": str(written.page), "numbers": str(written.numbers)}
        print_json({**files, "weights": weights_text(parsed)})
        return
    OUT.print(f"network: {parsed.model.name}, {weights_text(parsed)}", highlight=False, soft_wrap=True)
    OUT.print(f"image:   {written.picture}\npage:    {written.page}\nnumbers: {written.numbers}", highlight=False)
    print_next(f"receptive-field --recipe {recipe}" if recipe else f"receptive-field --model {parsed.model.name}")


def _drift(folder: Path, layers: list[str], images: int, out: Path, as_json: bool) -> None:
    if len(layers) > 1:
        raise RecipeError(f"--run compares one layer, and --layer names {len(layers)}: {', '.join(layers)}")
    from compress.pipeline import saved  # lazy: as draw_block
    from compress.report.receptive_field import drift_report  # lazy: as draw_block

    run = saved.finished_run(folder)
    networks = {str(variant): saved.network(run, variant) for variant in saved.variants_in(folder)}
    name = run.recipe.model.name
    batch = _images(run.recipe, images, noise=False)
    written = drift_report(networks, batch, out=out, name=name, layer=layers[0] if layers else None)
    if as_json:
        print_json({"pictures": [str(p) for p in written.pictures], "numbers": str(written.numbers)})
        return
    rows = [
        (
            key,
            f"{100 * d.total_variation:.1f} %",
            f"{d.moved_px:.2f}",
            f"{d.radius_change_px:+.2f}",
            f"{d.size_ratio:.3f}",
        )
        for key, d in written.drifts.items()
    ]
    columns = ("network", "influence on other pixels", "moved, px", "mean radius, px", "side, ratio")
    print_table(f"{name}: effective receptive field against the float network's", columns, rows)
    OUT.print("\n".join(map(str, (*written.pictures, written.numbers))), highlight=False)
    print_next(f"report {folder}")


def _images(recipe: Recipe, count: int, *, noise: bool) -> list[Tensor]:
    if noise:
        generator = torch.Generator().manual_seed(recipe.data.seed)
        return list(torch.randn(count, 3, *recipe.data.height_width, generator=generator).split(8))
    return [images for images, _ in load_data(recipe.data).train.batches(BatchPlan(batch_size=8, limit=count))]
