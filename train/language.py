"""Which language a text is in, by the model that `py3langid` brings (139 languages, 5 MB)."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import cache
from typing import Any

from draftsmith.drafters.errors import UserError

# Of the probability. Questions in a language get 0.3 and more, code and formulas less than 0.1.
SURE = 0.2
_NONE = ("und", "zxx")  # undecided; no language


def language(text: str) -> str:
    """Its ISO 639 code; "" where none is told: code, formulas, a word or two."""
    found, _ = _identifier().classify(text)
    return "" if found in _NONE else str(found)


def check_languages(codes: Sequence[str]) -> None:
    """Raises UserError for a code that is never told."""
    known = [] if not codes else [code for code in _identifier().labels if code not in _NONE]
    for code in codes:
        if code not in known:
            near = difflib.get_close_matches(code, known, n=3, cutoff=0.3)
            hint = f"did you mean {' or '.join(near)}?" if near else "write e.g. en,de"
            raise UserError(f"--languages: {code!r} is no ISO 639 code that is known; {hint}")


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True, min_confidence=SURE)
