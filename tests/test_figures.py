"""Figures in the README and on overview pages are computed anew from the JSON files that the studies wrote.

A study that is run again changes its own page by itself; the sentences that quote it elsewhere are written by hand.
"""

import json
import statistics
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"


def read(name):
    return json.loads((RESULTS / name).read_text())


def lines(name):
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines() if line]


def two(value):
    """Two digits after the point; half of a digit is rounded up, as the reports' tables are read."""
    return str(Decimal(str(value)).quantize(Decimal("0.01"), ROUND_HALF_UP))


def demo_ms(variant, engine):
    """Milliseconds at batch 1."""
    wanted = ("p50_ms", variant, engine, 1)
    keys = ("name", "variant", "engine", "batch_size")
    [value] = [row["value"] for row in read("demo/metrics.json") if tuple(row[key] for key in keys) == wanted]
    return value


def median_s(variant):
    return statistics.median(
        run.get("total_s", run.get("compute_s")) for run in read("calibration_speed.json")["runs"][variant]
    )


def step(variant, key, *, number=26, mode="eager"):
    """Ratio to float training of a bf16 step of ResNet-50, in the newest run that has the variant."""
    [run] = [run for run in read("h200/qat_cost.json")["runs"] if run["run"] == number]
    cases = [case for case in run["cases"] if (case["network"], case["mode"]) == ("resnet50", mode)]
    [row] = [row for case in cases for row in case["rows"] if row["variant"] == variant]
    return two(row[key])


def quantized_in(target, network):
    """Seconds to quantize, over those of the fastest other tool whose file runs on the engine."""
    rows = {row["method"]: row for row in read("onnx_in_peers.json")["rows"] if row["network"] == network}
    others = [row for name, row in rows.items() if target in row and not name.startswith(("compress", "float"))]
    return two(rows[f"compress, target {target}"]["seconds"] / min(row["seconds"] for row in others))


def of_float(method, engine):
    rows = read("onnx_in_peers.json")["rows"]
    [row] = [row for row in rows if (row["network"], row["method"]) == (NETWORK, method)]
    return two(row[engine]["ratio_to_float"])


def on_cpu(variant):
    [row] = [row for row in read("cpu_latency.json")["rows"] if row["variant"] == variant]
    return two(row["ratio"])


def points(name, **choice):
    rows = [row for row in lines(name) if all(str(row[key]).startswith(value) for key, value in choice.items())]
    return [row["figures"]["points"]["value"] for row in rows]


def engine_rows():
    """(network, batch, times fp16) of the engine `cuda`."""
    return [
        (row["network"], row["batch"], row["fp16_ms"] / row["ms"]) for row in read("h200/cuda_engine.json")["networks"]
    ]


def all_batches(find):
    return two(find(ratio for _, batch, ratio in engine_rows() if batch == 128))


def resnet50(batch):
    [ratio] = [ratio for network, size, ratio in engine_rows() if (network, size) == ("resnet50", batch)]
    return two(ratio)


def transformers():
    newest = {row["network"]: row["status"] for row in lines("transformers.jsonl")}
    return f"{sum(status == 'ok' for status in newest.values())} of {len(newest)}"


def onnx_files():
    rows = read("onnx_in.json")["rows"]
    return f"{sum(row['status'] == 'quantized' for row in rows)} of {len(rows)}"


def swept():
    newest = {row["model"]: row["status"] for row in lines("sweep.jsonl")}
    assert set(newest.values()) == {"ok"}
    return str(len(newest))


NETWORK = "EfficientNet-Lite0"
THREE = (NETWORK, "MobileNetV2, random weights", "ResNet-50, random weights")


