"""What a run says and keeps: metrics.jsonl, trackers, the progress line, words on stderr.

Whether a run is finished, or goes on for nothing, follows from its log alone.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.drafters.errors import cannot_write
from draftsmith.eval.acceptance.replay import ReplayResult
from draftsmith.eval.report.provenance import provenance
from draftsmith.train import disk, trackers, watch
from draftsmith.train.learner import Learner
from draftsmith.train.objective.weights import Sums
from draftsmith.train.processes import on_any
from draftsmith.train.progress import CountLine


class Journal:
    """The log of a learner's run; the main process alone writes and says."""

    def __init__(self, learner: Learner) -> None:
        self.learner, self.recipe, self.accelerator = learner, learner.recipe, learner.accelerator
        self.main: bool = self.accelerator.is_main_process
        self.tau = float("nan")  # the last replay's
        self.began = time.perf_counter()
        self.file = self.recipe.folder / "metrics.jsonl"
        self.line: CountLine | None = None  # on the main process only, once it is open
        self.window = Sums.zero(learner.depths)  # since the last line of the log

    def open(self, resumed: bool) -> None:
        if self.main:
            recipe, step = self.recipe, self.learner.step
            self.line = CountLine("step", recipe.steps, step, every=0)
            # Without a checkpoint nothing that was logged before still holds.
            kept = self.lines() if resumed else []
            disk.write(self.file, "".join(json.dumps(m) + "\n" for m in kept))
            self._append(kind="start", step=step, seed=recipe.seed, **provenance())

    def say(self, text: str) -> None:
        if self.main:
            print(text, file=sys.stderr, flush=True)

    def write(self, **values: Any) -> None:
        """One line of metrics.jsonl, and the same keys to the tracker."""
        values |= {"step": self.learner.step, "tokens": self.learner.tokens}
        if self.line:
            self._append(**values)
        if self.recipe.tracker:
            self.accelerator.log(trackers.flat(values), step=self.learner.step)

    def _append(self, **values: Any) -> None:
        try:
            with self.file.open("a") as file:
                file.write(json.dumps(values) + "\n")
        except OSError as error:
            remedy = "make room, and run the same command again"
            raise cannot_write(self.file, error, remedy) from None

    def train(self, norm: float, speed: float) -> None:
        """The steps since the last line; norm: of the last gradient, speed in tokens/s."""
        learner = self.learner
        window, self.window = self.window, Sums.zero(learner.depths)
        loss = window.loss / (window.total or 1.0)
        alpha = (window.alpha / window.cells.clamp(min=1)).tolist()
        self.write(
            kind="train",
            loss=loss,
            alpha=alpha,
            lr=learner.schedule.get_last_lr()[0],
            grad_norm=norm,
            grad_norms=learner.norms,
            tokens_per_s=speed,
        )
        if self.line:
            figures = f"loss {loss:.4f}  alpha_0 {alpha[0]:.3f}  tau {self.tau:.3f}"
            self.line.show(learner.step, f"{figures}  {speed:,.0f} tokens/s")

    def replay(self, drawn: dict[int, ReplayResult], argmax: dict[int, ReplayResult]) -> None:
        """A replay by draft length: as drafts are drawn, and where q's argmax is drafted."""
        k = self.recipe.k
        result = drawn[k]
        self.tau = result.tau
        biased = " (biased: not the target's own)" if result.biased else ""
        self.say(
            f"step {self.learner.step}: replay tau {result.tau:.3f} "
            f"[{result.tau_ci[0]:.3f}, {result.tau_ci[1]:.3f}] at k={k}, alpha "
            + " ".join("-" if a is None else f"{a:.3f}" for a in result.alpha)
            + biased
        )
        self.write(
            kind="replay",
            tau=result.tau,
            tau_ci=list(result.tau_ci),
            alpha=result.alpha,
            tau_by_k={str(j): r.tau for j, r in drawn.items()},
            tau_greedy_by_k={str(j): r.tau for j, r in argmax.items()},
            k=k,
            seconds=self._seconds(),
            biased=result.biased,
        )

    def lines(self) -> list[dict[str, Any]]:
        """The log up to this step. The file may go on: where the last checkpoint was damaged and
        deleted, its lines are still there."""
        return [m for m in read_metrics(self.recipe.folder) if m["step"] <= self.learner.step]

    def replays(self) -> list[dict[str, Any]]:
        return [m for m in self.lines() if m["kind"] == "replay"]

    def replayed(self) -> bool:
        """Whether this step's replay is logged."""
        found = self.main and any(m["step"] == self.learner.step for m in self.replays())
        return on_any(self.accelerator, found)

    def ended(self) -> bool:
        """Whether tau has stopped rising for as long as the recipe's patience; says so."""
        why = watch.falling(self.lines(), self.recipe.patience)
        if on_any(self.accelerator, self.main and why is not None):
            self.say(f"step {self.learner.step}: ended early: {why}; the best checkpoint is kept")
            return True
        return False

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it."""
        return {"seconds": self._seconds(), "window": asdict(self.window)}

    def restore(self, state: dict[str, Any]) -> None:
        """Takes what `state` gave, once the learner stands where it was taken."""
        taus = [m["tau"] for m in self.replays()]
        self.tau = taus[-1] if taus else self.tau
        self.began -= state["seconds"]
        self.window = Sums(**state["window"])

    def _seconds(self) -> float:
        """Wall time of the run: replays and earlier parts included."""
        return time.perf_counter() - self.began


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """All logged lines of a run; a last line cut short by a kill is left out."""
    path = folder / "metrics.jsonl"
    out = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            out.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return out


def learned(folder: Path, step: int) -> int:
    """Target-made tokens that a run had learned from at a step, by its log; repeats counted."""
    lines = read_metrics(folder)
    return max((m["tokens"] for m in lines if "tokens" in m and m["step"] <= step), default=0)
