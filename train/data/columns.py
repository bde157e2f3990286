"""Rows of a data set, in the shapes that people publish, as conversations.

One column asks. It may hold a text, a list of texts (turns), or a list of messages: {role, content}
or ShareGPT's {from, value}. Alpaca's `instruction` takes `input` (and `history`) along; `system`,
`tools` and `chat_template_kwargs` stand beside any of them; `category` or `source` is the domain.
What a row's own assistant said is left out: the target is to answer, turn by turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from draftsmith.train.data.prompts import NOT_JSON, Messages, Prompt, Unusable

# Columns that ask, by preference; texts before ids, which fit one tokenizer only.
COLUMNS = (
    "messages", "conversations", "conversation", "turns", "prompt", "question", "instruction",
    "query", "problem", "text", "prompt_ids",
)  # fmt: skip
_LISTS = ("messages", "conversations", "conversation", "turns")
ANSWERS = ("output", "response", "answer", "completion")
_ROLES = {
    "human": "user", "user": "user", "prompter": "user",
    "gpt": "assistant", "assistant": "assistant", "model": "assistant", "chatgpt": "assistant",
    "bot": "assistant", "bing": "assistant", "bard": "assistant",
    "system": "system", "developer": "system",
    "tool": "tool", "function": "tool", "observation": "tool", "ipython": "tool",
    "function_call": "assistant",
}  # fmt: skip
# Columns and parts of a message that a target of text is not asked with.
_MEDIA = ("image", "images", "audio", "audios", "video", "videos")
_TEXTS = (None, "text", "input_text", "output_text")
_KEPT = ("tool_calls", "tool_call_id", "name", "reasoning_content")


def find_column(row: Mapping[str, Any]) -> str | None:
    """The column that asks: a known one, else the only one that holds text; None: no such."""
    known = [name for name in COLUMNS if row.get(name) is not None]
    texts = [name for name, value in row.items() if isinstance(value, str)]
    return known[0] if known else texts[0] if len(texts) == 1 else None


def prompt_of(row: Mapping[str, Any], column: str, domain: str) -> Prompt:
    """What a row asks, its domain being `domain` unless it names one. Raises Unusable."""
    domain = _domain(row, domain)
    if column == "prompt_ids":
        return Prompt(None, token_ids(row.get(column), column), domain)
    steps = _steps(_conversation(row, column))
    for message in (m for step in steps for m in step):
        _check(message, column)
    return Prompt(steps[0], None, domain, steps[1:], _template(row))


def given_of(row: Mapping[str, Any], column: str, domain: str) -> Prompt:
    """The whole conversation of a row, its assistant's answers included. Raises Unusable."""
    messages = _conversation(row, column)
    answer = next((row[name] for name in ANSWERS if isinstance(row.get(name), str)), None)
    if answer is not None and messages[-1]["role"] == "user":
        messages.append({"role": "assistant", "content": answer})
    for message in messages:
        _check(message, column)
    if messages[-1]["role"] != "assistant":
        raise Unusable("no answer after the last question")
    return Prompt(tuple(messages), None, _domain(row, domain), (), _template(row))


def text_of(row: Mapping[str, Any], column: str, domain: str, prefix: int) -> Prompt:
    """A row's text, to be continued from its first `prefix` tokens on. Raises Unusable."""
    text = row.get(column)
    _check_media(row, column)
    if not isinstance(text, str) or not text.strip():
        raise Unusable(f"{column} holds no text")
    _check_unicode(text)
    return Prompt(None, None, _domain(row, domain), text=text, prefix=prefix)


def _domain(row: Mapping[str, Any], default: str) -> str:
    named = row.get("category") or row.get("source")
    return str(named) if isinstance(named, str | int) else default


def token_ids(value: Any, column: str) -> tuple[int, ...]:
    """`value` as token ids. Raises Unusable unless it is a list of integers >= 0, not empty."""
    whole = isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)
    if not whole or not value:
        raise Unusable(f"{column} is no list of token ids")
    return tuple(value)


# ---------------------------------------------------------------- conversations


def _conversation(row: Mapping[str, Any], column: str) -> list[dict[str, Any]]:
    """A row's messages; between turns of the user alone, the answers are missing."""
    value = row.get(column)
    _check_media(row, column)
    value = _unpacked(value) if column in _LISTS or isinstance(value, Mapping) else value
    if isinstance(value, str):
        messages = [*_history(row), {"role": "user", "content": _instruction(row, column, value)}]
    elif isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        messages = []
        for text in value:
            messages += [{"role": "assistant", "content": None}] if messages else []
            messages.append({"role": "user", "content": text})
    elif isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
        messages = [_message(m) for m in value]
    else:
        raise Unusable(f"{column} holds no text, nor a list of texts or messages")
    # An empty system message is how some data sets say that there is none.
    messages = [m for m in messages if m["role"] != "system" or str(m["content"] or "").strip()]
    system = row.get("system") or row.get("system_prompt")
    if isinstance(system, str) and system.strip() and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    if not any(m["role"] == "user" for m in messages):
        raise Unusable(f"{column} has no user turn")
    return messages


def _check_media(row: Mapping[str, Any], column: str) -> None:
    """Raises Unusable for a row that shows or plays something beside its text."""
    for name in _MEDIA:
        value = row.get(name)
        shown = value if isinstance(value, list | tuple) else [value]
        if name != column and any(each not in (None, "") for each in shown):
            raise Unusable("pictures, audio or video beside the text", f"column {name}")


