"""A server as a child process: on a free port, watched until it answers, ended whatever happens.

The server leads a process group of its own (vLLM starts helpers), so that ending the group leaves
none behind, and a Ctrl-C reaches us alone: we end the server, in order.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.drafters.errors import UserError
from draftsmith.eval.servers import http

LOG_LINES = 6  # how many of a dead server's last words an error repeats
START = 600.0  # seconds that a server may take to load
END = 20.0  # seconds that it may take to end before it is killed


@dataclass
class Child:
    """A started server: its command, its log file, and the process."""

    command: list[str]
    log: Path
    process: subprocess.Popen[bytes]

    def last_words(self) -> str:
        """The end of the log, as part of one line."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines()]
        return " | ".join([line for line in lines if line][-LOG_LINES:])[-1200:] or "nothing"

    def check(self) -> None:
        """Raises UserError, with the log's last lines, if the server is no more."""
        code = self.process.poll()
        if code is not None:
            raise UserError(
                f"server {self.command[0]}: ended with code {code}; its last words: "
                f"{self.last_words()}"
            )


def servers_folder() -> Path:
    """Where the servers are: $DRAFTSMITH_SERVERS, as tests/support/servers.sh has it."""
    place = os.environ.get("DRAFTSMITH_SERVERS") or "~/.cache/draftsmith/servers"
    return Path(os.path.expanduser(place))


def installed(server: str, inside: str) -> Path:
    """A server's program. Raises UserError where `make servers` has not set it up."""
    path = servers_folder() / inside
    if not (servers_folder() / server / ".installed").is_file() or not path.exists():
        raise UserError(
            f"server {server}: not set up in {servers_folder()}; run `make servers`, or name a "
            "running server's URL"
        )
    return path


@contextmanager
def started(
    command: Callable[[int], Sequence[str]],
    environment: dict[str, str],
    log: Path,
    timeout: float = START,
) -> Iterator[tuple[Child, str]]:
    """Runs command(port) and yields (child, url) once GET /health says 200; ends it afterwards.

    environment is added to our own. Raises UserError where the program is missing, dies, or is not
    healthy after `timeout` seconds.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # which nobody listens on
    words = list(command(port))
    with _terminable(), log.open("wb") as out:
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(
                f"server {words[0]}: cannot be started ({error.strerror}); run `make servers`"
            ) from None
        child = Child(words, log, process)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(child, url, timeout)
            yield child, url
        finally:
            _end(process)


def _wait(child: Child, url: str, timeout: float) -> None:
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        child.check()
        try:
            http.page(f"{url}/health", None, timeout=5)
            return
        except http.Fault:  # not listening yet, or still loading (503)
            time.sleep(0.2)
    raise UserError(
        f"server {child.command[0]}: not healthy after {timeout:.0f} s; its last words: "
        f"{child.last_words()}"
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the server's whole group: asked first, then killed."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, signum)
        except ProcessLookupError:  # all of it is gone
            break
        try:
            process.wait(END)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


@contextmanager
def _terminable() -> Iterator[None]:
    """While a server runs, SIGTERM unwinds us as Ctrl-C does, instead of leaving it behind."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return

    def leave(signum: int, frame: Any) -> None:
        sys.exit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
