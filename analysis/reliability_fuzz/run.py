"""Mutated files for every reader of untrusted input; see README.md."""

import json
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from analysis.common.study import option, study_options, table
from compress.audit.files import read_engine_layers
from compress.audit.onnx import audit_onnx
from compress.errors import CompressError
from compress.files import write_json, write_text
from compress.models.by_name import read_state_dict
from compress.pipeline.run import read_state_file
from compress.recipe.tree import load_recipe, parse_recipe
from compress.records.files import METRICS
from compress.training.checkpoint import load_model, save_model

BATCH = 200


def seeds(folder: Path) -> dict[str, tuple[bytes, Callable[[Path], Any]]]:
    model = nn.Linear(3, 2)
    weights = save_model(model, folder / "m.safetensors", {"a": 1}).read_bytes()
    torch.save(model.state_dict(), folder / "m.pt")
    state = {"format": 2, "command": "qat", "recipe": "0", "steps": {"train": {"notes": ["a"]}}, "changes": []}
    metric = {"name": "top1", "variant": "qat", "engine": "e", "value": 1.0, "unit": "%", "batch_size": 1}
    layer = {"Name": "a", "LayerType": "conv", "Inputs": [{"Name": "x", "Dimensions": [1, 2]}], "Outputs": []}
    return {
        "recipe.yaml": (parse_recipe({}).to_yaml().encode(), load_recipe),
        "m.safetensors": (weights, lambda path: load_model(nn.Linear(3, 2), path)),
        "m.pt": ((folder / "m.pt").read_bytes(), read_state_dict),
        "m.onnx": (_onnx(), audit_onnx),
        "state.json": (json.dumps(state).encode(), lambda path: read_state_file(path.parent)),
        "metrics.json": (json.dumps([metric]).encode(), lambda path: METRICS.read(path.parent)),
        "e.layers.json": (json.dumps({"Layers": [layer]}).encode(), read_engine_layers),
    }


def _onnx() -> bytes:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 4]) for name in "xy"]
    weight = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", values[:1], values[1:], [weight])
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)])
    return bytes(model.SerializeToString())


@st.composite
def mutated(draw: st.DrawFn, content: bytes) -> bytes:
    data = bytearray(content)
    words = [
        b"[" * 200,
        b"{",
        b"&a [*a]",
        b"null",
        b"-1",
        b"1e999",
        b"9" * 5000,
        b"\xff\xfe",
        b"\0",
        b"!!python/name:os",
    ]
    for _ in range(draw(st.integers(1, 8))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.integers(0, 4))
        if kind == 0 and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == 1:
            data[at : at + 8] = struct.pack("<q", draw(st.integers(-(2**63), 2**63 - 1)))
        elif kind == 2:
            del data[at : at + draw(st.integers(1, 64))]
        elif kind == 3:
            data[at:at] = data[at : at + draw(st.integers(1, 64))]
        else:
            data[at:at] = draw(st.sampled_from(words))
    return bytes(data)


def fuzz(path: Path, content: bytes, read: Callable[[Path], Any], *, seconds: float, first: int) -> Counter[str]:
    found: Counter[str] = Counter()

    def attempt(data: bytes) -> None:
        path.write_bytes(data)
        try:
            read(path)
            found["read"] += 1
        except CompressError:
            found["refused"] += 1
        except Exception as error:
            found[f"{type(error).__name__}: {str(error)[:80]}"] += 1

    end, number = time.monotonic() + seconds, first
    while time.monotonic() < end:
        checks = list(HealthCheck)
        options = settings(
            max_examples=BATCH, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=checks
        )
        seed(number)(options(given(mutated(content))(attempt)))()
        number += 1
    return found


def main() -> None:
    options = study_options(
        __doc__,
        option("--seconds", type=float, default=600, help="for all readers together"),
        option("--seed", type=int, default=0),
        out="results/reliability",
    )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        readers = seeds(Path(scratch))
        for name, (content, read) in readers.items():
            found = fuzz(
                Path(scratch) / name, content, read, seconds=options.seconds / len(readers), first=options.seed
            )
            others = {key: count for key, count in found.items() if key not in ("read", "refused")}
            rows.append(
                {
                    "file": name,
                    "inputs": found.total(),
                    "read": found["read"],
                    "refused": found["refused"],
                    "other exceptions": sum(others.values()),
                    "which": others,
                }
            )
    write_json(options.out / "fuzz.json", {"seed": options.seed, "seconds": options.seconds, "rows": rows})
    columns = ("file", "inputs", "read", "refused", "other exceptions")
    command = f"`python -m analysis.reliability_fuzz.run --seconds {options.seconds:g} --seed {options.seed}`"
    lines = table(columns, ([row[column] for column in columns] for row in rows))
    write_text(options.out / "fuzz.md", "\n".join(["# Mutated files", "", f"{command}, on a CPU.", "", *lines, ""]))


if __name__ == "__main__":
    main()
