"""Compiled decoder layers: the same logits, proven before use; whatever fails falls back."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from draftsmith.drafters.passes import compiling, layers, narrow
from draftsmith.drafters.policy import Policy
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.small import Small, SmallConfig
from draftsmith.drafters.target import selftest
from draftsmith.drafters.target.slab import Slab
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.loop import Decoder
from draftsmith.recipes import options

needs_kernels = pytest.mark.skipif(bool(narrow.problem()), reason="no C++ compiler")
COMPILED = ["Llama", "Mistral", "Qwen3", "Gemma2", "Gemma3 mixed", "Cohere", "Phi3"]


def fresh(family: str = "Llama") -> tuple[Target, Tensor]:
    """A target of its own, and transformers' logits of the self-test's texts."""
    hf = tiny.hf_model(family)
    reference = selftest.probe_logits(hf)
    target = Target(hf, tiny.tokenizer(), tiny.source())
    narrow.prepare(target)
    return target, reference


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Layers are traced as ever, but their graph is run as it is: compiling takes seconds."""
    made: list[Path] = []

    def code(file: Path, graph: Any, inputs: list) -> compiling.Code:
        made.append(file)
        return lambda *inputs: [graph(*inputs)]

    monkeypatch.setattr(compiling, "code_of", code)
    monkeypatch.setattr(compiling, "folder", lambda: tmp_path)
    return made


@pytest.fixture
def chosen() -> Iterator[None]:
    layers.choose(True)
    yield
    layers.choose(False)


def counting(compiled: layers.Compiled) -> list[int]:
    """Calls of compiled code from now on."""
    calls = [0]

    def counted(code: compiling.Code) -> compiling.Code:
        def run(*inputs: Tensor) -> Sequence[Tensor]:
            calls[0] += 1
            return code(*inputs)

        return run

    for key, code in compiled.codes.items():
        compiled.codes[key] = counted(code)
    return calls


@needs_kernels
@pytest.mark.parametrize("family", COMPILED)
def test_families_keep_their_logits(family: str, traced: list[Path]) -> None:
    target, reference = fresh(family)
    layers.ready(target, target.tokenizer, 1, [1, 5])
    compiled = layers.find(target)
    assert compiled is not None and compiled.codes
    assert len(traced) == 2 * len(set(compiled.kinds))  # one token, and more
    calls = counting(compiled)
    with torch.inference_mode(), narrow.decoding():
        gap = selftest.slab_gap(target, reference, Slab(1, selftest.ROOM, target.device))
    assert gap < 1e-4 * reference.abs().max()
    assert calls[0] == 2 * target.num_layers  # the tree, and the token after it


@needs_kernels
def test_layers_that_differ_get_code_of_their_own() -> None:
    target, _ = fresh("Llama4")  # some without rope
    kinds = [layers._kind(layer) for layer in target.layers]
    assert 1 < len(set(kinds)) < len(kinds)
    assert len({layers._kind(layer) for layer in fresh("Llama")[0].layers}) == 1


@needs_kernels
def test_a_batch_of_texts_of_different_lengths(traced: list[Path], chosen: None) -> None:
    target, _ = fresh()
    prompts = [[5, 9, 14], [7, 3, 22, 30, 11], [8] * 9]
    layers.choose(False)
    plain = [t.tokens for t in Decoder(target).generate(prompts, Sampler(0.0), 12)]
    layers.choose(True)
    decoder = Decoder(target)
    assert [t.tokens for t in decoder.generate(prompts, Sampler(0.0), 12)] == plain
    compiled = layers.find(target)
    assert compiled is not None and {key[2:] for key in compiled.codes} == {(False, True)}


@needs_kernels
def test_decoding_writes_what_generate_writes(traced: list[Path], chosen: None) -> None:
    """Of a small draft model too, whose layers are compiled as the target's are."""
    hf = tiny.hf_model("Qwen3")
    prompt = [5, 9, 14, 20]
    ids = torch.tensor([prompt])
    theirs = hf.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)[0, 4:].tolist()
    target = Target(hf, tiny.tokenizer(), tiny.source())
    drafter = Small.create(target, SmallConfig(layers=[0, 2])).eval()
    text = Decoder(target, drafter, Policy(3)).generate([prompt], Sampler(0.0), 16)[0]
    assert text.tokens == theirs
    for model in (target, drafter.lm):
        compiled = layers.find(model)
        assert compiled is not None and len(compiled.codes) == 2


