"""draftsmith serve-check EXPORT: a real server's own counters beside replay's."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from draftsmith.drafters import export, storage
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import Draft
from draftsmith.drafters.target.target import Target
from draftsmith.eval.report.provenance import provenance
from draftsmith.eval.servers import serving as servers
from draftsmith.eval.servers.check import TEMPERATURES, collect, report
from draftsmith.eval.servers.client import Running
from draftsmith.recipes.options import OwnTarget, Prompts, Seed
from draftsmith.recipes.shared import check_file, check_room, take_prompts
from draftsmith.train import disk
from draftsmith.train.data.chat_template import encode
from draftsmith.train.progress import CountLine

commands = typer.Typer()

CARD = "card.json"
DRAFTS = ("greedy", "sampled")


@commands.command(
    "serve-check",
    epilog="Example: draftsmith serve-check exports/eagle3-vllm --server vllm; a running one: "
    "--server http://127.0.0.1:8000",
)
@dataclass(frozen=True)
class ServeCheck:
    """Serves an export: the server's own counters beside replay of what it wrote.

    A running server may serve nobody else meanwhile, and its counts are exact when it runs with

    \b
    vllm: --dtype float32 --max-num-seqs 1 --enforce-eager
      --no-enable-prefix-caching --generation-config vllm
    llama.cpp: -np 1 -fa off -ctk f32 -ctv f32 -ctkd f32 -ctvd f32
      --spec-draft-p-min 0
    """

    export: Annotated[Path, typer.Argument(help="A folder that `draftsmith export` wrote.")]
    server: Annotated[str, typer.Option(help="vllm, llama.cpp, or a running server's URL.")]
    target: OwnTarget = None
    checkpoint: Annotated[
        Path | None, typer.Option(help="Default: the one that the export's card names.")
    ] = None
    prompts: Prompts = None
    limit: Annotated[int, typer.Option(min=1, help="Use at most this many prompts.")] = 8
    k: Annotated[int | None, typer.Option(min=1, help="Default: the export's own.")] = None
    drafts: Annotated[
        str | None,
        typer.Option(
            help="greedy (counts compared as integers) or sampled (by z at T=1; vllm); default: "
            "as the export's command has it."
        ),
    ] = None
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 48
    output: Annotated[Path | None, typer.Option(help="File for the report (JSON).")] = None
    seed: Seed = 0

    def __call__(self) -> None:
        """Prints a table and writes a JSON file; exit code 1 where server and replay disagree."""
        check_file(self.output)
        found = measure(self)
        show(found, Console())
        if self.output is not None:
            disk.write(self.output, json.dumps(found, indent=1) + "\n")
            print(f"written: {self.output}")
        if not found["holds"]:
            print(f"error: server and replay disagree: {_why(found)}", file=sys.stderr)
            raise typer.Exit(1)


def is_url(server: str) -> bool:
    return server.startswith(("http://", "https://"))


def _why(found: dict[str, Any]) -> str:
    """What to look at, the likeliest first."""
    server, entries = found["server"], found["temperatures"]
    if any(entry.get("greedy") for entry in entries):
        return (
            "it drafts greedily, not from q: its speculative config lacks "
            '"draft_sample_method": "probabilistic"; or give --drafts greedy'
        )
    causes = "the export serves another drafter than was trained, or the server has a bug"
    if server["command"] is None:  # somebody else started it
        causes = (
            f"was it started with {server['exact']}, and does it draft as --drafts "
            f"{found['drafts']} says? If so, {causes}"
        )
    return causes


def measure(settings: ServeCheck) -> dict[str, Any]:
    """Asks the server, with its drafter and without, and replays what it wrote; the report.

    Raises UserError, before a model is loaded where that is known by then.
    """
    subject, url = _subject(settings), is_url(settings.server)
    prompts, draft = subject.prompts, subject.draft

    def serve(with_draft: Draft | None, log: Path) -> AbstractContextManager[Running]:
        if url:
            return nullcontext(servers.running(settings.server))
        length = max(map(len, prompts)) + settings.max_new_tokens
        return servers.serving(settings.server, subject.target.source, with_draft, length, log)

    with tempfile.TemporaryDirectory(prefix="serve-check-") as folder, ExitStack() as running:
        sides: dict[Running, int | None] = {}
        for with_draft in (draft,) if url else (None, draft):  # both at once: they take turns
            log = Path(folder) / f"{'speculative' if with_draft else 'plain'}.log"
            server = running.enter_context(serve(with_draft, log))
            sides[server] = with_draft.k if with_draft else None
        if url:
            _check_draws(server.kind.name, subject.drafter, draft.drafts)
        line = CountLine("answers", len(sides) * len(prompts) * len(TEMPERATURES))
        *plain, given = collect(sides, prompts, settings.max_new_tokens, settings.seed, line.count)
    command = server.child.command if server.child else []
    kind = server.kind
    return {
        "server": {
            "kind": kind.name,
            "version": server.version,
            "tested": kind.server.version,
            "patched": kind.patched() if command else None,
            "exact": kind.exact,
            "command": shlex.join(command).replace(str(Path.home()), "~") or None,
        },
        **report(
            subject.target,
            subject.drafter,
            draft.k,
            kind.shortens,
            draft.drafts,
            given,
            plain[0] if plain else None,
        ),
        "export": str(settings.export),
        "checkpoint": str(subject.checkpoint),
        "family": draft.family,
        "drafts": draft.drafts,
        "target": subject.target.identity(),
        "prompts": len(prompts),
        "max_new_tokens": settings.max_new_tokens,
        "seed": settings.seed,
        **provenance(),
    }


@dataclass
class _Subject:
    """What is checked."""

    target: Target
    checkpoint: Path
    drafter: Drafter
    draft: Draft
    prompts: list[list[int]]


def _subject(settings: ServeCheck) -> _Subject:
    card = read_card(settings.export)
    checkpoint = settings.checkpoint or Path(card["drafter"]["checkpoint"])
    config = storage.read_config(checkpoint)
    k = settings.k or int(card["serving"]["k"])
    url = is_url(settings.server)
    draft = Draft(settings.export, config["family"], k, _drafts(settings, card))
    if not url:
        servers.check(settings.server, draft.family, k)
        made_for = card["server"]["name"].lower()  # older cards have vLLM
        if made_for != settings.server:
            raise UserError(
                f"{settings.export}: made for {made_for}; export the checkpoint --to "
                f"{settings.server} to check it with that"
            )
    suite = take_prompts(settings.prompts, settings.limit)
    spec = settings.target or config["target"].get("spec")
    if spec is None:
        raise UserError(f"{checkpoint}: names no target that it was made for; give --target")
    target = Target.load(spec, dtype=torch.float32)  # parity is defined in fp32
    drafter = storage.load(checkpoint, target)
    if not url:
        _check_draws(settings.server, drafter, draft.drafts)
    if drafter.longest is not None and k > drafter.longest:
        raise UserError(f"--k: {k} is more than this drafter's {drafter.longest} depths; lower it")
    prompts = encode(suite, target)
    check_room(max(map(len, prompts)), settings.max_new_tokens, target)
    return _Subject(target, checkpoint, drafter, draft, prompts)


def _drafts(settings: ServeCheck, card: dict[str, Any]) -> str:
    """How the server is to draft at temperatures above 0: as the export's command has it."""
    drafts = settings.drafts or card["serving"].get("drafts", "greedy")
    if drafts not in DRAFTS:
        raise UserError(f"--drafts: no {drafts!r}; give {' or '.join(DRAFTS)}")
    return drafts


