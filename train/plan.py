"""What a recipe will take, from configs alone: parameters, memory by part, disk, tokens, time.

No weights are loaded: target and drafter are built on torch's meta device. Sizes that follow from
shapes are exact (weights, gradients, AdamW's two moments, checkpoints). What is alive in between is
a count of the largest tensors, fitted to SmolLM2 (benchmarks/plan.py compares plan and run); times
rest on rates measured on this machine (pace.py). Answers count with their full max_new_tokens, and
all weights of a mixture of experts as if each token passed them: both err upwards.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.drafters.base import Drafter, family
from draftsmith.drafters.causal_lm import CausalLM
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.layers import SelfAttention
from draftsmith.drafters.source import resolve
from draftsmith.eval.replay import ROWS
from draftsmith.train import adapters, checkpoint, features, storage
from draftsmith.train.lora import linears
from draftsmith.train.pace import Pace
from draftsmith.train.packing import Stream, teaching
from draftsmith.train.prompts import Prompt, product_prompts
from draftsmith.train.recipe import Recipe
from draftsmith.train.samples import Samples
from draftsmith.train.sources import TRAIN
from draftsmith.train.suites import read_suite

FP32 = 4  # bytes
REPLAYED = 4  # held-out texts read at a time
BATCH = 16  # answers drawn at a time


@dataclass
class Texts:
    """Samples that are there (drawn), or what prompts will give when they are answered.

    lengths and first_made as in `Samples`; made: target-made tokens of all.
    """

    folder: Path
    lengths: Tensor
    first_made: Tensor
    made: int
    drawn: bool

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def share(self) -> float:
        """Of the tokens read, those that the target made."""
        return self.made / self.tokens

    def epoch(self, length: int) -> int:
        """Tokens of all texts that teach anything, cut at `length`."""
        kept = teaching(cast(Samples, self), length)
        return int(self.lengths[kept].clamp(max=length).sum())

    def row(self, length: int) -> float:
        """Tokens in a packed row of `length`: texts do not fill it to the end."""
        kept = teaching(cast(Samples, self), length)
        stream = Stream(cast(Samples, self), kept, length, seed=0)
        return self.epoch(length) / stream.rows_per_epoch(0)


@dataclass(frozen=True)
class Plan:
    """memory and disk in bytes, seconds, by part; parts of memory are alive at the same time.

    features: by where the target's states come from (online, or kept on disk in a dtype), the disk
    that takes in bytes and the tokens that the target reads for all of training.
    """

    device: str
    target_parameters: int
    drafter_parameters: int  # trained
    memory: dict[str, int]
    disk: dict[str, int]
    features: dict[str, tuple[int, int]]
    tokens: dict[str, int]
    seconds: dict[str, float]


class Outline:
    """Target and drafter of a recipe without their weights.

    Raises UserError for a target whose config cannot be had, and for settings it cannot take.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.config = _config(recipe.target)
        with torch.device("meta"):
            self.target = CausalLM(AutoModelForCausalLM.from_config(self.config))
            self.target.requires_grad_(False)
            self.drafter, self.trained = _drafter(recipe, self.target)
        self.adapted = list(adapters.linears(self.target).values()) if recipe.adapt else []
        self.trained += sum(
            (recipe.adapt or 0) * (m.in_features + m.out_features) for m in self.adapted
        )
        head = self.target.lm_head.weight
        self.target_size = _count(self.target)
        embeddings = {id(p): p.numel() for p in (head, self.target.embedding.weight)}
        self.target_body = self.target_size - sum(embeddings.values())
        settings = self.drafter.config
        self.draft_vocab = getattr(settings, "draft_vocab", None) or self.drafter.vocab.draft_size
        linears = [m for m in self.drafter.modules() if isinstance(m, nn.Linear)]
        heads = [m for m in linears if m.out_features in (self.draft_vocab, len(head))]
        self.head_trained = any(m.weight.requires_grad for m in heads)
        self.body = [m for m in linears if m not in heads]
        self.attends = any(isinstance(m, SelfAttention) for m in self.drafter.modules())
        # Without keys, a drafter reads anchors alone.
        self.anchors_only = not self.attends and not self.drafter.rows_shared
        longest = self.drafter.longest
        if longest is not None and recipe.depths != longest:
            raise UserError(
                f"depths: {recipe.depths} in training, and the drafter has weights for {longest}: "
                f"set depths: {longest}, or change the drafter"
            )

    @property
    def drafter_body(self) -> int:
        """Weights that a drafted token passes, the head's apart."""
        return sum(m.weight.numel() for m in self.body)

    def uses(self, depths: int) -> int:
        """How often a row passes each of those: once, where every depth has weights of its own."""
        return depths if self.drafter.longest is None else 1


