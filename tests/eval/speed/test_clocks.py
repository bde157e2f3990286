"""Clocks that cannot lie: a machine that is slow for a while makes no speed a result.

    .venv/bin/pytest tests/eval/speed/test_clocks.py

Time is a test's own: it passes in verify passes alone, and slower where the test says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import tiny
from draftsmith.drafters.base import Policy, family
from draftsmith.drafters.sampling import Sampler
from draftsmith.eval import evaluate
from draftsmith.eval.decoder import loop
from draftsmith.eval.decoder.loop import Clock, Decoder
from draftsmith.eval.decoder.round import Rounds
from draftsmith.eval.evaluate import Evaluation
from draftsmith.eval.report import plots
from draftsmith.eval.servers.check import collect, steadiness
from draftsmith.eval.servers.client import Answer, Counters
from draftsmith.eval.speed import bench, bench_table, clocks, speed_model
from draftsmith.eval.speed.bench import BenchPrompt, Cell, Store
from draftsmith.eval.speed.clocks import Steadiness, spread, spread_of_rounds, worst
from draftsmith.eval.speed.speed_model import Costs, Drafting
from draftsmith.recipes import compare_page
from draftsmith.recipes.compare import _baselines

STEP = 1 / 32  # seconds of a verify pass: a number whose sums are exact
Slow = Callable[
    [bool, int], float
]  # (by the drafter, its turn, from 0 on) -> how many times slower


# ---------------------------------------------------------------- the spread


def test_spread_by_hand() -> None:
    assert spread([(1.0, 1.0)]) is None and spread([]) is None
    assert spread([(1.0, 1.0), (0.0, 0.0)]) is None  # a turn without a round says nothing
    assert spread([(2.0, 1.0)] * 5) == 0
    # Halves at 1 and 1.2: apart by 0.2 of a mean of 1.1, in whatever order.
    assert spread([(1.0, 1.0), (1.2, 1.0)] * 3) == pytest.approx(0.2 / 1.1)
    assert spread([(10.0, 10.0), (12.0, 10.0)]) == pytest.approx(0.2 / 1.1)
    # One of eight slower by 0.8: 4 f (1 - f) d of a mean of 1.1.
    one = spread([(1.8, 1.0)] + [(1.0, 1.0)] * 7)
    assert one == pytest.approx(4 * (1 / 8) * (7 / 8) * 0.8 / 1.1)
    # Twice the work in twice the time is no difference.
    assert spread([(1.0, 1.0), (2.0, 2.0)]) == 0


def rounds(*pairs: tuple[int, float]) -> list[Clock]:
    return [Clock(verify=seconds, width=width, rounds=1) for width, seconds in pairs]


def test_rounds_compare_with_those_of_their_width() -> None:
    """A turn that proposed less took less time, and is no other machine."""
    wide, narrow = (4, 3.0), (1, 1.0)
    assert spread_of_rounds([rounds(wide, wide, narrow), rounds(narrow, narrow)]) == 0
    slow = rounds((4, 6.0), (4, 6.0), (1, 2.0))
    found = spread_of_rounds([rounds(wide, wide, narrow), slow])
    assert found is not None and found > clocks.BUSY


def test_what_is_no_measurement() -> None:
    assert not Steadiness(8, 0.09, 0.09).busy and Steadiness(8, 0.09).note == ""
    for busy in (Steadiness(8, 0.37), Steadiness(8, 0.0, 0.37)):
        assert busy.busy and "busy: not a measurement" in busy.note and "37%" in busy.note
    single = Steadiness(1, None)
    assert single.busy and single.note.startswith("Too few turns")
    assert worst(Steadiness(4, 0.3, 0.0), Steadiness(8, 0.0, 0.2)) == Steadiness(4, 0.3, 0.2)
    assert worst(single, Steadiness(8, 0.5)).baseline_spread is None
    assert json.loads(json.dumps(single.report()))["busy"] is True


# ---------------------------------------------------------------- a machine slow for a while


class Machine:
    """A pass takes STEP seconds, times what `slow` says. calls: whose turn it was, by the drafter
    or not, warm-ups included."""

    def __init__(self, patch: pytest.MonkeyPatch, slow: Slow, warm: int = 1) -> None:
        self.now, self.calls = 0.0, []  # type: ignore[var-annotated]
        self.began = 0.0
        patch.setattr(loop, "time", self)
        verify, generate = Rounds.verify, Decoder.generate

        def slowed(rounds: Rounds) -> Any:
            drafting = rounds.drafter is not None
            self.now += STEP * slow(drafting, self.calls.count(drafting) - 1 - warm)
            return verify(rounds)

        def counted(decoder: Decoder, *args: Any, **kwargs: Any) -> Any:
            self.calls.append(decoder.drafter is not None)
            return generate(decoder, *args, **kwargs)

        patch.setattr(Rounds, "verify", slowed)
        patch.setattr(Decoder, "generate", counted)

    def perf_counter(self) -> float:
        return self.now


PROMPTS = tiny.prompts(6)


def evaluated(patch: pytest.MonkeyPatch, slow: Slow, warm: int = 1) -> tuple[Evaluation, Machine]:
    target = tiny.target("Llama")
    drafter = family("small").create(target, family("small").Config(layers=[0, 1, 3])).eval()
    with patch.context() as inner:
        machine = Machine(inner, slow, warm)
        found = evaluate.evaluate(target, drafter, PROMPTS, Sampler(0.0), Policy(2), 12)
    return found, machine


def even(drafting: bool, turn: int) -> float:
    return 1.0


def test_they_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-ups, then drafter and baseline prompt by prompt; texts are what they always were."""
    found, machine = evaluated(monkeypatch, even)
    assert machine.calls == [True, False] + [True, False] * len(PROMPTS)
    assert not found.decode.clock.busy and found.decode.clock.baseline_spread == 0
    assert found.decode.clock.turns == len(PROMPTS)
    # A pass takes one step: the speedup is tau.
    assert found.decode.speedup == pytest.approx(found.decode.tau)
    texts = Decoder(tiny.target("Llama")).generate(PROMPTS, Sampler(0.0), 12)
    assert found.decode.tokens == sum(len(text.tokens) - 1 for text in texts)
    assert found.decode.texts_equal_to_baseline == len(PROMPTS)


