"""Engine files for the recipe's GPUs, and engines against the recipe's requirements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compress.audit.engine import EngineAudit, audit_listing, folded_names, unmet_by_audit, unmet_by_runtime
from compress.audit.files import read_engine_layers
from compress.audit.onnx import audit_onnx, sparse_nodes
from compress.engines import build_engine
from compress.engines.base import read_onnx
from compress.engines.tensorrt.build import BuiltEngine, build_commands, build_tensorrt, commands_markdown
from compress.engines.tensorrt.library import BUILDERS
from compress.engines.tensorrt.options import DEFAULT_BATCH, TensorRTOptions
from compress.errors import AuditError, EngineError, EngineUnavailableError
from compress.files import write_text
from compress.measure import BenchSpec
from compress.pipeline.run import Run
from compress.records.files import BUILT_ENGINES, ENGINES, BuiltRow, EngineRow
from compress.support.progress import Progress
from compress.variants import Variant


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
