"""Speed and memory of EAGLE-3's training step against speculators 0.9's Eagle3, on a CPU.

    pip install --no-deps speculators==0.9.0      (beside draftsmith; nothing else of it is needed)
    python benchmarks/step.py [--small] [--memory]

One step is features in, gradients of the head out: fusing, K training-time-test depths, the
target's head on its final states, KL with its gradients. Same weights, same inputs, same frozen
output head (speculators' default), fp32, one thread. Each size is first compared: loss and every
gradient within 1e-4. Then both sides are timed in turns in one process, and each one's peak memory
is taken in a process of its own, on Linux. Writes benchmarks/step/*.json and
benchmarks/step.md.

What runs of speculators: its model with eager attention (float mask T x T*K) and its eager losses;
flex attention and the fused losses are compiled for GPUs (Triton). Two imports that a step never
calls, openai and hs_connectors, are replaced by empty modules.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import transformers
from common import HERE, cell, markdown

from draftsmith.drafters.batch import Batch, align, batch_of
from draftsmith.drafters.eagle import Eagle, EagleConfig
from draftsmith.drafters.target.causal_lm import CausalLM
from draftsmith.train.objective.losses import Objective, backward
from draftsmith.train.objective.weights import DepthWeights

H, LAYERS, CHUNK, DECAY, SHARE = 576, 1, 256, 0.8, 0.42
# SHARE: of a packed row of the samples that recipes/smol-eagle3.yaml learns from.
SIZES = [  # (T, K, V, share of positions learned from)
    (256, 3, 49152, 1.0), (256, 7, 49152, 1.0), (1024, 3, 49152, 1.0), (1024, 7, 49152, 1.0),
    (512, 3, 49152, SHARE), (512, 7, 49152, SHARE), (1024, 7, 49152, SHARE),
    (256, 3, 128256, 1.0), (256, 7, 128256, 1.0), (2048, 7, 128256, 1.0), (2048, 7, 128256, SHARE),
]  # fmt: skip
SMALL = [(64, 3, 2048, 1.0), (64, 7, 2048, SHARE)]
LONGEST_TIMED = 1024  # rows longer than this are only weighed: a step takes minutes
REPEATS = 3
LIMIT = 16 << 30  # bytes that one side may take

Step = Callable[[], float]


class Stubs:
    """Empty modules for what speculators imports and a step never calls."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in ("openai", "hs_connectors"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore
        return None

    def create_module(self, spec: Any) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module: Any) -> None:
        pass


def shape(V: int, layers: int = LAYERS) -> transformers.LlamaConfig:
    """SmolLM2-135M's layer."""
    return transformers.LlamaConfig(
        vocab_size=V, hidden_size=H, intermediate_size=1536, num_hidden_layers=layers,
        num_attention_heads=9, num_key_value_heads=3, head_dim=64, max_position_embeddings=8192,
        tie_word_embeddings=False, attn_implementation="eager", pad_token_id=None,
    )  # fmt: skip


def inputs(T: int, V: int, share: float) -> Batch:
    """One text of T tokens, the last share of them target-made, with features drawn at random."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, V, (T,), generator=generator).tolist()
    prompt = max(1, round((1 - share) * T))
    batch = batch_of([(ids, [False] * prompt + [True] * (T - prompt))], sampler=Batch.sampler)
    batch.features = {str(t): torch.randn(1, T, H, generator=generator) for t in (0, 1, "normed")}
    batch.final = torch.randn(1, T, H, generator=generator)
    return batch


def head(V: int) -> Eagle:
    torch.manual_seed(0)
    target: Any = CausalLM(transformers.AutoModelForCausalLM.from_config(shape(V)))
    target.requires_grad_(False)
    with torch.no_grad():
        target.lm_head.weight.mul_(5)  # laws that are not flat
    return Eagle(target, EagleConfig(taps=[0, 1, "normed"], head="target"))


def ours(drafter: Eagle, batch: Batch, K: int) -> Step:
    """Our step; depth weights are the means of speculators' loss."""
    T, made = batch.tokens.shape[1], int(batch.made.sum())
    first = T - made
    # speculators takes the mean over a depth's cells, then sums depths; one cell is one anchor
    # whose label exists.
    counts = [_cells(T, first, j) for j in range(K)]
    weights = tuple(DECAY**j / (n + 1e-5) for j, n in enumerate(counts))
    objective = Objective("kl", DepthWeights(weights))

    def step() -> float:
        drafter.zero_grad(set_to_none=True)
        return backward(drafter, batch, align(batch, K), objective, 1.0, CHUNK).loss

    return step


