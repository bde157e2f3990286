"""Real servers load what is exported, and accept it: canaries (support/canary.py) served for real.

make servers && .venv/bin/pytest -m server -rs tests/eval/servers/test_servers.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import canary
from canary import CANARIES, TOKENS, K
from draftsmith.drafters import export
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import Draft, Serving
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.text import Text
from draftsmith.eval.servers import llama_cpp, serving
from draftsmith.eval.servers.agreement import compare, replayed
from draftsmith.eval.servers.client import Answer
from draftsmith.eval.servers.serving import KINDS

pytestmark = [pytest.mark.server, pytest.mark.slow]


def missing(server: str) -> str:
    """Why a server cannot run here; empty where it can, and then the tests must pass."""
    try:
        serving.check(server, "eagle", K)
    except UserError as error:
        return str(error)
    return ""


LOADED = {name: export.server(name).methods for name in KINDS}
RIGHT = [
    pytest.param(server, name, marks=pytest.mark.skipif(bool(why), reason=why))
    for server in KINDS
    for why in [missing(server)]
    for name, canary in CANARIES.items()
    if canary.family in LOADED[server]
]
FAULTY = [
    pytest.param(*right.values, fault, marks=right.marks)
    for right in RIGHT
    for fault in CANARIES[str(right.values[1])].faults
]


@dataclass
class World:
    """The canaries' target, the texts they know, and the canaries trained so far."""

    root: Path
    target: Target
    texts: list[Text]
    trained: dict[str, Drafter] = field(default_factory=dict)

    def drafter(self, name: str) -> Drafter:
        if name not in self.trained:
            self.trained[name] = canary.train(self.target, name, self.texts)
        return self.trained[name]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("canaries")
    of = canary.target(root / "target")
    written = canary.texts(of)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTSMITH_CACHE", str(root / "cache"))
        yield World(root, of, written)


def exported(world: World, server: str, name: str, fault: str) -> Path:
    """A canary's export for a server, its fault (if any) in it."""
    folder = world.root / f"{server} {name} {fault}".strip().replace(" ", "-")
    folder.mkdir()
    gguf = llama_cpp.target_gguf(world.target.source) if server == "llama.cpp" else None
    how = Serving(world.target.source.path, K, 512, target_gguf=gguf)
    drafter = world.drafter(name)
    with canary.fault(drafter, fault):
        export.write(server, drafter, folder, how)
    return folder


def asked(world: World, server: str, name: str, fault: str = "") -> list[Answer]:
    """The server's greedy answers to the canaries' prompts."""
    draft = Draft(exported(world, server, name, fault), CANARIES[name].family, K)
    log = world.root / f"{draft.folder.name}.log"
    length = len(world.texts[0].prompt) + TOKENS
    with serving.serving(server, world.target.source, draft, length, log) as running:
        return [running.ask(text.prompt, TOKENS, 0.0, 0) for text in world.texts]


@pytest.mark.parametrize(("server", "name"), RIGHT)
def test_a_right_export_is_accepted_in_full(world: World, server: str, name: str) -> None:
    answers = asked(world, server, name)
    drafter = world.drafter(name)
    for answer, text in zip(answers, world.texts, strict=True):
        assert answer.tokens == text.tokens[:TOKENS]
        assert answer.counted.drafts == math.ceil((TOKENS - 1) / (K + 1))
    of = replayed(world.target, drafter, answers, K)
    found = compare(answers, of, K, 0.0, serving.kind(server).shortens)
    assert found.holds and not found.ties


@pytest.mark.parametrize(("server", "name", "fault"), FAULTY)
def test_a_faulty_export_is_seen(world: World, server: str, name: str, fault: str) -> None:
    """The server loads it, its output is right, and next to nothing is accepted."""
    answers = asked(world, server, name, fault)
    for answer, text in zip(answers, world.texts, strict=True):
        assert answer.tokens == text.tokens[:TOKENS]
        assert sum(answer.counted.accepted) <= answer.counted.drafted // 20
    of = replayed(world.target, world.drafter(name), answers, K)
    assert len(compare(answers, of, K, 0.0, serving.kind(server).shortens).splits) == len(answers)
