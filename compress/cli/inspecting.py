"""Commands that look and change nothing: inspect, doctor, recipes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from compress.cli.auditing import show_engine
from compress.cli.console import OUT, print_json, print_table
from compress.cli.options import JsonOption, SetOption
from compress.cli.parity import show_parity
from compress.engines import engine_availability
from compress.errors import RecipeError
from compress.export.audit import audit_onnx
from compress.files import replacing
from compress.graph.canonical import canonical_graph
from compress.graph.layers import layers, total_macs
from compress.graph.trace import leaves_of
from compress.measure import describe_machine
from compress.models import ModelSpec, build_model
from compress.quantization.float_model import check_float_model
from compress.quantization.insert import insert_quantizers
from compress.quantization.placement import place
from compress.quantization.spec import QuantSpec
from compress.recipe import Recipe, find_recipe, load_recipe, parse_recipe, recipe_names
from compress.report.graph_figure import block_png
from compress.report.recipe_keys import recipe_keys, recipe_keys_markdown
from compress.roofline import SparseLayer, sparse_bound
from compress.sparsity.eligibility import NOTEWORTHY_CHANNELS, Eligibility, eligibility, large_enough
from compress.sparsity.spec import SparsitySpec


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("inspect")(inspect)
    app.command("doctor")(doctor)
    app.command("recipes")(recipes)


def inspect(
    recipe: Annotated[str | None, typer.Option("--recipe", "-r", help="A recipe: its model, its rules.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="A model by name, without a recipe.")] = None,
    onnx: Annotated[Path | None, typer.Option("--onnx", help="An ONNX file: which operations are INT8.")] = None,
    engine: Annotated[
        Path | None, typer.Option("--engine", help="A built engine, its build log, or the inspector's JSON.")
    ] = None,
    sparsity: Annotated[bool, typer.Option("--sparsity", help="Which layers 2:4 could make faster, at most.")] = False,
    device: Annotated[
        str | None, typer.Option(help="With --sparsity or --engine: under whose roofs, such as h200, rtx4090, orin.")
    ] = None,
    precision: Annotated[str, typer.Option(help="With --sparsity: int8, fp16, bf16.")] = "int8",
    batch_size: Annotated[int, typer.Option(help="With --sparsity or --engine: images of one run.")] = 32,
    parity: Annotated[
        bool, typer.Option("--parity", help="Where engines leave fake quantization, layer by layer.")
    ] = False,
    run: Annotated[Path | None, typer.Option("--run", help="With --parity: a run folder in place of a recipe.")] = None,
    draw: Annotated[
        str | None, typer.Option("--draw", help="A block, such as layer1.0: its graph with Q/DQ as a PNG; see --out.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="With --draw: the file to write.")] = Path("block.png"),
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Layers with their macs, and every placement decision with its reason; or the audit of an ONNX file or an engine.

    With --engine: what the engine made of each layer, the bytes that it moves, and what is wrong with that; give --onnx
    too for what only that file tells. With --sparsity: which layers would be masked, why the others not, and how much
    faster each could be at best. With --parity: each engine against fake quantization at every quantizer, and the first
    layer that diverges by more than rounding.
    """
    if draw is not None:
        _draw(recipe, model, draw, out, set_ or [])
        return
    if parity:
        show_parity(recipe, run, set_ or (), as_json)
        return
    if run is not None:
        raise RecipeError("--run goes with --parity; `python -m compress report DIR` shows what a run measured")
    if engine is not None and recipe is None and model is None and not sparsity:
        show_engine(engine, onnx, device, batch_size, as_json)
        return
    if sum(given is not None for given in (recipe, model, onnx, engine)) != 1:
        raise RecipeError("inspect looks at one thing: give --recipe, --model, --onnx or --engine")
    if onnx is not None:
        if sparsity:
            raise RecipeError("--sparsity looks at a network before training: give --recipe or --model, not --onnx")
        _show_audit(onnx, as_json)
        return
    parsed = load_recipe(recipe, set_ or ()) if recipe is not None else _bare(str(model), set_ or [])
    if sparsity:
        _show_sparsity(parsed, device or "h200", precision, batch_size, as_json)
    else:
        _show_model(parsed, as_json)


