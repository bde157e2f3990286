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
    """The process's command line and commit, versions, and the machine: processor, cores, threads
    in use, and the GPU where there is one."""
    machine: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return {"command": command, "commit": _commit(), "versions": _versions(), "machine": machine}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.is_file() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    """Versions of what the figures depend on."""
    names = ("draftsmith", "torch", "transformers", "accelerate", "datasets", "peft")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
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
