"""Expected verify passes of a batch's texts, and their derivative: what users pay for.

n(a) = 1 + sum_m P(m|a) n(a+1+m), P(m|a) = S_m - S_{m+1} (eval/acceptance/replay.py, in the words of
shared design notes): with w(a) the chance that a round starts at a,

    d n(first) / d S_j(a) = w(a) (n(a+1+j) - n(a+j))

so that one backward and one forward recursion give every derivative, without autograd through a
text's length. Both run in float64 on the host, all texts at once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from draftsmith.drafters.batch import Alignment, Batch


def passes(survival: Tensor, batch: Batch, alignment: Alignment) -> tuple[float, Tensor]:
    """Sum of n(first anchor) over texts, and its derivative (B, A, K).

    survival (B, A, K): S_{j+1}, the chance that depths 0..j of an anchor are all accepted; what
    stands where a depth does not exist is not read. The alignment must hold every anchor.
    """
    B, A, K = survival.shape
    exists = alignment.exists.cpu().numpy()
    place = _texts(alignment.anchors.cpu().numpy(), batch.segment.cpu().numpy())  # (N, L)
    N, L = place.shape
    S = np.zeros((N, L, K + 2))
    S[..., 0] = 1.0
    flat = (survival.double().cpu().numpy() * exists).reshape(B * A, K)
    S[..., 1 : K + 1] = np.where(place[..., None] >= 0, flat[place], 0.0)
    P = S[..., :-1] - S[..., 1:]  # (N, L, K + 1)
    # Where depth 0 does not exist the root ends the text: no pass.
    live = (place >= 0) & exists[..., 0].reshape(-1)[place]
    P *= live[..., None]
    n = np.zeros((N, L + K + 1))
    for i in range(L - 1, -1, -1):
        n[:, i] = live[:, i] + np.einsum("nk,nk->n", P[:, i], n[:, i + 1 : i + K + 2])
    w = np.zeros((N, L + K + 1))
    w[:, 0] = 1.0
    for i in range(L):
        w[:, i + 1 : i + K + 2] += w[:, i, None] * P[:, i]
    slope = np.zeros((B * A, K))
    after = np.lib.stride_tricks.sliding_window_view(n, K + 1, axis=1)[:, 1 : L + 1]
    inside = place >= 0
    slope[place[inside]] = ((w[:, :L] * live)[..., None] * np.diff(after, axis=2))[inside]
    slope = slope.reshape(B, A, K) * exists
    return float(n[:, 0].sum()), torch.from_numpy(slope).to(survival.device)


def _texts(anchors: np.ndarray, segment: np.ndarray) -> np.ndarray:
    """Each text's anchors, as indices b*A + i, padded with -1: (N, L).

    A text is a run of consecutive anchors within one segment: all roots of a span are target-made.
    """
    B, A = anchors.shape
    own = np.take_along_axis(segment, np.maximum(anchors, 0), axis=1)
    follows = np.zeros((B, A), dtype=bool)
    follows[:, 1:] = (anchors[:, 1:] == anchors[:, :-1] + 1) & (own[:, 1:] == own[:, :-1])
    real = anchors >= 0
    first = np.flatnonzero(real & ~follows)
    text = np.cumsum((real & ~follows).reshape(-1)) - 1  # of each real anchor
    index = np.flatnonzero(real)
    place = np.full((len(first), 1 + (index - first[text[index]]).max(initial=0)), -1)
    place[text[index], index - first[text[index]]] = index
    return place
