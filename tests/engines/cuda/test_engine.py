# The engine `cuda` through the interface that all engines have; without a GPU it computes in exact arithmetic.

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from compress import build_engine
from compress.engines.cuda import engine as cuda_engine
from compress.engines.cuda import program as program_module
from compress.engines.cuda.executor import Candidate, bind_reference
from compress.engines.cuda.plan.layout import lay_out
from compress.engines.cuda.plan.lower import make_plan
from compress.engines.cuda.program import (
    Machine,
    Program,
    default_path,
    faster_program,
    plan_beside,
    read_plan,
    signature,
)
from compress.errors import CompressWarning, EngineError, EngineUnavailableError
from tests.engines.cuda.qdq import Builder
from tests.engines.cuda.test_plan import MOVES
from tests.engines.models import classifier
from tests.exact import open_session

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
MACHINE = Machine(gpu="NVIDIA H100 80GB HBM3", capability="9.0", driver="13.0", torch="2.11.0", triton="3.6.0")


def network(path, seed=0):
    b = Builder((2, 3, 8, 8), seed=seed)
    x = b.quantize(b.op("Relu", b.conv(b.quantize("input"), 16)))
    y = b.quantize(b.op("Relu", b.op("Add", b.conv(x, 16), x)))
    return b.save(path, b.op("Flatten", b.op("GlobalAveragePool", y))), b.x


def test_it_computes_what_onnx_runtime_does_for_every_batch(tmp_path):
    path, x = network(tmp_path / "m.onnx")
    with build_engine(path, "cuda", device="cpu") as engine, build_engine(path, "onnxruntime") as other:
        for batch in (x, x[:1], np.concatenate([x, x])):
            (result,), (expected,) = engine.run({"input": batch}).values(), other.run({"input": batch}).values()
            np.testing.assert_allclose(result, expected, atol=2e-3 * np.abs(expected).max())
        assert engine.info.label == "cuda (exact)"
    with pytest.raises(EngineError, match="closed"):
        engine.run({"input": x})


