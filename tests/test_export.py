"""Exports: read back equal, and equal to what the server's own rules make of the files.

    .venv/bin/pytest tests/test_export.py

Every (server, family) is written, read by `foreign` (which shares no code with the writers) and
computed in float64 from the files by reference_export.py. Planted faults turn both checks red.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import reference_export as rules
import test_capture
import tiny
from draftsmith.drafters import base, export, foreign
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.batch import Batch, align, batch_of
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import Serving, layouts, llama_cpp
from draftsmith.drafters.layers import BlockConfig
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target import Target
from draftsmith.drafters.vocab import VocabMap
from places import ROOT
from test_target import build_as

TEXT = [5, 9, 31, 7, 22, 40, 3, 17, 28, 11]
K = 3


def drafter(name: str, family: str = "Llama", deep: int = 4, **config: Any) -> Drafter:
    """A drafter with large random weights and, where it is reduced, an unsorted vocabulary."""
    target, cls = tiny.target(family, layers=deep), base.family(name)
    with torch.no_grad():
        made = cls.create(target, cls.Config(**config), torch.ones(target.vocab_size)).eval()
        generator = torch.Generator().manual_seed(0)
        size = 0.12 if name == "eagle1" else 0.35
        for parameter in made.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                norm = parameter.dim() == 1
                parameter.copy_(1 + 0.2 * noise if norm else size * noise)
    if made.vocab.ids is not None:
        ids = torch.randperm(target.vocab_size, generator=generator)[: made.vocab.draft_size]
        made.set_vocab(VocabMap(target.vocab_size, ids))  # type: ignore[attr-defined]
    return made


@cache
def plain(family: str = "Llama", deep: int = 4) -> Any:
    """The target as transformers alone has it, for the reference."""
    return tiny.hf_model(family, layers=deep).double()


def target_gguf(target: Target, path: Path) -> Path:
    """A GGUF with the target's tokenizer, as llama.cpp's converter leaves it."""
    names = {i: word for word, i in target.tokenizer.get_vocab().items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([names[i] for i in range(target.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * target.vocab_size)
    writer.add_eos_token_id(tiny.EOS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def written(server: str, made: Drafter, folder: Path, **more: Any) -> Path:
    """The export's folder, within `folder`."""
    place = folder / "out"
    place.mkdir()
    if server == "llama.cpp":
        more["target_gguf"] = target_gguf(made.target, folder / "target.gguf")
    export.write(server, made, place, Serving("TARGET", K, 128, **more))
    return place


def read(target: Target, taps: Any) -> Batch:
    return target.read(batch_of([(TEXT, [True] * len(TEXT))], Sampler()), taps)


@torch.no_grad()
def logits(made: Drafter) -> dict[tuple[int, int], Tensor]:
    """Draft logits over target ids, -inf where there is none, by anchor and depth."""
    batch = read(made.target, made.taps)
    alignment = align(batch, K)
    unrolled = made.unroll(batch, alignment)
    assert isinstance(unrolled, base.Unroll)
    rows = made.logits(unrolled.hidden, unrolled.prev, unrolled.depth)
    out = {}
    for at, anchor in enumerate(alignment.anchors[0].tolist()):
        for depth, row in enumerate(unrolled.index[0, at].tolist()):
            if row >= 0:
                full = torch.full((made.target.vocab_size,), -torch.inf)
                ids = torch.arange(made.vocab.draft_size)
                out[anchor, depth] = full.index_copy(0, made.vocab.to_target(ids), rows[row])
    return out


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
    if made.family == "medusa":
        return rules.medusa(place, *where)
    if server == "llama.cpp":
        return (rules.llama_cpp if made.family == "eagle" else rules.small_llama)(place, *where)
    taps = None
    if server == "tensorrt-llm":  # as the command line that is printed says
        said = export.server(server).command(made, place, Serving("TARGET", K, 128))
        taps = list(ast.literal_eval(said[said.index("{") : said.index("}") + 1]))
    return rules.eagle3(server, place, taps, *where)


