"""The training loop: samples -> drafter, resumable bit for bit on CPU.

The best checkpoint is the one with the highest replay tau on held-out conversations, never the one
with the lowest loss.
"""

from __future__ import annotations

import shutil
import signal
import time
from types import FrameType

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.eval.acceptance.replay import replay_samplers
from draftsmith.train import checkpoint
from draftsmith.train.journal import Journal
from draftsmith.train.learner import Learner
from draftsmith.train.processes import SINGLE, Processes, check_alike, on_any
from draftsmith.train.states.cache import FeatureCache
from draftsmith.train.states.computed import States

STOPPED = 143  # 128 + SIGTERM


class Run:
    """One run of one recipe: a learner that takes steps, and a journal of them."""

    def __init__(self, learner: Learner) -> None:
        self.learner, self.recipe, self.accelerator = learner, learner.recipe, learner.accelerator
        self.journal = Journal(learner)
        self.stopping = False

    def run(self, processes: Processes = SINGLE) -> int:
        """Trains to the last step, or to SIGTERM; saves on either. The process's exit code."""
        learner, journal = self.learner, self.journal
        resumed = self._resume()
        if self.accelerator.num_processes > 1:
            check_alike(self.accelerator, learner.fingerprint(), self.recipe.folder)
        if resumed:
            self._mark_best()  # it may have been killed just before it did
        last = learner.step >= self.recipe.steps
        if (last and journal.replayed()) or (resumed and journal.ended()):
            self._finish()
            return 0
        states = self._states(processes)  # SIGTERM may end it: it goes on at the next shard
        before = signal.signal(signal.SIGTERM, self._on_sigterm)
        try:
            return self._train(resumed, states)
        finally:
            signal.signal(signal.SIGTERM, before)

    def _train(self, resumed: bool, states: States) -> int:
        learner, journal = self.learner, self.journal
        self._announce()
        journal.open(resumed)
        if self._due() and not journal.replayed():  # step 0, or a run stopped before its replay
            self._evaluate()
        tokens, began = learner.tokens, time.perf_counter()
        while learner.step < self.recipe.steps:
            sums, norm = learner.advance(states)
            journal.window.add(sums)
            if learner.running.switch(self.recipe.switch_alpha):
                self._say_switch()
            if learner.logs(learner.step):
                journal.train(norm, (learner.tokens - tokens) / (time.perf_counter() - began))
                tokens, began = learner.tokens, time.perf_counter()
            stop = on_any(self.accelerator, self.stopping)  # once: it may come at any moment
            if self._due() or stop:
                learner.save(journal.state())
            if stop and learner.step < self.recipe.steps:
                journal.say(f"stopped at step {learner.step}; the same command goes on from there")
                return STOPPED
            if self._due():
                aside = time.perf_counter()
                self._evaluate()
                if unmoved := ", ".join(sorted(learner.unmoved)):
                    journal.say(f"step {learner.step}: warning: never moved so far: {unmoved}")
                if journal.ended():
                    break
                began += time.perf_counter() - aside
        self._finish()
        return 0

    def _announce(self) -> None:
        """Says what is about to be trained. Raises UserError where the disk cannot hold it."""
        learner, recipe = self.learner, self.recipe
        parameters = sum(p.numel() for p in learner.trained)
        left = -(-(recipe.steps - learner.step) // recipe.save_every)
        need = left * learner.checkpoint_size()
        free = shutil.disk_usage(recipe.folder).free
        self.journal.say(
            f"{recipe.drafter} drafter, {parameters:,} trained parameters "
            f"({16 * parameters / 2**20:.0f} MiB with gradients and optimizer; {left} checkpoints "
            f"take {need / 2**20:.0f} MiB of disk), {learner.drafter.vocab.draft_size:,} draft "
            f"tokens that cover {learner.coverage:.1%} of the answers; {len(learner.learn)} "
            f"conversations to learn from, {len(learner.heldout)} held out; device "
            f"{self.accelerator.device}, {self.accelerator.mixed_precision} autocast"
        )
        if free < need:
            raise UserError(
                f"{recipe.folder}: {left} checkpoints need {need / 2**20:.0f} MiB, the disk has "
                f"{free / 2**20:.0f}; raise save_every or free some"
            )
        learner.announce(self.journal.say)

    def _states(self, processes: Processes) -> States:
        """What steps learn from; replay, which chooses the checkpoint, reads no rounded states."""
        learner = self.learner
        if not self.recipe.feature_cache:
            return learner.states
        taps, precision = learner.drafter.taps, self.accelerator.mixed_precision
        cache = FeatureCache(self.recipe, learner.target, learner.samples, taps, precision)
        cache.prepare(self.accelerator, processes)
        return cache

    def _due(self) -> bool:
        """Whether this step gets a checkpoint and a replay."""
        step = self.learner.step
        return step % self.recipe.save_every == 0 or step == self.recipe.steps

    def _evaluate(self) -> None:
        """Replays the held-out conversations, and points `best` at the best checkpoint so far.

        Logged beside tau: what it is on the same text where q's argmax is drafted, as servers do.
        """
        learner, recipe = self.learner, self.recipe
        samplers = [None] if recipe.sampler.greedy else [None, Sampler(0.0)]
        with self.accelerator.autocast():
            heldout = learner.read_heldout(learner.replay_states)
            found = replay_samplers(learner.drafter, heldout, recipe.k, samplers, recipe.seed)
        self.journal.replay(found[0], found[-1])
        self._mark_best()
        if also := learner.extra_figures():
            self.journal.say(f"step {learner.step}: {also[0]}")
            self.journal.write(**also[1])

    def _mark_best(self) -> None:
        if not self.accelerator.is_main_process:
            return
        if best := self.learner.choose(self.journal.replays()):
            checkpoint.mark_best(self.recipe.folder, best["step"])

    def _finish(self) -> None:
        result = self.learner.summary(self.learner.choose(self.journal.replays()))
        self.journal.say(f"{self.recipe.folder} is finished; {result}")

    def _resume(self) -> bool:
        """Goes on from the last checkpoint; False when there is none."""
        learner = self.learner
        state = learner.resume()
        if state is None:
            return False
        self.journal.restore(state)
        self.journal.say(
            f"resuming {self.recipe.folder} at step {learner.step}, {learner.batch} rows a step "
            "as it began"
        )
        return True

    def _say_switch(self) -> None:
        learner = self.learner
        threshold = self.recipe.switch_alpha[learner.running.stage - 1]
        self.journal.say(
            f"step {learner.step}: alpha_0 {float(learner.running.mean_alpha[0]):.3f} has passed "
            f"{threshold}: {learner.objective.loss} from here on"
        )
        self.journal.write(kind="switch", loss=learner.objective.loss)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True
