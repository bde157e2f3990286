"""draftsmith keys [FAMILY]: what may stand in a recipe, read off the schema that checks it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from pydantic import BaseModel
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from draftsmith.drafters import base
from draftsmith.drafters.errors import UserError
from draftsmith.train.objective.losses import LOSSES
from draftsmith.train.recipe import LossNumbers, Recipe

commands = typer.Typer()

GROUPS = {  # by the key that each begins with, in the schema's order
    "name": "the run",
    "samples": "its texts",
    "depths": "the drafter",
    "loss": "the loss",
    "steps": "the steps",
    "feature_cache": "disk and figures",
}
KINDS = {
    "string": "text", "integer": "int", "number": "number", "boolean": "true | false",
    "object": "mapping",
}  # fmt: skip
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


@commands.command(epilog="Example: draftsmith keys eagle")
def keys(
    family: Annotated[
        str | None, typer.Argument(help="A drafter's family, whose own keys are listed too.")
    ] = None,
) -> None:
    """A recipe's keys: type, default and meaning; and the losses."""
    families = [name for name in base.BUILT_IN if name != "ngram"]  # it has nothing to train
    if family and family not in families:
        raise UserError(f"{family}: no family to train; known are {', '.join(families)}")
    table = _table("key", "type (default)", "meaning")
    _fill(table, Recipe)
    table.add_section()
    table.add_row("[bold]numbers of losses[/]")
    _fill(table, LossNumbers)
    if family:
        table.add_section()
        table.add_row(f"[bold]{family}[/]")
        _fill(table, base.family(family).Config)
    losses = _table("loss", "of p, the target's distribution, and q, the drafter's")
    for name, loss in LOSSES.items():
        losses.add_row(name, loss.meaning)
    console = Console()
    console.print("In a recipe's YAML as `key: value`; behind its name as key=value.")
    console.print(table, losses)
    if not family:
        console.print(f"Families have keys of their own: draftsmith keys {' | '.join(families)}")


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=column in ("key", "loss"))
    return table


def _fill(table: Table, model: type[BaseModel]) -> None:
    for key, *rest in rows(model):
        if key in GROUPS:
            table.add_section()
            table.add_row(f"[bold]{GROUPS[key]}[/]")
        table.add_row(*(text.replace("[", r"\[") for text in (key, *rest)))


def rows(model: type[BaseModel]) -> Iterator[tuple[str, str, str]]:
    """Key, type with default, and meaning of each field that has a description."""
    schema = model.model_json_schema()
    required = schema.get("required", [])
    for key, field in schema["properties"].items():
        if "description" not in field:
            continue
        default = "required" if key in required else field.get("default", [])
        shown = default if isinstance(default, str) else json.dumps(default)
        yield key, f"{kind(field)} ({shown})".replace(" (null)", ""), field["description"]


def kind(field: dict[str, Any]) -> str:
    """A field's type in words, its bounds included, from its JSON schema."""
    if "anyOf" in field:
        return " or ".join(kind(part) for part in field["anyOf"] if part.get("type") != "null")
    if "enum" in field:
        return " | ".join(field["enum"])
    if "const" in field:
        return str(field["const"])
    if field.get("type") == "array":
        return f"list of {kind(field['items'])}"
    bounds = [f"{sign} {field[name]:g}" for name, sign in BOUNDS.items() if name in field]
    return " ".join([KINDS[field.get("type", "object")], ", ".join(bounds)]).strip()
