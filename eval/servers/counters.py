"""A server's own counters of speculation, read from its Prometheus page and differenced.

Counters run over a server's whole life: only the difference of two readings says anything about
what was asked in between.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from draftsmith.drafters.errors import UserError

DRAFTS = "spec_decode_num_drafts_total"
DRAFTED = "spec_decode_num_draft_tokens_total"
ACCEPTED = "spec_decode_num_accepted_tokens_total"
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"
_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Counters:
    """drafts: rounds that drafted. drafted: tokens in them. accepted: how often at each position.

    tokens: all that were generated. Of a server that does not speculate the first three are 0.
    """

    drafts: int = 0
    drafted: int = 0
    accepted: tuple[int, ...] = ()
    tokens: int = 0

    def __sub__(self, before: Counters) -> Counters:
        """What was counted since `before`, position by position."""
        width = max(len(self.accepted), len(before.accepted))
        ours, theirs = (c.accepted + (0,) * (width - len(c.accepted)) for c in (self, before))
        return Counters(
            self.drafts - before.drafts,
            self.drafted - before.drafted,
            tuple(a - b for a, b in zip(ours, theirs, strict=True)),
            self.tokens - before.tokens,
        )

    def __add__(self, other: Counters) -> Counters:
        return self - (Counters() - other)


def parse(page: str, prefix: str, tokens: str, speculates: bool, where: str) -> Counters:
    """The counters on a Prometheus page, summed over engines.

    prefix: "vllm:" or "llamacpp:"; tokens: the name of its count of generated tokens. speculates
    False: the others may be missing. Raises UserError naming the first counter that is missing, or
    accepted tokens that do not add up to their sum.
    """
    totals: dict[str, int] = {}
    positions: dict[int, int] = {}
    for line in page.splitlines():
        found = _LINE.fullmatch(line.strip())
        if line.startswith("#") or found is None or not found[1].startswith(prefix):
            continue
        name, labels, value = found[1].removeprefix(prefix), found[2] or "", float(found[3])
        if name == PER_POSITION:
            at = _POSITION.search(labels)
            if at is not None:
                positions[int(at[1])] = positions.get(int(at[1]), 0) + round(value)
        elif name in (DRAFTS, DRAFTED, ACCEPTED, tokens):
            totals[name] = totals.get(name, 0) + round(value)
    for name in [tokens, *((DRAFTS, DRAFTED, ACCEPTED) if speculates else ())]:
        if name not in totals:
            raise UserError(
                f"{where}: its metrics have no {prefix}{name}: it does not speculate, keeps no "
                "metrics, or is a version that names them otherwise"
            )
    accepted = tuple(positions.get(j, 0) for j in range(max(positions, default=-1) + 1))
    total = totals.get(ACCEPTED, 0)
    if sum(accepted) != total:
        raise UserError(
            f"{where}: its metrics count {total} accepted tokens, but {sum(accepted)} position by "
            "position; this version is not understood"
        )
    return Counters(totals.get(DRAFTS, 0), totals.get(DRAFTED, 0), accepted, totals[tokens])
