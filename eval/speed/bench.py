"""The decoder's speed against the loop without drafting, by draft shape, batch and temperature.

A cell is one (drafter, policy, batch, temperature). Decode figures leave prefill out, end-to-end
ones hold it. Drafter and baseline take turns within a cell, batch by batch, and a cell whose turns
differ among themselves is no result (clocks.py). Each cell decodes a few tokens first (all of them
where graphs are captured), which no figure counts. Finished cells are kept in bench.json, so that a
stopped bench resumes.

roofline_share (Williams et al. 2009, its bandwidth-bound side): a step at a small batch must read
every weight and every committed key and value once; nothing else takes comparable time. Its bytes
at the bandwidth of a plain copy are the time it could take.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.drafters.base import Drafter, Policy
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance.intervals import counted_tau
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.speed import synthetic
from draftsmith.eval.speed.clocks import Steadiness, Turn, in_turns, spread_of_rounds
from draftsmith.eval.speed.speed_model import typical

MOST_ROWS = 64
_COPIES = 5


@dataclass(frozen=True)
class BenchPrompt:
    """One prompt: token ids, and the domain it belongs to (code, math, chat, ..)."""

    ids: list[int]
    domain: str


@dataclass(frozen=True)
class Cell:
    """drafter "baseline" (policy None) is the loop with drafting off."""

    drafter: str
    policy: Policy | None
    batch: int
    temperature: float

    @property
    def key(self) -> str:
        how = "" if self.policy is None else f"{self.policy}, "
        return f"{self.drafter}: {how}batch {self.batch}, T={self.temperature:g}"


def grid(
    drafters: dict[str, Drafter],
    policies: Sequence[Policy],
    batches: Sequence[int],
    temperatures: Sequence[float],
) -> list[Cell]:
    """Every cell, each baseline before what is compared with it.

    Raises UserError for a policy that a drafter cannot follow and a batch outside 1..64.
    """
    for batch in batches:
        if not 1 <= batch <= MOST_ROWS:
            raise UserError(f"--batch: {batch} is not in 1..{MOST_ROWS}")
    for drafter in drafters.values():
        for policy in policies:
            drafter.check(policy)
    out = []
    for batch in batches:
        for temperature in temperatures:
            out.append(Cell("baseline", None, batch, temperature))
            out += [Cell(d, p, batch, temperature) for d in drafters for p in policies]
    return out


def check_memory(target: Target, cells: Sequence[Cell], longest: int) -> None:
    """Raises UserError where a cell's cache and logits exceed the device's free memory.

    longest: tokens of the longest text.
    """
    for cell in cells:
        slots, nodes = (cell.policy.slots, cell.policy.nodes) if cell.policy else (1, 1)
        target.check_memory(cell.batch, longest + 2 * slots, nodes, "--batch")


# ---------------------------------------------------------------- one cell


def full_batches(prompts: Sequence[BenchPrompt], size: int) -> list[list[BenchPrompt]]:
    """Prompts in full batches; a rest is left out, too few are repeated."""
    if len(prompts) < size:
        return [[prompts[i % len(prompts)] for i in range(size)]]
    return [list(prompts[i : i + size]) for i in range(0, len(prompts) - size + 1, size)]


def measure(
    decoder: Decoder,
    prompts: Sequence[BenchPrompt],
    cell: Cell,
    max_new_tokens: int,
    seed: int = 0,
    baseline: Decoder | None = None,
) -> dict[str, Any]:
    """Decodes the prompts in full batches of the cell's size and says what it took.

    baseline: the loop without drafting, which takes turns with the decoder; "beside" holds what it
    took. One batch alone is decoded twice: a single turn says nothing of the machine.
    """
    batches = full_batches(prompts, cell.batch)
    batches *= 2 if len(batches) == 1 else 1
    decoders = [decoder] if baseline is None else [decoder, baseline]
    turns = in_turns(
        decoders, [[prompt.ids for prompt in batch] for batch in batches],
        Sampler(cell.temperature), max_new_tokens, seed=seed,
    )  # fmt: skip
    domains = [prompt.domain for batch in batches for prompt in batch]
    found, *others = (_summary(side, domains) for side in turns)
    own, *base = (spread_of_rounds([turn.rounds for turn in side]) for side in turns)
    steady = Steadiness(len(batches), base[0], own) if base else Steadiness(len(batches), own)
    return found | {"clock": steady.report()} | ({"beside": others[0]} if others else {})


def _summary(turns: Sequence[Turn], domains: list[str]) -> dict[str, Any]:
    texts = [text for turn in turns for text in turn.texts]
    rounds = [clock for turn in turns for clock in turn.rounds]
    wall = sum(turn.wall for turn in turns)
    if not rounds:
        raise UserError("--max-new-tokens: no text outlived its first token; use more, or others")
    parts = {part: sum(getattr(r, part) for r in rounds) for part in ("draft", "verify", "host")}
    decode = sum(parts.values())
    tokens = sum(r.tokens for r in rounds)
    context = [len(t.prompt) + i for t in texts for i in range(len(t.tokens))]
    return {
        "texts": len(texts),
        "rounds": len(rounds),
        "tokens": tokens,
        "tau": counted_tau(texts),
        "tau_by_domain": {
            name: counted_tau([t for t, own in zip(texts, domains, strict=True) if own == name])
            for name in sorted(set(domains))
        },
        "depths": dict(sorted(Counter(str(r.proposed) for t in texts for r in t.rounds).items())),
        "tokens_per_s": tokens / decode,
        # Prefill yields each text's first token.
        "end_to_end_tokens_per_s": (tokens + len(texts)) / wall,
        "prefill_s": sum(turn.prefill for turn in turns),
        "decode_s": decode,
        "wall_s": wall,
        "share": {part: seconds / decode for part, seconds in parts.items()},
        "typical_ms": {
            part: 1e3 * typical(rounds, part) for part in ("draft", "verify", "host", "total")
        },
        "mean_context": statistics.fmean(context),
    }


def compare(found: dict[str, Any], base: dict[str, Any], alpha: float | None) -> dict[str, Any]:
    """A cell compared with its baseline. alpha: a synthetic run's, which predicts its tau.

    break_even: the tau at which a round costs as much as the steps it saves. predicted_speedup:
    tau over it, from typical single rounds; measured_speedup: all decoded tokens over all
    decode seconds, rows that wait for a batch's last text included.
    """
    even = found["typical_ms"]["total"] / base["typical_ms"]["total"]
    expected = found["tau"]
    if alpha is not None:
        expected = synthetic.expected_over(alpha, found["depths"])
    return {
        "measured_speedup": found["tokens_per_s"] / base["tokens_per_s"],
        "predicted_speedup": expected / even,
        "baseline_tokens_per_s": base["tokens_per_s"],
        "end_to_end_speedup": found["end_to_end_tokens_per_s"] / base["end_to_end_tokens_per_s"],
        "break_even_tau": even,
        "distance": found["tau"] - even,
        "distance_by_domain": {
            name: None if tau is None else tau - even
            for name, tau in found["tau_by_domain"].items()
        },
    }


# ---------------------------------------------------------------- roofline


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written together, of the fastest of some large copies."""
    size = (1 << 30) if device.type == "cuda" else (1 << 27)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    best = float("inf")
    for _ in range(_COPIES + 1):  # the first one also maps the pages
        began = time.perf_counter()
        into.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size / best


