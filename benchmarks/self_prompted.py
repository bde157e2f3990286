"""What training data is worth: the target's own prompts and answers against real and foreign ones.

    DATA=folder python benchmarks/self_prompted.py --runs runs [--foreign chats.jsonl]

One EAGLE-3 head of SmolLM2 per kind of data and seed, all on as many target-made tokens, with the
same recipe and steps, each replayed at T=1 and T=0 on the target's answers to real held-out
prompts:

    real       draftsmith's own prompts, answered by the target
    self       prompts that the target wrote itself (train/samples/self_prompt.py), answered by it
    mixed      half of each
    foreign    the conversations of --foreign with the answers they came with (without: left out)

Data is made first, into RUNS/self-prompted, and goes on where it was stopped; a cell takes about 10
minutes on one core after that. Writes benchmarks/self_prompted/*.json and self_prompted.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from common import HERE, cell, data, markdown, number
from datasets import concatenate_datasets

from draftsmith.drafters import storage
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance.replay import replay
from draftsmith.train import checkpoint, recipe
from draftsmith.train.data.chat_template import encode
from draftsmith.train.data.prompts import Prompt, product_prompts
from draftsmith.train.data.sources import Reading, balanced, read_prompts
from draftsmith.train.learner import Learner
from draftsmith.train.loop import Run
from draftsmith.train.samples import store
from draftsmith.train.samples.generate import generate
from draftsmith.train.samples.importing import import_given
from draftsmith.train.samples.packing import collate
from draftsmith.train.samples.samples import Samples
from draftsmith.train.samples.self_prompt import write_prompts

K, NEW_TOKENS, HELD, LONGEST = 4, 128, 48, 300
FILES = ("spec_bench", "gsm8k", "humaneval", "mbpp")  # held out; none stands in the training data
SEEDS = (0, 1)
KINDS = ("real", "self", "mixed", "foreign")


@cache
def target() -> Target:
    return Target.load("smollm2")


def prompts(kind: str, count: int, folder: Path) -> list[Prompt]:
    """`count` prompts of a kind, fewer where there are not so many."""
    if kind == "real":
        return balanced(product_prompts("train"), count)
    file = folder / "own.jsonl"
    if not file.exists():
        print(write_prompts(file, target(), 3 * count // 2, Sampler(), seed=1), file=sys.stderr)
    return read_prompts(file)[:count]


def samples(kind: str, budget: int, folder: Path, foreign: Path | None) -> Samples:
    """A kind's training data, cut at `budget` target-made tokens."""
    place = folder / f"{kind}-{budget}"
    if (place / store.MANIFEST).exists():
        return Samples.open(place, target(), audit=0)
    if kind == "mixed":
        halves = [samples(of, budget, folder, foreign) for of in ("real", "self")]
        rows = [half._rows.select(range(_reaching(half, budget / 2))) for half in halves]
        return _store(place, concatenate_datasets(rows), halves[0].manifest)
    if kind == "foreign":
        assert foreign is not None
        given = read_prompts(foreign, Reading(given=True))
        whole = import_given(given, target(), Sampler(), folder / "foreign", print)
    else:
        count = -(-budget // (NEW_TOKENS // 2))  # answers are half as long as they may be, or more
        asked = prompts(kind, count, folder)
        whole = generate(target(), asked, Sampler(), NEW_TOKENS, folder / f"{kind}-all")
    return _store(place, whole._rows.select(range(_reaching(whole, budget))), whole.manifest)


def _reaching(whole: Samples, budget: float) -> int:
    """How many of the samples, from the first on, hold `budget` target-made tokens."""
    made = 0
    for n in range(len(whole)):
        made += sum(whole[n].made)
        if made >= budget:
            return n + 1
    sys.exit(f"{whole.folder}: {made:,} tokens made where {budget:,.0f} are asked; lower --budget")


def _store(place: Path, rows: Any, manifest: dict[str, Any]) -> Samples:
    """A samples folder of these rows; manifest: of the samples that they are from."""
    rows = rows.flatten_indices()
    place.mkdir(parents=True)
    store.save(rows, place / store.ROWS)
    made = sum(sum(made) for made in rows["made"])
    changed = {
        "samples": len(rows), "tokens_made": made, "content_hash": store.content_hash(rows)
    }  # fmt: skip
    store.write_manifest(place, manifest | changed)
    return Samples.open(place, target(), audit=0)


@cache
def held(temperature: float, folder: Path) -> list[Batch]:
    """The target's answers to held-out prompts, read with the taps of the head."""
    asked = []
    for name in FILES:
        found = read_prompts(data(f"{name}.jsonl"))
        sizes = map(len, encode(found, target()))
        short = [p.first_turn for p, n in zip(found, sizes, strict=True) if n < LONGEST]
        asked += short[: HELD // len(FILES)]
    found = generate(target(), asked, Sampler(temperature), 96, folder / f"held-t{temperature:g}")
    order = range(len(found))
    rows = [collate(found, [[i] for i in order[at : at + 8]], 1 << 20) for at in order[::8]]
    L = target().num_layers
    return [target().read(batch, [2, L // 2, L - 3]) for batch in rows]


def run(
    kind: str, seed: int, steps: int, budget: int, runs: Path, foreign: Path | None
) -> dict[str, Any]:
    """Trains one head on one kind of data and replays it."""
    folder = runs / "self-prompted"
    texts = samples(kind, budget, folder, foreign)
    keys = {
        "name": f"self-prompted-{kind}-{seed}", "runs": str(runs), "samples": str(texts.folder),
        "steps": steps, "save_every": steps, "seed": seed,
    }  # fmt: skip
    chosen = recipe.load("smol-eagle3", [f"{k}={v}" for k, v in keys.items()])
    with checkpoint.claimed(chosen):
        if code := Run(Learner(chosen, target(), texts, Accelerator())).run():
            sys.exit(code)
    drafter = storage.load(chosen.folder / f"checkpoint-{steps}", target())
    out: dict[str, Any] = {
        "kind": kind,
        "samples": len(texts),
        "tokens_made": texts.manifest["tokens_made"],
        "steps": steps,
    }
    for temperature in (1.0, 0.0):
        found = replay(drafter, held(temperature, folder), K)[K]
        out[f"T={temperature:g}"] = {"tau": found.tau, "tau_ci": list(found.tau_ci)}
    return out


def report(found: Sequence[dict[str, Any]], folder: Path) -> None:
    """One row a kind: tau averaged over seeds, its share of real data's, and of its gain over 1."""
    rows = []
    taus = {
        (kind, t): [c[t]["tau"] for c in found if c["kind"] == kind]
        for kind in KINDS
        for t in ("T=1", "T=0")
    }
    mean = {key: sum(values) / len(values) for key, values in taus.items() if values}
    for kind in KINDS:
        if (kind, "T=1") not in mean:
            continue
        row: list[object] = [kind, len(taus[kind, "T=1"])]
        for t in ("T=1", "T=0"):
            tau, real = mean[kind, t], mean["real", t]
            each = ", ".join(number(one) for one in taus[kind, t])
            row += [
                f"{number(tau)} ({each})", f"{tau / real:.1%}", f"{(tau - 1) / (real - 1):.1%}",
            ]  # fmt: skip
        rows.append(row)
    head = ["data", "seeds"]
    for t in ("T=1", "T=0"):
        head += [f"tau, {t} (each seed)", "of real's", "of real's gain over 1"]
    text = (
        f"# Self-made data\n\nEAGLE-3 of SmolLM2, about {found[0]['tokens_made']:,} target-made "
        f"tokens, {found[0]['steps']} steps, replay at k={K} on the target's answers to {HELD} "
        "real held-out prompts. Made by `benchmarks/self_prompted.py`; one JSON a cell.\n\n"
        + markdown(head, rows)
    )
    (folder / "self_prompted.md").write_text(text)
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--foreign", type=Path, help="conversations with answers of their own")
    parser.add_argument("--budget", type=int, default=30_000, help="target-made tokens")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, default=HERE)
    arguments = parser.parse_args()
    found = []
    for seed in SEEDS:
        for kind in KINDS:
            if kind == "foreign" and arguments.foreign is None:
                continue
            values = cell(
                arguments.output / "self_prompted" / f"{kind}-{seed}.json",
                lambda kind=kind, seed=seed: run(
                    kind, seed, arguments.steps, arguments.budget, arguments.runs, arguments.foreign
                ),
                seed,
            )
            found.append(values)
            report(found, arguments.output)


if __name__ == "__main__":
    main()
