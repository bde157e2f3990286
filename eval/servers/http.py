"""One HTTP request, and whose fault it is where no answer comes.

Refused   the request's: the server read it, and would say the same again
Failed    not known: it failed at this one, and may answer others (500, too slow, cut off)
Away      the server's: nobody gets an answer now (no connection, too many requests, a proxy's page)
"""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from typing import Any

AWAY = (429, 502, 503)
FAILED = (408, 425, 500, 504)
KEY = "DRAFTSMITH_API_KEY"  # environment variable: the server's key, where it wants one
_SHOWN = 300  # letters of what a server says


class Fault(Exception):
    """No answer. said: the server's words, or why there are none; hint: what to do."""

    hint = "see its log"

    def __init__(self, said: str, status: int | None = None) -> None:
        super().__init__(said if status is None else f"{status}: {said}")
        self.said, self.status = said, status


class Refused(Fault):
    """The server will not have this request."""

    hint = "is the address right, and the server OpenAI-compatible?"


class Failed(Fault):
    """It may answer others. slow: it took all its time."""

    slow = False


class Away(Failed):
    """Nobody gets an answer. wait: seconds that the server asks for."""

    wait = 0.0


def fetch(url: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
    """The JSON object at an address, as `page` asks for it. Raises Refused, Failed, Away."""
    content = page(url, body, timeout)
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Away(f"a page that is no JSON object: {_line(content)[:40]!r}")
    return found


def page(url: str, body: dict[str, Any] | None, timeout: float) -> str:
    """The text at an address, asked by POST where there is a body.

    timeout: seconds without a byte. Raises Refused, Failed, Away.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        try:
            asked = urllib.request.Request(url, data, headers)
            with urllib.request.urlopen(asked, timeout=timeout) as reply:
                return reply.read().decode(errors="replace")
        except urllib.error.HTTPError as error:
            content = error.read().decode(errors="replace")  # may be cut off as well
            raise _fault(error, content) from None
    except urllib.error.URLError as error:  # no connection
        raise Away(str(error.reason)) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        failed = Failed(str(error) or type(error).__name__)
        failed.slow = isinstance(error, TimeoutError)
        raise failed from None


def _fault(error: urllib.error.HTTPError, content: str) -> Fault:
    kind = Away if error.code in AWAY else Failed if error.code in FAILED else Refused
    fault = kind(_line(content), error.code)
    if isinstance(fault, Away) and (wait := error.headers.get("Retry-After", "")).isdigit():
        fault.wait = float(wait)
    if error.code in (401, 403):
        fault.hint = f"set {KEY} to its key"
    return fault


def _line(content: str) -> str:
    return " ".join(content.split())[:_SHOWN]
