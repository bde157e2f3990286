"""What a training run changes step by step, and a checkpoint keeps.

Gradients of all micro-batches and processes are sums over one global denominator, reduced once a
step: nothing depends on how the global batch was cut, and a run goes on with any number of
processes. Every process makes the same collectives in every step, whatever its rows hold.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from transformers import get_cosine_schedule_with_warmup

from draftsmith.drafters.base import family
from draftsmith.drafters.batch import Alignment, Batch, align
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Noise
from draftsmith.drafters.target.target import Target
from draftsmith.train import checkpoint, watch
from draftsmith.train.lora import Lora
from draftsmith.train.objective import LOSSES, Objective, backward, denominator, lesson
from draftsmith.train.packing import Cursor, Stream, collate
from draftsmith.train.prior import token_counts
from draftsmith.train.ranks import summed
from draftsmith.train.recipe import Recipe
from draftsmith.train.samples import Samples
from draftsmith.train.start import fresh
from draftsmith.train.states import Computed, States
from draftsmith.train.weights import Running, Sums


class Learner:
    """A drafter, its optimizer, and where it stands in the samples.

    The target is frozen. states: its own, with the drafter's taps; None = computed in this process.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        samples: Samples,
        accelerator: Accelerator,
        states: States | None = None,
    ) -> None:
        self.recipe, self.target, self.accelerator = recipe, target, accelerator
        self.samples = samples
        self.learn, self.heldout = samples.split(recipe.heldout, recipe.seed)
        self._check_heldout()
        set_seed(recipe.seed)  # every generator whose state a checkpoint holds
        wanted = getattr(recipe.drafter_config(), "draft_vocab", None)
        counts = token_counts(target, states or Computed(target), samples, self.learn, wanted)
        cls = family(recipe.drafter)
        self.drafter = fresh(recipe, target, counts)
        self.drafter.eval()  # a draft model's dropout would go by how the rows were cut
        self.stored = sum(t.numel() * t.itemsize for t in self.drafter.weights().values())  # bytes
        self.lora = Lora(self.drafter, recipe.lora) if recipe.lora else None
        self.drafter.to(accelerator.device)
        self.coverage = self.drafter.vocab.coverage(counts.to(accelerator.device))
        for threshold in recipe.switch_alpha:
            if threshold >= self.coverage:
                raise UserError(
                    f"switch_alpha: {threshold} can never be met: the draft vocabulary covers "
                    f"{self.coverage:.1%} of the answers; lower it, or raise draft_vocab"
                )
        # A row that serves every depth already stands at depth 0, unless depths are multiplied.
        chained = any(LOSSES[loss].chained for loss in recipe.losses)
        self.depths = 1 if cls.rows_shared and not chained else recipe.depths
        self.learning: nn.Module = self.drafter  # all that has gradients
        self.trained = [p for p in self.drafter.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
        )
        warmup = int(recipe.warmup * recipe.steps)
        self.schedule = get_cosine_schedule_with_warmup(self.optimizer, warmup, recipe.steps)
        self.stream = Stream(samples, self.learn, recipe.length, recipe.seed)
        self.batch = recipe.rows * recipe.accumulation * accelerator.num_processes  # rows a step
        self.cursor = Cursor()
        self.exact: States = states or Computed(target, self.drafter.taps)  # what replay reads
        self.states = self.exact  # what steps learn from: a cache rounds
        self.step = 0
        self.tokens = 0  # positions learned from so far
        self.running = Running.start(self.depths)  # what losses and the curriculum go by
        self.still = {n for n, p in self.drafter.named_parameters() if p.requires_grad}  # unmoved
        self.norms: dict[str, float] = {}  # of the last step's gradients, before clipping

    @property
    def objective(self) -> Objective:
        """The one that the curriculum has come to."""
        return self.recipe.objectives[self.running.stage]

    def _step(self) -> tuple[Sums, float]:
        """One optimizer step over the next `batch` packed rows."""
        recipe, accelerator = self.recipe, self.accelerator
        rows, self.cursor = self.stream.take(self.cursor, self.batch)
        # Alike in a micro-batch, and in those that processes read at the same time; a step is a sum
        # over its rows in any order.
        rows.sort(key=self.stream.tokens, reverse=True)
        places = range(accelerator.process_index, len(rows), accelerator.num_processes)
        cuts = [places[i : i + recipe.rows] for i in range(0, len(places), recipe.rows)]
        parts = [[rows[place] for place in cut] for cut in cuts]
        device, depths = accelerator.device, self.depths
        batches = [collate(self.samples, part, recipe.length).to(device) for part in parts]
        noises = [self._noise(cut) for cut in cuts]
        lessons = [
            lesson(batch, depths, recipe.anchors, noise)
            for batch, noise in zip(batches, noises, strict=True)
        ]
        # The denominator of the whole global batch, and its learned positions. A process without
        # rows sums up nothing, which torch would take for integers.
        local = torch.tensor(
            [sum(denominator(*each, self.objective) for each in zip(batches, lessons, strict=True)),
             sum(int(each.exists[..., 0].sum()) for each in lessons)],
            dtype=torch.float32, device=device,
        )  # fmt: skip
        total, learned = summed(accelerator, local).tolist()
        self.optimizer.zero_grad(set_to_none=True)
        sums = Sums.zero(self.depths)
        for batch, each, part, noise in zip(batches, lessons, parts, noises, strict=True):
            sums.add(self._micro(batch, each, part, noise, max(total, 1.0)))
        if accelerator.num_processes > 1:
            sums = sums.reduced(accelerator)
        for parameter in self.trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = summed(accelerator, parameter.grad)
        self.still = watch.still(self.still, self.drafter)
        if self._logs(self.step + 1):
            self.norms = watch.gradient_norms(self.learning)
        whole = torch.nn.utils.get_total_norm([p.grad for p in self.trained if p.grad is not None])
        norm = whole.item()
        if not math.isfinite(norm):  # told before clipping spreads it over every gradient
            watch.check_finite(self.step + 1, watch.gradients(self.learning))
        torch.nn.utils.clip_grads_with_norm_(self.trained, recipe.clip, whole)
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        self.tokens += int(learned)
        self.running.update(sums)
        return sums, norm

    def _logs(self, step: int) -> bool:
        return step % self.recipe.log_every == 0 or step == self.recipe.steps

    def _noise(self, places: Sequence[int]) -> Noise:
        """That of rows at those places in the step, whatever process reads them, beside whichever
        others."""
        rows = torch.tensor(places, device=self.accelerator.device)
        return Noise(self.recipe.seed, rows, torch.full_like(rows, self.step))

    def _micro(
        self, batch: Batch, alignment: Alignment, rows: list[list[int]], noise: Noise, total: float
    ) -> Sums:
        with self.accelerator.autocast():
            batch = self.states.fill(batch, rows)
            sums = backward(
                self.drafter, batch, alignment, self.objective, total, self.recipe.chunk,
                self.running, noise,
            )  # fmt: skip
        if not math.isfinite(sums.loss):
            watch.check_finite(self.step + 1, watch.inputs(self.drafter, batch))
        return sums

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the drafter."""
        return {
            "samples": self.samples.manifest["content_hash"],
            "batch": self.batch,
            "cursor": asdict(self.cursor),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "tokens": self.tokens,
            "running": asdict(self.running),
            "still": sorted(self.still),
            "lora": self.lora.state() if self.lora else None,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        """Takes what `_state` gave; the weights are loaded already."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.batch = state.get("batch", self.batch)  # not in checkpoints of earlier versions
        self.cursor = Cursor(**state["cursor"])
        self.step, self.tokens = state["step"], state["tokens"]
        self.running = Running(**state["running"])
        self.still = set(state["still"])

    def checkpoint_size(self) -> int:
        """Bytes of a checkpoint, about."""
        trained = sum(p.numel() for p in self.trained)
        return checkpoint.size(self.stored, trained, trained if self.lora else 0)

    def _check_heldout(self) -> None:
        """Raises UserError where replay could not tell checkpoints apart: no tau without a pass."""
        texts = (collate(self.samples, [[i]], self.target.max_positions) for i in self.heldout)
        if not any(bool(align(text, 1).exists.any()) for text in texts):
            raise UserError(
                f"heldout: no answer of the {len(self.heldout)} held-out conversations has two "
                "tokens, so none takes a verify pass; raise heldout"
            )

    def _check_replicas(self) -> None:
        """Raises UserError unless all processes begin alike: on a disk that nodes do not share, one
        would go on with a run and the other begin it anew."""
        crc = zlib.crc32(self.samples.manifest["content_hash"].encode())
        for parameter in self.trained:
            numbers = parameter.detach().reshape(-1).view(torch.uint8).cpu().numpy().data
            crc = zlib.crc32(numbers, crc)
        mine = torch.tensor([self.step, crc], device=self.accelerator.device)
        other = summed(self.accelerator, mine) != self.accelerator.num_processes * mine
        if self._any(bool(other.any())):  # told by all, or some would wait for the others
            raise UserError(
                f"{self.recipe.folder}: processes begin with different steps, samples or weights; "
                "put runs, samples and start on a disk that all nodes share"
            )

    def _any(self, here: bool) -> bool:
        """Whether it holds on any process: all must leave the loop together."""
        if self.accelerator.num_processes == 1:
            return here
        flag = torch.tensor([float(here)], device=self.accelerator.device)
        return bool(summed(self.accelerator, flag).item())
