"""The typed recipe: one schema for the YAML file, the command line and the checkpoint.

Flat keys. Those of the drafter's family (drafters/<family>.py, its Config) stand beside the
common ones; an unknown key is an error that names near ones. `draftsmith keys` lists them all.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from draftsmith.drafters.base import DrafterConfig, entry, family
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import NOT_APPLIED, Sampler
from draftsmith.train.objective.losses import LOSSES, Objective
from draftsmith.train.objective.weights import DepthWeights

DeviceMap = (
    Literal["auto", "balanced", "balanced_low_0", "sequential"] | dict[str, int | str] | None
)
DepthKind = Literal["constant", "geometric", "exponential", "dpace", "reach"]


def _listed(value: Any) -> Any:
    return [] if value == "none" else [value] if isinstance(value, str) else value


def _bytes(value: Any) -> Any:
    """20GB as 20000000000; pydantic checks what is no such text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT]?)B", str(value), re.IGNORECASE)
    if not found:
        return value
    return int(float(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " "))


Trackers = Annotated[list[Literal["wandb", "tensorboard"]], BeforeValidator(_listed)]
Bytes = Annotated[int, BeforeValidator(_bytes), Field(ge=1)]
Place = Annotated[str, AfterValidator(os.path.expanduser)]  # no shell has read a YAML file
NUMBERS = {key: name for name, loss in LOSSES.items() for key in loss.numbers}  # key: its loss
_fields: dict[str, Any] = {key: (float, LOSSES[loss].numbers[key]) for key, loss in NUMBERS.items()}
LossNumbers: type[BaseModel] = create_model("LossNumbers", **_fields)


class Recipe(BaseModel):
    """Everything that decides a run, but for the family's own keys.

    `draftsmith keys` shows type, default and description, by the groups that stand here.
    """

    model_config = ConfigDict(extra="forbid")

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="The run lives in RUNS/NAME."
    )
    runs: Place = entry("runs", "Folder of all runs.")
    target: str = entry("smollm2", "Hub id, folder, GGUF file, package:NAME or smollm2.")
    device_map: DeviceMap = entry(
        None, "auto, or {module: device}: for a target no one device holds."
    )
    drafter: str = Field(description="The drafter's family, whose own keys stand beside these.")

    samples: Place | None = entry(
        None, "A samples folder; without one, prompts are answered first."
    )
    prompts: Place | None = entry(
        None, "Prompts to answer, not draftsmith's own: a file, a mix, .."
    )
    max_new_tokens: int = entry(192, "Of each answer.", ge=1)
    temperature: float = entry(1.0, "Of the answers, and of serving; 0 is greedy.")
    top_k: int = entry(0, "0 switches top-k off.")
    top_p: float = entry(1.0, "1 switches top-p off.")
    heldout: int = entry(32, "Conversations kept for choosing the checkpoint.", ge=1)

    depths: int = entry(3, "Depths unrolled in training.", ge=1)
    k: int = entry(4, "Draft length at which replay's tau chooses the checkpoint.", ge=1)
    start: Place | None = entry(
        None, "A drafter folder, ours or foreign, that the run starts from."
    )
    lora: int | None = entry(None, "Rank: only adapters of that drafter are trained.", ge=1)
    adapt: int | None = entry(
        None, "medusa: LoRA rank on the target, a new one in RUN/target.", ge=1
    )
    adapt_lr: float = entry(2.5e-4, "adapt: of its adapters; the drafter's is lr.", gt=0)
    adapt_after: float = entry(
        0.25, "adapt: share of steps that train the drafter alone.", ge=0, lt=1
    )
    adapt_weight: float = entry(0.2, "adapt: of the drafter's loss in the target, beside KL.", ge=0)

    loss: str | list[str] = entry("kl", "A loss, or a list, gone through as alpha_0 grows.")
    switch_alpha: list[float] = entry([], "alpha_0 that ends each loss of a list but the last.")
    depth_weights: DepthKind | list[float] = entry(
        "geometric", "Weights of depths: dpace and reach follow acceptance; or one number a depth."
    )
    decay: float = entry(0.8, "geometric: depth j weighs decay**j.", gt=0, le=1)
    span: float = entry(4.0, "exponential: depth j weighs exp(-j / span).", gt=0)
    per: Literal["token", "sequence"] = entry("token", "Whether tokens or texts count alike.")
    feature_noise: float = entry(
        0.0, "Half the width of uniform noise on training's features.", ge=0
    )
    anchors: int | None = entry(None, "Anchors of a row that a step learns from, at most.", ge=1)

    steps: int = Field(ge=1, description="Optimizer steps.")
    length: int = entry(512, "Tokens in a packed row.", ge=8)
    # A run that goes on with other processes keeps to its rows a step.
    rows: int = entry(2, "Packed rows in a micro-batch, for each process.", ge=1)
    accumulation: int = entry(1, "Micro-batches in a step.", ge=1)
    lr: float = entry(1e-3, "Learning rate at its highest.", gt=0)
    warmup: float = entry(0.05, "Share of the steps in which lr rises.", ge=0, lt=1)
    weight_decay: float = entry(0.0, "AdamW's.", ge=0)
    clip: float = entry(1.0, "Largest norm of a step's gradient.", gt=0)
    chunk: int = entry(1024, "(anchor, depth) rows whose logits are alive at a time.", ge=1)
    seed: int = entry(0, "Keys every draw.")

    feature_cache: Bytes | None = entry(
        None, "20GB: keeps the target's states on disk, at most so much."
    )
    feature_dtype: Literal["bfloat16"] | None = entry(None, "feature_cache: of its states.")
    save_every: int = entry(100, "Steps between checkpoints, each one replayed.", ge=1)
    patience: int = entry(0, "Replays without a new best that end the run; 0: none do.", ge=0)
    log_every: int = entry(10, "Steps between lines of figures.", ge=1)
    tracker: Trackers = entry([], "none, wandb, tensorboard, or a list of them.")

    # Keys of the losses and of the family, validated.
    numbers: dict[str, float] = Field(default_factory=lambda: LossNumbers().model_dump())
    settings: dict[str, Any] = Field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return Path(self.runs) / self.name

    @property
    def sampler(self) -> Sampler:
        return Sampler(self.temperature, self.top_k, self.top_p)

    @property
    def losses(self) -> list[str]:
        """The curriculum: one loss, or several in their order."""
        return [self.loss] if isinstance(self.loss, str) else self.loss

    @property
    def objectives(self) -> list[Objective]:
        kind = self.depth_weights
        weights = DepthWeights(
            kind if isinstance(kind, str) else tuple(kind), self.decay, self.span, self.per
        )
        return [Objective(loss, weights, self.numbers, self.feature_noise) for loss in self.losses]

    def drafter_config(self) -> DrafterConfig:
        return family(self.drafter).Config(**self.settings)

    def flat(self) -> dict[str, Any]:
        """The recipe as its YAML would be written, defaults filled in."""
        common = self.model_dump(exclude={"numbers", "settings"})
        return common | self.numbers | self.settings


