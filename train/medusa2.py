"""Medusa-2: a target is adapted to its Medusa heads, and is a new target from then on.

(Cai et al. 2024, arXiv 2401.10774, sections 2.2.2 and 2.3.2.) LoRA adapters on the linears of the
target's decoder layers are trained together with the heads. What reaches them is the slope of

    KL(old target || adapted target) + adapt_weight * the heads' loss

summed over the tokens that the old target made. Both targets are modules of their own around the
same weights: there is no second copy until the adapters are merged. The heads learn the adapted
target's own law, detached, so that their loss moves the state they read and never the law they are
compared with. They begin alone (adapt_after), at a rate of their own: a target that follows
untrained heads is spoilt for nothing.

The run ends with RUN/target, an ordinary model folder with the adapters merged, and its best
checkpoint is that of its heads. Nothing of the old target holds for the new one: samples are
refused (the revision differs), `report` and `eval` draw its own. What it was adapted from, and how
far it moved, stands in its config.json as "adapted_from".
"""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from draftsmith.drafters.batch import Alignment, Batch, next_made
from draftsmith.drafters.errors import UserError, said
from draftsmith.drafters.sampling import Noise
from draftsmith.drafters.target.causal_lm import CausalLM
from draftsmith.drafters.target.source import Source, resolve
from draftsmith.drafters.target.target import Target
from draftsmith.train import disk, watch
from draftsmith.train.learner import Learner
from draftsmith.train.lora import TargetAdapters
from draftsmith.train.objective.weights import Sums
from draftsmith.train.recipe import Recipe
from draftsmith.train.samples.samples import Samples
from draftsmith.train.states.computed import Computed, States

TAPS = ("normed",)  # of Medusa heads


def divergence(
    target: CausalLM, old: Tensor, new: Tensor, counted: Tensor, rows: int
) -> tuple[float, Tensor]:
    """Sum of KL(old law || new law) in nats at temperature 1, and its slope (B, T, H) in `new`.

    old, new (B, T, H): pre-norm states; counted (B, T): the positions that count; rows: those whose
    logits are alive at a time. The slope in the logits is q - p itself: it is 0, bit for bit,
    where nothing has moved, and AdamW has no rounding to blow up.
    """
    total, slope = 0.0, torch.zeros_like(new)
    for some in counted.nonzero().split(rows):
        r, t = some.unbind(1)  # (n,)
        with torch.no_grad():
            before = torch.log_softmax(target.head(old[r, t]).float(), dim=-1)  # (n, V)
        with torch.enable_grad():
            leaf = new[r, t].detach().requires_grad_()  # (n, H)
            logits = target.head(leaf)
        after = torch.log_softmax(logits.detach().float(), dim=-1)
        p, q = before.exp(), after.exp()
        total += float((p * before.sub_(after)).sum())
        logits.backward(q.sub_(p).to(logits.dtype))
        assert leaf.grad is not None
        slope[r, t] = leaf.grad
    return total, slope


