"""draftsmith train: a recipe trained in this process; launchers start draftsmith.train."""

from __future__ import annotations

import typer

from draftsmith.recipes.options import Overrides, RecipeName
from draftsmith.train.run import main

commands = typer.Typer()


@commands.command(
    epilog="Example: draftsmith train smol-eagle3 samples=samples/smol steps=500; with several "
    "processes: accelerate launch -m draftsmith.train smol-eagle3 samples=samples/smol"
)
def train(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Trains a drafter; a run that was stopped goes on where its last checkpoint is."""
    raise typer.Exit(main([recipe, *(overrides or [])]))
