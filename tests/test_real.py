"""The main job on SmolLM2-135M-Instruct, the embedded target: slow, real, in CI.

One EAGLE-3 head is trained here for a few steps on answers sampled here; `small` keeps 28 of 30
layers, so that long acceptances occur without training; n-gram needs nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from draftsmith.drafters import base
from draftsmith.drafters.base import Drafter, Policy
from draftsmith.drafters.eagle import Eagle
from draftsmith.drafters.ngram import Ngram, NgramConfig
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.small import Small, SmallConfig
from draftsmith.drafters.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.decoder.text import Text
from draftsmith.eval.evaluate import read_texts
from draftsmith.eval.parity import Parity, compare
from draftsmith.eval.replay import replay

pytestmark = pytest.mark.real

K = 4
FAMILIES = ("ngram", "small", "eagle")


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.load("smollm2")


@pytest.fixture(scope="module")
def prompts(target: Target) -> list[list[int]]:
    from draftsmith.train.prompts import product_prompts
    from draftsmith.train.template import encode

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
def drafters(target: Target, trained: Path) -> dict[str, Drafter]:
    kept = [i for i in range(30) if i not in (14, 17)]
    return {
        "ngram": Ngram.create(target, NgramConfig()),
        "small": Small.create(target, SmallConfig(layers=kept)).eval(),
        "eagle": base.load(trained / "best", target),
    }


def test_training_learns_and_leaves_a_run(trained: Path) -> None:
    """Replay tau on held-out conversations rises within twelve steps; best is the highest."""
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    taus = {m["step"]: m["tau"] for m in lines if m["kind"] == "replay"}
    assert list(taus) == [0, 6, 12]
    assert taus[12] > taus[0] + 0.02
    best = max((6, 12), key=lambda step: taus[step])
    assert (trained / "best").resolve().name == f"checkpoint-{best}"


@pytest.fixture(scope="module")
def generated(target: Target, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy answers by a second, untouched HF model."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(target.source.path, dtype=torch.float32)
    out = []
    for prompt in prompts:
        ids = hf.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
        out.append(ids[0, len(prompt) :].tolist())
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_equals_generate(
    family: str,
    target: Target,
    drafters: dict[str, Drafter],
    prompts: list[list[int]],
    generated: list[list[int]],
) -> None:
    """fp32 greedy output is HF generate's, token for token, in one ragged batch of ten."""
    decoder = Decoder(target, drafters[family], Policy(K))
    texts = decoder.generate(prompts, Sampler(0.0), 40)
    assert [text.tokens for text in texts] == generated
    assert sum(r.accepted for text in texts for r in text.rounds) > 0


def decoded(
    target: Target, drafter: Drafter, prompts: list[list[int]], temperature: float
) -> tuple[list[Text], Parity]:
    """Eight prompts, 64 tokens, and their parity with replay."""
    sampler = Sampler(temperature)
    texts = Decoder(target, drafter, Policy(K)).generate(prompts[:8], sampler, 64, seed=5)
    return texts, parity(target, drafter, texts, sampler)


def parity(target: Target, drafter: Drafter, texts: list[Text], sampler: Sampler) -> Parity:
    found = replay(drafter, read_texts(target, drafter, texts, sampler), K)[K]
    deterministic = sampler.greedy or drafter.deterministic
    return compare(texts, found, deterministic)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_decode_and_replay_agree(
    family: str,
    temperature: float,
    target: Target,
    drafters: dict[str, Drafter],
    prompts: list[list[int]],
) -> None:
    """The promise, on a real model; every z is printed."""
    _, found = decoded(target, drafters[family], prompts, temperature)
    print(family, temperature, found.report())
    assert found.holds, found.report()


def test_neighbouring_layer_breaks_parity(
    target: Target, drafters: dict[str, Drafter], prompts: list[list[int]]
) -> None:
    """Power: replaying the same texts with each feature one layer off must not agree."""
    eagle = drafters["eagle"]
    assert isinstance(eagle, Eagle)
    texts, right = decoded(target, eagle, prompts, 0.0)
    assert right.holds
    taps = eagle.taps
    try:
        eagle.taps = [int(tap) + 1 for tap in taps]
        assert not parity(target, eagle, texts, Sampler(0.0)).holds
    finally:
        eagle.taps = taps


def test_a_text_of_split_characters_is_shown_whole(target: Target) -> None:
    """A character may take several tokens, drafted or not: pieces still make up the text."""
    from draftsmith.eval.sample_text import sample_text

    word = "\u6c49\u5b57"
    prompt = target.tokenizer(5 * word).input_ids
    drafter = Ngram(target, NgramConfig())
    shown = sample_text(target, drafter, prompt, Sampler(0.0), K, 24)
    (text,) = Decoder(target, drafter, Policy(K)).generate([prompt], Sampler(0.0), 24)
    kept = "".join(p["text"] for p in shown["pieces"] if p["by"] != "rejected")
    assert kept == target.tokenizer.decode(text.tokens).rstrip("\ufffd")
    assert word in kept and "\ufffd" not in kept and shown["accepted"] > 0
