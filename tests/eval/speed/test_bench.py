"""The bench: what its figures mean, its cells, its synthetic mode, and what it refuses.

.venv/bin/pytest tests/eval/speed/test_bench.py
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
import training
from draftsmith.drafters import base, storage
from draftsmith.drafters.base import Policy
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.policy import StaticTree, Tree
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target import target as target_module
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.loop import Clock, Decoder
from draftsmith.eval.decoder.round import Rounds
from draftsmith.eval.speed import bench, bench_table, clocks, speed_model, synthetic
from draftsmith.eval.speed.bench import (
    BenchPrompt,
    Cell,
    Store,
    check_memory,
    full_batches,
    grid,
    measure,
    run,
)
from draftsmith.recipes import cli
from draftsmith.recipes.bench import Bench

CPU = torch.device("cpu")
PROMPTS = [BenchPrompt(ids, "code" if i % 2 else "chat") for i, ids in enumerate(tiny.prompts(4))]


@pytest.fixture(scope="module")
def shaped() -> tuple[Any, Any]:
    target = synthetic.random_target("tiny", CPU, torch.float32)
    return target, synthetic.random_eagle(target)


def ngram() -> Any:
    family = base.family("ngram")
    return family.create(tiny.target(), family.Config())


# ---------------------------------------------------------------- one cell


@pytest.mark.parametrize("policy", [None, Policy(3)])
def test_figures_of_a_cell_add_up(policy: Policy | None) -> None:
    decoder = Decoder(tiny.target(), ngram() if policy else None, policy)
    found = measure(decoder, PROMPTS, Cell("x", policy, 2, 0.0), 16)
    texts = Decoder(tiny.target()).generate([p.ids for p in PROMPTS], Sampler(0.0), 16)
    assert found["texts"] == 4
    assert found["tokens"] == sum(len(t.tokens) - 1 for t in texts)  # as HF counts: no overshoot
    assert math.isclose(sum(found["share"].values()), 1.0)
    assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["decode_s"])
    assert found["prefill_s"] > 0
    # Decode and prefill lie within the wall time, and little else does.
    assert found["prefill_s"] + found["decode_s"] <= found["wall_s"]
    assert found["end_to_end_tokens_per_s"] == pytest.approx(
        (found["tokens"] + 4) / found["wall_s"]
    )
    if policy is None:
        assert found["tau"] == 1.0


def test_warm_up_is_in_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow first generation, as a device's first kernels are, leaves the figures alone."""
    slept = []
    plain = Decoder._round

    def slow(self: Decoder, *args: Any, **kwargs: Any) -> Any:
        if not slept:
            slept.append(True)
            self.clock.verify += 100.0
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(Decoder, "_round", slow)
    found = measure(Decoder(tiny.target()), PROMPTS, Cell("x", None, 2, 0.0), 12)
    assert slept and found["decode_s"] < 100


def test_batches_are_full() -> None:
    five = PROMPTS + PROMPTS[:1]
    assert [len(b) for b in full_batches(five, 2)] == [2, 2]  # the rest is left out
    assert full_batches(PROMPTS, 6) == [PROMPTS + PROMPTS[:2]]  # gone through again


def test_break_even_and_speedups_by_hand() -> None:
    base_cell = {
        "tokens_per_s": 10.0,
        "end_to_end_tokens_per_s": 8.0,
        "typical_ms": {"total": 100.0},
    }
    cell = {
        "tokens_per_s": 12.0,
        "end_to_end_tokens_per_s": 9.0,
        "typical_ms": {"total": 150.0},
        "tau": 2.0,
        "tau_by_domain": {"code": 2.5, "chat": 1.25, "math": None},
        "depths": {"2": 3, "1": 1},
    }
    found = bench.compare(cell, base_cell, None)
    assert found["break_even_tau"] == 1.5  # a round costs one and a half steps
    assert found["distance"] == 0.5
    assert found["distance_by_domain"] == {"code": 1.0, "chat": -0.25, "math": None}
    assert found["measured_speedup"] == pytest.approx(1.2)
    assert found["predicted_speedup"] == pytest.approx(2.0 / 1.5)
    assert found["end_to_end_speedup"] == pytest.approx(9 / 8)
    # Synthetic: 1 + 1/2 + 1/4 over three rounds, 1 + 1/2 over one.
    stated = (3 * 1.75 + 1.5) / 4
    assert bench.compare(cell, base_cell, 0.5)["predicted_speedup"] == pytest.approx(stated / 1.5)


