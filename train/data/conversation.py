"""A conversation with the target, turn by turn, and the rows of token ids that it becomes.

Further turns keep the token ids that the target drew, where the chat template writes the
conversation so far as it stands. It may not: some drop the thinking of earlier turns, or trim them.
Then the conversation goes on in a row of its own, which holds what the template writes, and whose
earlier turns are not learned from again. (Trainers that keep one row, or encode it anew, teach
spans that the target never drew.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftsmith.drafters.target.target import Target
from draftsmith.train.data.chat_template import encoded, rendered
from draftsmith.train.data.prompts import Messages, Prompt, Unusable


class Conversation:
    """A prompt and the target's answers so far: the rows of token ids that they become.

    index: the prompt's place. ids: what the target is to answer next; turn: which answer that is.
    rewritten: how often the template wrote earlier turns anew; unasked: why later ones were left.
    """

    def __init__(self, index: int, prompt: Prompt, ids: list[int], target: Target) -> None:
        self.index, self.prompt, self.target = index, prompt, target
        self.turn = 0
        self.ids = list(ids)
        self.rewritten = 0
        self.unasked = ""
        self._made = [False] * len(ids)
        self._messages: Messages = prompt.messages or ()
        self._rows: list[dict[str, Any]] = []
        self._finish = ""

    def take(self, tokens: Sequence[int], finish: str) -> None:
        """The answer to the present turn, the token that ended it included."""
        self.ids += tokens
        self._made += [True] * len(tokens)
        self._finish, self._answer = finish, list(tokens)

    def ask(self, max_new_tokens: int) -> bool:
        """Goes on to the next turn; whether there is one that can be asked.

        After an answer that was cut nothing is asked, so that `finish` of a row is that of its last
        turn and all before it ended by themselves.
        """
        if self.turn >= len(self.prompt.later):
            return False
        if self._finish != "stop":
            self.unasked = "the answer before them was cut"
            return False
        try:
            ids, same = self._next()
        except Unusable as error:
            self.unasked = error.reason
            return False
        if len(ids) + max_new_tokens > self.target.max_positions:
            self.unasked = "no positions are left"
            return False
        if not same:
            self._rows.append(self._row())
            self._made = []
            self.rewritten += 1
        self._made += [False] * (len(ids) - len(self._made))
        self.ids = ids
        self.turn += 1
        return True

    def give_up(self, reason: str) -> list[dict[str, Any]]:
        """The rows so far, where the present turn gets no answer; at the first, a row that says why
        and holds no text."""
        self.unasked = reason
        if not self._finish:
            self.ids, self._made, self._finish = [], [], reason
            return [self._row()]
        if not any(self._made):
            return self._rows
        length = len(self._made) - self._made[::-1].index(True)
        self.ids, self._made = self.ids[:length], self._made[:length]
        return self.rows()

    def rows(self) -> list[dict[str, Any]]:
        """The finished rows: ids, made, finish, domain, key, index."""
        return [*self._rows, self._row()]

    def _row(self) -> dict[str, Any]:
        return {
            "ids": self.ids, "made": self._made, "finish": self._finish,
            "domain": self.prompt.domain, "key": self.prompt.key, "index": self.index,
        }  # fmt: skip

    def _next(self) -> tuple[list[int], bool]:
        """Ids up to the next answer, and whether they go on from the present ones."""
        tokens = self._answer
        end = tokens[-1] if tokens[-1] in self.target.eos_ids else None
        decode = self.target.tokenizer.decode
        said = decode(tokens if end is None else tokens[:-1], clean_up_tokenization_spaces=False)
        before = rendered(self.target, self.prompt, self._messages)
        answer = {"role": "assistant", "content": said}
        self._messages = (*self._messages, answer, *self.prompt.later[self.turn])
        text = rendered(self.target, self.prompt, self._messages)
        closing = "" if end is None else decode([end], clean_up_tokenization_spaces=False)
        stands = before + said + closing
        if end is not None and text.startswith(stands):
            # After the end token, as in the whole text: alone it might begin with a space.
            ids = encoded(self.target, text[len(stands) - len(closing) :])
            if ids[0] == end:
                return self.ids + ids[1:], True
        return encoded(self.target, text), False