BASELINE: dict[str, Slow] = {
    "second half": lambda drafting, turn: 2.0 if not drafting and turn >= 3 else 1.0,
    "every other turn": lambda drafting, turn: 2.0 if not drafting and turn % 2 else 1.0,
    "a third, by a third": lambda drafting, turn: 1.33 if not drafting and turn < 2 else 1.0,
    "the whole machine": lambda drafting, turn: 2.0 if turn >= 3 else 1.0,
}


@pytest.mark.parametrize("name", list(BASELINE))
def test_a_slow_half_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = evaluated(monkeypatch, BASELINE[name])
    clock = found.decode.clock
    assert clock.busy and clock.baseline_spread is not None and clock.baseline_spread > clocks.BUSY
    told = found.report()["decode"]["clock"]
    assert told["busy"] and "the baseline differs" in told["note"]
    assert told["baseline_spread"] == clock.baseline_spread


def test_a_machine_slow_for_long_slows_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """In turns the ratio stays; fault: all of one, then all of the other, and nobody sees it."""
    right, _ = evaluated(monkeypatch, even)

    def check() -> None:
        found, _ = evaluated(monkeypatch, lambda drafting, turn: 2.0 if late() else 1.0)
        assert found.decode.speedup == pytest.approx(right.decode.speedup, rel=0.15)
        assert found.decode.clock.busy

    calls: list[Any] = []
    take = clocks.take_turn

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return take(*args, **kwargs)

    def late() -> bool:
        return len(calls) > len(PROMPTS)

    monkeypatch.setattr(clocks, "take_turn", counted)
    check()

    def apart(decoders: Any, *args: Any, **kwargs: Any) -> Any:
        return [side for one in decoders for side in together([one], *args, **kwargs)]

    calls.clear()
    together = clocks.in_turns
    monkeypatch.setattr(evaluate, "in_turns", apart)
    with pytest.raises(AssertionError):
        check()


