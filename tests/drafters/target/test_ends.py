"""The tokens that end a text, by three files.

.venv/bin/pytest tests/drafters/target/test_ends.py
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import tiny
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.shell import Shell
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.loop import Decoder

MISSING = object()


def folder_of(place: Path, generation: Any, config: Any, tokenizer: int | None) -> str:
    """A target whose three files name these ends; MISSING: without that file."""
    hf = tiny.hf_model()
    hf.save_pretrained(place)
    words = tiny.tokenizer()
    words.eos_token = None if tokenizer is None else words.convert_ids_to_tokens(tokenizer)
    words.save_pretrained(place)
    path = place / "generation_config.json"
    path.unlink()
    if generation is not MISSING:
        path.write_text(json.dumps({"eos_token_id": generation}))
    path = place / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": config}))
    return str(place)


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "ends", "said"),
    [
        (1, 1, 1, [1], False),
        ([1, 5], 5, 1, [1, 5], False),  # as chat models do
        (0, 0, 1, [0, 1], True),  # a fine-tuned model's tokenizer alone names its new end
        (MISSING, 0, 1, [0, 1], True),
        (MISSING, [1, 3], 1, [1, 3], False),
        (1, 4, None, [1, 4], True),
        (None, None, 1, [1], True),
        (-1, 1, 1, [1], True),
        ([1, 10_000], 1, 1, [1], True),  # no row of the head
        (MISSING, None, None, [], False),
    ],
)
@pytest.mark.parametrize("load", [Target.load, Shell.load])
def test_ends_of_three_files(
    load: Any,
    generation: Any,
    config: Any,
    tokenizer: int | None,
    ends: list[int],
    said: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Faults: an end that one file alone names is run past; an id that no text has; silence."""
    folder = folder_of(tmp_path, generation, config, tokenizer)
    with caplog.at_level(logging.WARNING):
        of = load(folder)
    assert of.eos_ids == ends
    lines = [r.getMessage() for r in caplog.records if "end tokens differ" in r.getMessage()]
    assert len(lines) == said
    assert not lines or "\n" not in lines[0]


def test_a_text_ends_at_the_tokenizers_end(tmp_path: Path) -> None:
    """Reference: the greedy text of the same weights with no end at all, cut by hand."""
    free = Target.load(folder_of(tmp_path / "free", MISSING, None, None))
    prompt = [5, 9, 13]
    endless = Decoder(free).generate([prompt], Sampler(0.0), 24)[0].tokens
    assert len(endless) == 24
    end = endless[7]
    of = Target.load(folder_of(tmp_path / "own", 0, 0, end))
    text = Decoder(of).generate([prompt], Sampler(0.0), 24)[0]
    first = min(endless.index(end), endless.index(0) if 0 in endless else 99)
    assert (text.tokens, text.finish) == (endless[: first + 1], "stop")
