"""Exports: read back equal, and equal to what the server's own rules make of the files.

    .venv/bin/pytest tests/drafters/export/test_export.py

Every (server, family) is written, read by `foreign` (which shares no code with the writers) and
computed in float64 from the files by reference_export.py. Planted faults turn both checks red.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import reference_export as rules
from draftsmith.drafters import export, foreign
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import Serving, layouts, llama_cpp
from draftsmith.drafters.vocab import VocabMap
from exports import EAGLE, TEXT, K, drafter, logits, plain, written


def check(server: str, made: Drafter, hf: Any, folder: Path, **more: Any) -> None:
    """Read back equal; and the server's rules give the same of the files."""
    place = written(server, made, folder, **more)
    ours, again = logits(made), logits(foreign.load(place, made.target))
    assert ours.keys() == again.keys()
    for where, row in ours.items():
        torch.testing.assert_close(again[where], row, atol=1e-4, rtol=0)
    for anchor, depth in ((0, 0), (4, 0), (4, 1), (3, 2)):
        row, ids = by_rules(server, made, place, hf, TEXT, anchor, depth)
        kept = ours[anchor, depth]
        assert kept.isfinite().nonzero().flatten().tolist() == sorted(ids.tolist())
        torch.testing.assert_close(kept[ids].double(), row, atol=2e-4, rtol=0)


def by_rules(server: str, made: Drafter, place: Path, *where: Any) -> tuple[Tensor, Tensor]:
    if made.family == "eagle1":
        return rules.eagle1(server, place, *where)
    if made.family in ("dflash", "dspark"):
        return rules.blocks(place, *where, K)
    if made.family == "peagle":
        return rules.peagle(place, *where)
    if made.family == "medusa":
        return rules.medusa(place, *where)
    if server == "llama.cpp":
        return (rules.llama_cpp if made.family == "eagle" else rules.small_llama)(place, *where)
    taps = None
    if server == "tensorrt-llm":  # as the command line that is printed says
        said = export.server(server).command(made, place, Serving("TARGET", K, 128))
        taps = list(ast.literal_eval(said[said.index("{") : said.index("}") + 1]))
    return rules.eagle3(server, place, taps, *where)


NEW = {"fc_norm": True, "norm_output": True}
BLOCKS = {"taps": [3, 1], "layers": 2, "mask_token": 6}
SCALED = {"family": "Cohere"}  # its logits, which servers' heads know nothing of
CASES: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("vllm", "eagle", EAGLE, {}),
    ("vllm", "eagle", EAGLE | NEW | {"norm_before_residual": True}, {"plain": True}),
    ("vllm", "eagle", {"taps": [4, 0, 5, 2, 3], "deep": 6, "norm_before_fc": True}, {}),
    ("vllm", "eagle", {"taps": [1, 2, 3], "head": "target", "draft_vocab": 20} | SCALED, {}),
    ("vllm", "eagle", EAGLE | {"family": "Gemma3"}, {}),
    ("vllm", "eagle1", {}, {}),
    ("vllm", "medusa", {"heads": 3, "layers": 2}, {}),
    ("vllm", "medusa", {"heads": 3, "head": "target"} | SCALED, {}),
    ("vllm", "dflash", BLOCKS | {"block_size": K + 1, "draft_vocab": 20}, {}),
    ("vllm", "dflash", BLOCKS | {"block_size": K + 1, "head": "own"} | SCALED, {}),
    ("vllm", "dspark", BLOCKS | {"block_size": K, "markov_rank": 5, "draft_vocab": 20}, {}),
    ("vllm", "peagle", {"taps": [3, 1, 2], "layers": 3, "draft_vocab": 20, "mask_token": 6}, {}),
    ("vllm", "peagle", {"taps": [1, 2], "norm_before_residual": True, "norm_before_fc": True}, {}),
    ("sglang", "eagle", EAGLE | NEW, {}),
    ("sglang", "eagle1", {"family": "Qwen3"}, {}),
    ("tensorrt-llm", "eagle", EAGLE | {"norm_before_fc": True, "norm_output": True}, {}),
    ("llama.cpp", "eagle", EAGLE | {"norm_before_residual": True, "norm_before_fc": True}, {}),
    ("llama.cpp", "eagle", {"taps": [0, 1, 2], "family": "Gemma3"}, {}),
    ("llama.cpp", "small", {"layers": [0, 3]}, {}),
]


