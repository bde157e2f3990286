"""An OpenAI-compatible server that answers: prompts go in as token ids, token ids come back.

vLLM returns the ids it drew (`return_token_ids`), llama-server does by its own /completion route
(`return_tokens`); both take the prompt as ids. Of any other server an answer's text is encoded
again: it is kept only if that gives as many tokens as the server counted, and reads as the same
text; the rest is given up, and counted.

llama-server's quantised kernels round activations too: at T=0 its tokens are not always the argmax
of the same weights read here, the audit refuses them, and --foreign takes them.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target import Target
from draftsmith.train.prompts import Unusable

ANSWER_TIMEOUT = 900.0  # seconds: an answer that takes longer is asked for again
PROBE_TIMEOUT = 20.0
TRIES = 8  # of one request; the waits between them double, about 4 minutes in all
FIRST_WAIT = 1.0  # seconds
SLOW_TRIES = 2  # of a request that takes ANSWER_TIMEOUT
BUSY = (408, 425, 429, 500, 502, 503, 504)  # worth another try
KEY = "DRAFTSMITH_API_KEY"  # environment variable: the server's key, where it wants one
# Cuts and penalties that a server may apply by default, switched off by name.
NEUTRAL = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_LONG = ("context", "too long", "maximum", "exceed")  # words of a refusal for length


class Refused(Exception):
    """The server refuses a request, and would again."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status}: {said}")
        self.status, self.said = status, said


@dataclass
class Endpoint:
    """A server's address and what it can do.

    kind: "llama-server", "vllm", "sglang" or "other"; model: the name it serves the target by; ids:
    whether it returns token ids; concurrency: requests at a time.
    """

    url: str
    model: str
    kind: str
    target: Target
    concurrency: int = 8
    ids: bool = True

    def __post_init__(self) -> None:
        self.stopped = threading.Event()  # some thread failed: the others do not wait on

    @classmethod
    def connect(
        cls, url: str, target: Target, model: str | None = None, concurrency: int = 8
    ) -> Endpoint:
        """Asks the server who it is, and for one token.

        Raises UserError: see `identify`; or it takes no prompt of token ids.
        """
        url, name, kind = identify(url, model)
        out = cls(url, name, kind, target, concurrency)
        out._probe()
        return out

    def _probe(self) -> None:
        prompt = list(self.target.tokenizer("Hello").input_ids)
        try:
            reply = self._ask(prompt, Sampler(0.0), 1, 0, PROBE_TIMEOUT)
            self.ids = self._drawn(reply) is not None
        except Refused as error:
            raise UserError(
                f"server {self.url}: refuses a prompt of token ids ({error}); {_hint(error)}"
            ) from None
        except (_Busy, KeyError, IndexError, TypeError, ValueError) as error:
            line = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"server {self.url}: its first answer cannot be used ({line}); see its log"
            ) from None
        self._check_prompt(reply, prompt)

    def __str__(self) -> str:
        how = "returns token ids" if self.ids else "returns text only, which is encoded again"
        return f"server {self.url}: {self.kind}, model {self.model}; {how}"

    # ---------------------------------------------------------------- answers

    def answer(
        self, prompt: Sequence[int], sampler: Sampler, max_new_tokens: int, seed: int
    ) -> tuple[list[int], str]:
        """Token ids drawn after a prompt, the end token included, and why they end.

        Busy, failing and slow servers are asked again, with growing waits. Raises Unusable for an
        answer that cannot be had or trusted; UserError where the server is gone.
        """
        last = ""
        slow = 0
        for attempt in range(TRIES):
            if self.stopped.is_set():
                raise UserError("stopped")
            try:
                reply = self._ask(prompt, sampler, max_new_tokens, seed, ANSWER_TIMEOUT)
                return self._read(reply, max_new_tokens)
            except Refused as error:
                if error.status in (400, 413, 422) and any(w in error.said for w in _LONG):
                    raise Unusable("longer than the server's context") from None
                raise UserError(
                    f"server {self.url}: refuses ({error}); {_hint(error)} (what is answered stays)"
                ) from None
            except _Busy as error:
                last = str(error)
                slow += error.slow
                if slow == SLOW_TRIES:
                    break
                wait = FIRST_WAIT * 2**attempt * (0.5 + random.random())
                if attempt + 1 < TRIES:
                    self.stopped.wait(max(wait, error.wait))
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise Unusable("an answer of no known form", repr(error)) from None
        if self._alive():
            raise Unusable("an answer that the server fails at again and again", last)
        raise UserError(
            f"server {self.url}: no answer in {TRIES} tries ({last}); restart it and run again: "
            "what is answered stays"
        )

    def _alive(self) -> bool:
        """Whether it answers another request: then the prompt is at fault."""
        try:
            hello = list(self.target.tokenizer("Hello").input_ids)
            return bool(self._ask(hello, Sampler(0.0), 1, 0, PROBE_TIMEOUT))
        except (_Busy, Refused, ValueError, TypeError):
            return False

    def _ask(
        self, prompt: Sequence[int], sampler: Sampler, tokens: int, seed: int, timeout: float
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": list(prompt),
            "temperature": sampler.temperature,
            "top_k": sampler.top_k or -1,
            "top_p": sampler.top_p,
            "seed": seed,
            **NEUTRAL,
        }
        if self.kind == "llama-server":
            path = "/completion"
            # Its own order puts the temperature last, where top-p has cut another law.
            body |= {"n_predict": tokens, "repeat_penalty": 1.0, "return_tokens": True}
            body["samplers"] = ["temperature", "top_k", "top_p"]
        else:
            path = "/v1/completions"
            body |= {"max_tokens": tokens, "repetition_penalty": 1.0, "return_token_ids": True}
        reply = json.loads(_http(self.url + path, body, timeout))
        if not isinstance(reply, dict):
            raise TypeError(f"{path} gives no object")
        return reply

    def _read(self, reply: dict[str, Any], max_new_tokens: int) -> tuple[list[int], str]:
        """Ids and finish of a reply. Raises Unusable where they cannot be trusted."""
        ids = self._drawn(reply)
        if self.kind == "llama-server":
            if reply.get("truncated"):
                raise Unusable("longer than the server's context")
            finish = {"eos": "stop", "limit": "length"}.get(reply["stop_type"], reply["stop_type"])
        else:
            finish = reply["choices"][0]["finish_reason"]
        if ids is None:
            ids = self._encoded_again(reply, finish)
        if finish == "stop" and not set(ids[-1:]) & set(self.target.eos_ids):
            # A server that leaves the end token out: with one end token, it is no guess.
            if len(self.target.eos_ids) != 1:
                raise Unusable("an answer whose end token is not told")
            ids = [*ids, self.target.eos_ids[0]]
        if not ids:
            raise Unusable("an empty answer")
        if max(ids) >= self.target.vocab_size:
            raise Unusable("a token that is outside the target's vocabulary", str(max(ids)))
        if finish == "length" and len(ids) < max_new_tokens:
            raise Unusable("longer than the server's context")
        return ids, finish

    def _drawn(self, reply: dict[str, Any]) -> list[int] | None:
        """The token ids that the server says it drew; None where it tells text only."""
        if self.kind == "llama-server":
            ids = reply.get("tokens")
        else:
            ids = reply["choices"][0].get("token_ids")
        return list(ids) if ids else None

    def _encoded_again(self, reply: dict[str, Any], finish: str) -> list[int]:
        text = reply["choices"][0]["text"]
        counted = reply["usage"]["completion_tokens"]
        tokenizer = self.target.tokenizer
        ids = list(tokenizer(text, add_special_tokens=False).input_ids)
        same = tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
        # Some count the end token, which the text does not show.
        if not same or counted not in {len(ids), len(ids) + (finish == "stop")}:
            raise Unusable("an answer that encodes to other tokens than were drawn")
        return ids

    def _check_prompt(self, reply: dict[str, Any], prompt: Sequence[int]) -> None:
        """Raises UserError where the server put tokens of its own before the prompt."""
        read = reply.get("tokens_evaluated", (reply.get("usage") or {}).get("prompt_tokens"))
        if read is not None and read != len(prompt):
            raise UserError(
                f"server {self.url}: read {read} tokens where the prompt has {len(prompt)}: it "
                "adds some of its own; start it so that prompts of token ids stay as they are"
            )


