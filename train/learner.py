"""One optimizer step after another: what a run changes, and a checkpoint keeps.

Gradients of all micro-batches and processes are sums over one global denominator, reduced once a
step: nothing depends on how the global batch was cut, and a run goes on with any number of
processes. Every process makes the same collectives in every step, whatever its rows hold.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from draftsmith.drafters import storage
from draftsmith.drafters.batch import Alignment, Batch
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Noise
from draftsmith.drafters.target.target import Target
from draftsmith.train import checkpoint, watch
from draftsmith.train.objective.losses import LOSSES, Objective, backward, denominator, lesson
from draftsmith.train.objective.weights import Running, Sums
from draftsmith.train.processes import summed
from draftsmith.train.recipe import Recipe
from draftsmith.train.samples.packing import Cursor, Stream, alone, collate
from draftsmith.train.samples.samples import Samples
from draftsmith.train.start import begin
from draftsmith.train.states.computed import Computed, States


class Learner:
    """A drafter, its optimizer, and where it stands in the samples. The target is frozen.

    states: the target's own, with the drafter's taps; None = what it computes in this process.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        samples: Samples,
        accelerator: Accelerator,
        states: States | None = None,
    ) -> None:
        self.recipe, self.target, self.samples = recipe, target, samples
        self.accelerator = accelerator
        begun = begin(recipe, target, samples, accelerator.device, states or Computed(target))
        self.learn, self.heldout = begun.learn, begun.heldout
        self.drafter, self.lora = begun.drafter, begun.lora
        self.stored, self.coverage = begun.stored, begun.coverage
        # A row that serves every depth already stands at depth 0, unless depths are multiplied.
        chained = any(LOSSES[loss].chained for loss in recipe.losses)
        self.depths = 1 if self.drafter.rows_shared and not chained else recipe.depths
        self.weights: list[Tensor] = [p for p in self.drafter.parameters() if p.requires_grad]
        self.optimizer, self.schedule = self._optimizer()
        self.trained: list[Tensor] = [p for g in self.optimizer.param_groups for p in g["params"]]
        self.stream = Stream(samples, self.learn, recipe.length, recipe.seed)
        self.batch = recipe.rows * recipe.accumulation * accelerator.num_processes  # rows a step
        self.cursor = Cursor()
        self.states: States = states or Computed(target, self.drafter.taps)
        self.step = 0
        self.tokens = 0  # positions learned from so far
        self.running = Running.start(self.depths)  # what losses and the curriculum read
        self.unmoved = {n for n, p in self.drafter.named_parameters() if p.requires_grad}
        self.norms: dict[str, float] = {}  # of the last step's gradients, before clipping

    # ---------------------------------------------------------------- what another step changes

    @property
    def learning(self) -> nn.Module:
        """All that has gradients."""
        return self.drafter

    @property
    def replay_states(self) -> States:
        """What replay reads."""
        return self.states

    @property
    def updated(self) -> list[Tensor]:
        """Those of `trained` that this step changes."""
        return self.trained

    def _optimizer(self) -> tuple[torch.optim.AdamW, LambdaLR]:
        recipe = self.recipe
        optimizer = torch.optim.AdamW(
            self.weights, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
        )
        warmup = int(recipe.warmup * recipe.steps)
        return optimizer, transformers.get_cosine_schedule_with_warmup(
            optimizer, warmup, recipe.steps
        )

    # ---------------------------------------------------------------- a step

    @property
    def objective(self) -> Objective:
        """The one that the curriculum has come to."""
        return self.recipe.objectives[self.running.stage]

    def advance(self, states: States) -> tuple[Sums, float]:
        """One optimizer step over the next `batch` packed rows, and its gradient's norm."""
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
            sums.add(self._micro(self._filled(states, batch, part), each, noise, max(total, 1.0)))
        if accelerator.num_processes > 1:
            sums = sums.reduced(accelerator)
        updated = self.updated
        for parameter in updated:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = summed(accelerator, parameter.grad)
        self.unmoved = watch.unmoved(self.unmoved, self.drafter)
        if self.logs(self.step + 1):
            self.norms = watch.gradient_norms(self.learning)
        whole = torch.nn.utils.get_total_norm([p.grad for p in updated if p.grad is not None])
        norm = whole.item()
        if not math.isfinite(norm):  # said before clipping puts it into every gradient
            watch.check_finite(self.step + 1, watch.gradients(self.learning))
        torch.nn.utils.clip_grads_with_norm_(updated, recipe.clip, whole)
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        self.tokens += int(learned)
        self.running.update(sums)
        return sums, norm

    def logs(self, step: int) -> bool:
        """Whether that step gets a line in the log."""
        return step % self.recipe.log_every == 0 or step == self.recipe.steps

    def _noise(self, places: Sequence[int]) -> Noise:
        """Noise of rows by their places in the step: the same in any process and batch."""
        rows = torch.tensor(places, device=self.accelerator.device)
        return Noise(self.recipe.seed, rows, torch.full_like(rows, self.step))

    def _filled(self, states: States, batch: Batch, rows: list[list[int]]) -> Batch:
        with self.accelerator.autocast():
            return states.fill(batch, rows)

    def _micro(self, batch: Batch, alignment: Alignment, noise: Noise, total: float) -> Sums:
        """Adds the gradients of a filled batch's loss, divided by `total`, to what is trained."""
        with self.accelerator.autocast():
            sums = backward(
                self.drafter, batch, alignment, self.objective, total, self.recipe.chunk,
                self.running, noise,
            )  # fmt: skip
        if not math.isfinite(sums.loss):
            watch.check_finite(self.step + 1, watch.inputs(self.drafter, batch))
        return sums

    # ---------------------------------------------------------------- replays

    def read_heldout(self, states: States) -> Iterator[Batch]:
        """The held-out conversations, each batch filled when it is asked for: states are large."""
        for rows in alone(self.samples, self.heldout, 4):
            yield states.fill(collate(self.samples, rows, self.target.max_positions), rows)

    def choose(self, replays: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """The best checkpoint's of a run's logged replays; the first one on ties."""
        found = [m for m in replays if m["step"] > 0]
        return max(found, key=lambda m: m["tau"]) if found else None

    def extra_figures(self) -> tuple[str, dict[str, Any]] | None:
        """What is printed and logged beside a step's replay."""
        return None

    def summary(self, best: dict[str, Any] | None) -> str:
        """What a finished run has made; best: what `choose` chose."""
        if best is None:  # the main process has yet to write it
            return "none is replayed"
        return f"best is checkpoint-{best['step']}, replay tau {best['tau']:.3f} at k={best['k']}"

    # ---------------------------------------------------------------- checkpoints

    def save(self, more: dict[str, Any]) -> None:
        """Writes a checkpoint, with more beside what resuming needs, on the main process."""
        if not self.accelerator.is_main_process:
            return
        weights = self.lora.merged() if self.lora else self.drafter.weights()
        watch.check_finite(self.step, weights.items())
        state = self._state() | more
        checkpoint.save(self.recipe.folder, self.step, self.drafter, weights, state)

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
            "still": sorted(self.unmoved),
            "lora": self.lora.state() if self.lora else None,
        }

    def resume(self) -> dict[str, Any] | None:
        """Goes on from the last checkpoint: what that holds, None where there is none."""
        folder = self.recipe.folder
        done = checkpoint.steps(folder)
        if not done:
            return None
        state = checkpoint.restore(folder, done[-1])
        weights = folder / f"checkpoint-{done[-1]}" / storage.WEIGHTS
        if self.lora is None:
            storage.fill(self.drafter, storage.read_weights(weights), weights)
        else:  # what lies below the adapters comes from where the run began
            self.lora.load(state["lora"])
            self.lora.check(weights)
        if state["samples"] != self.samples.manifest["content_hash"]:
            raise UserError(
                f"{folder}: was trained on other samples than "
                f"{self.recipe.samples or 'those in it'}; give the same ones, or another name"
            )
        self.drafter.to(self.accelerator.device)
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.batch = state.get("batch", self.batch)  # not in checkpoints of earlier versions
        self.cursor = Cursor(**state["cursor"])
        self.step, self.tokens = state["step"], state["tokens"]
        self.running = Running(**state["running"])
        self.unmoved = set(state["still"])
        return state

    def announce(self, say: Callable[[str], None]) -> None:
        """Says what else is about to be made. Raises UserError for what is in its way."""

    def checkpoint_size(self) -> int:
        """Bytes of a checkpoint, about."""
        trained = sum(p.numel() for p in self.trained)
        return checkpoint.size(self.stored, trained, trained if self.lora else 0)

    def fingerprint(self) -> list[int]:
        """Equal where two processes stand at the same step, with the same samples and weights."""
        crc = zlib.crc32(self.samples.manifest["content_hash"].encode())
        for parameter in self.trained:
            numbers = parameter.detach().reshape(-1).view(torch.uint8).cpu().numpy().data
            crc = zlib.crc32(numbers, crc)
        return [self.step, crc]
