"""The benchmark scripts measure what they say, tried on a tiny target.

.venv/bin/pytest tests/benchmarks/test_benchmarks.py
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from draftsmith.drafters.base import Policy
from draftsmith.drafters.passes import narrow
from draftsmith.drafters.sampling import Sampler
from draftsmith.eval.speed import synthetic
from places import BENCHMARKS


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
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
        wide = synthetic.shape_config("tiny").vocab_size

        for kind in (torch.nn.Linear, narrow.NarrowLinear, narrow.LeftLinear):

            def slow(
                self: torch.nn.Linear, x: torch.Tensor, forward: Callable = kind.forward
            ) -> torch.Tensor:
                if self.out_features == wide:
                    burn()
                return forward(self, x)

            patch.setattr(kind, "forward", slow)
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


def burnt(milliseconds: float) -> None:
    until = time.thread_time() + milliseconds / 1e3
    while time.thread_time() < until:
        pass


def test_parts_of_a_step_are_their_own(scripts: Any) -> None:
    """What runs inside a part is not that part's, and all parts sum to the whole."""
    parts = scripts("step_profile").Parts()
    began = parts.since
    inner = parts.timed(lambda ms: f"inner {ms}", burnt)
    outer = parts.timed("outer", lambda: (burnt(10), inner(40), burnt(10)))
    outer()
    burnt(5)
    parts.turn()
    found = parts.seconds
    assert found["inner 40"] == pytest.approx(0.04, abs=0.005)
    assert found["outer"] == pytest.approx(0.02, abs=0.005)
    assert found["everything else"] == pytest.approx(0.005, abs=0.004)
    assert sum(found.values()) == pytest.approx(parts.since - began)


def test_the_plan_of_an_8b_target_is_todays(scripts: Any) -> None:
    """README's figures: the plan as it is made now is the one that is stored."""
    script = scripts("plan_8b")
    stored = json.loads((BENCHMARKS / "plan_8b.json").read_text())
    assert script.run() == {key: stored[key] for key in ("assumed", "tokens", "gpus")}


def test_aims_of_the_step_are_told(scripts: Any) -> None:
    """The worst size decides; a side that did not fit counts with the memory it was given."""
    step = scripts("step")
    size = {"T": 2048, "K": 7, "V": 128256}
    peaks = {"peak_mib": {"ours": 1000.0, "theirs": None}, "limit_mib": 16000}
    every = [{"T": 256, "K": 3, "V": 49152, "share": 1.0, "ratio": r} for r in (1.3, 1.1)]
    text = step.aims([*every, size | peaks | {"share": 1.0}])
    assert "1.10x to 1.30x, MISSED" in text and "42% learned from: aim >= 1.5x" in text
    assert "not timed" in text and "< 0.062, met" in text
    peaks["peak_mib"]["theirs"] = 3000.0
    assert "0.333, MISSED" in step.aims([size | peaks | {"share": 1.0}])
