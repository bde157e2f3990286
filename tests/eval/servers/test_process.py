"""Servers as child processes and over HTTP: what goes wrong is one line, and none is left behind.

.venv/bin/pytest tests/eval/servers/test_process.py
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.source import Source
from draftsmith.eval.servers import llama_cpp, serving, vllm
from draftsmith.eval.servers.check import collect
from draftsmith.eval.servers.client import Answer, Counters, Running
from draftsmith.eval.servers.process import started
from draftsmith.eval.servers.vllm import VLLM
from fake_server import Fake
from places import ROOT

# A server that answers /health, and has a helper process of its own as vLLM does.
HEALTHY = """
import http.server, subprocess, sys
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("helper", helper.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def python(code: str) -> Callable[[int], list[str]]:
    return lambda port: [sys.executable, "-c", code, str(port)]


def helper(log: Path) -> int:
    return int(log.read_text().split()[1])


def gone(pid: int) -> bool:
    """Whether a process ends within a few seconds (one that nobody has reaped yet has ended)."""
    for _ in range(50):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_a_server_is_ended_with_its_helpers(
    error: type[BaseException] | None, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    try:
        with started(python(HEALTHY), {}, log) as (child, url):
            assert url.startswith("http://127.0.0.1:")
            pids = [child.process.pid, helper(log)]
            assert all(map(psutil.pid_exists, pids))
            if error:
                raise error
    except (RuntimeError, KeyboardInterrupt):
        pass
    assert all(map(gone, pids))


def test_a_terminated_check_leaves_no_server(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import sys, time; from pathlib import Path\n"
        "from draftsmith.eval.servers.process import started\n"
        "command = lambda port: [sys.executable, '-c', sys.argv[2], str(port)]\n"
        "with started(command, {}, Path(sys.argv[1])): print('up', flush=True); time.sleep(60)\n"
    )
    ours = subprocess.Popen(
        [sys.executable, "-c", code, str(log), HEALTHY], stdout=subprocess.PIPE, cwd=tmp_path
    )
    assert ours.stdout is not None and ours.stdout.readline() == b"up\n"
    ours.send_signal(signal.SIGTERM)
    assert ours.wait(30) == 128 + signal.SIGTERM
    assert gone(helper(log))


def test_a_server_that_dies_says_its_last_words(tmp_path: Path) -> None:
    dying = "import sys; print('loading'); print('no such tensor: fc'); sys.exit(3)"
    with pytest.raises(
        UserError, match=r"ended with code 3; .* loading \| no such tensor: fc"
    ) as e:
        with started(python(dying), {}, tmp_path / "log"):
            pass
    assert "\n" not in str(e.value)


def test_a_missing_program_and_a_silent_server_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be started .*make servers"):
        with started(lambda port: ["/no/such/program"], {}, tmp_path / "log"):
            pass
    with pytest.raises(UserError, match="not healthy after 1 s"):
        with started(python("import time; time.sleep(60)"), {}, tmp_path / "log", timeout=1):
            pass


def test_a_server_that_is_not_set_up_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_SERVERS", str(tmp_path))
    for find_program in (vllm.find_program, llama_cpp.find_program):
        with pytest.raises(UserError, match="not set up in .*make servers"):
            find_program()
    with pytest.raises(UserError, match="--server: no 'tgi'; give vllm, llama.cpp or a URL"):
        serving.check("tgi", "eagle", 3)


def test_two_targets_of_unknown_revision_share_no_gguf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: org/name's GGUF is served for other/name."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    (tmp_path / "name-unknown-f32.gguf").touch()
    with pytest.raises(UserError, match="target other/name: its revision is unknown"):
        llama_cpp.target_gguf(Source("other/name", "other/name", "unknown", "hub"))


def test_the_warm_up_asks_for_no_more_than_the_check() -> None:
    """Fault: 8 tokens of a server that was given room for 4."""
    asked = []

    class Noting:
        def ask(self, prompt: list[int], tokens: int, *rest: Any) -> Answer:
            asked.append(tokens)
            return Answer(prompt, [0] * tokens, 1.0, Counters())

    server: Any = Noting()
    collect({server: None}, [[5]], 4, 0)
    assert asked == [4, 4, 4]


def test_a_patched_vllm_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the second definition that tests/support/servers.sh appends."""
    monkeypatch.setenv("DRAFTSMITH_SERVERS", str(tmp_path))
    assert not vllm.patched()
    kernels = tmp_path / "vllm/lib/python3.11/site-packages/vllm/utils/cpu_triton_utils.py"
    kernels.parent.mkdir(parents=True)
    kernels.write_text("def _expand_kernel_impl(\n    output,\n): ...\n")
    assert not vllm.patched()
    script = (ROOT / "tests/support/servers.sh").read_text()
    added = script.partition("<< 'FIX'\n")[2].partition("FIX\n")[0]
    kernels.write_text(kernels.read_text() + added)
    assert vllm.patched()


@pytest.fixture
def fake() -> Iterator[tuple[Fake, str]]:
    made = Fake()
    with made.listening() as url:
        yield made, url


def test_counters_are_those_of_one_answer(fake: tuple[Fake, str]) -> None:
    """Not of the server's life: earlier answers, the warm-up among them, are taken off."""
    server = Running(VLLM, fake[1])
    for tokens in (8, 12):
        answer = server.ask([3, 4], tokens, 0.0, 0)
        assert answer.tokens == [7] * tokens
        counted = answer.counted
        assert (counted.drafts, counted.drafted) == (tokens // 2, 3 * tokens // 2)
        assert (counted.accepted, counted.tokens) == ((tokens // 2, 0, 0), tokens)
    (given,) = collect({server: 3}, [[3], [4]], 6, 0)
    assert [a.counted.drafts for a in given[0.0] + given[1.0]] == [3] * 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"status": 429}, r"/v1/completions says 429 \({\"error\": \"no room\"}\)"),
        ({"status": 500}, "says 500"),
        ({"status": 401}, r"says 401 \(.*\); set DRAFTSMITH_API_KEY to its key"),
        ({"version": 7}, r"/version gives no answer \(a page that is no JSON object: '7'\)"),
        ({"ids": False}, "no token ids in its answer where 8 were asked for; vllm 0.32.0 is"),
        ({"others": 5}, "counted 13 tokens for an answer of 8; let nobody else use it"),
        ({"renamed": True}, "no vllm:generation_tokens_total: .* names them otherwise"),
        ({"k": 5}, "drafts 5 tokens a round, not k=3; give --k"),
        ({"version": {"build": 7}}, "answers, but is no vllm"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_goes_wrong_is_one_line(
    change: dict[str, Any], says: str, fake: tuple[Fake, str]
) -> None:
    made, url = fake
    vars(made).update(change)
    with pytest.raises(UserError, match=says) as error:
        collect({Running(VLLM, url): 3}, [[3, 4]], 8, 0)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_a_running_server_is_recognised(fake: tuple[Fake, str]) -> None:
    assert serving.running(fake[1]).kind is VLLM
    with pytest.raises(UserError, match="gives no answer .*; start it, or check the URL"):
        serving.running("http://127.0.0.1:9")
