"""Write sweep.md from sweep.jsonl."""

from collections import Counter
from pathlib import Path

import torchvision

from analysis.common.study import Row, newest_rows, report_from_file
from analysis.sweep.unit import TARGETS
from compress.files import write_text

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
    "W and A: quantizers of weights and of activations. SQNR, in dB over 16 images that were not used for calibration: "
    "of fake quantization to the float model, and of the engine to fake quantization; moved: of fake quantization to "
    "itself with pixels moved by 1e-5, which shows the effect of rounding alone: an engine near that value is right. "
    "Top-1: share of equal predictions of engine and fake quantization. Latency: INT8 over float in the same engine, "
    "in turn (OpenVINO's float is its default, bf16 where the CPU has it). Random networks say nothing about accuracy "
    "after training. Left float: number of operations by rule; the reasons are below."
)


def names() -> list[str]:
    known = torchvision.models.list_models(module=torchvision.models)
    return known + [f"timm:{name}" for name in TIMM] + [f"segmentation:{name}" for name in SEGMENTATION]


def write(log: Path) -> None:
    rows = newest_rows(log, "model")
    order = {name: i for i, name in enumerate(names())}
    models = sorted(rows, key=lambda name: (rows[name]["status"] == "ok", order.get(name, len(order))))
    failed = [name for name in models if rows[name]["status"] != "ok"]
    lines = [
        "# Every architecture: placement, export, parity, latency",
        "",
        f"`python -m analysis.sweep.run`, one thread, batch 1, random weights. {len(rows)} of {len(order)} models "
        f"done, {len(failed)} failed.",
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
    lines += ["", "## Why operations stay float", "", "| rule | models | reason (first seen) |", "|---|---:|---|"]
    reasons: dict[str, list[str]] = {}
    for row in rows.values():
        for rule, entry in {r: e for t in TARGETS for r, e in row.get(t, {}).get("float", {}).items()}.items():
            reasons.setdefault(rule, []).append(entry["reason"])
    lines += [f"| {rule} | {len(found)} | {found[0]} |" for rule, found in sorted(reasons.items())]
    leaves = {name: row["openvino"]["leaves"] for name, row in rows.items() if row.get("openvino", {}).get("leaves")}
    lines += ["", "## Leaf modules (torch.fx cannot trace them)", ""]
    lines += [f"- {name}: {len(found)} modules, first {found[0]}" for name, found in leaves.items()] or ["None."]
    write_text(log.with_suffix(".md"), "\n".join(lines) + "\n")


def machines(rows: dict[str, Row]) -> list[str]:
    found: Counter[str] = Counter()
    for row in rows.values():
        if (where := row.get("machine")) is not None:
            versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
            found[
                f"{where['cpu']}, {where['cores']:g} cores, {where['side_by_side']} models side by side; {versions}"
            ] += 1
    return [f"- {count} models on {where}." for where, count in found.most_common()]


def table_rows(name: str, row: Row) -> list[str]:
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
    report_from_file(__doc__, write)
