"""draftsmith quickstart."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

commands = typer.Typer()


@commands.command(
    epilog="Example: draftsmith quickstart runs/demo; run again, it goes on, or decodes again"
)
def quickstart(
    folder: Annotated[Path, typer.Argument(help="Where everything goes.")] = Path(
        "runs/quickstart"
    ),
) -> None:
    """The whole job small: samples, two drafters, a comparison; 15 minutes on 2 cores."""
    from draftsmith.recipes.quickstart import quickstart as run

    raise typer.Exit(run(folder))
