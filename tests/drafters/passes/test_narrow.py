"""Kernels for few rows: exact in every shape, gradients untouched, refused where wrong."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiny
from draftsmith.drafters.passes import build, narrow
from draftsmith.drafters.target import selftest
from draftsmith.drafters.target.slab import Slab
from draftsmith.drafters.target.target import Target

needs_kernels = pytest.mark.skipif(bool(narrow.problem()), reason="no C++ compiler")


def layer(inputs: int, outputs: int, bias: bool = True) -> nn.Linear:
    torch.manual_seed(inputs)
    out = nn.Linear(inputs, outputs, bias=bias)
    narrow.prepare(out)
    return out


def true(linear: nn.Linear, x: Tensor) -> Tensor:
    bias = None if linear.bias is None else linear.bias.double()
    return F.linear(x.double(), linear.weight.double(), bias)


@needs_kernels
@pytest.mark.parametrize("inputs, outputs", [(1, 1), (7, 5), (16, 64), (83, 37), (576, 192)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_is_exact_at_every_number_of_rows(inputs, outputs, bias):
    linear = layer(inputs, outputs, bias)
    assert type(linear) is narrow.NarrowLinear
    for rows in range(18):
        x = torch.randn(rows, inputs)
        with torch.inference_mode(), narrow.decoding():
            torch.testing.assert_close(linear(x).double(), true(linear, x), atol=1e-5, rtol=1e-5)


@needs_kernels
def test_leading_dimensions_and_strides_do_not_matter():
    linear = layer(83, 37)
    x = torch.randn(83, 3, 4).permute(2, 1, 0)  # (4, 3, 83), entries far apart
    with torch.no_grad(), narrow.decoding():
        assert linear(x).shape == (4, 3, 37)
        torch.testing.assert_close(linear(x).double(), true(linear, x), atol=1e-5, rtol=1e-5)
        half = copy.deepcopy(linear).to(torch.bfloat16)
        assert torch.equal(half(x.bfloat16()), F.linear(x.bfloat16(), half.weight, half.bias))


@pytest.mark.parametrize("kind", [narrow.NarrowLinear, narrow.LeftLinear])
def test_with_gradients_a_layer_computes_what_torch_does(kind):
    plain, x = nn.Linear(83, 37), torch.randn(3, 83)
    ours = copy.deepcopy(plain)
    ours.__class__ = kind
    for linear in (plain, ours):
        linear(x).square().sum().backward()
    assert torch.equal(ours(x), plain(x))
    assert torch.equal(ours.weight.grad, plain.weight.grad)


@needs_kernels
def test_nothing_but_decoding_takes_the_kernel():
    """A target's states for training do not depend on what was decoded before."""
    plain, x = nn.Linear(576, 192), torch.randn(3, 576)
    ours = copy.deepcopy(plain)
    narrow.prepare(ours)
    with torch.inference_mode():
        assert torch.equal(ours(x), plain(x))
        with narrow.decoding():
            assert not torch.equal(ours(x), plain(x)), "it adds in another order"
            assert narrow.attends(torch.randn(1, 4, 3, 8))
        assert not narrow.attends(torch.randn(1, 4, 3, 8)), "nor does attention over a slab"


def test_weights_on_the_left_give_the_same(monkeypatch):
    monkeypatch.setattr(narrow, "problem", lambda: "planted")
    for inputs, outputs in ((83, 37), (64, 256)):
        linear = layer(inputs, outputs)
        assert type(linear) is narrow.LeftLinear
        for rows in range(1, 18):
            monkeypatch.setattr(narrow, "_turned", {(linear.weight.shape, rows)})
            x = torch.randn(1, rows, inputs)
            with torch.inference_mode(), narrow.decoding():
                torch.testing.assert_close(
                    linear(x).double(), true(linear, x), atol=1e-5, rtol=1e-5
                )


def test_a_measurement_settles_every_number_of_rows_of_a_shape(monkeypatch):
    monkeypatch.setattr(narrow, "problem", lambda: "planted")
    monkeypatch.setattr(narrow, "_measured", set())
    monkeypatch.setattr(narrow, "_turned", turned := set())
    monkeypatch.setattr(narrow, "left", lambda *given: None)  # takes no time
    layer(300, 400)
    assert turned == {(torch.Size([400, 300]), rows) for rows in range(1, narrow.WIDEST + 1)}


def test_a_kernel_that_drops_the_tail_is_refused():
    def tailless(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        whole = x.shape[1] // 16 * 16
        return F.linear(x[:, :whole], weight[:, :whole], bias)

    assert "wrong" in narrow.wrong(tailless)
    assert not narrow.wrong(F.linear)


@needs_kernels
def test_attention_that_leaves_something_out_is_refused():
    assert not narrow.wrong_attention(narrow.attend)

    def without(place: int, value: Any) -> Any:
        def attend(*given: Any) -> Tensor:
            return narrow.attend(*given[:place], value, *given[place + 1 :])

        return attend

    assert "wrong" in narrow.wrong_attention(without(8, 0.0))  # the softcap
    assert "wrong" in narrow.wrong_attention(without(9, None))  # sinks
    seen = torch.zeros(2, 1, 5, 43)
    assert "wrong" in narrow.wrong_attention(without(6, seen))  # the mask


@needs_kernels
@pytest.mark.parametrize(
    "family", ["Llama", "Mistral", "Qwen3", "Gemma2", "GptOss", "Qwen3Moe", "DeepseekV3", "Llama4"]
)
def test_families_keep_their_logits(family, monkeypatch):
    """Prefill, a tree, its path made a chain, one more: against transformers' eager forward."""
    hf = tiny.hf_model(family)
    reference = selftest.probe_logits(hf)
    target = Target(hf, tiny.tokenizer(), tiny.source())
    narrow.prepare(target)
    attended = 0
    plain = narrow.attend

    def counting(*given: Any) -> Tensor:
        nonlocal attended
        attended += 1
        return plain(*given)

    monkeypatch.setattr(narrow, "attend", counting)
    with torch.inference_mode(), narrow.decoding():
        gap = selftest.slab_gap(target, reference, Slab(1, selftest.ROOM, target.device))
    assert gap < 1e-4 * reference.abs().max()
    assert attended == 3 * target.num_layers


# ---------------------------------------------------------------- built or not


@needs_kernels
def test_a_library_that_was_built_is_found_again(monkeypatch):
    library = build._library()
    monkeypatch.setattr(build, "_build", lambda *given: pytest.fail("built again"))
    assert build._library() == library


def test_without_a_compiler_the_reason_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.NoKernels, match="no C\\+\\+ compiler .*no-such-compiler"):
        build._library()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(build.NoKernels, match="false: exit code 1"):
        build._library()
    assert not list(tmp_path.glob("**/*.so"))


def test_a_broken_source_is_told_in_one_line(monkeypatch, tmp_path):
    source = Path(tmp_path / "broken.cpp")
    source.write_text("int broken(\n")
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "SOURCE", source)
    with pytest.raises(build.NoKernels) as found:
        build._library()
    assert "\n" not in str(found.value)


def test_one_line_says_that_there_are_none(monkeypatch, caplog):
    monkeypatch.setattr(build, "load", lambda: "no C++ compiler")
    monkeypatch.setattr(narrow, "_on", False)
    with caplog.at_level(logging.WARNING):
        assert narrow.problem.__wrapped__() == "no C++ compiler"
    assert [r.getMessage() for r in caplog.records] == [
        "no CPU kernels: no C++ compiler; linear layers of few rows take the faster of torch's own"
    ]
    assert not narrow.attends(torch.zeros(1, 1, 1, 8))
