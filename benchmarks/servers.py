r"""Real servers on SmolLM2: their own counters beside replay's, position by position.

    make servers
    python benchmarks/servers.py --eagle runs/smol-eagle3/best --small runs/smol-small/best

Each drafter is exported to a temporary folder, served in fp32 by vLLM and by llama-server, one
thread, and asked at temperatures 0 and 1; so is the server without a drafter. vLLM is asked again
with drafts drawn from q. Writes benchmarks/servers/*.json and benchmarks/servers.md; about 6
minutes a vLLM cell and 2 a llama.cpp one on 2 CPU cores. Tokens per second are those of a busy
client on a shared machine.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from common import HERE, cell, markdown, number

from draftsmith.drafters.target.target import Target
from draftsmith.eval.servers import llama_cpp
from draftsmith.eval.servers.serving import KINDS
from draftsmith.recipes.export import Export, export_checkpoint
from draftsmith.recipes.serve_check import ServeCheck, measure

K, TOKENS, PROMPTS, SEED = 4, 48, 8, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--eagle", type=Path, required=True)
    parser.add_argument("--small", type=Path, required=True)
    parser.add_argument("--only", default="", help="e.g. eagle-vllm: one cell")
    arguments = parser.parse_args()
    rows, commands = [], []
    cells = [(server, name, "greedy") for server in KINDS for name in ("eagle", "small")]
    cells += [("vllm", name, "sampled") for name in ("eagle", "small")]
    for server, name, drafts in cells:
        label = f"{name}-{server}" + ("-sampled" if drafts == "sampled" else "")
        place = HERE / "servers" / f"{label}.json"
        if arguments.only not in ("", label) and not place.is_file():
            continue
        how = (getattr(arguments, name), server, drafts)
        found = cell(place, partial(served, *how), SEED)
        hot = [e for e in found["temperatures"] if e["temperature"] > 0 or drafts == "greedy"]
        rows += [row for entry in hot for row in lines(found, name, entry)]
        patch = ", patched by tests/support/servers.sh" if found["server"].get("patched") else ""
        said = found["server"]
        commands.append(f"{said['kind']} {said['version']}{patch}, {name}, {drafts} drafts:")
        commands += ["", f"    {said['command']}", ""]
    head = [
        "server", "drafter", "T", "drafts", "position", "drafted (server)", "drafted (replay)",
        "accepted (server)", "accepted (replay)", "past the end", "equal, or z", "tau",
        "T=0 texts equal",
    ]  # fmt: skip
    text = (
        "# Real servers' counters beside replay\n\n"
        f"SmolLM2-135M-Instruct, fp32, {PROMPTS} held-out prompts, {TOKENS} tokens each, k={K}. "
        "Replay takes the server's own token ids. Greedy drafts: both must agree as integers, "
        "answer by answer. Sampled ones (drawn from q): z of the count, less than 3.5 either way. "
        "Past the end: drafts of a request's last, cut round that the server accepted but that "
        "stand in no text (counted by the server alone; llama.cpp cuts no round). One JSON a "
        "row group in `benchmarks/servers/` (their tokens/s were taken beside other jobs); made "
        "by `benchmarks/servers.py`.\n\n"
    )
    written = text + markdown(head, rows) + "\nCommands:\n\n" + "\n".join(commands).rstrip() + "\n"
    (HERE / "servers.md").write_text(written)
    print(written)


def served(checkpoint: Path, server: str, drafts: str) -> dict[str, Any]:
    """One drafter on one server."""
    with tempfile.TemporaryDirectory() as folder:
        export = Path(folder) / "export"
        gguf = None
        if server == "llama.cpp":
            gguf = llama_cpp.target_gguf(Target.load("smollm2").source)
        export_checkpoint(Export(checkpoint, server, export, k=K, target_gguf=gguf))
        found = measure(
            ServeCheck(
                export,
                server,
                checkpoint=checkpoint,
                limit=PROMPTS,
                k=K,
                drafts=drafts,
                max_new_tokens=TOKENS,
                seed=SEED,
            )
        )
        found["server"]["command"] = found["server"]["command"].replace(folder, "TMP")
    return found | {"export": f"TMP/export (--to {server})"}


def lines(found: dict[str, Any], name: str, entry: dict[str, Any]) -> list[list[object]]:
    """A temperature's rows: all rounds, then position by position."""
    counted, expected, texts = entry["counted"], entry["expected"], entry["texts"]
    same = "-" if texts is None else f"{texts['equal']}/{entry['answers']}"
    drafts = entry.get("drafts", "greedy")  # cells of old have no other
    about = [found["server"]["kind"], name, f"{entry['temperature']:g}", drafts]
    sampled = drafts == "sampled"

    def mean(value: float) -> str:
        return number(value, 1 if sampled else 0)

    past = entry["past_end"] if sampled else sum(entry["cut_accepted"])
    agrees = "yes" if entry["holds"] else "NO"
    rows: list[list[object]] = [
        [
            *about, f"all ({counted['drafts']} rounds)", counted["drafted"],
            mean(expected["drafted"]), sum(counted["accepted"]), mean(sum(expected["accepted"])),
            past, f"{agrees}, z of rounds {number(entry['z'][0], 2)}" if sampled else agrees,
            number(entry["tau"]), same,
        ]
    ]  # fmt: skip
    for j in range(found["k"]):
        accepted, wanted = counted["accepted"][j], expected["accepted"][j]
        if sampled:
            tried, past, equal = "", "", number(entry["z"][j + 1], 2)
        else:
            tried, past = entry["tried"][j], entry["cut_accepted"][j]
            equal = "yes" if accepted == wanted + past else "NO"
        rows.append([*about, j, "", tried, accepted, mean(wanted), past, equal, "", ""])
    return rows


if __name__ == "__main__":
    main()
