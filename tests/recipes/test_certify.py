"""`draftsmith certify`: what it checks on targets of every family, and what it says of a fault.

.venv/bin/pytest tests/recipes/test_certify.py
"""

from __future__ import annotations

import json
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

import front_door
import tiny
import training
from draftsmith.drafters.base import Policy
from draftsmith.drafters.sampling import Sampler
from draftsmith.eval.certify import certify
from draftsmith.eval.certify import texts as certified_texts
from draftsmith.eval.certify.fixture import GREEDY, Fixture, untrained
from draftsmith.eval.certify.texts import Rehearsed, half_precision, own_text, text_steps
from draftsmith.eval.decoder import accept
from draftsmith.eval.decoder.accept import Accepted
from draftsmith.eval.decoder.text import first_difference

VOCAB = 12
QUICK = ("Llama", "Gemma3", "GptOss", "DeepseekV3", "Bloom")
FAMILIES = [
    pytest.param(family, marks=[] if family in QUICK else [pytest.mark.slow])
    for family in (*tiny.SETTINGS, *tiny.CHAINS)
]


def fixture(family: str, tokens: int = 16) -> Fixture:
    """A tiny target, the same weights untouched, and ragged prompts; no drafters."""
    target = tiny.target(family, vocab=VOCAB)
    prompts = [[5], *tiny.prompts(4, 0, VOCAB)]
    return Fixture(target, tiny.hf_model(family, vocab=VOCAB), {}, prompts, tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_transformers_own(family: str) -> None:
    """Chains and trees, alone and ragged, greedy and by keyed noise, ends inside a block.

    Targets that can be verified in chains only are tried with chains.
    """
    steps = list(text_steps(fixture(family)))
    assert len(steps) == (15 if family in tiny.SETTINGS else 7)
    for name, step in steps:
        passed, figure = step()
        assert passed, f"{name}: {figure}"
        if "rehearsed" in name:
            assert int(figure.split(", ")[1].split()[0]) > 3, f"{name}: {figure}"


@cache
def full() -> list[certify.Check]:
    """The whole certificate of a tiny Llama and two untrained drafters."""
    of = fixture("Llama", 20)
    of.drafters = untrained(of.target)
    return list(certify.certify(of))


def test_the_whole_certificate() -> None:
    checks = {check.name: check for check in full()}
    assert all(check.passed for check in full()), [c for c in full() if not c.passed]
    for words in ("by enumeration", "wrong rules", "inside a block", "bf16", "block rule",
                  "parity, tree of 8, k=3, branch 4, T=0.8, untrained eagle"):  # fmt: skip
        assert sum(words in name for name in checks) == 1, words
    assert json.loads(json.dumps(certify.certificate(full())))["holds"] is True


def test_a_rehearsed_drafter_ranks_the_text() -> None:
    """Its right token is first, second, third or absent, as it must be to try every branch."""
    target = tiny.target("Llama", vocab=VOCAB)
    text = torch.arange(2000) * 7 % VOCAB
    made = Rehearsed(target, {4: text.tolist()})
    ranks = []
    for place in range(1000):
        z = made._ranking(4, place)
        ranks.append(int((z > z[text[place]]).sum()))
    counts = torch.bincount(torch.tensor(ranks))
    assert len(counts) == 4 and int(counts.min()) > 50 and counts.argmax() == 0
    assert made._ranking(4, 5000).max() < 1, "past its end only decoys are left"


def test_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 3], [1, 2]) == 1
    assert first_difference([1], [1, 2]) == first_difference([1, 2], [1]) == 1


def test_a_tie_is_told_from_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another token where transformers was sure is no tie; where it was not, it is named."""
    of = fixture("Llama")
    texts = of.decode(None, Policy(1), GREEDY, of.all)
    texts[2].tokens[3] = (texts[2].tokens[3] + 1) % VOCAB
    passed, figure = own_text(of, texts, of.all, GREEDY)
    assert not passed and "DIFFERS: text 2 token 3" in figure
    monkeypatch.setattr(certified_texts, "top_gap", lambda hf, prefix: 1e-4)
    passed, figure = own_text(of, texts, of.all, GREEDY)
    assert passed and "fp32 tie: text 2 token 3" in figure
    texts[1].tokens[0] = (texts[1].tokens[0] + 1) % VOCAB
    assert not own_text(of, texts, of.all, GREEDY)[0], "two ties are too many"
    warm = of.decode(None, Policy(1), Sampler(0.8), of.all)
    assert own_text(of, warm, of.all, Sampler(0.8))[0]
    assert not own_text(of, warm, of.all, Sampler(0.9))[0], "another law"
    assert not own_text(of, warm, of.all[::-1], Sampler(0.8))[0], "another row's noise"


def test_bf16_names_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verify pass that loses the tree differs where nothing is tied."""
    of = fixture("Llama")
    passed, figure = half_precision(of)
    assert passed and "max |d logit| between widths" in figure
    right = accept.match

    def wrong(drafts: Tensor, length: Tensor, choice: Tensor) -> Accepted:
        moved = choice.roll(1, 1) if choice.shape[1] > 1 else choice
        return right(drafts, length, moved)

    of = fixture("Llama")
    monkeypatch.setattr(accept, "match", wrong)
    passed, figure = half_precision(of)
    assert not passed and "first divergence at token" in figure and "top-2 gap" in figure


# The command


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> training.World:
    return training.World(tmp_path_factory.mktemp("world"), with_samples=False)


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> front_door.Door:
    return front_door.Door(monkeypatch, capsys)


def test_command(
    world: training.World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line a check, a certificate, exit code 0; with a fault the line says FAIL, code 1."""
    path = world.root / "certificate.json"
    words = ("certify", world.target, "--max-new-tokens", 8, "--output", path)
    monkeypatch.setattr(certify, "text_steps", lambda of: islice(text_steps(of), 3))
    rule_errors = certify.rule_errors
    monkeypatch.setattr(certify, "rule_errors", lambda: islice(rule_errors(), 1))
    code = front_door.run(monkeypatch, *words)
    out = capsys.readouterr().out
    written = json.loads(path.read_text())
    assert code == 0, out
    lines = [line for line in out.splitlines() if line.startswith("pass  ")]
    assert len(lines) == len(written["checks"]) > 10
    assert written["holds"] and written["target"]["spec"] == str(world.target)
    assert {"versions", "machine", "command", "commit"} <= written.keys()
    monkeypatch.setattr(accept, "chain", certify.corrected_from_p)
    assert front_door.run(monkeypatch, *words) == 1
    out = capsys.readouterr().out
    assert "FAIL  accept rules are exact" in out and not json.loads(path.read_text())["holds"]


def test_refused(world: training.World, door: front_door.Door, tmp_path: Path) -> None:
    """Before a target is loaded."""
    assert "no drafter there" in door.early("certify", world.target, tmp_path)
    missing = tmp_path / "no" / "certificate.json"
    line = door.early("certify", world.target, "--output", missing)
    assert f"no folder {missing.parent}; make it" in line


def test_no_prompt_fits(world: training.World, door: front_door.Door) -> None:
    line = door.refusal("certify", world.target, "--max-new-tokens", 100_000)
    assert "no five prompts fit" in line and "lower --max-new-tokens" in line
