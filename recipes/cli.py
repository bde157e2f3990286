"""The front door: every `draftsmith` command, from quickstart to serve-check.

A command's options stand once: in its function, in the file of its name, or in commands.py where
its work takes several functions. Heavy imports wait until it runs, so that --help does not.

A user's mistake is one line on stderr and exit code 2, before any compute is spent.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from draftsmith.drafters.errors import UserError
from draftsmith.recipes import (
    certify,
    commands,
    evaluate,
    keys,
    plan,
    sample,
    self_prompt,
    train,
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Trains drafters for speculative decoding on a target's own answers.",
)


@app.command(
    epilog="Example: draftsmith quickstart runs/demo; run again, it goes on, or decodes again"
)
def quickstart(
    folder: Annotated[Path, typer.Argument(help="Where everything goes.")] = Path(
        "runs/quickstart"
    ),
) -> None:
    """The whole job small: samples, two drafters, decoding, one page; 15 minutes on 2 cores."""
    from draftsmith.recipes.quickstart import quickstart as run

    raise typer.Exit(run(folder))


for part in (sample, self_prompt, plan, train, keys, evaluate, certify, commands):
    app.add_typer(part.commands)  # at the top level: it has no name


def main() -> None:
    """Entry point of the `draftsmith` command."""
    try:
        asked = app(standalone_mode=False)  # an exit code, or a command (see commands.py)
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