BLOCK = BlockConfig(
    hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=4, head_dim=8,
    rms_norm_eps=1e-5, rope_theta=500.0,
)  # fmt: skip
EAGLE = {"taps": [3, 1, 2], "draft_vocab": 20, "block": BLOCK}
NEW = {"fc_norm": True, "norm_output": True}
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
    right = layouts.llama_body
    patch.setattr(
        layouts,
        "llama_body",
        lambda block, *more: right(block.model_copy(update={"rope_theta": 1e4}), *more),
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


@pytest.mark.parametrize(("server", "name"), [("vllm", "eagle"), ("sglang", "eagle"),
                                              ("vllm", "eagle1"), ("vllm", "medusa")])  # fmt: skip
def test_every_tensor_is_asked_for(server: str, name: str, tmp_path: Path) -> None:
    """Faults: a missing tensor passed over, as servers do; one that nobody reads."""
    config = {"eagle": EAGLE, "medusa": {"heads": 3}}.get(name, {})
    made = drafter(name, **config)
    file = written(server, made, tmp_path) / "model.safetensors"
    whole = load_file(file)
    optional = {"t2d", "fc.bias", "embed_tokens.weight"}
    for missing in whole.keys() - optional:
        save_file({n: t for n, t in whole.items() if n != missing}, file)
        with pytest.raises(UserError, match=f"{missing.split('.', 1)[-1]} is missing"):
            foreign.load(file.parent, made.target)
    save_file(whole | {"fc_norm.7.weight": torch.ones(32)}, file)
    with pytest.raises(UserError, match="tensor fc_norm.7.weight is unexpected"):
        foreign.load(file.parent, made.target)
    names = sorted(n for n in whole if whole[n].dim() == 2)
    save_file(
        whole | dict(zip(names, [whole[n] for n in names[1:] + names[:1]], strict=True)), file
    )
    with pytest.raises(UserError, match="has shape"):
        foreign.load(file.parent, made.target)


@pytest.mark.parametrize("server", ["vllm", "llama.cpp"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_round_and_do_nothing_else(server: str, dtype: torch.dtype, tmp_path: Path) -> None:
    made = drafter("eagle", **EAGLE)
    again = foreign.load(written(server, made, tmp_path, dtype=dtype), made.target)
    ours, theirs = made.weights(), again.weights()
    for name, tensor in ours.items():
        if name == "fc.weight":  # columns stand in another order
            tensor = tensor[:, [*range(32, 96), *range(32)]]
        if tensor.is_floating_point() and (server == "vllm" or tensor.dim() > 1):
            tensor = tensor.to(dtype).float()
        assert torch.equal(theirs[name], tensor), name


# What servers would ignore or misread


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "sglang",
        "eagle",
        {**EAGLE, "norm_before_residual": True},
        "export it --to vllm or llama.cpp",
    ),
    ("tensorrt-llm", "eagle", {**EAGLE, "norm_before_residual": True}, "raw state"),
    ("tensorrt-llm", "eagle", {**EAGLE, "fc_norm": True, "norm_before_fc": True}, "passes it over"),
    ("llama.cpp", "eagle", {**EAGLE, "taps": [0, 1, 2, 3]}, "exactly 3 layers"),
    ("llama.cpp", "eagle", {**EAGLE, "norm_output": True}, "norm_output: llama.cpp"),
    ("sglang", "eagle", {**EAGLE, "taps": [0, 1, 2]}, "gives layers 1..3"),
    ("vllm", "eagle", {**EAGLE, "taps": [1, 2, 4]}, "gives layers 0..3"),
    ("vllm", "eagle", {**EAGLE, "taps": [1, 2, "normed"]}, "after the final norm"),
    ("sglang", "eagle", {**EAGLE, "family": "Gemma3"}, "scales its embeddings"),
    ("vllm", "eagle1", {"family": "Gemma3"}, "train EAGLE-3"),
    ("vllm", "eagle", {**EAGLE, "block": BLOCK.model_copy(update={"qk_norm": True})}, "qk_norm"),
    ("vllm", "eagle1", {"block": BLOCK.model_copy(update={"rotary_share": 0.5})}, "share: 1.0"),
    ("sglang", "medusa", {}, "loads no medusa drafter; export it --to vllm"),
    ("vllm", "hydra", {}, "loads no hydra drafter; no server has heads"),
    ("vllm", "medusa", {"heads": 2}, "3 is more than this drafter's 2 depths"),
    ("vllm", "medusa", {"heads": 3, "draft_vocab": 20}, "train without draft_vocab"),
    ("transformers", "eagle", EAGLE, "export it --to vllm or sglang or tensorrt-llm or llama.cpp"),
    ("llama.cpp", "small", {"layers": [0], "family": "Gemma3"}, "convert_hf_to_gguf.py"),
]


@pytest.mark.parametrize(("server", "name", "config", "words"), REFUSED)
def test_refused_with_the_reason_and_a_remedy(
    server: str, name: str, config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    made = drafter(name, **config)
    with pytest.raises(UserError, match=words.replace("..", r"\.\.")) as error:
        written(server, made, tmp_path)
    assert "\n" not in str(error.value)
    assert not any((tmp_path / "out").iterdir())


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    """A draft model of fewer tokens; a GGUF of another tokenizer, of none, and none at all."""
    made = drafter("small", layers=[0])
    made.lm.hf.set_output_embeddings(torch.nn.Linear(32, 40, bias=False))  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="target's 48 tokens only, this one has 40"):
        written("vllm", made, tmp_path)
    made = drafter("eagle", **EAGLE)
    for of, words in (
        (tiny.target("Llama", vocab=30), "has 30 tokens"),
        (tiny.target("Llama"), ""),
    ):
        path = target_gguf(of, tmp_path / "some.gguf")
        serving = Serving("TARGET", K, 128, target_gguf=path)
        if words:
            with pytest.raises(UserError, match=words):
                export.check("llama.cpp", made, serving)
        else:
            export.check("llama.cpp", made, serving)
    with pytest.raises(UserError, match="--target-gguf: llama.cpp reads the tokenizer"):
        export.check("llama.cpp", made, Serving("TARGET", K, 128))
    fewer = Target(tiny.hf_model(vocab=40), tiny.tokenizer(), tiny.source())  # rows than tokens
    path = target_gguf(tiny.target(vocab=40), tmp_path / "fewer.gguf")
    made = base.family("small").create(fewer, base.family("small").Config(layers=[0]))
    with pytest.raises(UserError, match=r"has no token 4\d, .* has \('w4\d'\)"):
        export.check("llama.cpp", made, Serving("TARGET", K, 128, target_gguf=path))


def test_a_disk_that_is_full_leaves_no_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, writers = drafter("eagle", **EAGLE), []
    path = target_gguf(made.target, tmp_path / "target.gguf")

    def full(self: gguf.GGUFWriter) -> None:
        writers.append(self)
        raise OSError("no space left")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", full)
    with pytest.raises(OSError, match="no space"):
        export.write("llama.cpp", made, tmp_path, Serving("TARGET", K, 128, target_gguf=path))
    assert writers[0].fout is None


# Who can draw drafts, of what: by the servers' sources. Everything else is drafted greedily.
DRAWN = {("vllm", "eagle"), ("vllm", "eagle1"), ("vllm", "small"), ("sglang", "eagle1")}
DRAWN |= {("transformers", "small")}
FLAGS = {
    "vllm": '"draft_sample_method": "probabilistic"',
    "sglang": "--speculative-use-rejection-sampling",
    "transformers": "do_sample=True, temperature=0.7, top_k=0, top_p=1",
}


@pytest.mark.parametrize("server", export.SERVERS)
def test_commands_draw_drafts_where_a_server_can(server: str, tmp_path: Path) -> None:
    """For drafters trained at temperatures above 0, and for no others."""
    settings = {"eagle": EAGLE, "small": {"layers": [0]}, "medusa": {"heads": 3}}
    for family in export.server(server).rows:
        made = drafter(family, **settings.get(family, {}))
        gguf_path = target_gguf(made.target, tmp_path / "target.gguf")
        for sampler in (Sampler(0.7), Sampler(0.0), None):
            how = Serving("TARGET", K, 128, target_gguf=gguf_path, sampler=sampler)
            drawn = sampler == Sampler(0.7) and (server, family) in DRAWN
            said = export.server(server).command(made, tmp_path, how)
            assert export.server(server).drafting(made, how) == ("sampled" if drawn else "greedy")
            assert (FLAGS.get(server, "none") in said) == drawn, (family, sampler)
            assert server != "vllm" or "--generation-config vllm" in said
    if server == "sglang":  # whose kernel wants q over the whole vocabulary
        whole = drafter("eagle", **EAGLE | {"draft_vocab": None})
        assert export.server(server).draws(whole)


# Layouts of servers that cannot run here: checked, not run

H, HD, NH, NKV, INNER, VD, V = 32, 8, 4, 4, 48, 20, 48
LAYER_ROWS = [  # name, shape, where the server's source has it
    ("self_attn.q_proj.weight", (NH * HD, 2 * H), "qkv_proj of 2 * hidden_size"),
    ("self_attn.k_proj.weight", (NKV * HD, 2 * H), "qkv_proj of 2 * hidden_size"),
    ("self_attn.v_proj.weight", (NKV * HD, 2 * H), "qkv_proj of 2 * hidden_size"),
    ("self_attn.o_proj.weight", (H, NH * HD), "attention of the target's family"),
    ("mlp.gate_proj.weight", (INNER, H), "gate_up_proj"),
    ("mlp.up_proj.weight", (INNER, H), "gate_up_proj"),
    ("mlp.down_proj.weight", (H, INNER), "mlp"),
    ("input_layernorm.weight", (H,), "on the embedding"),
    ("hidden_norm.weight", (H,), "on the state"),
    ("post_attention_layernorm.weight", (H,), "with the residual"),
]
LAYOUTS = {
    "sglang": ("srt/models/llama_eagle3.py", "LlamaForCausalLMEagle3"),
    "tensorrt-llm": ("_torch/models/modeling_speculative.py, Eagle3DraftModel", "Eagle3"),
}
ROWS = [
    ("fc.weight", (H, 3 * H), "fc of hidden_size_in * captured layers, no bias"),
    ("norm.weight", (H,), "norm"),
    ("lm_head.weight", (VD, H), "lm_head of draft_vocab_size rows"),
    ("d2t", (VD,), "hot_token_id / d2t: offsets"),
    ("t2d", (V,), "skipped"),
]
KEYS = {  # key -> value, read in the same files
    "architectures": ["LlamaForCausalLMEagle3"],  # sglang: EntryClass; trt-llm: normalised
    "model_type": "llama",
    "hidden_size": H,
    "target_hidden_size": H,  # both: hasattr(config, "target_hidden_size")
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": NH,
    "num_key_value_heads": NKV,
    "head_dim": HD,
    "vocab_size": V,
    "draft_vocab_size": VD,  # trt-llm knows EAGLE-3 by it
    "num_aux_hidden_states": 3,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "max_position_embeddings": 128,  # the serving length
    "fc_norm": False,
    "norm_output": False,
    "torch_dtype": "float32",  # trt-llm: config.torch_dtype
}


@pytest.mark.parametrize("server", LAYOUTS)
def test_layout_checked_not_run(server: str, tmp_path: Path) -> None:
    """Names, shapes and keys as SGLang 0.5.23 and TensorRT-LLM 1.2 have them in their sources."""
    place = written(server, drafter("eagle", **EAGLE), tmp_path)
    about, tensors = rules.files(place)
    rows = {name: shape for name, shape, _ in ROWS}
    rows |= {f"midlayer.{name}": shape for name, shape, _ in LAYER_ROWS}
    assert {name: tuple(t.shape) for name, t in tensors.items()} == rows
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert {key: about[key] for key in KEYS} == KEYS
    inner = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}
    assert about["eagle_config"].items() >= inner.items()
    assert not export.server(server).run


