"""How near a decode step comes to the device's copy bandwidth.

A step at a small batch must read every weight and every committed key and value once; nothing else
takes comparable time. Its bytes at the bandwidth of a plain copy are the time it could take.
Source of the model: Williams et al. 2009, "Roofline", its bandwidth-bound side.
"""

from __future__ import annotations

import time

import torch

from draftsmith.drafters.target.target import Target

_COPIES = 5


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


def kv_bytes(target: Target) -> int:
    """Bytes of one token's keys and values in all layers."""
    return target.cache_bytes(1, 1, 0)


def share(weights: int, kv: int, rows: int, context: float, seconds: float, rate: float) -> float:
    """Of `seconds`, the share that reading takes at `rate` bytes per second.

    weights: bytes of the weights; kv: bytes per cached token, of which each of `rows` rows has
    `context`.
    """
    return (weights + kv * rows * context) / rate / seconds
