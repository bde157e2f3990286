"""The front door: every mistake of a user is one line and exit code 2, before compute is spent.

    .venv/bin/pytest tests/recipes/test_cli.py

Commands run through `recipes.cli.main`, as the installed script does, but in this process.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tiny
import training
from draftsmith.drafters import base, storage
from draftsmith.drafters.target.target import Target
from draftsmith.recipes import cli
from draftsmith.recipes import evaluate as evaluate_recipe
from front_door import FAULTS, Door, damage, never, run
from training import World

COMMANDS = (
    *("quickstart", "plan", "sample", "self-prompt", "train", "keys", "eval", "report"),
    *("compare", "certify", "bench", "export", "serve-check"),
)
ASKING = ("sample", "train", "eval")  # take prompts and a target in the same ways
KEYS = {  # what programs that read a report rely on
    "target": {"spec", "revision", "tokenizer_hash", "vocab_size"},
    "drafter": {"family", "parameters"},
    "sampler": {"temperature", "top_k", "top_p"},
    "replay": {"tau", "tau_ci", "alpha", "tau_by_k"},
    "decode": {"tau", "alpha", "tokens", "passes", "tokens_per_s", "baseline_tokens_per_s"}
    | {"speedup", "draft_ms", "verify_ms", "host_ms"},
    "parity": {"passes", "expected", "z", "z_per_depth", "equal"},
}
PLAIN_KEYS = ("k", "prompts", "predicted_speedup", "versions", "command", "commit", "seed")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"), with_samples=False)


@pytest.fixture(scope="module")
def saved(world: World) -> dict[str, Path]:
    """Untrained drafters for the world's target, by family."""
    target, out = Target.load(str(world.target)), {}
    for name, settings in training.DRAFTERS.items():
        torch.manual_seed(0)
        cls = base.family(name)
        own = {key: value for key, value in settings.items() if key in cls.Config.model_fields}
        drafter = cls.create(target, cls.Config(**own), torch.arange(tiny.VOCAB))
        out[name] = world.root / f"drafter-{name}"
        out[name].mkdir()
        storage.save(drafter, out[name])
    return out


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Door:
    return Door(monkeypatch, capsys)


# ---------------------------------------------------------------- help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, command, "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Example: draftsmith {command} " in text


def test_help_lists_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)


def imported_by_help(module: str, *commands: str, before: str = "") -> bool:
    """Whether a module is imported once --help has been shown, in a process of its own."""
    code = [
        f"import sys{before}",
        "from draftsmith.recipes.cli import main",
        f"for words in {[['--help'], *([name, '--help'] for name in commands)]}:",
        "    sys.argv = ['draftsmith', *words]",
        "    try: main()",
        "    except SystemExit as stop: assert not stop.code",
        f"sys.exit(7 * ({module!r} in sys.modules))",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(code)], capture_output=True)
    assert done.returncode in (0, 7), done.stderr
    return done.returncode == 7


def test_help_does_not_wait_for_torch() -> None:
    """The list of commands is there at once: what a command imports waits until it is named."""
    assert not imported_by_help("torch")
    assert imported_by_help("torch", before=", torch"), "planted"


def test_a_commands_help_does_not_wait_for_models() -> None:
    """It waits 2 s for torch, and not as long again for what transformers' models import."""
    models = "transformers.modeling_utils"
    assert not imported_by_help(models, *COMMANDS)
    assert imported_by_help(models, before=f", {models}"), "planted"


def test_the_list_says_what_a_commands_own_help_says() -> None:
    assert set(cli.COMMANDS) == set(COMMANDS)
    for name, line in cli.COMMANDS.items():
        assert cli.load(name).help.splitlines()[0] == line


def test_usage_errors_are_one_line(door: Door) -> None:
    assert "--temprature" in door.early("eval", "ngram", "--temprature", "1")
    assert "--k" in door.early("eval", "ngram", "--k", "four")
    assert "evaluate" in door.early("evaluate", "ngram")
    assert "checkpoint" in door.early("eval").lower()


