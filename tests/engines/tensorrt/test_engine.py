"""The run path: what it checks on the host, everywhere; and the engine itself, where a GPU and a library are."""

import dataclasses

import numpy as np
import pytest
import torch

from compress import build_engine, engine_availability
from compress.engines.base import GpuTimes, TensorInfo
from compress.engines.tensorrt.context import TORCH_TYPES, best_batch
from compress.engines.tensorrt.engine import check_tensors
from compress.engines.tensorrt.metadata import EngineMetadata
from compress.engines.tensorrt.options import TensorRTOptions, profiles_of
from compress.errors import EngineError
from tests.engines.tensorrt.files import IMAGE, write_all

CPU = torch.device("cpu")
INPUT = TensorInfo(name="input", dtype="float32", shape=(-1, *IMAGE))
METADATA = EngineMetadata(
    engine="tensorrt",
    version="10.14.1",
    parser_version="1",
    gpu="",
    sms=(89,),
    recipe="",
    variant="ptq",
    onnx="ptq.onnx",
    onnx_sha256="",
    engine_bytes=0,
    engine_sha256="",
    options={},
    profiles=profiles_of((INPUT,), TensorRTOptions(batch=(1, 4, 8)), where="ptq.onnx"),
    inputs=(INPUT,),
    outputs=(),
    float_types=("f16", "f32"),
    onnx_metadata={},
    build_seconds=0.0,
)


def test_tensors_that_can_be_read_where_they_lie_are_taken():
    check_tensors({"input": torch.zeros(8, *IMAGE)}, METADATA, CPU, label="e")


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "got inputs none; the engine takes input"),
        ({"input": torch.zeros(1, *IMAGE), "more": torch.zeros(1)}, "got inputs input, more"),
        ({"input": torch.zeros(1, *IMAGE, dtype=torch.float16)}, "is float16; the engine takes float32"),
        ({"input": torch.zeros(1, *IMAGE, device="meta")}, "is on meta; the engine runs on cpu"),
        ({"input": torch.zeros(2, *IMAGE).to(memory_format=torch.channels_last)}, "not contiguous"),
        ({"input": torch.zeros(9, *IMAGE)}, "batch=1,9,9"),
    ],
)
def test_tensors_that_cannot_be_read_where_they_lie_are_refused(inputs, message):
    with pytest.raises(EngineError, match=message):
        check_tensors(inputs, METADATA, CPU, label="e")


@pytest.mark.parametrize(
    ("kinds", "options", "sms", "expected"),
    [
        (("f16", "f32"), {}, (89,), "f16"),
        (("bf16", "f16"), {}, (89,), "unknown"),
        (("f32",), {"tf32": True}, (89,), "tf32"),
        (("f32",), {"tf32": False}, (89,), "f32"),
        (("f32",), {"tf32": True}, (75,), "f32"),
    ],
)
def test_the_type_of_the_remainder_is_the_files_and_tf32_is_reported(kinds, options, sms, expected):
    assert dataclasses.replace(METADATA, float_types=kinds, options=options, sms=sms).float_precision == expected


def test_types_of_torch_and_of_the_file_are_of_one_size():
    for name, dtype in TORCH_TYPES.items():
        if name != "bfloat16":
            assert np.dtype(name).itemsize == dtype.itemsize
            assert torch.from_numpy(np.zeros(1, dtype=name)).dtype == dtype


def times(batch, *ms):
    return GpuTimes(batch_size=batch, copy_in_ms=ms, compute_ms=ms, copy_out_ms=ms, total_ms=ms)


def test_throughput_is_of_the_median_and_the_best_batch_has_the_highest():
    assert times(8, 1.0, 2.0, 100.0).images_per_s == 4000
    assert best_batch({1: times(1, 1.0), 8: times(8, 2.0), 32: times(32, 10.0)}) == 8
    assert best_batch({8: times(8, 8.0), 4: times(4, 4.0)}) == 4
    with pytest.raises(EngineError, match="no times"):
        best_batch({})


USABLE = [row.name for row in engine_availability() if row.name.startswith("tensorrt") and row.available]


@pytest.mark.skipif(not USABLE, reason="needs a GPU with TensorRT or TensorRT-RTX")
@pytest.mark.parametrize("name", USABLE)
@pytest.mark.parametrize("graph", ["no", "yes"])
def test_on_a_gpu_all_ways_to_run_agree_with_onnxruntime(tmp_path, name, graph):
    files = write_all(tmp_path)
    batches = [np.random.default_rng(i).standard_normal((4, *IMAGE)).astype(np.float32) for i in range(5)]
    with (
        build_engine(files["float"], "onnxruntime") as reference,
        build_engine(files["float"], name, cuda_graph=graph) as engine,
    ):
        expected = [reference.run({"input": batch})["logits"] for batch in batches]
        one_by_one = [engine.run({"input": batch})["logits"] for batch in batches]
        overlapped = [out["logits"] for out in engine.run_many({"input": batch} for batch in batches)]
        resident = [engine.run_tensors({"input": torch.from_numpy(batch).cuda()}) for batch in batches]
        torch.cuda.synchronize()
        for got in (one_by_one, overlapped, [out["logits"].cpu().numpy() for out in resident]):
            np.testing.assert_allclose(np.stack(got), np.stack(expected), rtol=2e-2, atol=2e-2)
        measured = engine.gpu_times({"input": batches[0]}, runs=5)
        assert min(measured.compute_ms) > 0
        with pytest.raises(EngineError, match="batch=1,33,33"):
            engine.run({"input": np.zeros((33, *IMAGE), np.float32)})
