"""Builds the CPU kernels (narrow.cpp) once for a machine, with the machine's own compiler.

The library lies in the cache folder under a name that stands for all it depends on: source, flags,
torch, processor. A later process loads it at once; another machine on the same home builds its own.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import torch
from rich.console import Console

from draftsmith.drafters.cache import cache_folder
from draftsmith.drafters.errors import reason

SOURCE = Path(__file__).with_name("narrow.cpp")
_TORCH = Path(torch.__file__).parent
_FLAGS = [
    *("-O3", "-std=c++20", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=fast"),
    "-mcpu=native" if platform.machine() == "aarch64" else "-march=native",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    f"-I{_TORCH / 'include'}",
    f"-I{_TORCH / 'include' / 'torch' / 'csrc' / 'api' / 'include'}",
]
_TIMEOUT = 300  # seconds; 10 are usual


class NoKernels(Exception):
    """Why there are none, in a few words."""


@cache
def load() -> str:
    """Makes torch.ops.draftsmith's kernels available, once a process: "", or why they are not."""
    try:
        torch.ops.load_library(str(_library()))
    except NoKernels as error:
        return str(error)
    except OSError as error:  # torch's own says which file, what it came from says why
        return reason(error.__cause__ or error)
    return ""


def _library() -> Path:
    """The built library's path. Raises NoKernels where it cannot be built."""
    if sys.platform != "linux":
        raise NoKernels(f"they are for Linux, this is {sys.platform}")
    folder = cache_folder() / "kernels"
    library = folder / f"narrow-{key()}.so"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        link = [f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
        _build([_compiler(), *_FLAGS, str(SOURCE), *link], library)
    return library


def key() -> str:
    """Stands for all that the library depends on. Raises NoKernels where no compiler is found."""
    known = [SOURCE.read_text(), _compiler(), *_FLAGS, torch.__version__, _processor()]
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:16]


def _compiler() -> str:
    """The C++ compiler's path: CXX, or the first that is found. Raises NoKernels."""
    asked = os.environ.get("CXX")
    for name in [asked] if asked else ["c++", "g++", "clang++"]:
        if found := shutil.which(name):
            return found
    raise NoKernels(f"no C++ compiler ({asked or 'c++, g++, clang++'}) is installed")


def _processor() -> str:
    """What tells apart processors whose instructions differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = ("model name", "flags", "Features", "CPU part")
    facts = {line for line in lines if line.partition(":")[0].strip() in names}
    return "\n".join([platform.machine(), *sorted(facts)])


def _build(command: list[str], library: Path) -> None:
    """Appears under its name by one rename: of two builds at once each finds a whole file."""
    console = Console(stderr=True)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        out = Path(scratch) / library.name
        with console.status("building the CPU kernels, once on this machine: about 15 s"):
            try:
                done = subprocess.run(
                    [*command, "-o", str(out)], capture_output=True, text=True, timeout=_TIMEOUT
                )
            except subprocess.TimeoutExpired:
                raise NoKernels(f"{command[0]} took more than {_TIMEOUT} s") from None
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            first = (errors or done.stderr.splitlines() or [f"exit code {done.returncode}"])[0]
            raise NoKernels(f"{command[0]}: {first[:200]}")
        os.replace(out, library)
    seconds = time.perf_counter() - began
    console.print(f"built the CPU kernels in {seconds:.0f} s: {library}", soft_wrap=True)
