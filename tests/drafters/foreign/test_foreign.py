"""Published formats, read: tiny checkpoints written by hand from each format's specification.

    .venv/bin/pytest tests/drafters/foreign/test_foreign.py

No writer of ours is used. What is loaded must give the laws that the float64 reference computes
from the very tensors that were written; shuffled, missing and unknown ones are errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import tiny
from draftsmith.drafters import foreign
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.foreign import eagle
from draftsmith.train import recipe as recipes
from draftsmith.train.start import new_drafter
from exports import TEXT, logits, plain
from reference_eagle import eagle_logits
from reference_heads import head_logits
from reference_mtp import eagle1_logits

LAYERS = 8  # so that the taps that formats leave out exist: 2, 4, 5
H, HD, NH, NKV, INNER, V, VD = 32, 8, 4, 2, 40, 48, 20
IDS = [7, 3, 40, 1, 22, 47, 5, 30, 9, 11, 2, 33, 18, 26, 45, 0, 13, 38, 29, 16]  # unsorted
BODY = {
    "model_type": "llama", "hidden_size": H, "intermediate_size": INNER, "num_hidden_layers": 1,
    "num_attention_heads": NH, "num_key_value_heads": NKV, "head_dim": HD, "hidden_act": "silu",
    "vocab_size": V, "rms_norm_eps": 1e-4, "max_position_embeddings": 256, "rope_theta": 700.0,
}  # fmt: skip
BLOCK = {
    "num_heads": NH, "num_kv_heads": NKV, "head_dim": HD, "rms_norm_eps": 1e-4, "rope_theta": 700.0,
}  # fmt: skip

Made = tuple[dict[str, Any], dict[str, Tensor], Callable[[Any, int, int], tuple[Tensor, Tensor]]]


def random(*shape: int, scale: float = 0.35, seed: int = 0) -> Tensor:
    """Weights that differ by shape and seed; a norm's lie about 1."""
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape) + len(shape))
    noise = torch.randn(shape, generator=generator)
    return 1 + 0.2 * noise if len(shape) == 1 else scale * noise


def llama_layer(width: int, scale: float = 0.35) -> dict[str, Tensor]:
    return {
        "self_attn.q_proj.weight": random(NH * HD, width, scale=scale, seed=1),
        "self_attn.k_proj.weight": random(NKV * HD, width, scale=scale, seed=2),
        "self_attn.v_proj.weight": random(NKV * HD, width, scale=scale, seed=3),
        "self_attn.o_proj.weight": random(H, NH * HD, scale=scale, seed=4),
        "mlp.gate_proj.weight": random(INNER, H, scale=scale, seed=5),
        "mlp.up_proj.weight": random(INNER, H, scale=scale, seed=6),
        "mlp.down_proj.weight": random(H, INNER, scale=scale, seed=7),
        "post_attention_layernorm.weight": random(H, seed=8),
    }


def eagle3_parts() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the decoder layer's tensors, the others)."""
    layer = llama_layer(2 * H)
    layer |= {"input_layernorm.weight": random(H, seed=9), "hidden_norm.weight": random(H, seed=10)}
    rest = {
        "fc.weight": random(H, 3 * H, seed=11),
        "norm.weight": random(H, seed=12),
        "lm_head.weight": random(VD, H, seed=13),
    }
    return layer, rest


def eagle3_reference(
    weights: dict[str, Tensor], taps: list[int], normed: bool, **flags: bool
) -> Callable[[Any, int, int], tuple[Tensor, Tensor]]:
    config = {"taps": taps, "norm_before_residual": normed, "head": "own", "block": BLOCK, **flags}
    weights = weights | {"draft_ids": torch.tensor(IDS)}
    return lambda hf, anchor, depth: eagle_logits(weights, config, hf, TEXT, anchor, depth)


def maps() -> dict[str, Tensor]:
    """d2t as offsets, t2d as membership."""
    return {
        "d2t": torch.tensor([target - draft for draft, target in enumerate(IDS)]),
        "t2d": torch.tensor([token in IDS for token in range(V)]),
    }


def sglang() -> Made:
    """SpecForge's and SGLang's: midlayer, layers' outputs counted from 0 in eagle_config."""
    layer, rest = eagle3_parts()
    about = BODY | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": VD,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [0, 3, 6],
            "use_aux_hidden_state": True,
        },
    }
    tensors = {f"midlayer.{n}": t for n, t in layer.items()} | rest | maps()
    return about, tensors, eagle3_reference(layer | rest, [1, 4, 7], False)


