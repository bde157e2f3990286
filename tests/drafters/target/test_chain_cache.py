"""Targets that no slab can hold: exact chains on transformers' own cache, or a refusal."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

import targets
import tiny
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.small import Small, SmallConfig
from draftsmith.drafters.target import chain_cache
from draftsmith.drafters.target.attention import chain_step
from draftsmith.drafters.target.chain_cache import ChainCache, RowCache
from draftsmith.drafters.target.target import Target
from targets import close, pair, plain, random_tokens

every = pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.slow] if family == "FalconH1" else [])
        for family in tiny.CHAINS
    ],
)
NEW = 10


def greedy(theirs: Any, prompt: list[int]) -> list[int]:
    """What plain `generate` writes after the prompt, NEW tokens."""
    theirs.generation_config.eos_token_id = None
    out = theirs.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def speculated(of: Target, prompts: list[list[int]], drafts: list[list[int]]) -> list[list[int]]:
    """Greedy chains of three drafts, of which each row's come from `drafts`, some of them wrong."""
    widest = max(map(len, prompts))
    cache = of.cache(len(prompts), 64)
    padded = torch.tensor([p + [3] * (widest - len(p)) for p in prompts])
    logits = of.head(of(padded, chain_step(cache, widest)).final)
    made = [[int(logits[b, len(p) - 1].argmax())] for b, p in enumerate(prompts)]
    cache.commit(torch.tensor([len(p) for p in prompts]))
    while min(map(len, made)) < NEW:
        proposed = [
            [m[-1], *(d + [5] * 64)[len(m) : len(m) + 3]] for m, d in zip(made, drafts, strict=True)
        ]
        logits = of.head(of(torch.tensor(proposed), chain_step(cache, 4)).final)
        choice = logits.argmax(2).tolist()
        counts = []
        for m, tokens, own in zip(made, proposed, choice, strict=True):
            right = 0
            while right < 3 and len(m) < NEW and tokens[right + 1] == own[right]:
                right += 1
            m += own[: right + 1]
            counts.append(right + 1)
        cache.commit(torch.tensor(counts))
    return [m[:NEW] for m in made]


def check_text(family: str) -> None:
    """Speculated text is `generate`'s, in a ragged batch and alone, however much is accepted."""
    of, theirs = pair(family)
    prompts = [random_tokens(n, seed=n).tolist() for n in (9, 2, 13)]
    texts = [greedy(theirs, prompt) for prompt in prompts]
    drafts = [
        [t if i % every_nth else (t + 1) % tiny.VOCAB for i, t in enumerate(text)]
        for every_nth, text in zip((3, 100, 1), texts, strict=True)
    ]
    assert speculated(of, prompts, drafts) == texts
    assert speculated(of, prompts[:1], drafts[:1]) == texts[:1]


@every
def test_text_is_generates(family: str) -> None:
    """Faults: a cache that is not rolled back, or rolled back too far; rows that see each other."""
    check_text(family)


@every
def test_features_and_head(family: str) -> None:
    """Faults: hooks that the other path does not run; a head without the norm."""
    if family != "Mamba2":  # whose hidden_states begin after the first layer
        targets.check_features(*pair(family))
    targets.check_head(*pair(family))


@every
def test_packed_samples_are_read_apart(family: str) -> None:
    """Fault: a recurrent state that runs on into the next sample."""
    of, theirs = pair(family)
    texts = [random_tokens(n, seed=n).tolist() for n in (8, 3, 5)]
    row = sum(texts, [])
    tokens = torch.tensor([row, row[:14] + [0, 0]])
    segment = torch.tensor([[0] * 8 + [1] * 3 + [2] * 5, [0] * 8 + [1] * 3 + [2] * 3 + [-1] * 2])
    position = torch.tensor([t for text in texts for t in range(len(text))]).expand(2, -1)
    batch = Batch(tokens, position, segment, torch.ones_like(tokens, dtype=torch.bool), Sampler())
    read = of.read(batch, [0, "normed"])
    expected = torch.cat([plain(theirs, text) for text in texts])
    close(of.head(read.final[0]), expected)
    close(of.head(read.final[1, :14]), expected[:14])
    assert read.features["normed"].shape == read.features["0"].shape == (2, 16, 32)


