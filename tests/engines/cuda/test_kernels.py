# The Triton kernels compute what exact arithmetic does, step by step; and they compile for GPUs that are not here.

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from compress.engines.cuda.executor import FLOAT_KERNEL, Executor, bind_reference, runtime_layer
from compress.engines.cuda.plan.layout import lay_out
from compress.engines.cuda.plan.lower import make_plan
from compress.engines.cuda.plan.steps import Product
from compress.engines.cuda.program import differences
from tests.engines.cuda.qdq import Builder
from tests.kernels.interpreter import interpreted

CPU = torch.device("cpu")
CASES = (
    "activations",
    "residuals of int8",
    "residuals of uint8",
    "groups",
    "stem",
    "small stem",
    "transformer",
    "wide heads",
    "shapes of the batch",
    "windows and heads apart",
    "shifted windows",
    "convnext",
)


def test_in_the_interpreter_every_step_computes_what_exact_arithmetic_does():
    interpreted("tests.engines.cuda.interpreted_plans")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_every_step_computes_what_exact_arithmetic_does(case):
    from tests.engines.cuda.interpreted_plans import check

    check(case, torch.device("cuda"))


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="no GPU with a copy engine"
)
def test_on_a_gpu_products_by_descriptors_compute_what_exact_arithmetic_does():
    from tests.engines.cuda.interpreted_plans import check_epilogues, check_pointwise, check_windows

    check_pointwise(torch.device("cuda"))
    check_windows(torch.device("cuda"))
    check_epilogues(torch.device("cuda"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_depthwise_products_of_four_bytes_compute_what_exact_arithmetic_does():
    from tests.engines.cuda.interpreted_plans import check_dots

    check_dots(torch.device("cuda"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_constants_beyond_float16_lose_nothing():
    from tests.engines.cuda.interpreted_plans import check_float16

    check_float16(torch.device("cuda"))


KEYS = """
import importlib, sys
from pathlib import Path
from compress.kernels import triton
names = sorted(path.stem for path in Path(triton.__path__[0]).glob("int8_*.py"))[::int(sys.argv[1])]
modules = [importlib.import_module(f"compress.kernels.triton.{name}") for name in names]
kernels = {n: f for m in modules for n, f in vars(m).items() if n.startswith("_") and n.endswith("_kernel")}
print(sorted((name, kernel.cache_key) for name, kernel in kernels.items()))
"""


@pytest.mark.release
def test_the_cache_finds_a_kernel_whichever_was_asked_for_before():
    pytest.importorskip("triton")
    found = [
        subprocess.run([sys.executable, "-c", KEYS, order], capture_output=True, text=True, check=True).stdout
        for order in ("1", "-1")
    ]
    assert found[0] == found[1]
    assert found[0].count("_kernel") > 10


class EndsTheCompiler:
    @staticmethod
    def warmup(*arguments, **options):
        os._exit(9)


def test_a_convolution_compiles_for_a_gpu_that_is_not_here_whatever_becomes_of_others(tmp_path):
    pytest.importorskip("triton")
    from compress.engines.cuda.bind import Bindings, candidates
    from compress.engines.cuda.program import kernel_requests, kernels_of
    from compress.kernels.triton.ahead import Request, compile_requests

    b = Builder((1, 32, 8, 8))
    layout = lay_out(make_plan(b.save(tmp_path / "m.onnx", b.quantize(b.conv(b.quantize("input"), 32))), batch_size=8))
    cpu = torch.device("cpu")
    executor = Executor(layout, [bind_reference(step, layout, cpu) for step in layout.steps], cpu)
    bindings = Bindings(cpu, {})
    found = kernels_of(executor, [candidates(step, layout, bindings)[:1] for step in layout.steps])
    products = [request for request in kernel_requests(found) if request.name == "_product_kernel"]
    assert len(products) == 1
    dying, unknown = (Request(__name__, name, (), ()) for name in ("EndsTheCompiler", "no_such_kernel"))
    errors = compile_requests([dying, *products, unknown], (9, 0), jobs=1)
    assert errors[:2] == ["the compiler ended with status 9", ""]
    assert "no_such_kernel" in errors[2]
    late = compile_requests(products, (9, 0), jobs=1, seconds=0)
    assert late == ["not compiled in 0 s"]


@pytest.mark.parametrize(
    ("shape", "columns", "kind"),
    [((1, 32, 64, 64), 128, "pointwise"), ((1, 32, 64, 64), 136, ""), ((1, 272, 16, 16), 136, "deep")],
)
def test_products_by_descriptors_only_where_they_write_nothing_but_their_own_channels(tmp_path, shape, columns, kind):
    pytest.importorskip("triton")
    from compress.engines.cuda.bind import Bindings, candidates

    b = Builder(shape)
    path = b.save(tmp_path / "m.onnx", b.quantize(b.conv(b.quantize("input"), columns, taps=1, padding=0)))
    layout = lay_out(make_plan(path, batch_size=64))
    names = [way.name for step in layout.steps for way in candidates(step, layout, Bindings(torch.device("cpu"), {}))]
    assert {name.split()[1] for name in names} & {"pointwise", "deep"} == ({kind} if kind else set())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_whose_results_are_values_may_be_computed_in_floating_point(tmp_path, dtype):
    # Not those that are quantized again, nor where it is refused; and the layer says so.
    pytest.importorskip("triton")
    from compress.engines.cuda.bind import Bindings, candidates

    b = Builder((2, 8, 6, 5), unsigned=True)
    y = b.quantize(b.op("Relu", b.conv(b.quantize("input"), 8, groups=8, padding=(0, 1, 1, 0))))
    y = b.op("Transpose", b.conv(y, 8, 5, padding=2, groups=8), perm=[0, 2, 3, 1])
    norm = [b.constant(b.rng.standard_normal(8).astype(np.float32)) for _ in range(2)]
    y = b.quantize(b.op("LayerNormalization", y, *norm, axis=-1))
    path = b.save(tmp_path / "m.onnx", b.linear(y, 5))
    layout = lay_out(make_plan(path, batch_size=2, dtype=dtype))
    ways = [candidates(step, layout, Bindings(CPU, {})) for step in layout.steps]
    found = [[w for w in way if w.name.startswith(FLOAT_KERNEL)] for way in ways]
    products = [i for i, step in enumerate(layout.steps) if isinstance(step, Product)]
    assert [len(found[i]) for i in products] == [0, 1, 1]
    refused = [candidates(step, layout, Bindings(CPU, {}, floats=False)) for step in layout.steps]
    assert not any(way.name.startswith(FLOAT_KERNEL) for step in refused for way in step)
    executor = Executor(layout, [bind_reference(step, layout, CPU) for step in layout.steps], CPU)
    for i in products[1:]:
        executor.runners[i] = found[i][0].run
    assert not [d for d in differences(executor, {"input": torch.from_numpy(b.x)}) if d.wrong]
    layer = runtime_layer(layout.steps[products[1]], layout, found[products[1]][0].name)
    assert layer.precision == layer.output_precisions[0] == {torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]


def test_no_operation_reads_a_tensor_of_the_device_on_the_host(tmp_path):
    # On the device `meta`, tensors have no values: reading one fails here, as it does in a CUDA graph.
    pytest.importorskip("triton")
    from compress.engines.cuda.bind import Bindings, candidates

    b = Builder((2, 4, 8))
    x = b.op("Reshape", "input", b.constant(np.array([2, 8, 4])))
    x = b.op("Slice", x, *(b.constant(np.array([n])) for n in (1, 7, 1, 2)))
    x = b.op("ReduceMean", x, b.constant(np.array([2])), keepdims=1)
    x = b.op("Tile", x, b.constant(np.array([1, 1, 3])))
    x = b.op("Gather", x, b.constant(np.array(0)), axis=1)
    x = b.op("Gather", x, b.constant(np.array([2, 0])), axis=1)
    layout = lay_out(make_plan(b.save(tmp_path / "m.onnx", x), batch_size=2))
    meta = torch.device("meta")
    bindings = Bindings(meta, {})
    executor = Executor(layout, [candidates(step, layout, bindings)[0].run for step in layout.steps], meta)
    (result,) = executor.run(executor.empty_inputs()).values()
    assert result.shape == (2, 2)
