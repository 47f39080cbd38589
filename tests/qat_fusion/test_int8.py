import pytest
import torch

import compress
from compress.qat_fusion.int8 import codes_by_torch
from compress.quantization.numerics import QuantFormat, quantize_tensor
from tests.kernels.interpreter import interpreted
from tests.qat_fusion.interpreted_int8 import close, gradients, made


@pytest.mark.release
def test_in_the_interpreter_it_trains_as_the_plain_path_does():
    assert "1 network, 1 compiled, 1 with BatchNorm" in interpreted("tests.qat_fusion.interpreted_int8")


@pytest.mark.parametrize("target", ["tensorrt", "openvino"])
def test_where_triton_does_not_run_the_chains_are_the_fused_ones(target):
    qmodel, x = made(target=target)
    fused = compress.fuse_for_training(qmodel, forward="int8")
    assert any(chain.int8 for chain in fused.report.chains) == (target == "tensorrt")  # unsigned codes are not computed
    close(gradients(fused, qmodel, x), gradients(qmodel, qmodel, x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_read_off_values_of_any_type(dtype):
    # Every integer comes back, although 8 bits of a fraction hold 127 steps only just.
    codes = torch.arange(-128, 128, dtype=torch.int8)
    for amax in (0.013, 1.0, 5.3, 40.7):
        values = (codes * (torch.tensor(amax) / 127)).to(dtype)
        assert torch.equal(codes_by_torch(values, torch.tensor(amax), QuantFormat()), codes)


def test_codes_of_weights_are_those_of_the_engine():
    weight = torch.randn(6, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    amax = 0.7 * weight.abs().amax((1, 2, 3))
    quant_format = QuantFormat(axis=0, narrow=True)
    codes = codes_by_torch(weight, amax, quant_format)
    assert torch.equal(codes, quantize_tensor(weight, amax / 127, quant_format))
    assert codes.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_it_trains_as_the_plain_path_does(compiled):
    qmodel, x = made()
    qmodel, x = qmodel.cuda(), x.cuda()
    fused = compress.fuse_for_training(qmodel, forward="int8")
    run = torch.compile(fused, fullgraph=True) if compiled else fused
    with torch.backends.cudnn.flags(allow_tf32=False):
        close(gradients(run, qmodel, x), gradients(qmodel, qmodel, x))
