"""The commands that run a recipe: train, ptq, qat, prune."""

from __future__ import annotations

from collections.abc import Callable

from compress.cli.console import progress
from compress.cli.options import DeviceOption, JsonOption, OutOption, RecipeOption, ResumeOption, SetOption
from compress.cli.run_summary import show_finished_steps, show_run
from compress.pipeline import COMMANDS, default_folder
from compress.pipeline import run as run_recipe
from compress.recipe.tree import load_recipe
from compress.training import init_processes


def _command(name: str) -> Callable[..., None]:
    def command(
        recipe: RecipeOption,
        set_: SetOption = None,
        out: OutOption = None,
        resume: ResumeOption = False,
        device: DeviceOption = None,
        as_json: JsonOption = False,
    ) -> None:
        parsed = load_recipe(recipe, set_ or ())
        processes = init_processes(device)
        try:
            folder = processes.on_main(lambda: out or default_folder(recipe, name, resume=resume, recipe=parsed))
            if resume and processes.is_main:
                show_finished_steps(folder)
            with progress(processes.is_main) as bars:
                run_recipe(parsed, name, folder, resume=resume, device=device, processes=processes, progress=bars)
        finally:
            processes.close()
        if processes.is_main:
            show_run(folder, as_json=as_json)

    return command


train, ptq, qat, prune = map(_command, COMMANDS)
