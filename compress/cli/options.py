"""Options and arguments that several commands share, and those that describe the inputs of an ONNX file."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from compress.data import Preprocessing, Resize
from compress.errors import EngineError, RecipeError
from compress.export.names import PREPROCESSING_KEY
from compress.quantization import TARGETS, QuantSpec
from compress.recipe.tree import load_recipe
from compress.support.imports import imported

FolderArgument = Annotated[Path, typer.Argument(help="A run folder.")]
RecipeOption = Annotated[str, typer.Option("--recipe", "-r", help="A path, or a name such as resnet50.yaml.")]
RecipeChoice = Annotated[str | None, typer.Option("--recipe", "-r", help="A recipe: its model and its data.")]
ModelChoice = Annotated[
    str | None, typer.Option("--model", "-m", help="A model of torchvision, or timm:NAME, without a recipe.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Override, such as qat.epochs=1.")
]
OutOption = Annotated[Path | None, typer.Option("--out", "-o", help="Run folder; default runs/<recipe>-<command>.")]
FromOption = Annotated[
    Path | None,
    typer.Option("--from", help="A finished run: its float network is taken, and its recipe where none is named."),
]
AllOption = Annotated[bool, typer.Option("--all", metavar="", help="Every row of the table.")]
ResumeOption = Annotated[bool, typer.Option("--resume", metavar="", help="Continue the run that the folder holds.")]
DeviceOption = Annotated[str | None, typer.Option("--device", help="cpu or cuda; default: a GPU where there is one.")]
SizeOption = Annotated[
    str | None, typer.Option("--size", help="Sides that a file leaves open: 320, or 480x640 (height first).")
]
JsonOption = Annotated[bool, typer.Option("--json", metavar="", help="Print one JSON document on standard output.")]
VariantOption = Annotated[str, typer.Option(help="float, ptq, qat, ...; default: the best by the run's figures.")]

_ONNX = "ONNX files"
BATCH = 8  # images of one batch

FileOption = Annotated[Path | None, typer.Option("--onnx", help="A float ONNX file.", rich_help_panel=_ONNX)]
DataOption = Annotated[
    str | None,
    typer.Option(
        "--data", help="A folder of images, an .npz of inputs, or package.module:function.", rich_help_panel=_ONNX
    ),
]
TargetOption = Annotated[str | None, typer.Option("--target", help=", ".join(TARGETS), rich_help_panel=_ONNX)]
MetricOption = Annotated[
    str | None,
    typer.Option(
        "--metric", help="Judges data with targets: package.module:name; default top-1.", rich_help_panel=_ONNX
    ),
]
PrecisionOption = Annotated[
    str,
    typer.Option("--precision", help="Of what is not quantized: fp32, fp16 or bf16.", rich_help_panel=_ONNX),
]
OpsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--ops", help="A library of the file's own operators, for ONNX Runtime; repeat.", rich_help_panel=_ONNX
    ),
]
AgainOption = Annotated[
    bool,
    typer.Option(
        "--again", metavar="", help="Of a quantized file: make it float first, and begin anew.", rich_help_panel=_ONNX
    ),
]
ImagesOption = Annotated[
    int | None, typer.Option("--images", help="Images to calibrate with.", min=1, rich_help_panel=_ONNX)
]


_MINUTES = {"s": 1 / 60, "min": 1.0, "h": 60.0}


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Options of `ptq --onnx` with `--tune`."""

    tune: Annotated[
        str | None,
        typer.Option(
            "--tune", help="Time on the engine which layers are faster float: 5min, 90s, 1h.", rich_help_panel=_ONNX
        ),
    ] = None
    max_drop: Annotated[
        float | None,
        typer.Option(
            "--max-drop", help="With --tune: most points lost, of the metric or of agreement.", rich_help_panel=_ONNX
        ),
    ] = None
    min_sqnr: Annotated[
        float | None,
        typer.Option(
            "--min-sqnr", help="With --tune, for other outputs: least dB against float.", rich_help_panel=_ONNX
        ),
    ] = None
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="With --tune: openvino, cuda, ...; default the target's.", rich_help_panel=_ONNX),
    ] = None
    metric: MetricOption = None

    def arguments(self) -> dict[str, Any] | None:
        """Arguments of `compress.tune`."""
        drop, sqnr = self.max_drop, self.min_sqnr
        if self.tune is None:
            if any(value is not None for value in (drop, sqnr, self.engine, self.metric)):
                raise RecipeError("--max-drop, --min-sqnr, --engine and --metric belong to --tune; add --tune 5min")
            return None
        found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|min|h)", self.tune.strip())
        if found is None or not float(found[1]):
            raise RecipeError(f"--tune is {self.tune!r}: it must be a time with its unit, such as 5min, 90s or 1h")
        floor = drop if sqnr is None else sqnr
        if (drop is None) == (sqnr is None) or floor is None or not 0 <= floor < math.inf:
            raise RecipeError(
                "--tune needs one floor of accuracy, 0 or more: --max-drop 0.5 (points of the metric, or of agreement "
                "with float) or --min-sqnr 20 (dB)"
            )
        minutes = float(found[1]) * _MINUTES[found[2]]
        judge = None if self.metric is None else imported(self.metric, key="--metric", error=RecipeError)
        return {"minutes": minutes, "drop": drop, "sqnr_db": sqnr, "engine": self.engine, "metric": judge}