def test_readers_and_writers_share_nothing() -> None:
    """A reader that asks its writer agrees with any mistake of it."""
    for here, there in (("foreign", "export"), ("export", "foreign")):
        for file in (ROOT / "drafters" / here).glob("*.py"):
            assert f"drafters.{there}" not in file.read_text(), file


def test_the_positions_are_those_that_are_served(tmp_path: Path) -> None:
    """Fault: the training length, or the target's own, as the longest text."""
    about, _ = rules.files(written("vllm", drafter("eagle", **EAGLE), tmp_path))
    assert about["transformer_layer_config"]["max_position_embeddings"] == 128


def test_a_draft_model_keeps_its_rope(tmp_path: Path) -> None:
    """Fault: positions cut to the serving length, of which longrope makes its attention factor."""
    rope = {key: value for key, value in test_capture.LONGROPE.items() if key != "factor"}
    of = build_as("Phi3", rope_parameters=rope, original_max_position_embeddings=64)
    made = base.family("small").create(of, base.family("small").Config(layers=[0, 3])).eval()
    export.write("transformers", made, tmp_path, Serving("TARGET", K, 64))
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    theirs = hf(torch.tensor([TEXT])).logits[0]
    for (anchor, depth), row in logits(made).items():
        torch.testing.assert_close(row, theirs[anchor + 1 + depth], atol=1e-4, rtol=0)


def test_biases_of_a_gguf(tmp_path: Path) -> None:
    """Fault: rows of q and k interleaved, their biases not (conversion/llama.py does both)."""
    of = build_as("Llama", attention_bias=True)
    made = base.family("small").create(of, base.family("small").Config(layers=[0, 3])).eval()
    place = written("llama.cpp", made, tmp_path)
    row, _ = rules.small_llama(place, None, TEXT, 4, 1)
    torch.testing.assert_close(logits(made)[4, 1].double(), row, atol=2e-4, rtol=0)
