"""The commands that run a recipe: train, ptq, qat, prune; `ptq` also takes an ONNX file without its source.

What they are about to do is printed before torch is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from compress.cli.console import ERRORS, progress
from compress.cli.options import (
    AgainOption,
    AllOption,
    ChannelsOption,
    DataOption,
    DeviceOption,
    FileOption,
    FromOption,
    ImagesOption,
    InputSizeOption,
    JsonOption,
    LayoutOption,
    MeanOption,
    OpsOption,
    OutOption,
    PrecisionOption,
    RecipeChoice,
    RecipeOption,
    ResizeOption,
    ResumeOption,
    SetOption,
    StdOption,
    TargetOption,
    form_of,
    spec_of,
)
from compress.data import IMAGENET, NORMALIZATION, preprocessing_words
from compress.errors import RecipeError
from compress.recipe.tree import Recipe, load_recipe
from compress.support.text import display

# Python packages of engines that are not named like them.
_LIBRARIES = {
    "litert": "ai_edge_litert",
    "tensorrt-rtx": "tensorrt_rtx",
    "tensorrt-lean": "tensorrt_lean",
    "cuda": "torch",
}


def _command(name: str) -> Callable[..., None]:
    def command(
        recipe: RecipeOption,
        set_: SetOption = None,
        out: OutOption = None,
        from_: FromOption = None,
        resume: ResumeOption = False,
        device: DeviceOption = None,
        as_json: JsonOption = False,
    ) -> None:
        parsed = load_recipe(recipe, set_ or ())
        show_plan(parsed, out, device, start=from_)
        from compress.cli.report import show_finished_steps, show_run  # lazy: torch is imported after the plan is shown
        from compress.pipeline import default_folder  # lazy: they import torch
        from compress.pipeline import run as run_recipe  # lazy: they import torch
        from compress.training.distributed import init_processes  # lazy: they import torch

        processes = init_processes(device)
        try:
            folder = processes.on_main(lambda: out or default_folder(recipe, name, resume=resume, recipe=parsed))
            if processes.is_main and out is None:
                ERRORS.print(f"folder   {folder}", highlight=False, soft_wrap=True)
            if resume and processes.is_main:
                show_finished_steps(folder)
            with progress(processes.is_main) as bars:
                run_recipe(
                    parsed, name, folder, resume=resume, device=device, start=from_, processes=processes, progress=bars
                )
        finally:
            processes.close()
        if processes.is_main:
            show_run(folder, as_json=as_json)

    return command


train, ptq_of_recipe, qat, prune = map(_command, ("train", "ptq", "qat", "prune"))


def ptq(
    recipe: RecipeChoice = None,
    set_: SetOption = None,
    out: OutOption = None,
    from_: FromOption = None,
    resume: ResumeOption = False,
    device: DeviceOption = None,
    as_json: JsonOption = False,
    onnx: FileOption = None,
    data: DataOption = None,
    target: TargetOption = None,
    precision: PrecisionOption = "fp32",
    size: InputSizeOption = None,
    resize: ResizeOption = None,
    mean: MeanOption = None,
    std: StdOption = None,
    layout: LayoutOption = "NCHW",
    channels: ChannelsOption = "RGB",
    images: ImagesOption = None,
    ops: OpsOption = None,
    again: AgainOption = False,
    every: AllOption = False,
) -> None:
    if onnx is None:
        if recipe is None and from_ is not None:
            recipe = str(from_ / "recipe.yaml")
        if recipe is None:
            raise RecipeError("give --recipe, or --onnx FILE and --data for a network of which only the file is there")
        if data is not None or target is not None or precision != "fp32" or ops or again:
            raise RecipeError(
                "--data, --target, --precision, --ops and --again belong to --onnx FILE; a recipe has a data, a "
                "quantization and an export section"
            )
        ptq_of_recipe(recipe, set_, out, from_, resume, device, as_json)
        return
    spec = spec_of(recipe, set_, target, images)
    form = form_of(onnx, size, mean, std, layout, channels, resize)
    from compress.cli.onnx_files import quantize_file  # lazy: it imports torch

    quantize_file(
        onnx,
        data,
        form,
        spec,
        out=out,
        precision=precision,
        ops=ops or (),
        again=again,
        every=every,
        as_json=as_json,
    )


def show_plan(recipe: Recipe, folder: Path | None, device: str | None, *, start: Path | None) -> None:
    """Print on standard error what a run will do; torch is not imported for it."""
    model, data, spec = recipe.model, recipe.data, recipe.data
    weights = f"float network of {start}" if start else f"weights {model.weights}" if model.weights else "fresh weights"
    if not start and recipe.train.epochs:
        weights += f", trained for {recipe.train.epochs} {'epoch' if recipe.train.epochs == 1 else 'epochs'}"
    mean, std = NORMALIZATION.get(data.name, IMAGENET)
    resize = spec.resize if spec.name in ("folder", "images") else ""
    words = preprocessing_words(
        spec.height_width, spec.mean or mean, spec.std or std, resize=resize, crop_ratio=spec.crop_ratio
    )
    if spec.name == "degraded":
        parts = "random parts (evaluation: the centre)" if spec.augment else "the centre"
        noise = f", noise of {spec.noise:g} grey levels" if spec.noise else ""
        words = f"{parts} of {{}} x {{}}, scaled down by {spec.scale}{noise}".format(
            *(spec.scale * side for side in spec.height_width)
        )
    missing = [name for name in recipe.bench.engines if find_spec(_LIBRARIES.get(name, name)) is None]
    found = [display(name) for name in recipe.bench.engines if name not in missing]
    lines = {
        "network": f"{model.name}, {weights}",
        "data": data.name if data.root is None else f"{data.name}, {data.root}",
        "input": words,
        "device": device or ("a GPU, if torch finds it" if Path("/proc/driver/nvidia").exists() else "cpu"),
        "folder": str(folder) if folder is not None else "",
        "engines": ", ".join(found)
        + (f"; not installed: {', '.join(missing)} (doctor says what to do)" if missing else ""),
    }
    for name, text in lines.items():
        if text:
            ERRORS.print(f"{name:9}{text}", highlight=False, soft_wrap=True)
