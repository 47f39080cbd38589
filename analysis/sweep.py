"""Every classifier and segmentation network of torchvision, and a list of timm's that covers its families, quantized.

    python analysis/sweep.py --processes 16        # all that results/sweep.jsonl does not hold yet, long ones first
    python analysis/sweep.py --processes 16 --budget-s 540      # as far as nine minutes go; again, and it goes on
    python analysis/sweep.py --models resnet18 timm:deit_tiny_patch16_224     # these again
    python analysis/sweep.py --report              # only write results/sweep.md again

Each model has random weights (seeded; BatchNorm statistics from a few batches, so that activations have a sane range)
and small images where it allows. It is quantized for targets openvino and onnxruntime, exported, and the engine's
outputs are compared with those of fake quantization; placement for tensorrt is checked too. The latency ratio to the
float file of the same engine is taken in turn, one thread, batch 1. Random networks say nothing of accuracy: top-1
agreement is a check of the export, not of quantization.

Each model runs in a process of its own (sweep_model.py) with one thread and a time limit, so that a crash is a row and
not the end. One line of JSON a model in results/sweep.jsonl makes it resumable; it names the machine and how many
models ran side by side, which latencies feel, ratios of runs in turn less.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

from side_by_side import ROOT, Ended, side_by_side
from sweep_model import TARGETS

SEGMENTATION = (
    "lraspp_mobilenet_v3_large",
    "fcn_resnet50",
    "fcn_resnet101",
    "deeplabv3_mobilenet_v3_large",
    "deeplabv3_resnet50",
    "deeplabv3_resnet101",
)
TIMM = tuple(
    """
inception_resnet_v2 mobileone_s0 inception_v4 regnetz_b16 nextvit_small tnt_s_patch16_224 cait_xxs24_224
vitamin_small_224 caformer_s18 maxvit_nano_rw_256 tresnet_m crossvit_tiny_240 beit_base_patch16_224 densenet121
ghostnetv2_100 volo_d1_224 focalnet_tiny_srf vit_relpos_small_patch16_224 xception41 vgg11 hrnet_w18_small
twins_svt_small gcvit_xxtiny repghostnet_050 swinv2_cr_tiny_ns_224 coatnet_nano_rw_224 repvit_m0_9 gmlp_ti16_224
mobilevit_xxs fastvit_t8 tf_efficientnetv2_b0 swinv2_tiny_window8_256 sequencer2d_s xcit_nano_12_p16_224 mixnet_s
deit3_small_patch16_224 davit_tiny ghostnet_100 gcresnet33ts cspresnet50 efficientvit_m0 efficientformerv2_s0
res2net50_26w_4s fbnetc_100 spnasnet_100 swin_tiny_patch4_window7_224 repvgg_a0 pit_ti_224 resnetblur50
vit_tiny_patch16_224 deit_tiny_patch16_224 convmixer_768_32 dpn68 mvitv2_tiny hiera_tiny_224 regnety_002 rexnet_100
mobilevitv2_050 resnetv2_50x1_bit rdnet_tiny gernet_s eva02_tiny_patch14_224 nest_tiny poolformer_s12 shvit_s1
efficientvit_b0 mnasnet_small mobilenetv4_conv_small gmixer_12_224 efficientnet_es efficientformer_l1 eca_nfnet_l0
selecsls42b tf_efficientnet_lite0 visformer_tiny tiny_vit_5m_224 convit_tiny hgnetv2_b0 regnetx_002 nf_resnet50
swiftformer_xs levit_128s cs3darknet_m hardcorenas_a halonet26t lambda_resnet26t mobilenetv3_small_050 mixer_s32_224
botnet26t_256 ecaresnet26t resmlp_12_224 mambaout_femto tinynet_e pvt_v2_b0 skresnet18 dla34 edgenext_xx_small
convnextv2_atto convnext_atto coat_lite_tiny inception_next_atto lcnet_050 test_vit resnest14d legacy_seresnet18
ese_vovnet19b_dw test_convnext fasternet_t0 resnetv2_18 starnet_s050 test_efficientnet test_resnet
""".split()  # noqa: SIM905  (a list of so many would be a page)
)


LEGEND = (
    "W and A: quantizers of weights and of activations. SQNR: of fake quantization to the float model, and of the "
    "engine to fake quantization, in dB, over 16 images that calibration did not see; moved: of fake quantization to "
    "itself with pixels moved by 1e-5, which is what rounding alone does to the network, so that an engine next to it "
    "is right. Top-1: share of equal decisions of engine and fake quantization. Latency: INT8 over float in the same "
    "engine, in turn (OpenVINO's float is its default, bf16 where the CPU has it). Random networks tell nothing about "
    "accuracy after training. Left float: how many operations, by rule; the reasons stand below."
)


def main() -> None:
    """Run what is asked and is not there yet; write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="these, also where they have a row; default: all without one")
    parser.add_argument("--retry", action="store_true", help="also those whose row is a failure")
    parser.add_argument("--limit", type=int, help="at most so many models")
    parser.add_argument("--timeout", type=int, default=900, help="seconds a model")
    parser.add_argument("--processes", type=int, default=1, help="models side by side, one thread each")
    parser.add_argument("--budget-s", type=float, help="then none starts, and those that run are ended without a row")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "sweep")
    parser.add_argument("--report", action="store_true", help="write the table and run nothing")
    arguments = parser.parse_args()
    log = arguments.out.with_suffix(".jsonl")
    if not arguments.report:
        todo = queue(arguments.models, read(log), retry=arguments.retry)[: arguments.limit]
        log.parent.mkdir(parents=True, exist_ok=True)
        run(todo, log, arguments)
    write(arguments.out, read(log))


