"""Commands that are imported when they are used: `--help` does not wait for torch.

Earlier forms of commands, recipes that are not there or hold wrong keys, and folders without a run are refused before
that import.
"""

from __future__ import annotations

import inspect
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from compress.cli.console import VERBOSITY
from compress.cli.plan import Plan, announce, options_in
from compress.errors import RecipeError
from compress.recipe.tree import recipe_names

Arguments = list[str]


@dataclass(frozen=True)
class Entry:
    """A command.

    Attributes:
        target: `module:function` that runs it; the function's parameters are the command's options.
        plan: what it is about to do is printed before the import: see `Plan`.
    """

    target: str
    help: str
    plan: Plan = ""


class LazyCommand(TyperCommand):
    """A command that imports its module when its arguments are parsed."""

    def __init__(self, name: str, entry: Entry) -> None:
        super().__init__(name, help=entry.help)
        self.entry = entry

    def load(self) -> Any:
        module, _, function = self.entry.target.partition(":")
        with _interrupt_ends_process():
            callback = getattr(import_module(module), function)
        app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
        app.command(self.name, help=self.entry.help)(_with_shared(callback))
        return get_command(app)

    def make_context(self, info_name: str | None, args: Arguments, parent: Any = None, **extra: Any) -> Any:
        return self.load().make_context(info_name, args, parent, **extra)


def lazy_group(entries: Mapping[str, Entry | None], *, group: str = "") -> type[TyperGroup]:
    """A class for `typer.Typer(cls=...)`.

    Args:
        entries: in the order of the help; None is the place of a group that `add_typer` adds.
        group: its name in `_GROUPS`, which says what is refused before any command sees it; "" = nothing is.
    """

    class LazyGroup(TyperGroup):
        """Commands by name."""

        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            lazy = {name: LazyCommand(name, entry) for name, entry in entries.items() if entry is not None}
            self.commands = {name: lazy.get(name) or self.commands[name] for name in entries}

        def parse_args(self, ctx: Any, args: Arguments) -> Arguments:
            if group and (reason := refused(group, args)) is not None:
                raise RecipeError(reason)
            return super().parse_args(ctx, args)

        def resolve_command(self, ctx: Any, args: Arguments) -> Any:
            name, command, rest = super().resolve_command(ctx, args)
            if isinstance(command, LazyCommand):
                announce(rest, command.entry.plan)
            return name, command, rest

    return LazyGroup


@contextmanager
def _interrupt_ends_process() -> Iterator[None]:
    """Let Ctrl-C end the process: within an import, a library may turn it into an error of its own."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


Quiet = Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="Show no progress.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", metavar="", help="Show progress as lines, at least every second.")
]
RecipeName = Annotated[str | None, typer.Argument(metavar="RECIPE", help="The same as --recipe.")]


def set_verbosity(quiet: bool, verbose: bool) -> None:
    if quiet or verbose:
        VERBOSITY.level = -1 if quiet else 1


def _with_shared(function: Callable[..., None]) -> Callable[..., None]:
    """Add what every command takes: `-q`, `-v`, and its recipe as an argument too.

    A parameter whose type is a dataclass stands for the options that are its fields.
    """
    params: dict[str, inspect.Parameter] = {}
    groups: dict[str, tuple[Any, list[str]]] = {}
    for name, param in inspect.signature(function, eval_str=True).parameters.items():
        kind = param.annotation
        fields = inspect.signature(kind, eval_str=True).parameters if hasattr(kind, "__dataclass_fields__") else {}
        params |= fields or {name: param}
        if fields:
            groups[name] = kind, [*fields]
    named = "recipe" in params and not any("Argument" in str(param.annotation) for param in params.values())
    required = named and params["recipe"].default is inspect.Parameter.empty

    def command(*, quiet: bool, verbose: bool, recipe_name: str | None = None, **given: Any) -> None:
        set_verbosity(quiet, verbose)
        if named and recipe_name is not None:
            if given["recipe"] is not None:
                raise RecipeError(f"two recipes are named, {recipe_name} and {given['recipe']}: give one")
            given["recipe"] = recipe_name
        if required and given["recipe"] is None and given.get("from_") is not None:
            given["recipe"] = str(given["from_"] / "recipe.yaml")
        if required and given["recipe"] is None:
            raise RecipeError(f"name a recipe: a path, or one of {', '.join(recipe_names())}")
        made = {name: kind(**{field: given.pop(field) for field in own}) for name, (kind, own) in groups.items()}
        function(**given, **made)

    if named:
        params["recipe"] = params["recipe"].replace(default=params["recipe"].default if not required else None)
        params["recipe_name"] = _parameter("recipe_name", RecipeName, None)
    params |= {"quiet": _parameter("quiet", Quiet, False), "verbose": _parameter("verbose", Verbose, False)}
    ordered = [param.replace(kind=inspect.Parameter.KEYWORD_ONLY) for param in params.values()]
    command.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    command.__annotations__ = {param.name: param.annotation for param in ordered}
    return command


def _parameter(name: str, annotation: Any, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def refused(command: str, arguments: Sequence[str]) -> str | None:
    """Say why a group takes no such arguments: it needs a command, and its earlier form had options in its place."""
    nothing, today = _GROUPS[command]
    if not arguments:
        return nothing
    if not arguments[0].startswith("-") or arguments[0] == "--help":
        return None
    old, new = shlex.join(arguments), shlex.join(today(list(arguments)))
    return f"`{command} {old}` is now `{command} {new}`"


def _inspect_today(words: list[str]) -> list[str]:
    if "--parity" in words:
        words.remove("--parity")
        return ["parity", *words]
    for option in ("engine", "onnx"):  # an engine's audit also took the file that the engine was built from
        given, rest = options_in(words, option)
        if given:
            return [option, given[option][-1], *rest]
    return ["model", *words]


def _build_today(words: list[str]) -> list[str]:
    given, rest = options_in(words, "onnx")
    if given:
        return ["onnx", given["onnx"][-1], *rest]
    command = "explore" if "--explore" in words else "recipe"
    given, rest = options_in([word for word in words if word != "--explore"], "recipe")
    return [command, given.get("recipe", ["NAME"])[-1], *rest]


# Of each group: what it says where no command is named, and the function that turns the arguments of its earlier form
# into those of today.
_GROUPS: dict[str, tuple[str, Callable[[Arguments], Arguments]]] = {
    "inspect": (
        "inspect looks at one thing: a model, an onnx file, an engine or the parity of engines (inspect --help)",
        _inspect_today,
    ),
    "build": (
        "build makes an engine of one thing: an onnx file or the network of a recipe (build --help)",
        _build_today,
    ),
}