def _draw(recipe: str | None, model: str | None, block: str, out: Path, overrides: list[str]) -> None:
    """Write the figure of one block, weights random, ranges not calibrated: where Q/DQ stand depends on neither."""
    if (recipe is None) == (model is None):
        raise RecipeError("--draw takes the network from --recipe or --model: give one of them")
    parsed = load_recipe(recipe, overrides) if recipe is not None else _bare(str(model), overrides)
    size = parsed.data.image_size
    quantized = insert_quantizers(_network(parsed), torch.randn(2, 3, size, size), parsed.quantization or QuantSpec())
    content = block_png(quantized, block)
    with replacing(out) as temporary:
        temporary.write_bytes(content)
    OUT.print(f"{out}", markup=False)


def _bare(model: str, overrides: list[str]) -> Recipe:
    """A recipe of defaults around a model; 224 px and 1000 classes unless --set says otherwise."""
    tree = {"model": {"name": model, "num_classes": 1000}, "data": {"image_size": 224}}
    return parse_recipe(tree, overrides, source="--model")


def _network(recipe: Recipe) -> nn.Module:
    """The recipe's model, with random weights."""
    spec = recipe.model
    classes = spec.num_classes or recipe.data.num_classes or (1000 if recipe.data.name == "folder" else 10)
    plain = ModelSpec(name=spec.name, weights=None, num_classes=spec.num_classes, options=spec.options)
    return build_model(plain, num_classes=classes)


def _show_sparsity(recipe: Recipe, device: str, precision: str, batch_size: int, as_json: bool) -> None:
    """What 2:4 masks of the recipe's layers could bring at most, before any training."""
    spec = recipe.sparsity or SparsitySpec()
    if spec.pattern != "2:4":
        raise RecipeError(f"sparsity.pattern is {spec.pattern!r}: devices have faster kernels for 2:4 only")
    network, size = _network(recipe).eval(), recipe.data.image_size
    x = torch.zeros(1, 3, size, size)
    checks = {row.layer: row for row in eligibility(network, spec, example_inputs=x)}
    masked = [path for path, row in checks.items() if row.eligible]
    large = [path for path in masked if large_enough(checks[path].shape)]
    bound = sparse_bound(network, x, masked=masked, device=device, precision=precision, batch_size=batch_size)
    some = bound.speedup_with(large)
    if as_json:
        document = {**bound.as_dict(), "speedup_of_large_layers": some, "reasons": [asdict(c) for c in checks.values()]}
        print_json(document)
        return
    rows = [
        (
            row.layer,
            "x".join(map(str, checks[row.layer].shape)) if row.layer in checks else row.kind,
            row.bound,
            f"{row.share:.1%}",
            f"{row.dense_ms:.4f}",
            f"{row.speedup:.2f}" if row.masked else "-",
            _why(row, checks.get(row.layer)),
        )
        for row in bound.rows
    ]
    title = (
        f"{recipe.model.name}: what 2:4 could bring at most, {bound.precision} on {device}, batch {bound.batch_size}"
    )
    numbers = ("share", "dense ms", "at most x")
    print_table(title, ("layer", "weight", "bound by", *numbers, "why"), rows, numbers=numbers)
    OUT.print(
        f"{len(masked)} of {len(checks)} layers would be masked. The network: at most {bound.speedup:.2f}x; with 2:4 "
        f"kernels for the {len(large)} layers of {NOTEWORTHY_CHANNELS} channels and more alone, at most {some:.2f}x "
        f"({bound.dense_ms:.4f} ms dense). Roofs of the maker's sheet, fused as an engine does: a bound, not a promise."
    )
    if bound.unknown:
        OUT.print(f"unknown, not in these figures: {', '.join(bound.unknown)}")


def _why(row: SparseLayer, check: Eligibility | None) -> str:
    if check is None:
        return "no weight of its own that can be masked"
    memory = row.masked and row.bound == "memory" and row.speedup < 1.05
    return "memory stops it, and its weights are few of the bytes" if memory else check.reason


