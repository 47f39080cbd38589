"""Cuts an ONNX file after some of its inner tensors."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx.utils import Extractor


def cut_file(model: onnx.ModelProto, outputs: list[str], target: Path) -> Path:
    """Write the part of a model that computes `outputs`."""
    typed = onnx.shape_inference.infer_shapes(model)
    known = {value.name for value in (*typed.graph.value_info, *typed.graph.input, *typed.graph.output)}
    for name in set(outputs) - known:  # results of operators that onnx cannot infer
        typed.graph.value_info.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    cut = Extractor(typed).extract_model([value.name for value in typed.graph.input], outputs)
    del cut.graph.value_info[:]  # engines infer the shapes of what is left
    onnx.save(cut, str(target))
    return target
