"""A plan's figures: memory, disk, the target's states, seconds.

Sizes that follow from shapes are exact (weights, gradients, AdamW's two moments, checkpoints). What
is alive in between is a count of the largest tensors, fitted to SmolLM2 (benchmarks/plan.py
compares plan and run); times rest on rates measured on this machine (Pace). Answers count with
their full max_new_tokens, and all weights of a mixture of experts as if each token passed them:
both err upwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import psutil
import torch
from torch import Tensor

from draftsmith.eval.acceptance.replay import ROWS
from draftsmith.eval.overlap.row_stats import CELLS
from draftsmith.train import checkpoint
from draftsmith.train.plan.outline import Outline, Texts
from draftsmith.train.recipe import Recipe
from draftsmith.train.samples import store
from draftsmith.train.states import cache

FP32 = 4  # bytes
REPLAYED = 4  # held-out texts read at a time
BATCH = 16  # answers drawn at a time
_SECONDS = 0.4  # of measuring, for each rate of this machine
_FLOATS = 32 << 20  # in the weights read for it: 128 MiB of fp32


def checkpoints(recipe: Recipe) -> int:
    return -(-recipe.steps // recipe.save_every)


def target_dtype(outline: Outline, device: torch.device) -> torch.dtype:
    """The target's: fp32 on the CPU, the checkpoint's own elsewhere (as Target.load has it)."""
    own = getattr(outline.config, "dtype", None)
    return own if device.type != "cpu" and isinstance(own, torch.dtype) else torch.float32


def taught(recipe: Recipe, texts: Texts) -> float:
    """Of the tokens read, those that are learned from."""
    if recipe.anchors is None:
        return texts.share
    return min(texts.share, recipe.anchors / texts.row(recipe.length))


def memory(recipe: Recipe, outline: Outline, texts: Texts, device: torch.device) -> dict[str, int]:
    target, trained = outline.target, outline.trained
    shared = type(outline.drafter).rows_shared
    depths = 1 if shared else recipe.depths
    tokens = recipe.rows * recipe.length
    V, H, Vd = target.vocab_size, target.hidden_size, outline.draft_vocab
    taps = len(outline.drafter.taps)
    # Inputs and outputs of every linear, half as much again for norms, activations, residuals; and
    # the scores that a head of its own attention holds per depth.
    learned = int(tokens * taught(recipe, texts))
    uses = outline.uses(depths)
    passed = int(_passed(recipe, outline, tokens, learned, uses))
    acts = passed * uses * 3 * sum(m.in_features + m.out_features for m in outline.body) // 2
    if outline.attentions:
        heads = target.config.num_attention_heads
        acts += 5 * depths * passed * heads * recipe.length // 2
    # Of held-out texts, a batch at a time but each of them whole: states, and those of the draft.
    longest = min(_longest(texts.lengths, recipe.heldout), target.max_positions)
    positions = REPLAYED * longest
    drafted = positions if shared else min(positions * recipe.k, 2 * CELLS)
    held = H * (positions * (taps + 4) + drafted)
    rows = min(recipe.chunk, learned * depths)
    training = _logits(rows // depths, rows, V, Vd)
    replayed = min(ROWS // recipe.k, REPLAYED * texts.made // len(texts.lengths))
    replay = _logits(replayed, replayed if shared else replayed * recipe.k, V, Vd)
    laws = 7 * (recipe.chunk // depths) * V if outline.adapted else 0  # of both targets at a time
    parts = {
        "target weights": outline.target_size * target_dtype(outline, device).itemsize,
        "drafter weights": outline.stored + FP32 * outline.adapters,
        "gradients": FP32 * trained,
        "optimizer states": 2 * FP32 * trained,
        "features and activations": FP32 * max(tokens * H * (taps + 4) + acts, held),
        "logits of one chunk": FP32 * max(training, replay, laws),
    }
    if outline.adapted:  # inputs and outputs of its linears, and half as much again, as above
        sizes = sum(m.in_features + m.out_features for m in outline.adapted)
        kept = tokens * 3 * sizes // 2
        parts["activations of the target"] = kept * target_dtype(outline, device).itemsize
    if device.type == "cpu":
        parts = {"program and libraries": psutil.Process().memory_info().rss} | parts
    return parts


def _passed(recipe: Recipe, outline: Outline, tokens: float, learned: float, uses: int) -> float:
    """Rows that pass a drafter's weights, for each use of them: of a subset of the anchors those,
    beside one pass over all tokens where they see keys of theirs."""
    if recipe.anchors is None:
        return tokens
    return min(tokens, learned if outline.anchors_only else tokens / uses + learned)


def _longest(lengths: Tensor, count: int) -> int:
    """About the longest of `count` texts drawn from all."""
    return int(torch.quantile(lengths.double(), 1 - 1 / max(count, 1)))


def _logits(m: int, n: int, V: int, Vd: int) -> int:
    """Numbers alive at once: the target's laws at m positions, the drafter's in n rows and their
    gradients, and its laws where the sampler cuts them (counted in eval/overlap/divergences.py,
    checked by benchmarks/objective_memory.py)."""
    return 4 * m * V + 3 * n * Vd


def disk(recipe: Recipe, outline: Outline, texts: Texts, device: torch.device) -> dict[str, int]:
    each = checkpoint.size(outline.stored, outline.trained, outline.adapters)
    parts = {"checkpoints": checkpoints(recipe) * each}
    if outline.copies:
        parts["fp32 copy of the GGUF"] = outline.copies
    if not texts.drawn:
        parts["samples"] = store.size(len(texts.lengths), texts.tokens)
    if recipe.adapt:
        parts["new target"] = outline.target_size * target_dtype(outline, device).itemsize
    if recipe.feature_cache:
        name = _words(cache.stored_dtype(recipe, target_dtype(outline, device)))
        parts["feature cache"] = states(recipe, outline, texts, device)[name][0]
    return parts


def read(recipe: Recipe, texts: Texts, processes: int) -> float:
    """Tokens that all steps of all processes read."""
    rows = recipe.rows * recipe.accumulation * processes  # a step
    return recipe.steps * rows * texts.row(recipe.length)


def states(
    recipe: Recipe, outline: Outline, texts: Texts, device: torch.device, processes: int = 1
) -> dict[str, tuple[int, int]]:
    once = texts.epoch(recipe.length)
    taps, target = outline.drafter.taps, outline.target
    options = {"online": (0, int(read(recipe, texts, processes)))}
    for dtype in dict.fromkeys((target_dtype(outline, device), torch.bfloat16)):
        each = cache.token_bytes(taps, target.num_layers, target.hidden_size, dtype)
        options[_words(dtype)] = each * once, once
    return options


def _words(dtype: torch.dtype) -> str:
    return f"cached, {str(dtype).removeprefix('torch.')}"


def seconds(
    recipe: Recipe, outline: Outline, texts: Texts, device: torch.device, processes: int = 1
) -> dict[str, float]:
    """Of one process, what it waits for the others apart: they share texts that are read or
    answered, and each has rows of its own in a step."""
    target = outline.target
    H, V = target.hidden_size, target.vocab_size
    inner = getattr(target.config, "intermediate_size", None) or 4 * H
    pace = Pace(device, target_dtype(outline, device), H, inner, V)
    row, each = texts.row(recipe.length), texts.tokens / len(texts.lengths)
    micro = _pass(
        recipe, outline, pace, recipe.rows, row, taught(recipe, texts), backward=True,
        read=not recipe.feature_cache,
    )  # fmt: skip
    # Clipping and AdamW: a dozen walks over the weights.
    step = recipe.accumulation * micro + 12 * outline.trained / pace.rowwise
    # A drafter whose depths depend on the draft's length is replayed at each of them.
    ks = [recipe.k] if outline.drafter.depth_causal else range(1, recipe.k + 1)
    batch = sum(
        _pass(
            recipe, outline, pace, REPLAYED, each, texts.share, backward=False,
            read=k == recipe.k, replayed=k,
        )
        for k in ks
    )  # fmt: skip
    replays = (checkpoints(recipe) + 1) * recipe.heldout / REPLAYED
    parts = {"training": recipe.steps * step, "replays": replays * batch}
    if recipe.feature_cache:
        once, rows = texts.epoch(recipe.length), int(recipe.rows * row)
        parts = {"features": _reading(outline, once, row) / pace.matmul(rows) / processes} | parts
    if not texts.drawn:
        prompt = 2 * outline.target_body * (texts.tokens - texts.made) / pace.matmul(1024)
        draws = texts.made / BATCH  # decoding steps
        one_step = 2 * (outline.target_body + V * H) * BATCH / pace.matmul(BATCH)
        asked = prompt + draws * (one_step + 2 * BATCH * V / pace.rowwise)
        parts = {"sampling": asked / processes} | parts
    return parts


def _pass(
    recipe: Recipe,
    outline: Outline,
    pace: Pace,
    rows: int,
    length: float,
    share: float,
    backward: bool,
    read: bool = True,
    replayed: int | None = None,
) -> float:
    """Seconds to read `rows` rows of `length` tokens (read False: their states are on disk), unroll
    the drafter and compare it; replayed: at this draft length, not the recipe's."""
    target = outline.target
    H, V, Vd = target.hidden_size, target.vocab_size, outline.draft_vocab
    shared = type(outline.drafter).rows_shared
    depths = 1 if shared else recipe.depths if backward else replayed or recipe.k
    tokens = rows * length
    compared = tokens * share  # positions whose target law is needed
    passes = 3 if backward else 1  # forward, and the gradients of inputs and of weights
    of_head = passes - (backward and not outline.head_trained)
    scores = 4 * length * H  # of a token in one layer's attention
    work = 2 * V * H * compared + (_reading(outline, tokens, length) if read else 0)
    if outline.adapted:  # the target's forward, without and with adapters, and its states' gradient
        work *= 1 + (2 * (1 - recipe.adapt_after) if backward else 2)
    uses = outline.uses(depths)
    body = 2 * uses * sum(m.weight.numel() for m in outline.body)
    if outline.anchors_only:  # and what most weights read is frozen: no gradient goes through them
        work += (passes - backward) * compared * body
    else:
        passed = _passed(recipe, outline, tokens, compared, uses) if backward else tokens
        work += passes * passed * (body + depths * scores * outline.attentions)
    work += of_head * depths * compared * 2 * Vd * H
    walks = compared * (2 * V + (5 if backward else 3) * depths * Vd)
    return work / pace.matmul(int(tokens)) + walks / pace.rowwise