@pytest.mark.parametrize(
    "nodes",
    [
        "y = Mul (x, one)",
        "y = Identity (x)",
        "y = Mul (x, tiny)",
        "a = Max (x, low) y = Min (a, high)",
        "a = Relu (x) y = Min (a, high)",
        "y = Min (x, high)",
        "a = Sub (x, high) y = Exp (a)",
        "a = Sub (x, high) y = Sigmoid (a)",
        "a = Add (x, high) y = Tanh (a)",
        "i = Cast <to = 7> (x) k = Mul (i, number) y = Cast <to = 1> (k)",
    ],
)
def test_functions_are_what_the_file_says_everywhere(nodes, tmp_path):
    constants = "float one = {1}, float tiny = {4e-8}, float low = {-20}, float high = {20}, int64 number = {1}"
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 15]> g (float[402] x) => (float[402] y) <{constants}> {{ {nodes} }}'
    )
    onnx.save(model, tmp_path / "m.onnx")
    x = np.concatenate([np.linspace(-80, 80, 400), [-5e4, 90]]).astype(np.float32)
    (expected,) = open_session(model, optimize=False).run(None, {"x": x})
    with build_engine(tmp_path / "m.onnx", "cuda", device="cpu") as engine:
        np.testing.assert_allclose(engine.run({"x": x})["y"], expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("move", range(len(MOVES)))
def test_what_moves_codes_is_recorded_and_fits_every_batch(tmp_path, move):
    b = Builder((3, 4, 6, 6))
    x = b.quantize(b.op("Relu", b.conv(b.quantize("input"), 4)))
    rows = b.op("Concat", b.op("Shape", x, end=2), b.constant(np.array([-1])), axis=0)
    y = b.quantize(MOVES[move](b, b.op("Reshape", b.op("Reshape", x, rows), b.op("Shape", x))))
    path = b.save(tmp_path / "m.onnx", b.quantize(b.op("Add", y, b.conv(y, b.values[y].shape[1]))))
    device = {} if torch.cuda.is_available() else {"device": "cpu"}
    session = open_session(path, optimize=False)
    with build_engine(path, "cuda", tune="no", **device) as engine:
        for count in (3, 1, 2):
            given = {"input": b.x[:count]}
            (result,), (expected,) = engine.run(given).values(), session.run(None, given)
            assert np.std(expected) > 0.1
            np.testing.assert_allclose(result, expected, atol=0.02 * np.abs(expected).max())  # two steps of the grid


def strongest(b, x):
    # Channels, by image, of the largest means: (images, 2, 1).
    means = b.op("ReduceMean", x, b.constant(np.array([2, 3])), keepdims=0)
    return b.op("Unsqueeze", b.op("TopK", means, b.constant(np.array([2])), outputs=2)[1], b.constant(np.array([-1])))


INDEXED = {
    "GridSample": lambda b, x: b.op(
        "GridSample", x, b.op("Transpose", b.op("Tanh", b.conv(x, 2)), perm=[0, 2, 3, 1]), align_corners=1
    ),
    "GatherND": lambda b, x: b.op("GatherND", x, strongest(b, x), batch_dims=1),
    "ScatterElements": lambda b, x: b.op(
        "ScatterElements", x, b.op("ArgMax", x, axis=1), b.op("ReduceMin", x, b.constant(np.array([1]))), axis=1
    ),
    "ScatterND": lambda b, x: b.op(
        "ScatterND",
        x,
        b.constant(np.array([[0, 1], [0, 3]])),
        b.constant(np.full((2, 6, 6), 0.5, np.float32)),
        reduction="add",
    ),
}


@pytest.mark.parametrize("kind", INDEXED)
def test_places_that_the_network_computes_fit_every_batch(tmp_path, kind):
    b = Builder((3, 4, 6, 6))
    x = b.quantize(b.op("Relu", b.conv(b.quantize("input"), 4)))
    y = b.quantize(INDEXED[kind](b, x))
    path = b.save(tmp_path / "m.onnx", b.conv(y, 4), y)
    device = {} if torch.cuda.is_available() else {"device": "cpu"}
    session = open_session(path, optimize=False)
    with build_engine(path, "cuda", tune="no", **device) as engine:
        for count in (3, 1, 2):
            found, expected = engine.run({"input": b.x[:count]}).values(), session.run(None, {"input": b.x[:count]})
            for ours, theirs in zip(found, expected, strict=True):
                assert np.std(theirs) > 0.1
                np.testing.assert_allclose(ours, theirs, atol=0.03 * np.abs(theirs).max())


def test_outputs_that_follow_from_constants(tmp_path):
    b = Builder((3, 4, 6, 6))
    anchors = b.op(
        "Slice",
        b.constant(np.arange(12, dtype=np.float32).reshape(1, 12)),
        *(b.constant(np.array([n])) for n in (2, 9, 1)),
    )
    levels = b.op("Relu", anchors)
    path = b.save(tmp_path / "m.onnx", b.conv(b.quantize("input"), 4), anchors, levels, batch=None)
    device = {} if torch.cuda.is_available() else {"device": "cpu"}
    with build_engine(path, "cuda", tune="no", **device) as engine:
        _, *found = engine.run({"input": b.x}).values()
    for one in found:
        np.testing.assert_array_equal(one, np.arange(2, 9, dtype=np.float32)[None])


def test_ranges_beyond_float16_are_said(tmp_path):
    b = Builder((2, 3, 6, 6))
    y = b.op("Mul", b.conv(b.quantize("input"), 4), b.constant(np.float32(1e6)))
    path = b.save(tmp_path / "m.onnx", b.conv(b.quantize(y), 4))
    assert np.abs(b.values[y]).max() > np.finfo(np.float16).max
    with pytest.warns(CompressWarning, match="float16 ends at 65,504.*precision='bf16'"):
        build_engine(path, "cuda", device="cpu", precision="f16").close()
    build_engine(path, "cuda", device="cpu", precision="bf16").close()


def test_tensors_go_in_and_come_out_with_any_strides(tmp_path):
    path, x = network(tmp_path / "m.onnx")
    engine = build_engine(path, "cuda", device="cpu", batch_size=2)
    x = torch.from_numpy(x)
    plain = engine.run_tensors({"input": x})
    strided = engine.run_tensors({"input": x.contiguous(memory_format=torch.channels_last)})
    assert all(torch.equal(plain[name], strided[name]) for name in plain)
    for bad, message in (
        ({"input": x.half()}, "is float16; the engine takes float32"),
        ({"input": x[:1]}, r"has shape \(1, 3, 8, 8\); the engine takes \(2, 3, 8, 8\)"),
        ({"x": x}, "got inputs x; the engine takes input"),
    ):
        with pytest.raises(EngineError, match=message):
            engine.run_tensors(bad)


def test_layers_name_the_nodes_that_they_compute(tmp_path):
    path, x = network(tmp_path / "m.onnx")
    engine = build_engine(path, "cuda", device="cpu")
    engine.run({"input": x})
    layers = engine.runtime_layers()
    products = [layer for layer in layers if layer.kind == "Convolution"]
    assert [layer.precision for layer in products] == ["i8", "i8"]
    assert [layer.output_precisions for layer in products] == [("i8",), ("i8",)]
    assert any("relu" in name for name in products[1].original_names)
    assert set(engine.layer_times_ms()) == {layer.name for layer in layers}


def test_the_batch_is_fixed_where_it_is_asked_for(tmp_path):
    path, _ = network(tmp_path / "m.onnx")
    assert build_engine(path, "cuda", device="cpu", batch_size=2).inputs[0].shape == (2, 3, 8, 8)
    assert build_engine(path, "cuda", device="cpu").inputs[0].shape == (-1, 3, 8, 8)


@NO_GPU
def test_without_a_gpu_it_says_so(tmp_path):
    path = classifier(tmp_path / "m.onnx")
    with pytest.raises(
        EngineUnavailableError, match=r"no device 'cuda' \(.*\); use a Linux machine with an NVIDIA GPU"
    ):
        build_engine(path, "cuda")
    row = cuda_engine.availability()
    assert not row.available
    assert row.reason
    assert "NVIDIA GPU" in row.install or "triton" in row.install


def test_an_old_gpu_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(cuda_engine, "_gpus", lambda: {0: ("Tesla V100", (7, 0))})
    with pytest.raises(EngineUnavailableError, match="Tesla V100 has compute capability 7.0, and 8.0 or later"):
        build_engine(classifier(tmp_path / "m.onnx"), "cuda")
    assert "7.0" in cuda_engine.availability().reason


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "device is 'tpu': it must be cuda"),
        ({"device": "cpu", "tune": "maybe"}, "tune is 'maybe': it must be yes or no"),
        ({"device": "cpu", "floats": "network"}, "floats is 'network': it must be yes, layers or no"),
        ({"device": "cpu", "jobs": "few"}, "jobs is 'few': it must be a number"),
        ({"device": "cpu", "precision": "int4"}, "precision is 'int4'"),
    ],
)
def test_options_out_of_range_are_refused(tmp_path, options, message):
    with pytest.raises(EngineError, match=message):
        build_engine(classifier(tmp_path / "m.onnx"), "cuda", **options)