@pytest.mark.parametrize(("server", "name", "config", "more"), CASES)
def test_written_files_mean_the_drafter(
    server: str, name: str, config: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    hf = plain(config.get("family", "Llama"), config.get("deep", 4))
    check(server, drafter(name, **config), hf, tmp_path, **more)


@pytest.mark.parametrize("server", ["vllm", "sglang", "tensorrt-llm", "transformers", "llama.cpp"])
def test_a_draft_model_is_an_ordinary_folder(server: str, tmp_path: Path) -> None:
    """Faults: a tied head written apart, our attention's name in the config."""
    for family, config in (("Llama", {}), ("Qwen3", {"embeddings": "own"})):
        made = drafter("small", family, layers=[0, 3], **config)
        (tmp_path / family).mkdir()
        place = written(server, made, tmp_path / family)
        assert server == "llama.cpp" or "draftsmith" not in (place / "config.json").read_text()
        ours, again = logits(made), logits(foreign.load(place, made.target))
        for where, row in ours.items():
            torch.testing.assert_close(again[where], row, atol=1e-4, rtol=0)
        if server != "transformers":
            continue
        hf = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float64)
        theirs = hf(torch.tensor([TEXT])).logits[0]
        for (anchor, depth), row in ours.items():
            expected = theirs[anchor + 1 + depth]
            torch.testing.assert_close(row.double(), expected, atol=2e-4, rtol=0)
        words = AutoTokenizer.from_pretrained(place)
        assert words.get_vocab() == made.target.tokenizer.get_vocab()


# Planted faults


def taps_off_by_one(patch: pytest.MonkeyPatch) -> None:
    right = layouts.layer_ids
    patch.setattr(layouts, "layer_ids", lambda made: [i + 1 for i in right(made)])


def ids_for_offsets(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(VocabMap, "offsets", lambda self: self.ids)


def swapped(first: str, second: str, patch: pytest.MonkeyPatch) -> None:
    right = layouts.eagle3_tensors

    def wrong(made: Any, layer: str) -> dict[str, Tensor]:
        out = right(made, layer)
        one, other = (f"{layer}.self_attn.{n}_proj.weight" for n in (first, second))
        return out | {one: out[other], other: out[one]}

    patch.setattr(layouts, "eagle3_tensors", wrong)


def rope_by_default(patch: pytest.MonkeyPatch) -> None:
    right = layouts.block_of
    patch.setattr(
        layouts, "block_of", lambda made: right(made).model_copy(update={"rope_theta": 1e4})
    )


def flag_flipped(patch: pytest.MonkeyPatch) -> None:
    right = layouts.eagle3_flags

    def wrong(made: Any) -> dict[str, Any]:
        out = right(made)
        return out | {"norm_before_residual": not out["norm_before_residual"]}

    patch.setattr(layouts, "eagle3_flags", wrong)


def columns_in_the_order_given(patch: pytest.MonkeyPatch) -> None:
    right = layouts.eagle3_tensors
    patch.setattr(
        layouts,
        "eagle3_tensors",
        lambda made, layer: right(made, layer) | {"fc.weight": made.fc.weight},
    )


def rows_not_interleaved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(llama_cpp, "_interleaved", lambda weight, head_dim: weight)


FAULTS: list[tuple[str, Callable[[pytest.MonkeyPatch], None]]] = [
    ("vllm", taps_off_by_one),
    ("sglang", taps_off_by_one),
    ("llama.cpp", taps_off_by_one),
    ("vllm", ids_for_offsets),
    ("vllm", lambda patch: swapped("q", "k", patch)),
    ("llama.cpp", lambda patch: swapped("k", "v", patch)),
    ("vllm", rope_by_default),
    ("llama.cpp", rope_by_default),
    ("vllm", flag_flipped),
    ("vllm", columns_in_the_order_given),
    ("llama.cpp", rows_not_interleaved),
]


@pytest.mark.parametrize(("server", "fault"), FAULTS)
def test_planted_faults(
    server: str,
    fault: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Red in both checks: what is read back, and what the server's rules give."""
    made = drafter("eagle", deep=6, **EAGLE)
    right = logits(made)
    fault(monkeypatch)
    place = written(server, made, tmp_path)
    try:
        again = logits(foreign.load(place, made.target))
        assert max(float((again[w] - right[w]).nan_to_num().abs().max()) for w in right) > 0.1
    except UserError as error:
        assert "d2t" in str(error)
    try:
        row, ids = by_rules(server, made, place, plain(deep=6), TEXT, 4, 1)
    except AssertionError:
        return  # d2t and t2d disagree
    assert not torch.allclose(right[4, 1][ids].double(), row, atol=0.1)


@pytest.mark.parametrize("name", ["dflash", "dspark", "peagle"])
@pytest.mark.parametrize("fault", [taps_off_by_one, ids_for_offsets])
def test_planted_faults_of_one_pass(
    name: str,
    fault: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    config = {"taps": [3, 1], "layers": 2, "mask_token": 6, "draft_vocab": 20}
    if name != "peagle":
        config["block_size"] = K + (name == "dflash")
    made = drafter(name, deep=6, **config)
    check("vllm", made, plain(deep=6), tmp_path)
    (tmp_path / "again").mkdir()
    fault(monkeypatch)
    with pytest.raises((AssertionError, UserError)):
        check("vllm", made, plain(deep=6), tmp_path / "again")


def test_columns_of_block_drafters_follow_their_layers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Planted: fc's columns, and the masks' state, in the order that taps were given in."""
    monkeypatch.setattr(layouts, "by_layer", lambda taps, weight: weight)
    for name, more in (("dflash", {"block_size": K + 1}), ("peagle", {})):
        made = drafter(name, taps=[3, 1], layers=2, **more)
        (tmp_path / name).mkdir()
        with pytest.raises(AssertionError):
            check("vllm", made, plain(), tmp_path / name)