@every
def test_one_line_says_so(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """Fault: a target that is slower than its owner expects, without a word."""
    with caplog.at_level(logging.INFO):
        of = Target(tiny.hf_model(family), tiny.tokenizer(), tiny.source())
    assert not of.trees
    said = [r.getMessage() for r in caplog.records if r.name.startswith("draftsmith")]
    assert len(said) == 1 and "\n" not in said[0]
    assert type(of.hf).__name__ in said[0] and "own cache" in said[0]


REFUSED: dict[str, dict[str, Any]] = {
    "Mamba": {},  # its own code forgets the state where more than one token follows
    "Jamba": {
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 4,
        "num_key_value_heads": 2,
    },
    "Rwkv": {},
    "RecurrentGemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_way_reads_is_refused(name: str) -> None:
    """Fault: a model that is wrong on both paths is served all the same."""
    sizes = {"vocab_size": tiny.VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "intermediate_size": 64}
    config = getattr(transformers, f"{name}Config")(**sizes | REFUSED[name])
    with pytest.raises(UserError, match="not supported") as caught:
        Target(tiny.random_model(config), tiny.tokenizer(), tiny.source())
    assert "\n" not in str(caught.value)


def test_such_models_are_no_draft_models(tmp_path: Path) -> None:
    """Fault: a draft model that our attention misreads: every draft rejected, and nobody told."""
    with pytest.raises(UserError, match="layers: those of BloomForCausalLM"):
        Small.create(tiny.target("Bloom"), SmallConfig(layers=[0, 1]))
    tiny.hf_model("Bloom").save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="cannot be read through draftsmith's attention") as caught:
        Small.create(tiny.target(), SmallConfig(checkpoint=str(tmp_path)))
    assert "\n" not in str(caught.value)


# Planted faults: each turns the text red, and the self-test refuses the target


def not_cropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DynamicCache, "crop", lambda self, tokens: None)


def one_too_many_cropped(patch: pytest.MonkeyPatch) -> None:
    crop = DynamicCache.crop
    patch.setattr(DynamicCache, "crop", lambda self, tokens: crop(self, tokens - (tokens < 0)))


def counts_ignored(patch: pytest.MonkeyPatch) -> None:
    commit = RowCache.commit
    patch.setattr(RowCache, "commit", lambda self, count: commit(self, 4 if count else 0))


def rows_swapped(patch: pytest.MonkeyPatch) -> None:
    commit = ChainCache.commit
    patch.setattr(ChainCache, "commit", lambda self, counts: commit(self, counts.flip(0)))


def state_kept(patch: pytest.MonkeyPatch) -> None:
    """The recurrent state after the rejected drafts stays."""

    def wrong(self: RowCache, tokens: Tensor) -> None:
        write(self, tokens)
        self._states = []

    write = RowCache.write
    patch.setattr(RowCache, "write", wrong)


def state_is_a_view(patch: pytest.MonkeyPatch) -> None:
    """What is put back is the very tensor that was overwritten."""

    def wrong(self: RowCache, tokens: Tensor) -> None:
        write(self, tokens)
        self._states = [(layer, i, layer.recurrent_states[i]) for layer, i, _ in self._states]

    write = RowCache.write
    patch.setattr(RowCache, "write", wrong)


FAULTS = [
    *((fault, "Bloom") for fault in (not_cropped, one_too_many_cropped, rows_swapped)),
    *((fault, "Lfm2") for fault in (not_cropped, one_too_many_cropped, counts_ignored)),
    (state_kept, "Qwen3Next"),
    *((fault, "Mamba2") for fault in (state_kept, state_is_a_view)),
]


@pytest.mark.parametrize(("fault", "family"), FAULTS, ids=lambda x: getattr(x, "__name__", x))
def test_faults_show(fault: Any, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault shows in the text and in the self-test."""
    pair(family)
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=r"^assert \[\["):  # another text
        check_text(family)
    with pytest.raises(UserError, match="not supported"):
        Target(tiny.hf_model(family), tiny.tokenizer(), tiny.source())


def test_an_uncommitted_write_is_rolled_back() -> None:
    """Fault: unlike in the slab, tokens that nobody committed stay."""
    of, theirs = pair("Qwen3Next")
    cache = of.cache(1, 32)
    text = random_tokens(1, 8, seed=1)
    with torch.no_grad():
        of(random_tokens(1, 5, seed=2), chain_step(cache, 5))
        of(text[:, :4], chain_step(cache, 4))
        cache.commit(torch.tensor([4]))
        of(random_tokens(1, 3, seed=3), chain_step(cache, 3))
        final = of(text[:, 4:], chain_step(cache, 4)).final
    close(of.head(final[0]), plain(theirs, text[0].tolist())[4:])
    assert chain_cache.ChainCache is type(cache)
