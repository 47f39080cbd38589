"""The command `inspect model`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from compress.cli.console import OUT, print_json, print_table
from compress.cli.networks import blank_images, chosen_recipe, network_of
from compress.cli.options import JsonOption, ModelChoice, RecipeChoice, SetOption
from compress.errors import RecipeError
from compress.graph.canonical import canonical_graph, check_float_model
from compress.graph.layers import layers, total_macs
from compress.graph.report import leaves_of
from compress.plots.graph import draw_block
from compress.plots.style import save_figure
from compress.quantization.block_graph import block_graph
from compress.quantization.placement.decisions import Decision
from compress.quantization.placement.insert import insert_quantizers, read_fx
from compress.quantization.placement.place import place
from compress.quantization.spec import QuantSpec
from compress.recipe.tree import Recipe
from compress.roofline_model import SparseLayer, sparse_bound
from compress.sparsity.eligibility import NOTEWORTHY_CHANNELS, Eligibility, eligibility, large_enough
from compress.sparsity.spec import SparsitySpec
from compress.support.limits import COUNT
from compress.support.text import image_size_text


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
    """Print layers and placement, or what `--sparsity` or `--draw` asks for; weights are random."""
    parsed = chosen_recipe(recipe, model, set_)
    if draw is not None:
        _draw(parsed, draw, out)
    elif sparsity:
        _show_sparsity(parsed, device, precision, batch_size, as_json)
    else:
        _show_model(parsed, as_json)


def _example(recipe: Recipe) -> torch.Tensor:
    return torch.randn_like(blank_images(recipe))


def _draw(recipe: Recipe, block: str, out: Path) -> None:
    if not block:
        raise RecipeError("--draw is empty: name a block, such as layer1.0 (inspect model lists the layers)")
    network = network_of(recipe, weights=False)
    placed = insert_quantizers(network, _example(recipe), _spec(recipe).for_target())
    save_figure(draw_block(block_graph(placed, block)), out)
    OUT.print(f"{out}")


def _spec(recipe: Recipe) -> QuantSpec:
    return recipe.quantization or QuantSpec()


def _show_model(recipe: Recipe, as_json: bool) -> None:
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
        (n.path or n.name, n.kind, "x".join(map(str, (n.output_shape or ())[1:])), n.weight_elements, _macs(n.macs))
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


def _macs(macs: int | None) -> str:
    return "unknown" if macs is None else f"{macs // 2:,}"


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