def test_a_file_that_it_cannot_run_is_refused_when_it_is_loaded(tmp_path):
    b = Builder((1, 3, 4, 4))
    path = b.save(
        tmp_path / "m.onnx", b.op("QuantizeLinear", "input", b.constant(np.float32(0.1)), b.constant(np.int8(0)))
    )
    with pytest.raises(EngineError, match="only DequantizeLinear may read them|returns"):
        build_engine(path, "cuda", device="cpu")


# Plan files -----------------------------------------------------------------------------------------------------------


def test_a_plan_is_read_as_it_was_written(tmp_path):
    path = default_path(tmp_path / "resnet50.onnx", MACHINE)
    assert path.name == "resnet50.h100-80gb-hbm3.plan.json"
    plan = read_plan(path, MACHINE)
    plan.add("a step", "a kernel")
    plan.save()
    assert read_plan(path, MACHINE).get("a step") == "a kernel"
    assert read_plan(path, MACHINE).get("another") is None


def test_a_new_model_begins_with_the_choices_of_the_others_in_its_folder(tmp_path):
    plan = plan_beside(tmp_path / "ptq.onnx", MACHINE)
    assert not plan.choices and not plan.changed
    plan.add("a step", "a kernel")
    plan.save()
    default_path(tmp_path / "damaged.onnx", MACHINE).write_text("{")
    replace(plan, path=tmp_path / "other.rtx-4090.plan.json", choices={"b": "c"}, changed=True).save()
    other = plan_beside(tmp_path / "qat.onnx", MACHINE)
    assert other.choices == plan.choices and other.changed
    other.add("another", "kernel")
    other.save()
    assert plan_beside(tmp_path / "ptq.onnx", MACHINE).choices == plan.choices
    with pytest.raises(EngineError, match="is damaged"):
        plan_beside(tmp_path / "damaged.onnx", MACHINE)


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "formats").glob("*.json")), ids=lambda path: path.stem)
def test_a_plan_of_an_earlier_version_is_read(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    plan = read_plan(path, Machine(**content["machine"]))
    assert plan.choices == content["choices"] and not plan.changed


@pytest.mark.parametrize("change", [{"gpu": "NVIDIA A100"}, {"driver": "12.4"}, {"triton": "3.7.0"}])
def test_a_plan_of_another_machine_is_refused(tmp_path, change):
    path = tmp_path / "m.plan.json"
    plan = read_plan(path, MACHINE)
    plan.add("a", "b")
    plan.save()
    ((name, value),) = change.items()
    with pytest.raises(EngineError, match=f"measured on another machine: {name} .* \\(here {value}\\); delete it"):
        read_plan(path, replace(MACHINE, **change))


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": 99}', '{"format": 1, "machine": {}, "choices": {}}', '{"format": 1}']
)
def test_a_damaged_plan_is_refused(tmp_path, text):
    (tmp_path / "m.plan.json").write_text(text)
    with pytest.raises(EngineError, match="is no plan of the cuda engine, or is damaged"):
        read_plan(tmp_path / "m.plan.json", MACHINE)


