"""The speculative decoder: prefill, then rounds of propose, verify, accept, commit.

The baseline is the same loop with drafting off (drafter None): same cache, same sampler, same stop
handling, the only fair denominator. Output follows the target's distribution exactly at every
temperature; at temperature 0 it is the target's greedy text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter, Policy
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.passes import layers, narrow
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.selftest import capture_problem
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.graphs import Graphs
from draftsmith.eval.decoder.round import Rounds
from draftsmith.eval.decoder.text import Cutter, Round, Text

logger = logging.getLogger(__name__)

_STEP = 1024  # capacities grow in steps, so that a later call finds its graphs again
_KEPT = 2  # batches whose graphs are kept


@dataclass
class Clock:
    """Seconds by part of a round, and how many rounds and tokens they cover (prefill apart).

    draft: the drafter's forwards and its own sampling. verify: the target's forward and head (from
    graphs: accept and commit too). host: the rest of the round's wall time, accept and commit
    among it. width: tokens of a row in the last round's target pass, the root included.
    """

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    host: float = 0.0
    rounds: int = 0
    tokens: int = 0
    width: int = 0

    @property
    def total(self) -> float:
        """Decode seconds, prefill excluded."""
        return self.draft + self.verify + self.host


class Decoder:
    """Decodes batches of prompts with a target and, unless None, a drafter.

    graphs: run rounds as CUDA graphs; None: on a GPU, for batches that the target can be captured
    with. Raises UserError for a policy that the drafter cannot follow.
    """

    rounds_type: type[Rounds] = Rounds

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        policy: Policy | None = None,
        graphs: bool | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.policy = policy or Policy(k=1)
        self.clock = Clock()
        self._cuda = target.device.type == "cuda"
        narrow.prepare(target, drafter)
        if drafter is not None:
            drafter.check(self.policy)
            if not (target.trees or self.policy.is_chain):
                raise UserError(
                    f"{self.policy}: {type(target.hf).__name__} can be verified in chains only; "
                    "give k alone"
                )
        able = self._cuda and (drafter is None or drafter.capturable)
        self.graphs = able if graphs is None else graphs
        self.captured: dict[tuple, Graphs] = {}  # the latest ones
        self._capturable: dict[int, bool] = {}  # batch sizes for which the target was tried
        self._running: Graphs | None = None  # of the batch at hand; None: its rounds are eager

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampler: Sampler,
        max_new_tokens: int,
        *,
        rows: Sequence[int] | None = None,
        seed: int = 0,
        stop: Sequence[str] = (),
        progress: Callable[[int], None] | None = None,
    ) -> list[Text]:
        """Answers each prompt (token ids, not empty).

        rows: the requests' own ids, which key their noise (default 0, 1, ..). stop: strings that
        end a text; the token that completes one is its last. progress(new tokens) is called after
        every round. Raises UserError for a prompt that does not fit the target's positions.
        """
        self._check(prompts, sampler, max_new_tokens, rows)
        device = self.target.device
        texts = [Text(list(prompt)) for prompt in prompts]
        cutter = Cutter(self.target, max_new_tokens, stop)
        on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with narrow.decoding(), on_device:
            ids = torch.tensor(list(rows or range(len(texts))), device=device)
            rounds = self._rounds(texts, max_new_tokens, sampler, ids, seed)
            self._write(rounds, texts, cutter, progress or (lambda new: None))
        return texts

    def _write(
        self, rounds: Rounds, texts: list[Text], cutter: Cutter, progress: Callable[[int], None]
    ) -> None:
        """Prefill, then rounds until every text has ended."""
        for text, token in zip(texts, self._prefilled(rounds, texts), strict=True):
            cutter.append(text, [token])
        live = self._settle(rounds, texts)  # the text of each row of `rounds`
        while any(not text.finish for text in live):
            began = time.perf_counter()
            report, busy = self._round(rounds)
            new = 0
            for text, (accepted, token, proposed, _, *drafts) in zip(live, report, strict=True):
                if not text.finish:
                    new += _record(text, drafts[:accepted], token, proposed, cutter)
            live = self._settle(rounds, live)
            self.clock.host += time.perf_counter() - began - busy
            self.clock.tokens += new
            self.clock.rounds += 1
            progress(new)

    def _rounds(
        self, texts: list[Text], max_new_tokens: int, sampler: Sampler, ids: Tensor, seed: int
    ) -> Rounds:
        """The batch's device side, with room for every text: an earlier one's where graphs are."""
        slots = self.policy.slots if self.drafter else 1
        capacity = max(len(text.prompt) for text in texts) + max_new_tokens + 2 * slots
        inputs = (self.target, self.drafter, self.policy, sampler, ids, seed)
        if layers.chosen():
            self._compile(len(texts))
        if not self._captures(len(texts)):
            self._running = None
            return self.rounds_type(*inputs, capacity)
        capacity = -(-capacity // _STEP) * _STEP
        key = (len(texts), capacity, sampler, seed)
        kept = self.captured.pop(key, None)
        if kept is not None:
            kept.rounds.reset(ids)
        else:
            while len(self.captured) >= _KEPT:  # each holds a cache and its graphs' memory
                del self.captured[next(iter(self.captured))]
            kept = Graphs(self.rounds_type(*inputs, capacity, fixed=True))
        self.captured[key] = self._running = kept
        return kept.rounds

    def _compile(self, rows: int) -> None:
        """Compiles the layers of the models that decode, where that is possible."""
        nodes = self.policy.nodes if self.drafter else 1
        lm = getattr(self.drafter, "lm", None)  # a small model drafts token by token, after two
        for model, widths in ((self.target, [1, nodes]), (lm, [1, 2])):
            if model is not None and layers.able(model):
                layers.ready(model, self.target.tokenizer, rows, widths)

    def _captures(self, rows: int) -> bool:
        """Whether rounds of so many rows run as graphs; says so once where the target cannot."""
        if not self.graphs or not self._cuda:
            return self.graphs
        if rows not in self._capturable:
            nodes = self.policy.nodes if self.drafter else 1
            problem = capture_problem(self.target, nodes, rows)
            self._capturable[rows] = not problem
            if problem:
                spec = self.target.source.spec
                logger.warning("target %s: no CUDA graphs at batch %d, as %s", spec, rows, problem)
        return self._capturable[rows]

    def _prefilled(self, rounds: Rounds, texts: list[Text]) -> list[int]:
        """Reads the prompts; each text's first token."""
        began = time.perf_counter()
        tokens, counts = _padded([text.prompt for text in texts], self.target.device)
        first = rounds.prefill(tokens, counts).tolist()
        self.clock.prefill += time.perf_counter() - began
        return first

    def _settle(self, rounds: Rounds, live: list[Text]) -> list[Text]:
        """After texts grew: rows that ended stand still, or leave; caches learn how far they go."""
        writing = [not text.finish for text in live]
        if self.drafter is None and not self._running and 0 < sum(writing) <= len(live) / 2:
            rows = torch.tensor([i for i, on in enumerate(writing) if on], device=rounds.ids.device)
            rounds.keep(rows)
            live = [text for text in live if not text.finish]
        elif writing != [True] * len(live):
            rounds.active.copy_(torch.tensor(writing))
        committed = (len(t.prompt) + len(t.tokens) - 1 for t in live if not t.finish)
        # A drafter's cache grows within a proposal too.
        rounds.bound(max(committed, default=0) + rounds.slots)
        return live

    def _round(self, rounds: Rounds) -> tuple[list[list[int]], float]:
        """One round of every row: its report (the host's only read), and the seconds clocked."""
        start = self._mark()
        if self._running:
            self._running.draft()
            drafted = self._mark()
            report = self._running.judge()
            verified = self._mark()
        else:
            rounds.draft()
            drafted = self._mark()
            rounds.verify()
            verified = self._mark()
            report = rounds.commit()
        read = report.tolist()
        draft, verify = _between(start, drafted), _between(drafted, verified)
        self.clock.draft += draft
        self.clock.verify += verify
        self.clock.width = rounds.proposal.tokens.shape[1]
        return read, draft + verify

    def _mark(self) -> Any:
        """A moment on the device's own time line: nothing waits for it."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _check(
        self,
        prompts: Sequence[Sequence[int]],
        sampler: Sampler,
        max_new_tokens: int,
        rows: Sequence[int] | None,
    ) -> None:
        if not prompts:
            raise UserError("prompts: there are none; give at least one")
        if sampler.greedy and self.policy.sampled and not self.policy.is_chain:
            raise UserError(f"{self.policy}: nothing is drawn at temperature 0; use a ranked tree")
        if rows is not None and (len(rows) != len(prompts) or len(set(rows)) != len(rows)):
            raise UserError(
                f"rows: {len(rows)} ids for {len(prompts)} prompts; give each a different one, "
                "or they share their noise"
            )
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens: {max_new_tokens} leaves nothing to write; use >= 1")
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise UserError(f"prompt {i}: has no tokens; give at least one")
            if not 0 <= min(prompt) <= max(prompt) < self.target.vocab_size:
                raise UserError(
                    f"prompt {i}: a token id is outside 0..{self.target.vocab_size - 1}; encode it "
                    "with the target's tokenizer"
                )
            if len(prompt) + max_new_tokens > self.target.max_positions:
                raise UserError(
                    f"prompt {i}: {len(prompt)} tokens and max_new_tokens {max_new_tokens} exceed "
                    f"the target's {self.target.max_positions} positions; shorten either"
                )


def _between(start: Any, end: Any) -> float:
    """Seconds from one mark to another; the device has passed both."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def _record(text: Text, kept: list[int], token: int, proposed: int, cutter: Cutter) -> int:
    """Appends one round's kept drafts and token, up to an end or a cut; returns how many.

    Once the text has ended, every round is cut to the depths that lie within it: neither drafts
    past the end nor the acceptances among them count.
    """
    anchor = len(text.prompt) + len(text.tokens) - 2
    text.rounds.append(Round(anchor, proposed, len(kept)))
    count = cutter.append(text, [*kept, token])
    if text.finish:
        end = len(text.prompt) + len(text.tokens) - 1
        text.rounds = [
            Round(a, min(p, end - a - 1), min(m, end - a - 1)) for a, p, m in text.rounds
        ]
    return count


def _padded(prompts: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Right-padded tokens (B, W) and counts (B,)."""
    width = max(map(len, prompts))
    tokens = torch.tensor([p + [0] * (width - len(p)) for p in prompts], device=device)
    return tokens, torch.tensor([len(p) for p in prompts], device=device)
