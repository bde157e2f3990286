"""What a target is held to: checks that tests and planted faults share."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

import tiny
from draftsmith.drafters.target.attention import chain_step, packed_step, tree_shape, tree_step
from draftsmith.drafters.target.slab import Slab
from draftsmith.drafters.target.target import Target

L = tiny.LAYERS


@cache
def pair(family: str) -> tuple[Target, Any]:
    """(the target, the same weights in a model of its own). Cached, so read only."""
    theirs = tiny.hf_model(family)
    theirs.set_attn_implementation("eager")
    return prove(family), theirs


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}


def prove(family: str) -> Target:
    """A target, whose construction is its self-test."""
    hf = tiny.hf_model(family)
    hf.set_attn_implementation("eager")  # what the self-test compares with
    return Target(hf, tiny.tokenizer(), tiny.source())


def build_as(family: str, **more: Any) -> Target:
    """A target of its own with further settings."""
    return Target(tiny.hf_model(family, **more), tiny.tokenizer(), tiny.source())


def random_tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(2, tiny.VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)


@torch.no_grad()
def plain(theirs: Any, tokens: list[int]) -> Tensor:
    """Logits (T, V) of one plain forward."""
    return theirs(torch.tensor([tokens]), use_cache=False).logits[0]


@torch.no_grad()
def check_features(of: Target, theirs: Any) -> None:
    """Taps are HF's hidden states; tap L is what the final norm reads, "normed" what it gives."""
    tokens = random_tokens(1, 14)
    position = torch.arange(14).unsqueeze(0)
    out = of(tokens, packed_step(position, position * 0), [*range(L + 1), "normed"])
    states = theirs(tokens, output_hidden_states=True, use_cache=False).hidden_states
    for k in range(L):
        close(out.features[str(k)], states[k])
        assert (states[k] - states[k + 1]).abs().mean() > 0.05, "neighbours too alike to tell"
    last = out.features[str(L)]
    norm = next(name for name, module in of.hf.named_modules() if module is of.norm)
    close(theirs.get_submodule(norm)(last), states[L])
    assert (last - states[L]).abs().mean() > 0.05, "a norm that does nothing"
    close(out.features["normed"], states[L])
    assert last.equal(out.final)


@torch.no_grad()
def check_head(of: Target, theirs: Any) -> None:
    """final + head are HF's logits."""
    tokens = random_tokens(1, 14)
    position = torch.arange(14).unsqueeze(0)
    final = of(tokens, packed_step(position, position * 0)).final
    close(of.head(final[0]), plain(theirs, tokens[0].tolist()))


@torch.no_grad()
def check_slab(of: Target, theirs: Any) -> None:
    """Five ragged rows: prompts, chunks of which each keeps another part, a tree, two more."""
    texts = [random_tokens(n, seed=n).tolist() for n in (13, 4, 21, 1, 9)]
    slab = Slab(5, 80, of.device)
    width = max(map(len, texts))
    padded = torch.tensor([text + [3] * (width - len(text)) for text in texts])
    ours = of.head(of(padded, chain_step(slab, width)).final)
    for b, text in enumerate(texts):
        close(ours[b, : len(text)], plain(theirs, text))
    slab.commit(torch.tensor([len(text) for text in texts]))
    for width, kept in ((4, (4, 1, 0, 2, 3)), (3, (0, 3, 2, 3, 1)), (1, (1, 1, 1, 1, 0))):
        new = random_tokens(5, width, seed=width)
        ours = of.head(of(new, chain_step(slab, width)).final)
        for b, text in enumerate(texts):
            close(ours[b], plain(theirs, text + new[b].tolist())[len(text) :])
            text += new[b, : kept[b]].tolist()
        slab.commit(torch.tensor(kept))
    check_tree(of, theirs, slab, texts)


PARENTS = [
    [-1, 0, 0, 1, 1, 2, 4],
    [-1, 0, 1, 2, 3, 4, 5],
    [-1, 0, 0, 0, 2, 2, 3],
    [-1, 0, 0, 0, 0, 0, 0],
    [-1, 0, 1, 1, 3, 3, 5],
]
ACCEPTED = [[0, 1, 4, 6], [0, 1, 2, 3], [0, 2, 4, 4], [0, 6, 6, 6], [0, 1, 3, 5]]
KEPT = (4, 4, 3, 2, 4)  # of each row's accepted nodes


def path_to(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to `node`."""
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


@torch.no_grad()
def check_tree(of: Target, theirs: Any, slab: Slab, texts: list[list[int]]) -> None:
    """Each of seven nodes, in another tree per row, as its path alone; then a path made a chain."""
    tokens = random_tokens(5, 7, seed=77)
    ours = of.head(of(tokens, tree_step(slab, *tree_shape(torch.tensor(PARENTS)))).final)
    for b, text in enumerate(texts):
        for node in range(7):
            path = [int(tokens[b, i]) for i in path_to(PARENTS[b], node)]
            close(ours[b, node], plain(theirs, text + path)[-1])
    slab.gather(slab.length, torch.tensor(ACCEPTED))
    for b, text in enumerate(texts):
        text += [int(tokens[b, i]) for i in ACCEPTED[b][: KEPT[b]]]
    slab.commit(torch.tensor(KEPT))
    more = random_tokens(5, 2, seed=5)
    ours = of.head(of(more, chain_step(slab, 2)).final)
    for b, text in enumerate(texts):
        close(ours[b], plain(theirs, text + more[b].tolist())[-2:])
