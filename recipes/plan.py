"""draftsmith plan: what a recipe will take, before anything is spent."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from draftsmith.recipes.options import Overrides, RecipeName
from draftsmith.train.plan.plan import plan as make_plan
from draftsmith.train.plan.plan import table
from draftsmith.train.recipe import load

commands = typer.Typer()


@commands.command(epilog="Example: draftsmith plan smol-eagle3 steps=2000 rows=4")
def plan(
    recipe: RecipeName,
    overrides: Overrides = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Processes of the launch; each adds its rows to a step.")
    ] = 1,
) -> None:
    """What a recipe will take: parameters, memory, disk, tokens, time; from configs alone."""
    made = make_plan(load(recipe, overrides or []), processes=processes)
    each = f", each of {processes} processes" if processes > 1 else ""
    shown = Table(title=f"{recipe} on {made.device}{each}", title_justify="left")
    for name in ("", "part", "figure"):
        shown.add_column(name, justify="right" if name == "figure" else "left")
    for row in table(made):
        shown.add_row(*row)
    Console().print(shown)
