"""The decoder block that heads share: Llama-type, in the shape that the servers load.

RMSNorm in fp32, rotate-half RoPE, grouped queries, SwiGLU. Heads are built on this block whatever
the target's family, so a new target family needs no new drafter code.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.shell import Shell

_PACK = 64  # queries


class BlockConfig(BaseModel):
    """Shape of a block; `like(target.config)` takes it from the target.

    A plain Llama layer has the settings that stand here as defaults, and so do servers' heads.
    """

    model_config = ConfigDict(extra="forbid")

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    qkv_bias: bool = False  # Qwen2 and MiMo
    qk_norm: bool = False  # queries and keys are normed head by head: Qwen3 and GLM-4.5
    rotary_share: float = 1.0  # of each head, from its start, that positions turn: Qwen3.5
    gated: bool = False  # attention results are weighed by what attention read: Qwen3.5

    @model_validator(mode="before")
    @classmethod
    def _without_max_positions(cls, given: Any) -> Any:
        """Checkpoints and recipes used to hold it, and nothing read it."""
        if isinstance(given, dict):
            return {key: value for key, value in given.items() if key != "max_positions"}
        return given

    @classmethod
    def like(cls, config: Any) -> BlockConfig:
        """The shape of the target's own layers, for whatever its family names them."""
        heads = config.num_attention_heads
        hidden = config.hidden_size
        rope = getattr(config, "rope_parameters", None) or {}
        theta = rope.get("full_attention", rope).get("rope_theta")  # by layer type: Gemma-3
        return cls(
            hidden_size=hidden,
            intermediate_size=getattr(config, "intermediate_size", None) or 4 * hidden,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or hidden // heads,
            rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
            rope_theta=float(theta or getattr(config, "rope_theta", None) or 10000.0),
        )

    @classmethod
    def fitting(cls, given: BlockConfig | None, target: Shell, gate: bool = False) -> BlockConfig:
        """given, or the target's shape. Raises UserError for another width than the target's, and
        for a gate where the layer has none."""
        block = given or cls.like(target.config)
        if block.hidden_size != target.hidden_size:
            raise UserError(
                f"block.hidden_size: {block.hidden_size} is not the target's {target.hidden_size}, "
                "whose states and embeddings this head shares"
            )
        if block.gated and not gate:
            raise UserError(
                "block.gated: this family's layer has no gate; leave it out, or train mtp"
            )
        return block


Block = Annotated[
    BlockConfig | None, Field(description="The layer's shape; default: the target's layers'.")
]


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class Rope(nn.Module):
    """Rotary positions, rotate-half layout. x (B, heads, T, D), positions (B, T).

    Only the first `size` of D entries are turned.
    """

    def __init__(self, size: int, theta: float) -> None:
        super().__init__()
        steps = torch.arange(0, size, 2).float() / size
        self.register_buffer("frequency", theta**-steps, persistent=False)

    frequency: Tensor

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = positions.unsqueeze(-1).float() * self.frequency.float()  # (B, T, D/2)
        cos = angle.cos().repeat(1, 1, 2).unsqueeze(1).to(x.dtype)  # (B, 1, T, D)
        sin = angle.sin().repeat(1, 1, 2).unsqueeze(1).to(x.dtype)
        turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        left, right = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat([-right, left], dim=-1) * sin
        return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


class SelfAttention(nn.Module):
    """Projections of grouped-query attention; the families decide who sees whom."""

    def __init__(self, config: BlockConfig, input_size: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        bias = config.qkv_bias
        self.q_proj = nn.Linear(input_size, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(input_size, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(input_size, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        size = self.heads * self.head_dim
        self.g_proj = nn.Linear(input_size, size, bias=False) if config.gated else None
        self.rope = Rope(round(config.rotary_share * self.head_dim), config.rope_theta)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """(B, heads, T, D) of x (B, T, input_size), rotated to positions (B, T)."""
        query = self._split(self.q_proj(x), self.heads)
        return self.rope(query if self.q_norm is None else self.q_norm(query), positions)

    def keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, rotated, and values (B, kv_heads, T, D)."""
        key = self._split(self.k_proj(x), self.kv_heads)
        key = self.rope(key if self.k_norm is None else self.k_norm(key), positions)
        return key, self._split(self.v_proj(x), self.kv_heads)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        """Attention of queries (B, heads, W, D) over keys (B, kv_heads, S, D), seen (B, W, S).

        Few queries of a group stand side by side, so that keys and values need not be repeated;
        many would repeat the mask, which is larger.
        """
        if query.shape[2] > _PACK:
            key, value = self.over_groups(key), self.over_groups(value)
            return F.scaled_dot_product_attention(query, key, value, attn_mask=seen.unsqueeze(1))
        groups = self.heads // self.kv_heads
        packed = query.unflatten(1, (self.kv_heads, groups)).flatten(2, 3)  # (B, kv, groups * W, D)
        mask = seen.repeat(1, groups, 1).unsqueeze(1)
        mixed = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask)
        return mixed.unflatten(2, (groups, -1)).flatten(1, 2)

    def over_groups(self, x: Tensor) -> Tensor:
        """Keys or values (B, kv_heads, ..) repeated to (B, heads, ..)."""
        return x.repeat_interleave(self.heads // self.kv_heads, dim=1)

    def output(self, mixed: Tensor, read: Tensor | None = None) -> Tensor:
        """(B, T, H) of attention results (B, heads, T, D); read: x again, where it is gated."""
        flat = mixed.transpose(1, 2).flatten(2)
        if self.g_proj is not None:
            flat = flat * torch.sigmoid(self.g_proj(read))
        return self.o_proj(flat)

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, self.head_dim).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def after_attention(layer: Any, residual: Tensor, mixed: Tensor, read: Tensor | None) -> Tensor:
    """Output (B, T, H) of a pre-norm layer with servers' names, of attention results
    (B, heads, T, D). read (B, T, input_size): what its attention read, for a gate."""
    hidden = residual + layer.self_attn.output(mixed, read)
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


class Layer(nn.Module):
    """A pre-norm decoder layer, under the names that servers read."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """The layer's output (B, T, H) of attention results (B, heads, T, D)."""
        return after_attention(self, residual, mixed, None)


def init_weights(module: nn.Module, std: float = 0.02) -> None:
    """Normal(0, std) for every linear of a fresh head."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=std)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
