"""README.md against the program: its commands parse, its recipes and files exist, its example runs.

Faults: an option that was renamed, a recipe key that is no more, a link to a table that moved.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from draftsmith.drafters import base
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target import Target
from draftsmith.recipes.cli import app
from draftsmith.train import recipe

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
SPANS = re.findall(r"^    (.+)$", re.sub(r" \\\n +", " ", README), re.M)
SPANS += re.findall(r"`([^`]+)`", re.sub(r"\s+", " ", re.sub(r"```.*?```", "", README, flags=re.S)))
COMMANDS = sorted(
    {
        s.split("  #")[0].strip()
        for s in SPANS
        if re.match(r"(accelerate launch .*)?draftsmith(\.train)? ", s)
    }
)
STAND_INS = {"RECIPE": "smol-eagle3", "URL": "http://127.0.0.1:8000", "N": "8"}  # in capitals there


def check(line: str) -> None:
    """Raises click's error, KeyError or UserError for a command that the program would not take."""
    words = [STAND_INS.get(word, word) for word in shlex.split(line)]
    if words[0] == "accelerate":  # its own options end where ours begin
        if "--config_file" in words:
            assert (ROOT / words[words.index("--config_file") + 1]).is_file()
        at = next(i for i, word in enumerate(words) if word.startswith("draftsmith"))
        words = [*words[at].split("."), *words[at + 1 :]]
    command: Any = typer.main.get_command(app)
    name, *rest = words[1:]
    if rest in ([], ["--help"]):  # spoken of, not run
        assert name in command.commands
        return
    parsed = command.commands[name].make_context(name, rest)
    if name in ("train", "plan"):
        recipe.load(parsed.params["recipe"], parsed.params["overrides"] or [])


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_parse(line: str) -> None:
    check(line)


@pytest.mark.parametrize(
    "line",
    ["draftsmith eval runs/x --temprature 1", "draftsmith tain smol-eagle3",
     "draftsmith train smol-eagle4", "draftsmith train smol-eagle3 learning_rate=1"],
)  # fmt: skip
def test_wrong_commands_are_noticed(line: str) -> None:
    """Planted faults."""
    with pytest.raises(Exception) as error:  # click's own lie in a private module
        check(line)
    assert isinstance(error.value, (KeyError, UserError)) or hasattr(error.value, "format_message")


def test_there_are_commands() -> None:
    names = {line.split()[1] for line in COMMANDS if line.startswith("draftsmith")}
    known: Any = typer.main.get_command(app)
    assert names >= set(known.commands) - {"quickstart"}, "a command that README does not show"


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 10
    for link in links:
        assert (ROOT / link).exists(), link
    for script in re.findall(r"`(benchmarks/\w+\.py)`", README):
        assert (ROOT / script).exists(), script


@pytest.mark.real
def test_the_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an untrained head in the place of the trained one."""
    monkeypatch.chdir(tmp_path)
    target = Target.load("smollm2")
    cls = base.family("eagle")
    place = tmp_path / "runs/smol-eagle3/best"
    place.mkdir(parents=True)
    base.save(cls.create(target, cls.Config()), place)
    [example] = re.findall(r"```python\n(.*?)```", README, re.S)
    exec(compile(example, "README.md", "exec"), {})
    assert re.search(r"\d+ verify passes", capsys.readouterr().out)
