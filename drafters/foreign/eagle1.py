"""EAGLE-1 heads as EAGLE publishes them and SGLang and vLLM read them.

A Llama config of one layer; fc.weight [H, 2H] (embedding first), embed_tokens.weight, and a decoder
layer without input norm. SGLang's fc has a bias, which here must be 0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftsmith.drafters import storage
from draftsmith.drafters.eagle1 import Eagle1, Eagle1Config
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.foreign.eagle3 import layer, llama_block
from draftsmith.drafters.foreign.files import Tensors
from draftsmith.drafters.target.shell import Shell


def read(folder: Path, about: dict[str, Any], target: Shell) -> Eagle1:
    """See `foreign.load`."""
    block = llama_block(folder / "config.json", about)
    try:
        drafter = Eagle1(target, Eagle1Config(block=block))
    except UserError as error:
        raise UserError(f"{folder / 'config.json'}: {error}") from None
    H = block.hidden_size
    tensors = Tensors(folder)
    stored = layer(tensors, block, H)
    stored["fc.weight"] = tensors.take("fc.weight", H, 2 * H)
    if "fc.bias" in tensors.left and tensors.take("fc.bias", H).any():
        raise UserError(
            f"{tensors.path}: fc.bias is not 0, and draftsmith's EAGLE-1, like vLLM's, has none"
        )
    tensors.take_embeddings(target)
    tensors.done()
    storage.fill(drafter, stored, tensors.path)
    return drafter
