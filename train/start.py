"""What a run begins with: its texts, and a drafter that is new, stored, or another toolkit's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import Tensor

from draftsmith.drafters import foreign
from draftsmith.drafters.base import Drafter, family
from draftsmith.drafters.batch import align
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.shell import Shell
from draftsmith.train.lora import Lora
from draftsmith.train.recipe import Recipe
from draftsmith.train.samples.packing import collate
from draftsmith.train.samples.samples import Samples
from draftsmith.train.states.computed import States

TEXTS = 64  # conversations that the target's law is averaged over
_ROWS = 256  # positions whose logits are alive at a time


@dataclass(frozen=True)
class Start:
    """learn, heldout: which samples. stored: bytes of the drafter in a checkpoint. coverage: share
    of the answers' tokens in the draft vocabulary."""

    learn: list[int]
    heldout: list[int]
    drafter: Drafter
    stored: int
    lora: Lora | None
    coverage: float


def begin(
    recipe: Recipe, target: Shell, samples: Samples, device: torch.device, states: States
) -> Start:
    """states: of the target, whatever its taps. Raises UserError for what cannot be trained."""
    learn, heldout = samples.split(recipe.heldout, recipe.seed)
    _check_heldout(samples, heldout, target.max_positions)
    set_seed(recipe.seed)  # every generator whose state a checkpoint holds
    wanted = getattr(recipe.drafter_config(), "draft_vocab", None)
    counts = token_counts(target, states, samples, learn, wanted)
    drafter = new_drafter(recipe, target, counts)
    drafter.eval()  # a draft model's dropout would depend on how rows are cut
    stored = sum(t.numel() * t.itemsize for t in drafter.weights().values())
    lora = Lora(drafter, recipe.lora) if recipe.lora else None
    drafter.to(device)
    coverage = drafter.vocab.coverage(counts.to(device))
    for threshold in recipe.switch_alpha:
        if threshold >= coverage:
            raise UserError(
                f"switch_alpha: {threshold} can never be met: the draft vocabulary covers "
                f"{coverage:.1%} of the answers; lower it, or raise draft_vocab"
            )
    return Start(learn, heldout, drafter, stored, lora, coverage)


def _check_heldout(samples: Samples, heldout: list[int], longest: int) -> None:
    """Raises UserError where replay could not compare checkpoints: no tau without a pass."""
    texts = (collate(samples, [[i]], longest) for i in heldout)
    if not any(bool(align(text, 1).exists.any()) for text in texts):
        raise UserError(
            f"heldout: no answer of the {len(heldout)} held-out conversations has two "
            "tokens, so none takes a verify pass; raise heldout"
        )


def token_counts(
    target: Shell, states: States, samples: Samples, indices: Sequence[int], wanted: int | None
) -> Tensor:
    """(V,): how often each token stands in the answers; below 1, what the prior adds.

    wanted: tokens that a draft vocabulary is to hold, None = all. It keeps those that stood most
    often. Where fewer distinct ones stood there, the places left over go to those that the target
    came nearest to saying; the tokens that a tokenizer happens to number lowest, which a sort of
    zeros would take, are a worse guess. The counts are whole numbers (long) unless that happens.
    """
    counts = samples.token_counts(indices)
    if wanted is None or int((counts > 0).sum()) >= wanted:
        return counts
    return counts + unigram(target, states, samples, indices[:TEXTS]).to(counts.device)


@torch.no_grad()
def unigram(target: Shell, states: States, samples: Samples, indices: Sequence[int]) -> Tensor:
    """(V,): the target's law at temperature 1, averaged over the positions it made; sums to 1."""
    total = torch.zeros(target.vocab_size, device=target.device)
    count = 0
    for index in indices:
        batch = states.fill(collate(samples, [[index]], target.max_positions), [[index]])
        assert batch.final is not None
        made = batch.made[0].clone()
        made[0] = False  # a text's first token has no law before it
        for place in made.nonzero().squeeze(1).split(_ROWS):
            logits = target.head(batch.final[0, place - 1]).float()  # (n, V)
            total += torch.softmax(logits, dim=-1).sum(0)
            count += len(place)
    return total / max(count, 1)


def new_drafter(recipe: Recipe, target: Shell, counts: Tensor) -> Drafter:
    """A new drafter, or the one stored in the recipe's `start`: ours, or one that another toolkit
    published or a server loads (`foreign.read`), whose draft vocabulary is kept. One of a family
    that the recipe's builds on (DFlash for DSpark, EAGLE-3 for P-EAGLE) gives what both have. Its
    weights are fp32 whatever the target's dtype: in bf16 most updates would be rounded away.

    Raises UserError where that one is of another family, or other settings than the recipe asks.
    """
    config = recipe.drafter_config()
    if recipe.start is None:
        return family(recipe.drafter).create(target, config, counts)
    folder = Path(recipe.start)
    drafter, cls = foreign.read(folder, target), family(recipe.drafter)
    if cls is not type(drafter) and issubclass(cls, type(drafter)):
        drafter = _grown(drafter, cls, config, folder)
    if drafter.family != recipe.drafter:
        raise UserError(
            f"start: {folder} holds a drafter of family {drafter.family}, the recipe asks for "
            f"{recipe.drafter}; give one of that family"
        )
    stored = drafter.config.stored()
    for key in sorted(config.model_fields_set - config.training):
        if getattr(config, key) != stored[key]:
            raise UserError(
                f"start: {folder} was made with {key}: {stored[key]}, the recipe has "
                f"{getattr(config, key)}; take that key out of the recipe"
            )
    training = {key: getattr(config, key) for key in config.training}
    drafter.config = drafter.config.model_copy(update=training)
    return drafter


def _grown(drafter: Drafter, cls: type[Drafter], config: Any, folder: Path) -> Drafter:
    """A new drafter of `cls`, which the drafter's own class is a base of, with its weights and,
    where the recipe says nothing else, its settings; what `cls` has beside them is fresh."""
    asked = config.model_fields_set
    kept = {key: getattr(drafter.config, key) for key in type(drafter.config).model_fields}
    made = cls(
        drafter.target,
        config.model_copy(update={key: kept[key] for key in kept if key not in asked}),
    )
    weights, own = drafter.weights(), made.weights()
    for name, tensor in weights.items():
        if name not in own or own[name].shape != tensor.shape:
            raise UserError(
                f"start: the recipe's {made.family} has no place for {name} {tuple(tensor.shape)} "
                f"of {folder}; take keys that decide its shape out of the recipe"
            )
    made.load_state_dict(weights, strict=False)
    return made
