"""Prompts: the project's own split, their keys, their token ids.

.venv/bin/pytest tests/train/data/test_prompts.py
"""

from pathlib import Path

import pytest

import tiny
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.target import Target
from draftsmith.train.data.chat_template import encode
from draftsmith.train.data.prompts import Prompt, asked, product_prompts


def test_product_prompts_split_every_eighth() -> None:
    train, heldout = product_prompts("train"), product_prompts("heldout")
    assert not {p.key for p in train} & {p.key for p in heldout}
    for domain in {p.domain for p in train}:
        n = sum(p.domain == domain for p in train)
        held = sum(p.domain == domain for p in heldout)
        assert held == (n + held) // 8 > 0
    assert [p.key for p in product_prompts("train")] == [p.key for p in train]


def test_key_is_the_content() -> None:
    assert asked("a", "x").key == asked("a", "y").key != asked("b", "x").key
    system = ({"role": "system", "content": "a"}, {"role": "user", "content": "a"})
    assert Prompt(system, None, "").key != asked("a", "").key
    swapped = ({"content": "a", "role": "user"},)
    assert Prompt(swapped, None, "").key == asked("a", "").key
    assert Prompt(None, (1, 2), "").key != Prompt(None, (12,), "").key


def test_encode_is_the_template(tmp_path: Path) -> None:
    target = tiny.target()
    got = encode([asked("a b", ""), Prompt(None, (5, 6), "")], target)
    assert got == [[2, 3, 27], [5, 6]]  # the template ends each message with a z


def other(template: str | None) -> Target:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    return Target(tiny.hf_model(), tokenizer, tiny.source("other"))


@pytest.mark.parametrize(
    ("template", "prompt", "message"),
    [
        ("{{ '' }}", asked("a", ""), "prompt 0 ('a'): yields no tokens"),
        (
            "{{ raise_exception('no\nway') }}",
            asked("a", ""),
            "the chat template refuses it (no way",
        ),
        (None, Prompt(None, (tiny.VOCAB,), ""), f"outside the vocabulary ({tiny.VOCAB}; other has"),
    ],
)
def test_encode_faults(template: str | None, prompt: Prompt, message: str) -> None:
    with pytest.raises(UserError) as error:
        encode([prompt], other(template))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_base_model_continues_the_words(caplog: pytest.LogCaptureFixture) -> None:
    """Without a template the words alone are asked, and one line says so."""
    assert encode([asked("a b", ""), asked("c", "")], other(None)) == [[2, 3], [4]]
    (line,) = [r.getMessage() for r in caplog.records if "no chat template" in r.getMessage()]
    assert line.startswith("target other: ")


def test_ids_need_no_template() -> None:
    assert encode([Prompt(None, (5,), "")], other(None)) == [[5]]


@pytest.mark.real
def test_smollm2_template() -> None:
    """The template's default system prompt stands as it is."""
    target = Target.load("smollm2")
    (ids,) = encode([asked("Hi", "")], target)
    text = target.tokenizer.decode(ids)
    assert text.startswith("<|im_start|>system\n") and text.endswith("<|im_start|>assistant\n")
    assert text.count("<|im_start|>") == 3
