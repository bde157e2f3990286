"""The main job on SmolLM2-135M-Instruct, the embedded target: slow, real, in CI.

One EAGLE-3 head is trained here for a few steps on answers sampled here; `small` keeps 28 of 30
layers, so that long acceptances occur without training; n-gram needs nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from draftsmith.drafters import storage
from draftsmith.drafters.base import Drafter, Policy
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.ngram import Ngram, NgramConfig
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.small import Small, SmallConfig
from draftsmith.drafters.target.target import Target
from draftsmith.eval.acceptance.parity import Parity, compare
from draftsmith.eval.acceptance.replay import replay
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.decoder.text import Text
from draftsmith.eval.evaluate import read_decoded

pytestmark = pytest.mark.real

K = 4
# Two workers of `pytest -n 2 --dist loadgroup` share the work: what is trained, and the others.
TRAINED = pytest.mark.xdist_group("trained")
OTHERS = pytest.mark.xdist_group("others")
FAMILIES = [
    pytest.param("ngram", marks=OTHERS),
    pytest.param("small", marks=OTHERS),
    pytest.param("eagle", marks=TRAINED),
]
Written = Callable[[str, float], list[Text]]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load("smollm2")


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    from draftsmith.train.data.chat_template import encode
    from draftsmith.train.data.prompts import product_prompts

    asked = product_prompts("heldout")
    return encode(asked[:: len(asked) // 10][:10], target)


@pytest.fixture(scope="module")
def trained(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The flow a user runs: recipe -> own answers -> EAGLE-3 head, through the command line."""
    from draftsmith.recipes import cli

    folder = tmp_path_factory.mktemp("flow")
    asked = folder / "prompts.jsonl"
    things = (
        "the sea", "bees", "glass", "the moon", "rivers", "maps", "salt", "trains",
        "owls", "paper", "wind", "coffee", "bridges", "snow", "music", "clocks",
    )  # fmt: skip
    questions = [f"Tell me {n} facts about {thing}." for n, thing in enumerate(things, start=2)]
    lines = [json.dumps({"prompt": question}) for question in questions]
    asked.write_text("\n".join(lines))
    settings = {
        "name": "flow", "runs": folder / "runs", "prompts": asked, "max_new_tokens": 48,
        "draft_vocab": 4096, "steps": 12, "save_every": 6, "heldout": 3, "log_every": 3,
    }  # fmt: skip
    words = ["draftsmith", "train", "smol-eagle3", *(f"{k}={v}" for k, v in settings.items())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as done:
            cli.main()
    assert done.value.code == 0
    return folder / "runs" / "flow"


@pytest.fixture(scope="module")
def drafter(target: Target, request: pytest.FixtureRequest) -> Callable[[str], Drafter]:
    """A drafter by family; EAGLE-3 is trained when it is asked for."""

    @cache
    def make(family: str) -> Drafter:
        if family == "ngram":
            return Ngram.create(target, NgramConfig())
        if family == "small":
            kept = [i for i in range(30) if i not in (14, 17)]
            return Small.create(target, SmallConfig(layers=kept)).eval()
        return storage.load(request.getfixturevalue("trained") / "best", target)

    return make


@pytest.fixture(scope="module")
def written(target: Target, drafter: Callable[[str], Drafter], prompts: list[list[int]]) -> Written:
    """64 tokens to each prompt, in one ragged batch: ten at temperature 0, else eight."""

    @cache
    def write(family: str, temperature: float) -> list[Text]:
        asked = prompts if temperature == 0 else prompts[:8]
        decoder = Decoder(target, drafter(family), Policy(K))
        return decoder.generate(asked, Sampler(temperature), 64, seed=5)

    return write


@TRAINED
def test_training_learns_and_leaves_a_run(trained: Path) -> None:
    """Replay tau on held-out conversations rises within twelve steps; best is the highest."""
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    taus = {m["step"]: m["tau"] for m in lines if m["kind"] == "replay"}
    assert list(taus) == [0, 6, 12]
    assert taus[12] > taus[0] + 0.02
    best = max((6, 12), key=lambda step: taus[step])
    assert (trained / "best").resolve().name == f"checkpoint-{best}"


@pytest.fixture(scope="module")
def generated(
    target: Target, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> list[list[int]]:
    """Greedy answers by a second, untouched HF model; made by one worker for all."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    file = folder / "generated.json"
    with FileLock(folder / "generated.lock"):
        if not file.exists():
            hf = AutoModelForCausalLM.from_pretrained(target.source.path, dtype=torch.float32)
            out = []
            for prompt in prompts:
                ids = hf.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
                out.append(ids[0, len(prompt) :].tolist())
            file.write_text(json.dumps(out))
    return json.loads(file.read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_generate(
    family: str, written: Written, generated: list[list[int]]
) -> None:
    """fp32 greedy output is HF generate's, token for token, in one ragged batch of ten."""
    texts = written(family, 0.0)
    assert [text.tokens[:40] for text in texts] == generated
    assert sum(r.accepted for text in texts for r in text.rounds) > 0


def parity(target: Target, drafter: Drafter, texts: list[Text], sampler: Sampler) -> Parity:
    found = replay(drafter, read_decoded(target, drafter, texts, sampler), K)[K]
    deterministic = sampler.greedy or drafter.deterministic
    return compare(texts, found, deterministic)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_decode_and_replay_agree(
    family: str,
    temperature: float,
    target: Target,
    drafter: Callable[[str], Drafter],
    written: Written,
) -> None:
    """The promise, on a real model; every z is printed."""
    texts = written(family, temperature)
    found = parity(target, drafter(family), texts, Sampler(temperature))
    print(family, temperature, found.report())
    assert found.holds, found.report()


@TRAINED
def test_neighbouring_layer_breaks_parity(
    target: Target, drafter: Callable[[str], Drafter], written: Written
) -> None:
    """Power: replaying the same texts with each feature one layer off must not agree."""
    eagle = drafter("eagle")
    assert isinstance(eagle, Eagle)
    texts = written("eagle", 0.0)
    assert parity(target, eagle, texts, Sampler(0.0)).holds
    taps = eagle.taps
    try:
        eagle.taps = [int(tap) + 1 for tap in taps]
        assert not parity(target, eagle, texts, Sampler(0.0)).holds
    finally:
        eagle.taps = taps


@OTHERS
def test_a_text_of_split_characters_is_shown_whole(target: Target) -> None:
    """A character may take several tokens, drafted or not: pieces still make up the text."""
    from draftsmith.eval.report.report import sample_text

    word = "\u6c49\u5b57"
    prompt = target.tokenizer(5 * word).input_ids
    drafter = Ngram(target, NgramConfig())
    shown = sample_text(target, drafter, prompt, Sampler(0.0), K, 24)
    (text,) = Decoder(target, drafter, Policy(K)).generate([prompt], Sampler(0.0), 24)
    kept = "".join(p["text"] for p in shown["pieces"] if p["by"] != "rejected")
    assert kept == target.tokenizer.decode(text.tokens).rstrip("\ufffd")
    assert word in kept and "\ufffd" not in kept and shown["accepted"] > 0