def test_a_plan_with_other_choices_is_refused(tmp_path):
    plan = read_plan(tmp_path / "m.plan.json", MACHINE)
    plan.add("a", "b")
    plan.save()
    content = json.loads(plan.path.read_text())
    plan.path.write_text(json.dumps({**content, "choices": {"a": 1}}))
    with pytest.raises(EngineError, match="choices are not names"):
        read_plan(plan.path, MACHINE)


# Choosing kernels -----------------------------------------------------------------------------------------------------


def ways(work):
    def candidates(step, layout):
        run = bind_reference(step, layout, torch.device("cpu"))

        def repeated(times):
            def repeat(tensors):
                for _ in range(times):
                    work.append(step.name)
                    run(tensors)

            return repeat

        return [Candidate("slow", repeated(30)), Candidate("fast", repeated(1))]

    return candidates


def test_the_fastest_kernel_of_each_shape_is_measured_once_and_kept(tmp_path, monkeypatch):
    work = []

    def counted(run, device):  # a clock that counts computations: no time decides
        before = len(work)
        run()
        return float(len(work) - before)

    monkeypatch.setattr("compress.engines.cuda.program.launch_ms", counted)
    path, _ = network(tmp_path / "m.onnx")
    layout = lay_out(make_plan(path, batch_size=2, dtype=torch.float32))
    plan = read_plan(tmp_path / "m.plan.json", MACHINE)
    first = Program(layout, torch.device("cpu"), candidates=ways(work), plan=plan)
    assert first.kernels == ["fast"] * len(layout.steps)
    work.clear()
    again = Program(layout, torch.device("cpu"), candidates=ways(work), plan=read_plan(plan.path, MACHINE))
    assert again.kernels == first.kernels
    assert not work
    guessed = Program(layout, torch.device("cpu"), candidates=ways(work), plan=None)
    assert guessed.kernels == ["slow"] * len(layout.steps)


def mixing(path):
    b = Builder((4, 3, 8, 8))
    y = b.conv(b.quantize("input"), 16)
    return b.save(path, b.op("Sub", y, b.op("ReduceMean", y, b.constant(np.array([0])), keepdims=1))), b.x


