"""Conversations with answers of their own, as token ids: which of them are learned from.

Masks are read off, never guessed: from the template's generation tags where it has them, else from
a prefix property that is checked on token ids. What the template writes up to the generation prompt
begins what it writes with the answer; the answer's tokens are those from there to its end token.
Where earlier turns are written anew later (dropped thinking), each answer becomes a row of its own.
A conversation that neither way reads is skipped with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.ends import to_the_end
from draftsmith.drafters.target.shell import Shell
from draftsmith.train.data.chat_template import encoded, misfit, rendered
from draftsmith.train.data.prompts import Messages, Prompt, Skips, Unusable

Masked = tuple[list[int], list[bool]]  # token ids, and whether each is learned from


def given_rows(
    prompts: Sequence[Prompt], target: Shell, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Rows (ids, made, finish, domain, key) of whole conversations.

    say: prints a line about what was skipped. Raises UserError where nothing is left.
    """
    check, skipped = misfit(prompts, target), Skips()
    for number, prompt in enumerate(prompts):
        try:
            check(prompt)
            rows = masked(prompt, target)
        except Unusable as error:
            skipped.add(error.reason, f"conversation {number}", error.detail)
            continue
        for ids, made in rows:
            ended = ids[len(made) - 1 - made[::-1].index(True)] in target.eos_ids
            yield {
                "ids": ids, "made": made, "finish": "stop" if ended else "length",
                "domain": prompt.domain, "key": prompt.key,
            }  # fmt: skip
    if len(skipped) == len(prompts):
        raise UserError(f"conversations: none of {len(prompts)} can be masked: {skipped}")
    if skipped:
        say(f"{len(skipped)} of {len(prompts)} conversations cannot be masked: {skipped}")


def masked(prompt: Prompt, target: Shell) -> list[Masked]:
    """A conversation's rows. Raises Unusable where its mask is not certain."""
    messages = prompt.messages or ()
    first = next(i for i, m in enumerate(messages) if m["role"] == "user")
    answers = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i > first]
    # Generation tags mark what the assistant says.
    if re.search(r"\{%-?\s*generation\s*-?%\}", str(target.tokenizer.chat_template)):
        rows = [_tagged(prompt, target, [messages[i] for i in answers])]
    else:
        rows = _by_prefix(prompt, target, messages, answers)
    longest = max(len(ids) for ids, _ in rows)
    if longest > target.max_positions:
        raise Unusable(f"too long for the target's {target.max_positions} positions", str(longest))
    return rows


def _tagged(prompt: Prompt, target: Shell, answers: list[dict[str, Any]]) -> Masked:
    """By the template's tags; every stretch they mark must be the answer that stands there."""
    out = target.tokenizer.apply_chat_template(
        [dict(m) for m in prompt.messages or ()],
        return_dict=True,
        return_assistant_tokens_mask=True,
        **prompt.template,
    )
    ids, made = list(out["input_ids"]), [bool(m) for m in out["assistant_masks"]]
    starts = [i for i, flag in enumerate(made) if flag and not (i and made[i - 1])]
    if len(starts) != len(answers):
        detail = f"{len(starts)} marked for {len(answers)} answers"
        raise Unusable("generation tags that do not mark every answer once", detail)
    for start, message in zip(starts, answers, strict=True):
        end = next((i for i in range(start, len(made)) if not made[i]), len(made))
        stop = start + (to_the_end(ids[start:end], target.eos_ids) or end - start)
        if not target.tokenizer.decode(ids[stop:end]).strip():
            # Many tags take in the line break after the end token, which no target draws.
            made[stop:end] = [False] * (end - stop)
            end = stop
        _same(target, ids[start:end], message)
    return ids, made


def _by_prefix(
    prompt: Prompt, target: Shell, messages: Messages, answers: list[int]
) -> list[Masked]:
    whole = encoded(target, rendered(target, prompt, messages, ask=False))
    one = [False] * len(whole)
    together = True
    rows = []
    for i in answers:
        before = encoded(target, rendered(target, prompt, messages[:i]))
        ids = encoded(target, rendered(target, prompt, messages[: i + 1], ask=False))
        if ids[: len(before)] != before:
            raise Unusable("answers that the template writes apart from its generation prompt")
        length = to_the_end(ids[len(before) :], target.eos_ids)
        if length is None:
            raise Unusable("answers that the template closes with no end token of the target")
        stop = len(before) + length
        _same(target, ids[len(before) : stop], messages[i])
        together &= whole[: len(ids)] == ids
        one[len(before) : stop] = [True] * (stop - len(before))
        # What follows the end token is the template's, and of no use to the last turn.
        rows.append((ids[:stop], [False] * len(before) + [True] * (stop - len(before))))
    return [(whole[:stop], one[:stop])] if together else rows


def _same(target: Shell, tokens: list[int], message: dict[str, Any]) -> None:
    """Raises Unusable unless the tokens read as the message's answer, and nothing more.

    Templates may trim it. Calls and reasoning stand around it in the template's own words.
    """
    tokens = tokens[:-1] if tokens[-1] in target.eos_ids else tokens
    text = target.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    content = message["content"].strip()
    if message.get("tool_calls") or message.get("reasoning_content"):
        found = content in text
    else:
        found = text.strip() == content
    if not found:
        detail = repr(text[:40])
        raise Unusable("answers to which the chat template adds words of its own", detail)
