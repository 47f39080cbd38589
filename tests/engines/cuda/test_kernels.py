"""The Triton kernels compute what exact arithmetic does, step by step; and they compile for GPUs that are not here."""

import pytest
import torch

from compress.engines.cuda.executor import Executor, bind_reference
from compress.engines.cuda.plan.layout import lay_out
from compress.engines.cuda.plan.lower import make_plan
from tests.engines.cuda.qdq import Builder
from tests.kernels.interpreter import interpreted

CASES = ("activations", "residuals of int8", "residuals of uint8", "groups", "stem", "transformer")


def test_in_the_interpreter_every_step_computes_what_exact_arithmetic_does():
    assert interpreted("tests.engines.cuda.interpreted_plans").splitlines() == [*CASES, "pointwise"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_every_step_computes_what_exact_arithmetic_does(case):
    from tests.engines.cuda.interpreted_plans import check

    check(case, torch.device("cuda"))


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="no GPU with a copy engine"
)
def test_on_a_gpu_products_by_descriptors_compute_what_exact_arithmetic_does():
    from tests.engines.cuda.interpreted_plans import check_pointwise

    check_pointwise(torch.device("cuda"))


def test_a_convolution_compiles_for_a_gpu_that_is_not_here(tmp_path):
    pytest.importorskip("triton")
    from compress.engines.cuda.bind import Bindings, candidates
    from compress.engines.cuda.tuning import kernel_requests
    from compress.kernels.triton.ahead import compile_requests

    b = Builder((1, 32, 8, 8))
    layout = lay_out(make_plan(b.save(tmp_path / "m.onnx", b.quantize(b.conv(b.quantize("input"), 32))), batch_size=8))
    cpu = torch.device("cpu")
    executor = Executor(layout, [bind_reference(step, layout, cpu) for step in layout.steps], cpu)
    bindings = Bindings(cpu, {})
    requests = kernel_requests(executor, [candidates(step, layout, bindings)[:1] for step in layout.steps])
    products = [request for request in requests if request.name == "_product_kernel"]
    assert len(products) == 1
    assert [result.error for result in compile_requests(products, (9, 0), jobs=1)] == [""]
