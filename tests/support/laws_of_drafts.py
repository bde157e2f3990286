"""Laws of a target and of drafts, of every kind that an accept rule meets."""

from __future__ import annotations

import torch

from draftsmith.eval.certify.enumeration import Laws, points, random_laws

EXACT = 1e-12


def normed(laws: Laws) -> Laws:
    return [law / law.sum(-1, keepdim=True) for law in laws]


def every_other(laws: Laws, first: int) -> Laws:
    """The laws kept to the tokens first, first + 2, .."""
    return normed([law * (torch.arange(len(law)) % 2 == first) for law in laws])


def pair(kind: str, V: int, K: int) -> tuple[Laws, Laws]:
    """p (K + 1 laws) and q (K laws)."""
    p, q = random_laws(V, K + 1, 1), random_laws(V, K, 2)
    if kind == "q has zeros":
        q = random_laws(V, K, 2, zeros=0.5)
    elif kind == "p has zeros":
        p = random_laws(V, K + 1, 1, zeros=0.5)
    elif kind == "both have zeros":
        p, q = random_laws(V, K + 1, 3, zeros=0.5), random_laws(V, K, 4, zeros=0.5)
    elif kind == "equal":
        q = p[:K]
    elif kind == "equal, then disjoint":
        q = p[:1] + every_other(q, 0)[1:]
        p = p[:1] + every_other(p, 1)[1:]
    elif kind == "disjoint":
        p, q = every_other(p, 1), every_other(q, 0)
    elif kind == "point masses":
        q = points(q)
    return p, q