def run(models: list[str], log: Path, arguments: argparse.Namespace) -> None:
    """Study models side by side; a line of the log as each ends."""
    measured = machine() | {"side_by_side": arguments.processes}
    commands = [(name, [str(Path(__file__).with_name("sweep_model.py")), name]) for name in models]
    ended = side_by_side(
        commands, processes=arguments.processes, timeout=arguments.timeout, budget_s=arguments.budget_s
    )
    done = 0
    for one in ended:
        done += 1
        row = {"model": one.name, **row_of(one), "seconds": round(one.seconds, 1), "machine": measured}
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{one.name}: {row['status']} {row.get('error', '')} ({row['seconds']:.0f} s)", flush=True)
    if done < len(models):
        print(f"{len(models) - done} of {len(models)} not done in {arguments.budget_s:.0f} s; run again to go on")


def row_of(ended: Ended) -> dict[str, Any]:
    """What the model's process wrote; a crash or a run past the limit is a row too."""
    found: dict[str, Any] = json.loads(ended.last_line) if ended.last_line.startswith("{") else {}
    return found or {"status": "failed", "stage": "?", "error": ended.why}


# --- the list and its rows -----------------------------------------------------------------------------------------


def names() -> list[str]:
    """All models of the sweep, those that take long first: it is their end that a run side by side waits for."""
    import torchvision

    def size(name: str) -> int:
        return int(next(iter(torchvision.models.get_model_weights(name))).meta["num_params"])

    known = sorted(torchvision.models.list_models(module=torchvision.models), key=size, reverse=True)
    big = [name for name in known if size(name) > 40_000_000]
    others = [f"timm:{name}" for name in TIMM] + [f"segmentation:{name}" for name in SEGMENTATION]
    return big + mixed(known[len(big) :], others)


def mixed(first: list[str], second: list[str]) -> list[str]:
    """Two lists as one, each spread over the whole of it."""
    places = [(i / len(part), name) for part in (first, second) for i, name in enumerate(part)]
    return [name for _, name in sorted(places, key=lambda place: place[0])]


def queue(models: list[str] | None, rows: dict[str, dict[str, Any]], *, retry: bool) -> list[str]:
    """What is to be run, in order."""
    if models:
        return models
    done = {name for name, row in rows.items() if row["status"] == "ok" or not retry}
    return [name for name in names() if name not in done]


