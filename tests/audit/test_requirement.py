"""`export.require`: violations in given layers, and in those of OpenVINO itself."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import compress
from compress.audit.engine import audit_listing
from compress.audit.layers import EngineLayer, EngineListing, EngineTensor
from compress.audit.requirement import unmet_by_audit, unmet_by_runtime


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
    ],
)
def test_int8(types, nodes, words, named):
    unmet = unmet_by_audit(audit(*types, named=named), "int8", nodes)
    assert bool(unmet) == bool(words)
    if unmet and named:
        assert words in unmet[0]


@pytest.mark.parametrize(("types", "fits"), [(("fp16", "int8"), True), (("fp16", "fp32"), False), (("bf16",), True)])
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
