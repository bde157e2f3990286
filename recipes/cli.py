"""The front door: every `draftsmith` command, from quickstart to serve-check.

A user's mistake is one line on stderr and exit code 2, before any compute is spent.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from draftsmith.drafters.errors import UserError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Trains drafters for speculative decoding on a target's own answers.",
)

Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopK = Annotated[int, typer.Option(help="0 switches top-k off.")]
TopP = Annotated[float, typer.Option(help="1 switches top-p off.")]
SUITE = "A JSON/JSONL file, a folder of them, or a data set on the hub; default: our own."
Seed = Annotated[int, typer.Option(help="Keys every draw.")]


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


@app.command(
    epilog="Example: draftsmith sample samples/smol --prompts chats.jsonl --max-new-tokens 256; "
    "look at it: draftsmith sample samples/smol --show; by several GPUs: accelerate launch "
    "--no_python draftsmith sample samples/smol"
)
def sample(
    folder: Annotated[
        Path, typer.Argument(help="Samples folder to make or go on with; --show: or a file.")
    ],
    target: Annotated[str, typer.Option(help="Hub id, folder, GGUF file or smollm2.")] = "smollm2",
    device_map: Annotated[
        str | None, typer.Option(help="auto: spread the target over all GPUs.")
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(help="A file, a folder, a data set on the hub, or a mix (YAML) of them."),
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="The column that asks; default: found, and told.")
    ] = None,
    template: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE for the chat template, e.g. enable_thinking=false."),
    ] = None,
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
    concurrency: Annotated[int, typer.Option(min=1, help="With --server: requests at a time.")] = 8,
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
    from draftsmith.drafters.sampling import Sampler
    from draftsmith.recipes.sample import Request
    from draftsmith.recipes.sample import sample as run
    from draftsmith.recipes.show import show as display

    request = Request(
        folder, target, device_map, prompts, column, template or [], continue_, given, answers,
        foreign, server, model, concurrency, Sampler(temperature, top_k, top_p), max_new_tokens,
        batch_size, seed,
    )  # fmt: skip
    (display if show else run)(request)


@app.command(
    "self-prompt",
    epilog="Example: draftsmith self-prompt own.jsonl --count 2000; then: draftsmith sample "
    "samples/own --prompts own.jsonl",
)
def self_prompt(
    file: Annotated[Path, typer.Argument(help="JSONL file of prompts to make.")],
    target: Annotated[str, typer.Option(help="Hub id, folder, GGUF file or smollm2.")] = "smollm2",
    count: Annotated[int, typer.Option(min=1, help="Questions written; fewer are kept.")] = 1000,
    system: Annotated[str | None, typer.Option(help="A system prompt that sets the topic.")] = None,
    template: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for the chat template.")
    ] = None,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of each question.")] = 128,
    languages: Annotated[str, typer.Option(help="Keep these only, e.g. en,de; empty: all.")] = "",
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    seed: Seed = 0,
) -> None:
    """Lets the target write its own prompts, from its chat template's user turn."""
    from draftsmith.drafters.sampling import Sampler
    from draftsmith.drafters.target import Target
    from draftsmith.recipes.sample import settings
    from draftsmith.train.language import check_languages
    from draftsmith.train.selfprompt import write_prompts

    sampler, given = Sampler(temperature, top_k, top_p), settings(template or [])
    kept = [code.strip() for code in languages.split(",") if code.strip()]
    check_languages(kept)
    if file.exists():
        raise UserError(f"{file}: exists already; name another file, or remove it")
    written = write_prompts(
        file, Target.load(target), count, sampler, max_new_tokens=max_new_tokens, system=system,
        template=given, seed=seed, batch_size=batch_size, languages=kept,
    )  # fmt: skip
    print(f"{file}: {written}")


@app.command(epilog="Example: draftsmith plan smol-eagle3 steps=2000 rows=4")
def plan(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or a shipped recipe's name.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ..")] = None,
) -> None:
    """What a recipe will take: parameters, memory, disk, tokens, time; from configs alone."""
    from draftsmith.train.plan import plan as make
    from draftsmith.train.plan import table
    from draftsmith.train.recipe import load

    made = make(load(recipe, overrides or []))
    shown = Table(title=f"{recipe} on {made.device}", title_justify="left")
    for name in ("", "part", "figure"):
        shown.add_column(name, justify="right" if name == "figure" else "left")
    for row in table(made):
        shown.add_row(*row)
    Console().print(shown)


@app.command(
    epilog="Example: draftsmith train smol-eagle3 samples=samples/smol steps=500; with several "
    "processes: accelerate launch -m draftsmith.train smol-eagle3 samples=samples/smol"
)
def train(
    recipe: Annotated[str, typer.Argument(help="A recipe file, or a shipped recipe's name.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value ..")] = None,
) -> None:
    """Trains a drafter; a run that was stopped goes on where its last checkpoint is."""
    from draftsmith.train.__main__ import run

    raise typer.Exit(run(recipe, overrides or []))


