"""Recipes: what a user can get wrong in one, and what each mistake is answered with.

A key that is ignored trains something else than was asked for, hours long and silently; so every
key is known, and every refusal is one line that names file, key and remedy.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import BaseModel, Field, create_model

from draftsmith.drafters import base
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.recipes import keys
from draftsmith.train import recipe
from draftsmith.train.objective.losses import LOSSES, Cells, Loss
from places import RECIPES

SHIPPED = sorted(RECIPES.glob("*.yaml"))
GOOD: dict[str, Any] = {"name": "mine", "drafter": "eagle", "steps": 10}


def write(folder: Path, **changes: Any) -> Path:
    """A recipe file: GOOD with changes; a key changed to None is left out."""
    keys = {key: value for key, value in (GOOD | changes).items() if value is not None}
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(keys))
    return path


def refusal(path: Path | str, *overrides: str) -> str:
    """The one line with which a recipe is refused."""
    with pytest.raises(UserError) as error:
        recipe.load(path, overrides)
    line = str(error.value)
    assert "\n" not in line and line.strip() == line and len(line) < 400, line
    return line


def test_a_good_recipe_and_its_defaults(tmp_path: Path) -> None:
    read = recipe.load(write(tmp_path, taps=[1, 2], temperature=0.5))
    assert (read.name, read.drafter, read.steps, read.loss) == ("mine", "eagle", 10, "kl")
    assert read.sampler == Sampler(0.5)
    assert read.folder == Path("runs/mine")
    assert read.drafter_config().model_dump(exclude_unset=True) == {"taps": [1, 2]}


def test_a_home_that_no_shell_has_filled_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In YAML nothing else would: `runs: ~/runs` made a folder called ~."""
    monkeypatch.setenv("HOME", "/home/me")
    read = recipe.load(write(tmp_path, runs="~/runs"), ["samples=~/s", "start=~/old"])
    assert read.folder == Path("/home/me/runs/mine")
    assert (read.samples, read.start) == ("/home/me/s", "/home/me/old")
    assert recipe.load(write(tmp_path, prompts="~/p.jsonl")).prompts == "/home/me/p.jsonl"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": "s", "prompts": "p"}, "prompts: nothing is asked where samples are given"),
        ({"eta": 5}, "eta: is ignored without loss: lk"),
        ({"decay": 0.5, "depth_weights": "reach"}, "decay: is ignored without depth_weights: geo"),
        ({"span": 2}, "span: is ignored without depth_weights: exponential"),
        ({"adapt_weight": 0.5}, "adapt_weight: is ignored without adapt; set adapt too"),
        ({"feature_dtype": "bfloat16"}, "leave it out (feature_dtype=None)"),
    ],
)
def test_a_key_that_nothing_would_read(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    assert words in refusal(write(tmp_path, **changes))


def test_only_what_is_asked_must_be_read(tmp_path: Path) -> None:
    """An override may leave a shipped recipe's key unread; a run's stored recipe is taken as it is;
    but a key that the command itself names is told."""
    medusa = recipe.load("llama31-8b-medusa", ["loss=kl", "switch_alpha=[]"])
    assert medusa.flat()["eta"] == 10
    assert "eta: is ignored without loss: lk" in refusal("smol-small", "eta=5")
    stored = yaml.safe_load(write(tmp_path, eta=5).read_text())
    assert recipe.parse(stored, "runs/old/recipe.yaml").flat()["eta"] == 5


def test_keys_that_are_read(tmp_path: Path) -> None:
    """The same where something does; and defaults, which a run's own recipe.yaml holds all of."""
    recipe.load(write(tmp_path, eta=5, loss=["kl", "lk"], switch_alpha=[0.5], decay=0.5))
    recipe.load(write(tmp_path, span=2, depth_weights="exponential", eta=3.0, decay=0.8))
    recipe.load(write(tmp_path, samples="s", feature_dtype="bfloat16", feature_cache="1GB"))


def test_the_written_recipe_is_read_as_the_same(tmp_path: Path) -> None:
    """runs/NAME/recipe.yaml is compared on resume: what it holds must survive the file."""
    block = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "num_kv_heads": 2}
    block |= {"head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
    given = write(tmp_path, draft_vocab=32, lr=1e-5, taps=[1, "normed"], block=block)
    read = recipe.load(given)
    path = tmp_path / "again.yaml"
    path.write_text(yaml.safe_dump(read.flat()))
    assert recipe.load(path) == read


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("step", "steps"),
        ("learning_rate", None),
        ("warm_up", "warmup"),
        ("draft_vocabulary", "draft_vocab"),
        ("temprature", "temperature"),
        ("Depths", "depths"),
        ("settings", None),  # the model's own field, no key of a file
    ],
)
def test_an_unknown_key_names_near_ones(tmp_path: Path, key: str, near: str | None) -> None:
    path = write(tmp_path, **{key: 3})
    line = refusal(path)
    assert str(path) in line and repr(key) in line
    if near:
        assert "did you mean" in line and re.search(rf"\b{near}\b", line.split("mean")[1])


