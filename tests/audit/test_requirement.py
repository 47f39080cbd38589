"""`export.require`: violations in given layers, and in those of OpenVINO itself."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import compress
from compress.audit.engine import audit_listing
from compress.audit.layers import EngineLayer, EngineListing, EngineTensor
from compress.audit.requirement import unmet_by_audit, unmet_by_runtime
from compress.engines.base import RuntimeLayer


def layer(name, dtype, nodes):
    def tensor(end, shape):
        return EngineTensor(name=f"{name}{end}", dtype=dtype, shape=shape)

    return EngineLayer(
        name=name,
        kind="correlation",
        onnx_nodes=nodes,
        inputs=(tensor("i", (-1, 4, 4, 4)),),
        outputs=(tensor("o", (-1, 4, 4, 4)),),
        constants=(tensor("w", (4, 4, 3, 3)),),
    )


def audit(*types, named=True):
    layers = tuple(layer(f"l{i}", dtype, (f"/{i}/Conv",) if named else ()) for i, dtype in enumerate(types))
    return audit_listing(EngineListing(source="test", layers=layers))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("types", "nodes", "words"),
    [
        (("int8", "int8"), ["/0/Conv", "/1/Conv"], ""),
        (("int8", "fp16"), ["/0/Conv"], ""),  # left float in the file already
        (("int8", "fp16"), ["/0/Conv", "/1/Conv"], "/1/Conv"),
        (("fp32", "fp32"), ["/0/Conv", "/1/Conv"], "2"),
        (("int8",), [], "no INT8 operation"),
        (("int8", "fp8"), ["/0/Conv"], ""),  # more than the file asks for
        (("tf32", "int8"), ["/1/Conv"], ""),
    ],
)
def test_int8(types, nodes, words, named):
    unmet = unmet_by_audit(audit(*types, named=named), "int8", nodes)
    assert bool(unmet) == bool(words)
    if unmet and named:
        assert words in unmet[0]


@pytest.mark.parametrize(
    ("types", "fits"),
    [(("tf32", "int8"), False), (("fp16", "int8"), True), (("fp16", "fp32"), False), (("bf16",), True)],
)
def test_fp16(types, fits):
    unmet = unmet_by_audit(audit(*types), "fp16", [])
    assert (not unmet) == fits
    assert fits or "1 of 2" in unmet[0]


def test_openvino(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    x = torch.randn(2, 3, 16, 16)
    qmodel = compress.quantize(model.eval(), x, [x], spec=compress.QuantSpec(target="openvino"))
    path = compress.export_onnx(qmodel, x, tmp_path / "x.onnx")
    nodes = [row.name for row in compress.audit_onnx(path).rows if row.int8]
    assert len(nodes) == 3
    with compress.build_engine(path, "openvino", batch_size=1) as engine:
        layers = engine.runtime_layers()
    assert unmet_by_runtime(layers, nodes) == ()
    fallen = [replace(one, precision="f32") if "/2/Conv" in one.name else one for one in layers]
    (text,) = unmet_by_runtime(fallen, nodes)
    assert "1 of 3" in text and "/2/Conv" in text
    assert "no INT8" in unmet_by_runtime(layers, [])[0]


def test_names_beyond_the_first_are_counted():
    nodes = [f"/{i}/Conv" for i in range(14)]
    (message,) = unmet_by_audit(audit(*["fp16"] * 14), "int8", nodes)
    listed = message.rpartition(": ")[2]
    names, _, more = listed.partition(" and ")
    assert len(names.split(", ")) + int(more.removesuffix(" more")) == 14


def runtime(kind, precision, *names):
    return RuntimeLayer(name="layer", kind=kind, precision=precision, original_names=names)


def test_a_runtime_layer_counts_if_it_multiplies_in_8_bits():
    nodes = ["/0/Conv", "/1/Gemm"]
    both = [runtime("Convolution", "u8", "/0/Conv", "/0/Relu"), runtime("FullyConnected", "i8", "/1/Gemm")]
    assert unmet_by_runtime(both, nodes) == ()
    for other in (runtime("FullyConnected", "f32", "/1/Gemm"), runtime("Reorder", "i8", "/1/Gemm")):
        (text,) = unmet_by_runtime([both[0], other], nodes)
        assert text == "1 of 2 INT8 operations of the ONNX file are not INT8 here: /1/Gemm"


def test_a_few_names_are_all_shown():
    (text,) = unmet_by_audit(audit(*["fp16"] * 3), "int8", [f"/{i}/Conv" for i in range(3)])
    assert text.endswith(": /0/Conv, /1/Conv, /2/Conv")
    (text,) = unmet_by_audit(audit("int8", "fp16", named=False), "int8", ["a", "b"])
    assert text == "1 layers compute in 8 bits, and the ONNX file asks for 2"
