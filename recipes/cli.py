"""The front door: draftsmith sample | train | eval | report | certify.

A user's mistake is one line on stderr and exit code 2, before any compute is spent.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
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


@app.command(epilog="Example: draftsmith quickstart; run again, it goes on, or decodes again")
def quickstart(
    folder: Annotated[Path, typer.Argument(help="Where everything goes.")] = Path(
        "runs/quickstart"
    ),
) -> None:
    """The whole job small: samples, two drafters, decoding, one table; 15 minutes on 2 cores."""
    from draftsmith.recipes.quickstart import quickstart as run

    raise typer.Exit(run(folder))


@app.command(epilog="Example: draftsmith sample samples/smol --target smollm2 --max-new-tokens 128")
def sample(
    folder: Annotated[Path, typer.Argument(help="Samples folder to make, or to go on with.")],
    target: Annotated[str, typer.Option(help="Hub id, folder, GGUF file or smollm2.")] = "smollm2",
    prompts: Annotated[str | None, typer.Option(help=SUITE)] = None,
    answers: Annotated[
        Path | None, typer.Option("--import", help="JSONL of prompt_ids and response_ids.")
    ] = None,
    foreign: Annotated[
        bool, typer.Option("--foreign", help="With --import: not the target's own text.")
    ] = False,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 192,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    seed: Seed = 0,
) -> None:
    """Lets the target answer prompts, or imports its answers as token ids."""
    from draftsmith.drafters.sampling import Sampler
    from draftsmith.drafters.target import Target
    from draftsmith.train import storage
    from draftsmith.train.prompts import product_prompts
    from draftsmith.train.samples import generate, import_answers
    from draftsmith.train.suites import read_suite

    sampler = Sampler(temperature, top_k, top_p)
    if foreign and answers is None:
        raise UserError("--foreign: goes with --import; generated answers are the target's own")
    asked = None
    if answers is None:
        asked = read_suite(prompts) if prompts else product_prompts("train")
    elif not answers.is_file():
        raise UserError(f"{answers}: no such file; --import takes a JSONL file")
    with storage.claimed(folder):
        pass  # a folder that cannot be written, or holds other files, is told before any loading
    loaded = Target.load(target)
    if asked is None:
        assert answers is not None
        made = import_answers(answers, loaded, sampler, folder, foreign=foreign)
    else:
        made = generate(
            loaded, asked, sampler, max_new_tokens, folder, seed=seed, batch_size=batch_size
        )
    tokens = int(made.token_counts().sum())
    print(f"{folder}: {len(made)} answers, {tokens:,} tokens of {target} at {sampler}")


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
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder, or ngram.")],
    target: Annotated[
        str | None, typer.Option(help="Default: the one the drafter was made for.")
    ] = None,
    prompts: Annotated[str | None, typer.Option(help=SUITE)] = None,
    limit: Annotated[int, typer.Option(min=1, help="Use at most this many prompts.")] = 16,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    k: Annotated[int, typer.Option(help="Draft length.")] = 4,
    max_new_tokens: Annotated[int, typer.Option()] = 64,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends a text.")] = None,
    output: Annotated[Path | None, typer.Option(help="Folder for report.json.")] = None,
    seed: Seed = 0,
) -> None:
    """Decodes prompts with a drafter: acceptance by replay and decode, parity, speed."""
    import torch

    from draftsmith.drafters import base
    from draftsmith.drafters.base import Policy
    from draftsmith.drafters.sampling import Sampler
    from draftsmith.drafters.target import Target
    from draftsmith.eval.evaluate import evaluate as run
    from draftsmith.train.prompts import encode, product_prompts
    from draftsmith.train.suites import read_suite, spread

    sampler = Sampler(temperature, top_k, top_p)
    Policy(k)
    if max_new_tokens < 1:
        raise UserError(f"--max-new-tokens: {max_new_tokens} leaves nothing to write; use >= 1")
    asked = spread(read_suite(prompts) if prompts else product_prompts("heldout"), limit)
    folder = Path(checkpoint)
    about = None if checkpoint == "ngram" else base.read_config(folder)
    spec = target or (about["target"].get("spec") if about else None) or "smollm2"
    settings = {
        "checkpoint": checkpoint,
        "target": spec,
        "sampler": vars(sampler),
        "k": k,
        "max_new_tokens": max_new_tokens,
        "stop": stop or [],
        "seed": seed,
        "prompts_hash": hashlib.sha256(" ".join(p.key for p in asked).encode()).hexdigest()[:16],
    }
    if output is not None:
        _claim(output, settings)
    loaded = Target.load(spec, dtype=torch.float32)  # parity is defined in fp32
    if about is None:
        ngram = base.family("ngram")
        drafter = ngram.create(loaded, ngram.Config())
    else:
        drafter = base.load(folder, loaded)
    ids = encode(asked, loaded)
    longest = max(map(len, ids))
    if longest + max_new_tokens > loaded.max_positions:
        raise UserError(
            f"--max-new-tokens: {max_new_tokens} after a prompt of {longest} tokens exceed the "
            f"target's {loaded.max_positions} positions; lower it"
        )
    with _DecodeProgress(len(ids)) as progress:
        report = run(
            loaded, drafter, ids, sampler, k, max_new_tokens,
            seed=seed, stop=stop or (), domains=[p.domain for p in asked],
            progress=progress.update,
        )  # fmt: skip
    report["settings"] = settings
    _print(report, Console())
    if output is not None:
        (output / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        print(f"written: {output / 'report.json'}")
    if not report["parity"]["holds"]:
        print("error: decoder and replay disagree; this is a bug in draftsmith", file=sys.stderr)
        raise typer.Exit(1)


@app.command(epilog="Example: draftsmith report runs/smol-eagle3 --limit 32 --max-new-tokens 128")
def report(
    run: Annotated[Path, typer.Argument(help="A run's folder, as `draftsmith train` made it.")],
    target: Annotated[str | None, typer.Option(help="Default: the run's own.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON/JSONL; default: our held-out ones.")
    ] = None,
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
    import torch

    from draftsmith.drafters import base
    from draftsmith.drafters.target import Target
    from draftsmith.eval.certify import Subject, certificate, untouched, untrained
    from draftsmith.eval.certify import certify as run
    from draftsmith.eval.provenance import provenance
    from draftsmith.train.prompts import encode, product_prompts

    if checkpoint is not None:
        base.read_config(checkpoint)
    if output is not None and not output.parent.is_dir():
        raise UserError(f"{output}: no folder {output.parent}; make it, or give another --output")
    loaded = Target.load(target, dtype=torch.float32)  # identity is defined in fp32
    drafters = untrained(loaded)
    if checkpoint is not None:
        drafters = {str(checkpoint): base.load(checkpoint, loaded)}
    room = loaded.max_positions - max_new_tokens
    by_length = {len(ids): ids for ids in encode(product_prompts("heldout"), loaded)}
    prompts = [by_length[n] for n in sorted(by_length) if n <= room][:5]
    if len(prompts) < 5:
        raise UserError(
            f"target {target}: no five prompts fit its {loaded.max_positions} positions; lower "
            "--max-new-tokens"
        )
    subject = Subject(loaded, untouched(loaded), drafters, prompts, max_new_tokens)
    checks = []

    def begin(name: str) -> None:
        print(f"  ..  {name}", end="", file=sys.stderr, flush=True)

    for check in run(subject, begin):
        print("\r\033[K", end="", file=sys.stderr, flush=True)
        verdict = "pass" if check.passed else "FAIL"
        print(f"{verdict}  {check.name}: {check.figure} ({check.seconds:.1f} s)", flush=True)
        checks.append(check)
    failed = sum(not check.passed for check in checks)
    print(f"{len(checks) - failed} of {len(checks)} checks passed")
    if output is not None:
        about = {"target": loaded.identity(), "drafters": list(drafters), **provenance()}
        output.write_text(json.dumps(certificate(checks) | about, indent=1) + "\n")
        print(f"written: {output}")
    if failed:
        raise typer.Exit(1)


def _claim(output: Path, settings: dict[str, Any]) -> None:
    """Makes the report's folder. Raises UserError if it holds another run, or is unwritable."""
    path = output / "report.json"
    if path.is_file():
        try:
            before = json.loads(path.read_text()).get("settings")
        except (json.JSONDecodeError, AttributeError):
            before = None
        if before != settings:
            raise UserError(f"{output}: holds the report of another run; give another --output")
        return
    try:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()):
            raise UserError(f"{output}: not empty, and no report of ours; give another --output")
        (output / ".probe").touch()
        (output / ".probe").unlink()
    except OSError as error:
        raise UserError(
            f"{output}: cannot be written ({error.strerror}); give another --output"
        ) from None