class Medusa2(Learner):
    """Steps that make a new target, with its heads. The one given stays as it is: the new one is
    other modules around the same weights, but for its adapters."""

    def __init__(
        self, recipe: Recipe, target: Target, samples: Samples, accelerator: Accelerator
    ) -> None:
        self.old = target
        self.place = recipe.folder / "target"
        self.scratch = recipe.folder / ".writing-target"
        self.first = int(recipe.adapt_after * recipe.steps)  # step that begins to adapt
        self.drift = {"kl": 0.0, "kl_tokens": 0}
        new = around_same_weights(target)
        new.become(self._named("unfinished"))
        # They are the old target's: replay on them is biased.
        super().__init__(recipe, new, samples.as_foreign(), accelerator, Computed(target, TAPS))

    def _named(self, revision: str) -> Source:
        return Source(str(self.place), str(self.place), revision, "folder")

    def _optimizer(self) -> tuple[torch.optim.AdamW, LambdaLR]:
        recipe = self.recipe
        self.adapters = TargetAdapters(self.target, recipe.adapt or 0)
        groups = [
            {"params": self.weights, "lr": recipe.lr},
            {"params": list(self.adapters.weights.values()), "lr": recipe.adapt_lr},
        ]
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=recipe.weight_decay)
        return optimizer, LambdaLR(optimizer, [_cosine(first, recipe) for first in (0, self.first)])

    @property
    def learning(self) -> nn.Module:
        return nn.ModuleDict({"heads": self.drafter, "target": self.target.hf})

    @property
    def replay_states(self) -> States:
        return Computed(self.target, TAPS)

    @property
    def updated(self) -> list[Tensor]:
        return self.weights if self.step < self.first else self.trained

    @property
    def _rows(self) -> int:
        """Positions whose laws are alive at a time: as many as a chunk of the heads' rows has."""
        return max(1, self.recipe.chunk // self.depths)

    def _micro(self, batch: Batch, alignment: Alignment, noise: Noise, total: float) -> Sums:
        """Adds the gradients of heads and adapters; `total` divides both losses, as a token's KL
        stands beside the sum of its depths' losses in the paper.

        adapt_weight scales what the heads' loss does to the target. Their own gradients keep their
        size: AdamW would divide the factor out, but for a jolt where the adapters join.
        """
        if self.step < self.first:
            return super()._micro(batch, alignment, noise, total)
        target, old = self.target, batch.final
        with self.accelerator.autocast():
            target.read(batch, TAPS, grad=True)
            new, normed = batch.final, batch.features["normed"]
            assert old is not None and new is not None
            batch.final = new.detach()
            leaf = batch.features["normed"] = normed.detach().requires_grad_()
            sums = super()._micro(batch, alignment, noise, total)
            _, slope = divergence(target, old, new, next_made(batch), self._rows)
        pull = torch.zeros_like(normed) if leaf.grad is None else leaf.grad
        torch.autograd.backward([new, normed], [slope / total, self.recipe.adapt_weight * pull])
        return sums

    # ------------------------------------------------------------ how far the target moved

    def _moved(self) -> dict[str, Any]:
        """Mean KL of the new target from the old one on the held-out tokens."""
        total, tokens = 0.0, 0
        pairs = zip(*map(self.read_heldout, (self.states, self.replay_states)), strict=True)
        with self.accelerator.autocast():
            for before, batch in pairs:
                assert before.final is not None and batch.final is not None
                counted = next_made(batch)
                total += divergence(self.target, before.final, batch.final, counted, self._rows)[0]
                tokens += int(counted.sum())
        return {"kl": total / max(tokens, 1), "kl_tokens": tokens}

    def extra_figures(self) -> tuple[str, dict[str, Any]] | None:
        if self.step <= self.first:
            return None
        if self.step < self.recipe.steps:
            self.drift = self._moved()
        said = (
            f"the target has moved {self.drift['kl']:.4f} nats a token (KL on "
            f"{self.drift['kl_tokens']:,} held-out tokens)"
        )
        return said, {"kind": "drift", **self.drift}

    def choose(self, replays: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """The last step's: the highest tau would be that of the target that gave most away."""
        return next((m for m in replays if m["step"] == self.recipe.steps), None)

    def summary(self, best: dict[str, Any] | None) -> str:
        run = self.recipe.folder
        return (
            f"the new target is {self.place}, {self.drift['kl']:.4f} nats a token from "
            f"{self.old.source.spec}, its heads are {run}/best; `draftsmith report {run}` lets it "
            "write text of its own and measures them on that"
        )

    # ------------------------------------------------------------ the new target on disk

    def _state(self) -> dict[str, Any]:
        return super()._state() | {"adapters": self.adapters.state()}

    def resume(self) -> dict[str, Any] | None:
        state = super().resume()
        if state is None:
            return None
        self.adapters.load(state["adapters"])
        if self.step == self.recipe.steps:
            # Killed between the last checkpoint and this: it was whole by then.
            if self.scratch.exists():
                self._publish()
            self._finish()
            self._publish()
        return state

    def save(self, more: dict[str, Any]) -> None:
        watch.check_finite(self.step, self.adapters.weights.items())
        if self.step == self.recipe.steps:
            self._finish()
        super().save(more)
        if self.step == self.recipe.steps:
            self._publish()

    def _finish(self) -> None:
        """Merges the adapters and writes the new target beside its place, unless it is there."""
        self.adapters.merge()
        self.drift = self._moved()  # by the weights as they are stored
        hf, old = self.target.hf, self.old.identity()
        hf.config.adapted_from = {
            "spec": old["spec"],
            "revision": old["revision"],
            "rank": self.recipe.adapt,
            "steps": self.step,
            "heads_alone": self.first,
            "tokens": self.tokens,
            "samples": self.samples.manifest["content_hash"],
            **self.drift,
        }
        if not self.accelerator.is_main_process:
            return
        if not self.place.exists():
            shutil.rmtree(self.scratch, ignore_errors=True)
            try:
                hf.save_pretrained(self.scratch)
                self.target.tokenizer.save_pretrained(self.scratch)
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"{self.place}: cannot be written ({said(error)}); the "
                    "last checkpoint is intact: make room, and run the same command again"
                ) from None
        stored = self.place if self.place.exists() else self.scratch
        self.target.become(self._named(resolve(str(stored.absolute())).revision))

    def _publish(self) -> None:
        if self.accelerator.is_main_process and not self.place.exists():
            disk.publish(self.scratch, self.place)

    def checkpoint_size(self) -> int:
        return super().checkpoint_size() + 4 * self.adapters.size

    def announce(self, say: Callable[[str], None]) -> None:
        say(
            f"adapting {self.old.source.spec} by LoRA of rank {self.recipe.adapt} "
            f"({self.adapters.size:,} of those weights) from step {self.first} on; the new target "
            f"will be {self.place}"
        )
        if self.step == self.recipe.steps:
            return
        if self.place.exists():
            raise UserError(
                f"{self.place}: is there already, and this run has not made it yet; move it away"
            )
        need = sum(p.numel() * p.itemsize for p in self.target.hf.parameters())
        free = shutil.disk_usage(self.recipe.folder).free
        if free < need:
            raise UserError(
                f"{self.place}: needs {need / 2**20:.0f} MiB, the disk has {free / 2**20:.0f}; "
                "free some"
            )


def around_same_weights(target: Target) -> Target:
    """The same target in modules of its own: those that are put into it reach no other one."""
    shared = [*target.parameters(), *target.buffers(), target.tokenizer]
    return copy.deepcopy(target, {id(one): one for one in shared})


def _cosine(first: int, recipe: Recipe) -> Callable[[int], float]:
    """Share of the full rate: none before step `first`, a linear warmup, a cosine to the end."""
    steps = recipe.steps - first
    warmup = int(recipe.warmup * steps)

    def share(step: int) -> float:
        done = step - first
        if done < 0:
            return 0.0
        if done < warmup:
            return done / warmup
        return 0.5 * (1 + math.cos(math.pi * (done - warmup) / max(1, steps - warmup)))

    return share