def _reading(outline: Outline, tokens: float, length: float) -> float:
    """Operations of the target's body on tokens in texts of `length`."""
    scores = 4 * length * outline.target.hidden_size
    return tokens * (2 * outline.target_body + scores * outline.target.num_layers)


@dataclass
class Pace:
    """Rates of a device for a model of hidden size H, MLP size I, V tokens, in a dtype.

    matmul: through weights that together do not fit a cache, as a model's do not; it falls with few
    rows, where reading the weights is what takes the time. rowwise: through log_softmax over a
    vocabulary, which stands for all that is done to logits.
    """

    device: torch.device
    dtype: torch.dtype
    hidden: int
    inner: int
    vocab: int
    _matmul: dict[int, float] = field(default_factory=dict)

    def matmul(self, rows: int) -> float:
        """Operations a second at `rows` rows at a time (measured at the power of two below)."""
        rows = 1 << (min(max(rows, 1), 1024).bit_length() - 1)
        if rows not in self._matmul:
            count = max(1, _FLOATS // (self.hidden * self.inner))
            shape = (count, self.hidden, self.inner)
            weights = torch.randn(shape, device=self.device, dtype=self.dtype)
            x = torch.randn(rows, self.hidden, device=self.device, dtype=self.dtype)

            def run() -> None:
                for weight in weights:
                    x @ weight

            self._matmul[rows] = 2 * rows * weights.numel() / self._time(run)
        return self._matmul[rows]

    @cached_property
    def rowwise(self) -> float:
        """Numbers a second through log_softmax over (n, V), in fp32."""
        logits = torch.randn(max(1, (4 << 20) // self.vocab), self.vocab, device=self.device)
        return logits.numel() / self._time(lambda: torch.log_softmax(logits, dim=-1))

    def _time(self, run: Callable[[], object]) -> float:
        """Seconds of one run, the median of as many as fit the time set for it."""
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda device: None
        run()  # warm-up
        taken: list[float] = []
        while sum(taken) < _SECONDS or len(taken) < 3:
            wait(self.device)
            began = time.perf_counter()
            run()
            wait(self.device)
            taken.append(time.perf_counter() - began)
        return sorted(taken)[len(taken) // 2]
