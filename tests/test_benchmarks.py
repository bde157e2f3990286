"""The benchmark scripts measure what they say, tried on a tiny target.

.venv/bin/pytest tests/test_benchmarks.py
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from draftsmith.drafters.base import Policy
from draftsmith.drafters.sampling import Sampler
from draftsmith.eval import synthetic

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def measured(overhead: ModuleType) -> dict[str, Any]:
    target, drafters, prompts = overhead.tiny_pair()
    return overhead.measure(target, drafters["eagle"], Policy(2), 1.0, prompts[:1])


def test_outside_is_what_a_round_takes_beside_modules(
    scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Burning 20 ms in the sampler shows outside; burning it in a norm does not."""
    overhead = scripts("overhead")
    monkeypatch.setattr(overhead, "TOKENS", 12)
    plain = measured(overhead)
    assert 0 < plain["share"] < 1
    assert plain["outside_ms"] == pytest.approx(plain["share"] * plain["round_ms"])

    def burn() -> None:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass

    with monkeypatch.context() as patch:
        probs = Sampler.probs
        patch.setattr(Sampler, "probs", lambda self, x: burn() or probs(self, x))
        outside = measured(overhead)
    assert outside["outside_ms"] > plain["outside_ms"] + 40  # two drafts and the target's own
    with monkeypatch.context() as patch:
        forward = torch.nn.Linear.forward
        wide = synthetic.shape_config("tiny").vocab_size

        def slow(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
            if self.out_features == wide:
                burn()
            return forward(self, x)

        patch.setattr(torch.nn.Linear, "forward", slow)
        inside = measured(overhead)
    assert inside["round_ms"] > plain["round_ms"] + 40
    assert inside["outside_ms"] < plain["outside_ms"] + 15


def test_peer_compares_equal_work(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = scripts("peer")
    monkeypatch.setattr(peer, "TOKENS", 24)
    monkeypatch.setattr(peer, "REPEATS", 1)
    target = synthetic.random_target("tiny", torch.device("cpu"), torch.float32)
    prompts = synthetic.random_prompts(target, 2, 8)
    plain = peer.measure(target, None, prompts)
    assert plain["equal_texts"] == 2 and plain["passes"] == {"ours": 48, "theirs": 48}
    assert plain["ratio"] == pytest.approx(plain["ratio_per_pass"])
    drafted = peer.measure(target, peer.pruned(target, list(range(8))), prompts)
    assert drafted["equal_texts"] == 2
    # Every draft is right: 24 tokens are prefill's one and five rounds of K + 1, or just five.
    assert drafted["passes"] == {"ours": 2 * 6, "theirs": 2 * 5}