def test_roofline_by_hand() -> None:
    # 1 GB of weights, 1 kB per cached token, 4 rows of 250,000 tokens: 2 GB at 100 GB/s is 20 ms.
    assert bench.roofline_share(10**9, 1000, 4, 250_000.0, 0.040, 1e11) == pytest.approx(0.5)


def test_shares_by_hand() -> None:
    rounds = [Clock(draft=1.0, verify=2.0, host=1.0, rounds=1, tokens=1)]
    texts = tiny.texts(tiny.target(), Sampler(0.0), 1)
    found = bench._summary([clocks.Turn(texts, rounds, 0.0, 5.0)], ["a"])
    assert found["share"] == {"draft": 0.25, "verify": 0.5, "host": 0.25}
    assert found["typical_ms"] == {"draft": 1e3, "verify": 2e3, "host": 1e3, "total": 4e3}


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])  # tied, and with a head of its own
def test_bytes_read_by_a_step(family: str) -> None:
    target = tiny.target(family)
    L, H, inner, V, heads, kv, D = 4, 32, 64, tiny.VOCAB, 4, 2, 8
    norms = 2 * H + (2 * D if family == "Qwen3" else 0)
    layer = 2 * heads * D * H + 2 * kv * D * H + 3 * H * inner + norms
    assert bench.weight_bytes(target) == 4 * (L * layer + H + V * H)
    assert target.cache_bytes(1, 1, 0) == 4 * 2 * L * kv * D
    assert bench.copy_bandwidth(CPU) > 1e8


# ---------------------------------------------------------------- synthetic


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0])
@pytest.mark.parametrize(
    "policy", [Policy(3), Tree(k=3, budget=6, branch=2), StaticTree.of_widths((2, 1, 1))]
)
def test_coins_give_the_stated_tau(shaped: tuple, policy: Policy, alpha: float) -> None:
    target, drafter = shaped
    decoder = synthetic.CoinDecoder(target, drafter, policy, alpha)
    prompts = synthetic.random_prompts(target, 8, 5)
    texts = decoder.generate(prompts, Sampler(0.0), 60)
    rounds = [r for t in texts for r in t.rounds if r.anchor < 5 + 60 - 6]  # none is cut
    if not isinstance(policy, Tree):  # a dynamic tree may turn out shallower
        assert {r.proposed for r in rounds} == {3}
    counts = torch.tensor([float(r.accepted) for r in rounds])
    mean = sum(speed_model.independent_tau(alpha, r.proposed) - 1 for r in rounds) / len(rounds)
    spread = counts.std(correction=0).item() / math.sqrt(len(counts))
    assert abs(counts.mean().item() - mean) <= 4 * spread + 1e-9
    assert all(len(t.tokens) == 60 for t in texts)  # nothing ends a synthetic text early