@app.command(
    "eval", epilog="Example: draftsmith eval runs/smol-eagle3/best --k 4 --output reports/eagle3"
)
def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint folder, an exported or published drafter, or ngram.")
    ],
    target: Annotated[
        str | None, typer.Option(help="Default: the one the drafter was made for.")
    ] = None,
    prompts: Annotated[str | None, typer.Option(help=SUITE)] = None,
    limit: Annotated[int, typer.Option(min=1, help="Use at most this many prompts.")] = 16,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    k: Annotated[int, typer.Option(help="Draft length; of a tree its depth.")] = 4,
    tree: Annotated[
        int | None, typer.Option(help="Draft a dynamic tree of at most this many tokens.")
    ] = None,
    branch: Annotated[int, typer.Option(help="With --tree: nodes expanded at each depth.")] = 10,
    static: Annotated[
        bool,
        typer.Option("--static", help="With --tree: one shape, the best on the run's held-out."),
    ] = False,
    block: Annotated[
        bool, typer.Option("--block", help="Judge sampled chains by block verification.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option()] = 64,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends a text.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for report.json.")] = None,
    seed: Seed = 0,
) -> None:
    """Decodes prompts with a drafter: acceptance by replay and decode, parity, speed."""
    from draftsmith.drafters.sampling import Sampler
    from draftsmith.recipes.evaluate import Settings, policy
    from draftsmith.recipes.evaluate import evaluate as run

    sampler = Sampler(temperature, top_k, top_p)
    drafting = policy(k, tree, branch, block, static)
    settings = Settings(
        checkpoint, target, prompts, limit, sampler, drafting, max_new_tokens, stop or [], seed,
        static,
    )  # fmt: skip
    if not run(settings, output):
        print("error: decoder and replay disagree; this is a bug in draftsmith", file=sys.stderr)
        raise typer.Exit(1)