def _cells(T: int, first: int, j: int) -> int:
    """Anchors a >= first - 1 with a + 2 + j <= T - 1."""
    return T - 1 - j - first


def theirs(drafter: Eagle, batch: Batch, K: int) -> tuple[Any, Step]:
    """speculators' model with the same weights, and its step on the same inputs."""
    sys.meta_path.append(Stubs())  # type: ignore[arg-type]
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    V = drafter.target.vocab_size
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=shape(V),
        draft_vocab_size=V,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=K)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(config)
    target = drafter.target
    state = {f"layers.0.{n}": p for n, p in drafter.named_parameters()}
    for name in ("fc.weight", "norm.weight"):
        state[name] = state.pop(f"layers.0.{name}")
    state |= {
        "embed_tokens.weight": target.embedding.weight,
        "lm_head.weight": target.lm_head.weight,
        "verifier_lm_head.weight": target.lm_head.weight,
        "verifier_norm.weight": target.norm.weight,
    }
    left = model.load_state_dict(state, strict=True)
    assert not left.missing_keys and not left.unexpected_keys
    for name in ("lm_head", "verifier_lm_head", "embed_tokens"):  # one copy, as on our side
        getattr(model, name).weight = torch.nn.Parameter(
            target.embedding.weight if name == "embed_tokens" else target.lm_head.weight, False
        )
    loss_config = resolve_loss_config("kl_div", "eager")
    stacked = torch.cat([batch.features[str(t)] for t in drafter.taps], dim=-1)
    mask = batch.made[:, 1:].clone()
    mask[:, -1] = False  # x_T does not exist: no label
    assert batch.final is not None
    given = {
        "hidden_states": stacked[:, :-1],
        "input_ids": batch.tokens[:, 1:],
        "document_ids": torch.zeros_like(batch.tokens[:, 1:]),
        "loss_mask": mask,
        "verifier_last_hidden_states": batch.final[:, 1:],
        "ttt_steps": K,
        "ttt_step_loss_decay": DECAY,
        "loss_config": loss_config,
    }

    def step() -> float:
        model.zero_grad(set_to_none=True)
        _, loss, _ = model(**given)
        loss.backward()
        return loss.item()

    return model, step


@cache
def difference(T: int, K: int, V: int) -> float:
    """Largest relative difference of loss and gradients with every position learned from."""
    drafter, batch = head(V), inputs(T, V, 1.0)
    mine = ours(drafter, batch, K)
    model, other = theirs(drafter, batch, K)
    losses = mine(), other()
    found = [abs(losses[0] - losses[1]) / abs(losses[1])]
    named = dict(model.named_parameters())
    for name, parameter in drafter.named_parameters():
        at = name if name in named else f"layers.0.{name}"
        assert parameter.grad is not None
        gap = (parameter.grad - named[at].grad).abs().max() / named[at].grad.abs().max()
        found.append(gap.item())
    return max(found)


def timed(T: int, K: int, V: int, share: float) -> dict[str, Any]:
    """Seconds of each side, in turns: median of REPEATS after one step to warm up."""
    drafter, batch = head(V), inputs(T, V, share)
    steps = {"ours": ours(drafter, batch, K), "theirs": theirs(drafter, batch, K)[1]}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(REPEATS + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "seconds": seconds,
        "tokens_per_s": {name: share * T / value for name, value in median.items()},
        "ratio": median["theirs"] / median["ours"],
    }


def peak(side: str, T: int, K: int, V: int, share: float) -> float:
    """MiB by which one step raises this process's memory above weights and inputs.

    By Linux's own figures: getrusage's peak also holds what the parent held when it forked.
    """
    drafter, batch = head(V), inputs(T, V, share)
    step = ours(drafter, batch, K) if side == "ours" else theirs(drafter, batch, K)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))  # an error here, not another's end
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _mib("VmRSS")
    step()
    return _mib("VmHWM") - before


