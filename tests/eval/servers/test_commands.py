"""Servers by name: what starts them, printed and by serve-check, and what a row of a table is for.

.venv/bin/pytest tests/eval/servers/test_commands.py
"""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftsmith.drafters import export
from draftsmith.drafters.base import Drafter
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.export import Draft, Serving
from draftsmith.drafters.export.server import Method
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.source import Source
from draftsmith.eval.servers import llama_cpp, process, serving
from draftsmith.eval.servers.serving import KINDS
from draftsmith.recipes import cli
from exports import drafter

NAMES = ["vllm", "sglang", "tensorrt-llm", "llama.cpp", "transformers"]
TARGET = Source("org/name", "/models/name", "abc", "folder")
PORT = 8001


def started(server: str, draft: Draft | None) -> list[str]:
    """What serve-check runs."""
    return KINDS[server].command(Path("/bin/it"), TARGET, draft, 64, PORT)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(llama_cpp, "target_gguf", lambda target: Path("/models/name.gguf"))
    (tmp_path / "draft.gguf").touch()
    return tmp_path


def test_what_serve_check_starts(place: Path) -> None:
    """Word for word: vLLM 0.32's arg_utils.py, llama.cpp's common/arg.cpp. Faults: the method of
    another family or server, a k that is not the export's, drafts that are not drawn."""
    vllm = shlex.split(
        "/bin/it -m vllm.entrypoints.openai.api_server --model /models/name --max-model-len 64 "
        "--generation-config vllm --host 127.0.0.1 --port 8001 --dtype float32 --max-num-seqs 1 "
        "--enforce-eager --no-enable-prefix-caching --gpu-memory-utilization 0.45"
    )
    assert started("vllm", None) == vllm
    methods = {"eagle": "eagle3", "eagle1": "eagle", "medusa": "medusa", "small": "draft_model"}
    for family, method in methods.items():
        *words, flag, how = started("vllm", Draft(place, family, 5))
        assert (words, flag) == (vllm, "--speculative-config")
        wanted = {"method": method, "model": str(place), "num_speculative_tokens": 5}
        assert json.loads(how) == wanted
        drawn = started("vllm", Draft(place, family, 5, "sampled"))[-1]
        assert json.loads(drawn) == wanted | {"draft_sample_method": "probabilistic"}
    how = json.loads(started("vllm", Draft(place, "peagle", 5))[-1])
    assert how["method"] == "eagle3" and how["parallel_drafting"] is True
    for family in ("dflash", "dspark"):
        assert json.loads(started("vllm", Draft(place, family, 5))[-1])["method"] == family
    fp32 = "-np 1 -t 1 -tb 1 --metrics --no-webui -fa off -ctk f32 -ctv f32"
    address = "-c 64 --host 127.0.0.1 --port 8001"
    plain = shlex.split(f"/bin/it -m /models/name.gguf {address} {fp32}")
    assert started("llama.cpp", None) == plain
    for family, method in {"eagle": "draft-eagle3", "small": "draft-simple"}.items():
        assert started("llama.cpp", Draft(place, family, 5)) == shlex.split(
            f"/bin/it -m /models/name.gguf -md {place}/draft.gguf --spec-type {method} "
            f"--spec-draft-n-max 5 --spec-draft-p-min 0 {address} {fp32} -td 1 -tbd 1 "
            "-ctkd f32 -ctvd f32"
        )


@pytest.mark.parametrize("server", ["vllm", "llama.cpp"])
def test_an_export_prints_what_serve_check_starts(server: str, place: Path) -> None:
    """But for the program, the port and the flags of an exact check. Fault: a second spelling."""
    settings: dict[str, dict[str, Any]] = {"small": {"layers": [0]}, "eagle": {"taps": [1, 2, 3]}}
    assert settings.keys() <= export.server(server).methods.keys()
    for family, config in settings.items():
        how = Serving(TARGET.path, 5, 64, target_gguf=Path("/models/name.gguf"))
        printed = export.server(server).command(drafter(family, **config), place, how)
        run = iter(started(server, Draft(place, family, 5)))
        assert all(word in run for word in shlex.split(printed)[1:]), printed


def test_an_export_without_its_file_is_told(place: Path) -> None:
    (place / "draft.gguf").unlink()
    with pytest.raises(UserError, match="holds no draft.gguf; export --to llama.cpp makes one"):
        started("llama.cpp", Draft(place, "small", 5))


def test_a_server_has_one_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(export.SERVERS) == NAMES and KINDS.keys() <= export.SERVERS.keys()
    for name, one in export.SERVERS.items():
        assert one.name == name and str(one) == f"{name} {one.version}"
    for command, names in (("export", NAMES), ("serve-check", list(KINDS))):
        monkeypatch.setattr("sys.argv", ["draftsmith", command, "--help"])
        monkeypatch.setenv("COLUMNS", "400")
        with pytest.raises(SystemExit):
            cli.main()
        said = capsys.readouterr().out
        assert all(name in said for name in names) and "to gguf" not in said


def test_a_family_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row alone takes a family that no server had: checked, written, served. Fault: a second
    list of families somewhere."""
    made = drafter("hydra")
    how = Serving("TARGET", 3, 128)
    with pytest.raises(UserError, match="vllm 0.32.0 loads no hydra drafter"):
        export.check("vllm", made, how)
    seen: list[Serving] = []

    def write(drafter: Drafter, folder: Path, serving: Serving) -> None:
        (folder / "hydra").write_text(drafter.family)

    method = Method("hydra-heads", lambda drafter, serving: seen.append(serving), write)
    vllm = export.server("vllm")
    monkeypatch.setitem(vllm.methods, "hydra", method)  # type: ignore[arg-type]
    export.write("vllm", made, tmp_path, how)
    assert seen == [how] and (tmp_path / "hydra").read_text() == "hydra"
    assert '"method": "hydra-heads"' in vllm.command(made, tmp_path, how)
    assert '"method": "hydra-heads"' in started("vllm", Draft(tmp_path, "hydra", 3))[-1]
    monkeypatch.setattr(process, "installed", lambda *_: Path("/bin/it"))
    serving.check("vllm", "hydra", 3)
    with pytest.raises(UserError, match="export it --to vllm"):
        export.check("sglang", made, how)
    hot = replace(how, sampler=Sampler(0.7))
    assert vllm.drafting(made, hot) == "greedy"
    monkeypatch.setitem(vllm.methods, "hydra", replace(method, draws=lambda drafter: True))  # type: ignore[arg-type]
    assert vllm.drafting(made, hot) == "sampled"
