"""A fake vLLM over HTTP, for tests of what is said to a server and what goes wrong."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from draftsmith.drafters.base import Drafter, Policy
from draftsmith.drafters.sampling import Sampler
from draftsmith.eval.decoder.loop import Decoder


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


class Decoding(Fake):
    """One that writes with our own decoder, greedily whatever it is asked, and counts its rounds.

    The drafter's target must not end texts.
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter
        self.accepted = [0] * self.k

    def metrics(self) -> str:
        lines = {
            "spec_decode_num_drafts_total": self.rounds,
            "spec_decode_num_draft_tokens_total": self.k * self.rounds,
            "spec_decode_num_accepted_tokens_total": sum(self.accepted),
            "generation_tokens_total": self.tokens,
        }
        for j, count in enumerate(self.accepted):
            lines[f'spec_decode_num_accepted_tokens_per_pos_total{{position="{j}"}}'] = count
        return "".join(f"vllm:{name} {value}.0\n" for name, value in lines.items())

    def complete(self, asked: dict[str, Any]) -> dict[str, Any]:
        [text] = Decoder(self.drafter.target, self.drafter, Policy(self.k)).generate(
            [asked["prompt"]], Sampler(0.0), asked["max_tokens"]
        )
        self.rounds += len(text.rounds)
        self.tokens += len(text.tokens)
        for j in range(self.k):
            self.accepted[j] += sum(r.accepted > j for r in text.rounds)
        return {"choices": [{"text": "..", "token_ids": text.tokens}]}
