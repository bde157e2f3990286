"""The front door: every `draftsmith` command, from quickstart to serve-check.

A command's options and work stand in the file of its name (evaluate.py of eval), imported when the
command is asked for: the list of commands is printed at once, a command's own help after the some
two seconds that torch and transformers take.

A user's mistake is one line on stderr and exit code 2, before any compute is spent.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from draftsmith.drafters.errors import UserError

# Name and the line that `draftsmith --help` prints, with which the command's own help begins.
COMMANDS = {
    "quickstart": "The whole job small: samples, two drafters, one page; 15 minutes on 2 cores.",
    "sample": "Lets the target answer prompts, turn by turn; or imports answers; or shows samples.",
    "self-prompt": "Lets the target write its own prompts, from its chat template's user turn.",
    "plan": "What a recipe will take: parameters, memory, disk, tokens, time; from configs alone.",
    "train": "Trains a drafter; a run that was stopped goes on where its last checkpoint is.",
    "keys": "A recipe's keys: type, default and meaning; and the losses.",
    "eval": "Decodes prompts with a drafter: acceptance by replay and decode, parity, speed.",
    "certify": "Checks that decoding with a drafter writes what the target alone would write.",
    "report": "Replays every checkpoint of a run, decodes the best one, writes RUN/report.",
    "compare": "Compares drafters of one target: acceptance, cost, speed, what each one lacks.",
    "bench": "Times speculation against the loop without it; goes on where it was stopped.",
    "export": "Writes a drafter as a server loads it, reads it back, prints how to serve it.",
    "serve-check": "Serves an export: the server's own counters beside replay of what it wrote.",
}
FILES = {name: name.replace("-", "_") for name in COMMANDS} | {"eval": "evaluate"}


class Commands(TyperGroup):
    """Holds a name and a line of each command, and loads the one that is asked for."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)  # an unknown name is refused here
        assert name is not None
        return name, load(name), rest


def load(name: str) -> Any:
    """The click command of this name, its module imported. Raises KeyError for another name."""
    house = typer.Typer(rich_markup_mode=None)
    house.add_typer(import_module(f"draftsmith.recipes.{FILES[name]}").commands)
    group: Any = typer.main.get_group(house)
    return group.commands[name]


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Trains drafters for speculative decoding on a target's own answers.",
)
for name, line in COMMANDS.items():
    app.command(name, help=line)(lambda: None)


def main() -> None:
    """Entry point of the `draftsmith` command."""
    try:
        asked = app(standalone_mode=False)  # an exit code, or a command's options
        code = asked() if callable(asked) else asked
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except typer.Exit as stop:
        sys.exit(stop.exit_code)
    except typer.Abort:
        sys.exit(130)
    except Exception as error:
        # click's usage errors (its module is private in some typer versions)
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            print(f"error: {error.format_message()}", file=sys.stderr)
            sys.exit(error.exit_code)
        raise
    sys.exit(code or 0)