def test_coins_do_not_bend_the_rule_that_is_timed(
    shaped: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real accept rule runs in every round, drawn chains too."""
    called = []
    plain = Rounds._judge
    monkeypatch.setattr(Rounds, "_judge", lambda self: called.append(1) or plain(self))
    target, drafter = shaped
    decoder = synthetic.CoinDecoder(target, drafter, Policy(2), 0.5)
    (text,) = decoder.generate(synthetic.random_prompts(target, 1, 5), Sampler(1.0), 12)
    assert len(called) == len(text.rounds)


def test_synthetic_is_written_on_everything(shaped: tuple, tmp_path: Path) -> None:
    content = bench_of(tmp_path, shaped).content
    text = bench_table.markdown(content)
    assert "SYNTHETIC" in text.splitlines()[0] and "chance 0.5" in text.splitlines()[0]
    assert all(row[0].startswith("SYNTHETIC") for row in bench_table.rows(content))
    assert all(row[0].startswith("SYNTHETIC") for row in bench_table.domain_rows(content)[1])
    assert all(line.startswith("SYNTHETIC") for line in bench_table.verdicts(content))
    assert all(cell["synthetic"] for cell in content["cells"].values())
    assert content["settings"]["alpha"] == 0.5


# ---------------------------------------------------------------- the grid


SETTINGS = {
    "target": "SYNTHETIC tiny",
    "alpha": 0.5,
    "prompts": 2,
    "max_new_tokens": 8,
    "warm_up": 8,
}
ABOUT = {"device": "cpu", "dtype": "float32", "commit": None, "command": "test"}


def bench_of(folder: Path, shaped: tuple, progress: Callable = lambda cell: None) -> Store:
    target, drafter = shaped
    drafters = {"eagle-shaped": drafter}
    cells = grid(drafters, [Policy(2), Tree(k=2, budget=4, branch=2)], [1, 2], [0.0, 1.0])
    prompts = [BenchPrompt(ids, "random") for ids in synthetic.random_prompts(target, 2, 5)]
    store = Store(folder, SETTINGS, ABOUT)
    run(target, drafters, cells, prompts, 8, store, alpha=0.5, progress=progress)
    return store


def test_a_stopped_bench_goes_on(
    shaped: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(Exception):
        pass

    done = []

    def stop(cell: Cell) -> None:
        done.append(cell.key)
        if len(done) == 5:
            raise Stopped

    with pytest.raises(Stopped):
        bench_of(tmp_path, shaped, stop)
    before = json.loads((tmp_path / "bench.json").read_text())
    assert list(before["cells"]) == done
    measured = []
    plain = bench.measure
    monkeypatch.setattr(
        bench, "measure", lambda *args: measured.append(args[2].key) or plain(*args)
    )
    whole = bench_of(tmp_path, shaped).content
    assert len(whole["cells"]) == 12 and len(measured) == 12 - 5
    assert not set(measured) & set(done)
    assert {key: whole["cells"][key] for key in done} == before["cells"]
    assert whole["copy_bytes_per_s"] == before["copy_bytes_per_s"]
    rebuilt = json.loads((tmp_path / "bench.json").read_text())
    assert rebuilt == json.loads(json.dumps(whole))


def test_another_bench_is_not_overwritten(tmp_path: Path) -> None:
    Store(tmp_path, SETTINGS, ABOUT)
    with pytest.raises(UserError, match=r"another bench \(of other alpha\); give another --output"):
        Store(tmp_path, SETTINGS | {"alpha": 0.7}, ABOUT)
    Store(tmp_path, SETTINGS, ABOUT)
    for broken in ("{", "[]", '{"settings": {}}', '{"settings": null, "cells": {}}'):
        (tmp_path / "bench.json").write_text(broken)
        with pytest.raises(UserError, match="bench.json: cannot be read as a bench; delete it"):
            Store(tmp_path, SETTINGS, ABOUT)


def test_a_bench_goes_on_with_the_same_weights_on_the_same_machine_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: figures of the drafter that lay at this path before, or of another machine, as new."""
    target = str(training.save_target(tmp_path / "target"))
    prompts = str(training.write_prompts(tmp_path / "prompts.jsonl", 2))
    drafter, output = tmp_path / "drafter", tmp_path / "out"
    drafter.mkdir()

    def trained(seed: int) -> None:
        torch.manual_seed(seed)
        cls = base.family("medusa")
        made = cls.create(Target.load(target), cls.Config(heads=2))
        for weight in made.parameters():
            weight.data += torch.randn_like(weight)
        storage.save(made, drafter)

    def bench_again() -> dict[str, Any]:
        Bench(
            target, [str(drafter)], k="2", max_new_tokens=4, prompts=prompts, limit=1, output=output
        )()
        return json.loads((output / "bench.json").read_text())

    trained(0)
    found = bench_again()
    assert bench_again() == found
    trained(1)
    with pytest.raises(UserError, match=r"holds another bench \(of other drafters\)"):
        bench_again()
    trained(0)
    assert bench_again() == found
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        with pytest.raises(UserError, match=r"holds another bench \(of other machine\)"):
            bench_again()
    finally:
        torch.set_num_threads(threads)


def test_what_the_grid_refuses(shaped: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = shaped
    with pytest.raises(UserError, match=r"--batch: 65 is not in 1..64"):
        grid({"e": drafter}, [Policy(2)], [65], [0.0])
    with pytest.raises(UserError, match="chains only"):
        grid({"n": ngram()}, [Tree(k=2, budget=4)], [1], [0.0])
    cells = grid({"e": drafter}, [Policy(2)], [64], [0.0])
    check_memory(target, cells, 100)
    with pytest.raises(UserError, match=r"--batch: 64 rows .* use shorter texts or a smaller"):
        check_memory(target, [replace(cells[1])], 10**10)
    one = target.cache_bytes(1, 100 + 2 * cells[1].policy.slots, cells[1].policy.nodes)
    monkeypatch.setattr(target_module, "free_bytes", lambda device: 9 * one)
    with pytest.raises(UserError, match=r"--batch: 64 rows .* use at most 9 rows"):
        check_memory(target, cells[1:], 100)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--shape", "llama-9b"], "--shape: no shape 'llama-9b'; known are llama-1b, llama-8b"),
        (["--shape", "tiny", "--batch", "1,x"], "--batch: '1,x' is no list of numbers"),
        (["--shape", "tiny", "--batch", ""], "--batch: nothing is left to time"),
        (["--shape", "tiny", "--k", "0"], "k: 0 is not a draft length"),
        (["--shape", "tiny", "--alpha", "1.5"], "--alpha: 1.5 is no chance"),
        (["--shape", "tiny", "--temperature", "-1"], "temperature: -1.0 is not >= 0"),
        (["--shape", "tiny", "--max-new-tokens", "9000"], "--max-new-tokens: 9000 after a prompt"),
        (["smollm2", "no-such-drafter"], "no-such-drafter: no drafter there"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    output = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["draftsmith", "bench", *words, "--output", str(output)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    told = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and told.startswith("error: ") and line in told
    assert len(told.splitlines()) == 1 and not output.exists()


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    words = ["--shape", "tiny", "--k", "2", "--max-new-tokens", "8", "--limit", "1"]
    monkeypatch.setattr(sys, "argv", ["draftsmith", "bench", *words, "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert not stop.value.code
    assert "SYNTHETIC" in capsys.readouterr().out
    assert (tmp_path / "bench.md").read_text().startswith("# Speed of SYNTHETIC tiny")


# ---------------------------------------------------------------- planted faults


def test_a_bench_without_warm_up_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, called = Decoder.generate, []

    def first_left_out(self: Decoder, *args: Any, **kwargs: Any) -> Any:
        called.append(1)
        return [] if len(called) == 1 else plain(self, *args, **kwargs)

    monkeypatch.setattr(Decoder, "generate", first_left_out)
    with pytest.raises(AssertionError):
        test_warm_up_is_in_no_figure(monkeypatch)


def test_a_coin_that_is_shared_by_depths_is_caught(
    shaped: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One coin for a whole round: the mean of depth 0 stays, tau does not."""
    plain = synthetic.leading
    monkeypatch.setattr(synthetic, "leading", lambda coins: plain(coins[:, :1].expand_as(coins)))
    with pytest.raises(AssertionError):
        test_coins_give_the_stated_tau(shaped, Policy(3), 0.6)
