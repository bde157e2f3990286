"""One decoded text, piece by piece: which tokens were drafted, which are the target's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.grow import Proposal
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance.intervals import counted_tau
from draftsmith.eval.decoder.loop import Decoder


class _Watched:
    """A drafter whose chains are noted: the decoder keeps only what was accepted of them."""

    capturable = False

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.chains: list[list[int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, *arguments: Any) -> Proposal:
        proposal = self.drafter.propose(*arguments)
        self.chains.append(proposal.tokens[0, 1 : int(proposal.length[0])].tolist())
        return proposal


def sample_text(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    sampler: Sampler,
    k: int,
    max_new_tokens: int,
    *,
    row: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """Decodes one prompt (row keys its noise) and says who wrote what.

    pieces: {text, by} in order, by "drafter" (drafted and accepted), "rejected" (the draft that was
    refused, no part of the text; `drafts` has those after it too) or "target" (its correction or
    bonus; the first token is prefill's).
    """
    watched = _Watched(drafter)
    decoder = Decoder(target, cast(Drafter, watched), Policy(k))
    text = decoder.generate([prompt], sampler, max_new_tokens, rows=[row], seed=seed)[0]
    spans: list[tuple[str, list[int]]] = [("target", text.tokens[:1])]
    at = 1
    for (_, _, accepted), chain in zip(text.rounds, watched.chains, strict=True):
        spans.append(("drafter", text.tokens[at : at + accepted]))
        at += accepted
        # An accepted draft may end the text: then the target adds nothing.
        own = text.tokens[at : at + 1]
        if own and accepted < len(chain):
            spans.append(("rejected", chain[accepted:]))
        spans.append(("target", own))
        at += 1
    pieces: list[dict[str, str]] = []
    written: list[int] = []
    shown = ""

    def after(ids: list[int]) -> str:
        """What tokens add to the text shown; half a character waits for its other half."""
        return target.tokenizer.decode(written + ids).rstrip("\ufffd")[len(shown) :]

    for by, ids in spans:
        if by == "rejected":
            first, drafts = (after(ids[:n]) for n in (1, len(ids)))
            pieces += [{"text": first, "drafts": drafts, "by": by}] if first else []
            continue
        piece = after(ids)
        written, shown = written + ids, shown + piece
        if piece and pieces and pieces[-1]["by"] == by:
            pieces[-1]["text"] += piece
        elif piece:
            pieces.append({"text": piece, "by": by})
    drafted = sum(r.accepted for r in text.rounds)
    return {
        "prompt": target.tokenizer.decode(list(prompt)),
        "pieces": pieces,
        "tokens": len(text.tokens),
        "accepted": drafted,
        "passes": len(text.rounds),
        "tau": counted_tau([text]),
    }
