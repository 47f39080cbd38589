# Figures in the README and on overview pages are computed anew from the JSON files that the studies wrote.
#
# A study that is run again changes its own page by itself; the sentences that quote it elsewhere are written by hand.

import json
import re
import statistics
from collections import Counter
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
    return str(Decimal(str(value)).quantize(Decimal("0.01"), ROUND_HALF_UP))


def measured(run, *wanted):
    keys = ("name", "variant", "engine", "batch_size")
    [value] = [row["value"] for row in read(f"{run}/metrics.json") if tuple(row[key] for key in keys) == wanted]
    return value


def demo_ms(variant, engine, run="demo"):
    return measured(run, "p50_ms", variant, engine, 1)


def median_s(variant):
    return statistics.median(
        run.get("total_s", run.get("compute_s")) for run in read("calibration_speed.json")["runs"][variant]
    )


def one(value):
    return str(Decimal(str(value)).quantize(Decimal("0.1"), ROUND_HALF_UP))


def step(variant, key, *, number=26, mode="eager"):
    [run] = [run for run in read("h200/qat_cost.json")["runs"] if run["run"] == number]
    cases = [case for case in run["cases"] if (case["network"], case["mode"]) == ("resnet50", mode)]
    [row] = [row for case in cases for row in case["rows"] if row["variant"] == variant]
    return row[key]


def quantized_in(target, network):
    rows = {row["method"]: row for row in read("onnx_in_peers.json")["rows"] if row["network"] == network}
    others = [row for name, row in rows.items() if target in row and not name.startswith(("compress", "float"))]
    return rows[f"compress, target {target}"]["seconds"] / min(row["seconds"] for row in others)


def of_float(method, engine):
    rows = read("onnx_in_peers.json")["rows"]
    [row] = [row for row in rows if (row["network"], row["method"]) == (NETWORK, method)]
    return row[engine]["ratio_to_float"]


def on_cpu(variant):
    [row] = [row for row in read("cpu_latency.json")["rows"] if row["variant"] == variant]
    return row["ratio"]


def points(name, **choice):
    rows = [row for row in lines(name) if all(str(row[key]).startswith(value) for key, value in choice.items())]
    return [row["figures"]["points"]["value"] for row in rows]


def engine_rows():
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
    float_ms, bf16_ms = (demo_ms("float", f"openvino ({name})", "quickstart") for name in ("f32", "bf16"))
    for variant in ("float", "ptq", "qat"):
        top1 = measured("quickstart", "top1", variant, "openvino (f32)", None)
        ms = demo_ms(variant, "openvino (f32)", "quickstart")
        size = measured("quickstart", "file_bytes", variant, "", None) / 1e6
        yield f"| {two(top1)} % | {ms:.3f} ms | {one(float_ms / ms)}x | {one(size)} MB |"
    ptq_ms = demo_ms("ptq", "openvino (bf16)", "quickstart")
    yield f"takes {bf16_ms:.3f} ms: INT8 is {one(bf16_ms / ptq_ms)}x faster"
    recorded, eager = step("fused", "time_ratio", mode="recorded"), step("fused", "time_ratio")
    yield f"A QAT step of ResNet-50 on an H200 is {one(1 / eager)}x faster than float training"
    yield f"Both recorded as CUDA graphs, ours is {one(1 / recorded)}x faster than float"
    assert max(step("fused", "memory_ratio"), step("fused", "memory_ratio", mode="recorded")) < 0.5  # "half"
    yield f"is {one(step('modelopt', 'time_ratio'))}x slower than float"
    yield f"pytorch-quantization's {one(step('pytorch-quantization', 'time_ratio', number=2))}x"
    peers = ("compress, target openvino", "ONNX Runtime's quantizer", "NNCF, OpenVINO")
    ours, onnxruntime, nncf = (one(1 / of_float(method, "openvino")) for method in peers)
    yield f"{ours}x faster than float on OpenVINO (ONNX Runtime's quantizer {onnxruntime}x, NNCF {nncf}x)"
    yield f"quantizing it is {one(1 / quantized_in('openvino', NETWORK))}x faster than with NNCF"
    yield f"ten networks at batch 128 {one(all_batches(min))}x to {one(all_batches(max))}x faster"
    networks = {(row["network"], row["batch"]): row for row in read("h200/cuda_engine.json")["networks"]}
    yield f"ResNet-50 at {networks['resnet50', 128]['images_per_s']:,.0f} images/s"
    yield f"All {swept()} networks"
    lost = points("real_accuracy/rows.jsonl", method="compress: default (mse)", engine="openvino")
    yield f"{-statistics.mean(lost):.2f} points of top-1 on OpenVINO, the mean of five"


