"""`sample` and `train` by the front door: settings, samples, damaged checkpoints, a whole job.

.venv/bin/pytest tests/recipes/test_cli_training.py
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import training
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.train import checkpoint
from draftsmith.train.samples.samples import Samples
from front_door import FAULTS, Door, damage, never, run
from training import World


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"), with_samples=False)


@pytest.fixture(scope="module")
def samples(world: World) -> Path:
    """The world's samples, made when a test first needs them."""
    pytest.importorskip("datasets")
    if not world.samples.exists():
        training.sample(world.target, world.prompts, world.samples)
    return world.samples


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Door:
    return Door(monkeypatch, capsys)


# ---------------------------------------------------------------- train


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("k=0", "k"),
        ("temperature=-1", "temperature"),
        ("step=3", "steps"),
        ("drafter=eagel", "eagle"),
        ("steps", "key=value"),
        ("samples=no-such-folder", "no-such-folder"),
    ],
)
def test_train_settings(door: Door, world: World, change: str, named: str) -> None:
    assert named in door.early("train", world.recipe("settings"), change)
    assert not world.folder("settings").exists()


def test_train_module_refuses_the_same(
    door: Door, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    """`accelerate launch -m draftsmith.train` has a main of its own."""
    from draftsmith.train.run import main

    door.monkeypatch.setattr(Target, "load", never)
    for words in ([str(world.recipe("module")), "k=0"], ["no-such-recipe"]):
        capsys.readouterr()
        assert main(words) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1
    assert main(["--help"]) == 0 and "accelerate launch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("drafter", "change", "named"),
    [
        ("eagle", "taps=[1, 5]", "taps: layer 5"),
        ("eagle", "taps=[-1]", "taps: layer -1"),
        ("eagle", "taps=[1, 1]", "taps"),
        ("eagle", "draft_vocab=1000", "draft_vocab: 1000"),
        ("small", "layers=[4]", "layers: 4"),
        ("small", "layers=[]", "layers"),
        ("small", "layers=null", "layers"),
    ],
)
def test_settings_that_the_target_cannot_take(
    door: Door, world: World, drafter: str, change: str, named: str
) -> None:
    """Known once the target is loaded; told before it answers prompts or audits samples."""
    path = world.recipe("shapes", drafter, samples=None, prompts=str(world.prompts))
    assert named in door.refusal("train", path, change)
    assert not (world.folder("shapes") / "samples").exists()


def test_samples_at_another_sampler(door: Door, world: World, samples: Path) -> None:
    line = door.early("train", world.recipe("cold"), "temperature=0.5")
    assert str(samples) in line and "temperature" in line


def test_samples_of_another_target(door: Door, world: World, samples: Path, tmp_path: Path) -> None:
    """The same shape and tokenizer, other weights: only the audit or the revision can tell."""
    other = training.save_target(tmp_path / "other", seed=1)
    door.monkeypatch.setattr("draftsmith.train.samples.samples.audit", never)
    line = door.refusal("train", world.recipe("other"), f"target={other}")
    assert str(samples) in line and str(other) in line