def _unpacked(value: Any) -> Any:
    """Lists that were stored as JSON text, or by `datasets` as an object of lists, as lists."""
    if isinstance(value, str) and value.lstrip()[:2] in ("[{", '["'):
        try:
            value = json.loads(value)
        except NOT_JSON:
            return value  # a text that begins like one
    if isinstance(value, Mapping) and value and all(isinstance(v, list) for v in value.values()):
        return [dict(zip(value, each, strict=False)) for each in zip(*value.values(), strict=False)]
    return value


def _instruction(row: Mapping[str, Any], column: str, text: str) -> str:
    more = row.get("input") if column == "instruction" else None
    return f"{text}\n\n{more}" if isinstance(more, str) and more.strip() else text


def _history(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Alpaca's earlier turns: [question, answer] pairs."""
    pairs = row.get("history")
    for pair in pairs if isinstance(pairs, list) else []:
        if not isinstance(pair, list) or len(pair) != 2:
            raise Unusable("history is no list of [question, answer]")
        yield {"role": "user", "content": pair[0]}
        yield {"role": "assistant", "content": pair[1]}


def _message(raw: Mapping[str, Any]) -> dict[str, Any]:
    """{role, content} with what templates read besides, in transformers' form."""
    named = raw.get("role") or raw.get("from")
    role = _ROLES.get(str(named).lower())
    if role is None:
        raise Unusable("a message of no known role", repr(named))
    content = next((raw[k] for k in ("content", "value", "text") if raw.get(k) is not None), None)
    if isinstance(content, list):
        content = "".join(_part(part) for part in content)
    if content is not None and not isinstance(content, str):
        raise Unusable("content that is not text", type(content).__name__)
    out: dict[str, Any] = {"role": role, "content": content}
    out |= {key: raw[key] for key in _KEPT if raw.get(key) is not None}
    if named == "function_call":
        out |= {"content": None, "tool_calls": [_call(content)]}
    elif "tool_calls" in out:
        out["tool_calls"] = [_call(call) for call in _calls(out["tool_calls"])]
        if not out["tool_calls"]:
            del out["tool_calls"]
    return _plain(out)


def _plain(value: Any) -> Any:
    """Values that a template writes as text, as text: dates, decimals and the like."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


def _part(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    known = not isinstance(part, Mapping) or part.get("type") in _TEXTS
    if not known or not isinstance(text, str):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise Unusable("content that is not text", str(kind))
    return text


def _calls(value: Any) -> list[Any]:
    """A message's tool calls: a list, one of them alone, or either as JSON text."""
    if isinstance(value, str):
        value = _from_json(value, "tool_calls that are no JSON")
    value = [value] if isinstance(value, Mapping) else value
    if value is not None and not isinstance(value, list | tuple):
        raise Unusable("tool_calls that are no list of objects", type(value).__name__)
    return list(value or ())


def _call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object: OpenAI's text would be escaped once more.

    No arguments (absent, null, empty text) are {}.
    """
    call = _from_json(call, "a tool call that is no JSON") if isinstance(call, str) else call
    function = (call.get("function") or call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Unusable("a tool call that is no {name, arguments}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _from_json(arguments or "null", "arguments of a tool call that are no JSON")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        kind = type(arguments).__name__
        raise Unusable("arguments of a tool call that are no object", kind)
    out = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return out | ({"id": call["id"]} if call.get("id") else {})


def _from_json(text: str, problem: str) -> Any:
    """A structure that stands as text; nothing but space is null. Raises Unusable."""
    try:
        return json.loads(text) if text.strip() else None
    except NOT_JSON as error:
        raise Unusable(problem, str(error)[:80]) from None


def _steps(messages: list[dict[str, Any]]) -> tuple[Messages, ...]:
    """What stands before each of the target's answers: groups of messages, never empty.

    A tool's result answers the call that was given, not one that the target may make: everything
    up to the last result stays as given, and the target answers from there on. So does what the
    assistant said before the first question.
    """
    tools = [i for i, m in enumerate(messages) if m["role"] == "tool"]
    users = [i for i, m in enumerate(messages) if m["role"] == "user"]
    kept = (tools[-1] if tools else users[0]) + 1
    groups: list[list[dict[str, Any]]] = [messages[:kept]]
    answered = False
    for message in messages[kept:]:
        if message["role"] == "assistant":
            answered = True
            continue
        if answered:
            groups.append([])
        groups[-1].append(message)
        answered = False
    if not any(m["role"] in ("user", "tool") for m in groups[-1]):
        groups.pop()
    return tuple(tuple(group) for group in groups)


def _check(message: dict[str, Any], column: str) -> None:
    """Raises Unusable for a message that says nothing, or holds what is no text."""
    content = message["content"]
    if content is None and (message["role"] == "tool" or message.get("tool_calls")):
        content = message["content"] = ""  # templates join it to other text
    elif not isinstance(content, str):
        raise Unusable(f"{column} holds no text", f"a {message['role']} turn without content")
    elif not content.strip() and message["role"] != "tool" and not message.get("tool_calls"):
        raise Unusable(f"{column} holds no text", f"an empty {message['role']} turn")
    _check_unicode(content)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can escape half of a pair, tokenizers refuse it
        place = f"{text[error.start]!a} at {error.start}"
        raise Unusable("half a character, or bytes that are not UTF-8", place) from None


def _template(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a row gives the chat template besides its messages."""
    tools, settings = row.get("tools"), row.get("chat_template_kwargs")
    if isinstance(tools, str):
        tools = _from_json(tools, "tools that are no list of objects")
    if isinstance(settings, str):
        settings = _from_json(settings, "chat_template_kwargs that are no object")
    if tools and not (isinstance(tools, list) and all(isinstance(t, Mapping) for t in tools)):
        raise Unusable("tools that are no list of objects")
    out = _plain(settings) if isinstance(settings, Mapping) else {}
    return out | ({"tools": _plain(tools)} if tools else {})