def test_an_unknown_key_in_an_override(tmp_path: Path) -> None:
    assert "'stepz'" in refusal(write(tmp_path), "stepz=3")


@pytest.mark.parametrize("key", ["min_p", "repetition_penalty", "logit_bias"])
def test_a_sampler_that_is_not_applied(tmp_path: Path, key: str) -> None:
    """Said as such, not as a misspelt key."""
    assert f"{key}: is not applied" in refusal(write(tmp_path), f"{key}=0.1")


@pytest.mark.parametrize(
    ("drafter", "key"), [("eagle", "layers"), ("eagle", "checkpoint"), ("small", "draft_vocab")]
)
def test_a_key_of_another_family(tmp_path: Path, drafter: str, key: str) -> None:
    """`layers` beside drafter: eagle would be ignored, and the user would never know."""
    line = refusal(write(tmp_path, drafter=drafter, **{key: 1}))
    assert repr(key) in line and drafter in line


@pytest.mark.parametrize("key", ["drafter", "steps", "name"])
def test_a_missing_key(tmp_path: Path, key: str) -> None:
    path = write(tmp_path, **{key: None})
    line = refusal(path)
    assert str(path) in line and f"{key}:" in line
    assert "eagle'" not in line, "the line must not print the whole recipe"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", "ten"),
        ("steps", 0),
        ("steps", 1.5),
        ("k", 0),
        ("k", -1),
        ("depths", 0),
        ("lr", "fast"),
        ("lr", 0),
        ("lr", float("nan")),
        ("decay", 0),
        ("decay", 1.5),
        ("loss", "cross_entropy"),
        ("warmup", 1),
        ("clip", 0),
        ("rows", []),
        ("length", 4),
        ("heldout", 0),
        ("save_every", 0),
        ("max_new_tokens", 0),
        ("tracker", "mlflow"),
        ("tracker", ["wandb", "mlflow"]),
        ("name", "../elsewhere"),
        ("name", ".."),
        ("name", ""),
        ("target", 3),
        ("taps", "all"),
        ("taps", [1.5]),
        ("draft_vocab", 0),
        ("head", "frozen"),
        ("fc_norm", "each"),
        ("regression", 10),  # EAGLE-3 foretells no feature
        ("feature_noise", -0.1),
        ("block", {"hidden": 3}),
        ("temperature", -0.5),
        ("temperature", float("nan")),
        ("temperature", "warm"),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 1.5),
    ],
)
def test_a_wrong_value(tmp_path: Path, key: str, value: Any) -> None:
    path = write(tmp_path, **{key: value})
    line = refusal(path)
    assert str(path) in line and f"{key}" in line.removeprefix(str(path))


@pytest.mark.parametrize("drafter", ["medusa", "hydra"])
@pytest.mark.parametrize(("key", "value"), [("heads", 0), ("layers", 0), ("head", "none")])
def test_a_wrong_value_of_heads(tmp_path: Path, drafter: str, key: str, value: Any) -> None:
    line = refusal(write(tmp_path, drafter=drafter, **{key: value}))
    assert f"mine.yaml: {key}: " in line and f"got {value!r}" in line


@pytest.mark.parametrize(("key", "value"), [("modules", 0), ("init", "random")])
def test_a_wrong_value_of_mtp(tmp_path: Path, key: str, value: Any) -> None:
    line = refusal(write(tmp_path, drafter="mtp", **{key: value}))
    assert f"{key}: " in line


@pytest.mark.parametrize(
    ("drafter", "words"),
    [("ngram", "nothing to train"), ("eagel", "known are"), (["eagle"], "name a family")],
)
def test_a_drafter_that_cannot_be_trained(tmp_path: Path, drafter: Any, words: str) -> None:
    path = write(tmp_path, drafter=drafter)
    line = refusal(path)
    assert str(path) in line and "drafter" in line and words in line


def test_overrides(tmp_path: Path) -> None:
    """Typed as YAML would be, the last one winning; 5e-4 is text to YAML 1.1, but a number here."""
    read = recipe.load(
        write(tmp_path, lr=0.1),
        ["lr=5e-4", "steps=3", "taps=[1, normed]", "draft_vocab=null", "steps=4", "samples=a=b"],
    )
    assert (read.lr, read.steps, read.samples) == (5e-4, 4, "a=b")
    assert read.settings == {"taps": [1, "normed"], "draft_vocab": None}


