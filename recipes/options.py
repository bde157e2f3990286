"""Options that several commands take."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

import typer
import yaml

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.passes import layers
from draftsmith.drafters.target.causal_lm import CausalLM
from draftsmith.train.data.prompts import plain_yaml

Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="0 switches top-k off.")]
TopP = Annotated[float, typer.Option(help="1 switches top-p off.")]
SUITE = (
    "A file (JSONL, JSON, CSV, TSV, text, Parquet), a folder of them, a data set on the hub, or a "
    "mix (YAML); default: our own."
)
Prompts = Annotated[str | None, typer.Option(help=SUITE)]
AnyTarget = Annotated[str, typer.Option(help="Hub id, folder, GGUF file or smollm2.")]
OwnTarget = Annotated[str | None, typer.Option(help="Default: the one the drafter was made for.")]
Template = Annotated[
    list[str] | None,
    typer.Option(help="KEY=VALUE for the chat template, e.g. enable_thinking=false."),
]
RecipeName = Annotated[str, typer.Argument(help="A recipe file, or a shipped recipe's name.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value ..")]
Seed = Annotated[int, typer.Option(help="Keys every draw.")]

Compile = Annotated[
    Literal["auto", "on", "off"],
    typer.Option(
        "--compile", help="Decoder layers compiled for this CPU; auto: in runs it pays in."
    ),
]


def settle(compiling: str, target: CausalLM, passes: int) -> None:
    """Settles --compile for a run of at most `passes` passes of the target, in one line.

    auto compiles where that takes less time than it saves, and takes what was compiled before.
    """
    able = compiling != "off" and layers.able(target)
    layers.choose(able and (compiling == "on" or passes >= layers.PAYS or layers.kept(target)))
    if able and not layers.chosen():
        print(
            f"layers are not compiled: up to {passes} passes are fewer than the {layers.PAYS} from "
            "which on it pays (--compile on)"
        )
    elif compiling == "on" and not able:
        print("layers are not compiled: that needs a target in fp32 on a CPU, and the CPU kernels")


def key_values(pairs: list[str]) -> dict[str, Any]:
    """KEY=VALUE pairs for the chat template, values as YAML. Raises UserError."""
    out = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        try:
            out[key] = plain_yaml(value)
        except yaml.YAMLError:
            equals = ""
        if not equals or not key.isidentifier():
            raise UserError(f"--template: {pair} is not KEY=VALUE, e.g. enable_thinking=false")
    return out


def judge(parity: bool) -> None:
    """Ends a command with code 1 where parity is broken."""
    if not parity:
        print("error: decoder and replay disagree; this is a bug in draftsmith", file=sys.stderr)
        raise typer.Exit(1)
