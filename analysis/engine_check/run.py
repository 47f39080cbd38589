"""Asks each target's engine which layers it computes in 8 bits, and compares that with the audit of the file."""

import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision.models as zoo
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

import compress
from analysis.common.study import command_line, gpu_software, listed, option, study_options
from compress.audit.engine import folded_names, lost_in_audit, lost_in_runtime
from compress.engines.tensorrt.build import build_tensorrt
from compress.engines.tensorrt.options import TensorRTOptions
from compress.files import write_text
from compress.quantization import Target

TARGETS: tuple[Target, ...] = ("openvino", "onnxruntime", "tensorrt")
Made = tuple[nn.Module, Tensor]


class Block(nn.Module):
    """Layers by name, and what `forward` does with them."""

    def __init__(self, compute: Callable[[nn.ModuleDict, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.compute = nn.ModuleDict(layers), compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.layers, x)


def _conv(inputs: int, outputs: int, kernel: int = 3, **more: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **more)


def _norm(channels: int) -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(channels)
    made.running_mean, made.running_var = torch.rand(channels), torch.rand(channels) + 0.5
    nn.init.uniform_(made.weight, -0.5, 1.5)  # a negative factor turns the signs of a channel's integers
    return made


def _attend(m: nn.ModuleDict, x: Tensor) -> Tensor:
    q, k, v = (m[name](x).reshape(len(x), -1, 2, 16).transpose(1, 2) for name in "qkv")
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(len(x), -1, 32)
    out: Tensor = x + m["o"](mixed)
    return out


def _gated(m: nn.ModuleDict, x: Tensor) -> Tensor:
    y = m["a"](x).relu()
    out: Tensor = m["b"](y * m["e"](m["s"](y.mean((2, 3), keepdim=True)).relu()).sigmoid())
    return out


def _residual(m: nn.ModuleDict, x: Tensor) -> Tensor:
    y = m["a"](x).relu()
    out: Tensor = m["c"]((m["b"](y) + y).relu())
    return out


def _levels(m: nn.ModuleDict, x: Tensor) -> Tensor:
    y = m["a"](x)
    fine, coarse = (m[f"n{i}"](m["s"](F.max_pool2d(y, 1 + i))).relu() for i in range(2))
    out: Tensor = m["b"](fine + F.interpolate(coarse, scale_factor=2.0))
    return out


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: nn.Sequential(_conv(3, 16), nn.ReLU(), _conv(16, 16), nn.ReLU(), _conv(16, 8)),
    "residual": lambda: Block(_residual, a=_conv(3, 16), b=_conv(16, 16), c=_conv(16, 8)),
    "depthwise": lambda: nn.Sequential(
        _conv(3, 16), nn.Hardswish(), _conv(16, 16, 5, groups=16), nn.Hardswish(), _conv(16, 8, 1)
    ),
    "squeeze and excite": lambda: Block(_gated, a=_conv(3, 16), s=_conv(16, 8, 1), e=_conv(8, 16, 1), b=_conv(16, 8)),
    "concat": lambda: Block(
        lambda m, x: m["c"](torch.cat((m["a"](x).relu(), m["b"](x).relu()), 1)),
        a=_conv(3, 8),
        b=_conv(3, 8, 1),
        c=_conv(16, 8),
    ),
    "up": lambda: nn.Sequential(_conv(3, 16), nn.ReLU(), nn.ConvTranspose2d(16, 8, 2, 2), nn.ReLU(), _conv(8, 8)),
    "resize": lambda: nn.Sequential(_conv(3, 16), nn.ReLU(), nn.Upsample(scale_factor=2), _conv(16, 8)),
    "padded": lambda: nn.Sequential(_conv(3, 16), nn.ReLU(), nn.ZeroPad2d(1), nn.Conv2d(16, 8, 3)),
    "dilated": lambda: nn.Sequential(_conv(3, 16), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=2, dilation=2)),
    "grouped": lambda: nn.Sequential(_conv(3, 16), nn.SiLU(), _conv(16, 16, groups=4), nn.SiLU(), _conv(16, 8, 1)),
    "pooled": lambda: nn.Sequential(
        _conv(3, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        _conv(16, 16),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 8),
    ),
    "shared": lambda: Block(lambda m, x: m["b"](m["b"](m["a"](x)).relu()), a=_conv(3, 16), b=_conv(16, 16)),
    "shared by levels": lambda: Block(
        _levels, a=_conv(3, 16), s=_conv(16, 16), n0=_norm(16), n1=_norm(16), b=_conv(16, 8)
    ),
    "frozen norm": lambda: nn.Sequential(_conv(3, 16), FrozenBatchNorm2d(16), nn.ReLU(), _conv(16, 8)),
}
TOKENS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
    "mlp without bias": lambda: nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 32, bias=False)),
    "attention": lambda: Block(_attend, **{name: nn.Linear(32, 32) for name in "qkvo"}),
    "multi-head": lambda: Block(lambda m, x: m["a"](x, x, x)[0], a=nn.MultiheadAttention(32, 2, batch_first=True)),
    "encoder": lambda: nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True),
    "normed": lambda: nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)),
}
ROWS: dict[str, Callable[[], nn.Module]] = {
    "conv1d": lambda: nn.Sequential(nn.Conv1d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv1d(16, 8, 3)),
}
TORCHVISION = (
    *("alexnet", "vgg11_bn", "resnet18", "resnet50", "resnext50_32x4d", "densenet121", "squeezenet1_1", "mobilenet_v2"),
    *("mobilenet_v3_small", "mobilenet_v3_large", "mnasnet0_5", "shufflenet_v2_x0_5", "efficientnet_b0", "googlenet"),
    *("regnet_x_400mf", "regnet_y_400mf", "convnext_tiny", "swin_t"),
)
TIMM = (
    *("resnet26d", "ecaresnet26t", "seresnet18", "repvgg_a0", "ghostnet_050", "mobileone_s0", "tinynet_e", "lcnet_035"),
    *(
        "hardcorenas_a",
        "mobilenetv4_conv_small_035",
        "fbnetc_100",
        "dla34",
        "vovnet39a",
        "cspresnet50",
        "efficientvit_b0",
    ),
    *("hrnet_w18_small", "poolformer_s12", "vit_tiny_patch16_224", "deit_tiny_patch16_224", "mobilevit_xxs"),
    *("mobilevitv2_050", "edgenext_xx_small", "fastvit_t8"),
)


