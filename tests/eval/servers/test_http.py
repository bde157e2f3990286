"""One request and its faults: whose they are, and how long a server asks to be left alone.

.venv/bin/pytest tests/eval/servers/test_http.py
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from draftsmith.eval.servers import http


class Answers(BaseHTTPRequestHandler):
    """/STATUS answers with it, /slow late, /cut less than it promises, /page no JSON."""

    def do_GET(self) -> None:
        said, _, wait = self.path[1:].partition("-")
        if said == "slow":
            time.sleep(1)
        self.send_response(int(said) if said.isdigit() else 200)
        content = b"<html> \n</html>" if said == "page" else b'{"key": "%s"}' % self.key()
        self.send_header("Content-Length", str(len(content) + (said == "cut")))
        if wait:
            self.send_header("Retry-After", wait)
        self.end_headers()
        self.wfile.write(content)

    def key(self) -> bytes:
        return self.headers.get("Authorization", "none").encode()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("path", "kind", "status", "says"),
    [
        ("/400", http.Refused, 400, "400: {"),
        ("/401", http.Refused, 401, "401: {"),
        ("/408", http.Failed, 408, "408: {"),
        ("/500", http.Failed, 500, "500: {"),
        ("/429", http.Away, 429, "429: {"),
        ("/503", http.Away, 503, "503: {"),
        ("/slow", http.Failed, None, "timed out"),
        ("/cut", http.Failed, None, "IncompleteRead"),
        ("/page", http.Away, None, "no JSON object: '<html> </html>'"),
    ],
)
def test_whose_fault_it_is(url: str, path: str, kind: type, status: int | None, says: str) -> None:
    """Faults: a request refused for good that is asked again; a server that starts, given up."""
    with pytest.raises(http.Fault) as caught:
        http.fetch(url + path, None, 0.3)
    fault = caught.value
    assert type(fault) is kind and fault.status == status and says in str(fault)
    assert ("DRAFTSMITH_API_KEY" in fault.hint) == (status == 401)
    assert getattr(fault, "slow", False) == (path == "/slow")
    assert "\n" not in str(fault)


def test_nobody_there_and_no_address() -> None:
    with pytest.raises(http.Away, match="refused"):
        http.page("http://127.0.0.1:9", None, 1)
    with pytest.raises(http.Fault):
        http.page("http://[", None, 1)


def test_a_busy_server_says_how_long(url: str) -> None:
    for path, wait in (("/503-7", 7.0), ("/429", 0.0), ("/429-soon", 0.0)):
        with pytest.raises(http.Away) as caught:
            http.page(url + path, None, 1)
        assert caught.value.wait == wait


def test_a_key_is_sent(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(http.KEY, raising=False)
    assert http.fetch(url + "/200", None, 1) == {"key": "none"}
    monkeypatch.setenv(http.KEY, "open")
    assert http.fetch(url + "/200", None, 1) == {"key": "Bearer open"}
