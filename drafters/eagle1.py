"""EAGLE-1 and EAGLE-2: one layer that predicts the target's next feature (Li et al. 2024).

The state is the target's "normed" last state itself. `fc` fuses the embedding with it, one decoder
layer without input norm turns that into the next such state, and the target's own frozen lm_head
reads the token off it: there is no final norm and no draft vocabulary. Training adds the distance
to the target's true next state (recipe key `regression`) and may blur the features it starts from
(`feature_noise`): arXiv 2401.15077, section 4.2. With depths: 1 it is EAGLE-1's one-step training;
more depths feed the layer its own output, as serving does (HASS, arXiv 2408.15766).

EAGLE-2 (arXiv 2406.16858) is the same weights drafting a dynamic tree: the policy `Tree`.

Pairs, keys and positions: parts/one_layer.py. vLLM (method "eagle", models/llama_eagle.py) and
SGLang (algorithm EAGLE, models/llama_eagle.py) take it, vLLM as a chain only. Both give `fc` the
embedding first. SGLang's `fc` has a bias that a checkpoint must set to 0, vLLM's has none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.drafters.base import DrafterConfig, Unroll, entry, register
from draftsmith.drafters.batch import Batch
from draftsmith.drafters.parts.layers import Block, BlockConfig, init_weights
from draftsmith.drafters.parts.one_layer import OneLayer
from draftsmith.drafters.target.shell import Shell


class Eagle1Config(DrafterConfig):
    training = frozenset({"regression"})
    block: Block = None
    regression: float = entry(0.0, "Weight of its states' distance.", ge=0)


@register
class Eagle1(OneLayer):
    """See the module's docstring."""

    family = "eagle1"
    Config = Eagle1Config
    config: Eagle1Config

    def __init__(self, target: Shell, config: Eagle1Config) -> None:
        """Raises UserError for a block of another width than the target's, or with a gate."""
        block = BlockConfig.fitting(config.block, target)
        H = block.hidden_size
        super().__init__(target, config.model_copy(update={"block": block}))
        self.taps = ["normed"]
        self.fc = nn.Linear(2 * H, H, bias=False)
        self.add_layer(block, H)
        init_weights(self)

    def fuse(self, features: dict[str, Tensor]) -> Tensor:
        return features["normed"].to(self.fc.weight.dtype)

    def inputs(self, tokens: Tensor, state: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """The layer reads (B, T, H), which is its residual as well."""
        embedded = self.target.embedding(tokens).to(state.dtype)
        x = self.fc(torch.cat([embedded, state], dim=-1))
        return x, x

    @property
    def own_weight(self) -> float:
        return self.config.regression

    def own_loss(
        self, batch: Batch, unroll: Unroll, rows: Tensor, place: Tensor, alpha: Tensor
    ) -> Tensor:
        """Smooth L1 of hidden states from the target's own at x_{a+1+j}."""
        true = batch.features["normed"].flatten(0, 1)[place]  # (n, H)
        distance = F.smooth_l1_loss(unroll.hidden[rows].float(), true.float(), reduction="none")
        return distance.mean(1)

    def logits(self, hidden: Tensor, prev: Tensor, depth: Tensor) -> Tensor:
        return self.target.unembed(hidden)
