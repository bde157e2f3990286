"""An OpenAI-compatible server that answers: prompts go in as token ids, token ids come back.

vLLM returns the ids it drew (`return_token_ids`), llama.cpp does by its own /completion route
(`return_tokens`); both take the prompt as ids. Of any other server an answer's text is encoded
again: it is kept only if that gives as many tokens as the server counted, and reads as the same
text; the rest is given up, and counted.

Over a night a server may restart, be busy, or die. While it answers no request, every one waits,
and none is lost; after PATIENCE the command ends. A prompt is given up only where the server
fails at it and answers others.

llama.cpp's quantised kernels round activations too: at T=0 its tokens are not always the argmax
of the same weights read here, the audit refuses them, and --foreign takes them.
"""

from __future__ import annotations

import random
import re
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.ends import to_the_end
from draftsmith.drafters.target.target import Target
from draftsmith.eval.servers.http import Away, Failed, Refused, fetch
from draftsmith.train.data.prompts import Unusable

ANSWER_TIMEOUT = 900.0  # seconds: an answer that takes longer is asked for again
PROBE_TIMEOUT = 20.0
PATIENCE = 1800.0  # seconds without any answer: a large model loads within them
TELL = 60.0  # seconds of those before a line says so
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0  # seconds before another try; they double, and are jittered
TRIES = 8  # of a request that the server fails at while it answers others: about 2 minutes
SLOW_TRIES = 2  # of one that takes ANSWER_TIMEOUT
# Cuts and penalties that a server may apply by default, switched off by name.
NEUTRAL = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
# How servers refuse a prompt for its length (llama.cpp, vLLM, SGLang, OpenAI).
_LONG = re.compile(r"context[ _](length|size|window)|model length|longer than|too long", re.I)