@app.command(epilog="Example: draftsmith report runs/smol-eagle3 --limit 32 --max-new-tokens 128")
def report(
    run: Annotated[Path, typer.Argument(help="A run's folder, as `draftsmith train` made it.")],
    target: Annotated[str | None, typer.Option(help="Default: the run's own.")] = None,
    prompts: Annotated[str | None, typer.Option(help=SUITE)] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many, from all domains.")] = 32,
    decode_limit: Annotated[int, typer.Option(min=1, help="How many of them to decode.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 128,
    k: Annotated[int | None, typer.Option(min=1, help="Longest draft; default: the run's.")] = None,
    seed: Seed = 0,
) -> None:
    """Replays every checkpoint of a run, decodes the best one, writes RUN/report."""
    from draftsmith.recipes.report import Settings
    from draftsmith.recipes.report import report as make

    found = make(run, Settings(target, prompts, limit, decode_limit, max_new_tokens, k, seed))
    for name, speed in found["speed"].items():
        print(f"{name}: {speed['verdict']}")
    print(f"written: {run / 'report'}/report.html, report.md, report.json")
    if not all(decoded["parity"]["holds"] for decoded in found["decode"].values()):
        print("error: decoder and replay disagree; this is a bug in draftsmith", file=sys.stderr)
        raise typer.Exit(1)


@app.command(epilog="Example: draftsmith compare runs/smol-eagle3 runs/smol-small ngram")
def compare(
    drafters: Annotated[list[str], typer.Argument(help="Runs' folders, checkpoints, or ngram.")],
    target: Annotated[str | None, typer.Option(help="Default: the drafters' own.")] = None,
    prompts: Annotated[str | None, typer.Option(help=SUITE)] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many, from all domains.")] = 32,
    decode_limit: Annotated[int, typer.Option(min=1, help="How many of them to decode.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 96,
    k: Annotated[int, typer.Option(min=1, help="Longest draft.")] = 4,
    output: Annotated[Path, typer.Option(help="Folder for the comparison.")] = Path("compare"),
    seed: Seed = 0,
) -> None:
    """Drafters of one target side by side: acceptance, cost, speed, and what each one lacks."""
    from draftsmith.recipes.compare import Settings
    from draftsmith.recipes.compare import compare as run
    from draftsmith.recipes.compare_page import tables

    settings = Settings(target, prompts, limit, decode_limit, max_new_tokens, k, seed)
    found = run(drafters, settings, output)
    for table in tables(found):
        Console().print(table)
    print(f"written: {output}/compare.html, compare.md, compare.json")
    at = [here for drafter in found["drafters"].values() for here in drafter["at"].values()]
    if not all(here["parity"]["holds"] for here in at):
        print("error: decoder and replay disagree; this is a bug in draftsmith", file=sys.stderr)
        raise typer.Exit(1)


@app.command(epilog="Example: draftsmith certify smollm2 runs/smol-eagle3/best --output cert.json")
def certify(
    target: Annotated[
        str, typer.Argument(help="Hub id, folder, GGUF file or smollm2.")
    ] = "smollm2",
    checkpoint: Annotated[
        Path | None, typer.Argument(help="A checkpoint folder; default: untrained drafters.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=8)] = 20,
    output: Annotated[Path | None, typer.Option(help="File for the certificate (JSON).")] = None,
) -> None:
    """Checks that decoding with a drafter writes what the target alone would write."""
    from draftsmith.recipes.certify import certify as run

    if not run(target, checkpoint, max_new_tokens, output):
        raise typer.Exit(1)


@app.command(
    epilog="Example: draftsmith bench smollm2 ngram runs/smol-small/best --k 2,4; "
    "without weights: draftsmith bench --shape llama-8b --alpha 0.7 --batch 1,4,16"
)
def bench(
    target: Annotated[
        str, typer.Argument(help="Hub id, folder, GGUF file or smollm2.")
    ] = "smollm2",
    drafters: Annotated[
        list[str] | None, typer.Argument(help="Checkpoint folders, or ngram (the default).")
    ] = None,
    k: Annotated[str, typer.Option(help="Draft lengths of chains; empty for none.")] = "2,4,6",
    tree: Annotated[
        str, typer.Option(help="Node budgets of trees, as deep as the longest k.")
    ] = "",
    batch: Annotated[str, typer.Option(help="Rows decoded at once.")] = "1",
    temperature: Annotated[str, typer.Option(help="0 is greedy.")] = "0",
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    prompts: Annotated[str | None, typer.Option(help=SUITE)] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many, from all domains.")] = 16,
    shape: Annotated[
        str | None, typer.Option(help="SYNTHETIC: a random target of this shape, e.g. llama-8b.")
    ] = None,
    alpha: Annotated[float, typer.Option(help="With --shape: the chance of acceptance.")] = 0.7,
    output: Annotated[Path, typer.Option(help="Folder for bench.json and .md.")] = Path("bench"),
    seed: Seed = 0,
) -> None:
    """Times speculation against the loop without it; goes on where it was stopped."""
    from draftsmith.recipes.bench import Request
    from draftsmith.recipes.bench import bench as run

    request = Request(
        target, drafters or [], _numbers("--k", k, int), _numbers("--tree", tree, int),
        _numbers("--batch", batch, int), _numbers("--temperature", temperature, float),
        max_new_tokens, prompts, limit, shape, alpha, output, seed,
    )  # fmt: skip
    run(request)


@app.command(
    epilog="Example: draftsmith export runs/smol-eagle3/best --to vllm --output exports/smol-vllm; "
    "for llama.cpp: draftsmith export runs/smol-eagle3/best --to gguf"
)
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    to: Annotated[
        str, typer.Option(help="vllm, sglang, tensorrt-llm, gguf (llama.cpp) or transformers.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="Folder to make; default: exports/RUN-SERVER.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Default: the one the drafter was made for.")
    ] = None,
    k: Annotated[int | None, typer.Option(min=1, help="Draft length; default: the run's.")] = None,
    length: Annotated[
        int | None, typer.Option(help="Longest text to serve; default: the target's positions.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    target_gguf: Annotated[
        Path | None, typer.Option(help="gguf: the target's GGUF, whose tokenizer is copied.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="vllm: EAGLE-3 in its original layout.")
    ] = False,
) -> None:
    """Writes a drafter as a server loads it, reads it back, and says how to serve it."""
    from draftsmith.recipes.export import Request, export_checkpoint

    asked = Request(checkpoint, to, output, target, k, length, dtype, target_gguf, plain)
    folder, command = export_checkpoint(asked)
    print(
        f"written and read back: {folder} (card: README.md, card.json)\nserve it with:\n{command}"
    )


@app.command(
    "serve-check",
    epilog="Example: draftsmith serve-check exports/eagle3-vllm --server vllm; a running one: "
    "--server http://127.0.0.1:8000",
)
def serve_check(
    export: Annotated[Path, typer.Argument(help="A folder that `draftsmith export` wrote.")],
    server: Annotated[str, typer.Option(help="vllm, llama.cpp, or a running server's URL.")],
    target: Annotated[
        str | None, typer.Option(help="Default: the one the drafter was made for.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Default: the one that the export's card names.")
    ] = None,
    prompts: Annotated[str | None, typer.Option(help=SUITE)] = None,
    limit: Annotated[int, typer.Option(min=1, help="Use at most this many prompts.")] = 8,
    k: Annotated[int | None, typer.Option(min=1, help="Default: the export's own.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 48,
    output: Annotated[Path | None, typer.Option(help="File for the report (JSON).")] = None,
    seed: Seed = 0,
) -> None:
    """Serves an export for real: the server's own counters beside replay of what it wrote."""
    from draftsmith.recipes.serve_check import Settings
    from draftsmith.recipes.serve_check import serve_check as run

    settings = Settings(
        export, server, target, checkpoint, prompts, limit, k, max_new_tokens, seed
    )  # fmt: skip
    if not run(settings, output):
        print("error: server and replay disagree; the export serves another drafter than was "
              "trained, or the server has a bug", file=sys.stderr)  # fmt: skip
        raise typer.Exit(1)


def _numbers(option: str, text: str, kind: type) -> list[Any]:
    """The numbers of "1,4,16", each once."""
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise UserError(f"{option}: {text!r} is no list of numbers; write e.g. 1,4") from None


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