def test_a_slow_drafter_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """In half of its turns: marked. In all of them: the figure says so."""
    half, _ = evaluated(monkeypatch, lambda drafting, turn: 2.0 if drafting and turn >= 3 else 1.0)
    assert half.decode.clock.busy and half.decode.clock.baseline_spread == 0
    assert "the drafter differs" in half.decode.clock.note
    always, _ = evaluated(monkeypatch, lambda drafting, turn: 2.0 if drafting else 1.0)
    assert not always.decode.clock.busy
    assert always.decode.speedup == pytest.approx((always.decode.tau or 0) / 2)


def test_one_prompt_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.PROMPTS", PROMPTS[:1])
    found, _ = evaluated(monkeypatch, even)
    assert found.decode.clock.busy and "Too few turns" in found.decode.clock.note


# ---------------------------------------------------------------- what costs are worth


def costs(patch: pytest.MonkeyPatch, slow: Slow) -> Costs:
    target = tiny.target("Llama")
    drafter = family("small").create(target, family("small").Config(layers=[0, 1, 3])).eval()
    with patch.context() as inner:
        Machine(inner, slow, warm=0)
        return speed_model.measure(target, drafter, [2], PROMPTS[0], Sampler(0.0), 8, 4)


DRAFTING = Drafting({2: 2.5}, {2: (2.4, 2.6)}, 0.8, 10)


def test_costs_of_a_busy_machine_allow_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    found = costs(monkeypatch, even)
    assert found.clock == Steadiness(4, 0.0, 0.0)
    assert speed_model.verdict(found, DRAFTING).startswith("Speculation pays")
    for drafting in (False, True):
        found = costs(monkeypatch, lambda d, turn, w=drafting: 2.0 if d == w and turn > 1 else 1.0)
        said = speed_model.verdict(found, DRAFTING)
        assert found.clock.busy and said == found.clock.note and "pays" not in said


# ---------------------------------------------------------------- bench and compare


def benched(patch: pytest.MonkeyPatch, slow: Slow, folder: Any) -> dict[str, Any]:
    target = tiny.target("Llama")
    drafter = family("small").create(target, family("small").Config(layers=[0, 1, 3])).eval()
    cells = [Cell("small", Policy(k), 2, 0.0) for k in (1, 2)]
    settings = {"target": "x", "alpha": None, "prompts": 6, "max_new_tokens": 12, "warm_up": 8}
    about = {"device": "cpu", "dtype": "float32", "commit": None, "command": "test"}
    with patch.context() as inner:
        Machine(inner, slow, warm=0)
        asked = [BenchPrompt(ids, "chat") for ids in PROMPTS]
        store = Store(folder, settings, about)
        bench.run(target, {"small": drafter}, cells, asked, 12, store)
    return json.loads((folder / "bench.json").read_text())


def test_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Its cells take turns too; a busy one has no verdict, and its JSON says so."""
    found = benched(monkeypatch, even, tmp_path / "even")
    text = bench_table.markdown(found)
    assert "busy:" not in text and "small, batch 2, T=0: pays" in text
    cell = found["cells"]["small: chain k=2, batch 2, T=0"]
    assert cell["measured_speedup"] == pytest.approx(cell["predicted_speedup"], rel=0.2)
    found = benched(monkeypatch, lambda d, turn: 2.0 if not d and turn % 2 else 1.0, tmp_path / "b")
    assert all(cell["clock"]["busy"] for cell in found["cells"].values())
    text = bench_table.markdown(found)
    assert "pays" not in text and "Machine busy: not a measurement" in text
    assert "| busy |" in text


def test_bench_measures_old_cells_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Cells of a version that took no turns."""
    found = benched(monkeypatch, even, tmp_path)
    for cell in found["cells"].values():
        del cell["clock"]
    (tmp_path / "bench.json").write_text(json.dumps(found))
    assert all("clock" in c for c in benched(monkeypatch, even, tmp_path)["cells"].values())


