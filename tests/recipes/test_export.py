"""draftsmith export: what it leaves behind, its card, its mistakes; and generate() with its folder.

.venv/bin/pytest tests/recipes/test_export.py
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tiny
import training
from draftsmith.drafters import base, foreign, storage
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import layouts
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.recipes import cli, export, read_back
from draftsmith.recipes.export import Export, export_checkpoint
from exports import target_gguf

REPLAY = {
    "kind": "replay", "step": 4, "tokens": 900, "k": 2, "tau": 1.6, "tau_ci": [1.5, 1.7],
    "alpha": [0.4, None], "tau_by_k": {"1": 1.4, "2": 1.6}, "tau_greedy_by_k": {"1": 1.3, "2": 1.5},
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and runs/NAME/checkpoint-4 of two families as training leaves them."""
    root = tmp_path_factory.mktemp("export")
    target = Target.load(str(training.save_target(root / "target")))
    families = {"eagle": {"taps": [1, 2, 3], "draft_vocab": 32}, "small": {"layers": [0, 3]}}
    for name, settings in families.items():
        cls = base.family(name)
        made = cls.create(target, cls.Config(**settings), torch.arange(tiny.VOCAB))
        place = root / "runs" / name / "checkpoint-4"
        place.mkdir(parents=True)
        storage.save(made, place)
        (place.parent / "best").symlink_to("checkpoint-4")
        recipe = {"name": name, "k": 2, "temperature": 0.7, "top_k": 0, "top_p": 1.0}
        (place.parent / "recipe.yaml").write_text(yaml.safe_dump(recipe))
        (place.parent / "metrics.jsonl").write_text(json.dumps(REPLAY) + "\n")
    target_gguf(target, root / "target.gguf")
    return root


def run(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, *words: object) -> tuple:
    """(exit code, stdout, stderr) of `draftsmith export ..`."""
    monkeypatch.setattr("sys.argv", ["draftsmith", "export", *map(str, words)])
    code = 0
    try:
        cli.main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    return (code, *capsys.readouterr())