def _check_draws(server: str, drafter: Drafter, drafts: str) -> None:
    known = export.server(server)
    if drafts == "sampled" and not known.draws(drafter):
        raise UserError(
            f"--drafts: {known} takes {drafter.family} drafts greedily; give --drafts greedy"
        )


def read_card(export: Path) -> dict[str, Any]:
    """An export's card. Raises UserError where it is missing, broken or not ours."""
    path = export / CARD
    if not path.is_file():
        raise UserError(f"{export}: no {CARD} there; give a folder that `draftsmith export` wrote")
    try:
        card = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); export the checkpoint again") from None
    for part, key in (("server", "name"), ("drafter", "checkpoint"), ("serving", "k")):
        held = card.get(part) if isinstance(card, dict) else None
        if not isinstance(held, dict) or key not in held:
            raise UserError(f"{path}: has no {part}.{key}; export the checkpoint again")
    return card


def show(found: dict[str, Any], console: Console) -> None:
    """The report as one table."""
    server = found["server"]
    patched = " (patched)" if server["patched"] else ""
    table = Table(
        title=f"{found['family']} served by {server['kind']} {server['version']}{patched}, "
        f"k={found['k']}, {found['prompts']} prompts of {found['max_new_tokens']} tokens each",
        title_justify="left",
    )
    for name in ("", "server", "replay", "in cut rounds", "z", "agrees"):
        table.add_column(name, justify="left" if not name else "right")
    for entry in found["temperatures"]:
        table.add_section()
        for row in _rows(entry):
            table.add_row(*row)
    console.print(table)
    for entry in found["temperatures"]:
        plain = entry["plain_tokens_per_s"]
        against = "" if plain is None else f" against {plain:.2f} without drafts"
        against += " (busy)" if entry["clock"] and entry["clock"]["busy"] else ""
        ties = f"{len(entry['ties'])} fp32 ties, " if "ties" in entry else ""
        console.print(
            f"T={entry['temperature']:g}  tau {entry['tau']:.3f}, {entry['tokens_per_s']:.2f} "
            f"tokens/s{against}; {ties}{len(entry['splits'])} splits"
        )
        texts = entry["texts"]
        if texts is not None:
            console.print(
                f"T=0 texts equal to the server's own without drafts: {texts['equal']} of "
                f"{found['prompts']}, {len(texts['ties'])} fp32 ties"
            )

    clock = found["temperatures"][0]["clock"]
    if clock and clock["note"]:
        console.print(clock["note"])


def _rows(entry: dict[str, Any]) -> list[tuple[str, ...]]:
    """A temperature's rows: counts that must be equal, or within z of what is expected."""
    counted, expected, drawn = entry["counted"], entry["expected"], entry["drafts"] == "sampled"

    def number(value: float) -> str:
        return f"{value:.1f}" if drawn else str(value)

    def z(i: int) -> str:
        value = entry["z"][i] if drawn else None
        return "" if value is None else f"{value:+.2f}"

    how = f", {entry['drafts']}" if entry["temperature"] > 0 else ""
    rounds = f"T={entry['temperature']:g} rounds{how}"
    drafts, drafted = number(expected["drafts"]), number(expected["drafted"])
    verdict = "yes" if entry["holds"] else "NO"
    rows: list[tuple[str, ...]] = [
        (rounds, str(counted["drafts"]), drafts, str(entry["cut"]), z(0), verdict),
        ("tokens drafted", str(counted["drafted"]), drafted, "", "", ""),
    ]
    for j, mean in enumerate(expected["accepted"]):
        accepted = counted["accepted"][j] if j < len(counted["accepted"]) else 0
        past = "" if drawn else str(entry["cut_accepted"][j])
        rows.append((f"accepted at {j}", str(accepted), number(mean), past, z(j + 1), ""))
    if drawn:  # the counts do not say at which depths
        rows.append(("accepted past the end", "", "", str(entry["past_end"]), "", ""))
    return rows
