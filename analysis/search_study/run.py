"""Searches widths and blocks within a latency, and removes the same share of channels everywhere, from one network.

All are fine-tuned by the same recipe and measured on the engine in turn with the float network.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from analysis.common.recipes import RecipeRun, run_all
from analysis.common.study import command_line, gpu_software, listed, option, study_options
from compress.files import write_text
from compress.pipeline.studies.search import search_run
from compress.recipe.tree import load_recipe
from compress.records.summary import summary_table


def searched(recipe: str, shares: Sequence[float], overrides: Sequence[str], engine: str, out: Path) -> Iterator[str]:
    for share in shares:
        folder = out / f"search-{share}"
        made = search_run(load_recipe(recipe, overrides), folder, engine=engine, latency=share, resume=folder.is_dir())
        for attempt in made.attempts:
            score = made.metric.shown(attempt.score)
            yield f"search within {share}: {attempt.label} | {1 / attempt.ratio:.2f}x | {score:.2f}"


def uniform(recipe: str, shares: Sequence[float], overrides: Sequence[str], engine: str, out: Path) -> Iterator[str]:
    runs = [
        RecipeRun(
            label=f"uniform-{share}",
            recipe=recipe,
            command="prune",
            overrides=[*overrides, f"sparsity.pattern=channel:{share}"],
        )
        for share in shares
    ]
    for label, run in run_all(runs, out):
        for row in summary_table(run.metrics):
            if row.engine.startswith(engine) and row.speedup and row.score is not None:
                yield f"{label}, {row.variant} | {row.speedup:.2f}x | {row.score:.2f}"


def main() -> None:
    o = study_options(
        __doc__,
        option("--recipe", default="resnet18-search", help="with a `search` and a `finetune` section"),
        option("--engine", default="openvino"),
        option("--latencies", nargs="+", type=float, default=[0.6, 0.4], help="shares of float's latency"),
        option("--channels", nargs="+", type=float, default=[0.25, 0.5], help="shares of channels that go"),
        option("--set", action="append", default=[], help="key=value for every run"),
        out="runs/search_study",
    )
    run_all([RecipeRun(label="float", recipe=o.recipe, command="train", overrides=o.set)], o.out)
    same = [*o.set, "train.epochs=0", f"model.weights={(o.out / 'float' / 'float.safetensors').resolve()}"]
    rows = [
        *searched(o.recipe, o.latencies, same, o.engine, o.out),
        *uniform(o.recipe, o.channels, same, o.engine, o.out),
    ]
    lines = ["# A search beside uniform widths", "", f"`{command_line()}`; {listed(gpu_software(o.engine))}.", ""]
    lines += ["| network | faster than float | metric |", "|---|---|---|", *(f"| {row} |" for row in rows)]
    print(write_text(o.out / "search_study.md", "\n".join(lines) + "\n").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
