"""Puts decoding and non-maximum suppression after a detector in an ONNX file, for engines that run NonMaxSuppression.

What is added is float32. The outputs have a fixed number of places for the boxes of an image, by falling score, as
TensorRT's EfficientNMS has them: places that are left over have the score 0 and the label -1.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, compose, helper

from compress.detection import BoxesAndScores
from compress.errors import ExportError
from compress.export.onnx import export_onnx
from compress.onnx_graph import OnnxGraph, write_model

# (N, places, 4) in pixels of the input, (N, places), and (N, places) int64.
NMS_OUTPUTS = ("boxes", "scores", "labels")

_PREFIX = "detections/"


def export_with_nms(file: Path | str, decoding: BoxesAndScores, path: Path | str) -> Path:
    """Write a detector's file anew, whole or not at all, with decoding and non-maximum suppression after the network.

    `decoding` is from `DetectorHead.boxes_and_scores`. The new file's outputs are `NMS_OUTPUTS`.
    """
    network = onnx.load(file)
    shapes = {one.name: [dim.dim_value for dim in one.type.tensor_type.shape.dim] for one in network.graph.output}
    anchors = len(decoding.centres)
    if tuple(shapes) != decoding.names or any(shape[1] != anchors for shape in shapes.values()):
        raise ExportError(
            f"{file} has the outputs {shapes}, and the decoding takes {', '.join(decoding.names)} of {anchors} "
            "anchors: give the file of this detector, for this size of images"
        )
    opset = next(one.version for one in network.opset_import if not one.domain)
    with TemporaryDirectory() as folder:
        examples = [torch.zeros(2, *shape[1:]) for shape in shapes.values()]
        boxes = onnx.load(export_onnx(decoding, examples, Path(folder) / "boxes.onnx", opset=opset))
    boxes.ir_version = network.ir_version
    taken = [one.name for one in boxes.graph.input]
    whole = compose.merge_models(network, boxes, io_map=list(zip(shapes, taken, strict=True)), prefix2=_PREFIX)
    whole.producer_name = network.producer_name
    _suppress(whole.graph, decoding)
    onnx.checker.check_model(whole, full_check=True)
    return write_model(path, whole.SerializeToString())


def _suppress(graph: onnx.GraphProto, decoding: BoxesAndScores) -> None:
    """Append non-maximum suppression to a graph whose outputs are boxes (N, A, 4) and scores (N, classes, A).

    The scores of the boxes that remain are put back to their places, all others are 0, and the best of an image are
    chosen.
    """
    kept, anchors = decoding.suppression, len(decoding.centres)
    all_boxes, all_scores = (output.name for output in graph.output)
    places = min(kept.most, anchors * decoding.num_classes)
    index = OnnxGraph(graph)
    constants = {
        "most": np.array([kept.most]),
        "overlap": np.array([kept.overlap], np.float32),
        "least": np.array([kept.least_score], np.float32),
        "places": np.array([places]),
        "anchors": np.array([anchors]),
        "last": np.array([-1]),
        "zero": np.array([0], np.float32),
        "none": np.array([-1]),
    }
    named = {name: index.add_constant(_PREFIX + name, value) for name, value in constants.items()}
    named |= {"all_boxes": all_boxes, "all_scores": all_scores} | {name: name for name in NMS_OUTPUTS}
    for operator, inputs, outputs, attributes in _SUPPRESSION:
        given, made = ([named.get(name, _PREFIX + name) for name in names.split()] for names in (inputs, outputs))
        graph.node.append(helper.make_node(operator, given, made, name=f"/{_PREFIX}{outputs.split()[0]}", **attributes))
    del graph.output[:]
    types = (TensorProto.FLOAT, TensorProto.FLOAT, TensorProto.INT64)
    for name, kind, shape in zip(NMS_OUTPUTS, types, ((places, 4), (places,), (places,)), strict=True):
        graph.output.append(helper.make_tensor_value_info(name, kind, ["batch", *shape]))


# Operator, its inputs, its outputs and its attributes.
_SUPPRESSION: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("NonMaxSuppression", "all_boxes all_scores most overlap least", "kept", {}),
    ("GatherND", "all_scores kept", "kept_scores", {}),
    ("Shape", "all_scores", "shape", {}),
    ("ConstantOfShape", "shape", "nothing", {}),
    ("ScatterND", "nothing kept kept_scores", "remaining", {}),
    ("Flatten", "remaining", "flat", {"axis": 1}),
    ("TopK", "flat places", "scores chosen", {"axis": 1}),
    ("Div", "chosen anchors", "class", {}),
    ("Mod", "chosen anchors", "anchor", {}),
    ("Unsqueeze", "anchor last", "index", {}),
    ("GatherND", "all_boxes index", "found", {"batch_dims": 1}),
    ("Greater", "scores zero", "present", {}),
    ("Where", "present class none", "labels", {}),
    ("Unsqueeze", "present last", "beside", {}),
    ("Where", "beside found zero", "boxes", {}),
)