class _DecodeProgress(Progress):
    """Prompts done and new tokens, for the speculative and the baseline pass."""

    def __init__(self, prompts: int) -> None:
        super().__init__(
            TextColumn("{task.description:>12}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} prompts, {task.fields[written]} tokens"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self.prompts = prompts
        self.ids: dict[str, Any] = {}
        self.written: dict[str, int] = {}

    def update(self, what: str, done: int, new: int) -> None:  # type: ignore[override]
        if what not in self.ids:
            self.ids[what] = self.add_task(what, total=self.prompts, written=0)
            self.written[what] = 0
        self.written[what] += new
        super().update(self.ids[what], completed=done, written=self.written[what])


def _print(report: dict[str, Any], console: Console) -> None:
    """The report as one table."""
    replay, decode, parity = report["replay"], report["decode"], report["parity"]

    def number(value: float | None, digits: int = 3) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    sampler = report["sampler"]
    title = (
        f"{report['drafter']['family']} ({report['drafter']['parameters']:,} parameters) for "
        f"{report['target']['spec']}, temperature {sampler['temperature']}, k={report['k']}, "
        f"{report['prompts']} prompts, {decode['tokens']} tokens"
    )
    table = Table(title=title, title_justify="left")
    for name in ("", "replay", "decode", "z"):
        table.add_column(name, justify="left" if not name else "right")
    low, high = replay["tau_ci"]
    table.add_row(
        "tau",
        f"{number(replay['tau'])} [{number(low)}, {number(high)}]",
        number(decode["tau"]),
        "",
    )
    table.add_row(
        "verify passes",
        number(parity["expected"], 2),
        str(decode["passes"]),
        number(parity["z"], 2),
    )
    for j, alpha in enumerate(replay["alpha"]):
        table.add_row(
            f"alpha_{j}",
            number(alpha),
            number(decode["alpha"][j]),
            number(parity["z_per_depth"][j], 2),
        )
    console.print(table)
    _print_domains(report, console)
    by_k = "  ".join(f"{k}: {number(tau)}" for k, tau in replay["tau_by_k"].items())
    console.print(f"tau by k (replay)  {by_k}")
    console.print(
        f"speed  {number(decode['tokens_per_s'], 2)} tokens/s against "
        f"{number(decode['baseline_tokens_per_s'], 2)}: {number(decode['speedup'], 2)}x measured, "
        f"{number(report['predicted_speedup'], 2)}x predicted; a round is "
        f"{number(decode['draft_ms'], 1)} ms draft, {number(decode['verify_ms'], 1)} ms verify, "
        f"{number(decode['host_ms'], 1)} ms host; a baseline step "
        f"{number(decode['baseline_step_ms'], 1)} ms"
    )
    if parity["z_local"] is not None:
        console.print(f"z over single tries  {parity['z_local']:.2f}")
    verdict = "holds" if parity["holds"] else "BROKEN"
    how = "integers equal" if parity["deterministic"] else "|z| < 3.5"
    console.print(f"parity {verdict} ({how}); {len(parity['ties'])} fp32 ties")
    for split in parity["ties"] + parity["splits"]:
        console.print(f"  prompt {split['prompt']}: split at anchor {split['anchor']}, depth "
                      f"{split['depth']}, top-2 gap {split['gap']:.2g}")  # fmt: skip


def _print_domains(report: dict[str, Any], console: Console) -> None:
    """tau and alpha_0 by category of the prompts, texts that repeat themselves apart."""
    rows = dict(report["by_domain"])
    if report["repetitive"]["apart"]["texts"]:
        rows["(repetitive texts)"] = report["repetitive"]["apart"]
        rows["(all others)"] = report["repetitive"]["others"]
    if len(rows) < 2:
        return
    table = Table()
    for name in ("replay by domain", "texts", "tau", "alpha_0"):
        table.add_column(name, justify="left" if name == "replay by domain" else "right")
    for name, row in rows.items():
        tau, alpha = row["tau"], row["alpha"][0]
        ends = "" if tau is None else f" [{row['tau_ci'][0]:.3f}, {row['tau_ci'][1]:.3f}]"
        table.add_row(
            name,
            str(row["texts"]),
            "-" if tau is None else f"{tau:.3f}{ends}",
            "-" if alpha is None else f"{alpha:.3f}",
        )
    console.print(table)


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
