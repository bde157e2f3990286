"""The training loop: samples -> drafter, resumable bit for bit on CPU.

The target is frozen, and runs inside the step unless its states are cached (features.py). Gradients
of all micro-batches and processes are sums over one global denominator, reduced once a step:
nothing depends on how the global batch was cut, and a run goes on with any number of processes.
Every process makes the same collectives in every step, whatever its rows hold. The best checkpoint
is the one with the highest replay tau on held-out conversations, never the one with the lowest
loss.
"""

from __future__ import annotations

import math
import shutil
import signal
import sys
import time
import zlib
from dataclasses import asdict
from types import FrameType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from transformers import get_cosine_schedule_with_warmup

from draftsmith.drafters import base
from draftsmith.drafters.base import family
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target import Target
from draftsmith.eval.provenance import provenance
from draftsmith.eval.replay import replay
from draftsmith.train import checkpoint, trackers, watch
from draftsmith.train.checkpoint import Metrics, read_metrics
from draftsmith.train.features import FeatureCache
from draftsmith.train.lora import Lora
from draftsmith.train.objective import LOSSES, Objective, backward, denominator
from draftsmith.train.packing import Cursor, Stream, alone, collate
from draftsmith.train.prior import token_counts
from draftsmith.train.progress import ProgressLine
from draftsmith.train.ranks import summed
from draftsmith.train.recipe import Recipe
from draftsmith.train.samples import Samples
from draftsmith.train.start import fresh
from draftsmith.train.weights import Running, Sums

STOPPED = 143  # 128 + SIGTERM


