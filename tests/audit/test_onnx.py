"""The audit of ONNX files, on files written down here."""

import onnx
import pytest

from compress.audit.onnx import audit_onnx
from compress.errors import AuditError

FILE = """
<ir_version: 9, opset_import: ["": 19]>
audited (float[1,2,4,4] x, float[1,2,4,4] z) => (float[1,4,2,2] y)
<float s = {0.1}, int8 zero = {0}, int8[4,4,3,3] q = {QUANTS}, float[1,2,4,4] map = {MAP}> {
    x_q = QuantizeLinear(x, s, zero)
    x_d = DequantizeLinear(x_q, s, zero)
    z_q = QuantizeLinear(z, s, zero)
    z_d = DequantizeLinear(z_q, s, zero)
    w = DequantizeLinear(q, s, zero)
    pair = Concat <axis = 1> (PARTS)
    pooled = MaxPool <kernel_shape = [1, 1]> (pair)
    y = Conv(pooled, w)
}
""".replace("QUANTS", ", ".join(["1"] * 144)).replace("MAP", ", ".join(["0.5"] * 32))


@pytest.mark.parametrize(
    ("parts", "int8"),
    [("x_d, z_d", True), ("x_d, z", False), ("z, x_d", False), ("x_d, map", False), ("x_d, x_d", True)],
)
def test_a_concat_is_quantized_if_all_of_its_inputs_are(parts, int8, tmp_path):
    onnx.save(onnx.parser.parse_model(FILE.replace("PARTS", parts)), tmp_path / "m.onnx")
    (row,) = audit_onnx(tmp_path / "m.onnx").rows
    assert row.int8 is int8 and row.weight_type == "int8"
    assert row.reason == ("" if int8 else "its input is not quantized")


@pytest.mark.parametrize(("parts", "share"), [("x_d, z_d", 1.0), ("x_d, z", 0.0)])
def test_the_share_of_weights_in_int8(parts, share, tmp_path):
    onnx.save(onnx.parser.parse_model(FILE.replace("PARTS", parts)), tmp_path / "m.onnx")
    assert audit_onnx(tmp_path / "m.onnx").int8_share == share


def test_a_scale_of_zero_is_refused_by_the_result_of_a_node_without_a_name(tmp_path):
    onnx.save(onnx.parser.parse_model(FILE.replace("PARTS", "x_d, z_d").replace("{0.1}", "{0}")), tmp_path / "m.onnx")
    with pytest.raises(AuditError, match=r"^x_q: scale is 0\.0 in 1 of 1 places"):
        audit_onnx(tmp_path / "m.onnx")
