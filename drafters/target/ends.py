"""The tokens that end a text: those of generation config, config and tokenizer together.

Servers take them so (vLLM: the tokenizer's, and the generation config's, which it derives from the
config where there is none). A fine-tuned model often names its new end in one of the three alone.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from typing import Any

logger = logging.getLogger(__name__)


def settle_ends(what: str, hf: Any, config: Any, tokenizer: Any) -> None:
    """Puts every end token into hf's generation config, from where all else takes them.

    One line says where config or tokenizer name one that the generation config lacks, and which of
    them the model cannot draw: those have no row in its head.
    """
    size = hf.get_output_embeddings().weight.shape[0]
    named = {
        "generation config": _ids(hf.generation_config.eos_token_id),
        "config": [*_ids(config.eos_token_id), *_ids(config.get_text_config().eos_token_id)],
        "tokenizer": _ids(tokenizer.eos_token_id),
    }
    ids = list(dict.fromkeys(i for found in named.values() for i in found))
    ends = [i for i in ids if 0 <= i < size]
    if ends != named["generation config"]:
        parts = [f"{name} {', '.join(map(str, found)) or 'none'}" for name, found in named.items()]
        ending = ", ".join(f"{i} {tokenizer.convert_ids_to_tokens(i)!r}" for i in ends)
        logger.warning(
            "%s: its end tokens differ (%s); %s",
            what, "; ".join(dict.fromkeys(parts)),
            f"a text ends at any of {ending}" if ends else "no token ends a text",
        )  # fmt: skip
    hf.generation_config.eos_token_id = ends if len(ends) != 1 else ends[0]
    hf.generation_config._from_model_config = False  # or generate may derive it anew


def _ids(value: Any) -> list[int]:
    """eos_token_id as files have it: None, a number, a list of them."""
    given = value if isinstance(value, (list, tuple)) else [value]
    return [int(i) for i in given if isinstance(i, int) and not isinstance(i, bool)]


def to_the_end(tokens: Sequence[int], ends: Container[int]) -> int | None:
    """How many tokens a text has, of which the first end token is the last; None: none ends it."""
    return next((i + 1 for i, token in enumerate(tokens) if token in ends), None)