def load(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe file, or a shipped recipe by name, and applies key=value overrides.

    Raises UserError in one line naming file, key and remedy.
    """
    path = find(path)
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        line = " ".join(str(error).split())
        raise UserError(f"{path}: not valid YAML ({line})") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: a recipe is a list of `key: value` lines")
    for item in overrides:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise UserError(f"{item}: overrides are written key=value")
        try:
            raw[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UserError(f"{item}: the value is not valid YAML") from None
    read = parse(raw, str(path))
    asked = [item.partition("=")[0].strip() for item in overrides]
    try:
        _check_read(read, asked or list(raw))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return read


def find(path: str | Path) -> Path:
    """The recipe file that `path` names: a file, or a shipped recipe's name."""
    given = Path(path)
    if given.is_file():
        return given
    shipped = {
        p.name.removesuffix(".yaml"): p
        for p in files("draftsmith.recipes").iterdir()
        if p.name.endswith(".yaml")
    }
    name = str(path).removesuffix(".yaml")
    if name in shipped:
        return Path(str(shipped[name]))
    near = difflib.get_close_matches(name, shipped) or [n for n in shipped if n.startswith("smol-")]
    known = ", ".join(sorted(near))
    raise UserError(f"{path}: no such file, nor one of {len(shipped)} shipped recipes ({known})")


def parse(raw: dict[str, Any], source: str) -> Recipe:
    """A Recipe from flat keys; source: the file they stand in. Raises UserError for a wrong one."""
    if not isinstance(raw.get("drafter"), str):
        raise UserError(f"{source}: drafter: name a family, e.g. eagle or medusa")
    try:
        config = family(raw["drafter"]).Config
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    if not config.model_fields or raw["drafter"] == "ngram":
        raise UserError(f"{source}: drafter: {raw['drafter']} has nothing to train")
    # Runs once stored it for every family: at 0 it says nothing.
    raw = {key: value for key, value in raw.items() if (key, value) != ("regression", 0)}
    common = set(Recipe.model_fields) - {"numbers", "settings"}
    own = set(config.model_fields)
    known = common | own | set(NUMBERS)
    for key in raw:
        if key in NOT_APPLIED:
            raise UserError(
                f"{source}: {key}: is not applied to the target's law here, and acceptance would "
                "be another sampler's; leave it out, and serve without it"
            )
        if key not in known:
            near = difflib.get_close_matches(str(key), sorted(known), n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            hint = hint or f"; draftsmith keys {raw['drafter']} lists them"
            raise UserError(f"{source}: unknown key {key!r} for drafter {raw['drafter']}{hint}")
    try:
        settings = config(**{k: v for k, v in raw.items() if k in own})
        numbers = LossNumbers(**{k: v for k, v in raw.items() if k in NUMBERS})
        recipe = Recipe(
            **{k: v for k, v in raw.items() if k in common},
            numbers=numbers.model_dump(),
            settings=settings.model_dump(exclude_unset=True),
        )
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise UserError(f"{source}: {key}: is missing; add `{key}: ..`") from None
        raise UserError(f"{source}: {key}: {first['msg']} (got {first['input']!r})") from None
    try:
        _ = recipe.sampler
        _check_objective(recipe)
        _check_adapt(recipe)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    return recipe


def _check_read(recipe: Recipe, asked: Sequence[str]) -> None:
    """Raises UserError for a key that nothing would read beside the others.

    asked: the keys of a file, or those that a command changes in one: what an override leaves
    unread in a shipped recipe is no mistake.
    """
    if recipe.samples and recipe.prompts:
        raise UserError("prompts: nothing is asked where samples are given; leave one of them out")
    readers: dict[str, tuple[str, Any]] = {
        **{key: (f"loss: {loss}", loss in recipe.losses) for key, loss in NUMBERS.items()},
        "decay": ("depth_weights: geometric", recipe.depth_weights == "geometric"),
        "span": ("depth_weights: exponential", recipe.depth_weights == "exponential"),
        "feature_dtype": ("feature_cache", recipe.feature_cache),
        **dict.fromkeys(("adapt_lr", "adapt_after", "adapt_weight"), ("adapt", recipe.adapt)),
    }
    values = recipe.flat()
    fields = Recipe.model_fields | LossNumbers.model_fields
    for key, (reader, there) in readers.items():
        default = fields[key].default  # a run's recipe.yaml holds all of them
        if key in asked and not there and values[key] != default:
            remedy = f"set {reader} too, or leave it out ({key}={default})"
            raise UserError(f"{key}: is ignored without {reader}; {remedy}")


def _check_adapt(recipe: Recipe) -> None:
    """Raises UserError for a target that cannot be adapted together with this drafter."""
    if not recipe.adapt:
        return
    if recipe.drafter != "medusa":
        raise UserError(
            f"adapt: trains a target with Medusa heads (Medusa-2), not with {recipe.drafter}; take "
            "drafter: medusa, or leave adapt out"
        )
    faults = {
        "weighs heads beside every token's KL; leave anchors out": recipe.anchors,
        "the target's states change; leave feature_cache out": recipe.feature_cache,
        "trains the target on one device; leave device_map out": recipe.device_map,
        "lora would freeze the heads that it needs; leave one of them out": recipe.lora,
        "weighs the target's tokens, not its texts; leave per out": recipe.per != "token",
        "the new target is the last step's; leave patience out": recipe.patience,
    }
    for fault, found in faults.items():
        if found:
            raise UserError(f"adapt: {fault}")


def _check_objective(recipe: Recipe) -> None:
    """Raises UserError for a loss, curriculum or weights that cannot be trained on."""
    losses, thresholds, weights = recipe.losses, recipe.switch_alpha, recipe.depth_weights
    if recipe.lora and recipe.start is None and recipe.drafter != "small":
        raise UserError("lora: adapts a drafter that is trained already; name it as start")
    if not losses:
        raise UserError("loss: is an empty list; name one")
    for loss in losses:
        if loss not in LOSSES:
            near = difflib.get_close_matches(loss, LOSSES, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"loss: no {loss!r}{hint} (known are {', '.join(LOSSES)})")
    tied = [loss for loss in losses if LOSSES[loss].passes]
    if recipe.anchors and tied:
        raise UserError(f"anchors: {tied[0]} ties a text's together; leave anchors or it out")
    if "rkl" in losses and recipe.sampler.greedy:
        raise UserError("loss: rkl is infinite at temperature 0; take kl, or a temperature above 0")
    if len(thresholds) != len(losses) - 1:
        raise UserError(
            f"switch_alpha: {len(thresholds)} thresholds for {len(losses)} losses; give one for "
            "each loss but the last"
        )
    for threshold in thresholds:
        if not 0 < threshold < 1:
            raise UserError(f"switch_alpha: {threshold} can never be met; alpha lies in (0, 1)")
    if thresholds != sorted(thresholds):
        raise UserError(f"switch_alpha: {thresholds} must ascend: alpha_0 passes them in order")
    if isinstance(weights, list):
        if len(weights) != recipe.depths:
            raise UserError(
                f"depth_weights: {len(weights)} numbers for depths: {recipe.depths}; give one each"
            )
        chained = any(LOSSES[loss].chained for loss in losses)
        if weights[0] == 0 and family(recipe.drafter).rows_shared and not chained:
            raise UserError(
                f"depth_weights: one row of a {recipe.drafter} drafter serves every depth, and "
                f"{losses[0]} counts it at the first, which weighs 0: nothing would be trained; "
                "give that one a weight"
            )
        if min(weights) < 0 or not 0 < sum(weights) < float("inf"):
            raise UserError(
                f"depth_weights: {weights} sum to {sum(weights):g}; give numbers >= 0, one above 0"
            )
