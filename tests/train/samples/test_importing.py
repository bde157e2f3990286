"""How an imported answer ends. .venv/bin/pytest tests/train/samples/test_importing.py"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.train.samples.importing import import_answers


@pytest.mark.parametrize(
    ("answer", "finish", "stored"),
    [
        ([5, tiny.EOS], "stop", "stop"),
        ([5, tiny.EOS], "length", "stop"),  # its tokens say how it ended
        ([5, 6], "length", "length"),
        ([5, 6], "stop", "hold none of the end tokens"),
        ([5, tiny.EOS, 6], "stop", "go on behind the end token 1 at 1"),
        ([5, tiny.EOS, tiny.EOS], "stop", "go on behind the end token 1 at 1"),
    ],
)
def test_a_finish_says_what_its_tokens_say(
    answer: list[int], finish: str, stored: str, tmp_path: Path
) -> None:
    """Faults: an answer said to have ended whose end nobody learns; what no target drew."""
    row = {"prompt_ids": [7, 8], "response_ids": answer, "finish_reason": finish}
    path = tmp_path / "answers.jsonl"
    path.write_text(json.dumps(row) + "\n")
    try:
        made = import_answers(path, tiny.target(), Sampler(1.0), tmp_path / "s", foreign=True)
    except UserError as error:
        assert stored in str(error) and "line 1" in str(error)
    else:
        assert (made[0].ids, made[0].finish) == ([7, 8, *answer], stored)
