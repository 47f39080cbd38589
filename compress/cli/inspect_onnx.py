"""The command `inspect onnx`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from compress.audit.onnx import audit_onnx
from compress.cli.console import OUT, print_json, print_table
from compress.cli.options import JsonOption


def inspect_onnx(file: Annotated[Path, typer.Argument(help="An ONNX file.")], as_json: JsonOption = False) -> None:
    """Audit an ONNX file."""
    audit = audit_onnx(file)
    if as_json:
        print_json(asdict(audit))
        return
    rows = [(r.name, r.op_type, r.input_type, r.weight_type, "INT8" if r.int8 else r.reason) for r in audit.rows]
    print_table(f"{file}", ("operation", "type", "input", "weight", "verdict"), rows)
    count = sum(row.int8 for row in audit.rows)
    OUT.print(
        f"{count} of {len(audit.rows)} weighted operations are INT8 ({audit.int8_share:.1%} of the weights); the "
        f"remainder is {audit.float_type}; opset {audit.opset}"
    )