def _mib(name: str) -> float:
    """A figure of this process's memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def weighed(T: int, K: int, V: int, share: float) -> dict[str, Any]:
    """Peaks of both sides, after they were compared; None where LIMIT did not suffice."""
    gap = difference(min(T, 256), K, min(V, 49152))
    if gap > 1e-4:
        raise RuntimeError(f"T={T} K={K} V={V}: the two sides differ by {gap:.1e}")
    out: dict[str, float | None] = {}
    for side in ("ours", "theirs"):
        words = [sys.executable, __file__, "--peak", side, *map(str, (T, K, V, share))]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode and "can't allocate memory" not in done.stderr:
            raise RuntimeError(done.stderr)
        out[side] = None if done.returncode else json.loads(done.stdout)
    return {"difference": gap, "peak_mib": out, "limit_mib": LIMIT >> 20}


def row(f: dict[str, Any]) -> list[str]:
    ours_mib, theirs_mib = f["peak_mib"]["ours"], f["peak_mib"]["theirs"]
    speed = f.get("tokens_per_s")
    return [
        str(f["T"]), str(f["K"]), f"{f['V']:,}", f"{f['share']:.0%}", f"{f['difference']:.0e}",
        *([f"{speed['ours']:.0f}", f"{speed['theirs']:.0f}", f"{f['ratio']:.2f}x"]
          if speed else ["-"] * 3),
        f"{ours_mib:.0f}", f"> {f['limit_mib']}" if theirs_mib is None else f"{theirs_mib:.0f}",
        f"{ours_mib / theirs_mib:.2f}" if theirs_mib else f"< {ours_mib / f['limit_mib']:.2f}",
    ]  # fmt: skip


def aims(found: list[dict[str, Any]]) -> str:
    """What was aimed at beside what came out, one line each."""
    lines = []
    for least, where in ((1.2, "every position learned from"), (1.5, f"{SHARE:.0%} learned from")):
        every = where.startswith("every")
        cells = [f for f in found if (f["share"] == 1.0) == every and "ratio" in f]
        ratios = [f["ratio"] for f in cells]
        result = "not timed"
        if ratios:
            spread = f"{min(ratios):.2f}x to {max(ratios):.2f}x"
            result = _met(min(ratios) >= least, spread)
        lines.append(f"- tokens/s, {where}: aim >= {least}x in each size: {result}")
    for f in found:
        if (f["T"], f["K"], f["V"]) == (2048, 7, 128256):
            ours_mib, theirs_mib = f["peak_mib"]["ours"], f["peak_mib"]["theirs"]
            share = ours_mib / (theirs_mib or f["limit_mib"])
            sign = "" if theirs_mib else "< "
            lines.append(
                f"- peak above weights at T=2048, K=7, V=128,256, {f['share']:.0%} learned from: "
                f"aim <= 0.25 of speculators': {_met(share <= 0.25, f'{sign}{share:.3f}')}"
            )
    return "\n".join(lines) + "\n"


def _met(met: bool, figure: str) -> str:
    return f"{figure}, {'met' if met else 'MISSED'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--memory", action="store_true", help="no timing: other jobs may run")
    parser.add_argument("--peak", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.peak:
        side, T, K, V, share = arguments.peak
        print(json.dumps(peak(side, int(T), int(K), int(V), float(share))))
        return
    sizes = SMALL if arguments.small else SIZES
    found = []
    for size in sizes:
        name = "T{}-K{}-V{}-{:g}".format(*size)
        of = {"T": size[0], "K": size[1], "V": size[2], "share": size[3]}
        of |= cell(HERE / "step" / f"{name}-memory.json", lambda z=size: weighed(*z))
        if size[0] <= LONGEST_TIMED and not arguments.memory:
            of |= cell(HERE / "step" / f"{name}-time.json", lambda z=size: timed(*z))
        found.append(of)
    head_row = [
        "T", "K", "V", "learned from", "largest difference", "tokens/s, ours", "speculators",
        "ratio", "peak MiB, ours", "speculators", "ratio",
    ]  # fmt: skip
    text = (
        "# A training step of EAGLE-3 against speculators 0.9\n\n"
        f"Hidden size {H}, one core, fp32; KL, full draft vocabulary, frozen output head; "
        f"draftsmith with {CHUNK} rows alive. tokens/s counts positions learned from. The "
        "difference is the largest of loss and gradients, relative, at T <= 256 and V <= 49,152 "
        "with every position learned from. Peaks are above weights and inputs; > N: did not "
        "fit into N MiB. Made by "
        "`benchmarks/step.py`; JSON beside it.\n\n"
        + markdown(head_row, [row(f) for f in found])
        + f"\nAims:\n\n{aims(found)}"
    )
    (HERE / "step.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