def weight_bytes(target: Target) -> int:
    """Bytes of the weights that a step reads: all but an embedding table that is no head too.

    Of a mixture of experts a step reads fewer: there the share is overstated.
    """
    table = target.embedding.weight
    lookup = table.data_ptr() != target.lm_head.weight.data_ptr()
    total = sum(p.numel() * p.element_size() for p in target.hf.parameters())
    return total - lookup * table.numel() * table.element_size()


def roofline_share(
    weights: int, kv: int, rows: int, context: float, seconds: float, rate: float
) -> float:
    """Of `seconds`, the share that reading takes at `rate` bytes per second.

    weights: their bytes; kv: bytes of a cached token, of which each of `rows` has `context`.
    """
    return (weights + kv * rows * context) / rate / seconds


# ---------------------------------------------------------------- the grid


def run(
    target: Target,
    drafters: dict[str, Drafter],
    cells: Sequence[Cell],
    prompts: Sequence[BenchPrompt],
    max_new_tokens: int,
    store: Store,
    *,
    alpha: float | None = None,
    seed: int = 0,
    progress: Callable[[Cell], None] = lambda cell: None,
) -> None:
    """Measures the cells that the store lacks, and those that took no turns (of earlier versions).

    alpha: a synthetic run's chance of acceptance.
    """
    rate = store.once("copy_bytes_per_s", lambda: copy_bandwidth(target.device))
    weights, kv = weight_bytes(target), target.cache_bytes(1, 1, 0)
    for cell in cells:
        if "clock" not in store.cells.get(cell.key, ()):
            decoder: Decoder
            if cell.policy is None:
                decoder = Decoder(target)
            elif alpha is None:
                decoder = Decoder(target, drafters[cell.drafter], cell.policy)
            else:
                decoder = synthetic.CoinDecoder(target, drafters[cell.drafter], cell.policy, alpha)
            baseline = None if cell.policy is None else Decoder(target)
            found = measure(decoder, prompts, cell, max_new_tokens, seed, baseline)
            seconds = found["typical_ms"]["verify"] / 1e3
            context = found["mean_context"]
            found["roofline_share"] = roofline_share(
                weights, kv, cell.batch, context, seconds, rate
            )
            if baseline is not None:
                found |= compare(found, found.pop("beside"), alpha)
            named: dict[str, Any] = {
                "drafter": cell.drafter,
                "policy": None if cell.policy is None else str(cell.policy),
                "batch": cell.batch,
                "temperature": cell.temperature,
                "synthetic": alpha is not None,
            }
            store.add(cell.key, named | found)
        progress(cell)


