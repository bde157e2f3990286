"""Live progress of a run that answers prompts: a bar on a terminal, a line a minute elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

_EVERY = 60.0  # seconds between lines


class Answering:
    """Counts prompts and tokens; the time left follows from decoding steps.

    Steps are what takes time: a turn of a batch runs until its longest answer ends. steps: of all
    turns together, at most. shown False: it counts, and prints nothing.
    """

    def __init__(self, prompts: int, done: int, steps: int, shown: bool = True) -> None:
        self.prompts, self.done, self._shown = prompts, done, shown
        self.tokens = 0
        self._total = steps
        self._step = self._finished = 0
        self._started = self._logged = time.monotonic()
        console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("answers"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.0f} tokens/s"),
            TextColumn("{task.fields[left]} left"),
            console=console,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bar.add_task("", total=prompts, completed=done, rate=0.0, left="?")

    def __enter__(self) -> Answering:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    @property
    def rate(self) -> float:
        """Tokens per second since the start, prefill included."""
        return self.tokens / max(time.monotonic() - self._started, 1e-9)

    def step(self, new: int) -> None:
        """One decoding step, which gave `new` tokens."""
        self.tokens += new
        self._step += 1
        self._show()

    def answered(self, first: int, steps: int) -> None:
        """A turn of a batch has ended, which might have taken `steps`; `first` tokens came from its
        prefill."""
        self.tokens += first
        self._finished += steps
        self._step = 0
        self._show()

    def stored(self, prompts: int) -> None:
        """So many more prompts are answered."""
        self.done += prompts
        self._show()

    def _show(self) -> None:
        now = time.monotonic()
        share = min(1.0, (self._finished + self._step) / self._total)
        left = _clock((now - self._started) * (1 - share) / share) if share else "?"
        self._bar.update(self._task, completed=self.done, rate=self.rate, left=left)
        if self._shown and self._bar.disable and now - self._logged > _EVERY:
            self._logged = now
            self._bar.console.print(
                f"{self.done} of {self.prompts} prompts answered, {self.rate:.0f} tokens/s, "
                f"{left} left"
            )


def _clock(seconds: float) -> str:
    minutes = round(seconds) // 60
    return f"{minutes // 60}:{minutes % 60:02d}:{round(seconds) % 60:02d}"