def authors_eagle3() -> Made:
    """EAGLE's own: no layer ids (2, L//2, L-3), no norm flag, an unnamed architecture."""
    layer, rest = eagle3_parts()
    about = BODY | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": VD}
    tensors = {f"midlayer.{n}": t for n, t in layer.items()} | rest | maps()
    return about, tensors, eagle3_reference(layer | rest, [2, 4, 5], False)


def eagle31() -> Made:
    """EAGLE-3.1 with SGLang's older names of the taps' norms, `model.` before every name."""
    about, tensors, _ = sglang()
    norms = {n: random(H, seed=20 + i) for i, n in enumerate(("low", "mid", "high"))}
    layer, rest = eagle3_parts()
    ours = {f"fc_norm.{i}.weight": t for i, t in enumerate(norms.values())}
    tensors |= {f"aux_norm_{n}.weight": t for n, t in norms.items()}
    about |= {"use_aux_norm": True, "norm_output": True}
    judge = eagle3_reference(layer | rest | ours, [1, 4, 7], False, fc_norm=True, norm_output=True)
    return about, {f"model.{n}": t for n, t in tensors.items()}, judge


def speculators() -> Made:
    """vLLM's speculators format; a missing norm_before_residual means true there."""
    layer, rest = eagle3_parts()
    body = {key: value for key, value in BODY.items() if key != "rope_theta"}
    about = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": VD,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        "transformer_layer_config": body
        | {"rope_parameters": {"rope_theta": 700.0, "rope_type": "default"}},
        "speculators_config": {"verifier": {"name_or_path": "some/target"}},
    }
    tensors = {f"layers.0.{n}": t for n, t in layer.items()} | rest | maps()
    table = tiny.target("Llama", layers=LAYERS).embedding.weight.detach().clone()
    tensors["embed_tokens.weight"] = table
    return about, tensors, eagle3_reference(layer | rest, [1, 3, 6], True)


def eagle1() -> Made:
    """EAGLE-1's: a Llama of one layer without input norm; SGLang's fc has a bias."""
    layer = llama_layer(H, 0.12)
    fc = random(H, 2 * H, scale=0.12, seed=14)
    tensors = {f"layers.0.{n}": t for n, t in layer.items()}
    table = tiny.target("Llama", layers=LAYERS).embedding.weight.detach().clone()
    tensors |= {"fc.weight": fc, "fc.bias": torch.zeros(H), "embed_tokens.weight": table}
    weights = layer | {"fc.weight": fc}
    about = BODY | {"architectures": ["LlamaForCausalLM"]}
    config = {"block": BLOCK}
    return (
        about,
        tensors,
        lambda hf, anchor, depth: eagle1_logits(weights, config, hf, TEXT, anchor, depth),
    )


def medusa() -> Made:
    """The authors': heads of two blocks, named by numbers."""
    tensors, ours = {}, {}
    for h in range(3):
        for i in range(2):
            parts = {
                "weight": random(H, H, seed=40 + 7 * h + i),
                "bias": random(H, seed=60 + h) - 1,
            }
            tensors |= {f"{h}.{i}.linear.{kind}": t for kind, t in parts.items()}
            ours |= {f"blocks.{h}.{i}.linear.{kind}": t for kind, t in parts.items()}
        tensors[f"{h}.2.weight"] = ours[f"lm_heads.{h}.weight"] = random(V, H, seed=70 + h)
    about = {
        "medusa_num_heads": 3,
        "medusa_num_layers": 2,
        "base_model_name_or_path": "some/target",
    }
    config = {"layers": 2, "head": "own"}
    return (
        about,
        tensors,
        lambda hf, anchor, depth: head_logits(ours, config, hf, TEXT, anchor, depth),
    )


FORMATS: dict[str, tuple[Callable[[], Made], str]] = {
    "sglang": (sglang, "model.safetensors"),
    "authors' eagle3": (authors_eagle3, "pytorch_model.bin"),
    "eagle 3.1": (eagle31, "model.safetensors"),
    "speculators": (speculators, "model.safetensors"),
    "eagle1": (eagle1, "pytorch_model.bin"),
    "medusa": (medusa, "medusa_lm_head.pt"),
}
every = pytest.mark.parametrize("name", FORMATS)