def test_baselines_of_drafters_are_one() -> None:
    """16.4, 3.9 and 5.7 tokens a second: each may have been steady, and none is a measurement."""

    def report(*speeds: float) -> dict[str, Any]:
        steady = Steadiness(8, 0.02).report()
        drafters = {
            f"d{i}": {
                "at": {
                    "T=1": {
                        "clock": steady,
                        "verdict": "Speculation pays: 1.71x",
                        "decode": {"baseline_tokens_per_s": of},
                    }
                }
            }
            for i, of in enumerate(speeds)
        }
        return {"drafters": drafters, "baselines": {"T=1": _baselines(drafters, "T=1")}}

    lying = report(16.4, 3.9, 5.7)
    assert lying["baselines"]["T=1"]["busy"]
    for name in lying["drafters"]:
        assert compare_page.clock(lying, name, "T=1")["busy"]
        assert "pays" not in compare_page.verdict(lying, name, "T=1")
    for right in (report(16.4, 16.0, 16.2), report(16.4)):
        assert compare_page.verdict(right, "d0", "T=1").startswith("Speculation pays")


class Serving:
    """A server whose answers take a second, times what `slow` says."""

    def __init__(self, drafting: bool, slow: Slow, asked: list[bool]) -> None:
        self.drafting, self.slow, self.asked = drafting, slow, asked
        self.turn = -1  # a warm-up comes first

    def ask(self, prompt: list[int], tokens: int, *rest: Any) -> Answer:
        seconds = self.slow(self.drafting, self.turn)
        self.turn += 1
        self.asked.append(self.drafting)
        return Answer(prompt, [0] * tokens, seconds * len(prompt), Counters())


@pytest.mark.parametrize("name", ["", *(n for n in BASELINE if n != "every other turn")])
def test_servers(name: str) -> None:
    """They answer in turns; one without drafts that was slow for a while is told, though prompts
    of all lengths take their own time."""
    asked: list[bool] = []
    sides: Any = {Serving(d, BASELINE.get(name, even), asked): None for d in (False, True)}
    prompts = [[5] * n for n in (3, 50, 8)]
    plain, drafted = collect(sides, prompts, 6, 0)
    assert asked == [False, True] * (1 + 2 * len(prompts))
    found = steadiness(plain)
    assert found.turns == 6 and found.busy == bool(name)
    assert len(drafted[1.0]) == len(prompts)


def test_plots_grey_it() -> None:
    """The marks of a busy sampler, and no others."""
    steady, busy = Steadiness(8, 0.02).report(), Steadiness(8, 0.4).report()

    def report(predicted: Any, measured: Any) -> dict[str, Any]:
        row = {"predicted_speedup": 1.2}
        ms = {"step": 1.0, "draft": {"1": 1.0}, "verify": {"1": 1.0, "2": 1.0}, "host": 0.1}
        return {
            "k": 1,
            "served": "T=1",
            "by_k": {"T=0": {"1": row}, "T=1": {"1": row}},
            "speed": {
                "T=0": {"clock": steady},
                "T=1": {"clock": predicted, "costs_ms": ms | {"round": {"1": 2.1}}},
            },
            "decode": {
                "T=0": {"k": 1, "decode": {"speedup": 1.1, "clock": steady}},
                "T=1": {"k": 1, "decode": {"speedup": 1.1, "clock": measured}},
            },
        }

    for predicted, measured, greys in ((steady, steady, 0), (steady, busy, 1), (busy, steady, 2)):
        drawn = plots.speedup_by_k(report(predicted, measured))
        assert drawn.count("grey") == greys and drawn.count("machine busy") == min(greys, 1)
        assert drawn.count(" s0") == 3  # T=0's line, dot and ring keep their colour
    assert plots.round_time(report(busy, steady)).count("bar grey") == 4
    assert "grey" not in plots.round_time(report(steady, busy))
