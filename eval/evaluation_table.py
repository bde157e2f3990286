"""An evaluation on the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from draftsmith.eval.acceptance.parity import Parity
from draftsmith.eval.evaluate import Evaluation
from draftsmith.eval.report.report import adapted, interval


def show(found: Evaluation) -> None:
    """Prints an evaluation: tables, speeds, and whether parity holds."""
    console = Console()
    decode = found.decode
    title = (
        f"{found.family} ({found.parameters:,} parameters) for {found.target['spec']}, "
        f"temperature {found.sampler.temperature}, {found.policy}, {found.prompts} prompts, "
        f"{decode.tokens} tokens"
    )
    table = Table(title=title, title_justify="left")
    for name in ("", "replay", "decode", "z"):
        table.add_column(name, justify="left" if not name else "right")
    for row in _rows(found):
        table.add_row(*row)
    console.print(table)
    if said := adapted(found.target):
        console.print(said)
    _print_domains(found, console)
    if found.replay and found.replay.tau_by_k:
        by_k = "  ".join(f"{k}: {_number(tau)}" for k, tau in found.replay.tau_by_k.items())
        console.print(f"tau by k (replay)  {by_k}")
    steady = decode.clock
    mark = " (busy)" if steady.busy else ""
    console.print(
        f"speed in {found.dtype}  {_number(decode.tokens_per_s, 2)} tokens/s against "
        f"{_number(decode.baseline_tokens_per_s, 2)}: {_number(decode.speedup, 2)}x "
        f"measured{mark}, {_number(found.predicted_speedup, 2)}x predicted{mark}; tau must "
        f"reach {_number(found.break_even_tau, 2)} to break even{mark}; a round is "
        f"{decode.draft_ms:.1f} ms draft, {decode.verify_ms:.1f} ms verify, "
        f"{decode.host_ms:.1f} ms host; a baseline step {decode.baseline_step_ms:.1f} ms, its "
        f"spread over {steady.turns} turns {_number(steady.baseline_spread, 2)}"
    )
    if steady.note:
        console.print(steady.note)
    if found.parity:
        _print_parity(found.parity, console)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _rows(found: Evaluation) -> Iterator[tuple[str, str, str, str]]:
    """tau, verify passes and alpha per depth: by replay, as counted, and the z of the difference.

    Drawn trees have no replay.
    """
    decode, replay, parity = found.decode, found.replay, found.parity
    depths = range(found.policy.k)
    pooled = replay.pooled if replay else None
    low, high = (pooled and pooled.tau_ci) or (None, None)
    tau = _number(pooled.tau if pooled else None)
    yield "tau", f"{tau} [{_number(low)}, {_number(high)}]", _number(decode.tau), ""
    expected = _number(parity.expected[0], 2) if parity else "-"
    zs = parity.z if parity else [None] * (1 + len(depths))
    yield "verify passes", expected, str(decode.passes), _number(zs[0], 2)
    for j in depths:
        alpha = _number(pooled.alpha[j] if pooled else None)
        yield f"alpha_{j}", alpha, _number(decode.alpha[j]), _number(zs[j + 1], 2)


def _print_parity(parity: Parity, console: Console) -> None:
    if parity.z_local is not None:
        console.print(f"z over single tries  {parity.z_local:.2f}")
    verdict = "holds" if parity.holds else "BROKEN"
    how = "integers equal" if parity.deterministic else "|z| < 3.5"
    console.print(f"parity {verdict} ({how}); {len(parity.ties)} fp32 ties")
    for split in parity.ties + parity.splits:
        console.print(f"  prompt {split.prompt}: split at anchor {split.anchor}, depth "
                      f"{split.depth}, top-2 gap {split.gap:.2g}")  # fmt: skip


def _print_domains(found: Evaluation, console: Console) -> None:
    """tau and alpha_0 by category of the prompts, texts that repeat themselves apart."""
    rows = dict(found.by_domain or {})
    if found.repetitive and found.repetitive["apart"].texts:
        rows["(repetitive texts)"] = found.repetitive["apart"]
        rows["(all others)"] = found.repetitive["others"]
    if len(rows) < 2:
        return
    table = Table()
    for name in ("replay by domain", "texts", "tau", "alpha_0"):
        table.add_column(name, justify="left" if name == "replay by domain" else "right")
    for name, row in rows.items():
        ends = f" {interval(row.tau_ci, 3)}" if row.tau_ci else ""
        table.add_row(name, str(row.texts), f"{_number(row.tau)}{ends}", _number(row.alpha[0]))
    console.print(table)