def put(folder: Path, about: dict[str, Any], tensors: dict[str, Tensor], file: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(about))
    if file.endswith("safetensors"):
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def same_laws(folder: Path, judge: Callable[[Any, int, int], tuple[Tensor, Tensor]]) -> bool:
    target = tiny.target("Llama", layers=LAYERS)
    ours = logits(foreign.load(folder, target))
    for anchor, depth in ((0, 0), (4, 1), (3, 2)):
        row, ids = judge(plain(deep=LAYERS), anchor, depth)
        kept = ours[anchor, depth].isfinite().nonzero().flatten().tolist()
        assert kept == sorted(ids.tolist())
        if not torch.allclose(ours[anchor, depth][ids].double(), row, atol=2e-4, rtol=0):
            return False
    return True


@every
def test_a_published_format_gives_its_own_laws(name: str, tmp_path: Path) -> None:
    make, file = FORMATS[name]
    about, tensors, judge = make()
    assert same_laws(put(tmp_path, about, tensors, file), judge)


@every
def test_missing_unknown_and_shuffled_tensors_fail(name: str, tmp_path: Path) -> None:
    """Faults: random weights in place of a tensor that has another name; names taken in order."""
    make, file = FORMATS[name]
    about, tensors, judge = make()
    target = tiny.target("Llama", layers=LAYERS)
    by_size = sorted(n for n, t in tensors.items() if t.dim() == 2 and "embed" not in n)
    last = by_size[-1]
    renamed = {n: t for n, t in tensors.items() if n != last} | {f"other.{last}": tensors[last]}
    with pytest.raises(UserError, match="is missing"):
        foreign.load(put(tmp_path, about, renamed, file), target)
    with pytest.raises(UserError, match="other is unexpected"):
        foreign.load(put(tmp_path, about, tensors | {"other": torch.ones(1)}, file), target)
    like = [n for n in by_size if tensors[n].shape == tensors[last].shape and n != last]
    near = [n for n in by_size if n.endswith(("k_proj.weight", "v_proj.weight"))]
    one, other = near or (last, like[0])
    swapped = tensors | {one: tensors[other], other: tensors[one]}
    assert not same_laws(put(tmp_path, about, swapped, file), judge)
    shape = (*tensors[one].shape[:1], tensors[one].shape[1] + 1)
    with pytest.raises(UserError, match="has shape"):
        foreign.load(put(tmp_path, about, tensors | {one: torch.ones(shape)}, file), target)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("sglang", {"num_hidden_layers": 2}, "num_hidden_layers is 2"),
    ("sglang", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type is llama3"),
    ("sglang", {"attention_bias": True}, "attention_bias is True"),
    ("sglang", {"vocab_size": 50}, "vocab_size is 50, the target tiny-Llama-0 has 48"),
    ("sglang", {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}, "name different layers"),
    ("sglang", {"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4"),
    ("sglang", {"draft_vocab_size": 21}, "d2t has shape"),
    ("sglang", {"hidden_size": 16}, "block.hidden_size: 16"),
    ("speculators", {"speculators_model_type": "mtp"}, "speculators' mtp"),
    ("medusa", {"medusa_num_heads": 2}, "is unexpected"),
    ("medusa", {"hidden_size": 16}, "hidden_size is 16"),
]


@pytest.mark.parametrize(("name", "changed", "words"), WRONG)
def test_settings_that_mean_something_else(
    name: str, changed: dict[str, Any], words: str, tmp_path: Path
) -> None:
    """Each a line that names the file: servers pass most of these over."""
    make, file = FORMATS[name]
    about, tensors, _ = make()
    put(tmp_path, about | changed, tensors, file)
    with pytest.raises(UserError, match=words) as error:
        foreign.load(tmp_path, tiny.target("Llama", layers=LAYERS))
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


LACKING = [
    ("sglang", "hidden_size"),
    ("speculators", "transformer_layer_config"),
    ("eagle1", "num_hidden_layers"),
]


@pytest.mark.parametrize(("name", "key"), LACKING)
def test_a_setting_that_is_missing(name: str, key: str, tmp_path: Path) -> None:
    make, file = FORMATS[name]
    about, tensors, _ = make()
    del about[key]
    with pytest.raises(UserError, match=f"config.json: has no {key}; copy it again"):
        foreign.load(put(tmp_path, about, tensors, file), tiny.target("Llama", layers=LAYERS))


def test_a_mistake_of_ours_is_no_missing_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: any KeyError of a reader passes for the user's."""
    about, tensors, _ = sglang()
    monkeypatch.setattr(eagle, "_taps", lambda *_: {}["of ours"])
    with pytest.raises(KeyError, match="of ours"):
        foreign.load(put(tmp_path, about, tensors, "model.safetensors"), tiny.target())


@pytest.mark.parametrize("content", [b"", b".", [1, 2], {"epoch": 3}], ids=repr)
def test_a_pickle_that_holds_no_weights(content: Any, tmp_path: Path) -> None:
    """Faults (a trace): a file of 0 bytes, one that is no pickle, a list, a state of training."""
    about, tensors, _ = medusa()
    file = put(tmp_path, about, tensors, "medusa_lm_head.pt") / "medusa_lm_head.pt"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with pytest.raises(UserError, match="medusa_lm_head.pt: (cannot be read|holds)") as error:
        foreign.load(tmp_path, tiny.target("Llama", layers=LAYERS))
    assert "\n" not in str(error.value)


def test_vocabulary_maps_must_agree(tmp_path: Path) -> None:
    """Faults: ids where offsets belong; d2t and t2d of two different vocabularies."""
    about, tensors, _ = sglang()
    target = tiny.target("Llama", layers=LAYERS)
    put(tmp_path, about, tensors | {"d2t": torch.tensor(IDS)}, "model.safetensors")
    with pytest.raises(UserError, match="d2t"):
        foreign.load(tmp_path, target)
    put(tmp_path, about, tensors | {"t2d": tensors["t2d"].roll(1)}, "model.safetensors")
    with pytest.raises(UserError, match="keep different tokens"):
        foreign.load(tmp_path, target)


def test_other_weights_than_the_targets(tmp_path: Path) -> None:
    """A head with embeddings of its own; EAGLE-1 with a bias."""
    target = tiny.target("Llama", layers=LAYERS)
    about, tensors, _ = speculators()
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"] + 0.1
    with pytest.raises(UserError, match="embed_tokens.weight is not the target's"):
        foreign.load(put(tmp_path / "a", about, tensors, "model.safetensors"), target)
    about, tensors, _ = eagle1()
    tensors["fc.bias"] = torch.ones(H)
    with pytest.raises(UserError, match="fc.bias is not 0"):
        foreign.load(put(tmp_path / "b", about, tensors, "pytorch_model.bin"), target)


def test_a_run_starts_from_a_published_head(tmp_path: Path) -> None:
    """Faults: a new draft vocabulary under old rows of lm_head; other taps than trained."""
    about, tensors, judge = sglang()
    folder = put(tmp_path / "head", about, tensors, "model.safetensors")
    target = tiny.target("Llama", layers=LAYERS)
    keys = {"name": "tune", "drafter": "eagle", "steps": 1, "start": str(folder)}
    counts = torch.arange(V)  # would choose other tokens
    made = new_drafter(recipes.parse(keys, "tune.yaml"), target, counts)
    assert made.training and made.vocab.ids is not None and made.vocab.ids.tolist() == IDS
    row, ids = judge(plain(deep=LAYERS), 4, 1)
    torch.testing.assert_close(logits(made.eval())[4, 1][ids].double(), row, atol=2e-4, rtol=0)
    for more, words in (
        ({"draft_vocab": 16}, "made with draft_vocab: 20, the recipe has 16"),
        ({"drafter": "small", "layers": [0]}, "holds a drafter of family eagle"),
    ):
        with pytest.raises(UserError, match=words):
            new_drafter(recipes.parse(keys | more, "tune.yaml"), target, counts)


def test_the_target_that_a_folder_names(tmp_path: Path) -> None:
    about, tensors, _ = speculators()
    folder = put(tmp_path / "a", about, tensors, "model.safetensors")
    assert foreign.made_for(folder) == "some/target"
    (folder / "card.json").write_text(json.dumps({"target": {"spec": "smollm2"}}))
    assert foreign.made_for(folder) == "smollm2"
    (tmp_path / "b").mkdir()
    for content, words in ((None, "no drafter there"), ("{}", "no format that is known")):
        if content:
            (tmp_path / "b" / "config.json").write_text(content)
        with pytest.raises(UserError, match=words):
            foreign.made_for(tmp_path / "b")