class Trainer:
    """One run of one recipe. `run()` returns the process's exit code."""

    def __init__(self, recipe: Recipe, target: Target, samples: Samples, accelerator: Accelerator):
        self.recipe, self.target, self.accelerator = recipe, target, accelerator
        self.samples = samples
        self.learn, self.heldout = samples.split(recipe.heldout, recipe.seed)
        if not self.learn:
            raise UserError(
                f"heldout: {recipe.heldout} of {len(samples)} conversations leaves none to train on"
            )
        set_seed(recipe.seed)  # every generator whose state a checkpoint holds
        wanted = getattr(recipe.drafter_config(), "draft_vocab", None)
        counts = token_counts(target, samples, self.learn, wanted)
        cls = family(recipe.drafter)
        self.drafter = fresh(recipe, target, counts)
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
        self.learner: nn.Module = self.drafter  # all that has gradients
        self.trained = [p for p in self.drafter.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=recipe.lr, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
        )
        warmup = int(recipe.warmup * recipe.steps)
        self.schedule = get_cosine_schedule_with_warmup(self.optimizer, warmup, recipe.steps)
        self.stream = Stream(samples, self.learn, recipe.length, recipe.seed)
        self.batch = recipe.rows * recipe.accumulation * accelerator.num_processes  # rows a step
        self.cursor = Cursor()
        self.features: FeatureCache | None = None  # None: the target runs in the step
        self.step = 0
        self.tokens = 0  # positions learned from so far
        self.tau = float("nan")  # the last replay's
        self.began = time.perf_counter()
        self.metrics: Metrics | None = None  # both on the main process only
        self.line: ProgressLine | None = None
        self.running = Running.start(self.depths)  # what losses and the curriculum go by
        self.still = {n for n, p in self.drafter.named_parameters() if p.requires_grad}  # unmoved
        self.norms: dict[str, float] = {}  # of the last step's gradients, before clipping
        self.window = Sums.zero(self.depths)  # since the last line of the log
        self.stopping = False

    @property
    def objective(self) -> Objective:
        """The one that the curriculum has come to."""
        return self.recipe.objectives[self.running.stage]

    def run(self) -> int:
        """Trains to the last step, or to SIGTERM; saves on either."""
        recipe = self.recipe
        resumed = self._resume()
        if self.accelerator.num_processes > 1:
            self._check_replicas()
        if resumed:
            self._mark_best()  # it may have been killed just before it did
        if (self.step >= recipe.steps and self._replayed()) or (resumed and self._ended()):
            self._say(f"{recipe.folder} is finished; {self._best_line()}")
            return 0
        if recipe.feature_cache:
            self._cache_features()  # SIGTERM may end it: it goes on at the next shard
        before = signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            return self._train(resumed)
        finally:
            signal.signal(signal.SIGTERM, before)

    def _train(self, resumed: bool) -> int:
        recipe = self.recipe
        self._start_log(resumed)
        if self._due() and not self._replayed():  # step 0, or a run stopped before its replay
            self._evaluate()
        tokens, began = self.tokens, time.perf_counter()
        while self.step < recipe.steps:
            sums, norm = self._step()
            self.window.add(sums)
            if self._logs(self.step):
                self._log(norm, (self.tokens - tokens) / (time.perf_counter() - began))
                tokens, began = self.tokens, time.perf_counter()
            stop = self._stop()  # asked once: the signal may come at any moment
            if self._due() or stop:
                self._save()
            if stop and self.step < recipe.steps:
                self._say(f"stopped at step {self.step}; the same command goes on from there")
                return STOPPED
            if self._due():
                aside = time.perf_counter()
                self._evaluate()
                self._warn_of_still()
                if self._ended():
                    break
                began += time.perf_counter() - aside
        self._say(f"{recipe.folder} is finished; {self._best_line()}")
        self.accelerator.end_training()
        return 0

    def _cache_features(self) -> None:
        precision = self.accelerator.mixed_precision
        taps = self.drafter.taps
        self.features = FeatureCache(self.recipe, self.target, self.samples, taps, precision)
        self.features.prepare(self.accelerator)

    def _due(self) -> bool:
        """Whether this step gets a checkpoint and a replay."""
        return self.step % self.recipe.save_every == 0 or self.step == self.recipe.steps

    def _logs(self, step: int) -> bool:
        return step % self.recipe.log_every == 0 or step == self.recipe.steps

    def _replayed(self) -> bool:
        found = self.accelerator.is_main_process  # whose log it is
        return self._any(found and any(m["step"] == self.step for m in self._replays()))

    def _ended(self) -> bool:
        """Whether tau has stopped rising for as long as the recipe bears; says so."""
        why = watch.falling(read_metrics(self.recipe.folder), self.recipe.patience)
        if self._any(why is not None and self.accelerator.is_main_process):
            self._say(f"step {self.step}: ended early: {why}; the best checkpoint is kept")
            return True
        return False

    def _warn_of_still(self) -> None:
        if self.still:
            self._say(
                f"step {self.step}: warning: never moved so far: {', '.join(sorted(self.still))}"
            )

    def _replays(self) -> list[dict[str, Any]]:
        return [m for m in read_metrics(self.recipe.folder) if m["kind"] == "replay"]

    def _best(self) -> dict[str, Any] | None:
        """The replay of the best checkpoint so far; the first one on ties."""
        found = [m for m in self._replays() if m["step"] > 0]
        return max(found, key=lambda m: m["tau"]) if found else None

    def _mark_best(self) -> None:
        if self.accelerator.is_main_process and (best := self._best()):
            checkpoint.mark_best(self.recipe.folder, best["step"])

    def _best_line(self) -> str:
        best = self._best()
        if best is None:  # the main process has yet to write it
            return "none is replayed"
        return f"best is checkpoint-{best['step']}, replay tau {best['tau']:.3f} at k={best['k']}"

    def _step(self) -> tuple[Sums, float]:
        """One optimizer step over the next `batch` packed rows."""
        recipe, accelerator = self.recipe, self.accelerator
        rows, self.cursor = self.stream.take(self.cursor, self.batch)
        # Alike in a micro-batch, and in those that processes read at the same time; a step is a sum
        # over its rows in any order.
        rows.sort(key=self.stream.tokens, reverse=True)
        mine = rows[accelerator.process_index :: accelerator.num_processes]
        parts = [mine[i : i + recipe.rows] for i in range(0, len(mine), recipe.rows)]
        batches = [collate(self.samples, part, recipe.length) for part in parts]
        # Learned positions, and the denominator of the whole global batch.
        local = torch.tensor(
            [sum(denominator(b, self.depths, self.objective) for b in batches),
             sum(denominator(b, 1, self.objective) for b in batches)],
            device=accelerator.device,
        )  # fmt: skip
        total, learned = summed(accelerator, local).tolist()
        self.optimizer.zero_grad(set_to_none=True)
        sums = Sums.zero(self.depths)
        for batch, part in zip(batches, parts, strict=True):
            sums.add(self._micro(batch.to(accelerator.device), part, max(total, 1.0)))
        if accelerator.num_processes > 1:
            sums = sums.reduced(accelerator)
        for parameter in self.trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad = summed(accelerator, parameter.grad)
        self.still = watch.still(self.still, self.drafter)
        if self._logs(self.step + 1):
            self.norms = watch.gradient_norms(self.learner)
        whole = torch.nn.utils.get_total_norm([p.grad for p in self.trained if p.grad is not None])
        norm = whole.item()
        if not math.isfinite(norm):  # told before clipping spreads it over every gradient
            watch.check_finite(self.step + 1, watch.gradients(self.learner))
        torch.nn.utils.clip_grads_with_norm_(self.trained, recipe.clip, whole)
        self.optimizer.step()
        self.schedule.step()
        self.step += 1
        self.tokens += int(learned)
        self.running.update(sums)
        if self.running.advance(recipe.switch_alpha):
            self._say(
                f"step {self.step}: alpha_0 {float(self.running.mean_alpha[0]):.3f} has passed "
                f"{recipe.switch_alpha[self.running.stage - 1]}: {self.objective.loss} from here on"
            )
            self._write(kind="switch", loss=self.objective.loss)
        return sums, norm

    def _micro(self, batch: Batch, rows: list[list[int]], total: float) -> Sums:
        self.drafter.train()
        with self.accelerator.autocast():
            if self.features:
                self.features.fill(batch, rows)
            else:
                self.target.read(batch, self.drafter.taps)
            sums = backward(
                self.drafter,
                batch,
                self.depths,
                self.objective,
                total,
                self.recipe.chunk,
                self.running,
            )
        if not math.isfinite(sums.loss):
            watch.check_finite(self.step + 1, watch.inputs(self.drafter, batch))
        return sums

    def _evaluate(self) -> None:
        """Replays the held-out conversations, and points `best` at the best checkpoint so far."""
        recipe = self.recipe
        self.drafter.eval()
        with self.accelerator.autocast():
            found = replay(self.drafter, self._read_heldout(), recipe.k, recipe.seed)
        result = found[recipe.k]
        self.tau = result.tau
        biased = " (biased: not the target's own)" if result.biased else ""
        self._say(
            f"step {self.step}: replay tau {result.tau:.3f} "
            f"[{result.tau_ci[0]:.3f}, {result.tau_ci[1]:.3f}] at k={recipe.k}, alpha "
            + " ".join("-" if a is None else f"{a:.3f}" for a in result.alpha)
            + biased
        )
        self._write(
            kind="replay",
            tau=result.tau,
            tau_ci=list(result.tau_ci),
            alpha=result.alpha,
            tau_by_k={str(j): r.tau for j, r in found.items()},
            k=recipe.k,
            seconds=self._seconds(),
            biased=result.biased,
        )
        self._mark_best()

    def _read_heldout(self) -> list[Batch]:
        """The held-out conversations, read by the target."""
        batches = []
        for rows in alone(self.samples, self.heldout, 4):
            batch = collate(self.samples, rows, self.target.max_positions)
            batches.append(self.target.read(batch.to(self.accelerator.device), self.drafter.taps))
        return batches

    def _log(self, norm: float, speed: float) -> None:
        window, self.window = self.window, Sums.zero(self.depths)
        loss = window.loss / (window.total or 1.0)
        alpha = (window.alpha / window.cells.clamp(min=1)).tolist()
        lr = self.schedule.get_last_lr()[0]
        self._write(
            kind="train",
            loss=loss,
            alpha=alpha,
            lr=lr,
            grad_norm=norm,
            grad_norms=self.norms,
            tokens_per_s=speed,
        )
        if self.line:
            self.line.show(self.step, loss, alpha[0], self.tau, speed)

    def _write(self, **values: Any) -> None:
        """One line of metrics.jsonl, and the same keys to the tracker."""
        values |= {"step": self.step, "tokens": self.tokens}
        if self.metrics:
            self.metrics.write(**values)
        if self.recipe.tracker:
            self.accelerator.log(trackers.flat(values), step=self.step)

    def _save(self) -> None:
        if not self.accelerator.is_main_process:
            return
        weights = self.lora.merged() if self.lora else self.drafter.weights()
        watch.check_finite(self.step, weights.items())
        checkpoint.save(self.recipe.folder, self.step, self.drafter, weights, self._state())

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the drafter."""
        return {
            "samples": self.samples.manifest["content_hash"],
            "batch": self.batch,
            "cursor": asdict(self.cursor),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "tokens": self.tokens,
            "seconds": self._seconds(),
            "running": asdict(self.running),
            "still": sorted(self.still),
            "window": asdict(self.window),
            "lora": self.lora.state() if self.lora else None,
        }

    def _resume(self) -> bool:
        """Loads the last checkpoint; False when there is none."""
        folder = self.recipe.folder
        done = checkpoint.steps(folder)
        if not done:
            return False
        if self.lora is None:
            base.load_weights(self.drafter, folder / f"checkpoint-{done[-1]}/model.safetensors")
        state = checkpoint.restore(folder, done[-1])
        if self.lora:  # what lies below the adapters comes from where the run began
            self.lora.load(state["lora"])
            self.lora.check(folder / f"checkpoint-{done[-1]}/model.safetensors")
        if state["samples"] != self.samples.manifest["content_hash"]:
            raise UserError(
                f"{folder}: was trained on other samples than "
                f"{self.recipe.samples or 'those in it'}; give the same ones, or another name"
            )
        self.drafter.to(self.accelerator.device)
        self._restore(state)
        self._say(f"resuming {folder} at step {self.step}, {self.batch} rows a step as it began")
        return True

    def _restore(self, state: dict[str, Any]) -> None:
        """Takes what `_state` gave."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.batch = state.get("batch", self.batch)  # not in checkpoints of earlier versions
        self.cursor = Cursor(**state["cursor"])
        self.step, self.tokens = state["step"], state["tokens"]
        taus = [m["tau"] for m in self._replays() if m["step"] <= self.step]
        self.tau = taus[-1] if taus else self.tau
        self.began -= state["seconds"]
        self.running = Running(**state["running"])
        self.still = set(state["still"])
        self.window = Sums(**state["window"])

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

    def _seconds(self) -> float:
        """Wall time of the run: replays and earlier parts included."""
        return time.perf_counter() - self.began

    def _start_log(self, resumed: bool) -> None:
        """Opens the log, says what is about to be trained, and checks that the disk can hold it."""
        recipe = self.recipe
        parameters = sum(p.numel() for p in self.trained)
        left = -(-(recipe.steps - self.step) // recipe.save_every)
        need = left * 12 * parameters  # fp32 weights and two moments in each checkpoint
        free = shutil.disk_usage(recipe.folder).free
        self._say(
            f"{recipe.drafter} drafter, {parameters:,} trained parameters "
            f"({16 * parameters / 2**20:.0f} MiB with gradients and optimizer; {left} checkpoints "
            f"take {need / 2**20:.0f} MiB of disk), {self.drafter.vocab.draft_size:,} draft tokens "
            f"that cover {self.coverage:.1%} of the answers; {len(self.learn)} conversations to "
            f"learn from, {len(self.heldout)} held out; device {self.accelerator.device}, "
            f"{self.accelerator.mixed_precision} autocast"
        )
        if free < need:
            raise UserError(
                f"{recipe.folder}: {left} checkpoints need {need / 2**20:.0f} MiB, the disk has "
                f"{free / 2**20:.0f}; raise save_every or free some"
            )
        if self.accelerator.is_main_process:
            self.line = ProgressLine(recipe.steps, self.step)
            # Without a checkpoint nothing that was logged before still holds.
            self.metrics = Metrics(recipe.folder, self.step if resumed else -1)
            self.metrics.write(kind="start", step=self.step, seed=recipe.seed, **provenance())

    def _say(self, text: str) -> None:
        if self.accelerator.is_main_process:
            print(text, file=sys.stderr, flush=True)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def _stop(self) -> bool:
        return self._any(self.stopping)

    def _any(self, here: bool) -> bool:
        """Whether it holds on any process: all must leave the loop together."""
        if self.accelerator.num_processes == 1:
            return here
        flag = torch.tensor([float(here)], device=self.accelerator.device)
        return bool(summed(self.accelerator, flag).item())
