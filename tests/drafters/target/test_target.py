"""The frozen target against plain transformers: features, head, and every way of reading tokens.

The `check_*` functions are what test_faults.py turns against planted faults. `theirs` is
always a second model of equal weights that draftsmith never touched, with eager attention.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

import targets
import tiny
from draftsmith.drafters.batch import batch_of
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.passes import narrow
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.small import Small, SmallConfig
from draftsmith.drafters.target import attention, selftest
from draftsmith.drafters.target.attention import chain_step, packed_step, tree_shape
from draftsmith.drafters.target.causal_lm import CausalLM
from draftsmith.drafters.target.slab import Slab
from draftsmith.drafters.target.target import Target
from targets import (
    PARENTS,
    L,
    check_features,
    check_head,
    check_slab,
    close,
    pair,
    path_to,
    plain,
    prove,
    random_tokens,
)

every = pytest.mark.parametrize("family", tiny.SETTINGS)
DISTINCT = (*tiny.FAMILIES, "Gemma2", "GptOss", "DeepseekV3", "Llama4", "GPTNeoX")


@torch.no_grad()
def check_packed(of: Target, theirs: Any) -> None:
    """Samples of 12, 3 and 10 tokens packed in one row are read as if each were alone."""
    texts = [random_tokens(n, seed=n).tolist() for n in (12, 3, 10)]
    position = torch.tensor([[t for text in texts for t in range(len(text))]])
    segment = torch.tensor([[i for i, text in enumerate(texts) for _ in text]])
    tokens = torch.tensor([sum(texts, [])])
    ours = of.head(of(tokens, packed_step(position, segment)).final[0])
    close(ours, torch.cat([plain(theirs, text) for text in texts]))


@every
def test_features_are_hidden_states(family: str) -> None:
    """Faults: the wrong layer, the last one after its norm, a hook on the wrong module."""
    check_features(*pair(family))


@every
def test_head_gives_the_logits(family: str) -> None:
    """Faults: final norm, logit scale or softcap left out."""
    check_head(*pair(family))


@every
def test_packed_samples(family: str) -> None:
    """Faults: attention across samples, positions that run on, windows over slots."""
    check_packed(*pair(family))


@every
def test_slab_equals_plain_forwards(family: str) -> None:
    """Faults: stale slots, padding seen, a window cut by slot, a sibling or a wrong depth seen."""
    check_slab(*pair(family))


@torch.no_grad()
def test_softcap_and_windows_matter() -> None:
    """Fault: tests that pass because the tiny models never reach their caps and windows."""
    of, _ = pair("Gemma3 mixed")
    position = torch.arange(14).unsqueeze(0)
    final = of(random_tokens(1, 14), packed_step(position, position * 0)).final
    assert of.lm_head(of.norm(final)).abs().max() > 3 > of.head(final).abs().max()
    text = random_tokens(40).tolist()
    other = [(text[0] + 1) % tiny.VOCAB, *text[1:]]
    for family in ("Gemma3", "Mistral"):
        hf = pair(family)[1]
        change = (plain(hf, text) - plain(hf, other)).abs().amax(1)
        assert change[7] > 0.1 and change[L * 7 + 1 :].max() == 0  # how far four windows reach


def test_tree_shape() -> None:
    """Faults: depth from the wrong end; a grandparent lost in the squaring."""
    depth, ancestors = tree_shape(torch.tensor(PARENTS))
    for b, parents in enumerate(PARENTS):
        for node in range(7):
            path = path_to(parents, node)
            assert depth[b, node] == len(path) - 1
            assert ancestors[b, node].nonzero().flatten().tolist() == path
    long = torch.arange(-1, 32).unsqueeze(0)
    assert tree_shape(long)[0].equal(torch.arange(33).unsqueeze(0))


def test_slab_refuses_what_does_not_fit() -> None:
    """Fault: tokens past the capacity overwrite the last slot and nobody is told."""
    of = tiny.target()
    with pytest.raises(UserError, match="cache: 9 positions needed, 8 allocated"):
        of(random_tokens(1, 9), chain_step(Slab(1, 8, of.device), 9))


# The self-test


def without_norm(self: CausalLM, final: Tensor) -> Tensor:
    return self.lm_head(final)


@contextmanager
def registered(mask: Callable | None = None, attend: Callable | None = None) -> Iterator[None]:
    """Other functions under draftsmith's name, as long as it lasts."""
    AttentionMaskInterface.register(attention.NAME, mask or attention._mask)
    AttentionInterface.register(attention.NAME, attend or attention._attention)
    try:
        yield
    finally:
        AttentionMaskInterface.register(attention.NAME, attention._mask)
        AttentionInterface.register(attention.NAME, attention._attention)


def without_window(*args: Any, mask_function: Callable, **kwargs: Any) -> Tensor:
    return attention._mask(*args, mask_function=lambda b, h, q, kv: kv <= q, **kwargs)