def identify(url: str, model: str | None = None) -> tuple[str, str, str]:
    """A server's address, its name of the model, and its kind (see Endpoint).

    Raises UserError: no address, nobody answers, it serves no such model, or several.
    """
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--server: {url} is no address; write http://HOST:PORT")
    try:
        served = json.loads(_http(url + "/v1/models", None, PROBE_TIMEOUT))["data"]
        names = [entry["id"] for entry in served]
        owner = str(served[0].get("owned_by", "")) if served else ""
    except Refused as error:
        raise UserError(f"server {url}: /v1/models says {error}; {_hint(error)}") from None
    except _Busy as error:
        raise UserError(f"server {url}: no answer ({error}); start it, or check --server") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"server {url}: /v1/models is no list; is it OpenAI-compatible?") from None
    if model not in names and (model is not None or len(names) != 1):
        has = ", ".join(names) or "none"
        what = f"no model {model}" if model else f"{len(names)} models"
        raise UserError(f"server {url}: serves {what} (it has {has}); name one by --model")
    kinds = {"llamacpp": "llama-server", "vllm": "vllm", "sglang": "sglang"}
    return url, model or names[0], kinds.get(owner, "other")


# ---------------------------------------------------------------- HTTP


class _Busy(Exception):
    """No answer now; wait: seconds that the server asks for; slow: it took all its time."""

    def __init__(self, reason: str, wait: float = 0.0, slow: bool = False) -> None:
        super().__init__(reason)
        self.wait, self.slow = wait, slow


def _http(url: str, body: dict[str, Any] | None, timeout: float) -> bytes:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, data, headers), timeout=timeout
        ) as reply:
            return bytes(reply.read())
    except urllib.error.HTTPError as error:
        said = " ".join(error.read().decode(errors="replace").split())[:200]
        if error.code not in BUSY:
            raise Refused(error.code, said) from None
        asked = error.headers.get("Retry-After", "")
        raise _Busy(f"{error.code} {said}", float(asked) if asked.isdigit() else 0.0) from None
    except (OSError, http.client.HTTPException) as error:  # refused, reset, slow, cut short
        reason = getattr(error, "reason", error)
        slow = isinstance(reason, TimeoutError)
        raise _Busy(str(reason) or type(error).__name__, slow=slow) from None


def _hint(error: Refused) -> str:
    if error.status in (401, 403):
        return f"set {KEY} to its key"
    return "is the address right, and the server OpenAI-compatible?"
