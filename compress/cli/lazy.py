"""Commands that are imported when they are used: `--help` does not wait for torch."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from compress.cli.refusals import refuse_recipe
from compress.errors import RecipeError

Arguments = list[str]


@dataclass(frozen=True)
class Entry:
    """A command.

    Attributes:
        target: `module:function` that runs it; the function's parameters are the command's options.
        help: text for users.
    """

    target: str
    help: str


class LazyCommand(TyperCommand):
    """A command that imports its module when its arguments are parsed."""

    def __init__(self, name: str, entry: Entry) -> None:
        super().__init__(name, help=entry.help)
        self.entry = entry

    def load(self) -> Any:
        """Import the function as typer's command."""
        module, _, function = self.entry.target.partition(":")
        with _interrupt_ends_process():
            callback = getattr(import_module(module), function)
        app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
        app.command(self.name, help=self.entry.help)(callback)
        return get_command(app)

    def make_context(self, info_name: str | None, args: Arguments, parent: Any = None, **extra: Any) -> Any:
        """Parse with the real command, which the context then runs."""
        return self.load().make_context(info_name, args, parent, **extra)


def lazy_group(
    entries: Mapping[str, Entry | None], *, refuse: Callable[[Arguments], str | None] | None = None
) -> type[TyperGroup]:
    """A class for `typer.Typer(cls=...)`.

    Args:
        entries: in the order of the help; None is the place of a group that `add_typer` adds.
        refuse: returns why arguments are refused before any command sees them, or None.
    """

    class LazyGroup(TyperGroup):
        """Commands by name."""

        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            lazy = {name: LazyCommand(name, entry) for name, entry in entries.items() if entry is not None}
            self.commands = {name: lazy.get(name) or self.commands[name] for name in entries}

        def parse_args(self, ctx: Any, args: Arguments) -> Arguments:
            """Refuse old forms, then parse."""
            reason = refuse(args) if refuse is not None else None
            if reason is not None:
                raise RecipeError(reason)
            return super().parse_args(ctx, args)

        def resolve_command(self, ctx: Any, args: Arguments) -> Any:
            """Find the command; a recipe that is not there is refused before its import."""
            name, command, rest = super().resolve_command(ctx, args)
            if isinstance(command, LazyCommand):
                refuse_recipe(rest)
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
