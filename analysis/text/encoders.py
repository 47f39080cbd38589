"""Image encoders of transformers in INT8 and FP8, judged by their features on photographs: cosine, neighbours, SQNR.

    python -m analysis.text.encoders --images FOLDER

Small configurations with random weights, as no weights install. A feature is the whole result of an encoder.
Neighbours: the share of the five nearest of the judged images that stay among the five nearest.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import transformers as t
from torch import Tensor, nn

import compress
from analysis.common.study import command_line, listed, option, software, sqnr, study_options, table
from analysis.text.run import FLOAT, OURS, SPECS, methods, of_features, opened, photograph
from compress.files import write_text
from compress.quantization import ActivationSpec, WeightSpec

SIDE = 128
VIT: dict[str, Any] = {
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "image_size": SIDE,
    "patch_size": 16,
}
WIDE: dict[str, Any] = {**VIT, "intermediate_size": 384}
SWIN: dict[str, Any] = {
    "embed_dim": 48,
    "depths": [2, 2, 2],
    "num_heads": [2, 4, 8],
    "window_size": 4,
    "image_size": SIDE,
}
SAM2: dict[str, Any] = {
    "hidden_size": 48,
    "blocks_per_stage": [1, 2, 2, 1],
    "embed_dim_per_stage": [48, 96, 192, 384],
    "image_size": [SIDE] * 2,
}
SAM: dict[str, Any] = {
    **VIT,
    "patch_size": 8,
    "window_size": 7,
    "global_attn_indexes": [1],
    "mlp_dim": 384,
    "output_channels": 64,
}


LEVELS: dict[str, Any] = {**VIT, "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False}
WINDOWS: dict[str, Any] = {**VIT, "num_windows": 2, "out_features": ["stage4"]}
ENCODERS: dict[str, Callable[[], nn.Module]] = {
    "DINOv2": lambda: t.Dinov2Model(t.Dinov2Config(**VIT)),
    "DINOv2 with registers": lambda: t.Dinov2WithRegistersModel(t.Dinov2WithRegistersConfig(**VIT)),
    "DINOv3 ViT": lambda: t.DINOv3ViTModel(t.DINOv3ViTConfig(**WIDE)),
    "DINOv3 ConvNeXt": lambda: t.DINOv3ConvNextModel(
        t.DINOv3ConvNextConfig(hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 2, 1])
    ),
    "I-JEPA": lambda: t.IJepaModel(t.IJepaConfig(**WIDE)),
    "SigLIP": lambda: t.SiglipVisionModel(t.SiglipVisionConfig(**WIDE)),
    "CLIP": lambda: t.CLIPVisionModel(t.CLIPVisionConfig(**WIDE)),
    "MLCD": lambda: t.MLCDVisionModel(t.MLCDVisionConfig(**WIDE)),
    "AIMv2": lambda: t.Aimv2VisionModel(t.Aimv2VisionConfig(**WIDE)),
    "SAM": lambda: t.SamVisionModel(t.SamVisionConfig(**SAM)),
    "SAM 2": lambda: t.Sam2HieraDetModel(t.Sam2HieraDetConfig(**SAM2, global_attention_blocks=[4])),
    "Hiera": lambda: t.HieraModel(t.HieraConfig(embed_dim=48, image_size=[SIDE, SIDE], depths=[1, 1, 2, 1])),
    "Swin (Grounding DINO)": lambda: t.SwinModel(t.SwinConfig(**SWIN)),
    "Swin v2": lambda: t.Swinv2Model(t.Swinv2Config(**SWIN)),
    "Depth Anything": lambda: t.DepthAnythingForDepthEstimation(
        t.DepthAnythingConfig(
            backbone_config=t.Dinov2Config(**LEVELS),
            patch_size=16,
            reassemble_hidden_size=96,
            neck_hidden_sizes=[24, 48, 96, 96],
            fusion_hidden_size=32,
        )
    ),
    "RF-DETR": lambda: t.AutoBackbone.from_config(t.RfDetrDinov2Config(**WINDOWS)),
}
FP8 = compress.QuantSpec(
    weights=WeightSpec(kind="e4m3", calibrator="max"), activations=ActivationSpec(kind="e4m3", calibrator="max")
)


class Encoder(nn.Module):
    """An encoder as a network from images to one tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor) -> Tensor:
        found = self.inner(pixel_values=images)
        value = next(found[key] for key in ("last_hidden_state", "predicted_depth", "feature_maps") if key in found)
        return value if isinstance(value, Tensor) else value[-1]


def main() -> None:
    o = study_options(
        __doc__,
        option("--images", type=Path, required=True, help="folder of photographs"),
        option("--networks", nargs="+", choices=ENCODERS, default=list(ENCODERS)),
        option("--calibration", type=int, default=32),
        option("--judged", type=int, default=64),
        option("--nncf", help="a Python that has NNCF"),
        out="runs/encoders",
    )
    files = sorted(o.images.glob("*.jp*g"))[: o.calibration + o.judged]
    large = torch.from_numpy(np.concatenate([photograph(file) for file in files]))
    images = nn.functional.interpolate(large, (SIDE, SIDE), mode="bilinear", antialias=True)
    print(write(o.out, {name: judge(name, images, o) for name in o.networks}, o.judged))


def judge(name: str, images: Tensor, o: argparse.Namespace) -> dict[str, str]:
    torch.manual_seed(0)
    calibration, judged = images.split([o.calibration, o.judged])
    model, found = Encoder(ENCODERS[name]()).eval(), dict[str, str]()
    quantize = partial(compress.quantize, model, calibration[:2], calibration.split(8))
    with torch.no_grad(), TemporaryDirectory() as folder:
        expected, batches = model(judged).numpy(), [x.numpy() for x in judged.split(8)]
        source, data = Path(folder, "float.onnx"), [x[None].numpy() for x in calibration]
        made = methods(compress.export_onnx(model, calibration[:2], source), data, Path(folder), o.nncf, cut=False)
        for engine, ways in made.items():
            ways[OURS] = partial(
                compress.export_onnx, quantize(spec=SPECS[engine]), calibration[:2], Path(folder, f"{engine}.q.onnx")
            )
            for way in [way for way in ways if way != FLOAT]:
                try:
                    found[f"{way}, {engine}"] = _cell(expected, map(opened(ways[way](), engine), batches))
                except Exception as error:  # a peer's, of any kind
                    found[f"{way}, {engine}"] = type(error).__name__
        found["FP8, torch"] = _cell(expected, [quantize(spec=FP8)(judged).numpy()])
    print(name, found, flush=True)
    return found


def _cell(expected: np.ndarray, batches: Iterable[np.ndarray]) -> str:
    found = np.concatenate(list(batches))
    cosine, neighbours = of_features(*(x.reshape(len(x), -1) for x in (expected, found)))
    return f"{cosine:.4f}, {neighbours:.1f} %, {sqnr([expected], [found]):.1f} dB"


def write(out: Path, rows: Mapping[str, Mapping[str, str]], count: int) -> str:
    head = list(next(iter(rows.values())))
    text = f"# Image encoders by their features\n\nCosine, neighbours kept, SQNR of {count} photographs.\n"
    lines = table(["encoder", *head], ([name, *(row.get(key, "") for key in head)] for name, row in rows.items()))
    lines += ["", f"`{command_line()}`; {listed(software('torch', 'transformers', 'onnxruntime', 'openvino'))}.", ""]
    return write_text(out / "encoders.md", "\n".join([text, *lines])).read_text(encoding="utf-8")


if __name__ == "__main__":
    main()
