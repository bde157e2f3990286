"""A target's own chat template: conversations as token ids, and what it can take.

Nothing here knows a model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jinja2 import Environment, TemplateError, meta

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.shell import Shell
from draftsmith.train.data.prompts import Prompt, Skips, Unusable

log = logging.getLogger(__name__)

# What the code of a template raises on a conversation that it was not written for.
_REFUSALS = (TemplateError, TypeError, ValueError, KeyError, AttributeError)


def encode(prompts: Sequence[Prompt], target: Shell) -> list[list[int]]:
    """Each prompt's token ids up to its first answer, with the generation prompt.

    Raises UserError: the chat template refuses the conversation, a prompt
    yields no tokens, or given ids lie outside the target's vocabulary.
    """
    prompts = plain(prompts, target)
    if later := sum(bool(p.later) for p in prompts):
        log.warning("%d of %d prompts: only their first turn is asked here", later, len(prompts))
    out = []
    for i, prompt in enumerate(prompts):
        try:
            out.append(opening(prompt, target))
        except Unusable as error:
            raise UserError(f"prompt {i} ({prompt.shown}): {error}; change or drop it") from None
    return out


def encode_fitting(
    prompts: Sequence[Prompt], target: Shell, max_new_tokens: int
) -> list[list[int]]:
    """Each prompt's token ids up to its first answer; [] for those that cannot be asked.

    They are counted in a warning. Raises UserError where none is left.
    """
    check = misfit(prompts, target)
    out: list[list[int]] = []
    skipped = Skips()
    for i, prompt in enumerate(prompts):
        try:
            check(prompt)
            ids = opening(prompt, target)
            if len(ids) + max_new_tokens > target.max_positions:
                raise Unusable(
                    f"too long for the target's {target.max_positions} positions",
                    f"{len(ids)} tokens and max_new_tokens {max_new_tokens}",
                )
            out.append(ids)
        except Unusable as error:
            out.append([])
            skipped.add(error.reason, f"prompt {i}", error.detail or prompt.shown)
    if len(skipped) == len(prompts):
        raise UserError(f"prompts: none of {len(prompts)} can be asked: {skipped}")
    if skipped:
        log.warning("%d of %d prompts cannot be asked: %s", len(skipped), len(prompts), skipped)
    return out


def plain(prompts: Sequence[Prompt], target: Shell) -> list[Prompt]:
    """The prompts as a base model takes them: where the tokenizer has no chat template, the first
    turn's words are a text that it continues, and a line says so."""
    if target.tokenizer.chat_template or all(p.messages is None for p in prompts):
        return list(prompts)
    log.warning(
        "target %s: its tokenizer has no chat template; prompts are texts that it continues",
        target.source.spec,
    )
    return [p if p.messages is None else _as_text(p) for p in prompts]


def _as_text(prompt: Prompt) -> Prompt:
    words = "\n".join(m["content"] for m in prompt.messages or ())
    return Prompt(None, None, prompt.domain, text=words, prefix=1 << 30)


def check_template(prompts: Iterable[Prompt], target: Shell) -> None:
    """Raises UserError where prompts need a chat template and the tokenizer has none."""
    if any(p.messages is not None for p in prompts) and not target.tokenizer.chat_template:
        raise UserError(
            f"target {target.source.spec}: its tokenizer has no chat template; use the instruct "
            "model, let it continue texts (sample --continue), or give prompts as prompt_ids"
        )


def opening(prompt: Prompt, target: Shell) -> list[int]:
    """One prompt's token ids, up to the first answer. Raises Unusable."""
    if prompt.messages is not None:
        ids = encoded(target, rendered(target, prompt, prompt.messages))
    elif prompt.text is not None:
        ids = list(target.tokenizer(prompt.text).input_ids)[: prompt.prefix]
    else:
        ids = list(prompt.ids or ())
    if not ids:
        raise Unusable("yields no tokens")
    if max(ids) >= target.vocab_size:
        detail = f"{max(ids)}; {target.source.spec} has {target.vocab_size}"
        raise Unusable("a token that is outside the vocabulary", detail)
    return ids


def rendered(
    target: Shell, prompt: Prompt, messages: Sequence[Mapping[str, Any]], ask: bool = True
) -> str:
    """Messages as the template writes them; ask: with the generation prompt. Raises Unusable."""
    try:
        return target.tokenizer.apply_chat_template(
            [dict(m) for m in messages],
            add_generation_prompt=ask,
            tokenize=False,
            **prompt.template,
        )
    except _REFUSALS as error:
        raise Unusable("the chat template refuses it", " ".join(str(error).split())) from None


def encoded(target: Shell, text: str) -> list[int]:
    """Token ids of text that a template wrote: it carries its own special tokens."""
    return list(target.tokenizer(text, add_special_tokens=False).input_ids)


# ---------------------------------------------------------------- what a template can take


def names_read(tokenizer: Any) -> set[str]:
    """The variables that the chat template reads (of all of them, where they have names)."""
    template = tokenizer.chat_template
    parts = [template] if isinstance(template, str) else list((template or {}).values())
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    # Without transformers' own tag, which marks what the assistant says.
    parts = [re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", part) for part in parts]
    try:
        return set().union(*(meta.find_undeclared_variables(environment.parse(p)) for p in parts))
    except TemplateError as error:
        line = " ".join(str(error).split())
        raise UserError(f"chat template of the tokenizer: is no Jinja ({line}); mend it") from None


def misfit(prompts: Sequence[Prompt], target: Shell) -> Callable[[Prompt], None]:
    """A check of each prompt, which raises Unusable for what the template would leave out, or
    mistake for its own marks. Raises UserError as `check_template` and `names_read` do."""
    check_template(prompts, target)
    chat = any(p.messages is not None for p in prompts)
    reads = names_read(target.tokenizer) if chat else set()
    control = control_tokens(target.tokenizer)
    template = str(target.tokenizer.chat_template)

    def check(prompt: Prompt) -> None:
        for name in prompt.template:
            if name not in reads:
                raise Unusable(f"{name}, which the chat template does not read")
        for message in (m for step in (prompt.messages or (), *prompt.later) for m in step):
            if message.get("tool_calls") and "tool_calls" not in template:
                raise Unusable("tool calls, which the chat template does not read")
            if found := control.search(message["content"]):
                raise Unusable("text that holds the target's own control tokens", found.group())

    return check


def control_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Matches a special token as text: in a message it would be read as the template's own."""
    special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
    # The longest first, so that a match is the whole token; of none, what never matches.
    return re.compile("|".join(re.escape(t) for t in sorted(special, key=len)[::-1]) or "(?!)")