@pytest.mark.parametrize(
    ("make", "ms", "parts"),
    [(network, {1: 1.0, 2: 0.9}, 2), (network, {1: 1.0, 2: 0.99}, 1), (mixing, {1: 1.0, 2: 0.5}, 1)],
    ids=["faster", "hardly faster", "images depend on one another"],
)
def test_a_batch_runs_in_two_halves_where_that_is_faster_and_the_same(make, ms, parts, tmp_path, monkeypatch):
    path, x = make(tmp_path / "m.onnx")
    x = np.concatenate([x, 2 * x])
    count, made = len(x), []

    def layout(batch):
        return lay_out(make_plan(path, batch_size=batch, dtype=torch.float32))

    def program(layout, parts):
        made.append(Program(layout, torch.device("cpu"), candidates=None, plan=None, parts=parts))
        return made[-1]

    times = iter((ms[1], ms[2], ms[1], ms[2]))
    monkeypatch.setattr(program_module, "repeated_ms", lambda run: next(times))  # no time decides
    with build_engine(path, "onnxruntime") as other:
        (expected,) = other.run({"input": x}).values()
    for built in (2, 1):  # measured, then by the plan
        made.clear()
        plan = read_plan(tmp_path / "m.plan.json", MACHINE)
        found = faster_program(layout(count), lambda: layout(count // 2), program, plan)
        assert (len(made), len(found.executors)) == (built, parts)
        (result,) = found.run({"input": torch.from_numpy(x)}).values()
        np.testing.assert_allclose(result, expected, atol=2e-3 * np.abs(expected).max())
        assert len(found.step_ms({"input": torch.from_numpy(x)})) == len(found.kernels)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_two_halves_beside_each_other_compute_what_the_whole_does(tmp_path):
    path, x = network(tmp_path / "m.onnx")
    given = {"input": torch.from_numpy(np.concatenate([x * i for i in range(32)])).cuda()}
    whole, found = (build_engine(path, "cuda", tune=tune, floats="no") for tune in ("no", "yes"))
    program = Program(
        lay_out(make_plan(path, batch_size=32)),
        torch.device("cuda", 0),
        candidates=whole._ways(),
        plan=None,
        parts=2,
        beside=whole._ways,
    )
    (expected,) = whole.run_tensors(given).values()
    for result in (*found.run_tensors(given).values(), *program.run(given).values()):
        torch.testing.assert_close(result, expected, atol=2e-3 * float(expected.abs().max()), rtol=0)


def other_ways(*names):
    def candidates(step, layout):
        exact = bind_reference(step, layout, torch.device("cpu"))

        def right(tensors):
            exact(tensors)

        def raises(tensors):
            raise RuntimeError("out of resources: shared memory")

        def wrong(tensors):
            exact(tensors)
            for name in step.writes:
                tensors[name][0].add_(3)

        def strays(tensors):
            exact(tensors)
            own = {*step.reads, *step.writes}
            beside = [name for name in layout.places if name not in own and not overlaps(layout, name, own)]
            if not beside:
                raise RuntimeError("nothing lies beside")
            tensors[beside[0]].add_(1)

        ways = {f.__name__: f for f in (right, raises, wrong, strays)}
        return [Candidate(name, ways[name]) for name in names]

    return candidates


def overlaps(layout, name, others):
    # True if a tensor lies where one of the others does, too.
    arena = torch.zeros(layout.arena_bytes, dtype=torch.uint8)
    views = layout.views(arena)
    views[name].fill_(1)
    return any(bool(views[other].any()) for other in others if other in views)


def test_kernels_that_raise_or_compute_something_else_are_left_out_with_the_reason(tmp_path, monkeypatch):
    names = ("right", "wrong", "strays", "raises")

    def clock(run, device):
        run()
        return -float(names.index(run.func.__name__))

    monkeypatch.setattr("compress.engines.cuda.program.launch_ms", clock)
    layout = lay_out(make_plan(network(tmp_path / "m.onnx")[0], batch_size=2, dtype=torch.float32))
    plan = read_plan(tmp_path / "m.plan.json", MACHINE)
    program = Program(layout, torch.device("cpu"), candidates=other_ways(*names), plan=plan)
    assert program.kernels == ["right"] * len(layout.steps)
    for found in program.measured:
        assert found.refused["raises"] == "RuntimeError: out of resources: shared memory"
        assert "differ from exact arithmetic" in found.refused["wrong"]
    strayed = {found.refused["strays"] for found in program.measured}
    assert strayed == {"wrong: it writes beside its result", "RuntimeError: nothing lies beside"}
    assert {key: set(reasons) for key, reasons in read_plan(plan.path, MACHINE).refused.items()} == {
        key: {"raises", "wrong", "strays"} for key in plan.choices
    }
    with pytest.raises(EngineError, match=r"no kernel computes .* right here .*; run the file with onnxruntime"):
        Program(
            layout,
            torch.device("cpu"),
            candidates=other_ways("wrong", "raises"),
            plan=read_plan(tmp_path / "other.plan.json", MACHINE),
        )


def test_networks_of_the_same_shapes_share_their_choices(tmp_path):
    layouts = [
        lay_out(make_plan(network(tmp_path / f"{seed}.onnx", seed)[0], batch_size=2, dtype=torch.float32))
        for seed in (0, 1)
    ]
    one, other = ([signature(step, layout) for step in layout.steps] for layout in layouts)
    assert one == other
    larger = lay_out(make_plan(tmp_path / "0.onnx", batch_size=3, dtype=torch.float32))
    assert not set(one) & {signature(step, larger) for step in larger.steps}


def test_memory_that_does_not_suffice_is_said_in_one_sentence(tmp_path):
    layout = lay_out(make_plan(network(tmp_path / "m.onnx")[0], batch_size=2, dtype=torch.float32))

    def candidates(step, layout):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    with pytest.raises(EngineError, match=r"inputs of \(2, 3, 8, 8\) need \d+ MB .* use a smaller batch"):
        Program(layout, torch.device("cpu"), candidates=candidates, plan=None)
