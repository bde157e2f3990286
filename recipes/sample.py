"""draftsmith sample: prompts answered by the target here or by a server, answers imported, samples
shown."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import transformers
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.source import resolve
from draftsmith.drafters.target.target import Target
from draftsmith.recipes.options import (
    AnyTarget,
    Seed,
    Temperature,
    Template,
    TopK,
    TopP,
    key_values,
)
from draftsmith.train.data.chat_template import encode_fitting
from draftsmith.train.data.endpoint import Endpoint, identify
from draftsmith.train.data.masks import given_rows
from draftsmith.train.data.prompts import Prompt, product_prompts
from draftsmith.train.data.sources import Reading, read_source, with_template
from draftsmith.train.processes import check_device_map, launched
from draftsmith.train.samples import store
from draftsmith.train.samples.generate import generate
from draftsmith.train.samples.importing import import_answers, import_given
from draftsmith.train.samples.samples import Sample, Samples

commands = typer.Typer()

CONVERSATIONS = 4  # printed, spread over the whole
LEARNED, READ, END = "bold green", "dim", "bold magenta"


@commands.command(
    epilog="Example: draftsmith sample samples/smol --prompts chats.jsonl --max-new-tokens 256; "
    "look at it: draftsmith sample samples/smol --show; by several GPUs: accelerate launch "
    "--no_python draftsmith sample samples/smol"
)
def sample(
    folder: Annotated[
        Path, typer.Argument(help="Samples folder to make or go on with; --show: or a file.")
    ],
    target: AnyTarget = "smollm2",
    device_map: Annotated[
        str | None, typer.Option(help="auto: spread the target over all GPUs.")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(help="A file, a folder, a data set on the hub, or a mix (YAML) of them."),
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="The column that asks; default: found, and printed.")
    ] = None,
    template: Template = None,
    continue_: Annotated[
        int | None,
        typer.Option("--continue", min=1, help="Let texts be continued after so many tokens."),
    ] = None,
    given: Annotated[
        bool, typer.Option("--given", help="Keep the answers that stand there (foreign text).")
    ] = False,
    answers: Annotated[
        Path | None, typer.Option("--import", help="JSONL of prompt_ids and response_ids.")
    ] = None,
    foreign: Annotated[
        bool, typer.Option("--foreign", help="Take answers that are not the target's own.")
    ] = False,
    server: Annotated[
        str | None, typer.Option(help="URL of an OpenAI-compatible server that answers.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="With --server: its name there.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="With --server: requests at a time; default: 8.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--show", help="Print conversations, coloured by what is learned.")
    ] = False,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of each turn.")] = 192,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    seed: Seed = 0,
) -> None:
    """Lets the target answer prompts, turn by turn; or imports answers; or shows samples."""
    sampler = Sampler(temperature, top_k, top_p)
    options = {
        "--prompts": prompts, "--column": column, "--template": template, "--continue": continue_,
        "--given": given, "--import": answers, "--foreign": foreign, "--server": server,
        "--model": model, "--concurrency": concurrency, "--device-map": device_map,
    }  # fmt: skip
    asked = {name for name, value in options.items() if value}
    if show:
        _check_shown(asked, stored=(folder / store.MANIFEST).is_file())
    else:
        _check(asked)
    if answers and not answers.is_file():
        raise UserError(f"{answers}: no such file; --import takes a JSONL file")
    reading = Reading(
        column=column, given=given, prefix=continue_, use="train",
        template=key_values(template or []),
    )  # fmt: skip
    if show:
        print_samples(folder, target, reading, max_new_tokens)
        return
    lines: list[str] = []  # printed once nothing more can be refused: a refusal is one line
    chosen = []
    if prompts:
        chosen = read_source(prompts, reading, lines.append)
    elif not answers:
        chosen = [with_template(p, reading.template) for p in product_prompts("train")]
    if server:
        identify(server, model)
    with launched() as processes:
        if processes.count > 1 and (given or server or answers):
            raise UserError(
                "launch: several processes share what the target here answers; --server, --import "
                "and --given are for one"
            )
        check_device_map(device_map)
        if processes.main:
            with store.claimed(folder):
                pass  # refuses, before any loading, one that cannot be written or holds other files
        device = processes.device if processes.count > 1 else None
        loaded = Target.load(target, device, device_map=device_map)
        if answers:
            made = import_answers(answers, loaded, sampler, folder, foreign=foreign)
        elif given:
            made = import_given(chosen, loaded, sampler, folder, lines.append)
            print(*lines, sep="\n", file=sys.stderr)
        else:
            endpoint = None
            if server:
                endpoint = Endpoint.connect(server, loaded, model, concurrency or 8)
                lines.append(str(endpoint))
            made = generate(
                loaded, chosen, sampler, max_new_tokens, folder, seed=seed, batch_size=batch_size,
                server=endpoint, foreign=foreign, notes=lines, processes=processes,
            )  # fmt: skip
    if processes.main:
        tokens = int(made.token_counts().sum())
        whose = "given" if made.manifest["origin"] == "given" else f"of {target}"
        print(f"{folder}: {len(made)} answers, {tokens:,} tokens {whose} at {sampler}")


def _check(asked: set[str]) -> None:
    """Raises UserError for options that do not go together."""
    if "--foreign" in asked and not asked & {"--import", "--server"}:
        raise UserError("--foreign: goes with --import or --server; else answers are its own")
    if "--import" in asked:
        for option in ("--prompts", "--column", "--template", "--server"):
            if option in asked:
                raise UserError(f"--import: takes no {option}; its rows hold the prompts")
    if asked & {"--given", "--continue"} and "--prompts" not in asked:
        raise UserError("--given, --continue: name the conversations or texts by --prompts")
    if "--column" in asked and "--prompts" not in asked:
        raise UserError("--column: is one of --prompts; draftsmith's own have none to choose")
    if "--given" in asked and asked & {"--continue", "--server", "--import"}:
        raise UserError("--given: nothing is sampled; leave --continue, --server and --import")
    if "--server" not in asked:
        if "--model" in asked:
            raise UserError("--model: goes with --server; the target here is --target")
        if "--concurrency" in asked:
            raise UserError("--concurrency: goes with --server; the target here has --batch-size")


def _check_shown(asked: set[str], stored: bool) -> None:
    """Raises UserError for options that would change nothing of what is shown.

    stored: samples, which are shown as they are; else a file of prompts, as it would be read.
    """
    read = set() if stored else {"--column", "--template", "--given", "--continue"}
    for option in sorted(asked - read):
        raise UserError(f"--show: takes the folder or file itself; leave {option} out")
    if not stored:
        _check(asked | {"--prompts"})


# ---------------------------------------------------------------- --show


def print_samples(path: Path, target: str, reading: Reading, max_new_tokens: int) -> None:
    """Prints a samples folder, or what a file of prompts would become: each prompt as it is asked,
    or with reading.given what would be learned from its answers. Raises UserError."""
    console = Console()
    samples: Samples | list[Sample]
    if (path / store.MANIFEST).is_file():
        samples, spec = _stored(path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(resolve(spec, weights=False).path)
    else:
        prompts = read_source(str(path), reading, console.print)
        loaded = Target.load(target)
        samples = _unanswered(prompts, loaded, max_new_tokens, reading.given)
        tokenizer = loaded.tokenizer
    step = max(1, len(samples) // CONVERSATIONS)
    for i in range(0, min(len(samples), step * CONVERSATIONS), step):
        console.rule(f"{i}: {samples[i].domain}, {samples[i].finish or 'asked'}", align="left")
        console.print(coloured(samples[i], tokenizer))
    console.print(counts(samples))


def _stored(folder: Path) -> tuple[Samples, str]:
    """A finished samples folder, without its target, and the target's name."""
    manifest = store.read_manifest(folder)
    if manifest["state"] != "complete":
        raise UserError(f"samples {folder}: are still being written; run it again to finish it")
    rows = store.load(folder / store.ROWS)
    return Samples(folder, manifest, rows), manifest["target"]["spec"]


