"""A fake vLLM over HTTP, for tests of what is said to a server and what goes wrong."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from torch import Tensor

from draftsmith.drafters.base import Drafter, Policy, Proposal
from draftsmith.drafters.sampling import Noise, Sampler
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.servers.client import Counters


class Fake:
    """vLLM as far as a check sees it: two tokens a round, of k=3 drafts one accepted."""

    def __init__(self) -> None:
        self.rounds = self.tokens = 0
        self.k = 3
        self.version: dict[str, Any] = {"version": "0.32.0"}
        self.status = 200
        self.ids = True
        self.others = 0  # tokens that somebody else asks for meanwhile
        self.renamed = False

    def metrics(self) -> str:
        lines = {
            "spec_decode_num_drafts_total": self.rounds,
            "spec_decode_num_draft_tokens_total": self.k * self.rounds,
            "spec_decode_num_accepted_tokens_total": self.rounds,
            'spec_decode_num_accepted_tokens_per_pos_total{position="0"}': self.rounds,
            f'spec_decode_num_accepted_tokens_per_pos_total{{position="{self.k - 1}"}}': 0,
            "generation_tokens_total": self.tokens,
        }
        lead = "vllm:new_" if self.renamed else "vllm:"
        return "".join(f"{lead}{name} {value}.0\n" for name, value in lines.items())

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert asked["ignore_eos"] and asked["prompt"] and asked["top_p"] == 1.0
        self.rounds += asked["max_tokens"] // 2
        self.tokens += asked["max_tokens"] + self.others
        ids = [7] * asked["max_tokens"] if self.ids else None
        return {"choices": [{"text": "..", "token_ids": ids}]}

    @contextmanager
    def listening(self) -> Iterator[str]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def reply(self, status: int, content: str) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(content.encode())

            def do_GET(self) -> None:
                if self.path == "/version":
                    self.reply(200, json.dumps(fake.version))
                else:
                    self.reply(200, fake.metrics())

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if fake.status != 200:
                    self.reply(fake.status, '{"error":\n "no room"}')
                else:
                    self.reply(200, json.dumps(fake.complete(asked)))

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            server.server_close()


@cache
def argmax_drafts(drafter: Drafter) -> Drafter:
    """The same drafter, proposing q's argmax at any temperature: what servers do by default."""
    one, propose = copy.copy(drafter), drafter.propose

    def greedily(state: Any, root: Tensor, policy: Policy, _: Sampler, noise: Noise) -> Proposal:
        return propose(state, root, policy, Sampler(0.0), noise)

    object.__setattr__(one, "propose", greedily)
    return one


@cache
def decoder(drafter: Drafter, k: int) -> Decoder:
    return Decoder(drafter.target, drafter, Policy(k))


def served(
    drafter: Drafter, prompts: dict[int, list[int]], tokens: int, temperature: float, k: int
) -> Iterator[tuple[list[int], Counters]]:
    """Answers to prompts (by the id that keys their noise) of our own decoder, counted as vLLM
    counts: it drafts k tokens in every round and counts what it accepted past the answer's limit.
    The drafter's target must not end texts."""
    rows, given = [*prompts], [*prompts.values()]
    for text in decoder(drafter, k).generate(given, Sampler(temperature), tokens + k, rows=rows):
        last = len(text.prompt) + tokens - 2  # rounds from there on begin past the limit
        within = [r.accepted for r in text.rounds if r.anchor < last]
        accepted = tuple(sum(m > j for m in within) for j in range(k))
        yield text.tokens[:tokens], Counters(len(within), k * len(within), accepted, tokens)


class Decoding(Fake):
    """One that writes with our own decoder, drafts as vLLM does for each request's temperature:
    q's argmax, or with `sampled` drawn from q."""

    def __init__(self, drafter: Drafter, sampled: bool = False) -> None:
        super().__init__()
        self.drafter, self.sampled = drafter, sampled
        self.counted = Counters(accepted=(0,) * self.k)

    def metrics(self) -> str:
        counted = self.counted
        lines = {
            "spec_decode_num_drafts_total": counted.drafts,
            "spec_decode_num_draft_tokens_total": counted.drafted,
            "spec_decode_num_accepted_tokens_total": sum(counted.accepted),
            "generation_tokens_total": counted.tokens,
        }
        for j, count in enumerate(counted.accepted):
            lines[f'spec_decode_num_accepted_tokens_per_pos_total{{position="{j}"}}'] = count
        return "".join(f"vllm:{name} {value}.0\n" for name, value in lines.items())

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        drafter = self.drafter if self.sampled else argmax_drafts(self.drafter)
        prompts = {asked["seed"]: asked["prompt"]}
        how = (asked["max_tokens"], asked["temperature"], self.k)
        [(ids, counted)] = served(drafter, prompts, *how)
        self.counted += counted
        return {"choices": [{"text": "..", "token_ids": ids}]}