def sides_of(size: str) -> tuple[int, int]:
    sides = [int(side) if side.isdecimal() else 0 for side in size.split("x")]
    if len(sides) > 2 or min(sides) < 1:
        raise RecipeError(f"--size is {size!r}: it must be a number of pixels, or height x width such as 480x640")
    return sides[0], sides[-1]


def spec_of(recipe: str | None, set_: list[str] | None, target: str | None, images: int | None) -> QuantSpec:
    spec = QuantSpec()
    if set_ and recipe is None:
        raise RecipeError("--set changes a recipe; give --recipe too")
    if recipe is not None:
        found = load_recipe(recipe, set_ or ()).quantization
        if found is None:
            raise RecipeError(f"{recipe} has no quantization section, which says how to quantize the file")
        spec = found
    if target is not None:
        if target not in TARGETS:
            raise RecipeError(f"--target is {target!r} (one of: {', '.join(TARGETS)})")
        spec = replace(spec, target=target)
    return spec if images is None else replace(spec, calibration_images=images)


def batches_of(data: str | None, form: Preprocessing, images: int) -> Iterable[Any]:
    if data is None:
        raise RecipeError("--onnx needs --data: a folder of images, an .npz file of inputs, or package.module:function")
    from compress.data.files import unlabelled  # lazy: it imports torch

    return unlabelled(data, form, limit=images, batch_size=BATCH)


@dataclass(frozen=True, kw_only=True)
class FormOptions:
    """Options of an ONNX file's images."""

    size: Annotated[
        str | None,
        typer.Option(
            "--size", help="Images: 224, or 480x640 (height first); default as the file says.", rich_help_panel=_ONNX
        ),
    ] = None
    resize: Annotated[
        str | None,
        typer.Option("--resize", help="Images: crop, squash or pad; default as the file says.", rich_help_panel=_ONNX),
    ] = None
    mean: Annotated[
        str | None,
        typer.Option(
            "--mean", help="Images: such as 0.485,0.456,0.406; default as the file says.", rich_help_panel=_ONNX
        ),
    ] = None
    std: Annotated[
        str | None,
        typer.Option(
            "--std", help="Images: such as 0.229,0.224,0.225; default as the file says.", rich_help_panel=_ONNX
        ),
    ] = None
    layout: Annotated[
        str | None,
        typer.Option(
            "--layout", help="Images: NCHW or NHWC; default as the input's shape says.", rich_help_panel=_ONNX
        ),
    ] = None
    channels: Annotated[str, typer.Option("--channels", help="Images: RGB or BGR.", rich_help_panel=_ONNX)] = "RGB"

    def of(self, file: Path) -> Preprocessing:
        """The preprocessing that the options name, else that of the file."""
        resize, layout, channels = self.resize, self.layout, self.channels
        if resize not in (None, *get_args(Resize)):
            raise RecipeError(f"--resize is {resize!r} (one of: {', '.join(get_args(Resize))})")
        if layout not in (None, "NCHW", "NHWC") or channels not in ("RGB", "BGR"):
            raise RecipeError(
                f"--layout is {layout!r} and --channels {channels!r}: they must be NCHW or NHWC, RGB or BGR"
            )
        form = replace(_form_in(file, layout), channels=channels)
        height, width = form.height_width if self.size is None else sides_of(self.size)
        resize = resize or form.resize or ("crop" if height == width else "squash")
        form = replace(form, image_size=(height, width), resize=resize)
        return replace(form, mean=_numbers("mean", self.mean, form.mean), std=_numbers("std", self.std, form.std))


def _form_in(file: Path, layout: str | None) -> Preprocessing:
    """The preprocessing in the metadata, else that of the shape, whose `resize` is ""."""
    import onnx  # lazy: most commands read no file
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]  # lazy: with onnx

    try:
        found = onnx.load(str(file), load_external_data=False)
    except DecodeError as error:
        raise EngineError(f"{file}: not an ONNX model, or a truncated one ({error}); export it again") from None
    text = next((entry.value for entry in found.metadata_props if entry.key == PREPROCESSING_KEY), None)
    if text is not None:
        form = Preprocessing.from_json(text)
        return replace(form, layout=layout or form.layout)
    weights = {tensor.name for tensor in found.graph.initializer}
    first = next((value for value in found.graph.input if value.name not in weights), None)
    shape = [] if first is None else [dim.dim_value for dim in first.type.tensor_type.shape.dim]
    layout = layout or ("NHWC" if shape[1:] and shape[1] != 3 and shape[-1] == 3 else "NCHW")
    sides = shape[2:] if layout == "NCHW" else shape[1:3]
    known = len(shape) == 4 and min(sides) > 0
    size = (sides[0], sides[1]) if known else 224
    return Preprocessing(image_size=size, crop_ratio=0.875, resize="", layout=layout)


def _numbers(name: str, text: str | None, default: tuple[float, ...]) -> tuple[float, ...]:
    if text is None:
        return default
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if len(found) not in (1, 3) or (name == "std" and min(found) <= 0):
        positive = " above 0" if name == "std" else ""
        raise RecipeError(f"--{name} is {text!r}: it must be one number{positive} or three, such as 0.5,0.5,0.5")
    return found * 3 if len(found) == 1 else found
