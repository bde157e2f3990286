"""Where a figure comes from: command, commit, versions, machine. Every report carries it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def provenance() -> dict[str, Any]:
    """command, commit, versions and machine of this process."""
    return {
        "command": command(),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """Processor, cores and threads in use; the GPU where there is one."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    names = ("draftsmith", "torch", "transformers", "accelerate", "datasets", "peft")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def command() -> str:
    """The command line of this process."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


def commit() -> str | None:
    """The git commit of this checkout ("+" when it has changes); None when it is not one."""
    root = Path(__file__).resolve().parents[2]

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != root:
            return None  # installed inside somebody else's checkout
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
