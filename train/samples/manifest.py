"""What a samples folder says of itself: begun, gone on with, finished."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.target import Target
from draftsmith.train.samples import store
from draftsmith.train.samples.parts import Parts
from draftsmith.train.samples.samples import Samples, dtype_name

log = logging.getLogger(__name__)


def begun(target: Target, sampler: Sampler, origin: str) -> dict[str, Any]:
    """The manifest of samples whose rows are still to come."""
    return {
        "format": store.FORMAT,
        "state": "writing",
        "origin": origin,
        "foreign": False,
        "target": target.identity(),
        "dtype": dtype_name(target),
        "sampler": asdict(sampler),
        "seed": None,
        "max_new_tokens": None,
    }


def digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def same_settings(folder: Path, stored: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises UserError unless a run may go on with what another began."""
    then, new = _settings(stored), _settings(now)
    for name in new:
        if then.get(name) != new[name]:
            what = f"{then.get(name)} then, {new[name]} now"
            if name == "prompts":
                what = "other ones, or in another order"
            raise UserError(
                f"samples {folder}: were begun with other settings ({name}: {what}); use the same, "
                "or name another folder"
            )


def _settings(manifest: dict[str, Any]) -> dict[str, Any]:
    """What decides the answers."""
    out = {f"target {k}": v for k, v in manifest["target"].items() if k != "spec"}
    old = {"llama-server": "llama.cpp"}  # a name in samples from before
    out |= {f"server's {k}": old.get(v, v) for k, v in (manifest.get("server") or {}).items()}
    own = ("origin", "foreign", "dtype", "seed", "max_new_tokens", "prompts", "stop")
    return out | manifest["sampler"] | {name: manifest.get(name) for name in own}


def finish(
    folder: Path, manifest: dict[str, Any], parts: Parts, target: Target, audit: int
) -> Samples:
    """Merges the parts, audits, completes the manifest."""
    rows, given_up = parts.merge()
    finish = list(rows["finish"])
    made = sum(int(values.sum()) for _, values in store.chunks(rows, "made"))
    manifest = manifest | {
        "samples": len(rows),
        "tokens_made": made,
        "finish": {reason: finish.count(reason) for reason in sorted(set(finish))},
        "content_hash": store.content_hash(rows),
        "state": "complete",
    }
    if given_up:
        manifest["given_up"] = given_up
        why = ", ".join(f"{count} {reason}" for reason, count in given_up.items())
        log.warning("samples %s: prompts given up: %s", folder, why)
    out = Samples(folder, manifest, rows)
    out.prove(target, audit)
    store.write_manifest(folder, manifest)
    parts.remove()
    log.info("samples %s: %d, %d tokens made, %s", folder, len(rows), made, manifest["finish"])
    return out