# ---------------------------------------------------------------- eval


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--k", "0"], "k: 0"),
        (["--k", "-3"], "k: -3"),
        (["--temperature", "-0.5"], "temperature: -0.5"),
        (["--temperature", "nan"], "temperature: nan"),
        (["--top-k", "-1"], "top_k: -1"),
        (["--top-p", "0"], "top_p: 0"),
        (["--confidence", "0"], "confidence: 0"),
        (["--tree", "8", "--confidence", "0.5"], "--confidence: cuts chains"),
        (["--max-new-tokens", "0"], "--max-new-tokens: 0"),
        (["--prompts", "no-such-file.jsonl"], "no-such-file.jsonl"),
    ],
)
def test_eval_settings(door: Door, words: list[str], named: str) -> None:
    assert named in door.early("eval", "ngram", *words)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "no rows"),
        ("\n\n", "no rows"),
        ("[]", "no rows"),
        ("what is this", "not JSON"),
        ('{"prompt": "\\ud83d"}', "half a character"),
        ('["a"]', "object"),
        ('{"label": 1, "n": 2}', "no text"),
        ('{"prompt": ""}', "no text"),
        ('{"prompt": 3}', "no text"),
        ('{"messages": []}', "messages"),
        ('{"prompt_ids": ["a"]}', "prompt_ids"),
    ],
)
@pytest.mark.parametrize("command", ASKING)
def test_prompts_files(
    door: Door, world: World, tmp_path: Path, command: str, content: str, named: str
) -> None:
    """Of every command that takes one; a training run tells before it samples, not after."""
    path = tmp_path / "mine.jsonl"
    path.write_text(content)
    words: list[Any] = {
        "sample": ["sample", tmp_path / "out", "--prompts", path],
        "train": ["train", world.recipe("asking", samples=None), f"prompts={path}"],
        "eval": ["eval", "ngram", "--prompts", path],
    }[command]
    line = door.early(*words)
    assert str(path) in line and named in line
    assert not (tmp_path / "out").exists() and not world.folder("asking").exists()


@pytest.mark.parametrize("command", ASKING)
def test_no_such_model(door: Door, world: World, tmp_path: Path, command: str) -> None:
    missing = tmp_path / "no" / "model"
    words: list[Any] = {
        "sample": ["sample", tmp_path / "out", "--target", missing],
        "train": ["train", world.recipe("lost", samples=None), f"target={missing}"],
        "eval": ["eval", "ngram", "--target", missing],
    }[command]
    assert str(missing) in door.refusal(*words)


@pytest.mark.parametrize("command", ["sample", "train"])
def test_a_tokenizer_without_a_chat_template(
    door: Door, world: World, tmp_path: Path, command: str
) -> None:
    bare = training.save_target(tmp_path / "bare", template=False)
    words: list[Any] = {
        "sample": ["sample", tmp_path / "out", "--target", bare, "--prompts", world.prompts],
        "train": [
            "train",
            world.recipe("bare", samples=None, target=str(bare), prompts=str(world.prompts)),
        ],
    }[command]
    line = door.refusal(*words)
    assert str(bare) in line and "chat template" in line


def test_a_target_without_a_chat_template_can_take_ids(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The remedy that the refusal names."""
    bare = training.save_target(tmp_path / "bare", template=False)
    path = tmp_path / "ids.jsonl"
    path.write_text('{"prompt_ids": [3, 4, 5]}\n')
    words = ["eval", "ngram", "--target", bare, "--max-new-tokens", "6", "--prompts"]
    assert run(monkeypatch, *words, path) == 0
    assert run(monkeypatch, *words, world.prompts) == 0, "words are continued as plain text"


def test_no_checkpoint_there(door: Door, tmp_path: Path) -> None:
    assert str(tmp_path / "none") in door.early("eval", tmp_path / "none")
    (tmp_path / "config.json").write_text("{")
    assert "config.json" in door.early("eval", tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    assert "config.json" in door.early("eval", tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    assert f"{tmp_path}: no format that is known here (BertModel)" in door.early("eval", tmp_path)


def damaged(folder: Path, of: Path, fault: str) -> Path:
    """A copy of a drafter with a damaged weights file: the file."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes((of / "config.json").read_bytes())
    path = folder / "model.safetensors"
    damage(of / "model.safetensors", path, fault)
    return path


@pytest.mark.parametrize("fault", FAULTS)
def test_damaged_weights(
    door: Door, saved: dict[str, Path], world: World, tmp_path: Path, fault: str
) -> None:
    """A tensor that is silently left at its random start would serve, and accept nothing."""
    path = damaged(tmp_path / "copy", saved["eagle"], fault)
    line = door.refusal("eval", path.parent, "--prompts", world.prompts)
    assert str(path) in line and "copy the checkpoint again" in line


@pytest.mark.parametrize("family", ["eagle", "small"])
def test_a_drafter_for_another_target(
    door: Door, saved: dict[str, Path], world: World, tmp_path: Path, family: str
) -> None:
    """Another tokenizer of the same size, another hidden size, another depth."""
    tokenizer = training.save_target(tmp_path / "tokenizer")
    words = tiny.tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["w30"]})
    words.save_pretrained(tokenizer)
    wide = tmp_path / "wide"
    config = transformers.LlamaConfig.from_pretrained(world.target)
    config.hidden_size, config.num_attention_heads = 40, 5
    config.num_key_value_heads = 5
    transformers.LlamaForCausalLM(config).save_pretrained(wide)
    tiny.tokenizer().save_pretrained(wide)
    deep = training.save_target(tmp_path / "deep", layers=5)
    for other, word in ((tokenizer, "tokenizer"), (wide, "hidden size"), (deep, "layers")):
        line = door.refusal("eval", saved[family], "--target", other, "--prompts", world.prompts)
        assert str(saved[family]) in line and word in line and str(world.target) in line