def test_a_run_of_another_recipe(door: Door, world: World, samples: Path) -> None:
    path = world.recipe("taken", steps=2)
    assert run(door.monkeypatch, "train", path) == 0
    line = door.early("train", path, "lr=0.5")
    assert str(world.folder("taken")) in line and "lr" in line and "another name" in line


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_checkpoint_on_resume(
    door: Door, world: World, samples: Path, fault: str
) -> None:
    """The run must not go on from weights that are partly random."""
    path = world.recipe("resumed", steps=2)
    folder = world.folder("resumed")
    stored = folder / "checkpoint-2" / "model.safetensors"
    if not folder.exists():
        assert run(door.monkeypatch, "train", path) == 0
    whole = stored.read_bytes()
    try:
        copy = world.root / "whole.safetensors"
        copy.write_bytes(whole)
        damage(copy, stored, fault)
        assert str(stored) in door.refusal("train", path)
    finally:
        stored.write_bytes(whole)
    state = stored.with_name("state.pt")
    content = state.read_bytes()
    try:
        if fault == "truncated":
            state.write_bytes(content[: len(content) // 2])
        elif fault == "empty":
            state.write_bytes(b"")
        elif fault == "text":
            state.write_text("state")
        elif fault == "absent":
            state.unlink()
        else:
            return
        assert str(state) in door.refusal("train", path)
    finally:
        state.write_bytes(content)
    assert checkpoint.steps(folder) == [2]


@pytest.mark.parametrize(("family", "more"), [("eagle", {}), ("small", {"lora": 2})])
def test_a_flipped_bit_on_resume(
    door: Door, world: World, samples: Path, family: str, more: dict[str, int]
) -> None:
    """In weights, adapters, moments or settings: which file, and how the run goes on from the
    checkpoint before it."""
    path = world.recipe("flipped", family, steps=4, save_every=2, **more)
    assert run(door.monkeypatch, "train", path) == 0
    place = world.folder("flipped") / "checkpoint-4"
    for name in ("model.safetensors", "state.pt", "config.json"):
        whole = (place / name).read_bytes()
        for share in (0.3, 0.6, 0.9):
            changed = bytearray(whole)
            if name == "config.json":
                at = changed.index(b'"num_layers": 4') + len(b'"num_layers": ')
                changed[at] ^= 1  # 5
            else:
                changed[4 * int(len(whole) * share / 4)] ^= 1
            (place / name).write_bytes(changed)
            with door.monkeypatch.context() as patch:
                line = Door(patch, door.capsys).refusal("train", path)
            assert f"{place / name}: is not what was stored" in line
            assert f"delete {place}, and the same command goes on" in line
        (place / name).write_bytes(whole)
    shutil.rmtree(place)
    assert run(door.monkeypatch, "train", path) == 0
    assert checkpoint.steps(place.parent) == [2, 4]
    shutil.rmtree(place.parent)


# ---------------------------------------------------------------- sample


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "2"], "top_p"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--batch-size", "0"], "--batch-size"),
        (["--foreign"], "--import"),
        (["--import", "none.jsonl"], "none.jsonl"),
        (["--import", "none.jsonl", "--server", "http://localhost:1"], "--server"),
        (["--model", "big"], "--server"),
        (["--server", "http://127.0.0.1:9"], "no answer"),
        (["--given"], "--prompts"),
        (["--continue", "4"], "--prompts"),
        (["--prompts", "none.csv"], "none.csv"),
        (["--template", "thinking"], "KEY=VALUE"),
        (["--column", "question"], "--prompts"),
        (["--concurrency", "4"], "--server"),
        (["--import", "none.jsonl", "--template", "thinking=1"], "takes no --template"),
        (["--import", "none.jsonl", "--column", "question"], "takes no --column"),
        (["--show", "--server", "http://127.0.0.1:9"], "leave --server out"),
        (["--show", "--given", "--continue", "3"], "leave --continue"),
    ],
)
def test_sample_settings(door: Door, tmp_path: Path, words: list[str], named: str) -> None:
    assert named in door.early("sample", tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()


def test_the_templates_settings_reach_our_own_prompts(
    door: Door, world: World, tmp_path: Path
) -> None:
    """This target's template reads none, and says so of every prompt that brings one."""
    words = ["sample", tmp_path / "out", "--target", world.target, "--template"]
    line = door.refusal(*words, "enable_thinking=false")
    assert "enable_thinking, which the chat template does not read" in line


def test_sample_then_train_then_eval(
    world: World, samples: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The three commands of the README, one after the other."""
    words = ["sample", tmp_path / "s", "--target", world.target, "--prompts", world.prompts]
    assert run(monkeypatch, *words, "--max-new-tokens", 16) == 0
    path = world.recipe("flow", steps=4, samples=str(tmp_path / "s"))
    assert run(monkeypatch, "train", path) == 0
    best = world.folder("flow") / "best"
    words = ["eval", best, "--prompts", world.prompts, "--limit", 3, "--max-new-tokens", 12]
    assert run(monkeypatch, *words) == 0


def test_samples_begun_with_other_settings(door: Door, world: World, samples: Path) -> None:
    words = ["sample", samples, "--target", world.target, "--prompts", world.prompts]
    for change in (["--temperature", "0"], ["--max-new-tokens", "25"], ["--seed", "1"]):
        line = door.refusal(*words, "--max-new-tokens", "24", *change)
        assert str(samples) in line and change[0].strip("-").replace("-", "_") in line


def test_texts_continued_by_a_base_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """No chat template: the first tokens of each text are its prompt. Then shown, in colour."""
    bare = training.save_target(tmp_path / "bare", template=False)
    (tmp_path / "texts.txt").write_text("a b c d e f\n\ng h\n")
    words = ["sample", tmp_path / "s", "--target", bare, "--prompts", tmp_path / "texts.txt"]
    assert run(monkeypatch, *words, "--continue", 3, "--max-new-tokens", 5) == 0
    told = capsys.readouterr()
    assert "texts.txt: column text, 2 of 2 rows" in told.err and "2 answers" in told.out
    target = Target.load(str(bare))
    samples = Samples.open(tmp_path / "s", target)
    assert [s.ids[: s.made.index(True)] for s in samples] == [[2, 3, 4], [8, 9]]
    assert run(monkeypatch, "sample", tmp_path / "s", "--show") == 0
    shown = capsys.readouterr().out
    assert "green is learned from" in shown and "a b c" in shown
    assert run(monkeypatch, "sample", tmp_path / "s", "--show", "--column", "text") == 2
    assert "leave --column out" in capsys.readouterr().err
    tokens, learned = sum(len(s.ids) for s in samples), sum(sum(s.made) for s in samples)
    (last,) = [line for line in shown.splitlines() if line.startswith("│ all")]
    assert [int(word) for word in last.split() if word.isdigit()] == [2, 2, tokens, learned]


def test_a_file_is_shown_as_it_would_be_asked(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Decoder, "generate", never)
    assert run(monkeypatch, "sample", world.prompts, "--show", "--target", world.target) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "column" in shown and "end by a question" in shown
