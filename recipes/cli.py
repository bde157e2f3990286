"""The front door: every `draftsmith` command, from quickstart to serve-check.

A user's mistake is one line on stderr and exit code 2, before any compute is spent.
"""

from __future__ import annotations

import sys

import typer

from draftsmith.drafters.errors import UserError
from draftsmith.recipes import (
    certify,
    cli_evaluation,
    cli_serving,
    cli_training,
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
for part in (
    *(cli_training, sample, self_prompt, plan, train, keys),
    *(cli_evaluation, certify, cli_serving),
):
    app.add_typer(part.commands)  # at the top level: it has no name


def main() -> None:
    """Entry point of the `draftsmith` command."""
    try:
        code = app(standalone_mode=False)
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
