"""transformers' assisted generation: a `small` drafter as a folder for `assistant_model`.

transformers 5.24, generation/candidate_generator.py: the assistant drafts greedily or with the
target's own sampler, and shares its tokenizer when both vocabularies have one size.
"""

from __future__ import annotations

from pathlib import Path

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.export import Serving, drafting, hf_model
from draftsmith.drafters.small import Small

NAME = "transformers"
VERSION = "5.24"
RUN = True
LIMIT = None
FAMILIES = ("small",)


def draws(drafter: Drafter) -> bool:
    """With do_sample the assistant draws by the same settings, judged by min(1, p/q)."""
    return True


def check(drafter: Drafter, serving: Serving) -> None:
    assert isinstance(drafter, Small)
    hf_model.check(drafter, "transformers")


def write(drafter: Drafter, folder: Path, serving: Serving) -> None:
    assert isinstance(drafter, Small)
    hf_model.write(drafter, folder, serving)


def command(drafter: Drafter, folder: Path, serving: Serving) -> str:
    """num_assistant_tokens_schedule keeps k as it is: by default it follows the acceptance. The
    sampler is named, since generate() cuts to 50 tokens otherwise."""
    how = ""
    if serving.sampler is not None and drafting("transformers", drafter, serving) == "sampled":
        of = serving.sampler
        how = f", do_sample=True, temperature={of.temperature:g}, top_k={of.top_k}"
        how += f", top_p={of.top_p:g}"
    return (
        f"assistant = AutoModelForCausalLM.from_pretrained({str(folder)!r}); "
        f"assistant.generation_config.num_assistant_tokens = {serving.k}; "
        "assistant.generation_config.num_assistant_tokens_schedule = 'constant'; "
        "assistant.generation_config.assistant_confidence_threshold = 0; "
        f"model.generate(**inputs, assistant_model=assistant{how})"
    )
