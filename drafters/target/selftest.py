"""What a model proves when it is loaded: that our ways of reading it give transformers' logits.

The reference is transformers' own eager forward of two short texts before anything is replaced.
They share a prompt and a root and then part, so that together they are the two leaves of one tree:

    prompt (9 tokens) - root - a - c - d
                           \\ - b - c' - d'
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.target.attention import (
    attend_by,
    chain_step,
    packed_step,
    tree_shape,
    tree_step,
)
from draftsmith.drafters.target.causal_lm import CausalLM
from draftsmith.drafters.target.chain_cache import ChainCache
from draftsmith.drafters.target.slab import Slab

PROMPT = 9  # tokens; the root is the next
ROOM = PROMPT + 6  # slots that `slab_gap` needs
_PARENTS = [-1, 0, 0, 1, 2]  # root, a, b, c, c'
_WHERE = [(0, 9), (0, 10), (1, 10), (0, 11), (1, 11)]  # (text, position) of each node
_ACCEPTED = [0, 2, 4]  # root, b, c': not the first slots, so that gather has work to do
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}


def probe_tokens(vocab_size: int) -> Tensor:
    """The two texts (2, 13), ids from all over the vocabulary."""
    ids = torch.arange(1, PROMPT + 8) * 7919 % vocab_size
    common, tails = ids[: PROMPT + 1], ids[PROMPT + 1 :].view(2, 3)
    return torch.cat([common.expand(2, -1), tails], dim=1)


@torch.no_grad()
def probe_logits(hf: Any) -> Tensor:
    """Logits (2, 13, V) of an untouched HF model on the probe texts, by its eager attention.

    Not by sdpa, the default: transformers 5.17's drops Gemma-2's softcap.
    """
    attend_by(hf, "eager")
    tokens = probe_tokens(hf.get_output_embeddings().weight.shape[0])
    return hf(input_ids=tokens.to(hf.device), use_cache=False).logits


def allowed(reference: Tensor) -> float:
    """How far our logits may lie from the reference: rounding in its dtype."""
    return _TOLERANCE.get(reference.dtype, 0.5) * max(1.0, reference.abs().max().item() / 10)


def misread(hf: Any) -> str:
    """How far our attention misreads an HF model, in words; "" where it does not."""
    reference = probe_logits(hf)
    slab = Slab(1, ROOM, hf.device)
    gap, words = outcome(lambda: slab_gap(CausalLM(hf), reference, slab))
    return "" if gap <= allowed(reference) else words


def outcome(check: Callable[[], float]) -> tuple[float, str]:
    """(largest logit difference, the same in words)."""
    try:
        gap = check()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever the code of a family that was never tried here raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return math.inf, f"cannot be had ({reason})"
    return gap, f"differ from transformers' own by {gap:.3g}"


@torch.no_grad()
def slab_gap(lm: CausalLM, reference: Tensor, slab: Slab) -> float:
    """Largest logit difference of all our ways of reading.

    Both texts packed in one row, then a prefill, a tree, its second path made a chain, one more.

    slab: new, of one row and ROOM slots.
    """
    texts = probe_tokens(reference.shape[2]).to(lm.device)
    position = torch.arange(texts.shape[1], device=lm.device).repeat(1, 2)
    segment = torch.arange(2, device=lm.device).repeat_interleave(texts.shape[1]).unsqueeze(0)
    final = lm(texts.view(1, -1), packed_step(position, segment)).final
    gaps = [_gap(lm.head(final).view_as(reference), reference)]

    def commit(count: int) -> None:
        slab.commit(torch.full_like(slab.length, count))

    prompt = texts[:1, :PROMPT]
    gaps.append(_gap(lm.head(lm(prompt, chain_step(slab, PROMPT)).final), reference[:1, :PROMPT]))
    commit(PROMPT)
    text, position = torch.tensor(_WHERE, device=lm.device).unbind(1)
    parents = torch.tensor([_PARENTS], device=lm.device)
    step = tree_step(slab, *tree_shape(parents))
    final = lm(texts[text, position].unsqueeze(0), step).final
    gaps.append(_gap(lm.head(final), reference[text, position].unsqueeze(0)))
    slab.gather(slab.length, torch.tensor([_ACCEPTED], device=lm.device))
    commit(len(_ACCEPTED))
    gaps.append(_gap(lm.head(lm(texts[1:, -1:], chain_step(slab, 1)).final), reference[1:, -1:]))
    return _largest(gaps)


@torch.no_grad()
def chain_gap(lm: CausalLM, reference: Tensor, cache: ChainCache) -> float:
    """The same for two rows of different lengths, in chains of which parts are rolled back."""
    texts = probe_tokens(reference.shape[2]).to(lm.device)
    wrong = texts.flip(1)
    done = [0, 0]
    gaps = []
    # Per step: how many tokens of each row are its text's, the rest being wrong, and are kept.
    for kept in ((9, 6), (1, 3), (0, 2), (2, 1), (1, 1)):
        width = max(max(kept), 3)
        rows = [
            torch.cat([texts[b, n : n + k], wrong[b, : width - k]])
            for b, (n, k) in enumerate(zip(done, kept, strict=True))
        ]
        logits = lm.head(lm(torch.stack(rows), chain_step(cache, width)).final)
        for b, (n, k) in enumerate(zip(done, kept, strict=True)):
            if k:
                gaps.append(_gap(logits[b, :k], reference[b, n : n + k]))
            done[b] += k
        cache.commit(torch.tensor(kept, device=lm.device))
    return _largest(gaps)


def _gap(ours: Tensor, theirs: Tensor) -> float:
    return (ours.float() - theirs.float()).abs().max().item()


def _largest(gaps: list[float]) -> float:
    """NaN where one of them is, which Python's `max` would pass over."""
    return torch.tensor(gaps).max().item()
