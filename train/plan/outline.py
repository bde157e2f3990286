"""A recipe's target, drafter and texts by their configs alone: shapes and lengths, no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from gguf import GGUFReader
from torch import Tensor, nn

from draftsmith.drafters.base import Drafter, family
from draftsmith.drafters.errors import LOAD_ERRORS, UserError
from draftsmith.drafters.parts.layers import SelfAttention
from draftsmith.drafters.target import gguf_keys
from draftsmith.drafters.target.causal_lm import CausalLM
from draftsmith.drafters.target.gguf_source import to_write
from draftsmith.drafters.target.shell import Shell
from draftsmith.drafters.target.source import Source, fingerprint, gguf_file, resolve
from draftsmith.train import lora
from draftsmith.train.data.prompts import Prompt
from draftsmith.train.data.sources import prompts_to_learn
from draftsmith.train.lora import linears
from draftsmith.train.recipe import Recipe
from draftsmith.train.samples import store
from draftsmith.train.samples.packing import Stream, teaching
from draftsmith.train.samples.samples import Samples


@dataclass
class Texts:
    """Samples that are there (drawn), or what prompts will give when they are answered.

    lengths and first_made as in `Samples`; made: target-made tokens of all.
    """

    folder: Path
    lengths: Tensor
    first_made: Tensor
    made: int
    drawn: bool

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def share(self) -> float:
        """Of the tokens read, those that the target made."""
        return self.made / self.tokens

    def epoch(self, length: int) -> int:
        """Tokens of all texts that teach anything, cut at `length`."""
        kept = teaching(cast(Samples, self), length)
        return int(self.lengths[kept].clamp(max=length).sum())

    def row(self, length: int) -> float:
        """Tokens in a packed row of `length`: texts do not fill it to the end."""
        kept = teaching(cast(Samples, self), length)
        stream = Stream(cast(Samples, self), kept, length, seed=0)
        return self.epoch(length) / stream.rows_per_epoch(0)


class Outline:
    """Target and drafter of a recipe without their weights.

    Raises UserError for a target whose config cannot be read, and for settings it cannot take.
    """

    def __init__(self, recipe: Recipe) -> None:
        source, self.config = _config(recipe.target)
        with torch.device("meta"):
            self.target = CausalLM(transformers.AutoModelForCausalLM.from_config(self.config))
            shell = Shell(self.target.hf, None, source)
            self.drafter, self.trained = outlined_drafter(recipe, shell)
        # Bytes of the drafter as it is stored: whole, whatever share of it is trained.
        self.stored = sum(t.numel() * t.itemsize for t in self.drafter.weights().values())
        self.copies = sum(map(_copy, filter(None, [recipe.target, _checkpoint(recipe)])))
        self.adapted = list(lora.layer_linears(self.target).values()) if recipe.adapt else []
        of_target = sum(
            (recipe.adapt or 0) * (m.in_features + m.out_features) for m in self.adapted
        )
        self.adapters = self.trained if recipe.lora else of_target  # numbers, among those trained
        self.trained += of_target
        head = self.target.lm_head.weight
        self.target_size = sum(p.numel() for p in self.target.parameters())
        embeddings = {id(p): p.numel() for p in (head, self.target.embedding.weight)}
        self.target_body = self.target_size - sum(embeddings.values())
        settings = self.drafter.config
        self.draft_vocab = getattr(settings, "draft_vocab", None) or self.drafter.vocab.draft_size
        linears = [m for m in self.drafter.modules() if isinstance(m, nn.Linear)]
        heads = [m for m in linears if m.out_features in (self.draft_vocab, len(head))]
        # Beside the target's, frozen, a drafter may have a narrow one (DSpark's Markov head).
        own = getattr(settings, "head", "own") == "own"
        self.head_trained = own and any(m.weight.requires_grad for m in heads)
        self.body = [m for m in linears if m not in heads]
        longest, apart = self.drafter.longest or recipe.depths, self.drafter.weights_per_depth
        attentions = sum(isinstance(m, SelfAttention) for m in self.drafter.modules())
        self.attentions = attentions // longest if apart else attentions  # that a depth passes
        # Without keys, a drafter reads anchors alone.
        self.anchors_only = not self.attentions and not self.drafter.rows_shared
        if recipe.depths > longest or (apart and recipe.depths < longest):
            has = "has weights for" if apart else "drafts at most"
            raise UserError(
                f"depths: {recipe.depths} in training, and the drafter {has} {longest}: "
                f"set depths: {longest}, or change the drafter"
            )

    def uses(self, depths: int) -> int:
        """How often a row passes each of those: once, where every depth has weights of its own."""
        return 1 if self.drafter.weights_per_depth else depths


def _config(spec: str) -> tuple[Source, Any]:
    """The config in a folder, or in the header of a GGUF, which a load turns into fp32."""
    file = gguf_file(spec)
    source = Source(spec, "", "unknown", "gguf") if file else resolve(spec, weights=False)
    try:
        if file is None:
            return source, transformers.AutoConfig.from_pretrained(source.path)
        config = transformers.AutoConfig.from_pretrained(str(file.parent), gguf_file=file.name)
        gguf_keys.settle(file, GGUFReader(str(file)), config)
        config.dtype = torch.float32
        return source, config
    except UserError:
        raise
    except LOAD_ERRORS as error:
        line = str(error).strip().splitlines()[0]
        raise UserError(f"target {spec}: transformers cannot read its config ({line})") from None


def _checkpoint(recipe: Recipe) -> str | None:
    return getattr(recipe.drafter_config(), "checkpoint", None)


def _copy(spec: str) -> int:
    """Bytes that a load writes into the cache of dequantised GGUFs."""
    file = gguf_file(spec)
    return to_write(spec, file, fingerprint(file)) if file else 0


def outlined_drafter(recipe: Recipe, target: Shell) -> tuple[Drafter, int]:
    """The drafter, on the meta device, and how many of its parameters are trained."""
    settings: Any = recipe.drafter_config()
    if getattr(settings, "checkpoint", None):  # its weights are not wanted
        architecture = _config(settings.checkpoint)[1].to_dict()
        settings = settings.model_copy(update={"architecture": architecture})
    drafter = family(recipe.drafter)(target, settings)
    if recipe.lora:
        layers = linears(drafter).values()
        return drafter, sum(recipe.lora * (m.in_features + m.out_features) for m in layers)
    return drafter, sum(p.numel() for p in drafter.parameters() if p.requires_grad)


def recipe_texts(recipe: Recipe, prompts: list[Prompt] | None = None) -> Texts:
    """A recipe's samples, or its prompts with answers of full length; prompts: those read already.

    Raises UserError for samples or prompts that cannot be read.
    """
    if recipe.samples is not None:
        folder = Path(recipe.samples)
        manifest = store.read_manifest(folder)
        samples = Samples(folder, manifest, store.load(folder / store.ROWS))
        made = int(samples.token_counts().sum())
        return Texts(folder, samples.lengths, samples.first_made, made, drawn=True)
    prompts = prompts_to_learn(recipe.prompts) if prompts is None else prompts
    asked = torch.tensor([_about_tokens(p) for p in prompts])
    answers = torch.tensor([(1 + len(p.later)) * recipe.max_new_tokens for p in prompts])
    return Texts(recipe.folder, asked + answers, asked, int(answers.sum()), drawn=False)


def _about_tokens(prompt: Prompt) -> int:
    """Four characters a token, and the template's share: no tokenizer is loaded."""
    if prompt.ids is not None:
        return len(prompt.ids)
    turns = [prompt.messages or (), *prompt.later]
    return sum(24 + sum(len(m["content"]) for m in turn) // 4 for turn in turns)
