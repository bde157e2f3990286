"""transformers' assisted generation: a `small` drafter as a folder for `assistant_model`.

transformers 5.24, generation/candidate_generator.py: the assistant drafts greedily or, with
do_sample, draws by the target's own settings and is judged by min(1, p/q); it shares the target's
tokenizer when both vocabularies have one size.
"""

from __future__ import annotations

from typing import Any

from draftsmith.drafters.export import layouts
from draftsmith.drafters.export.server import Draft, Method, Server, Serving
from draftsmith.drafters.small import Small


def start(drafter: Small, draft: Draft, serving: Serving) -> str:
    """num_assistant_tokens_schedule keeps k as it is: by default it follows the acceptance. The
    sampler is named, since generate() cuts to 50 tokens otherwise."""
    how = ""
    if serving.sampler is not None and draft.drafts == "sampled":
        sampler = serving.sampler
        how = f", do_sample=True, temperature={sampler.temperature:g}, top_k={sampler.top_k}"
        how += f", top_p={sampler.top_p:g}"
    return (
        f"assistant = AutoModelForCausalLM.from_pretrained({str(draft.folder)!r}); "
        f"assistant.generation_config.num_assistant_tokens = {draft.k}; "
        "assistant.generation_config.num_assistant_tokens_schedule = 'constant'; "
        "assistant.generation_config.assistant_confidence_threshold = 0; "
        f"model.generate(**inputs, assistant_model=assistant{how})"
    )


METHODS: dict[str, Method[Any]] = {
    "small": layouts.draft_model("assistant_model", "transformers", drawn=True)
}
SERVER = Server("transformers", "5.24", METHODS, start, run=True)
