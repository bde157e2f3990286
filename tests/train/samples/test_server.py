"""Answers from a server: a fake one that fails in every way, and a real llama-server.

.venv/bin/pytest tests/train/samples/test_server.py
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import answering
import tiny
from answering import COUNT, NEW, Failure, Fake, Fault, questions, rows, sampled, serving
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.train.data import endpoint
from draftsmith.train.data.endpoint import Endpoint
from draftsmith.train.progress import Answering
from draftsmith.train.samples import answers
from draftsmith.train.samples.generate import generate
from draftsmith.train.samples.samples import Samples
from draftsmith.train.samples.writing import Parts


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits, and parts of three conversations."""
    answering.hasten(monkeypatch)


@pytest.fixture(scope="module")
def of() -> Target:
    return tiny.talker()


def turns(samples: Samples) -> int:
    return sum(len(s.spans) for s in samples)


@pytest.fixture(scope="module")
def whole(of: Target, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """What an untroubled server answers."""
    with serving(Fake(of)) as url:
        samples = sampled(tmp_path_factory.mktemp("whole") / "s", of, url)
    assert samples.manifest["origin"] == "served" and not samples.foreign
    assert samples.manifest["server"] == {"kind": "vllm", "model": "tiny"}
    assert len(samples) == COUNT
    assert sum(len(s.spans) == 2 for s in samples) >= 1
    return rows(samples)


@pytest.mark.parametrize("kind", ["llama.cpp", "other"])
def test_kinds_of_servers(
    of: Target, tmp_path: Path, whole: list[tuple[Any, ...]], kind: str
) -> None:
    """Whether ids come back or text is encoded again, and however many are asked at a time."""
    fake = Fake(of, kind)
    with serving(fake) as url:
        samples = sampled(tmp_path / "s", of, url, concurrency=1 if kind == "other" else 8)
    assert rows(samples) == whole
    body = fake.bodies[-1]
    assert body["top_k"] == -1 and body["min_p"] == 0.0 and body["presence_penalty"] == 0.0
    name = "repeat_penalty" if kind == "llama.cpp" else "repetition_penalty"
    assert body[name] == 1.0
    if kind == "llama.cpp":
        assert body["samplers"] == ["temperature", "top_k", "top_p"]
    assert samples.manifest["server"] == {"kind": kind, "model": "tiny"}


def test_samples_of_a_server_by_its_old_name(
    of: Target, tmp_path: Path, whole: list[tuple[Any, ...]]
) -> None:
    """llama.cpp was llama-server in manifests; another kind of server is still refused."""
    fake, file = Fake(of, "llama.cpp"), tmp_path / "s" / "manifest.json"
    with serving(fake) as url:
        sampled(tmp_path / "s", of, url)
        before, asked = file.read_text(), len(fake.bodies)
        file.write_text(before.replace('"llama.cpp"', '"llama-server"'))
        assert file.read_text() != before
        assert rows(sampled(tmp_path / "s", of, url)) == whole
        assert len(fake.bodies) == asked + 1, "complete: nothing is asked but the probe"
        file.write_text(before.replace('"llama.cpp"', '"sglang"'))
        with pytest.raises(UserError, match="server's kind: sglang then, llama.cpp now"):
            sampled(tmp_path / "s", of, url)


def test_one_endpoint_for_several_runs(
    of: Target, tmp_path: Path, whole: list[tuple[Any, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    """And turns that could not be asked are told of, as where the target here answers."""
    with serving(Fake(of)) as url:
        server = Endpoint.connect(url, of)
        for name in ("a", "b"):
            samples = generate(of, questions(), Sampler(), NEW, tmp_path / name, 5, server=server)
            assert rows(samples) == whole
    later = sum(len(p.later) for p in questions())
    left = later - sum(len(s.spans) - 1 for s in samples)
    assert (f"{left} later turns were not asked" in caplog.text) == (left > 0)


def troubled(seed: int) -> Fault:
    """Every third request fails, in one way after the other."""
    reply = {"error": "try again"}
    ways: list[Failure] = [(429, reply), (500, reply), (0, None), (500, None), (503, reply)]

    def fault(number: int, body: dict[str, Any]) -> Failure | None:
        return ways[(number // 3 + seed) % len(ways)] if number % 3 == 1 else None

    return fault


@pytest.mark.parametrize("seed", range(3))
def test_busy_and_failing(
    of: Target, tmp_path: Path, whole: list[tuple[Any, ...]], seed: int
) -> None:
    """Every answer is had, each failure costs one more request, and none is asked for twice."""
    fake = Fake(of)
    fake.fault = troubled(seed)
    with serving(fake) as url:
        samples = sampled(tmp_path / "s", of, url)
    assert rows(samples) == whole and fake.failed
    assert len(fake.asked) == turns(samples) + len(fake.failed)


PAGE = b"<html>starting</html>"


@pytest.mark.parametrize("failure", [(429, {}), (502, PAGE), (200, PAGE)], ids=str)
def test_a_server_that_is_away(
    of: Target, tmp_path: Path, whole: list[tuple[Any, ...]], failure: Failure
) -> None:
    """More failures than any prompt has tries, though others are answered: none is given up."""
    fake = Fake(of)
    fake.fault = lambda n, body: failure if 6 <= n < 50 and body["max_tokens"] > 1 else None
    with serving(fake) as url:
        samples = sampled(tmp_path / "s", of, url)
    assert rows(samples) == whole and "given_up" not in samples.manifest


@pytest.mark.parametrize("dies_at", [2, 5, 9, 13])
def test_a_server_that_dies(
    of: Target, tmp_path: Path, whole: list[tuple[Any, ...]], dies_at: int,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Waited for, told once, then one line. What was answered stays; only the rest is asked."""
    monkeypatch.setattr(endpoint, "PATIENCE", 0.3)
    monkeypatch.setattr(endpoint, "TELL", -1.0)
    fake = Fake(of)
    fake.fault = lambda number, body: (0, None) if number >= dies_at else None
    with serving(fake) as url, pytest.raises(UserError) as error:
        sampled(tmp_path / "s", of, url)
    assert "run the same command: what is answered stays" in str(error.value)
    assert "\n" not in str(error.value)
    assert capsys.readouterr().err.count("waiting up to") == 1
    stored = set(Parts(tmp_path / "s").indices)
    assert stored or dies_at < 9
    again = Fake(of)
    with serving(again) as url:
        samples = sampled(tmp_path / "s", of, url)
        assert rows(samples) == whole
        left = [len(s.spans) for i, s in enumerate(samples) if i not in stored]
        assert len(again.asked) == sum(left)
        sampled(tmp_path / "s", of, url)
        assert len(again.asked) == sum(left), "complete: nothing is asked but the probe"


def test_a_failure_ends_it_at_once(of: Target, tmp_path: Path) -> None:
    """Requests under way are not waited for: they may take minutes."""
    fake, over = Fake(of), threading.Event()

    def fault(number: int, body: dict[str, Any]) -> Failure | None:
        if number == 1:
            over.wait(10)
        return (401, {"error": "no key"}) if number > 1 else None

    fake.fault = fault
    with serving(fake) as url:
        began = time.monotonic()
        with pytest.raises(UserError, match="401.*set DRAFTSMITH_API_KEY"):
            sampled(tmp_path / "s", of, url)
        assert time.monotonic() - began < 5
        over.set()


def test_the_time_left_counts_every_turn(
    of: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When all are answered, nothing of the total is left."""
    lines: list[Answering] = []

    class Kept(Answering):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            lines.append(self)

    monkeypatch.setattr(answers, "Answering", Kept)
    with serving(Fake(of)) as url:
        sampled(tmp_path / "s", of, url)
    assert lines[0]._finished == lines[0]._total