def sees_next(*args: Any, mask_function: Callable, **kwargs: Any) -> Tensor:
    return attention._mask(*args, mask_function=lambda b, h, q, kv: kv <= q + 1, **kwargs)


def scaled(*args: Any, scaling: float | None = None, **kwargs: Any) -> Any:
    return attention._attention(*args, scaling=1.1 * (scaling or 8**-0.5), **kwargs)


def regrouped(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    return attention._attention(module, query.roll(1, dims=1), *args, **kwargs)


@every
def test_self_test_passes_as_loaded(family: str) -> None:
    """Fault: a family that trees can serve is refused, because of what it is compared with."""
    assert Target(tiny.hf_model(family), tiny.tokenizer(), tiny.source()).trees


@pytest.mark.parametrize("family", DISTINCT)
def test_self_test_needs_the_final_norm(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a self-test that is blind to the norm that users forget most."""
    monkeypatch.setattr(CausalLM, "head", without_norm)
    with pytest.raises(UserError, match="logits through draftsmith.* differ"):
        prove(family)


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        *((family, {"mask": sees_next}) for family in DISTINCT),
        *((family, {"attend": scaled}) for family in DISTINCT),
        *((family, {"attend": regrouped}) for family in DISTINCT),
        *((family, {"mask": without_window}) for family in ("Gemma3", "Mistral", "GptOss")),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value.values())).__name__,
)
def test_self_test_needs_mask_and_scaling(family: str, fault: dict[str, Callable]) -> None:
    """Fault: a self-test too weak, or too short, to see attention that is a little wrong."""
    with registered(**fault):
        assert not prove(family).trees


def nan_at(patch: pytest.MonkeyPatch, *calls: int) -> None:
    """The logits that are asked for as the n-th are NaN."""

    def wrong(self: CausalLM, final: Tensor) -> Tensor:
        return head(self, final) * (math.nan if next(count) in calls else 1.0)

    head, count = CausalLM.head, itertools.count()
    patch.setattr(CausalLM, "head", wrong)


def test_self_test_sees_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: NaN in any way of reading but the first, which Python's `max` passes over."""
    for way in (1, 2, 3):
        with monkeypatch.context() as patch:
            nan_at(patch, way)
            assert not prove("Llama").trees
    nan_at(monkeypatch, 3, 6)  # the slab's last, and the third step of the chains
    with pytest.raises(UserError, match="by nan .* is not supported"):
        prove("Llama")


# Planted faults of the tree and the slab: red in `check_slab`, and the self-test sees them too


def by_slot(patch: pytest.MonkeyPatch) -> None:
    """Windows and chunks count slots, so that siblings push a node's past out of sight."""

    def wrong(slab: Slab, depth: Tensor, ancestors: Tensor) -> attention.Step:
        step = attention.tree_step(slab, depth, ancestors)
        step.key_positions = torch.arange(step.view).expand_as(step.key_positions)
        return step

    for module in (targets, selftest):
        patch.setattr(module, "tree_step", wrong)


def ancestors_dropped(patch: pytest.MonkeyPatch) -> None:
    """A node sees all nodes before it, as in a chain, at its own depth."""

    def wrong(parents: Tensor) -> tuple[Tensor, Tensor]:
        depth, ancestors = shape(parents)
        return depth, torch.ones_like(ancestors).tril()

    shape = attention.tree_shape
    for module in (targets, selftest):
        patch.setattr(module, "tree_shape", wrong)


def parents_only(patch: pytest.MonkeyPatch) -> None:
    """A node sees itself and its parent, and no one above."""

    def wrong(parents: Tensor) -> tuple[Tensor, Tensor]:
        nodes = torch.arange(parents.shape[1])
        reach = (nodes == parents.unsqueeze(2)) | (nodes == nodes.unsqueeze(1))
        return shape(parents)[0], reach

    shape = attention.tree_shape
    for module in (targets, selftest):
        patch.setattr(module, "tree_shape", wrong)


def gather_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Slab, "gather", lambda self, start, path: None)


def values_left_behind(patch: pytest.MonkeyPatch) -> None:
    """Only keys are moved: in MLA, values are of another width."""

    def wrong(self: Slab, start: Tensor, path: Tensor) -> None:
        kept, self._values = self._values, {}
        gather(self, start, path)
        self._values = kept

    gather = Slab.gather
    patch.setattr(Slab, "gather", wrong)


def values_as_wide_as_keys(patch: pytest.MonkeyPatch) -> None:
    """Values are stored in the keys' width and cut: MLA's last value columns are lost."""

    def wrong(self: Slab, layer: int, key: Tensor, value: Tensor, *where: Any) -> Any:
        return write(self, layer, key, value * (torch.arange(value.shape[3]) < 4), *where)

    write = Slab.write
    patch.setattr(Slab, "write", wrong)
    patch.setattr(narrow, "_on", False)  # the kernel writes by itself, and is proven by itself


def scale_from_zero(patch: pytest.MonkeyPatch) -> None:
    """Llama-4's query scale counts from the start of the step."""
    patch.setattr(attention, "_tempered", lambda query, module, positions: query)


def window_ignored(patch: pytest.MonkeyPatch) -> None:
    def unlimited(*args: Any, mask_function: Callable, **kwargs: Any) -> Tensor:
        return mask(*args, mask_function=lambda b, h, q, kv: kv <= q, **kwargs)

    mask = attention._mask
    AttentionMaskInterface.register(attention.NAME, unlimited)


FAULTS = [
    *((by_slot, family) for family in ("Mistral", "Gemma3", "GptOss", "Llama4")),
    *((window_ignored, family) for family in ("Mistral", "Gemma2", "GptOss", "Llama4")),
    *((ancestors_dropped, family) for family in ("Llama", "Gemma2", "GptOss", "DeepseekV3")),
    *((parents_only, family) for family in ("Llama", "DeepseekV3")),
    *((gather_forgotten, family) for family in ("Llama", "Mistral", "DeepseekV3")),
    *((values_left_behind, family) for family in ("Llama", "DeepseekV3")),
    (values_as_wide_as_keys, "DeepseekV3"),
    (scale_from_zero, "Llama4"),
]


@pytest.mark.parametrize(("fault", "family"), FAULTS, ids=lambda x: getattr(x, "__name__", x))
def test_slab_faults_show(fault: Callable, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each planted fault shows in the slab's check, and makes the self-test give up trees."""
    built = pair(family)
    with registered():  # puts our own mask back at the end
        fault(monkeypatch)
        with pytest.raises(AssertionError):
            check_slab(*built)
        assert not prove(family).trees


# Loading


def folder_of(folder: Path, family: str = "Llama", eos: int | list[int] | None = tiny.EOS) -> str:
    hf = tiny.hf_model(family)
    hf.generation_config.eos_token_id = eos
    hf.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_load_reads_a_folder(family: str, tmp_path: Path) -> None:
    """Faults: half precision on the CPU, dropout or gradients on, an identity that says nothing."""
    of = Target.load(folder_of(tmp_path, family))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    check_head(of, theirs)
    assert (of.dtype, of.training, of.num_layers) == (torch.float32, False, L)
    assert not any(p.requires_grad for p in of.parameters())
    about = of.identity()
    assert (about["vocab_size"], about["hidden_size"], about["num_layers"]) == (tiny.VOCAB, 32, L)
    assert about["tokenizer_hash"] == tiny.target().identity()["tokenizer_hash"]
    assert about["spec"] == str(tmp_path) and len(about["revision"]) == 64
    assert of.max_positions == 512


@pytest.mark.parametrize(("eos", "ids"), [(1, [1]), ([1, 5], [1, 5]), (None, [1])])
def test_eos_ids(eos: Any, ids: list[int], tmp_path: Path) -> None:
    """Fault: a chat model's second end token is lost, and texts run on past it."""
    folder = folder_of(tmp_path, eos=eos)
    assert Target.load(folder).eos_ids == ids


def test_reading_a_batch_keeps_no_graph() -> None:
    """Fault: memory that grows with every batch."""
    of = tiny.target()
    text = tiny.texts(of, Sampler(), count=1, tokens=6)[0]
    made = [False] * len(text.prompt) + [True] * len(text.tokens)
    batch = batch_of([(text.prompt + text.tokens, made)], Sampler())
    of.read(batch, [1, "normed"])
    assert batch.final is not None and batch.features.keys() == {"1", "normed"}
    assert not any(t.requires_grad for t in (batch.final, *batch.features.values()))


def test_load_refuses(tmp_path: Path) -> None:
    """Fault: a stack trace for a folder that is no model, or one without its tokenizer."""
    folder = Path(folder_of(tmp_path / "model"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    about = json.loads((folder / "config.json").read_text())
    with pytest.raises(UserError) as caught:
        Target.load(str(folder))
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    tiny.tokenizer().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(about | {"model_type": "nonesuch"}))
    with pytest.raises(UserError, match="transformers cannot load it") as caught:
        Target.load(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [ImportError("needs a\npackage"), ValueError()], ids=repr)
def test_what_transformers_cannot_load_is_one_line(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults: a trace where quantised weights need a package, or where an error has no words."""

    def fails(*args: Any, **kwargs: Any) -> None:
        raise error

    folder = folder_of(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fails)
    for load in (
        lambda: Target.load(folder),
        lambda: Small(tiny.target(), SmallConfig(checkpoint=folder)),
    ):
        with pytest.raises(UserError, match=f"transformers.*{type(error).__name__}") as caught:
            load()
        assert folder in str(caught.value) and "\n" not in str(caught.value)
