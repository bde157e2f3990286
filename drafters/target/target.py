"""The frozen target: how it is loaded, read and checked.

On load it proves itself: its logits, by our attention, hooks and head, packed and in trees over the
slab, equal those that the same weights gave through transformers' own path before anything was
replaced. A family that cannot (ALiBi, recurrent layers) is read by its own attention and decodes
chains on transformers' own cache, if that proves exact; any other is refused.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

import psutil
import torch
import transformers
from torch import Tensor

from draftsmith.drafters.batch import Batch
from draftsmith.drafters.errors import UserError, loading
from draftsmith.drafters.target import selftest
from draftsmith.drafters.target.attention import Step, attend_by, packed_step
from draftsmith.drafters.target.causal_lm import CausalLM, Tap, TargetOutput
from draftsmith.drafters.target.chain_cache import ChainCache, RowCache
from draftsmith.drafters.target.ends import settle_ends
from draftsmith.drafters.target.shell import Shell, defaults, needs_own_attention
from draftsmith.drafters.target.slab import Slab
from draftsmith.drafters.target.source import Source, resolve
from draftsmith.drafters.target.whole import check_quantised, check_whole

logger = logging.getLogger(__name__)

_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # by family
_CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # by version and family


class Target(CausalLM, Shell):
    """A frozen causal LM with its tokenizer, shell and body: eval mode, no gradients.

    trees: whether it is read through our attention and the slab. Where it is not, it takes chains
    on the cache that `cache` gives, through `chain_step`, and any batch that `read` is given.
    """

    def __init__(self, hf: Any, tokenizer: Any, source: Source) -> None:
        """Raises UserError for a family that no way of reading gives the right logits of."""
        reference = selftest.probe_logits(hf)
        self._experts, self._experts_as_loaded = "as loaded", hf.get_experts_implementation()
        super().__init__(hf, tokenizer, source)
        self.quantised = ""  # by which method its checkpoint is, and how it is read here
        self.own_dtype = self.dtype  # its checkpoint's
        self._prove(reference)
        self.become(source)

    @classmethod
    def load(
        cls,
        spec: str,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        device_map: str | dict[str, Any] | None = None,
    ) -> Target:
        """Loads a hub id, a folder, a GGUF file or an alias; see `source.resolve`.

        device None: the GPU where there is one. dtype None: fp32 on the CPU, the checkpoint's own
        elsewhere. device_map: transformers', for a target that one device cannot hold:
        "auto", or {module: device}; its layers run where they lie, features come out on the first
        device. Raises UserError where it leaves weights that drafters share without a device.
        """
        transformers.logging.disable_progress_bar()  # a bar for every load drowns our own lines
        source = resolve(spec)
        device, choice = defaults(device, dtype)
        with loading(f"target {spec}"):
            # Straight to its place: quantised weights cannot be moved afterwards.
            place = device_map or {"": device}
            config = transformers.AutoConfig.from_pretrained(source.path)
            check_quantised(f"target {spec}", source, config)
            hf, info = transformers.AutoModelForCausalLM.from_pretrained(
                source.path, dtype=choice, device_map=place, output_loading_info=True
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(source.path)
        check_whole(f"target {spec}", hf, info)
        settle_ends(f"target {spec}", hf, config, tokenizer)
        for part in (hf.get_input_embeddings(), hf.get_output_embeddings()):
            if part.weight.is_meta:
                raise UserError(
                    f"device_map: leaves the embeddings or lm_head of {spec} without a device, and "
                    "drafters share them; give them one, or use more devices"
                )
        out = cls(hf.eval(), tokenizer, source)
        out.own_dtype = config.get_text_config().dtype or out.own_dtype
        stored = getattr(config, "quantization_config", None)
        if stored:  # transformers takes it out of the model's own config when it dequantises
            method = (stored if isinstance(stored, dict) else stored.to_dict()).get("quant_method")
            kept = getattr(hf.config, "quantization_config", None)
            how = "computed by transformers' kernels" if kept else "dequantised by transformers"
            out.quantised = f"{method}, {how}"
        return out

    def layer_states(self, layers: Sequence[int]) -> list[dict[str, Tensor]]:
        """The body's own, as they are now. Raises UserError for layers that no device holds."""
        if not self.trees:
            raise needs_own_attention(self.hf)
        for layer in layers:
            if next(self.layers[layer].parameters()).is_meta:
                raise UserError(
                    f"layers: device_map leaves the target's layer {layer} without a device, so it "
                    "cannot be copied; give it one, or name a checkpoint"
                )
        return [self.layers[layer].state_dict() for layer in layers]

    def fit_experts(self, tokens: int) -> None:
        """Experts by batched_mm, which reads nothing on the host, for a forward of few tokens.

        It copies the weights of every token's experts: only while that is no more than a layer has.
        """
        picked = getattr(self.config, "num_experts_per_tok", None)
        counts = [getattr(self.config, name, None) for name in _EXPERT_COUNTS]
        few = picked and any(count and tokens * picked <= count for count in counts)
        self.use_experts("batched_mm" if few else "as loaded")

    def use_experts(self, name: str) -> None:
        """Sets transformers' experts implementation: "batched_mm", or what it was "as loaded"."""
        if name != self._experts:  # it walks over all modules
            kept = self._experts_as_loaded
            self.hf.set_experts_implementation(kept if name == "as loaded" else name)
            self._experts = name

    def cache(self, rows: int, capacity: int, nodes: int = 1) -> Slab | ChainCache:
        """An empty cache for `rows` texts of up to `capacity` tokens, verified `nodes` at a time.

        A ChainCache where `trees` is False: it takes chains only (`chain_step`). Raises UserError
        where the estimate (`cache_bytes`) exceeds the device's free memory.
        """
        self.check_memory(rows, capacity, nodes)
        if self.trees:
            return Slab(rows, capacity, self.device)
        return self._chain_cache(rows)

    def check_memory(self, rows: int, capacity: int, nodes: int = 1, named: str = "batch") -> None:
        """Raises UserError, which names a field, where such a cache exceeds the free memory."""
        # Of a target that is spread, every device holds the cache of its own layers.
        placed = set(getattr(self.hf, "hf_device_map", {}).values()) - {"cpu", "disk"}
        devices = {torch.device(place) for place in placed} or {self.device}
        free = sum(free_bytes(device) for device in devices)
        need = self.cache_bytes(rows, capacity, nodes)
        if need > free:
            most = rows * free // need
            raise UserError(
                f"{named}: {rows} rows of {capacity} tokens need about {need / 2**30:.1f} GiB of "
                f"cache and logits, {self.device} has {free / 2**30:.1f} GiB free; use "
                + (f"at most {most} rows" if most else "shorter texts or a smaller target")
            )

    def cache_bytes(self, rows: int, capacity: int, nodes: int = 1) -> int:
        """Bytes of the keys and values of rows x capacity tokens and of the logits of one step.

        An estimate from below: logits (rows, nodes, V) are counted in fp32 and with their softmax,
        activations not at all.
        """
        logits = 2 * 4 * rows * nodes * self.vocab_size
        return rows * capacity * self._slot_bytes + logits

    def forward(self, tokens: Tensor, step: Step, taps: Sequence[Tap] = ()) -> TargetOutput:
        if self.trees:
            return super().forward(tokens, step, taps)
        caches = step.slab.rows if isinstance(step.slab, ChainCache) else [None] * len(tokens)
        parts = []
        for row, (positions, cache) in enumerate(zip(step.positions, caches, strict=True)):
            row_step = Step(positions[None], step.key_positions, step.visible, cache)
            parts.append(super().forward(tokens[row : row + 1], row_step, taps))
        return _joined(parts, 0)

    def _run(self, tokens: Tensor, step: Step) -> None:
        if self.trees:
            if self.device.type != "cpu":
                self.fit_experts(tokens.numel())
            super()._run(tokens, step)
        elif isinstance(step.slab, RowCache):
            step.slab.write(tokens)
        else:
            self._run_own(tokens, None)

    def _run_own(self, tokens: Tensor, cache: transformers.DynamicCache | None) -> None:
        """The decoder with its own attention and mask, on one row that is not padded."""
        given = {} if cache is None else {str(self._cache_name): cache}
        self._decoder(input_ids=tokens, use_cache=cache is not None, **given)

    def read(self, batch: Batch, taps: Sequence[Tap], grad: bool = False) -> Batch:
        """Fills the batch's features and final state in one teacher-forced pass; returns it.

        grad: they keep their graph, for adapters that are trained on the target's layers.
        """
        step = packed_step(batch.position, batch.segment)
        with torch.set_grad_enabled(grad):
            out = self(batch.tokens, step, taps) if self.trees else self._read_apart(batch, taps)
        batch.features, batch.final = out.features, out.final
        return batch

    def _read_apart(self, batch: Batch, taps: Sequence[Tap]) -> TargetOutput:
        """Every segment in a forward of its own."""
        rows = []
        for tokens, segment in zip(batch.tokens, batch.segment, strict=True):
            lengths = segment.unique_consecutive(return_counts=True)[1].tolist()
            parts = []
            for piece in tokens.split(lengths):
                position = torch.arange(len(piece), device=self.device).unsqueeze(0)
                parts.append(self(piece.unsqueeze(0), packed_step(position, position * 0), taps))
            rows.append(_joined(parts, 1))
        return _joined(rows, 0)

    def _prove(self, reference: Tensor) -> None:
        """Settles `trees` by the reference logits; UserError where no way of reading gives them."""
        bound = selftest.allowed(reference)
        slab = Slab(1, selftest.ROOM, self.device)
        gap, ours = selftest.outcome(lambda: selftest.slab_gap(self, reference, slab))
        self._slot_bytes = slab.slot_bytes
        if gap <= bound:
            return
        family = type(self.hf).__name__
        problem = f"target {self.source.spec}: logits through draftsmith's attention {ours}"
        self.trees = False
        attend_by(self.hf, "eager")
        names = inspect.signature(self._decoder.forward).parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in names), None)
        if self._cache_name is None:
            raise UserError(f"{problem}, and {family} takes no cache; it is not supported")
        cache = self._chain_cache(2)
        gap, own = selftest.outcome(lambda: selftest.chain_gap(self, reference, cache))
        self._slot_bytes = cache.slot_bytes
        if not gap <= bound:
            raise UserError(
                f"{problem}; those in chains on its own cache {own} (allowed {bound:.3g}): family "
                f"{family} is not supported"
            )
        logger.warning(
            "%s (allowed %.3g): %s decodes exact chains on transformers' own cache, row by row, "
            "without trees or CUDA graphs",
            problem,
            bound,
            family,
        )

    def _chain_cache(self, rows: int) -> ChainCache:
        caches = [RowCache(self.config, self._run_own) for _ in range(rows)]
        return ChainCache(caches, self.device)


def _joined(parts: list[TargetOutput], dim: int) -> TargetOutput:
    features = {k: torch.cat([p.features[k] for p in parts], dim) for k in parts[0].features}
    return TargetOutput(torch.cat([p.final for p in parts], dim), features)


def free_bytes(device: torch.device) -> int:
    """Memory that new tensors can take on the device, torch's own unused reserve included."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return psutil.virtual_memory().available