def _torchvision(name: str) -> Made:
    more = {"init_weights": False, "aux_logits": False} if name == "googlenet" else {}
    return zoo.get_model(name, weights=None, num_classes=10, **more), _images(name)


def _timm(name: str) -> Made:
    import timm  # lazy: an optional package

    more: dict[str, Any] = {"img_size": 64} if "_patch16_" in name else {}
    return timm.create_model(name, pretrained=False, num_classes=10, **more), _images(name)


def _images(name: str) -> Tensor:
    side = 96 if name in {"alexnet", "googlenet"} else 64
    return torch.randn(2, 3, side, side)


def _with(make: Callable[[], nn.Module], *shape: int) -> Callable[[], Made]:
    return lambda: (make(), torch.randn(shape))


NETWORKS: dict[str, Callable[[], Made]] = {
    **{name: _with(make, 2, 3, 16, 16) for name, make in BLOCKS.items()},
    **{name: _with(make, 2, 8, 32) for name, make in TOKENS.items()},
    **{name: _with(make, 2, 8, 32) for name, make in ROWS.items()},
    **{name: partial(_torchvision, name) for name in TORCHVISION},
    **{f"timm {name}": partial(_timm, name) for name in TIMM},
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an engine says of a file.

    Attributes:
        weighted: convolutions and products of the file.
        int8: names of those that the audit calls INT8.
        lost: those of `int8` that the engine does not compute in 8 bits.
    """

    weighted: int
    int8: tuple[str, ...]
    lost: tuple[str, ...]


def ask(network: nn.Module, x: Tensor, target: Target, folder: Path) -> Answer:
    """Quantize and export a network for a target, and ask the target's engine; for `tensorrt` the log of TensorRT-RTX.

    Raises:
        CompressError: the network is refused, or the engine is not here.
    """
    qmodel = compress.quantize(network, x, [x], spec=compress.QuantSpec(target=target))
    file = compress.export_onnx(qmodel, x, folder / f"{target}.onnx")
    rows = compress.audit_onnx(file).rows
    int8 = tuple(row.name for row in rows if row.int8)
    return Answer(weighted=len(rows), int8=int8, lost=lost_layers(file, target, int8, len(x)))


def lost_layers(file: Path, target: Target, int8: tuple[str, ...], batch_size: int) -> tuple[str, ...]:
    if target == "tensorrt":
        built = build_tensorrt(file, "tensorrt-rtx", options=TensorRTOptions(sms=(89,)))
        return lost_in_audit(compress.audit_engine(built.path, onnx=file), int8)
    more: dict[str, Any] = {"profile": "yes"} if target == "onnxruntime" else {}
    precision = "f32" if target == "openvino" else None  # a float layer in bf16 is float all the same
    with compress.build_engine(file, target, batch_size=batch_size, precision=precision, **more) as engine:
        return lost_in_runtime(engine.runtime_layers(), int8, folded_names(file))


def main() -> None:
    o = study_options(
        __doc__,
        option("--targets", nargs="+", choices=TARGETS, default=list(TARGETS)),
        option("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS)),
        out="results",
    )
    warnings.simplefilter("ignore")
    cells: dict[str, dict[str, Answer | str]] = {}
    for name in o.networks:
        cells[name] = {target: _cell(NETWORKS[name], target) for target in o.targets}
        print(name, *(f"{target}: {cell_text(cell)}" for target, cell in cells[name].items()), sep=" | ", flush=True)
        write_text(o.out / "engine_check.md", page(cells, o.targets))


def _cell(make: Callable[[], tuple[nn.Module, Tensor]], target: Target) -> Answer | str:
    torch.manual_seed(0)
    network, x = make()
    with tempfile.TemporaryDirectory() as folder:
        try:
            return ask(network.eval(), x, target, Path(folder))
        except compress.CompressError as error:
            return f"refused: {' '.join(str(error).split())[:160]}"


def cell_text(cell: Answer | str) -> str:
    if isinstance(cell, str):
        return cell
    return f"{len(cell.int8) - len(cell.lost)} / {len(cell.int8)} / {cell.weighted}"


def page(cells: Mapping[str, Mapping[str, Answer | str]], targets: list[Target]) -> str:
    answers = [cell for row in cells.values() for cell in row.values() if isinstance(cell, Answer)]
    lost, int8 = (sum(len(names) for names in part) for part in ([a.lost for a in answers], [a.int8 for a in answers]))
    versions = gpu_software("onnx", "onnxruntime", "openvino", "tensorrt_rtx", "timm", "torchvision")
    lines = [
        "# What the audit calls INT8, asked of the engine",
        "",
        f"`{command_line()}`; {listed(versions)}; a CPU with {os.cpu_count()} cores; random weights.",
        "",
        f"{int8 - lost} of {int8} layers that the audit calls INT8 are INT8 in the engine ({len(answers)} files of "
        f"{len(cells)} networks). A cell is: INT8 in the engine / INT8 in the audit / convolutions and products. "
        "Engines: OpenVINO's runtime model, the profile of ONNX Runtime's optimized graph, and the build log of "
        "TensorRT-RTX for SM 89 (built, not run).",
        "",
        "| network | " + " | ".join(targets) + " |",
        "|---|" + "---|" * len(targets),
    ]
    for name, row in cells.items():
        lines.append(f"| {name} | " + " | ".join(cell_text(row[target]).replace("|", "/") for target in targets) + " |")
    differ = [(n, t, c.lost) for n, row in cells.items() for t, c in row.items() if isinstance(c, Answer) and c.lost]
    if differ:
        lines += ["", "| network | target | INT8 in the audit, float in the engine |", "|---|---|---|"]
        lines += [f"| {name} | {target} | {', '.join(names)} |" for name, target, names in differ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
