"""What an export refuses or rounds, the layouts and commands it writes.

.venv/bin/pytest tests/drafters/export/test_export_refused.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import reference_export as rules
import tiny
from draftsmith.drafters import base, export, foreign
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import Serving
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from exports import BLOCK, EAGLE, TEXT, K, drafter, logits, target_gguf, written
from places import ROOT
from targets import LONGROPE, build_as


@pytest.mark.parametrize(("server", "name"), [("vllm", "eagle"), ("sglang", "eagle"),
                                              ("vllm", "eagle1"), ("vllm", "medusa"),
                                              ("vllm", "dspark"), ("vllm", "peagle")])  # fmt: skip
def test_every_tensor_is_asked_for(server: str, name: str, tmp_path: Path) -> None:
    """Faults: a missing tensor passed over, as servers do; one that nobody reads."""
    config = {"eagle": EAGLE, "medusa": {"heads": 3}, "peagle": {"taps": [1, 2], "layers": 2}}
    config["dspark"] = BLOCK3 | {"taps": [1, 2], "layers": 2}
    made = drafter(name, **config.get(name, {}))
    file = written(server, made, tmp_path) / "model.safetensors"
    whole = load_file(file)
    optional = {"t2d", "fc.bias", "embed_tokens.weight"}
    optional |= {f"confidence_head.proj.{kind}" for kind in ("weight", "bias")}
    optional |= {"lm_head.weight"} if name in ("dspark", "peagle") else set()  # or the target's
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


BLOCK3 = {"block_size": 3}
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
    *(
        (server, name, {"taps": [1, 2]}, f"no {name} .* for {server} .* yet; export it --to vllm")
        for server in ("sglang", "llama.cpp", "tensorrt-llm")
        for name in ("dflash", "dspark")
    ),
    ("llama.cpp", "peagle", {"taps": [1, 2]}, "loads no peagle drafter; export it --to vllm"),
    ("vllm", "dflash", {"taps": [1, 2]}, "--k: vllm fills whole blocks, of 15 .* give --k 15"),
    ("vllm", "dspark", BLOCK3 | {"taps": [1, 4]}, "gives layers 1..3"),
    ("vllm", "dspark", BLOCK3 | {"taps": [1, "normed"]}, "after the final norm"),
    ("vllm", "dspark", BLOCK3 | {"taps": [1, 2], "family": "Gemma3"}, "scales its embeddings"),
    ("vllm", "dspark", BLOCK3 | {"taps": [1, 2], "block": BLOCK}, "qk_norm: vllm's Qwen3-type .*"),
    ("vllm", "peagle", {"taps": [1, 2], "fc_norm": True}, "passes it over in P-EAGLE"),
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
    settings |= {name: {"taps": [1, 2]} for name in ("dflash", "dspark", "peagle")}
    for family in export.server(server).methods:
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
    rope = {key: value for key, value in LONGROPE.items() if key != "factor"}
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