@pytest.mark.parametrize("item", ["steps", "=3", "", "lr=[1", "--steps"])
def test_an_override_that_is_none(tmp_path: Path, item: str) -> None:
    assert item in refusal(write(tmp_path), item)


@pytest.mark.parametrize("content", ["a: [1", "a: b: c", "\tname: x", "- name\n- steps", "", "7"])
def test_a_file_that_is_no_recipe(tmp_path: Path, content: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    assert str(path) in refusal(path)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00name")
    assert str(path) in refusal(path)


@pytest.mark.parametrize("name", ["no-such-recipe", "folder/none.yaml", "."])
def test_no_such_recipe(name: str) -> None:
    line = refusal(name)
    assert name in line and "smol-eagle3" in line, "the shipped ones are named"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_recipes(path: Path) -> None:
    """Each parses, by its bare name too, is called what its file is called, and says how to run it.

    The header's command must be one that works: its recipe exists and its overrides are keys.
    """
    read = recipe.load(path)
    assert recipe.load(path.stem) == read
    assert read.name == path.stem
    header = [
        line for line in path.read_text().split("\nname:")[0].splitlines() if line.startswith("#")
    ]
    commands = [
        line for line in header if "draftsmith train " in line or "draftsmith.train " in line
    ]
    assert commands, f"{path.name}: no command in its header"
    for line in commands:
        words = re.split(r"draftsmith[ .]train ", line)[1].split()
        assert words[0] == path.stem
        recipe.load(words[0], [word for word in words[1:] if re.match(r"^\w+=\S", word)])


def test_there_are_shipped_recipes() -> None:
    """The parametrised test above passes on an empty folder."""
    assert {"smol-eagle3"} <= {path.stem for path in SHIPPED}


def test_a_loss_with_a_number_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its row follow the recipe key, its check, and its value in the formula."""
    number = Field(2.0, ge=0.5, description="power: of what is lost.")
    row = Loss("(1 - alpha)**gamma", lambda c, gamma: (1 - c.alpha) ** gamma)
    monkeypatch.setitem(LOSSES, "power", dataclasses.replace(row, numbers={"gamma": number}))
    found = importlib.util.spec_from_file_location("recipe_again", str(recipe.__file__))
    assert found and found.loader
    again = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "recipe_again", again)
    found.loader.exec_module(again)
    cells = Cells(torch.tensor([[0.25]]), *[torch.zeros(1, 1)] * 2, {}, torch.zeros(1))
    given: dict[str, Any]
    for given, value in (({}, 0.75**2), ({"gamma": 3}, 0.75**3)):
        read = again.load(write(tmp_path, loss="power", **given))
        assert read.objectives[0].table(cells).item() == pytest.approx(value)
        assert read.flat()["gamma"] == given.get("gamma", 2.0)
    assert "gamma" in {key for key, *_ in keys.rows(again.LossNumbers)}
    for given, words in (
        ({"loss": "power", "gamma": 0.4}, "gamma: Input should be greater than or equal to 0.5"),
        ({"gamma": 3}, "gamma: is ignored without loss: power"),
    ):
        with pytest.raises(UserError, match=words):
            again.load(write(tmp_path, **given))


# ---------------------------------------------------------------- draftsmith keys


def unlisted(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields) - {key for key, *_ in keys.rows(model)}


@pytest.mark.parametrize("name", base.BUILT_IN)
def test_every_key_is_listed(name: str) -> None:
    assert unlisted(recipe.Recipe) == {"numbers", "settings"}  # hold the losses' and the family's
    assert unlisted(recipe.LossNumbers) == set()
    assert unlisted(base.family(name).Config) == set()


def test_a_key_without_a_meaning_is_noticed() -> None:
    """Planted fault."""
    described = (int, Field(1, description="says what it means"))
    assert unlisted(create_model("Silent", described=described, silent=(int, 1))) == {"silent"}


def test_keys_are_shown_as_the_schema_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    fields = set(recipe.Recipe.model_fields)
    assert set(keys.GROUPS) <= fields
    keys.keys("eagle")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = {words[0] for words in lines if words}
    assert shown >= set(recipe.NUMBERS) | fields - {"numbers", "settings"}
    assert shown >= set(base.family("eagle").Config.model_fields)
    assert shown >= set(LOSSES)
    assert next(words for words in lines if words[:1] == ["clip"])[1:5] == [
        "number",
        ">",
        "0",
        "(1.0)",
    ]
    with pytest.raises(UserError, match="eagel: no family to train; known are small"):
        keys.keys("eagel")


def test_an_unknown_key_is_sent_to_the_list(tmp_path: Path) -> None:
    assert "unknown key 'xyzzy' for drafter eagle; draftsmith keys eagle lists" in refusal(
        write(tmp_path, xyzzy=1)
    )