def read(log: Path) -> dict[str, dict[str, Any]]:
    """The newest row of each model."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    return {row["model"]: row for row in map(json.loads, lines)}


def machine() -> dict[str, Any]:
    """What a row says of where it was measured."""
    from compress.measure import describe_machine

    found = describe_machine()
    libraries = ("torch", "onnxruntime", "openvino", "timm")
    return {
        "cpu": found.cpu,
        "cores": found.usable_cores,
        "versions": {name: found.versions[name] for name in libraries if name in found.versions},
    }


# --- the table -----------------------------------------------------------------------------------------------------


def write(out: Path, rows: dict[str, dict[str, Any]]) -> None:
    """results/sweep.md: one line a model, failures first."""
    from compress.files import write_text

    order = {name: i for i, name in enumerate(names())}
    models = sorted(rows, key=lambda name: (rows[name]["status"] == "ok", order.get(name, len(order))))
    failed = [name for name in models if rows[name]["status"] != "ok"]
    lines = [
        "# Every architecture: placement, export, parity, latency",
        "",
        f"`python analysis/sweep.py`, one thread, batch 1, random weights. {len(rows)} of {len(order)} models done, "
        f"{len(failed)} failed.",
        "",
        *machines(rows),
        "",
        LEGEND,
        "",
        "| model | px | target | W | A | SQNR to float | engine SQNR | moved | top-1 | latency | left float |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name in models:
        lines += table_rows(name, rows[name])
    lines += ["", "## Why what is float is float", "", "| rule | models | reason (first seen) |", "|---|---:|---|"]
    reasons: dict[str, list[str]] = {}
    for row in rows.values():
        for rule, entry in {r: e for t in TARGETS for r, e in row.get(t, {}).get("float", {}).items()}.items():
            reasons.setdefault(rule, []).append(entry["reason"])
    lines += [f"| {rule} | {len(found)} | {found[0]} |" for rule, found in sorted(reasons.items())]
    leaves = {name: row["openvino"]["leaves"] for name, row in rows.items() if row.get("openvino", {}).get("leaves")}
    lines += ["", "## Kept whole (torch.fx cannot trace them)", ""]
    lines += [f"- {name}: {len(found)} modules, first {found[0]}" for name, found in leaves.items()] or ["None."]
    write_text(out.with_suffix(".md"), "\n".join(lines) + "\n")


def machines(rows: dict[str, dict[str, Any]]) -> list[str]:
    """A line for each machine and number of models side by side."""
    found: Counter[str] = Counter()
    for row in rows.values():
        if (where := row.get("machine")) is not None:
            versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
            found[
                f"{where['cpu']}, {where['cores']:g} cores, {where['side_by_side']} models side by side; {versions}"
            ] += 1
    return [f"- {count} models on {where}." for where, count in found.most_common()]


def table_rows(name: str, row: dict[str, Any]) -> list[str]:
    """Markdown lines of one model."""
    lines = []
    for target in TARGETS:
        cells = row.get(target, {})
        if "top1_agreement" not in cells:
            continue
        left = ", ".join(f"{entry['count']} {rule}" for rule, entry in cells["float"].items()) or "none"
        figures = [cells[key] for key in ("sqnr_float_db", "sqnr_engine_db", "top1_agreement")]
        ratio, moved = cells.get("latency_ratio"), cells.get("sqnr_moved_db", "-")
        lines.append(
            f"| {name} | {row['image']} | {target} | {cells['weights']} | {cells['activations']} | {figures[0]} | "
            f"{figures[1]} | {moved} | {figures[2]:.3f} | {'-' if ratio is None else f'{ratio:.2f}'} | {left} |"
        )
    if row["status"] != "ok":
        error = row["error"].replace("|", "/")
        lines.append(f"| {name} | {row.get('image', '')} | **failed**, {row['stage']} | | | | | | | | {error} |")
    return lines


if __name__ == "__main__":
    main()
