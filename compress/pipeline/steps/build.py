"""Engine files for the recipe's GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compress.engines.onnx_file import read_onnx
from compress.engines.tensorrt.build import BuiltEngine, build_commands, build_tensorrt, commands_markdown
from compress.engines.tensorrt.library import BUILDERS
from compress.engines.tensorrt.options import DEFAULT_BATCH, TensorRTOptions
from compress.errors import EngineError, EngineUnavailableError
from compress.files import write_text
from compress.measure.spec import BenchSpec
from compress.pipeline.run import Run
from compress.records.files import BUILT_ENGINES
from compress.records.rows import BuiltRow
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
    write_commands(run.path("build.md"), list(files.values()), engine_options(spec))
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
    """Return a recipe's build options: compute capabilities, tuned for its largest batch."""
    largest = max(spec.batch_sizes, default=DEFAULT_BATCH[2])
    return TensorRTOptions(
        sms=spec.sm if BUILDERS[engine].portable else (), batch=(1, largest, max(largest, DEFAULT_BATCH[2]))
    )


def build_or_reason(path: Path, engine: str, options: TensorRTOptions, progress: Progress) -> BuiltEngine | str:
    """Return the engine of an ONNX file, or why there is none."""
    try:
        return build_tensorrt(path, engine, options=options, progress=progress)
    except (EngineError, EngineUnavailableError) as error:
        return str(error)


def write_commands(path: Path, files: Sequence[Path], options: TensorRTOptions) -> Path:
    """Write `build.md`: the same engines with trtexec and Polygraphy."""
    return write_text(
        path, commands_markdown([(file.name, build_commands(read_onnx(file), options)) for file in files])
    )


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