def of_the_readme():
    yield f"takes {step('fused', 'time_ratio')} of float training's time and {step('fused', 'memory_ratio')} of its"
    yield f"(as CUDA graphs {step('fused', 'time_ratio', mode='recorded')} and"
    yield f"ModelOpt's {step('modelopt', 'time_ratio')} and {step('modelopt', 'memory_ratio')}"
    yield f"its step takes {step('pytorch-quantization', 'time_ratio', number=2)} of"
    yield f"takes {step('torch-ops', 'time_ratio')} of float's time and {step('torch-ops', 'memory_ratio')}"
    yield f"{median_s('compress entropy'):.2f} s instead of {median_s('pytorch-quantization entropy'):.0f} s"
    yield f"OpenVINO ({on_cpu('target openvino, openvino (bf16)')})"
    yield f"in {median_s('compress.quantize mse'):.1f} s instead of {median_s('NNCF default'):.1f} s"
    peer = "ONNX Runtime's quantizer"
    ours, theirs = of_float("compress, target openvino", "openvino"), of_float(peer, "openvino")
    yield f"{ours} of float's time on OpenVINO (its file {theirs})"
    ours, theirs = of_float("compress, target onnxruntime", "onnxruntime"), of_float(peer, "onnxruntime")
    yield f"{ours} on ONNX Runtime ({theirs})"
    yield f"in {quantized_in('onnxruntime', NETWORK)} of its time, for OpenVINO in {quantized_in('openvino', NETWORK)}"
    yield f"ten networks {all_batches(min)} to {all_batches(max)} times"
    yield f"All {swept()} networks"
    lost = points("real_accuracy/rows.jsonl", method="compress: default (mse)", engine="openvino")
    yield f"{-statistics.mean(lost):.2f} points of top-1 on OpenVINO, the mean of five"
    yield f"at most {-min(points('low_bits/ptq.jsonl', bits='W4A8', method='blocks')):.1f} points on three"


def of_the_benchmarks():
    for variant in ("float", "ptq", "qat"):
        yield f"{demo_ms(variant, 'openvino (f32)'):.2f} ms | 99.55 %, {demo_ms(variant, 'openvino (bf16)'):.2f} ms"
    yield f"ResNet-50 {resnet50(128)} times as fast as `torch.compile`"
    yield f"All {swept()} networks"
    yield f"{onnx_files()} pairs"


def of_the_status():
    yield f"ten networks {all_batches(min)} to {all_batches(max)} times as fast as fp16"
    yield f"batch 128, {resnet50(128)} times fp16"
    yield f"batch 1, {resnet50(1)} times"


def of_other_pages():
    """(page, phrase) of pages that quote a figure or two."""
    yield "docs/tensorrt.md", f"ResNet-50 runs {resnet50(128)} times as fast as"
    yield "docs/tensorrt.md", f"{all_batches(min)} to {all_batches(max)} times"
    tensorrt, own = on_cpu("target tensorrt, onnxruntime"), on_cpu("target onnxruntime, onnxruntime")
    yield "docs/qdq.md", f"takes {tensorrt} of the float network's time, the file for ONNX Runtime {own}"
    theirs = median_s("pytorch-quantization entropy")
    yield (
        "docs/calibration.md",
        f"takes {median_s('compress entropy'):.2f} s, pytorch-quantization's takes {theirs:.0f} s",
    )


def of_the_results():
    f32, bf16, other = (
        two(demo_ms("ptq", engine) / demo_ms("float", engine))
        for engine in ("openvino (f32)", "openvino (bf16)", "onnxruntime")
    )
    yield f"on OpenVINO in {f32} of its f32 time and {bf16} of its bf16 time, on ONNX Runtime in {other} of"
    yield f"{transformers()} vision networks"
    yield f"{onnx_files()} pairs"
    yield f"all {swept()} networks"
    yield f"ResNet-50 {resnet50(128)} times fp16"
    yield f"{on_cpu('target openvino, openvino (bf16)')} of the time of NNCF's"
    yield f"`onnxruntime` {on_cpu('target onnxruntime, onnxruntime')} of the float time"
    a, b, c = (quantized_in("onnxruntime", network) for network in THREE)
    yield f"for ONNX Runtime {a}, {b} and {c} of its quantizer's"
    a, b, c = (quantized_in("openvino", network) for network in THREE)
    yield f"for OpenVINO {a}, {b} and {c} of the fastest peer's"


@pytest.mark.parametrize(
    ("page", "phrases"),
    [
        ("README.md", of_the_readme),
        ("docs/benchmarks.md", of_the_benchmarks),
        ("docs/status.md", of_the_status),
        ("results/README.md", of_the_results),
    ],
)
def test_a_page_quotes_the_figures_of_the_results(page, phrases):
    text = " ".join((ROOT / page).read_text().split())
    missing = [phrase for phrase in phrases() if phrase not in text]
    assert not missing, f"the results say so, and {page} does not: {missing}"


def test_other_pages_quote_the_figures_of_the_results():
    missing = [
        (page, phrase) for page, phrase in of_other_pages() if phrase not in " ".join((ROOT / page).read_text().split())
    ]
    assert not missing
