"""Whether a target's verify pass can be a CUDA graph, found out without a GPU.

A graph replays kernels only: a forward that looks at a value on the host cannot be captured. On
fake tensors, which have shapes but no values, such a look raises, on any device.
"""

from __future__ import annotations

import logging

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from draftsmith.drafters.target.attention import tree_shape, tree_step
from draftsmith.drafters.target.slab import Slab
from draftsmith.drafters.target.target import Target


@torch.no_grad()
def capture_problem(target: Target, nodes: int = 4, rows: int = 1) -> str | None:
    """Why a verify pass of rows x nodes tokens cannot be captured: a few words, or None.

    Known ones: experts that loop on the host, `dynamic` rope, `longrope` before transformers 5.20,
    and layers spread by accelerate's device_map, whose hooks copy.
    """
    if not target.trees:
        return "it decodes on transformers' own cache"
    modules = list(target.hf.modules())
    if any(hasattr(module, "_hf_hook") for module in modules):
        return "accelerate's device_map hooks copy tensors inside the forward"
    # What a forward caches on its modules (longrope its frequencies) would stay fake.
    before = [(module, dict(vars(module)), dict(module._buffers)) for module in modules]
    target.fit_experts(rows * nodes)
    noise = logging.getLogger("torch._subclasses.fake_tensor")  # prints a traceback of its own
    level = noise.level
    noise.setLevel(logging.CRITICAL)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            slab = Slab(rows, nodes, target.device)
            slab.bound = 0
            parents = torch.arange(-1, nodes - 1, device=target.device).expand(rows, -1)
            step = tree_step(slab, *tree_shape(parents))
            out = target(torch.zeros_like(parents), step, [0, target.num_layers])
            target.head(out.final)
    except RuntimeError as error:  # a host read, or experts by grouped_mm in fp32
        reason = getattr(error, "func", None) or str(error).strip().splitlines()[0]
        return f"its forward cannot run without values ({reason})"
    finally:
        noise.setLevel(level)
        target.use_experts("as loaded")
        for module, attributes, buffers in before:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
    return None
