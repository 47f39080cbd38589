"""The commands that run a recipe: train, ptq, qat, prune; `ptq` also takes an ONNX file without its source."""

from __future__ import annotations

from collections.abc import Callable

from compress.cli.console import progress
from compress.cli.options import (
    AgainOption,
    AllOption,
    DataOption,
    DeviceOption,
    FileOption,
    FormOptions,
    FromOption,
    ImagesOption,
    JsonOption,
    OpsOption,
    OutOption,
    PrecisionOption,
    RecipeChoice,
    RecipeOption,
    ResumeOption,
    SetOption,
    TargetOption,
    Tuning,
    spec_of,
)
from compress.errors import RecipeError
from compress.recipe.tree import load_recipe


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
        from compress.cli.report import show_folder, show_run  # lazy: torch is imported after the plan is shown
        from compress.pipeline import default_folder  # lazy: they import torch
        from compress.pipeline import run as run_recipe  # lazy: they import torch
        from compress.training.distributed import init_processes  # lazy: they import torch

        processes = init_processes(device)
        try:
            folder = processes.on_main(lambda: out or default_folder(recipe, name, resume=resume, recipe=parsed))
            if processes.is_main:
                show_folder(folder, named=out is not None, resume=resume)
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
    *,
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
    form: FormOptions,
    images: ImagesOption = None,
    ops: OpsOption = None,
    again: AgainOption = False,
    tune: Tuning,
    every: AllOption = False,
) -> None:
    tuning = tune.arguments()
    if onnx is None:
        if recipe is None and from_ is not None:
            recipe = str(from_ / "recipe.yaml")
        if recipe is None:
            raise RecipeError("give --recipe, or --onnx FILE and --data for a network of which only the file is there")
        if data is not None or target is not None or precision != "fp32" or ops or again or tuning:
            raise RecipeError(
                "--data, --target, --precision, --ops, --again and --tune belong to --onnx FILE; a recipe has a data, "
                "a quantization and an export section"
            )
        ptq_of_recipe(recipe, set_, out, from_, resume, device, as_json)
        return
    spec = spec_of(recipe, set_, target, images)
    from compress.cli.onnx_files import quantize_file  # lazy: it imports torch

    quantize_file(
        onnx,
        data,
        form.of(onnx),
        spec,
        out=out,
        precision=precision,
        ops=ops or (),
        again=again,
        tuning=tuning,
        every=every,
        as_json=as_json,
    )
