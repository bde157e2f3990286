"""draftsmith serve-check from the front door, against a fake server that our decoder feeds.

.venv/bin/pytest tests/recipes/test_serve_check.py
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from draftsmith.drafters import base, storage
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.target.target import Target
from draftsmith.eval.servers.serving import KINDS
from draftsmith.recipes import cli
from draftsmith.recipes.export import Export, export_checkpoint
from fake_server import Decoding
from training import save_target, write_prompts


@dataclass
class Place:
    """A tiny target and drafter on disk, and its export for vLLM, as `draftsmith export` made it.

    drafter: all layers of the target, always right; other: one layer less.
    """

    root: Path
    export: Path
    prompts: Path
    drafter: Drafter
    other: Drafter
    whole: dict[str, Any]

    def card(self, **parts: dict[str, Any]) -> None:
        (self.export / "card.json").write_text(json.dumps(self.whole | parts))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("serve-check")
    folder = save_target(root / "target")
    target = Target.load(str(folder))
    target.hf.generation_config.eos_token_id = target.config.eos_token_id = None
    small = base.family("small")
    drafter, other = (
        small.create(target, small.Config(layers=layers)).eval()
        for layers in ([0, 1, 2, 3], [0, 1, 3])
    )
    for name, one in (("checkpoint", drafter), ("other", other)):
        (root / name).mkdir()
        storage.save(one, root / name)
    export, _ = export_checkpoint(Export(root / "checkpoint", "vllm", root / "export", k=3))
    card = json.loads((export / "card.json").read_text())
    return Place(root, export, write_prompts(root / "prompts.jsonl", 6), drafter, other, card)


@pytest.fixture
def place(made: Place) -> Place:
    made.card()
    return made


def check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: Any
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `draftsmith serve-check WORDS`."""
    monkeypatch.setattr(sys, "argv", ["draftsmith", "serve-check", *map(str, words)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0), *capsys.readouterr()


def words(place: Place, url: str, *more: Any) -> list[Any]:
    """A check of a running server, its report in report.json."""
    out = [place.export, "--server", url, "--prompts", place.prompts, "--limit", 4]
    return [*out, "--max-new-tokens", 14, "--output", place.root / "report.json", *more]


def test_a_check_agrees_and_another_drafter_does_not(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, report = Decoding(place.drafter), place.root / "report.json"
    with fake.listening() as url:
        code, out, _ = check(monkeypatch, capsys, *words(place, url))
        assert code == 0 and "served by vllm 0.32.0, k=3, 4 prompts of 14 tokens each" in out
        assert "T=1 rounds, greedy" in out
        found = json.loads(report.read_text())
        assert found["holds"] and found["server"]["command"] is None
        assert found["server"]["version"] == "0.32.0" and found["server"]["patched"] is None
        for entry in found["temperatures"]:
            assert entry["holds"] and entry["texts"] is None and entry["drafts"] == "greedy"
            assert entry["counted"]["drafts"] == entry["expected"]["drafts"] > 0
            assert entry["counted"]["tokens"] == 4 * 14
        entry = found["temperatures"][0]
        # 13 tokens after prefill's: three full rounds, and one cut after its first draft
        assert entry["counted"]["accepted"] == [16, 16, 16] and entry["counted"]["drafts"] == 16
        assert entry["cut_accepted"] == [0, 4, 4] and entry["expected"]["accepted"] == [16, 12, 12]
        assert entry["cut"] == 4 and entry["tried"] == [16, 16, 16]
        fake.drafter = place.other
        code, out, err = check(monkeypatch, capsys, *words(place, url))
    assert code == 1 and "NO" in out and err.count("error:") == 1
    assert "was it started with --dtype float32 --max-num-seqs 1 --enforce-eager" in err
    assert not json.loads(report.read_text())["holds"]


def test_drawn_drafts_are_told_from_greedy_ones(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that draws them agrees as such alone, and one that does not is told what it does."""
    fake, report = Decoding(place.other, sampled=True), place.root / "report.json"
    of = ["--checkpoint", place.root / "other", "--limit", 5, "--max-new-tokens", 16]
    place.card(serving={"k": 3, "drafts": "sampled"})  # as the export's command has it
    with fake.listening() as url:
        code, out, err = check(monkeypatch, capsys, *words(place, url, *of))
        assert code == 0 and "T=1 rounds, sampled" in out, err
        cold, hot = json.loads(report.read_text())["temperatures"]
        assert (cold["drafts"], hot["drafts"]) == ("greedy", "sampled")
        assert hot["z"][0] is not None and hot["tau"] > 1
        code, out, err = check(monkeypatch, capsys, *words(place, url, *of, "--drafts", "greedy"))
        assert code == 1 and "does it draft as --drafts greedy says?" in err
        fake.sampled = False
        code, out, err = check(monkeypatch, capsys, *words(place, url, *of))
        assert code == 1 and 'lacks "draft_sample_method": "probabilistic"' in err


def test_help_names_the_flags_of_an_exact_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = check(monkeypatch, capsys, "--help")
    said = " ".join(out.split())
    for kind in KINDS.values():
        assert kind.exact in said, kind.name


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--server", "tgi"], "--server: no 'tgi'; give vllm, llama.cpp or a URL"),
        (["--server", "vllm"], "run `make servers`"),
        (["--server", "vllm", "--drafts", "drawn"], "--drafts: no 'drawn'; give greedy or sampled"),
        (["--server", "http://127.0.0.1:9"], "start it, or check the URL"),
        (["--server", "vllm", "--output", "/no/such/x.json"], "no folder /no/such"),
        (["--server", "http://127.0.0.1:9", "--max-new-tokens", "600"], "512 positions"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str],
    says: str,
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DRAFTSMITH_SERVERS", str(tmp_path))
    words = [str(place.export), *words, "--prompts", str(place.prompts)]
    code, out, err = check(monkeypatch, capsys, *words)
    assert (code, out) == (2, "") and says in err, err
    assert [line for line in err.splitlines() if "error:" in line] == [err.splitlines()[-1]]


def test_bad_cards_and_other_exports_are_told(
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused(*words: Any) -> str:
        code, _, err = check(monkeypatch, capsys, *words)
        assert code == 2
        return err

    for name in ("vllm/.installed", "vllm/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setenv("DRAFTSMITH_SERVERS", str(tmp_path))
    monkeypatch.setattr(Target, "load", lambda *_, **__: pytest.fail("a target was loaded"))
    assert "no card.json there" in refused(tmp_path, "--server", "vllm")
    old = {"format": "gguf", "name": "llama.cpp"}  # as cards of old name both
    for server in ({"name": "llama.cpp"}, old):
        place.card(server=server)
        assert "made for llama.cpp; export the checkpoint --to vllm" in refused(
            place.export, "--server", "vllm"
        )
    for server in (place.whole["server"], {"format": "vllm", "name": "vLLM"}):
        place.card(server=server)
        with pytest.raises(pytest.fail.Exception, match="a target was loaded"):
            refused(place.export, "--server", "vllm")  # a right card is let through
    place.card(server={"version": "1"})
    assert "has no server.name; export" in refused(place.export, "--server", "vllm")
    place.card()
    place.card(serving={"k": 129})
    assert "--k: vllm 0.32.0 drafts at most 128" in refused(place.export, "--server", "vllm")
    place.card(serving={})
    assert "has no serving.k; export" in refused(place.export, "--server", "vllm")
    (place.export / "card.json").write_text("{")
    assert "not valid JSON" in refused(place.export, "--server", "vllm")
