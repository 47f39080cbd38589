"""The command `doctor`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from compress.cli.console import OUT, print_json, print_next, print_table
from compress.cli.options import JsonOption
from compress.engines import engine_availability
from compress.measure.machine import describe_machine


def doctor(as_json: JsonOption = False) -> None:
    machine, engines = describe_machine(), engine_availability()
    if as_json:
        print_json({"machine": machine.to_dict(), "engines": [asdict(engine) for engine in engines]})
        return
    print_table("machine", ("", ""), [(k, _text(v)) for k, v in machine.to_dict().items()])
    rows = [(e.name, "works" if e.available else "no", e.version, "\n".join(e.devices)) for e in engines]
    print_table("engines", ("engine", "here", "version", "devices"), rows)
    for engine in engines:
        if not engine.available:
            OUT.print(f"{engine.name}: {engine.reason}. What to do: {engine.install}", markup=False, highlight=False)
    print_next("qat --recipe quickstart")


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{k} {v}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return "\n".join(map(str, value)) or "none"
    return str(value)
