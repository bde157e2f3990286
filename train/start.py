"""The drafter that a run begins with."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from draftsmith.drafters import foreign
from draftsmith.drafters.base import Drafter, family
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.shell import Shell
from draftsmith.train.recipe import Recipe


def fresh(recipe: Recipe, target: Shell, counts: Tensor) -> Drafter:
    """A new drafter, or the one stored in the recipe's `start`: ours, or one that another toolkit
    published or a server loads (`foreign.read`), whose draft vocabulary is kept. Its weights are
    fp32 whatever the target's dtype: in bf16 most updates would be rounded away.

    Raises UserError where that one is of another family, or other settings than the recipe asks.
    """
    config = recipe.drafter_config()
    if recipe.start is None:
        return family(recipe.drafter).create(target, config, counts)
    folder = Path(recipe.start)
    drafter = foreign.read(folder, target)
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
    anew = {key: getattr(config, key) for key in config.training}
    drafter.config = drafter.config.model_copy(update=anew)
    return drafter
