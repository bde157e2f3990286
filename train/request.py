"""One HTTP request for JSON, and whose fault it is where none comes.

Refused   the request's: the server read it, and would say the same again
Failed    not known: it failed at this one, and may answer others (500, too slow, cut off)
Away      the server's: nobody gets an answer now (no connection, too many requests, starting,
          or a proxy's page in its place)
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


class Refused(Exception):
    """The server will not have this request."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status}: {said}")
        self.status, self.said = status, said

    @property
    def hint(self) -> str:
        if self.status in (401, 403):
            return f"set {KEY} to its key"
        return "is the address right, and the server OpenAI-compatible?"


class Failed(Exception):
    """No answer. slow: it took all its time."""

    def __init__(self, why: str, slow: bool = False) -> None:
        super().__init__(why)
        self.slow = slow


class Away(Failed):
    """No answer to anybody. wait: seconds that the server asks for."""

    def __init__(self, why: str, wait: float = 0.0) -> None:
        super().__init__(why)
        self.wait = wait


def fetch(url: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
    """The JSON object at an address, asked by POST where there is a body.

    timeout: seconds without a byte. Raises Refused, Failed, Away.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get(KEY):
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, headers)
    try:
        try:
            with urllib.request.urlopen(asked, timeout=timeout) as reply:
                content = reply.read()
        except urllib.error.HTTPError as error:
            raise _told(error, error.read()) from None  # whose text may be cut off as well
    except urllib.error.URLError as error:  # no connection
        raise Away(str(error.reason)) from None
    except (OSError, http.client.HTTPException) as error:
        why = str(error) or type(error).__name__
        raise Failed(why, slow=isinstance(error, TimeoutError)) from None
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Away(f"a page that is no JSON object: {_line(content)[:40]!r}")
    return found


def _told(error: urllib.error.HTTPError, content: bytes) -> Refused | Failed:
    said = _line(content)
    if error.code in AWAY:
        wait = error.headers.get("Retry-After", "")
        return Away(f"{error.code} {said}", float(wait) if wait.isdigit() else 0.0)
    return Failed(f"{error.code} {said}") if error.code in FAILED else Refused(error.code, said)


def _line(content: bytes) -> str:
    return " ".join(content.decode(errors="replace").split())[:_SHOWN]
