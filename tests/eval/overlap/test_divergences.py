"""The passes over the vocabulary in blocks and compiled, against the same functions as written.

What they compute is checked in test_row_stats.py; here, that no way of running them changes it.

.venv/bin/pytest tests/eval/overlap/test_divergences.py --slow
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.vocab import VocabMap
from draftsmith.eval.overlap import divergences
from draftsmith.eval.overlap.divergences import DIVERGENCES, RowWise
from draftsmith.eval.overlap.row_stats import row_stats

V = 96
FULL, REDUCED = VocabMap(V), VocabMap(V, torch.arange(0, V, 3))
SAMPLERS = [Sampler(), Sampler(0.7, top_k=20, top_p=0.9), Sampler(0.0)]
FUNCTIONS = ("measure", "slope", "law_of_kept")


def found(
    rows: int, vocab: VocabMap, sampler: Sampler, device: str = "cpu", dtype: Any = torch.float32
) -> list[Tensor]:
    """Every scalar of `rows` rows that share positions, and the gradient of their weighted sum."""
    generator = torch.Generator().manual_seed(rows)
    final = 2 * torch.randn(max(rows // 2, 1), V, generator=generator)
    which = torch.arange(rows) // 2 % len(final)
    near = vocab.kept(final)[which] + torch.randn(rows, vocab.draft_size, generator=generator)
    logits = near.to(device, dtype).requires_grad_()
    token = torch.randint(0, V, (rows,), generator=generator)
    target: Any = SimpleNamespace(head=lambda x: x.clone())
    vocab = vocab.to(torch.device(device))
    stats = row_stats(
        target, final.to(device), logits, token.to(device), vocab, sampler, which.to(device),
        DIVERGENCES,
    )  # fmt: skip
    scalars = [stats.alpha, stats.logq.clamp(min=-50), *stats.divergence.values()]
    weights = torch.linspace(0.5, 2, len(scalars) * rows, device=device).view(-1, rows)
    (torch.stack(scalars) * weights).sum().backward()
    assert logits.grad is not None
    return [stats.logp, stats.gap, *(s.detach() for s in scalars), logits.grad]


def same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.fixture
def afresh(monkeypatch: pytest.MonkeyPatch) -> dict[str, RowWise]:
    """The functions of divergences.py as if nothing had run, by name."""
    made = {name: RowWise(getattr(divergences, name).function) for name in FUNCTIONS}
    for name, function in made.items():
        monkeypatch.setattr(divergences, name, function)
        if name != "law_of_kept":
            monkeypatch.setattr(f"draftsmith.eval.overlap.row_stats.{name}", function)
    return made


@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
@pytest.mark.parametrize("vocab", [FULL, REDUCED], ids=["full", "reduced"])
def test_blocks_change_nothing(
    sampler: Sampler, vocab: VocabMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row at a time, and blocks that do not divide the rows."""
    whole = found(23, vocab, sampler)
    for rows in (1, 5):
        monkeypatch.setattr(divergences, "BLOCK", rows * vocab.draft_size)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        same(found(23, vocab, sampler), whole)


def test_rows_that_are_not_their_own_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a block's rows read the first block's positions."""
    plain = divergences.measure.function
    whole = found(23, FULL, Sampler())
    monkeypatch.setattr(divergences, "BLOCK", 5 * V // torch.get_num_threads())
    fault = RowWise(lambda rows, *rest: plain((rows[0], rows[1] * 0, rows[2]), *rest))
    monkeypatch.setattr("draftsmith.eval.overlap.row_stats.measure", fault)
    with pytest.raises(AssertionError):
        same(found(23, FULL, Sampler()), whole)


def check_compiled(made: dict[str, RowWise], sampler: Sampler, device: str) -> None:
    """Chunks of several sizes and both vocabularies: as written, by one compilation and at most two
    more of each function."""
    from torch._dynamo import config
    from torch._inductor import config as inductor

    cases = [(rows, vocab) for vocab in (FULL, REDUCED) for rows in (24, 17, 40)]
    written = [found(*case, sampler, device) for case in cases]
    assert all(function.fused is None for function in made.values())
    with (
        pytest.MonkeyPatch.context() as patch,
        config.patch(recompile_limit=3, fail_on_recompile_limit_hit=True),
        # Plain loops: finding out what vectors this CPU has compiles programs of its own.
        inductor.patch({"cpp.vec_isa_ok": True, "cpp.simdlen": 1}),
    ):
        patch.setattr(divergences, "COMPILED", (device,))
        torch.compiler.reset()
        for case, wanted in zip(cases, written, strict=True):
            same(found(*case, sampler, device), wanted)
    assert all(function.fused and not function.failed for function in made.values())


@pytest.mark.slow
@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_compiled_is_as_written(sampler: Sampler, afresh: dict[str, RowWise]) -> None:
    check_compiled(afresh, sampler, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("sampler", SAMPLERS, ids=str)
def test_compiled_is_as_written_on_a_gpu(
    sampler: Sampler, afresh: dict[str, RowWise], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergences, "COMPILED", ())
    check_compiled(afresh, sampler, "cuda")


def test_a_failed_compilation_is_told_once(
    afresh: dict[str, RowWise], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each function says so in one line, and goes on as it is written; other errors stay errors."""
    from torch._dynamo.exc import TorchDynamoException

    wanted = found(9, FULL, Sampler())
    raised: list[Exception] = [TorchDynamoException("no compiler\nand a long story")]

    def compile(function: Any, **options: Any) -> Any:
        def broken(*args: Any) -> Any:
            raise raised[0]

        return broken

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(divergences, "COMPILED", ("cpu",))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            same(found(9, FULL, Sampler()), wanted)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(FUNCTIONS)
    assert all("not compiled, goes on eagerly (no compiler)" in line for line in lines)
    for function in afresh.values():
        function.failed = False
    raised[0] = torch.OutOfMemoryError("out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        found(9, FULL, Sampler())
