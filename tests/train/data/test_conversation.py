"""Conversations: every turn answered by the target, on its own ids, as its template writes them.

.venv/bin/pytest tests/train/data/test_conversation.py
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.source import resolve
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder import loop
from draftsmith.train.data import chat_template
from draftsmith.train.data.chat_template import encode_fitting
from draftsmith.train.data.conversation import Conversation
from draftsmith.train.data.prompts import Prompt, Unusable, asked
from draftsmith.train.samples import answers
from draftsmith.train.samples.generate import generate
from draftsmith.train.samples.heldout import answered
from draftsmith.train.samples.samples import Sample, Samples
from draftsmith.train.samples.writing import Parts

PLAIN = tiny.CHAT
# As templates drop the thinking of earlier turns; here they put a word before them.
REWRITES = PLAIN.replace(
    "{{ m.content }}",
    "{{ 'w30 ' if m.role == 'assistant' and not loop.last else '' }}{{ m.content }}",
)
NEW, SEED = 10, 3


def user(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


def talks(count: int = 10) -> list[Prompt]:
    """Conversations of one to three turns."""
    letters = "abcdefghijklmnopq"
    later = [user("r s"), user("t")]
    return [Prompt(user(letters[i]), None, "d", tuple(later[: i % 3])) for i in range(count)]


def made(
    folder: Path, of: Target, prompts: Sequence[Prompt], sampler: Sampler, batch: int = 4
) -> Samples:
    return generate(of, list(prompts), sampler, NEW, folder, SEED, batch)


def rows(samples: Samples) -> list[tuple[Any, ...]]:
    return [(s.ids, s.made, s.finish, s.key) for s in samples]


def text(of: Target, ids: Sequence[int]) -> str:
    return str(of.tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def follows(of: Target, prompts: Sequence[Prompt], samples: Samples) -> int:
    """Checks rows that hold whole conversations against the template and against transformers'
    greedy text; returns how many later turns were asked."""
    later, hf = 0, tiny.ender()
    for prompt, sample in zip(prompts, samples, strict=True):
        steps = [prompt.messages, *prompt.later]
        messages: list[dict[str, str]] = []
        for turn, (start, end) in enumerate(sample.spans):
            messages += steps[turn]
            wanted = of.tokenizer.apply_chat_template(messages, tokenize=False)
            assert (
                text(of, sample.ids[:start]).split() == wanted.replace("<eos>", " <eos> ").split()
            )
            prefix = torch.tensor([sample.ids[:start]])
            answer = hf.generate(prefix, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
            answer = answer[0, start:].tolist()
            assert sample.ids[start:end] == answer
            assert turn == 0 or sample.ids[sample.spans[turn - 1][1] - 1] == tiny.EOS
            messages.append({"role": "assistant", "content": text(of, answer[:-1])})
        assert sample.spans[-1][1] == len(sample.ids)
        assert sample.finish == ("stop" if sample.ids[-1] == tiny.EOS else "length")
        done = len(sample.spans) - 1
        assert done == len(prompt.later) or sample.finish == "length"
        later += done
    return later


def test_turns_in_one_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    of, prompts = tiny.talker(), talks()
    samples = made(tmp_path / "s", of, prompts, Sampler(0.0))
    asked_ = follows(of, prompts, samples)
    assert asked_ >= 3
    left = sum(len(p.later) for p in prompts) - asked_
    assert left >= 1
    assert (
        f"{left} later turns were not asked: {left} the answer before them was cut" in caplog.text
    )
    assert samples.manifest["tokens_made"] == sum(sum(s.made) for s in samples)


def test_batches_and_order_change_nothing(tmp_path: Path) -> None:
    of, prompts = tiny.talker(), talks()
    one = made(tmp_path / "1", of, prompts, Sampler(), 1)
    assert rows(one) == rows(made(tmp_path / "7", of, prompts, Sampler(), 7))
    # Turns draw apart: a first turn alone is what it is within a conversation.
    firsts = made(tmp_path / "f", of, [Prompt(p.messages, None, "d") for p in prompts], Sampler())
    for whole, first in zip(one, firsts, strict=True):
        assert whole.ids[: len(first.ids)] == first.ids
    Samples.open(tmp_path / "1", of, audit=10)


def padding(folder: Path, *about: Any, patch: pytest.MonkeyPatch) -> tuple[float, Samples]:
    """The share of padding in all prefills of a run, and its samples."""
    padded, read, width = loop._padded, [], []

    def counted(prompts: list[list[int]], device: torch.device) -> Any:
        read.append(sum(map(len, prompts)))
        width.append(max(map(len, prompts)) * len(prompts))
        return padded(prompts, device)

    with patch.context() as here:
        here.setattr(loop, "_padded", counted)
        samples = made(folder, *about)
    return 1 - sum(read) / sum(width), samples


def check_padding(folder: Path, patch: pytest.MonkeyPatch) -> Samples:
    """First turns as long as each other, second ones not: batches are made anew for them."""
    lengths = [n for i in range(10) for n in (1 + i // 2, 40 - i // 2)]
    prompts = [Prompt(user("r s"), None, "d", (user("t " * n),)) for n in lengths]
    share, samples = padding(folder, tiny.talker(), prompts, Sampler(), 2, patch=patch)
    assert sum(len(sample.spans) == 2 for sample in samples) > 8
    assert share < 0.15
    return samples


def in_order(lengths: Sequence[int], size: int) -> list[list[int]]:
    return [list(range(len(lengths)))[i : i + size] for i in range(0, len(lengths), size)]


def test_later_turns_are_batched_by_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: batches in the order of the first turn. More padding, the same texts."""
    good = check_padding(tmp_path / "good", monkeypatch)
    monkeypatch.setattr(answers, "buckets", in_order)
    with pytest.raises(AssertionError, match=r"assert 0\.2"):
        check_padding(tmp_path / "fault", monkeypatch)
    assert rows(Samples.open(tmp_path / "fault", tiny.talker(), 0)) == rows(good)


