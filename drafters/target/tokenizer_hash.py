"""What tells two tokenizers, and two chat templates, apart."""

import hashlib
import json
from typing import Any

# Digits, spaces, case, accents (composed and not), scripts, an emoji, code: where the normalisers
# and pre-tokenisers of two tokenizers with one vocabulary differ, some of these ids differ.
PROBE = (
    "It's 12345.6%  two\n\n\tHE'LL na\u00efve e\u0301 \u2014 \u6771\u4eac \U0001f642 a_b.C(x)[1] "
)


def tokenizer_hash(tokenizer: Any) -> str:
    """sha256 of what decides tokenisation: vocabulary, added tokens, merges, scores, a probe.

    Not of file bytes, which change with every version that saves them, nor of the roles (pad =
    eos is a habit, not another tokenizer). The probe's ids stand for normaliser and pre-tokeniser,
    which libraries also write in several equal ways.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(backend.to_str())["model"] if backend is not None else {}
    merges = [m.split(" ") if isinstance(m, str) else list(m) for m in model.get("merges") or []]
    facts = {
        "vocab": sorted(tokenizer.get_vocab().items()),
        "added": sorted(
            [index, t.content, t.special, t.lstrip, t.rstrip, t.single_word, t.normalized]
            for index, t in tokenizer.added_tokens_decoder.items()
        ),
        "merges": merges,
        "scores": model["vocab"] if isinstance(model.get("vocab"), list) else [],
        "probe": list(tokenizer(PROBE, add_special_tokens=False)["input_ids"]),
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def template_hash(tokenizer: Any) -> str:
    """sha256 of the chat template (of all of them, where they have names), or "none"."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return "none"
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