def _unanswered(
    prompts: list[Prompt], target: Target, max_new_tokens: int, given: bool
) -> list[Sample]:
    """A file's conversations, as samples that nobody has answered yet; given: as they stand."""
    if given:
        rows = given_rows(prompts, target, Console().print)
        return [Sample(*(row[name] for name in store.COLUMNS)) for row in rows]
    encoded = encode_fitting(prompts, target, max_new_tokens)
    return [
        Sample(ids, [False] * len(ids), "", p.domain, p.key)
        for p, ids in zip(prompts, encoded, strict=True)
        if ids
    ]


def coloured(sample: Sample, tokenizer: Any) -> Text:
    """A conversation: what is learned from in green, its end token marked, the rest dim."""
    out = Text()
    last = 0
    for start, end in sample.spans:
        out.append(_decoded(tokenizer, sample.ids[last:start]), READ)
        out.append(_decoded(tokenizer, sample.ids[start : end - 1]), LEARNED)
        token = _decoded(tokenizer, sample.ids[end - 1 : end])
        special = sample.ids[end - 1] in tokenizer.all_special_ids
        out.append(token, END if special else LEARNED)
        last = end
    out.append(_decoded(tokenizer, sample.ids[last:]), READ)
    return out


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def counts(samples: Samples | list[Sample]) -> Table:
    """Per domain: conversations, turns learned from, tokens read and learned, how they end."""
    rows: dict[str, Counter[str]] = {}
    ends: Counter[str] = Counter()
    for i in range(len(samples)):
        sample = samples[i]
        for name in (sample.domain, "all"):
            rows.setdefault(name, Counter()).update(
                conversations=1,
                turns=len(sample.spans),
                tokens=len(sample.ids),
                learned=sum(sample.made),
            )
        ends[sample.finish] += 1
    out = Table(title="green is learned from", title_justify="left")
    out.caption = ", ".join(f"{count} end by {why or 'a question'}" for why, count in ends.items())
    for column in ("domain", "conversations", "turns", "tokens", "learned from"):
        out.add_column(column, justify="left" if column == "domain" else "right")
    rows["all"] = rows.pop("all", Counter())
    for name, row in rows.items():
        out.add_row(name, *(f"{row[c]:,}" for c in ("conversations", "turns", "tokens", "learned")))
    return out
