"""The live line: how much is left of the time, and how often it is written.

Fault: what was there already counts as done in no time, and the rest is promised too soon.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from draftsmith.train import progress
from draftsmith.train.progress import Answering, CountLine, clock


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still until `now` is set."""
    time = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: time.now))
    return time


def test_clock() -> None:
    assert [clock(s) for s in (0, 59.6, 3600, 36_061)] == [
        "0:00:00",
        "0:01:00",
        "1:00:00",
        "10:01:01",
    ]


def test_time_left_is_of_what_took_time(
    at: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    line = CountLine("features", 10, every=0)
    for _ in range(4):  # these were there
        line.count(made=False)
    at.now += 30
    line.count(figures="some")
    *_, last = capsys.readouterr().err.splitlines()
    assert last == "features 5/10  some  ETA 0:02:30"  # five more of 30 s
    line.first = 0  # planted
    at.now += 30
    line.count()
    assert capsys.readouterr().err == "features 6/10  ETA 0:00:40\n"


def test_a_line_a_minute_and_the_last(
    at: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    line = CountLine("decode", 100)
    for _ in range(100):
        at.now += 1
        line.after_prompt("speculative", 0, 3)
        line.after_prompt("speculative", 0, 0)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "decode 59/100  180 tokens  ETA 0:00:42",
        "decode 100/100  300 tokens  ETA 0:00:00",
    ]


def test_answers_are_as_far_as_their_steps(
    at: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two batches of 10 steps at most; the first ends early, and its steps count as done."""
    with Answering(4, 0, 20) as answers:
        at.now += 61
        for _ in range(4):
            answers.step(2)
        assert capsys.readouterr().err.startswith("answers 0/4  0 tokens/s  ETA 0:19:19\n")
        answers.answered(2, 10)
        at.now += 61
        answers.stored(2)
        assert capsys.readouterr().err == "answers 2/4  0 tokens/s  ETA 0:02:02\n"
        answers.stored(2)
    assert answers.tokens == 10
    assert capsys.readouterr().err.endswith("answers 4/4  0 tokens/s  ETA 0:00:00\n")
