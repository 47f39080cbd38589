"""The step that looks into the engines: what each made of its file, and whether that is what the recipe requires."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from compress.engines import build_engine, runtime_layers
from compress.engines.engine_audit import EngineAudit, audit_engine
from compress.engines.engine_files import read_engine_layers
from compress.engines.requirement import unmet_by_audit, unmet_by_runtime
from compress.errors import AuditError, EngineError
from compress.export.audit import audit_onnx, audit_sparsity
from compress.files import write_json
from compress.pipeline.run import Run

AUDIT_FILE = "engine_audit.json"


def audit_step(run: Run, variants: list[str]) -> None:
    """Audit every engine file of the run, and every engine that tells of its layers; write engine_audit.json."""
    if run.folder.done("engine_audit"):
        return
    rows = _file_rows(run) + _openvino_rows(run, variants)
    if rows:
        write_json(run.path(AUDIT_FILE), rows)
    run.finish("engine_audit", engines=len(rows))


def check_required(run: Run) -> None:
    """Fail where an engine is not what `export.require` asks.

    Raises:
        AuditError: names the engine and what is otherwise.
    """
    path, require = run.path(AUDIT_FILE), run.recipe.export.require
    if require is None:
        return
    rows = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    unmet = [f"{row['variant']} on {row['engine']}: {text}" for row in rows for text in row["unmet"]]
    if unmet:
        lines = "\n".join(f"  {text}" for text in unmet)
        raise AuditError(
            f"export.require is {require}, and an engine is not that:\n{lines}\nsee the report's audit of engines; "
            "export.require: null accepts what was built"
        )
    if not rows:
        raise AuditError(
            f"export.require is {require}, and no engine of this run tells of its layers: name openvino, tensorrt or "
            "tensorrt-rtx in bench.engines, or set export.require: null"
        )


def _file_rows(run: Run) -> list[dict[str, Any]]:
    """Of the engine files that `build_step` wrote."""
    listed = run.path("engines.json")
    built = json.loads(listed.read_text(encoding="utf-8")) if listed.is_file() else []
    rows = []
    for row in (row for row in built if row["status"] == "built"):
        variant, onnx = str(row["variant"]), run.path(f"{row['variant']}.onnx")
        sparse = [r.name for r in audit_sparsity(onnx) if r.violations == 0 and r.zeros >= 0.5]
        try:
            audit = audit_engine(read_engine_layers(run.path(str(row["file"]))), onnx=onnx, sparse_nodes=sparse)
        except AuditError as error:
            run.notes.append(f"{variant}, {row['engine']}: the engine is not audited: {error}")
            continue
        label = f"{row['engine']} SM {', '.join(map(str, row['sms']))}"
        rows.append(engine_row(audit, variant, label) | {"unmet": _unmet(run, variant, audit)})
    return rows


def engine_row(audit: EngineAudit, variant: str, engine: str) -> dict[str, Any]:
    """An audited engine as JSON holds it."""
    return {
        "variant": variant,
        "engine": engine,
        "source": audit.source,
        "kernels": audit.kernels,
        "activation_bytes": audit.activation_bytes,
        "untold": audit.untold,
        "weight_bytes": audit.weight_bytes,
        "fp16_bytes": audit.fp16_bytes,
        "int8_share": audit.share("int8", "uint8"),
        "sparse_kernels": audit.sparse_kernels() if audit.masked else "",
        "advice": audit.advice,
        "findings": [asdict(finding) for finding in audit.findings],
        "layers": [asdict(layer) for layer in audit.layers if layer.role != "host"],
    }


def _unmet(run: Run, variant: str, audit: EngineAudit) -> list[str]:
    require = run.recipe.export.require
    if require is None or variant == "float" or (require == "int8" and not _quantized(variant)):
        return []
    return list(unmet_by_audit(audit, require, _int8_nodes(run, variant)))


def _openvino_rows(run: Run, variants: list[str]) -> list[dict[str, Any]]:
    """OpenVINO's own account of quantized networks; only asked for where INT8 is required."""
    recipe = run.recipe
    if recipe.export.require != "int8" or "openvino" not in recipe.bench.engines:
        return []
    rows = []
    for variant in filter(_quantized, variants):
        try:
            with build_engine(run.path(f"{variant}.onnx"), "openvino", batch_size=1) as engine:
                unmet = unmet_by_runtime(runtime_layers(engine), _int8_nodes(run, variant))
                rows.append({"variant": variant, "engine": engine.info.label, "unmet": list(unmet)})
        except EngineError as error:
            run.notes.append(f"{variant}, openvino: the engine is not audited: {error}")
    return rows


def _quantized(variant: str) -> bool:
    return variant.endswith(("ptq", "qat"))


def _int8_nodes(run: Run, variant: str) -> list[str]:
    return [row.name for row in audit_onnx(run.path(f"{variant}.onnx")).rows if row.int8]
