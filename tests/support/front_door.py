"""Commands as a user types them, in this process, and what they refuse."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.recipes import cli
from draftsmith.train.learner import Learner


def run(monkeypatch: pytest.MonkeyPatch, *words: Any) -> int:
    """`draftsmith WORDS` in this process: its exit code."""
    monkeypatch.setattr(sys, "argv", ["draftsmith", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


class Door:
    """Runs commands that must be refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def refusal(self, *words: Any) -> str:
        """The one line on stderr with which a command is refused; nothing is computed."""
        for owner, name in ((Decoder, "generate"), (Learner, "advance")):
            self.monkeypatch.setattr(owner, name, never)
        self.capsys.readouterr()
        code = run(self.monkeypatch, *words)
        out, err = self.capsys.readouterr()
        assert code == 2, (code, err)
        assert out == ""
        assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
        return err.strip()

    def early(self, *words: Any) -> str:
        """The same, for what can be known before a target is loaded."""
        with self.monkeypatch.context() as patch:
            patch.setattr(Target, "load", never)
            return self.refusal(*words)


def never(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("compute was spent")


def damage(source: Path, path: Path, fault: str) -> None:
    content = source.read_bytes()
    tensors = load_file(source)
    name = min(tensors)
    if fault == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif fault == "empty":
        path.write_bytes(b"")
    elif fault == "text":
        path.write_text("version https://git-lfs.github.com/spec/v1\n")
    elif fault == "foreign":
        save_file({"weight": torch.zeros(2)}, path)
    elif fault == "lacks one":
        save_file({n: t for n, t in tensors.items() if n != name}, path)
    elif fault == "one more":
        save_file(tensors | {"extra": torch.zeros(1)}, path)
    elif fault == "other shape":
        save_file(tensors | {name: torch.zeros(3, 3)}, path)
    elif fault == "absent":
        path.unlink(missing_ok=True)


FAULTS = (
    "truncated", "empty", "text", "foreign", "lacks one", "one more", "other shape", "absent",
)  # fmt: skip