def plan(recipe: Recipe, timed: bool = True) -> Plan:
    """The plan of a recipe on this machine; timed False leaves times out, and measures nothing.

    Raises UserError as `Outline` does, and for samples or prompts that cannot be read.
    """
    outline, texts = Outline(recipe), _texts(recipe)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    learned = recipe.steps * recipe.rows * recipe.accumulation * texts.row(recipe.length)
    return Plan(
        _name(device),
        outline.target_size,
        outline.trained,
        _memory(recipe, outline, texts, device),
        _disk(recipe, outline, texts, device),
        _features(recipe, outline, texts, device),
        {
            "prompts": texts.tokens - texts.made,
            "answers": texts.made,
            "learned": int(learned * texts.share),
        },
        _seconds(recipe, outline, texts, device) if timed else {},
    )


def check(recipe: Recipe) -> None:
    """Raises UserError where memory or disk cannot hold the plan; what a run has made counts."""
    made = plan(recipe, timed=False)
    need, free = sum(made.memory.values()), _free_memory(made.device, bool(recipe.device_map))
    if need > free:
        part = max(made.memory, key=lambda name: made.memory[name])
        raise UserError(
            f"recipe {recipe.name}: needs about {_gib(need)} of memory, most for {part} "
            f"({_gib(made.memory[part])}), and {made.device} has {_gib(free)} free; lower rows, "
            "length or chunk, or take a smaller drafter"
        )
    folder = recipe.folder
    disk = dict(made.disk)
    states = disk.get("feature cache", 0)
    if recipe.feature_cache and states > recipe.feature_cache:
        raise features.beyond(recipe.feature_cache, states)
    if recipe.samples is not None:  # it lies beside them, and may be there
        disk.pop("feature cache", None)
    done = len(checkpoint.steps(folder))
    disk["checkpoints"] -= done * disk["checkpoints"] // _checkpoints(recipe)
    if (folder / "samples").exists():
        disk.pop("samples", None)
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    need, free = sum(disk.values()), shutil.disk_usage(there).free
    if need > free:
        raise UserError(
            f"{folder}: needs about {_gib(need)} of disk ({_checkpoints(recipe)} checkpoints: "
            f"{_gib(disk['checkpoints'])}), {_gib(free)} are free; raise save_every, or change runs"
        )


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _checkpoints(recipe: Recipe) -> int:
    return -(-recipe.steps // recipe.save_every)


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# ---------------------------------------------------------------- what is there


def _config(spec: str) -> Any:
    source = resolve(spec, weights=False)
    try:
        return AutoConfig.from_pretrained(source.path)
    except (OSError, ValueError, KeyError) as error:
        line = str(error).strip().splitlines()[0]
        raise UserError(f"target {spec}: transformers cannot read its config ({line})") from None


def _drafter(recipe: Recipe, target: Any) -> tuple[Drafter, int]:
    """The drafter, on the meta device, and how many of its parameters are trained."""
    settings: Any = recipe.drafter_config()
    if getattr(settings, "checkpoint", None):  # its weights are not wanted
        about = _config(settings.checkpoint).to_dict()
        settings = settings.model_copy(update={"architecture": about})
    drafter = family(recipe.drafter)(target, settings)
    if recipe.lora:
        layers = linears(drafter).values()
        return drafter, sum(recipe.lora * (m.in_features + m.out_features) for m in layers)
    return drafter, sum(p.numel() for p in drafter.parameters() if p.requires_grad)


def _texts(recipe: Recipe) -> Texts:
    if recipe.samples is not None:
        folder = Path(recipe.samples)
        manifest = storage.read_manifest(folder)
        samples = Samples(folder, manifest, storage.load(folder / storage.ROWS))
        made = int(samples.token_counts().sum())
        return Texts(folder, samples.lengths, samples.first_made, made, drawn=True)
    prompts = read_suite(recipe.prompts, TRAIN) if recipe.prompts else product_prompts("train")
    asked = torch.tensor([_about_tokens(p) for p in prompts])
    answers = torch.tensor([(1 + len(p.later)) * recipe.max_new_tokens for p in prompts])
    return Texts(recipe.folder, asked + answers, asked, int(answers.sum()), drawn=False)


def _about_tokens(prompt: Prompt) -> int:
    """Four characters a token, and the template's share: no tokenizer is loaded."""
    if prompt.ids is not None:
        return len(prompt.ids)
    turns = [prompt.messages or (), *prompt.later]
    return sum(24 + sum(len(m["content"]) for m in turn) // 4 for turn in turns)


def _free_memory(device: str, spread: bool = False) -> int:
    """Bytes that this process may come to hold in all, within its container's limit; spread: on all
    devices together."""
    if device != "cpu":
        every = range(torch.cuda.device_count()) if spread else [torch.cuda.current_device()]
        return sum(torch.cuda.mem_get_info(index)[0] for index in every)
    free = psutil.virtual_memory().available
    limit, used = (Path("/sys/fs/cgroup") / f"memory.{name}" for name in ("max", "current"))
    if limit.is_file() and (most := limit.read_text().strip()).isdigit():
        free = min(free, int(most) - int(used.read_text()))
    return free + psutil.Process().memory_info().rss


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


# ---------------------------------------------------------------- memory and disk


def _dtype(outline: Outline, device: torch.device) -> torch.dtype:
    """The target's: fp32 on the CPU, the checkpoint's own elsewhere (as Target.load has it)."""
    own = getattr(outline.config, "dtype", None)
    return own if device.type != "cpu" and isinstance(own, torch.dtype) else torch.float32


def _memory(recipe: Recipe, outline: Outline, texts: Texts, device: torch.device) -> dict[str, int]:
    target, trained = outline.target, outline.trained
    shared = type(outline.drafter).rows_shared
    depths = 1 if shared else recipe.depths
    tokens = recipe.rows * recipe.length
    V, H, Vd = target.vocab_size, target.hidden_size, outline.draft_vocab
    taps = len(outline.drafter.taps)
    # Inputs and outputs of every linear, half as much again for norms, activations, residuals; and
    # the scores that a head of its own attention holds per depth.
    uses = outline.uses(depths)
    acts = tokens * uses * 3 * sum(m.in_features + m.out_features for m in outline.body) // 2
    if outline.attends:
        heads = target.config.num_attention_heads
        acts += 5 * depths * recipe.rows * heads * recipe.length**2 // 2
    learned = int(tokens * texts.share)
    rows = min(recipe.chunk, learned * depths)
    training = _logits(rows // depths, rows, V, Vd)
    replayed = min(ROWS // recipe.k, REPLAYED * texts.made // len(texts.lengths))
    replay = _logits(replayed, replayed if shared else replayed * recipe.k, V, Vd)
    laws = 7 * (recipe.chunk // depths) * V if outline.adapted else 0  # of both targets at a time
    parts = {
        "target weights": outline.target_size * _dtype(outline, device).itemsize,
        "drafter weights": FP32 * trained,
        "gradients": FP32 * trained,
        "optimizer states": 2 * FP32 * trained,
        "features and activations": FP32 * (tokens * H * (taps + 4) + acts),
        "logits of one chunk": FP32 * max(training, replay, laws),
    }
    if outline.adapted:  # inputs and outputs of its linears, and half as much again, as above
        sizes = sum(m.in_features + m.out_features for m in outline.adapted)
        kept = tokens * 3 * sizes // 2
        parts["activations of the target"] = kept * _dtype(outline, device).itemsize
    if device.type == "cpu":
        parts = {"program and libraries": psutil.Process().memory_info().rss} | parts
    return parts


def _logits(m: int, n: int, V: int, Vd: int) -> int:
    """Numbers alive at once: the target's laws at m positions, the drafter's in n rows and their
    gradients, and its laws where the sampler cuts them (counted in eval/laws.py, checked by
    benchmarks/objective_memory.py)."""
    return 4 * m * V + 3 * n * Vd


def _disk(recipe: Recipe, outline: Outline, texts: Texts, device: torch.device) -> dict[str, int]:
    # fp32 weights and two moments in each checkpoint
    parts = {"checkpoints": _checkpoints(recipe) * 3 * FP32 * outline.trained}
    if not texts.drawn:
        parts["samples"] = storage.size(len(texts.lengths), texts.tokens)
    if recipe.adapt:
        parts["new target"] = outline.target_size * _dtype(outline, device).itemsize
    if recipe.feature_cache:
        name = _words(features.stored_dtype(recipe, _dtype(outline, device)))
        parts["feature cache"] = _features(recipe, outline, texts, device)[name][0]
    return parts


def _features(
    recipe: Recipe, outline: Outline, texts: Texts, device: torch.device
) -> dict[str, tuple[int, int]]:
    once = texts.epoch(recipe.length)
    learned = recipe.steps * recipe.rows * recipe.accumulation * texts.row(recipe.length)
    taps, target = outline.drafter.taps, outline.target
    options = {"online": (0, int(learned))}
    for dtype in dict.fromkeys((_dtype(outline, device), torch.bfloat16)):
        each = features.token_bytes(taps, target.num_layers, target.hidden_size, dtype)
        options[_words(dtype)] = each * once, once
    return options


def _words(dtype: torch.dtype) -> str:
    return f"cached, {str(dtype).removeprefix('torch.')}"


# ---------------------------------------------------------------- time


def _seconds(
    recipe: Recipe, outline: Outline, texts: Texts, device: torch.device
) -> dict[str, float]:
    target = outline.target
    H, V = target.hidden_size, target.vocab_size
    inner = getattr(target.config, "intermediate_size", None) or 4 * H
    pace = Pace(device, _dtype(outline, device), H, inner, V)
    row, each = texts.row(recipe.length), texts.tokens / len(texts.lengths)
    micro = _pass(
        recipe, outline, pace, recipe.rows, row, texts.share, backward=True,
        read=not recipe.feature_cache,
    )  # fmt: skip
    # Clipping and AdamW: a dozen walks over the weights.
    step = recipe.accumulation * micro + 12 * outline.trained / pace.rowwise
    batch = _pass(recipe, outline, pace, REPLAYED, each, texts.share, backward=False)
    replays = (_checkpoints(recipe) + 1) * recipe.heldout / REPLAYED
    parts = {"training": recipe.steps * step, "replays": replays * batch}
    if recipe.feature_cache:
        once, rows = texts.epoch(recipe.length), int(recipe.rows * row)
        parts = {"features": _reading(outline, once, row) / pace.matmul(rows)} | parts
    if not texts.drawn:
        prompt = 2 * outline.target_body * (texts.tokens - texts.made) / pace.matmul(1024)
        draws = texts.made / BATCH  # decoding steps
        one_step = 2 * (outline.target_body + V * H) * BATCH / pace.matmul(BATCH)
        parts = {"sampling": prompt + draws * (one_step + 2 * BATCH * V / pace.rowwise)} | parts
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
) -> float:
    """Seconds to read `rows` rows of `length` tokens (read False: their states are on disk), unroll
    the drafter and compare it."""
    target = outline.target
    H, V, Vd = target.hidden_size, target.vocab_size, outline.draft_vocab
    shared = type(outline.drafter).rows_shared
    depths = 1 if shared else recipe.depths if backward else recipe.k
    tokens = rows * length
    compared = tokens * share  # positions whose target law is needed
    passes = 3 if backward else 1  # forward, and the gradients of inputs and of weights
    of_head = passes - (backward and not outline.head_trained)
    scores = 4 * length * H  # of a token in one layer's attention
    work = 2 * V * H * compared + (_reading(outline, tokens, length) if read else 0)
    if outline.adapted:  # the target's forward, without and with adapters, and its states' gradient
        work *= 1 + (2 * (1 - recipe.adapt_after) if backward else 2)
    body = 2 * outline.uses(depths) * outline.drafter_body
    if outline.anchors_only:  # and what most weights read is frozen: no gradient goes through them
        work += (passes - backward) * compared * body
    else:
        work += passes * tokens * (body + depths * scores * outline.attends)
    work += of_head * depths * compared * 2 * Vd * H
    walks = compared * (2 * V + (5 if backward else 3) * depths * Vd)
    return work / pace.matmul(int(tokens)) + walks / pace.rowwise


def _reading(outline: Outline, tokens: float, length: float) -> float:
    """Operations of the target's body on tokens in texts of `length`."""
    scores = 4 * length * outline.target.hidden_size
    return tokens * (2 * outline.target_body + scores * outline.target.num_layers)


def table(made: Plan) -> Sequence[tuple[str, str, str]]:
    """The plan as (topic, part, figure) rows, sums included."""
    rows = [
        ("parameters", "target", f"{made.target_parameters:,}"),
        ("parameters", "drafter, trained", f"{made.drafter_parameters:,}"),
    ]
    for topic, parts in (("memory", made.memory), ("disk", made.disk)):
        rows += [(topic, part, f"{size / 2**20:,.0f} MiB") for part, size in parts.items()]
        rows.append((topic, "in all", _gib(sum(parts.values()))))
    rows += [
        ("features", part, f"{size / 2**20:,.0f} MiB, {tokens:,} target tokens")
        for part, (size, tokens) in made.features.items()
    ]
    rows += [("tokens", part, f"{count:,}") for part, count in made.tokens.items()]
    rows += [("time", part, f"{s / 60:,.1f} min") for part, s in made.seconds.items()]
    rows.append(("time", "in all", f"{sum(made.seconds.values()) / 60:,.1f} min"))
    return rows