def rope_of_zero(inputs: list[Tensor]) -> None:
    """cos and sin of the wrong positions."""
    for i, x in enumerate(inputs):
        if x.dim() == 3 and x.shape[-1] == 8:
            inputs[i] = x.roll(1, -1)


def weights_of_another(inputs: list[Tensor]) -> None:
    inputs[-1] = inputs[-1].roll(1, 0)


@needs_kernels
@pytest.mark.parametrize("fault", [rope_of_zero, weights_of_another])
def test_wrong_code_is_refused_in_one_line(
    fault: Callable, traced: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def code(file: Path, graph: Any, inputs: list) -> compiling.Code:
        def run(*inputs: Tensor) -> list[Tensor]:
            changed = list(inputs)
            fault(changed)
            return [graph(*changed)]

        return run

    monkeypatch.setattr(compiling, "code_of", code)
    target, reference = fresh()
    with caplog.at_level(logging.WARNING):
        layers.ready(target, target.tokenizer, 1, [1])
        layers.ready(target, target.tokenizer, 1, [1])  # is not tried again
    (line,) = [r.getMessage() for r in caplog.records]
    assert "LlamaForCausalLM: layers are not compiled (their logits differ by" in line
    compiled = layers.find(target)
    assert compiled is not None and not compiled.codes
    with torch.inference_mode(), narrow.decoding():
        gap = selftest.slab_gap(target, reference, Slab(1, selftest.ROOM, target.device))
    assert gap < 1e-3


@needs_kernels
@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss", "DeepseekV3"])
def test_a_family_that_cannot_be_traced_falls_back(
    family: str, traced: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    target, reference = fresh(family)  # experts are picked on the host
    with caplog.at_level(logging.WARNING, "draftsmith"):
        layers.ready(target, target.tokenizer, 1, [5])
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("draftsmith")]
    assert len(lines) == 1 and "layers are not compiled" in lines[0] and "\n" not in lines[0]
    with torch.inference_mode(), narrow.decoding():
        gap = selftest.slab_gap(target, reference, Slab(1, selftest.ROOM, target.device))
    assert gap < 1e-3


@needs_kernels
def test_a_copy_of_the_model_is_transformers_own(traced: list[Path]) -> None:
    target, reference = fresh()
    layers.ready(target, target.tokenizer, 1, [1])
    hf = narrow.restore(copy.deepcopy(target.hf))
    assert torch.allclose(selftest.probe_logits(hf), reference, atol=1e-5)


@needs_kernels
def test_one_rule_settles_auto(capsys: pytest.CaptureFixture, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    target, _ = fresh()
    try:
        for asked, passes, on in (
            ("off", 10**9, False), ("on", 1, True), ("auto", layers.PAYS, True),
            ("auto", layers.PAYS - 1, False),
        ):  # fmt: skip
            options.settle(asked, target, passes)
            assert layers.chosen() is on
        assert "layers are not compiled: up to" in capsys.readouterr().out
        kind = layers._kind(target.layers[0])
        (compiling.folder() / f"{kind}-True-True-0").touch()
        options.settle("auto", target, 1)  # an earlier process has compiled them
        assert layers.chosen()
    finally:
        layers.choose(False)


@needs_kernels
@pytest.mark.slow
def test_compiled_code_is_exact_and_found_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiling, "folder", lambda: tmp_path)
    for again in range(2):
        target, reference = fresh()
        layers.ready(target, target.tokenizer, 1, [1, 5])
        compiled = layers.find(target)
        assert not [r for r in caplog.records if r.name.startswith("draftsmith")]
        assert compiled is not None and len(compiled.codes) == 2
        with torch.inference_mode(), narrow.decoding():
            gap = selftest.slab_gap(target, reference, Slab(1, selftest.ROOM, target.device))
        assert gap < 1e-4 * reference.abs().max()
        if not again:
            monkeypatch.setattr(compiling, "traced", lambda *given: pytest.fail("traced again"))
