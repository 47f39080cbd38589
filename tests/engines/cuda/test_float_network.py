# The network in floating point is the file without rounding: weights of its integers, activations within its grids.

import gc

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper

from compress.engines.cuda.executor import Candidate, runtime_layer
from compress.engines.cuda.plan.graph import read_graph
from compress.engines.cuda.plan.layout import lay_out
from compress.engines.cuda.plan.lower import make_plan
from compress.engines.cuda.program import (
    Program,
    compiled,
    float_graph,
    float_network,
    machine_of,
    read_plan,
    recorded_network,
)
from tests.engines.cuda.qdq import Builder
from tests.exact import open_session

pytest.importorskip("triton")
from compress.engines.cuda.bind import Bindings, candidates
from tests.engines.cuda.interpreted_plans import CASES


def without_rounding(path):
    # A file's outputs in ONNX Runtime with Clip in the place of every quantizer of an activation.
    model = onnx.load(path)
    constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    nodes = []
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear":
            scale, zero = (constants[name] for name in node.input[1:3])
            info = np.iinfo(zero.dtype)
            bounds = [np.float32((limit - float(zero)) * float(scale)) for limit in (info.min, info.max)]
            names = [f"{node.name}_{end}" for end in ("lower", "upper")]
            model.graph.initializer.extend(map(numpy_helper.from_array, map(np.asarray, bounds), names))
            nodes.append(helper.make_node("Clip", [node.input[0], *names], node.output))
        elif node.op_type == "DequantizeLinear" and node.input[0] not in constants:
            nodes.append(helper.make_node("Identity", node.input[:1], node.output))
        else:
            nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return open_session(model, optimize=False)


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_the_file_does_without_rounding(case, tmp_path):
    build, shape, options = CASES[case]
    b = Builder(shape, **options)
    outputs = build(b)
    path = b.save(tmp_path / "m.onnx", *(outputs if isinstance(outputs, tuple) else (outputs,)))
    x = 1.5 * b.x  # also beyond the ranges
    network = float_network(float_graph(read_graph(path, batch_size=len(x))), torch.float32, torch.device("cpu"))
    expected = without_rounding(path).run(None, {"input": x})
    for ours, theirs in zip(network(torch.from_numpy(x)), expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-3, atol=1e-4 * np.abs(theirs).max())


def test_a_quantizer_without_negative_codes_is_a_relu(tmp_path):
    b = Builder((1, 8, 4, 4), unsigned=True)
    path = b.save(tmp_path / "m.onnx", b.quantize(b.op("Relu", "input")))
    model = onnx.load(path)
    relu = next(node for node in model.graph.node if node.op_type == "Relu")
    for node in model.graph.node:  # as ONNX Runtime's quantizer leaves it out
        node.input[:] = ["input" if name == relu.output[0] else name for name in node.input]
    model.graph.node.remove(relu)
    onnx.save(model, path)
    network = float_network(float_graph(read_graph(path)), torch.float32, torch.device("cpu"))
    x = 0.9 * b.x  # within the range
    np.testing.assert_allclose(network(torch.from_numpy(x))[0], np.maximum(x, 0), rtol=1e-6)


def test_torch_compiles_it(tmp_path):
    b = Builder((2, 3, 15, 11))
    path = b.save(tmp_path / "m.onnx", b.linear(b.op("Flatten", b.quantize(b.conv(b.quantize("input"), 8))), 5))
    network = float_network(float_graph(read_graph(path, batch_size=2)), torch.float32, torch.device("cpu"))
    x = {"input": torch.from_numpy(b.x)}
    torch.testing.assert_close(compiled(network, x, backend="aot_eager")(*x.values()), network(*x.values()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_it_is_recorded_as_a_graph(tmp_path):
    b = Builder((2, 3, 15, 11))
    path = b.save(tmp_path / "m.onnx", b.linear(b.op("Flatten", b.quantize(b.conv(b.quantize("input"), 8))), 5))
    device = torch.device("cuda")
    x = {"input": torch.from_numpy(b.x).to(device)}
    graph = float_graph(read_graph(path, batch_size=2))
    recorded = recorded_network(lambda: float_network(graph, torch.float16, device), x, ["y"])
    gc.collect()
    torch.cuda.empty_cache()  # as the next recording does: weights that nothing else holds are gone
    _ = torch.full([1 << 26], torch.nan, device=device)
    recorded.static["input"].copy_(2 * x["input"])
    recorded.graph.replay()
    (expected,) = without_rounding(path).run(None, {"input": 2 * b.x})
    np.testing.assert_allclose(recorded.results[0]["y"].cpu(), expected, atol=2e-3 * np.abs(expected).max())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_the_whole_network_runs_in_floating_point_where_its_integers_are_slower(tmp_path):
    b = Builder((2, 16, 15, 11))
    path = b.save(tmp_path / "m.onnx", b.linear(b.op("Flatten", b.quantize(b.conv(b.quantize("input"), 16))), 5))
    device = torch.device("cuda", 0)
    layout, bindings = lay_out(make_plan(path, batch_size=2)), Bindings(device, {})

    def slow(step, layout):
        run = candidates(step, layout, bindings)[0].run

        def repeated(tensors):
            for _ in range(200):
                run(tensors)

        return [Candidate("slow", repeated)]

    def network():
        return float_network(float_graph(read_graph(path, batch_size=2)), torch.float16, device)

    for _ in range(2):  # measured, then by the plan
        plan = read_plan(tmp_path / "plan.json", machine_of(device))
        program = Program(layout, device, candidates=slow, plan=plan)
        program.in_floats_if_faster(network, plan)
        assert program.floats
        assert {
            runtime_layer(step, layout, k).precision for step, k in zip(layout.steps, program.kernels, strict=True)
        } == {"f16"}
        (result,) = program.run({"input": torch.from_numpy(b.x).to(device)}).values()
        (expected,) = without_rounding(path).run(None, {"input": b.x})
        np.testing.assert_allclose(result.cpu(), expected, atol=1e-2 * np.abs(expected).max())
