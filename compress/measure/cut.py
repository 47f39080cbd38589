"""Part of an ONNX file: what some of its inner tensors need, and nothing behind them that an engine could fuse."""

from __future__ import annotations

from pathlib import Path

import onnx


def cut_file(model: onnx.ModelProto, outputs: list[str], target: Path) -> Path:
    """Write a model that computes `outputs` and nothing else."""
    cut = onnx.ModelProto()
    cut.CopyFrom(model)
    known = {value.name: value for value in model.graph.output}
    needed, kept = set(outputs), []
    for node in reversed(model.graph.node):
        if needed & set(node.output):
            needed |= set(node.input)
            kept.append(node)
    del cut.graph.node[:], cut.graph.output[:], cut.graph.initializer[:]
    cut.graph.node.extend(reversed(kept))
    cut.graph.initializer.extend(t for t in model.graph.initializer if t.name in needed)
    types = {v.name: v for v in onnx.shape_inference.infer_shapes(model).graph.value_info}
    for name in outputs:
        value = known.get(name) or types.get(name)
        cut.graph.output.append(value or onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    onnx.save(cut, str(target))
    return target