def of_the_benchmarks():
    for variant in ("float", "ptq", "qat"):
        yield f"{demo_ms(variant, 'openvino (f32)'):.2f} ms | 99.55 %, {demo_ms(variant, 'openvino (bf16)'):.2f} ms"
    yield f"ResNet-50 {one(resnet50(128))}x faster than `torch.compile`"
    yield f"All {swept()} networks"
    yield f"{onnx_files()} pairs"
    nncf, theirs = two(on_cpu("target openvino, openvino (bf16)")), median_s("pytorch-quantization entropy")
    faster = f"{one(1 / on_cpu('target onnxruntime, onnxruntime'))}x faster than float on ONNX Runtime"
    yield f"{faster}; as fast as NNCF's INT8 model on OpenVINO ({nncf}x)"
    yield f"{median_s('compress entropy'):.2f} s; pytorch-quantization takes {theirs:.0f} s"
    ratio, memory = (step("fused", key, mode="recorded") for key in ("time_ratio", "memory_ratio"))
    yield f"{one(1 / ratio)}x faster than float training with {100 * memory:.0f} % of its memory, both recorded"


def of_the_status():
    yield f"ten networks {one(all_batches(min))}x to {one(all_batches(max))}x faster than fp16"
    yield f"batch 128, {one(resnet50(128))}x faster than fp16"
    yield f"batch 1, {one(resnet50(1))}x"


def of_other_pages():
    yield "docs/tensorrt.md", f"ResNet-50 runs {one(resnet50(128))}x faster than"
    yield "docs/tensorrt.md", f"{one(all_batches(min))}x to {one(all_batches(max))}x"
    tensorrt, own = on_cpu("target tensorrt, onnxruntime"), on_cpu("target onnxruntime, onnxruntime")
    yield (
        "docs/qdq.md",
        f"is {one(tensorrt)}x slower than the float network, the file for ONNX Runtime {one(1 / own)}x faster",
    )
    theirs = median_s("pytorch-quantization entropy")
    yield (
        "docs/calibration.md",
        f"takes {median_s('compress entropy'):.2f} s, pytorch-quantization's takes {theirs:.0f} s",
    )


def of_the_results():
    f32, bf16, other = (
        one(demo_ms("float", engine) / demo_ms("ptq", engine))
        for engine in ("openvino (f32)", "openvino (bf16)", "onnxruntime")
    )
    yield f"on OpenVINO {f32}x faster than f32 and {bf16}x than bf16, on ONNX Runtime {other}x faster than float"
    yield f"{transformers()} vision networks"
    yield f"{onnx_files()} pairs"
    yield f"all {swept()} networks"
    yield f"ResNet-50 {resnet50(128)} times fp16"
    yield f"as fast as NNCF's INT8 model ({two(on_cpu('target openvino, openvino (bf16)'))}x)"
    yield f"`onnxruntime` {one(1 / on_cpu('target onnxruntime, onnxruntime'))}x faster than float"
    a, b, c = (one(1 / quantized_in("onnxruntime", network)) for network in THREE)
    yield f"for ONNX Runtime {a}x, {b}x and {c}x faster than by its quantizer"
    a, b, c = (one(1 / quantized_in("openvino", network)) for network in THREE)
    yield f"for OpenVINO {a}x, {b}x and {c}x faster than by the fastest peer"


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


PAIRS = [
    (ROOT / "README.md", ROOT / "README.zh-CN.md"),
    *((ROOT / "docs" / page.name, page) for page in sorted((ROOT / "docs" / "zh").glob("*.md"))),
]


def links(page):
    # Return where the links lead, without those between the languages; a Chinese page counts as its English one.
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"\[(?:中文|English)\]\([^)]*\)", "", page.read_text())):
        name, _, anchor = link.partition("#")
        path = (page.parent / name).resolve()
        assert link.startswith("http") or path.exists(), f"{page.name}: {link}"
        yield link if link.startswith("http") else f"{path.relative_to(ROOT)}#{anchor}".replace("docs/zh/", "docs/")


def code(page):
    blocks = re.findall(r"^```.*?^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [re.sub(r" *(?<!\S)#.*", "", block) for block in blocks]


@pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=lambda page: page.stem)
def test_a_chinese_page_has_the_figures_commands_and_links_of_the_english_one(english, chinese):
    assert sorted(links(chinese)) == sorted(links(english))
    assert code(chinese) == code(english)
    for pattern in (r"\d[\d.,:]*\d|\d", r"`[^`\n]+`", r"^#+ ", r"^\|"):  # figures, names, headings, rows of tables
        expected, found = (re.findall(pattern, page.read_text(), flags=re.MULTILINE) for page in (english, chinese))
        assert Counter(found) == Counter(expected)


def test_chinese_pages_use_the_words_of_the_glossary():
    # Where an English page says a term, the Chinese page has its translation.
    glossary = (ROOT / "docs" / "course" / "glossary.md").read_text()
    rows = re.findall(r"^\| ([a-zA-Z].*?) \| (.*?) \| \d+ \|$", glossary, flags=re.MULTILINE)
    for english, chinese in PAIRS:
        text = re.sub(r"^```.*?^```$|`[^`]+`|\]\([^)]*\)", "", english.read_text(), flags=re.M | re.S).lower()
        terms = [(term, word) for term, word in rows if re.search(rf"\b{term.lower()}(s|ed)?\b", text)]
        assert len(terms) > 2, english.name
        missing = [(term, word) for term, word in terms if word not in chinese.read_text()]
        assert not missing, f"{chinese.name}: {missing}"


def test_other_pages_quote_the_figures_of_the_results():
    missing = [
        (page, phrase) for page, phrase in of_other_pages() if phrase not in " ".join((ROOT / page).read_text().split())
    ]
    assert not missing
