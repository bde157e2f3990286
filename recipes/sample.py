"""`draftsmith sample`: prompts answered by the target here or by a server, or answers imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target import Target
from draftsmith.train import storage
from draftsmith.train.endpoint import Endpoint, identify
from draftsmith.train.imported import import_answers, import_given
from draftsmith.train.prompts import Prompt, product_prompts
from draftsmith.train.ranks import Ranks, check_spread, launched
from draftsmith.train.samples import Samples, generate
from draftsmith.train.sources import Reading, with_template
from draftsmith.train.suites import read_suite


@dataclass(frozen=True)
class Request:
    """What `draftsmith sample` was asked for; the fields are its options."""

    folder: Path
    target: str
    device_map: str | None
    prompts: str | None
    column: str | None
    template: list[str]
    continue_: int | None
    given: bool
    answers: Path | None
    foreign: bool
    server: str | None
    model: str | None
    concurrency: int | None
    sampler: Sampler
    max_new_tokens: int
    batch_size: int
    seed: int

    def check(self) -> None:
        """Raises UserError for options that do not go together."""
        if self.foreign and not (self.answers or self.server):
            raise UserError("--foreign: goes with --import or --server; else answers are its own")
        if self.answers is not None:
            for option, value in (
                ("--prompts", self.prompts),
                ("--column", self.column),
                ("--template", self.template),
                ("--server", self.server),
            ):
                if value:
                    raise UserError(f"--import: takes no {option}; its rows hold the prompts")
            if not self.answers.is_file():
                raise UserError(f"{self.answers}: no such file; --import takes a JSONL file")
        if (self.given or self.continue_) and not self.prompts:
            raise UserError("--given, --continue: name the conversations or texts by --prompts")
        if self.column and not self.prompts:
            raise UserError("--column: is one of --prompts; draftsmith's own have none to choose")
        if self.given and (self.continue_ or self.server or self.answers):
            raise UserError("--given: nothing is sampled; leave --continue, --server and --import")
        if self.model and not self.server:
            raise UserError("--model: goes with --server; the target here is --target")
        if self.concurrency and not self.server:
            raise UserError("--concurrency: goes with --server; the target here has --batch-size")

    def read(self, tell: Callable[[str], None]) -> list[Prompt]:
        """The prompts asked for; draftsmith's own where none are named."""
        template = settings(self.template)
        if not self.prompts:
            return [with_template(prompt, template) for prompt in product_prompts("train")]
        reading = Reading(
            column=self.column,
            given=self.given,
            prefix=self.continue_,
            use="train",
            template=template,
        )
        return read_suite(self.prompts, reading, tell)


def settings(pairs: list[str]) -> dict[str, Any]:
    """KEY=VALUE pairs for the chat template, values as YAML. Raises UserError."""
    out = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        try:
            out[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            equals = ""
        if not equals or not key.isidentifier():
            raise UserError(f"--template: {pair} is not KEY=VALUE, e.g. enable_thinking=false")
    return out


def sample(request: Request) -> None:
    """Makes the samples folder and prints what it holds. Raises UserError."""
    request.check()
    lines: list[str] = []  # told once nothing more can be refused, so that a refusal is one line
    prompts = None if request.answers else request.read(lines.append)
    if request.server:
        identify(request.server, request.model)
    with launched() as ranks:
        if ranks.count > 1 and (request.given or request.server or request.answers):
            raise UserError(
                "launch: several processes share what the target here answers; --server, --import "
                "and --given are for one"
            )
        check_spread(request.device_map)
        if ranks.main:
            with storage.claimed(request.folder):
                pass  # one that cannot be written, or holds other files, is told before any loading
        device = ranks.device if ranks.count > 1 else None
        target = Target.load(request.target, device, spread=request.device_map)
        made = _made(request, target, prompts, lines, ranks)
    if not ranks.main:
        return
    tokens = int(made.token_counts().sum())
    whose = "given" if made.manifest["origin"] == "given" else f"of {request.target}"
    print(f"{request.folder}: {len(made)} answers, {tokens:,} tokens {whose} at {request.sampler}")


def _made(
    request: Request,
    target: Target,
    prompts: list[Prompt] | None,
    lines: list[str],
    ranks: Ranks,
) -> Samples:
    folder, sampler = request.folder, request.sampler
    if prompts is None:
        assert request.answers is not None
        return import_answers(request.answers, target, sampler, folder, foreign=request.foreign)
    if request.given:
        made = import_given(prompts, target, sampler, folder, lines.append)
        print(*lines, sep="\n", file=sys.stderr)
        return made
    server = None
    if request.server:
        server = Endpoint.connect(request.server, target, request.model, request.concurrency or 8)
        lines.append(str(server))
    return generate(
        target, prompts, sampler, request.max_new_tokens, folder, seed=request.seed,
        batch_size=request.batch_size, server=server, foreign=request.foreign,
        about=lines, ranks=ranks,
    )  # fmt: skip
