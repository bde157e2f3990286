"""What a model proves when it is loaded: that our ways of reading it give transformers' logits; and
later, whether its verify pass can be a CUDA graph (`capture_problem`).

The reference is transformers' own eager forward of two short texts before anything is replaced.
They share a prompt and a root and then part, so that together they are the two leaves of one tree:

    prompt (9 tokens) - root - a - c - d
                           \\ - b - c' - d'
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from draftsmith.drafters.errors import reason
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

if TYPE_CHECKING:
    from draftsmith.drafters.target.target import Target

PROMPT = 9  # tokens; the root is the next
ROOM = PROMPT + 6  # slots that `slab_gap` needs
_PARENTS = [-1, 0, 0, 1, 2]  # root, a, b, c, c'
_NODES = [(0, 9), (0, 10), (1, 10), (0, 11), (1, 11)]  # (text, position) of each node
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
        return math.inf, f"cannot be had ({reason(error)})"
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
    text, position = torch.tensor(_NODES, device=lm.device).unbind(1)
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


@torch.no_grad()
def capture_problem(target: Target, nodes: int = 4, rows: int = 1) -> str | None:
    """Why a verify pass of rows x nodes tokens cannot be captured: a few words, or None.

    A graph replays kernels only: a forward that looks at a value on the host cannot be captured. On
    fake tensors, which have shapes but no values, such a look raises, on any device. Known ones:
    experts that loop on the host, `dynamic` rope, `longrope` before transformers 5.20, and layers
    spread by accelerate's device_map, whose hooks copy.
    """
    if not target.trees:
        return "it decodes on transformers' own cache"
    modules = list(target.hf.modules())
    if any(hasattr(module, "_hf_hook") for module in modules):
        return "accelerate's device_map hooks copy tensors inside the forward"
    # What a forward caches on its modules (longrope its frequencies) would stay fake.
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
    target.fit_experts(rows * nodes)
    noise = logging.getLogger("torch._subclasses.fake_tensor")  # prints a traceback of its own
    level = noise.level
    noise.setLevel(logging.CRITICAL)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            slab = Slab(rows, nodes, target.device)
            slab.bound = 0
            parents = torch.arange(-1, nodes - 1, device=target.device).expand(rows, -1)
            step = tree_step(slab, *tree_shape(parents))
            out = target(torch.zeros_like(parents), step, [0, target.num_layers])
            target.head(out.final)
    except RuntimeError as error:  # a host read, or experts by grouped_mm in fp32
        why = getattr(error, "func", None) or str(error).strip().splitlines()[0]
        return f"its forward cannot run without values ({why})"
    finally:
        noise.setLevel(level)
        target.use_experts("as loaded")
        for module, attributes, buffers in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
    return None
