"""draftsmith sample: prompts answered by the target here or by a server, or answers imported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from draftsmith.drafters.errors import UserError
from draftsmith.recipes.options import (
    AnyTarget,
    Seed,
    Temperature,
    Template,
    TopK,
    TopP,
    key_values,
)

commands = typer.Typer()


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
        str | None, typer.Option(help="The column that asks; default: found, and told.")
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
    from draftsmith.drafters.sampling import Sampler
    from draftsmith.drafters.target.target import Target
    from draftsmith.recipes import show as shown
    from draftsmith.train.data.endpoint import Endpoint, identify
    from draftsmith.train.data.prompts import product_prompts
    from draftsmith.train.data.sources import Reading, read_source, with_template
    from draftsmith.train.processes import check_device_map, launched
    from draftsmith.train.samples import store
    from draftsmith.train.samples.generate import generate
    from draftsmith.train.samples.importing import import_answers, import_given

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
        column=column,
        given=given,
        prefix=continue_,
        use="train",
        template=key_values(template or []),
    )
    if show:
        shown.show(folder, target, reading, max_new_tokens)
        return
    lines: list[str] = []  # told once nothing more can be refused, so that a refusal is one line
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
                pass  # one that cannot be written, or holds other files, is told before any loading
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
