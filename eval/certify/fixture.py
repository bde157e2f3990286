"""What every check runs on: a target and transformers' own copy of it, drafters, prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from draftsmith.drafters.base import Drafter, Policy
from draftsmith.drafters.eagle import Eagle, EagleConfig
from draftsmith.drafters.ngram import Ngram, NgramConfig
from draftsmith.drafters.policy import Tree
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.eval.decoder.text import Text, end_token

GREEDY, WARM = Sampler(0.0), Sampler(0.8)
SEED = 3
CheckResult = tuple[bool, str]  # whether it passed, and the measured figure
NamedChecks = Iterator[tuple[str, Callable[[], CheckResult]]]  # a check's name, and its function


@dataclass
class Fixture:
    """A target, drafters by name, and prompts of uneven length (token ids).

    theirs: the target's weights in a transformers model that draftsmith never touched, in fp32 on
    the same device. Texts run to `tokens` tokens: no end token cuts them short but a planted one.
    """

    target: Target
    theirs: Any
    drafters: dict[str, Drafter]
    prompts: list[list[int]]
    tokens: int = 24
    _written: dict[Any, list[Text]] = field(default_factory=dict)
    _generated: dict[tuple[int, int | None], list[int]] = field(default_factory=dict)

    @torch.no_grad()
    def generate(self, row: int, eos: int | None = None) -> list[int]:
        """The greedy answer to a prompt by transformers' own generate, which is kept."""
        if (row, eos) not in self._generated:
            ids = torch.tensor([self.prompts[row]], device=self.target.device)
            out = self.theirs.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self.tokens,
                do_sample=False,
                eos_token_id=[self.target.vocab_size if eos is None else eos],
                pad_token_id=0,
            )
            self._generated[row, eos] = out[0, ids.shape[1] :].tolist()
        return self._generated[row, eos]

    def decode(
        self,
        drafter: Drafter | None,
        policy: Policy,
        sampler: Sampler,
        rows: Sequence[int],
        name: str = "",
        eos: int | None = None,
    ) -> list[Text]:
        """Texts of some prompts in one batch; under a name they are kept."""
        key = (name, policy, sampler, tuple(rows))
        if key in self._written:
            return self._written[key]
        with end_token(self.target, eos):
            texts = Decoder(self.target, drafter, policy).generate(
                [self.prompts[i] for i in rows], sampler, self.tokens, rows=rows, seed=SEED
            )
        if name:
            self._written[key] = texts
        return texts

    def policies(self, drafter: Drafter) -> list[Policy]:
        """The chain and the tree that a drafter is tried with."""
        k = min(4, drafter.longest or 4)
        able = drafter.trees and self.target.trees
        trees = [Tree(min(k, 3), budget=8, branch=4)] if able else []
        return [Policy(k), *trees]

    @property
    def all(self) -> list[int]:
        return list(range(len(self.prompts)))


def untrained(target: Target) -> dict[str, Drafter]:
    """Drafters that need no training: an EAGLE head as it starts out, and prompt lookup."""
    L = target.num_layers
    taps: list[Any] | None = None if L >= 7 else sorted({1, (L + 1) // 2, L})
    eagle = Eagle.create(target, EagleConfig(taps=taps, head="target"))
    return {
        "untrained eagle": eagle.to(target.device, target.dtype).eval(),
        "ngram": Ngram.create(target, NgramConfig()),
    }


def untouched(target: Target) -> Any:
    """The target's weights in a transformers model of their own, in fp32."""
    hf = transformers.AutoModelForCausalLM.from_pretrained(target.source.path, dtype=torch.float32)
    return hf.eval().to(target.device)


@torch.no_grad()
def top_gap(hf: Any, prefix: Sequence[int]) -> float:
    """How far a transformers model's two largest logits after a prefix are apart."""
    logits = hf(torch.tensor([prefix], device=hf.device), use_cache=False).logits[0, -1]
    first, second = logits.float().topk(2).values.tolist()
    return first - second
