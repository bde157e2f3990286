"""draftsmith export CHECKPOINT --to SERVER: a folder that the server loads, read back and carded.

It is written beside its place and renamed, so that an export which fails or is killed leaves no
folder of its name.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml
from safetensors import SafetensorError

from draftsmith.drafters import export, foreign, storage
from draftsmith.drafters.base import Drafter, Unroll
from draftsmith.drafters.batch import Batch, align, batch_of
from draftsmith.drafters.errors import UserError, cannot_write
from draftsmith.drafters.export import Serving
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.source import gguf_file
from draftsmith.drafters.target.target import Target
from draftsmith.recipes import card
from draftsmith.recipes.card import ReadBack
from draftsmith.recipes.options import OwnTarget
from draftsmith.train.data.chat_template import encode
from draftsmith.train.data.prompts import product_prompts

commands = typer.Typer()

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Largest difference of draft logits that rounding the weights may make, in standard deviations of
# them. A wrong layer, norm or order of rows makes one of the size of the logits themselves.
ROUNDING = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.2}
K = 3  # of a drafter without a run
DEPTHS, ROWS = 3, 64  # of the draft, and tokens of text, that are read back


@commands.command(
    "export",
    epilog="Example: draftsmith export runs/smol-eagle3/best --to vllm --output exports/smol-vllm; "
    "for llama.cpp: draftsmith export runs/smol-eagle3/best --to llama.cpp",
)
@dataclass(frozen=True)
class Export:
    """Writes a drafter as a server loads it, reads it back, and says how to serve it."""

    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder.")]
    to: Annotated[str, typer.Option(help="vllm, sglang, tensorrt-llm, llama.cpp or transformers.")]
    output: Annotated[
        Path | None, typer.Option(help="Folder to make; default: exports/RUN-SERVER.")
    ] = None
    target: OwnTarget = None
    k: Annotated[int | None, typer.Option(min=1, help="Draft length; default: the run's.")] = None
    length: Annotated[
        int | None, typer.Option(help="Longest text to serve; default: the target's positions.")
    ] = None
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32"
    target_gguf: Annotated[
        Path | None, typer.Option(help="llama.cpp: the target's GGUF, whose tokenizer is copied.")
    ] = None
    plain: Annotated[
        bool, typer.Option("--plain", help="vllm: EAGLE-3 in its original layout.")
    ] = False

    def __call__(self) -> None:
        """Writes the export and prints how to serve it."""
        folder, command = export_checkpoint(self)
        print(f"written and read back: {folder} (card: README.md, card.json)")
        print(f"serve it with:\n{command}")


def export_checkpoint(asked: Export) -> tuple[Path, str]:
    """Writes the export; returns its folder and the command to serve it.

    k and length stand in the run and the checkpoint, where they are not asked for; a target that is
    a GGUF file is its own target_gguf. Raises UserError, before the target is loaded where that can
    be told.
    """
    place, about = _checkpoint(asked.checkpoint)
    if asked.dtype not in DTYPES:
        raise UserError(f"--dtype: no {asked.dtype!r}; known are {', '.join(DTYPES)}")
    if asked.plain and (asked.to, about["family"]) != ("vllm", "eagle"):
        raise UserError("--plain: is a layout of EAGLE-3 for vllm; leave it out")
    k = asked.k or _recipe(place).get("k", K)
    export.check_family(asked.to, about["family"], k)
    folder = asked.output or Path("exports") / f"{_name(place)}-{asked.to}"
    if folder.exists():
        raise UserError(f"{folder}: is there already; give another --output, or remove it")
    spec = asked.target or about["target"]["spec"]
    target = Target.load(spec, dtype=torch.float32)  # weights are stored in fp32
    drafter = storage.load(place, target)
    serving = Serving(
        target.source.path,
        k,
        asked.length or target.max_positions,
        DTYPES[asked.dtype],
        asked.target_gguf or gguf_file(spec),
        asked.plain,
        _sampler(place),
    )
    export.check(asked.to, drafter, serving)
    scratch = folder.with_name(f".{folder.name}.writing")
    try:
        shutil.rmtree(scratch, ignore_errors=True)  # of an export that was killed
        scratch.mkdir(parents=True)
        export.write(asked.to, drafter, scratch, serving)
        read_back = _read_back(target, drafter, scratch, asked.dtype)
        written = card.card(asked.to, drafter, place, folder, serving, read_back)
        card.write(scratch, written)
        os.replace(scratch, folder)
    except (OSError, SafetensorError) as error:
        raise cannot_write(folder, error, "make room, or give another --output") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder, written["serving"]["command"]


def _checkpoint(place: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint's folder and config. Raises UserError for a run's folder, or half of one."""
    if (place / "recipe.yaml").is_file():
        raise UserError(f"{place}: is a run; give one of its checkpoints, e.g. {place / 'best'}")
    about = storage.read_config(place)
    unfinished = place.resolve().name.startswith(".writing")
    if unfinished or not (place / "model.safetensors").is_file():
        raise UserError(f"{place}: is no finished checkpoint; give one that is, e.g. RUN/best")
    return place, about


def _recipe(place: Path) -> dict[str, Any]:
    path = place.resolve().parent / "recipe.yaml"
    return yaml.safe_load(path.read_text()) if path.is_file() else {}


def _sampler(place: Path) -> Sampler | None:
    """The sampler that the run's drafter was trained for; None without a run."""
    told = _recipe(place)
    if "temperature" not in told:
        return None
    return Sampler(told["temperature"], told.get("top_k", 0), told.get("top_p", 1.0))


def _name(place: Path) -> str:
    """The run's name, else the folder's own."""
    real = place.resolve()
    return real.parent.name if (real.parent / "recipe.yaml").is_file() else real.name


@torch.no_grad()
def _read_back(target: Target, drafter: Drafter, folder: Path, dtype: str) -> ReadBack:
    """Loads what was written and compares draft logits on held-out prompts.

    Raises UserError where they differ by more than rounding the weights explains.
    """
    back = foreign.load(folder, target)
    ids = max(encode(product_prompts("heldout")[:8], target), key=len)[:ROWS]
    batch = batch_of([(ids, [True] * len(ids))], Sampler()).to(target.device)
    taps = list(dict.fromkeys([*drafter.taps, *back.taps]))
    batch = target.read(batch, taps)
    ours, theirs = _logits(drafter, batch), _logits(back, batch)
    if ours.shape != theirs.shape:
        raise UserError(f"{folder}: read back as another drafter; this is a bug in draftsmith")
    found = ReadBack(float((ours - theirs).abs().max()), float(ours.std()), len(ours))
    if not found.difference <= ROUNDING[dtype] * found.spread:
        raise UserError(
            f"{folder}: draft logits read back differ by {found.difference:.3g} (they spread by "
            f"{found.spread:.3g}); this is a bug in draftsmith, or {dtype} is too coarse: export "
            "as float32"
        )
    return found


def _logits(drafter: Drafter, batch: Batch) -> torch.Tensor:
    """Draft logits (M, V) over target ids, of every anchor and depth."""
    unrolled = drafter.unroll(batch, align(batch, min(DEPTHS, drafter.longest or DEPTHS)))
    assert isinstance(unrolled, Unroll)
    rows = drafter.logits(unrolled.hidden, unrolled.prev, unrolled.depth)
    return drafter.vocab.scatter(rows).float()
