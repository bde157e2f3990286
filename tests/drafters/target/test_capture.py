"""What a CUDA graph needs of a target, and memory: all told without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor

import tiny
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target import target as target_module
from draftsmith.drafters.target.attention import chain_step
from draftsmith.drafters.target.causal_lm import CausalLM
from draftsmith.drafters.target.selftest import capture_problem
from draftsmith.drafters.target.slab import Slab
from draftsmith.drafters.target.target import Target
from targets import LONGROPE, build_as, close, pair, plain, random_tokens

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "family", ["Llama", "Gemma2", "Llama4", "GptOss", "Qwen3Moe", "DeepseekV3"]
)
def test_a_verify_pass_reads_nothing_on_the_host(family: str) -> None:
    """Fault: a value that the host looks at: the capture of a CUDA graph would fail."""
    of, theirs = pair(family)
    assert capture_problem(of, 2) is None
    text = random_tokens(9).tolist()
    with torch.no_grad():
        final = of(torch.tensor([text]), chain_step(Slab(1, 16, of.device), 9)).final
    close(of.head(final[0]), plain(theirs, text))  # nothing fake was left behind


def host_read(self: CausalLM, final: Tensor) -> Tensor:
    return self.lm_head(self.norm(final)) * float(final.max())


def host_choice(self: CausalLM, final: Tensor) -> Tensor:
    return self.lm_head(self.norm(final[final[..., 0] > 0]))


@pytest.mark.parametrize("head", [host_read, host_choice])
def test_a_host_read_is_found(head: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a check that passes whatever the forward does."""
    of = tiny.target()
    monkeypatch.setattr(CausalLM, "head", head)
    assert "cannot run without values" in (capture_problem(of) or "")


def test_experts_that_loop_are_found() -> None:
    """Fault: experts chosen on the host pass for capturable, or stay switched afterwards."""
    of = build_as("Qwen3Moe")
    of.hf.set_experts_implementation("eager")
    of._experts_as_loaded = of.hf.get_experts_implementation()
    assert "nonzero" in (capture_problem(of, 16) or "")
    assert capture_problem(of, 2) is None  # few tokens: batched_mm
    assert of.hf.get_experts_implementation() == {"": "eager"}


def test_rope_that_looks_at_positions() -> None:
    """Faults: dynamic rope passes for capturable; the fake frequencies of longrope stay."""
    dynamic = build_as("Llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    assert "cannot run without values" in (capture_problem(dynamic) or "")
    assert capture_problem(build_as("Llama", rope_parameters=YARN)) is None
    long = build_as("Phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64)
    before = tiny.texts(long, tiny.Sampler(0.0), 1)
    capture_problem(long)
    assert tiny.texts(long, tiny.Sampler(0.0), 1) == before


def test_hooks_that_copy_are_found() -> None:
    """Faults: layers spread over devices pass for capturable, or cannot be decoded eagerly."""
    hf = tiny.hf_model()
    add_hook_to_module(hf.model.layers[2], AlignDevicesHook(io_same_device=True))
    of = Target(hf, tiny.tokenizer(), tiny.source())
    assert of.trees and "device_map" in (capture_problem(of) or "")
    assert capture_problem(tiny.target("Bloom")) == "it decodes on transformers' own cache"


def test_longrope_ends_where_its_frequencies_change() -> None:
    """Fault: a block that crosses the boundary is verified with other frequencies."""
    of = build_as("Phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64)
    assert of.trees and of.max_positions == 64
    assert build_as("Llama", rope_parameters=YARN).max_positions == 512


# Memory


@pytest.mark.parametrize("family", ["Llama", "DeepseekV3", "GptOss", "Bloom"])
def test_cache_bytes(family: str) -> None:
    """Fault: an estimate that forgets layers, values, heads or the logits."""
    of = tiny.target(family)
    with torch.no_grad():
        cache = of.cache(3, 40)
        of(random_tokens(3, 40), chain_step(cache, 40))
    if isinstance(cache, Slab):
        stores = [*cache._keys.values(), *cache._values.values()]
    else:
        layers = [layer for row in cache.rows for layer in row._cache.layers]
        stores = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
    kept = sum(tensor.nbytes for tensor in stores)
    assert of.cache_bytes(3, 40, 7) == kept + 2 * 3 * 7 * tiny.VOCAB * 4


def test_a_batch_larger_than_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a stack trace, or the machine swapping, in the middle of a run."""
    of = tiny.target()
    monkeypatch.setattr(target_module, "free_bytes", lambda device: of.cache_bytes(5, 100, 8))
    of.cache(5, 100, 8)
    with pytest.raises(UserError, match="batch: 6 rows of 100 tokens .* use at most 5 rows") as e:
        of.cache(6, 100, 8)
    assert "\n" not in str(e.value)
    with pytest.raises(UserError, match="use shorter texts or a smaller target"):
        of.cache(1, 900, 8)
    monkeypatch.undo()
    assert target_module.free_bytes(of.device) > 1 << 20


# Views


def test_view_follows_the_bound() -> None:
    """Faults: a view that stays the whole capacity, that is too short, or that reads a length."""
    slab = Slab(2, 1000, torch.device("cpu"))
    slab.commit(torch.tensor([70, 3]))
    assert slab.view(5) == 128  # the lengths are read
    slab.bound = 128
    assert (slab.view(0), slab.view(1), slab.view(900 - 128)) == (128, 192, 960)
    slab.bound = 990
    assert slab.view(10) == 1000
    with pytest.raises(UserError, match="1001 positions needed, 1000 allocated"):
        slab.view(11)
    elsewhere = Slab(2, 1000, torch.device("meta"))  # a length there cannot be read
    assert elsewhere.view(5) == 1000
    elsewhere.bound = 70
    assert (elsewhere.view(5), elsewhere.view(187)) == (256, 512)


@torch.no_grad()
def test_bounded_views_change_nothing() -> None:
    """Fault: a bound counted without the step's own tokens cuts the newest keys off."""
    of, theirs = pair("Llama")
    text = random_tokens(130).tolist()
    slab = Slab(1, 200, of.device)
    for start in range(0, 130, 65):
        slab.bound = start
        final = of(torch.tensor([text[start : start + 65]]), chain_step(slab, 65)).final
        slab.commit(torch.tensor([65]))
    close(of.head(final[0]), plain(theirs, text)[65:])