def test_resumed_between_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of, prompts = tiny.talker(REWRITES), talks()
    whole = made(tmp_path / "whole", of, prompts, Sampler(), 3)
    add = Parts.add
    for stop in range(3):
        count = 0

        def dies(self: Parts, values: list[dict[str, Any]], at: int = stop) -> None:
            nonlocal count
            if count == at:
                raise KeyboardInterrupt
            count += 1
            add(self, values)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Parts, "add", dies)
            made(tmp_path / "again", of, prompts, Sampler(), 3)
    assert rows(made(tmp_path / "again", of, prompts, Sampler(), 4)) == rows(whole)


def rewritten(of: Target, prompts: Sequence[Prompt], samples: Samples) -> int:
    """Checks rows of a template that rewrites: each is what the template writes, one answer at its
    end; returns how many later turns there are."""
    left = iter(samples)
    later = 0
    for prompt in prompts:
        messages: list[dict[str, str]] = []
        for turn, step in enumerate([prompt.messages, *prompt.later]):
            messages += step
            sample = next(left)
            ((start, end),) = sample.spans
            wanted = of.tokenizer.apply_chat_template(messages, return_dict=False)
            assert sample.ids[:start] == wanted and end == len(sample.ids)
            assert sample.key == prompt.key
            later += turn > 0
            if sample.finish != "stop":
                break
            messages.append({"role": "assistant", "content": text(of, sample.ids[start : end - 1])})
    assert next(left, None) is None
    return later