@dataclass
class Endpoint:
    """A server's address and what it can do.

    kind: "llama.cpp", "vllm", "sglang" or "other"; model: the name it serves the target by; ids:
    whether it returns token ids; concurrency: requests at a time.
    """

    url: str
    model: str
    kind: str
    target: Target
    concurrency: int = 8
    ids: bool = True

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Before a run of `answer`s, which may come from several threads."""
        self.stopped = threading.Event()  # some thread failed: the others do not wait on
        self._away_since: float | None = None  # no request had an answer since
        self._said = False
        self._lock = threading.Lock()

    @classmethod
    def connect(
        cls, url: str, target: Target, model: str | None = None, concurrency: int = 8
    ) -> Endpoint:
        """Asks the server who it is, and for one token.

        Raises UserError: see `identify`; or it takes no prompt of token ids.
        """
        url, name, kind = identify(url, model)
        out = cls(url, name, kind, target, concurrency)
        prompt = list(target.tokenizer("Hello").input_ids)
        try:
            reply = out._ask(prompt, Sampler(0.0), 1, 0, PROBE_TIMEOUT)
            out.ids = out._drawn(reply) is not None
        except Refused as error:
            raise UserError(
                f"server {url}: refuses a prompt of token ids ({error}); {error.hint}"
            ) from None
        except (Failed, KeyError, IndexError, TypeError, ValueError) as error:
            line = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"server {url}: its first answer cannot be used ({line}); see its log"
            ) from None
        # Some put tokens of their own before the prompt.
        read = reply.get("tokens_evaluated", (reply.get("usage") or {}).get("prompt_tokens"))
        if read is not None and read != len(prompt):
            raise UserError(
                f"server {url}: read {read} tokens where the prompt has {len(prompt)}: it adds "
                "some of its own; start it so that prompts of token ids stay as they are"
            )
        return out

    def __str__(self) -> str:
        how = "returns token ids" if self.ids else "returns text only, which is encoded again"
        return f"server {self.url}: {self.kind}, model {self.model}; {how}"

    # ---------------------------------------------------------------- answers

    def answer(
        self, prompt: Sequence[int], sampler: Sampler, max_new_tokens: int, seed: int
    ) -> tuple[list[int], str]:
        """Token ids drawn after a prompt, the end token included, and why they end.

        Raises Unusable for an answer that does not come or cannot be trusted; UserError where the
        server refuses, or has answered no request for PATIENCE.
        """
        stopped = self.stopped
        tries = failures = slow = 0
        while not stopped.is_set():
            asked_at = time.monotonic()
            try:
                reply = self._ask(prompt, sampler, max_new_tokens, seed, ANSWER_TIMEOUT)
                found = self._read(reply, max_new_tokens)
                self._answers(asked_at)
                return found
            except Refused as error:
                if error.status == 413 or (error.status in (400, 422) and _LONG.search(error.said)):
                    raise Unusable("longer than the server's context") from None
                raise UserError(
                    f"server {self.url}: refuses ({error}); {error.hint} (what is answered stays)"
                ) from None
            except Failed as error:
                fault = error
            except (KeyError, IndexError, TypeError, ValueError) as error:
                fault = Failed(f"an answer of no known form, {error!r}")
            if isinstance(fault, Away) or not self._alive():
                self._wait_for_it(fault)
            else:
                failures, slow = failures + 1, slow + fault.slow
                if failures == TRIES or slow == SLOW_TRIES:
                    raise Unusable("the server fails at it again and again", str(fault))
            wait = min(LONGEST_WAIT, FIRST_WAIT * 2.0**tries) * (0.5 + random.random())
            asked = fault.wait if isinstance(fault, Away) else 0.0
            stopped.wait(max(wait, min(asked, PATIENCE)))
            tries = min(tries + 1, 16)
        raise UserError("stopped")

    def _alive(self) -> bool:
        """Whether it answers another request: then the prompt is at fault."""
        hello, asked_at = list(self.target.tokenizer("Hello").input_ids), time.monotonic()
        try:
            self._finish(self._ask(hello, Sampler(0.0), 1, 0, PROBE_TIMEOUT))
        except (Failed, Refused, KeyError, IndexError, TypeError):
            return False
        self._answers(asked_at)
        return True

    def _answers(self, asked_at: float) -> None:
        """What was asked before the server went away, and read late, does not say it is back."""
        with self._lock:
            if self._away_since is None or asked_at >= self._away_since:
                self._away_since, self._said = None, False

    def _wait_for_it(self, fault: Failed) -> None:
        """Says that it waits for a server that answers no request; UserError after PATIENCE."""
        with self._lock:
            now = time.monotonic()
            if self._away_since is None:
                self._away_since = now
            away = now - self._away_since
            said, self._said = self._said, self._said or away > TELL
        if away > PATIENCE:
            raise UserError(
                f"server {self.url}: no answer for {away / 60:.0f} minutes ({fault}); start it "
                "again, and run the same command: what is answered stays"
            )
        if self._said and not said:
            print(
                f"server {self.url}: no answer for {away / 60:.0f} minutes ({fault}); waiting up "
                f"to {PATIENCE / 60:.0f} for it (what is answered is stored)",
                file=sys.stderr,
                flush=True,
            )

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
        if self.kind == "llama.cpp":
            path = "/completion"
            # Its own order puts the temperature last, where top-p has cut another law.
            body |= {"n_predict": tokens, "repeat_penalty": 1.0, "return_tokens": True}
            body["samplers"] = ["temperature", "top_k", "top_p"]
        else:
            path = "/v1/completions"
            body |= {"max_tokens": tokens, "repetition_penalty": 1.0, "return_token_ids": True}
        return fetch(self.url + path, body, timeout)

    def _read(self, reply: dict[str, Any], max_new_tokens: int) -> tuple[list[int], str]:
        """Ids and finish of a reply. Raises Unusable where they cannot be trusted."""
        ids, finish = self._drawn(reply), self._finish(reply)
        if self.kind == "llama.cpp" and reply.get("truncated"):
            raise Unusable("longer than the server's context")
        if ids is None:
            ids = self._encoded_again(reply, finish)
        ends = self.target.eos_ids
        if stop := to_the_end(ids, ends):
            ids, finish = ids[:stop], "stop"  # its tokens say so; what follows is another text's
        elif finish == "stop":
            # A server that leaves the end token out: with one end token, it is no guess.
            if len(ends) != 1 or set(ids[-1:]) & set(self.target.tokenizer.all_special_ids):
                raise Unusable("an answer whose end token is not told")
            ids = [*ids, ends[0]]
        if not ids:
            raise Unusable("an empty answer")
        if max(ids) >= self.target.vocab_size:
            raise Unusable("a token that is outside the target's vocabulary", str(max(ids)))
        if finish == "length" and len(ids) < max_new_tokens:
            raise Unusable("longer than the server's context")
        return ids, finish

    def _finish(self, reply: dict[str, Any]) -> str:
        """Why a reply ends, in OpenAI's words."""
        if self.kind == "llama.cpp":
            why = reply["stop_type"]
            return {"eos": "stop", "limit": "length"}.get(why, why)
        return reply["choices"][0]["finish_reason"]

    def _drawn(self, reply: dict[str, Any]) -> list[int] | None:
        """The token ids that the server says it drew; None where it returns text only."""
        if self.kind == "llama.cpp":
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


def identify(url: str, model: str | None = None) -> tuple[str, str, str]:
    """A server's address, its name of the model, and its kind (see Endpoint).

    Raises UserError: no address, no answer, it serves no such model, or several.
    """
    url = url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--server: {url} is no address; write http://HOST:PORT")
    try:
        served = fetch(url + "/v1/models", None, PROBE_TIMEOUT)["data"]
        names = [entry["id"] for entry in served]
        owner = str(served[0].get("owned_by", "")) if served else ""
    except Refused as error:
        raise UserError(f"server {url}: /v1/models says {error}; {error.hint}") from None
    except Failed as error:
        raise UserError(f"server {url}: no answer ({error}); start it, or check --server") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"server {url}: /v1/models is no list; is it OpenAI-compatible?") from None
    if model not in names and (model is not None or len(names) != 1):
        has = ", ".join(names) or "none"
        what = f"no model {model}" if model else f"{len(names)} models"
        raise UserError(f"server {url}: serves {what} (it has {has}); name one by --model")
    kinds = {"llamacpp": "llama.cpp", "vllm": "vllm", "sglang": "sglang"}
    return url, model or names[0], kinds.get(owner, "other")