def _show_model(recipe: Recipe, as_json: bool) -> None:
    spec, network, size = recipe.model, _network(recipe), recipe.data.image_size
    check_float_model(network)
    graph = canonical_graph(network, torch.randn(2, 3, size, size))
    items = [layer for layer in layers(graph) if layer.weight_elements or layer.macs]
    placement = place(graph, recipe.quantization or QuantSpec())
    if as_json:
        document: dict[str, Any] = {
            "layers": [asdict(layer) for layer in items],
            "leaves": [asdict(leaf) for leaf in leaves_of(graph)],
            "placement": [asdict(row) for row in placement.decisions],
        }
        print_json(document)
        return
    rows = [
        (n.path or n.name, n.kind, "x".join(map(str, (n.output_shape or ())[1:])), n.weight_elements, _macs(n.macs))
        for n in items
    ]
    print_table(f"{spec.name}: layers, one image of {size} px", ("layer", "kind", "output", "weights", "macs"), rows)
    macs, unknown = total_macs(tuple(items))
    OUT.print(f"{macs // 2:,} macs an image" + (f"; unknown: {', '.join(unknown)}" if unknown else ""))
    for leaf in leaves_of(graph):
        OUT.print(f"leaf {leaf.path} ({leaf.kind}): {leaf.reason}", markup=False)
    columns = ("tensor", "asked by", "decision", "rule", "reason")
    decisions = [
        (
            d.tensor,
            d.layer,
            "float" if d.decision == "float" else _format(d.num_bits, d.signed, d.axis),
            d.rule,
            d.reason,
        )
        for d in placement.decisions
    ]
    print_table(f"{spec.name}: placement for {placement.target}", columns, decisions)


def _macs(macs: int | None) -> str:
    return "unknown" if macs is None else f"{macs // 2:,}"


def _format(num_bits: int | None, signed: bool | None, axis: int | None) -> str:
    return f"{'int' if signed else 'uint'}{num_bits}" + ("" if axis is None else f" axis {axis}")


def _show_audit(path: Path, as_json: bool) -> None:
    audit = audit_onnx(path)
    if as_json:
        print_json(asdict(audit))
        return
    rows = [(r.name, r.op_type, r.input_type, r.weight_type, "INT8" if r.int8 else r.reason) for r in audit.rows]
    print_table(f"{path}", ("operation", "type", "input", "weight", "verdict"), rows)
    whole = sum(row.int8 for row in audit.rows)
    OUT.print(
        f"{whole} of {len(audit.rows)} weighted operations are INT8 ({audit.int8_share:.1%} of the weights); the "
        f"remainder is {audit.float_type}; opset {audit.opset}"
    )


def doctor(as_json: JsonOption = False) -> None:
    """Which engines and devices work here; for each that does not, why, and what to install."""
    machine, engines = describe_machine(), engine_availability()
    if as_json:
        print_json({"machine": machine.to_dict(), "engines": [asdict(engine) for engine in engines]})
        return
    print_table("machine", ("", ""), [(k, _text(v)) for k, v in machine.to_dict().items()])
    rows = [
        (e.name, "works" if e.available else "no", e.version, ", ".join(e.devices), e.reason, e.install)
        for e in engines
    ]
    print_table("engines", ("engine", "here", "version", "devices", "why not", "what to do"), rows)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{k} {v}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return "\n".join(map(str, value)) or "none"
    return str(value)


def recipes(
    name: Annotated[str | None, typer.Argument(help="Show this recipe, resolved.")] = None,
    keys: Annotated[bool, typer.Option("--keys", help="Every key: what it holds, its default, what it does.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the recipes that can be named, show one with all its defaults, or explain every key."""
    if keys:
        if as_json:
            print_json([asdict(key) for key in recipe_keys()])
        else:
            OUT.print(recipe_keys_markdown(), end="", markup=False, highlight=False, soft_wrap=True)
        return
    if name is not None:
        recipe = load_recipe(name)
        if as_json:
            print_json(asdict(recipe))
        else:
            OUT.print(recipe.to_yaml(), markup=False, highlight=False)
        return
    found = [(n, str(find_recipe(n)), _first_line(find_recipe(n))) for n in recipe_names()]
    if as_json:
        print_json([{"name": n, "path": p, "about": text} for n, p, text in found])
    else:
        print_table("recipes", ("name", "about", "path"), [(n, text, p) for n, p, text in found])


def _first_line(path: Path) -> str:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    return first.removeprefix("# ") if first.startswith("#") else ""