def test_a_template_that_rewrites(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    of, prompts = tiny.talker(REWRITES), talks()
    samples = made(tmp_path / "s", of, prompts, Sampler(0.0))
    later = rewritten(of, prompts, samples)
    assert later >= 3 and len(samples) == len(prompts) + later
    assert f"{later} turns became rows of their own" in caplog.text


def blindly(self: Conversation) -> tuple[list[int], bool]:
    """Planted fault: the template is trusted to leave earlier turns alone."""
    said = text(self.target, self._answer[:-1])
    before = self._messages
    more = self.prompt.later[self.turn]
    self._messages = (*before, {"role": "assistant", "content": said}, *more)
    tail = "".join(m["content"] + " z " for m in more)
    return self.ids + chat_template.encoded(self.target, tail), True


def reencoded(self: Conversation) -> tuple[list[int], bool]:
    """Planted fault: one row, but the whole conversation encoded anew."""
    ids, _ = Conversation.__dict__["_honest"](self)
    return ids, True


@pytest.mark.parametrize("fault", [blindly, reencoded])
def test_rewriting_planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    monkeypatch.setattr(Conversation, "_honest", Conversation._next, raising=False)
    monkeypatch.setattr(Conversation, "_next", fault)
    of, prompts = tiny.talker(REWRITES), talks()
    with pytest.raises((AssertionError, ValueError)):
        rewritten(of, prompts, made(tmp_path / "s", of, prompts, Sampler(0.0)))


def test_spans() -> None:
    made = [False, True, True, False, False, True]
    assert Sample([5] * 6, made, "stop", "d", "k").spans == [(1, 3), (5, 6)]
    assert Sample([5], [False], "stop", "d", "k").spans == []
    assert Sample([5], [True], "stop", "d", "k").spans == [(0, 1)]


def test_held_out_turns_are_texts(tmp_path: Path) -> None:
    """Each turn is decoded and replayed by itself, asked by all that stands before it."""
    of, prompts = tiny.talker(), talks()
    held = answered(tmp_path, of, prompts, Sampler(0.0), NEW, SEED)
    (folder,) = tmp_path.iterdir()
    samples = Samples.open(folder, of, audit=0)
    spans = [(s, span) for s in samples for span in s.spans]
    assert len(held.texts) == len(held.domains) == len(spans) > len(prompts)
    for text_, (sample, (start, end)) in zip(held.texts, spans, strict=True):
        assert text_.prompt + text_.tokens == sample.ids[:end] and len(text_.prompt) == start
        assert text_.finish == ("stop" if text_.tokens[-1] == tiny.EOS else "length")


# ---------------------------------------------------------------- what cannot be asked


def test_what_a_template_cannot_take(caplog: pytest.LogCaptureFixture) -> None:
    """Skipped and counted; what the template would silently leave out among it."""
    of = tiny.talker("{% if not enable_thinking is defined %}{% endif %}" + PLAIN)
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    prompts = [
        asked("a", "d"),
        Prompt(user("b"), None, "d", template={"enable_thinking": False}),
        Prompt(user("b"), None, "d", template={"tools": [call]}),
        Prompt((*user("b"), said), None, "d"),
        asked("b <eos> c", "d"),
        asked("b " * 600, "d"),
        Prompt(None, (tiny.VOCAB,), "d"),
    ]
    with caplog.at_level(logging.WARNING):
        ids = encode_fitting(prompts, of, NEW)
    assert [bool(row) for row in ids] == [True, True] + [False] * 5
    for reason in (
        "1 tools, which the chat template does not read (first: prompt 2: 'b')",
        "1 tool calls, which the chat template does not read",
        "1 text that holds the target's own control tokens (first: prompt 4: <eos>)",
        "1 too long for the target's 512 positions (first: prompt 5: 601 tokens",
        "1 a token that is outside the vocabulary",
    ):
        assert reason in caplog.text
    with pytest.raises(UserError, match="none of 1 can be asked: 1 text that holds"):
        encode_fitting(prompts[4:5], of, NEW)


def test_a_sampler_that_servers_would_apply(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM takes penalties from generation_config.json by default; samples here are without."""
    of = tiny.talker()
    made(tmp_path / "a", of, talks(1), Sampler(0.0))
    assert capsys.readouterr().err == ""
    of.hf.generation_config.repetition_penalty = 1.05
    made(tmp_path / "b", of, talks(1), Sampler(0.0))
    line = capsys.readouterr().err
    assert "asks for repetition_penalty 1.05, which is not applied here" in line
    of.hf.generation_config.repetition_penalty = None
    of.hf.generation_config.temperature, of.hf.generation_config.top_p = 0.6, 0.9
    of.quantised = "fp8, dequantised by transformers"
    made(tmp_path / "c", of, talks(1), Sampler(0.6))
    law, weights = capsys.readouterr().err.strip().splitlines()
    assert "asks for top_p 0.9, which servers take where a request names none" in law
    assert "its checkpoint is quantised (fp8, dequantised by transformers)" in weights


@pytest.mark.real
def test_drawn_ids_stay_on_a_real_template() -> None:
    """An answer that its text would encode to other tokens keeps those that were drawn."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve("smollm2", weights=False).path)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    of: Any = SimpleNamespace(tokenizer=tokenizer, eos_ids=[end], max_positions=2048)
    prompt = Prompt(user("Hi"), None, "d", (user("And then?"),))
    start = chat_template.encoded(of, chat_template.rendered(of, prompt, prompt.messages or ()))
    odd = [i for letter in "Hello you" for i in tokenizer(letter).input_ids]
    assert odd != tokenizer("Hello you").input_ids
    talk = Conversation(0, prompt, start, of)
    talk.take([*odd, end], "stop")
    assert talk.ask(100) and talk.rewritten == 0
    assert talk.ids[: len(start) + len(odd) + 1] == [*start, *odd, end]
    messages = [*prompt.messages, {"role": "assistant", "content": "Hello you"}, *user("And then?")]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(talk.ids) == whole
    # Trimmed by some templates, written as it stands by this one; cut answers are not built upon.
    cut = Conversation(0, prompt, start, of)
    cut.take(odd, "length")
    assert not cut.ask(100) and "was cut" in cut.unasked
    with pytest.raises(Unusable, match="the chat template refuses it"):
        chat_template.rendered(of, prompt, [{"role": "user"}])