@pytest.mark.parametrize("below", ["file", "file/deeper"])
def test_an_output_folder_that_cannot_be_made(
    door: Door, world: World, tmp_path: Path, below: str
) -> None:
    """A path under a regular file: even root cannot write there."""
    (tmp_path / "file").write_text("")
    out = tmp_path / below
    assert str(out) in door.early("eval", "ngram", "--target", world.target, "--output", out)
    assert str(out) in door.early("sample", out, "--target", world.target)
    path = world.recipe("nowhere", samples=None, runs=str(out))
    assert str(out / "nowhere") in door.early("train", path)
    (tmp_path / "taken").write_text("")
    path = world.recipe("taken", samples=None, runs=str(tmp_path))
    assert str(tmp_path / "taken") in door.early("train", path)


def test_an_output_folder_of_something_else(door: Door, world: World, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    out = tmp_path / "mine"
    assert str(out) in door.early("eval", "ngram", "--target", world.target, "--output", out)
    assert str(out) in door.early("sample", out, "--target", world.target)
    path = world.recipe("mine", samples=None, runs=str(tmp_path))
    assert str(out) in door.early("train", path)
    assert [p.name for p in out.iterdir() if p.name != ".lock"] == ["thesis.tex"]


def test_an_output_of_the_wrong_kind(door: Door, world: World, tmp_path: Path) -> None:
    """A folder where a file is written, a file where a folder is made: known before the work."""
    for words in (["certify", world.target], ["serve-check", tmp_path, "--server", "vllm"]):
        assert "is a folder; name a file" in door.early(*words, "--output", tmp_path)
    (tmp_path / "file").write_text("")
    line = door.early("compare", "ngram", "--output", tmp_path / "file")
    assert str(tmp_path / "file") in line and "--output" in line


def test_a_report_that_was_killed_while_written(tmp_path: Path) -> None:
    """Its scratch is no other run's report, and does not keep the folder taken."""
    (tmp_path / ".report.json").write_text('{"set')
    evaluate_recipe._claim(tmp_path, {})


def test_a_drafter_that_names_no_target(door: Door, world: World) -> None:
    """Not measured on smollm2, whatever it was made for."""
    line = door.early("eval", world.target)  # a causal LM is a drafter too
    assert str(world.target) in line and "give --target" in line


def test_a_precision_that_is_not_done(door: Door, world: World) -> None:
    door.monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")  # as accelerate launch does
    assert "--mixed_precision fp16" in door.early("train", world.recipe("half", samples=None))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("family", ["ngram", "eagle", "small"])
def test_eval_end_to_end(
    world: World,
    saved: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    family: str,
    temperature: float,
) -> None:
    """All promised keys with plausible values, parity, and another report is not written over."""
    words = ["eval", saved.get(family, "ngram"), "--target", world.target, "--prompts"]
    words += [world.prompts, "--limit", 4, "--k", 3, "--max-new-tokens", 16]
    words += ["--temperature", temperature, "--output", tmp_path / "out", "--seed", 5]
    assert run(monkeypatch, *words) == 0
    shown = capsys.readouterr().out
    path = tmp_path / "out" / "report.json"
    report = json.loads(path.read_text(), parse_constant=_no_constant)
    for key, parts in KEYS.items():
        assert parts <= report[key].keys(), parts - report[key].keys()
    assert all(key in report for key in PLAIN_KEYS)
    replay, decode, parity = report["replay"], report["decode"], report["parity"]
    assert parity["holds"] and "parity holds" in shown
    assert (report["k"], report["prompts"], report["seed"]) == (3, 4, 5)
    assert report["drafter"]["family"] == family
    assert (report["drafter"]["parameters"] > 0) == (family != "ngram")
    assert report["sampler"]["temperature"] == temperature
    assert report["command"].startswith("draftsmith eval ")
    assert {"torch", "transformers"} <= report["versions"].keys()
    assert list(replay["tau_by_k"]) == ["1", "2", "3"] and replay["tau_by_k"]["3"] == replay["tau"]
    assert replay["tau_ci"][0] <= replay["tau"] <= replay["tau_ci"][1]
    assert len(replay["alpha"]) == len(decode["alpha"]) == len(parity["z_per_depth"]) == 3
    assert decode["passes"] == parity["passes"]
    assert decode["tau"] == pytest.approx(decode["tokens"] / decode["passes"])
    if temperature == 0 or family == "ngram":
        assert parity["equal"] and parity["z"] is None
        assert parity["passes"] == pytest.approx(parity["expected"])
        assert decode["tau"] == pytest.approx(replay["tau"])
    else:
        zs = [z for z in (parity["z"], *parity["z_per_depth"]) if z is not None]
        assert zs and all(abs(z) < 3.5 for z in zs)
    figures = ("tokens_per_s", "baseline_tokens_per_s", "speedup", "draft_ms", "verify_ms")
    assert all(decode[name] > 0 and math.isfinite(decode[name]) for name in figures)
    assert report["predicted_speedup"] > 0

    if family == "ngram":
        assert run(monkeypatch, *words) == 0, "the same command may write its report again"
    for change in (["--k", 2], ["--seed", 6], ["--stop", "w40"], ["--limit", 3]):
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(Target, "load", never)
            assert run(patch, *words, *change) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and str(tmp_path / "out") in line


def _no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


def test_eval_of_texts_without_a_verify_pass(
    world: World, saved: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One new token is prefill's: there is no tau, and the report is JSON all the same."""
    words = ["eval", saved["eagle"], "--prompts", world.prompts, "--max-new-tokens", "1"]
    assert run(monkeypatch, *words, "--output", tmp_path / "out") == 0
    text = (tmp_path / "out" / "report.json").read_text()
    report = json.loads(text, parse_constant=_no_constant)
    assert report["replay"]["tau"] is None and report["decode"]["tau"] is None


def test_eval_beyond_the_targets_positions(door: Door, world: World) -> None:
    """The tiny target has 512."""
    line = door.refusal(
        "eval", "ngram", "--target", world.target, "--prompts", world.prompts,
        "--max-new-tokens", "600",
    )  # fmt: skip
    assert "512" in line and "max" in line


def test_a_report_whose_parity_is_broken_exits_1(
    world: World,
    saved: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Planted fault: replay reads a feature of the neighbouring layer; the command says so."""
    from draftsmith.eval import evaluate

    read = evaluate.read_decoded

    def shifted(target: Target, drafter: Any, *rest: Any) -> Any:
        batches = read(target, drafter, *rest)
        for batch in batches:
            first, *others = [batch.features[str(tap)] for tap in drafter.taps]
            batch.features = dict(zip(map(str, drafter.taps), [*others, first], strict=True))
        return batches

    monkeypatch.setattr(evaluate, "read_decoded", shifted)
    words = [
        "eval",
        saved["eagle"],
        "--prompts",
        world.prompts,
        "--limit",
        "4",
        "--max-new-tokens",
        "16",
    ]
    assert run(monkeypatch, *words) == 1
    out, err = capsys.readouterr()
    assert "BROKEN" in out and "bug in draftsmith" in err


# ---------------------------------------------------------------- a real process


@pytest.mark.slow
def test_the_installed_command(tmp_path: Path) -> None:
    """No traceback, no warning of a library: stderr of the real command is the one line."""
    script = Path(sys.executable).with_name("draftsmith")
    done = training.shell([str(script), "eval", "ngram", "--k", "0"], tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: k: 0 is not a draft length; use 1 or more\n"
    assert os.listdir(tmp_path) == []
