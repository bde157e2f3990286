"""The training loop: samples -> drafter, resumable bit for bit on CPU.

The best checkpoint is the one with the highest replay tau on held-out conversations, never the one
with the lowest loss.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from types import FrameType
from typing import Any

from accelerate import Accelerator

from draftsmith.drafters import base
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance.replay import replays
from draftsmith.eval.report.provenance import provenance
from draftsmith.train import checkpoint, trackers, watch
from draftsmith.train.checkpoint import Metrics, read_metrics
from draftsmith.train.features import FeatureCache
from draftsmith.train.learner import Learner
from draftsmith.train.packing import alone, collate
from draftsmith.train.progress import CountLine
from draftsmith.train.ranks import ALONE, Ranks
from draftsmith.train.recipe import Recipe
from draftsmith.train.samples import Samples
from draftsmith.train.states import States
from draftsmith.train.weights import Sums

STOPPED = 143  # 128 + SIGTERM


class Trainer(Learner):
    """One run of one recipe. `run()` returns the process's exit code."""

    def __init__(
        self,
        recipe: Recipe,
        target: Target,
        samples: Samples,
        accelerator: Accelerator,
        states: States | None = None,
    ) -> None:
        super().__init__(recipe, target, samples, accelerator, states)
        self.tau = float("nan")  # the last replay's
        self.began = time.perf_counter()
        self.metrics: Metrics | None = None  # both on the main process only
        self.line: CountLine | None = None
        self.window = Sums.zero(self.depths)  # since the last line of the log
        self.stopping = False

    def run(self, ranks: Ranks = ALONE) -> int:
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
            self._cache_features(ranks)  # SIGTERM may end it: it goes on at the next shard
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
            if self.running.advance(recipe.switch_alpha):
                self._tell_of_switch()
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
        return 0

    def _cache_features(self, ranks: Ranks) -> None:
        precision = self.accelerator.mixed_precision
        taps = self.drafter.taps
        cache = FeatureCache(self.recipe, self.target, self.samples, taps, precision)
        cache.prepare(self.accelerator, ranks)
        self.states = cache

    def _tell_of_switch(self) -> None:
        self._say(
            f"step {self.step}: alpha_0 {float(self.running.mean_alpha[0]):.3f} has passed "
            f"{self.recipe.switch_alpha[self.running.stage - 1]}: {self.objective.loss} from here "
            "on"
        )
        self._write(kind="switch", loss=self.objective.loss)

    def _due(self) -> bool:
        """Whether this step gets a checkpoint and a replay."""
        return self.step % self.recipe.save_every == 0 or self.step == self.recipe.steps

    def _replayed(self) -> bool:
        found = self.accelerator.is_main_process  # whose log it is
        return self._any(found and any(m["step"] == self.step for m in self._replays()))

    def _ended(self) -> bool:
        """Whether tau has stopped rising for as long as the recipe bears; says so."""
        why = watch.falling(self._lines(), self.recipe.patience)
        if self._any(why is not None and self.accelerator.is_main_process):
            self._say(f"step {self.step}: ended early: {why}; the best checkpoint is kept")
            return True
        return False

    def _warn_of_still(self) -> None:
        if self.still:
            self._say(
                f"step {self.step}: warning: never moved so far: {', '.join(sorted(self.still))}"
            )

    def _lines(self) -> list[dict[str, Any]]:
        """The log up to this step. It may go on: where the last checkpoint was damaged and deleted,
        it still tells of it."""
        return [m for m in read_metrics(self.recipe.folder) if m["step"] <= self.step]

    def _replays(self) -> list[dict[str, Any]]:
        return [m for m in self._lines() if m["kind"] == "replay"]

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

    def _evaluate(self) -> None:
        """Replays the held-out conversations, and points `best` at the best checkpoint so far.

        Logged beside tau: what it is on the same text where q's argmax is drafted, as servers do.
        """
        recipe = self.recipe
        with self.accelerator.autocast():
            samplers = [None] if recipe.sampler.greedy else [None, Sampler(0.0)]
            found = replays(self.drafter, self._read_heldout(), recipe.k, samplers, recipe.seed)
        drawn, argmax = found[0], found[-1]
        result = drawn[recipe.k]
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
            tau_by_k={str(j): r.tau for j, r in drawn.items()},
            tau_greedy_by_k={str(j): r.tau for j, r in argmax.items()},
            k=recipe.k,
            seconds=self._seconds(),
            biased=result.biased,
        )
        self._mark_best()

    def _read_heldout(self) -> Iterator[Batch]:
        """The held-out conversations, each batch filled when it is asked for: states are large."""
        for rows in alone(self.samples, self.heldout, 4):
            yield self.exact.fill(collate(self.samples, rows, self.target.max_positions), rows)

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
            figures = f"loss {loss:.4f}  alpha_0 {alpha[0]:.3f}  tau {self.tau:.3f}"
            self.line.show(self.step, f"{figures}  {speed:,.0f} tokens/s")

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
        return super()._state() | {"seconds": self._seconds(), "window": asdict(self.window)}

    def _restore(self, state: dict[str, Any]) -> None:
        super()._restore(state)
        taus = [m["tau"] for m in self._replays()]
        self.tau = taus[-1] if taus else self.tau
        self.began -= state["seconds"]
        self.window = Sums(**state["window"])

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

    def _seconds(self) -> float:
        """Wall time of the run: replays and earlier parts included."""
        return time.perf_counter() - self.began

    def _start_log(self, resumed: bool) -> None:
        """Opens the log, says what is about to be trained, and checks that the disk can hold it."""
        recipe = self.recipe
        parameters = sum(p.numel() for p in self.trained)
        left = -(-(recipe.steps - self.step) // recipe.save_every)
        need = left * self.checkpoint_size()
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
            self.line = CountLine("step", recipe.steps, self.step, every=0)
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
