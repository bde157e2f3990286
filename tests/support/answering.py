"""A server that answers prompts, and fails in every way."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import tiny
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.train.data import endpoint
from draftsmith.train.data.endpoint import Endpoint
from draftsmith.train.data.prompts import Prompt, asked
from draftsmith.train.samples import answers
from draftsmith.train.samples.generate import generate
from draftsmith.train.samples.samples import Samples

NEW, COUNT = 12, 14
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def hasten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits, and parts of three conversations."""
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.001)
    monkeypatch.setattr(endpoint, "LONGEST_WAIT", 0.01)
    monkeypatch.setattr(endpoint, "PROBE_TIMEOUT", 2.0)
    monkeypatch.setattr(answers, "PART", 3)


def questions() -> list[Prompt]:
    """Every third a conversation of two turns."""
    later = ({"role": "user", "content": "y x"},)
    out = [asked(" ".join(LETTERS[i : i + 1 + i * 5 % 4]), "d") for i in range(COUNT)]
    return [Prompt(p.messages, None, "d", (later,) * (i % 3 == 0)) for i, p in enumerate(out)]


@cache
def copy_of(spec: str) -> Target:
    """The server's own: its threads answer while the target here audits."""
    return tiny.talker(seed=int(spec.rpartition("-")[2]))


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


Failure = tuple[int, dict[str, Any] | bytes | None]
Fault = Callable[[int, dict[str, Any]], Failure | None]


class Fake:
    """A server of some kind. fault(request number, body): a status and reply instead of an answer;
    status 0 hangs up, a reply of None is cut off. failed: the requests for an answer that got none.
    model: the one it serves; alters: what becomes of a right reply."""

    def __init__(self, of: Target, kind: str = "vllm") -> None:
        self.of, self.kind, self.model = copy_of(of.source.spec), kind, "tiny"
        self.fault: Fault = lambda number, body: None
        self.alters: Callable[[dict[str, Any]], dict[str, Any]] = lambda reply: reply
        self.bodies: list[dict[str, Any]] = []
        self.failed: list[dict[str, Any]] = []

    @property
    def asked(self) -> list[dict[str, Any]]:
        """Requests for an answer; others ask whether the server is there."""
        return [body for body in self.bodies if body["max_tokens"] > 1]

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
            content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if reply is not None:
                self.wfile.write(content)

        def do_GET(self) -> None:
            owner = {"vllm": "vllm", "llama.cpp": "llamacpp"}.get(fake.kind, "me")
            self.send(200, {"data": [{"id": fake.model, "owned_by": owner}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.bodies.append(body)
            failed = fake.fault(len(fake.bodies) - 1, body)
            if failed is not None and body.get("max_tokens", 0) > 1:
                fake.failed.append(body)
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