class Store:
    """bench.json: what the figures depend on, and every finished cell. Rewritten at each."""

    def __init__(self, folder: Path, settings: dict[str, Any], origin: dict[str, Any]) -> None:
        """Raises UserError where the folder holds another bench, or cannot be read or written."""
        self.path = folder / "bench.json"
        self.content: dict[str, Any] = {"settings": settings, **origin, "cells": {}}
        if self.path.is_file():
            self.content = self._stored(settings)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._write()
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be written ({error.strerror}); give another --output"
            ) from None

    def _stored(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The bench that was begun with these settings."""
        try:
            before = json.loads(self.path.read_text())
            stored, _ = before["settings"], before["cells"]
            ours = json.loads(json.dumps(settings))  # the types that JSON has
            other = [key for key in ours | stored if ours.get(key) != stored.get(key)]
        except (ValueError, TypeError, KeyError):
            raise UserError(
                f"{self.path}: cannot be read as a bench; delete it, or give another --output"
            ) from None
        if other:
            raise UserError(
                f"{self.path.parent}: holds another bench (of other {', '.join(other)}); give "
                "another --output"
            )
        return before

    @property
    def cells(self) -> dict[str, Any]:
        return self.content["cells"]

    def once(self, name: str, find: Callable[[], Any]) -> Any:
        """A value that is found once a bench."""
        if name not in self.content:
            self.content[name] = find()
            self._write()
        return self.content[name]

    def add(self, key: str, found: dict[str, Any]) -> None:
        self.cells[key] = found
        self._write()

    def _write(self) -> None:
        scratch = self.path.with_suffix(".tmp")
        scratch.write_text(json.dumps(self.content, indent=1) + "\n")
        os.replace(scratch, self.path)


def device_of(target: Target) -> dict[str, str]:
    """Device and dtype, in words."""
    device = target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "dtype": str(target.dtype).removeprefix("torch.")}
