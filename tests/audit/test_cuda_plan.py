"""The audit of what our own engine makes of a file: types, bytes and products against hand counts."""

import numpy as np
import pytest

from compress.audit.cuda_plan import read_cuda_layers
from compress.audit.engine import audit_listing
from compress.errors import EngineError
from tests.engines.cuda.qdq import Builder


def test_a_residual_block_moves_one_byte_an_element(tmp_path):
    b = Builder((1, 16, 8, 8))
    x = b.quantize("input")
    y = b.quantize(b.op("Relu", b.conv(x, 32, stride=2)))
    y = b.quantize(b.op("Relu", b.op("Add", b.conv(y, 32), y)))
    path = b.save(tmp_path / "m.onnx", b.linear(b.op("Flatten", b.op("GlobalAveragePool", y)), 10))
    audit = audit_listing(read_cuda_layers(path), onnx=path)
    first, second = (layer for layer in audit.layers if layer.operation == "conv")
    assert (first.precision, first.input_types, first.output_types) == ("int8", ("int8",), ("int8",))
    assert (first.read_bytes, first.written_bytes) == (16 * 8 * 8, 32 * 4 * 4)
    assert (first.macs, second.macs) == (32 * 16 * 9 * 16, 32 * 32 * 9 * 16)
    assert second.read_bytes == 32 * 4 * 4  # its input is its residual too
    assert second.weight_bytes == 32 * 32 * 9
    assert audit.share("int8") > 0.99


def test_attention_counts_both_of_its_products(tmp_path):
    b = Builder((1, 2, 6, 8))
    q, k, v = (b.quantize("input") for _ in range(3))
    scores = b.op("MatMul", q, b.op("Transpose", k, perm=[0, 1, 3, 2]))
    y = b.op("MatMul", b.quantize(b.op("Softmax", scores, axis=-1), clip=1.0), v)
    audit = audit_listing(read_cuda_layers(b.save(tmp_path / "m.onnx", b.quantize(y))))
    (layer,) = [layer for layer in audit.layers if layer.kind == "Attention"]
    assert layer.macs == 2 * 6 * 6 * (8 + 8)
    assert layer.precision == "int8"


def test_a_file_that_the_engine_cannot_run_is_refused(tmp_path):
    b = Builder((1, 3, 4, 4))
    y = b.op("Cast", b.op("QuantizeLinear", "input", b.constant(np.float32(0.1)), b.constant(np.int8(0))), to=1)
    with pytest.raises(EngineError, match="only DequantizeLinear may read them"):
        read_cuda_layers(b.save(tmp_path / "m.onnx", y))
