"""The frozen target: how it is loaded, read and checked.

On load it proves itself: its logits, by our attention, hooks and head, equal those that the same
weights gave through transformers' own path before anything was replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from draftsmith.drafters.attention import chain_step, packed_step
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.cache import Slab
from draftsmith.drafters.causal_lm import CausalLM, Tap
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.source import Source, resolve, template_hash, tokenizer_hash

logger = logging.getLogger(__name__)

_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.1}


class Target(CausalLM):
    """A frozen causal LM with its tokenizer: eval mode, no gradients."""

    def __init__(self, hf: Any, tokenizer: Any, source: Source) -> None:
        reference = probe_logits(hf)
        super().__init__(hf)
        self.tokenizer = tokenizer
        self.source = source
        self.requires_grad_(False)
        self.eval()
        self._prove(reference)
        self._identity = {
            "spec": source.spec,
            "revision": source.revision,
            "tokenizer_hash": tokenizer_hash(tokenizer),
            "template_hash": template_hash(tokenizer),
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_layers": self.num_layers,
        }

    @classmethod
    def load(
        cls, spec: str, device: str | torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Target:
        """Loads a hub id, a folder, a GGUF file or an alias; see `source.resolve`.

        device None: the GPU where there is one. dtype None: fp32 on the CPU, the checkpoint's own
        elsewhere.
        """
        transformers_logging.disable_progress_bar()  # a bar for every load drowns our own lines
        source = resolve(spec)
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        choice: Any = dtype or (torch.float32 if device.type == "cpu" else "auto")
        try:
            hf = AutoModelForCausalLM.from_pretrained(source.path, dtype=choice)
            tokenizer = AutoTokenizer.from_pretrained(source.path)
        except (OSError, ValueError, KeyError) as error:
            line = str(error).strip().splitlines()[0]
            raise UserError(f"target {spec}: transformers cannot load it ({line})") from None
        return cls(hf.eval().to(device), tokenizer, source)

    def identity(self) -> dict[str, Any]:
        """What names this target in manifests and checkpoints."""
        return dict(self._identity)

    @property
    def eos_ids(self) -> list[int]:
        """The tokens that end a text, from the generation config."""
        ids = self.hf.generation_config.eos_token_id
        if ids is None:
            ids = self.config.eos_token_id
        return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)

    @property
    def max_positions(self) -> int:
        """The longest text that the model's positions allow."""
        return getattr(self.config, "max_position_embeddings", None) or 1 << 30

    @torch.no_grad()
    def read(self, batch: Batch, taps: Sequence[Tap]) -> Batch:
        """Fills the batch's features and final state in one teacher-forced pass; returns it."""
        out = self(batch.tokens, packed_step(batch.position, batch.segment), taps)
        batch.features, batch.final = out.features, out.final
        return batch

    @torch.no_grad()
    def _prove(self, reference: Tensor) -> None:
        """Raises UserError unless our path gives the reference logits (1, T, V)."""
        tokens = probe_tokens(reference.shape[2]).to(self.device)
        T = tokens.shape[1]
        position = torch.arange(T, device=self.device).unsqueeze(0)
        slab = Slab(1, T, self.device)
        pieces = []
        for piece in tokens.split(T // 2, dim=1):  # a model that ignores our attention forgets
            pieces.append(self(piece, chain_step(slab, piece.shape[1])).final)
            slab.commit(torch.full_like(slab.length, piece.shape[1]))
        whole = self(tokens, packed_step(position, torch.zeros_like(position))).final
        bound = _TOLERANCE.get(whole.dtype, 0.5) * max(1.0, reference.abs().max().item() / 10)
        for final, word in ((whole, "attention"), (torch.cat(pieces, dim=1), "cache")):
            gap = (self.head(final).float() - reference.float()).abs().max().item()
            if not gap <= bound:
                raise UserError(
                    f"target {self.source.spec}: logits through draftsmith's {word} differ from "
                    f"transformers' own by {gap:.3g} (allowed {bound:.3g}); family "
                    f"{type(self.hf).__name__} is not supported"
                )
        logger.debug("target self-test: max logit difference %.2e", gap)


def probe_tokens(vocab_size: int) -> Tensor:
    """Twelve fixed token ids (1, 12), spread over the vocabulary."""
    return (torch.arange(1, 13) * 7919 % vocab_size).unsqueeze(0)


@torch.no_grad()
def probe_logits(hf: Any) -> Tensor:
    """Logits (1, 12, V) of an untouched HF model on the probe tokens, by its eager attention.

    Not by sdpa, the default: transformers 5.17's drops Gemma-2's softcap.
    """
    hf.set_attn_implementation("eager")
    tokens = probe_tokens(hf.get_output_embeddings().weight.shape[0])
    return hf(input_ids=tokens.to(hf.device), use_cache=False).logits
