"""The three READMEs against the program: their commands parse, links and files exist, the example
runs, and the map is the layout.

Faults: an option that was renamed, a recipe key that is no more, a link to a table that moved.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from draftsmith.drafters import base, storage
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.target import Target
from draftsmith.recipes import cli
from draftsmith.train import recipe
from places import ROOT

README = ROOT / "README.md"
DOCS = [README, ROOT / "recipes" / "README.md", ROOT / "benchmarks" / "README.md"]
RECIPES = DOCS[1].read_text()
LONGEST = 120  # lines of README.md: a reader gets to its end


def commands(text: str) -> set[str]:
    """Whatever a page tells to type that begins with our command."""
    plain = re.sub(r"```.*?```", "", text, flags=re.S)
    spans = re.findall(r"^    (.+)$", re.sub(r" \\\n +", " ", text), re.M)
    spans += re.findall(r"`([^`]+)`", re.sub(r"\s+", " ", plain))
    shown = (span.split("  #")[0].strip() for span in spans)
    return {s for s in shown if re.match(r"(accelerate launch .*)?draftsmith(\.train)? ", s)}


COMMANDS = sorted(set().union(*(commands(doc.read_text()) for doc in DOCS)))
STAND_INS = {"RECIPE": "smol-eagle3", "URL": "http://127.0.0.1:8000", "N": "8"}  # in capitals there


def check(line: str) -> None:
    """Raises click's error, KeyError or UserError for a command that the program would not take."""
    words = [STAND_INS.get(word, word) for word in shlex.split(line)]
    if words[0] == "accelerate":  # its own options end where ours begin
        if "--config_file" in words:
            assert (ROOT / words[words.index("--config_file") + 1]).is_file()
        at = next(i for i, word in enumerate(words) if word.startswith("draftsmith"))
        words = [*words[at].split("."), *words[at + 1 :]]
    name, *rest = words[1:]
    if rest in ([], ["--help"]):  # spoken of, not run
        assert name in cli.COMMANDS
        return
    parsed = cli.load(name).make_context(name, rest)
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
    assert names >= set(cli.COMMANDS) - {"quickstart"}, "a command that no README shows"


def headings(page: Path) -> set[str]:
    """The anchors that a page's headings have on GitHub."""
    names = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", name).lower().replace(" ", "-") for name in names}


def broken_links(doc: Path, text: str) -> list[str]:
    """Links to a file or heading that is not there, and scripts that are not."""
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 1
    out = []
    for link in links:
        file, _, heading = link.partition("#")
        page = (doc.parent / file).resolve() if file else doc
        if not page.exists() or (heading and heading not in headings(page)):
            out.append(link)
    scripts = re.findall(r"python (\S+\.py)", text)
    return out + [script for script in scripts if not (ROOT / script).is_file()]


@pytest.mark.parametrize("doc", DOCS, ids=lambda doc: doc.parent.name)
def test_links_lead_somewhere(doc: Path) -> None:
    assert broken_links(doc, doc.read_text()) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("benchmarks/parity.md", "benchmarks/party.md"), ("README.md#trackers", "README.md#tracker"),
     ("plan_8b.py", "plan_9b.py")],
)  # fmt: skip
def test_broken_links_are_noticed(right: str, wrong: str) -> None:
    """Planted faults."""
    text = README.read_text()
    assert right in text and broken_links(README, text.replace(right, wrong))


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= LONGEST


def folders(text: str) -> list[str]:
    """The folders of the map, two levels of indentation deep."""
    lines = re.findall(r"^    ( *)(\w+)/  +\S", text[text.index("## Map") :], re.M)
    out: list[str] = []
    for indent, name in lines:
        if not indent:
            out.append(name)
        else:
            out.append(f"{next(o for o in reversed(out) if '/' not in o)}/{name}")
    return out


def test_the_map_is_the_layout() -> None:
    """Every folder that holds modules is in the map; those of tests are the same again."""
    here = {path.parent.relative_to(ROOT).as_posix() for top in TOPS for path in top.rglob("*.py")}
    tests = {name for name in here if name.startswith("tests/")} - {"tests/support"}
    assert here - tests == set(folders(README.read_text()))
    assert tests <= {f"tests/{name}" for name in here}


TOPS = [ROOT / name for name in ("recipes", "train", "eval", "drafters", "tests", "benchmarks")]


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
    storage.save(cls.create(target, cls.Config()), place)
    [example] = re.findall(r"```python\n(.*?)```", RECIPES, re.S)
    exec(compile(example, "recipes/README.md", "exec"), {})
    assert re.search(r"\d+ verify passes", capsys.readouterr().out)