def test_export_leaves_a_folder_with_a_card(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Faults: figures of another checkpoint, a default k instead of the run's, no command."""
    monkeypatch.chdir(tmp_path)
    best = root / "runs" / "eagle" / "best"
    code, out, err = run(capsys, monkeypatch, best, "--to", "vllm")
    folder = Path("exports/eagle-vllm")
    assert code == 0, err
    assert "written and read back: exports/eagle-vllm" in out and '"method": "eagle3"' in out
    files = {"config.json", "model.safetensors", "card.json", "README.md"}
    assert {p.name for p in folder.iterdir()} == files
    assert [p.name for p in folder.parent.iterdir()] == ["eagle-vllm"]
    about = json.loads((folder / "card.json").read_text())
    assert about["server"] == {"name": "vllm", "version": "0.32.0"}
    assert about["target"]["spec"] == str(root / "target")
    assert about["sampler"] == {"temperature": 0.7, "top_k": 0, "top_p": 1.0}
    assert about["measured"]["tau_by_k"] == {"1": 1.4, "2": 1.6}
    assert about["measured"]["tokens_trained"] == 900 and "speedup" not in about["measured"]
    assert (about["serving"]["k"], about["serving"]["max_positions"]) == (2, 512)
    assert about["serving"]["command"] in out
    assert about["verified"]["read_back"]["difference"] < 1e-4
    page = (folder / "README.md").read_text()
    for words in (
        "drawn from q (replay, held-out prompts) | 1.400 at k = 1, 1.600 at k = 2 |",
        "point mass (q's argmax) | 1.300 at k = 1, 1.500 at k = 2 |",
        "At temperature 0.7 the command below yields the first tau: by it vllm 0.32.0 draws",
        "| predicted speedup | not measured |", "--speculative-config",
        about["target"]["tokenizer_hash"], "Served: not by this command",
    ):  # fmt: skip
        assert words in page, words
    report = {"best": 4, "speed": {"T=0": {"best_k": 3, "predicted_speedup": 1.25, "verdict": ""}}}
    (best.parent / "report").mkdir()
    (best.parent / "report" / "report.json").write_text(json.dumps(report))
    code, out, err = run(
        capsys, monkeypatch, best, "--to", "sglang", "--output", tmp_path / "s", "--k", "3",
        "--length", "64", "--dtype", "bfloat16",
    )  # fmt: skip
    assert code == 0, err
    page = (tmp_path / "s" / "README.md").read_text()
    assert "1.25x at k = 3 (T=0)" in page and "layout checked against its source, not run" in page
    assert "yields the second tau: by it sglang 0.5.23 drafts greedily" in page  # 32 of 48 tokens
    assert load_file(tmp_path / "s" / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    assert foreign.made_for(tmp_path / "s") == str(root / "target")
    with pytest.raises(UserError, match="made for another tokenizer"):
        foreign.load(tmp_path / "s", tiny.target("Llama", vocab=40))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["runs/eagle", "--to", "vllm"], "is a run; give one of its checkpoints"),
        (["runs/none", "--to", "vllm"], "no drafter there"),
        (["half", "--to", "vllm"], "half: is no finished checkpoint"),
        (["runs/eagle/best", "--to", "ollama"], "--to: no server 'ollama'; known are vllm"),
        (
            ["runs/eagle/best", "--to", "gguf"],
            "no server 'gguf'; known are vllm, sglang, tensorrt-llm, llama.cpp",
        ),
        (["runs/eagle/best", "--to", "transformers"], "transformers 5.24 loads no eagle drafter"),
        (["runs/eagle/best", "--to", "vllm", "--k", "200"], "vllm 0.32.0 drafts at most 128"),
        (["runs/eagle/best", "--to", "vllm", "--output", "there"], "is there already"),
        (["runs/eagle/best", "--to", "vllm", "--dtype", "int4"], "--dtype: no 'int4'"),
        (["runs/small/best", "--to", "vllm", "--plain"], "--plain: is a layout of EAGLE-3"),
        (["runs/eagle/best", "--to", "vllm", "--length", "9999"], "--length: 9999 is not in"),
        (["runs/eagle/best", "--to", "llama.cpp"], "--target-gguf: llama.cpp reads the tokenizer"),
        (["runs/eagle/best", "--to", "vllm", "--target", "other"], "made for another tokenizer"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str],
    line: str,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(root)
    if not Path("half").exists():
        Path("there").mkdir()
        Path("half").mkdir()
        Path("half/config.json").write_text(Path("runs/eagle/best/config.json").read_text())
        training.save_target(Path("other"), vocab=40)
    code, out, err = run(capsys, monkeypatch, *words)
    assert code == 2 and line in err and err.count("\n") == 1 and not out
    assert not Path("exports").exists() and not list(root.glob(".*writing"))


def test_what_is_read_back_wrong_is_not_left(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults: a writer that loses a norm; a check that is satisfied by anything."""
    right = storage.write

    def wrong(folder: Path, config: dict, tensors: dict) -> None:
        right(folder, config, tensors | {"norm.weight": torch.ones(32)})

    made = storage.load(root / "runs/eagle/best", Target.load(str(root / "target")))
    with torch.no_grad():
        made.norm.weight.mul_(1.5)  # type: ignore[union-attr, operator]
    place = tmp_path / "checkpoint"
    place.mkdir()
    storage.save(made, place)
    monkeypatch.setattr(storage, "write", wrong)
    with pytest.raises(UserError, match="read back differ by"):
        export_checkpoint(Export(place, "vllm", tmp_path / "out"))
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_read_back_goes_past_every_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a file that lost its window, which shows from position 100 on alone."""
    hf = tiny.hf_model("Mistral", sliding_window=100)
    hf.save_pretrained(tmp_path / "target")
    tiny.tokenizer().save_pretrained(tmp_path / "target")
    target, cls = Target.load(str(tmp_path / "target")), base.family("small")
    made = cls.create(target, cls.Config(layers=[0, 3]))
    assert read_back.text_length(made, 512) == 164 and read_back.text_length(made, 130) == 130
    assert read_back.text_length(made, 100) == 64
    (tmp_path / "checkpoint").mkdir()
    storage.save(made, tmp_path / "checkpoint")
    asked = Export(tmp_path / "checkpoint", "transformers", tmp_path / "out")
    right = layouts.plain_copy

    def windowless(*args: Any) -> Any:
        out = right(*args)
        out.config.sliding_window = None
        return out

    monkeypatch.setattr(layouts, "plain_copy", windowless)
    with pytest.raises(UserError, match="read back differ by"):
        export_checkpoint(asked)
    monkeypatch.undo()
    export_checkpoint(asked)
    about = json.loads((tmp_path / "out" / "card.json").read_text())
    assert about["verified"]["read_back"]["difference"] < 1e-4


def test_a_killed_export_leaves_no_folder(root: Path, tmp_path: Path) -> None:
    """Fault: files written in place, so that a server could be given half of them."""
    asked = Export(root / "runs/eagle/best", "vllm", tmp_path / "out")
    child = training.fork_export(asked)
    scratch = tmp_path / ".out.writing"
    deadline = time.monotonic() + 120
    while not (scratch / "model.safetensors").is_file() and time.monotonic() < deadline:
        time.sleep(0.01)
    child.kill()
    child.join()
    assert scratch.is_dir() and not (tmp_path / "out").exists()
    export_checkpoint(asked)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_gguf_takes_the_target_that_is_served(root: Path, tmp_path: Path) -> None:
    asked = Export(
        root / "runs/eagle/best", "llama.cpp", tmp_path / "out", target_gguf=root / "target.gguf"
    )
    folder, said = export_checkpoint(asked)
    assert {p.name for p in folder.iterdir()} == {"draft.gguf", "card.json", "README.md"}
    assert f"-m {root / 'target.gguf'}" in said and "--spec-type draft-eagle3" in said
    target = Target.load(str(root / "target"))
    assert foreign.load(folder / "draft.gguf", target).family == "eagle"
    with pytest.raises(UserError, match="another tokenizer|has 40 tokens"):
        other = target_gguf(tiny.target("Llama", vocab=40), tmp_path / "other.gguf")
        export_checkpoint(Export(asked.checkpoint, "llama.cpp", tmp_path / "no", target_gguf=other))


@torch.no_grad()
def accepted_by(assistant: Any, text: list[int], prompt: int) -> list[int]:
    """Drafts of 3 that each round on a text accepts, the assistant reading all of it every time."""
    out, at = [], prompt + 1
    while at < len(text):
        drafts: list[int] = []
        for _ in range(3):
            read = torch.tensor([text[:at] + drafts])
            drafts.append(int(assistant(read, use_cache=False).logits[0, -1].argmax()))
        right = [d == t for d, t in zip(drafts, text[at:], strict=False)]
        out.append([*right, False].index(False))
        at += out[-1] + 1
    return out


def test_generate_accepts_what_our_decoder_accepts(root: Path, tmp_path: Path) -> None:
    """The transformers export as assistant: as many target passes, token for token.

    A round of generate() starts at the prompt's end, ours after prefill's token: that token is part
    of its prompt. In one of these six texts generate() drafts, from its cache, a token that is not
    its assistant's own argmax, so that our rounds are held to the assistant read anew each time.
    Fault: a head or layer that transformers does not read.
    """
    target = Target.load(str(root / "target"))
    place, asked = tmp_path / "checkpoint", 24
    torch.manual_seed(3)
    cls = base.family("small")
    made = cls.create(target, cls.Config(layers=[0, 1, 3], embeddings="own")).eval()
    place.mkdir()
    storage.save(made, place)
    folder, said = export_checkpoint(Export(place, "transformers", tmp_path / "out", k=3))
    assert "num_assistant_tokens = 3" in said
    hf = AutoModelForCausalLM.from_pretrained(root / "target", dtype=torch.float32)
    assistant = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    told = assistant.generation_config
    told.num_assistant_tokens, told.num_assistant_tokens_schedule = 3, "constant"
    told.assistant_confidence_threshold = 0
    passes: list[int] = []
    hook = hf.register_forward_hook(lambda *args: passes.append(1))
    accepted, equal = 0, []
    for ids in tiny.prompts(6, 5):
        text = Decoder(target, made, Policy(3)).generate([ids], Sampler(0.0), asked)[0]
        start = torch.tensor([ids + text.tokens[:1]])
        passes.clear()
        out = hf.generate(
            start, attention_mask=torch.ones_like(start), assistant_model=assistant,
            do_sample=False, max_new_tokens=len(text.tokens) - 1, eos_token_id=tiny.EOS,
        )  # fmt: skip
        assert out[0].tolist() == ids + text.tokens
        assert [r.accepted for r in text.rounds] == accepted_by(
            assistant, out[0].tolist(), len(ids)
        )
        equal.append(len(passes) == len(text.rounds))
        accepted += sum(r.accepted for r in text.rounds)
    hook.remove()
    assert accepted > 6, "nothing is accepted, so nothing was compared"
    assert sum(equal) >= 5


def test_card_of_an_unmeasured_drafter() -> None:
    """Fault: a figure made up where there is none."""
    assert export._measured(Path("nowhere"), "checkpoint-x") == {}
    assert "not measured" in export._figures({}, 1.0)
    reported = {"speedup": {"T=0": {"best_k": 2, "predicted_speedup": 1.5}}}  # its log is gone
    page = export._figures(reported, 1.0)
    assert "| tokens trained | not known |" in page and "1.50x at k = 2" in page


def test_a_checkpoint_that_is_cut_short(root: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((root / "runs/eagle/best" / name).read_bytes())
    whole = load_file(tmp_path / "model.safetensors")
    save_file(
        {n: t for n, t in whole.items() if n != "norm.weight"}, tmp_path / "model.safetensors"
    )
    with pytest.raises(UserError, match="tensor norm.weight is missing"):
        export_checkpoint(Export(tmp_path, "vllm", tmp_path / "out"))


def test_a_card_shows_one_tau_where_both_are_one() -> None:
    """At T=0; and says where a run from before did not measure the second."""
    about = {"sampler": {"temperature": 0.0}, "measured": REPLAY, "server": {}, "serving": {}}
    assert export._drafts(about) == ""
    measured = REPLAY | {"tokens_trained": 900}
    assert export._figures(measured, 0.0).count("tau") == 1
    del measured["tau_greedy_by_k"]
    assert "(q's argmax) | not measured |" in export._figures(measured, 1.0)
