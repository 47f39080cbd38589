"""The files of a run and what is in them: ONNX, layers, engines for the recipe's GPUs; audits and requirements."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import fx, nn

from compress.audit.engine import EngineAudit, audit_listing, folded_names, unmet_by_audit, unmet_by_runtime
from compress.audit.files import read_engine_layers
from compress.audit.onnx import OnnxAudit, audit_onnx, sparse_nodes
from compress.engines import build_engine
from compress.engines.base import read_onnx
from compress.engines.tensorrt.build import BuiltEngine, build_commands, build_tensorrt, commands_markdown
from compress.engines.tensorrt.library import BUILDERS
from compress.engines.tensorrt.options import DEFAULT_BATCH, TensorRTOptions
from compress.errors import AuditError, CompressError, EngineError, EngineUnavailableError, ModelError
from compress.export import ExportSpec
from compress.export.litert import export_litert
from compress.export.names import RECIPE_KEY, VARIANT_KEY
from compress.export.nms import export_with_nms
from compress.export.onnx import export_onnx, metadata_entries
from compress.files import bytes_of, write_text
from compress.graph.canonical import canonical_graph
from compress.graph.layers import Layer, layers
from compress.measure import BenchSpec
from compress.measure.metric import Metric
from compress.measure.parity import model_sizes
from compress.onnx_ptq.pt2e import export_coreml, export_executorch
from compress.onnx_ptq.quantize import quantize_onnx_file
from compress.onnx_ptq.source import load_source, open_batch
from compress.pipeline.run import Run, boxes_and_scores, stem, weight_quantizer
from compress.quantization import QuantSpec, Target
from compress.quantization.report import placement_of
from compress.quantization.sensitivity import output_sqnr, weight_sqnr
from compress.records.files import (
    BUILT_ENGINES,
    ENGINES,
    LAYERS,
    OPERATIONS,
    BuiltRow,
    EngineRow,
    LayerRow,
    OperationRow,
)
from compress.support.progress import Progress, tracked
from compress.support.text import in_bytes
from compress.variants import Variant

# What writes a file for a phone's engine beside the ONNX file, and its suffix.
PHONES: dict[str, tuple[Callable[..., Path], str]] = {
    "litert": (export_litert, ".tflite"),
    "executorch": (export_executorch, ".pte"),
    "coreml": (export_coreml, ".mlpackage"),
}
SQNR_IMAGES = 64  # evaluation images that layer outputs are compared on


def export_step(run: Run) -> None:
    """Write `<variant>.onnx`, audit.json, layers.json and sizes; on a resume what is missing."""
    if run.folder.done("export"):
        for variant, target in run.networks:
            if not run.path(f"{stem(variant, target)}.onnx").is_file():
                write_file(run, variant, target)
        return
    audits: list[tuple[str, OnnxAudit]] = []
    metrics: list[Metric] = []
    for variant, target in tracked(run.progress, "export", run.networks):
        path = write_file(run, variant, target)
        audits.append((path.stem, audit_onnx(path)))
        metrics += _sizes(variant, path, target)
    files = (f"{m.method.removeprefix('of ')} {in_bytes(m.value)}" for m in metrics if m.name == "file_bytes")
    run.progress.note(f"export: {', '.join(files)}")
    OPERATIONS.write(
        run.folder.path,
        [
            OperationRow(
                variant=name,
                name=row.name,
                op_type=row.op_type,
                int8=row.int8,
                weight_elements=row.weight_elements,
                reason=row.reason,
            )
            for name, audit in audits
            for row in audit.rows
        ],
    )
    LAYERS.write(run.folder.path, _layer_rows(run))
    run.folder.add_metrics(metrics)
    run.finish("export", variants=list(run.variants))


def write_file(run: Run, variant: Variant, target: Target | None) -> Path:
    """Write a file of `run.networks`; with `export.nms` one with boxes beside it, for phones their formats."""
    path = _write(run, variant, target)
    targets = run.recipe.quantization.targets if run.recipe.quantization else ()
    own = variant.is_quantized and (target or targets[0]) == "litert"
    runs = own or not variant.is_quantized or "litert" not in targets  # it is what the engine executorch is given
    for engine, (write, suffix) in PHONES.items():
        if own if engine == "litert" else runs and engine in run.recipe.bench.engines:
            with contextlib.suppress(EngineUnavailableError):  # the engine's row says so
                write(path, path.with_suffix(suffix))
    if run.recipe.export.nms:
        export_with_nms(path, boxes_and_scores(run.recipe, run.data), path.with_suffix(".nms.onnx"))
    return path


def _write(run: Run, variant: Variant, target: Target | None) -> Path:
    """Write into the recipe's own ONNX graph if that can hold it, else by torch's exporter."""
    recipe, split = run.recipe, run.data.val
    model, path = run.networks[variant, target].cpu(), run.path(f"{stem(variant, target)}.onnx")
    own = {RECIPE_KEY: recipe.digest(), VARIANT_KEY: str(variant)}
    entries = metadata_entries(split.preprocessing, split.labels, own)
    if variant.is_quantized and recipe.model.name.endswith(".onnx"):
        spec = run.quantization.for_target(target or run.quantization.targets[0])
        if write_into_own_graph(run, model, path, spec=spec, metadata=entries):
            return path
    return export_onnx(
        model,
        run.example,
        path,
        precision=recipe.export.precision if variant is not Variant.FLOAT else "fp32",
        dynamic_batch=recipe.export.dynamic_batch,
        opset=recipe.export.opset,
        channel_scales=recipe.export.channel_scales,
        metadata=entries,
    )


def _sizes(variant: Variant, path: Path, target: Target | None = None) -> Iterator[Metric]:
    sizes = model_sizes(path)
    rows: list[tuple[str, int, str, str]] = [("file_bytes", sizes.file_bytes, f"of {path.name}", target or "")]
    for engine, (_, suffix) in PHONES.items():  # what the engine loads
        own = path.with_suffix(suffix)
        if own.exists():
            rows = [row for row in rows if row[-1] != engine]
            rows.append(("file_bytes", bytes_of(own), f"of {own.name}", engine))
    rows.append(("weight_bytes", sizes.weight_bytes, f"initializers of {path.name}", target or ""))
    for name, value, method, engine in rows:
        yield Metric(name=name, variant=variant, engine=engine, value=float(value), unit="bytes", method=method)


def _layer_rows(run: Run) -> list[LayerRow]:
    last = (run.networks.get((variant, None)) for variant in (Variant.QAT, Variant.PTQ))
    quantized = next((model for model in last if isinstance(model, fx.GraphModule)), None)
    try:
        graph = canonical_graph(run.networks[Variant.FLOAT, None], run.example)
    except ModelError as error:
        run.notes.append(f"layers are not listed: {error}")
        return []
    weights: dict[str, float] = {}
    outputs: dict[str, float] = {}
    channels: dict[str, int] = {}
    if quantized is not None:
        weights = weight_sqnr(quantized)
        images = run.batches("val", min(SQNR_IMAGES, run.recipe.data.batch_size), limit=SQNR_IMAGES)
        if run.quantization.batchnorm == "fold":
            outputs = output_sqnr(graph, quantized, images)
        channels = {
            site.path: 1 if site.format.axis is None else weight_quantizer(quantized, site.path).amax.numel()
            for site in placement_of(quantized).weights
        }
    return [
        _layer_row(layer, weights, outputs, channels) for layer in layers(graph) if layer.weight_elements and layer.macs
    ]


def _layer_row(
    layer: Layer, weights: dict[str, float], outputs: dict[str, float], channels: dict[str, int]
) -> LayerRow:
    batch = layer.output_shape[0] if layer.output_shape else 1
    quantized = layer.path in channels
    return LayerRow(
        name=layer.path,
        kind=layer.kind,
        macs=None if layer.macs is None else layer.macs // batch,
        weight_elements=layer.weight_elements,
        float_weight_bytes=4 * layer.weight_elements,
        quantized_weight_bytes=layer.weight_elements + 4 * channels[layer.path] if quantized else None,
        weight_sqnr_db=_finite(weights.get(layer.path)),
        activation_sqnr_db=_finite(outputs.get(layer.path)),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def write_into_own_graph(
    run: Run, model: nn.Module, path: Path, *, spec: QuantSpec, metadata: Mapping[str, str]
) -> bool:
    """Write into the graph of `model.name`.

    Returns:
        True if written, else a note says why not.
    """
    name, batch = run.recipe.model.name, [run.example]
    try:
        reason = _another_form(run.recipe.export) or _unfit(Path(name))
        if not reason:
            quantize_onnx_file(name, batch, spec=spec, out=path, trained=model, metadata=metadata)
    except CompressError as error:
        reason = str(error)
    if reason:
        run.notes.append(f"{path.name} has the nodes of torch's exporter, not those of {name}: {reason}")
        return False
    run.notes.append(f"{path.name} is the graph of {name}, with its nodes and names")
    return True


def _another_form(export: ExportSpec) -> str:
    if export.precision != "fp32":
        return f"export.precision is {export.precision}, and the types of a file's own graph stay as they are"
    if export.channel_scales != "weight":
        return f"export.channel_scales is {export.channel_scales}"
    return ""


def _unfit(file: Path) -> str:
    graph = load_source(file).proto.graph
    if not all(open_batch(value) for value in graph.input):
        return "it states the size of its batch, and a run measures several"
    if len(graph.output) != 1:
        return f"it has {len(graph.output)} outputs, and a run finds them by the names that the exporter gives"
    return ""


def build_step(run: Run, variants: Sequence[str]) -> None:
    """Build `<variant>.<engine>.sm<...>.engine`, write engines.json and build.md.

    TensorRT and TensorRT-RTX only; why a library cannot build is noted.
    """
    spec = run.recipe.bench
    names = [name for name in spec.engines if name in BUILDERS]
    if not names or run.folder.done("engines"):
        return
    files = {variant: run.files(Variant(variant)).of(names[0]) for variant in variants}  # one target for both libraries
    options = engine_options(spec)
    commands = [(file.name, build_commands(read_onnx(file), options)) for file in files.values()]
    write_text(run.path("build.md"), commands_markdown(commands))
    rows: list[BuiltRow] = []
    for name in names:
        options = engine_options(spec, name)
        for variant, path in files.items():
            built = build_or_reason(path, name, options, run.progress)
            rows.append(_row(variant, name, run.folder.without_path(built) if isinstance(built, str) else built))
    BUILT_ENGINES.write(run.folder.path, rows)
    refused = [row for row in rows if row.status != "built" and BUILDERS[row.engine].portable]
    run.notes.extend(f"{row.variant}, {row.engine}: {row.reason}" for row in refused)
    run.notes.extend(f"{row.variant}, {row.engine}: {note}" for row in rows for note in row.notes)
    run.finish("engines", built=sum(row.status == "built" for row in rows))


def engine_options(spec: BenchSpec, engine: str = "tensorrt-rtx") -> TensorRTOptions:
    largest = max(spec.batch_sizes, default=DEFAULT_BATCH[2])
    return TensorRTOptions(
        sms=spec.sm if BUILDERS[engine].portable else (), batch=(1, largest, max(largest, DEFAULT_BATCH[2]))
    )


def build_or_reason(path: Path, engine: str, options: TensorRTOptions, progress: Progress) -> BuiltEngine | str:
    try:
        return build_tensorrt(path, engine, options=options, progress=progress)
    except (EngineError, EngineUnavailableError) as error:
        return str(error)


def _row(variant: str, engine: str, built: BuiltEngine | str) -> BuiltRow:
    if isinstance(built, str):
        return BuiltRow(variant=variant, engine=engine, status="unavailable", reason=built)
    metadata = built.metadata
    return BuiltRow(
        variant=variant,
        engine=engine,
        status="built",
        file=built.path.name,
        version=metadata.version,
        sms=tuple(metadata.sms),
        bytes=metadata.engine_bytes,
        seconds=metadata.build_seconds,
        notes=tuple(metadata.notes),
    )


def audit_step(run: Run, variants: Sequence[str]) -> None:
    if run.folder.done("engine_audit"):
        return
    rows = _file_rows(run) + _runtime_rows(run, variants)
    if rows:
        ENGINES.write(run.folder.path, rows)
    run.finish("engine_audit", engines=len(rows))


def check_required(run: Run) -> None:
    require = run.recipe.export.require
    if require is None:
        return
    rows = ENGINES.read(run.folder.path) or ()
    unmet = [f"{row.variant} on {row.engine}: {text}" for row in rows for text in row.unmet]
    if unmet:
        lines = "\n".join(f"  {text}" for text in unmet)
        raise AuditError(
            f"export.require is {require}, and an engine is not that:\n{lines}\nsee the report's audit of engines; "
            "export.require: null accepts what was built"
        )
    if not rows:
        raise AuditError(
            f"export.require is {require}, and no engine of this run tells of its layers: name openvino, cuda, "
            "tensorrt or tensorrt-rtx in bench.engines, or set export.require: null"
        )


def _file_rows(run: Run) -> list[EngineRow]:
    rows = []
    for built in BUILT_ENGINES.read(run.folder.path) or ():
        if built.status != "built":
            continue
        onnx = run.files(Variant(built.variant)).of(built.engine)
        try:
            listing = read_engine_layers(run.path(built.file))
            audit = audit_listing(listing, onnx=onnx, sparse_nodes=sparse_nodes(onnx))
        except AuditError as error:
            run.notes.append(f"{built.variant}, {built.engine}: the engine is not audited: {error}")
            continue
        label = f"{built.engine} SM {', '.join(map(str, built.sms))}"
        unmet = _unmet(run, Variant(built.variant), audit, onnx)
        rows.append(EngineRow.of(audit, variant=built.variant, engine=label, unmet=unmet))
    return rows


def _unmet(run: Run, variant: Variant, audit: EngineAudit, onnx: Path) -> list[str]:
    require = run.recipe.export.require
    if require is None or variant is Variant.FLOAT or (require == "int8" and not variant.is_quantized):
        return []
    return list(unmet_by_audit(audit, require, _int8_nodes(onnx)))


_TELLING = ("openvino", "cuda")  # engines that report their layers without a file of them


def _runtime_rows(run: Run, variants: Sequence[str]) -> list[EngineRow]:
    recipe = run.recipe
    if recipe.export.require != "int8":
        return []
    rows = []
    quantized = [Variant(name) for name in variants if Variant(name).is_quantized]
    for engine_name in (name for name in _TELLING if name in recipe.bench.engines):
        for variant in quantized:
            onnx = run.files(variant).of(engine_name)
            try:
                with build_engine(onnx, engine_name, batch_size=1) as engine:
                    unmet = unmet_by_runtime(engine.runtime_layers(), _int8_nodes(onnx), folded_names(onnx))
                    rows.append(EngineRow(variant=variant, engine=engine.info.label, unmet=tuple(unmet)))
            except EngineError as error:
                run.notes.append(f"{variant}, {engine_name}: the engine is not audited: {error}")
    return rows


def _int8_nodes(onnx: Path) -> list[str]:
    return [row.name for row in audit_onnx(onnx).rows if row.int8]
