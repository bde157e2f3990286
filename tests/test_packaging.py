"""The wheel holds exactly the four folders, and imports run one way.

    .venv/bin/pytest tests/test_packaging.py

Both checks are functions that return a list of faults, so that each is also shown a planted fault.
"""

import ast
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

from places import ROOT

FOLDERS = ("drafters", "eval", "train", "recipes")  # lowest first: each may import those before it
LIGHT = ("drafters", "eval")  # what a user needs to run a drafter: import without these two
HEAVY = ("datasets", "wandb")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what a commit of this working tree would hold."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    copy = tmp_path / "tree"
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():  # else deleted, but not yet committed
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


# ---------------------------------------------------------------- the wheel


def build_wheel(tree: Path) -> set[str]:
    """Builds `tree` with its own backend; the names of the files in the wheel."""
    code = "import setuptools.build_meta as b; b.build_wheel('dist')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tree / "dist").glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def wheel_faults(tree: Path, names: set[str]) -> list[str]:
    """How the wheel's content differs from the four folders'. Their notes (.md) may stay out."""
    want = {
        f"draftsmith/{path.relative_to(tree).as_posix()}"
        for folder in FOLDERS
        for path in (tree / folder).rglob("*")
        if path.is_file() and path.suffix not in (".md", ".pyc")
    }
    want |= {f"draftsmith/{folder}/{name}" for folder in FOLDERS for name in MUST}
    got = {name for name in names if ".dist-info" not in PurePosixPath(name).parts[0]}
    return [f"missing: {n}" for n in sorted(want - got)] + [
        f"not ours: {n}" for n in sorted(got - want)
    ]


MUST = ("__init__.py", "py.typed")  # recipes/ too: importlib.resources needs a real package


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path.name} no longer has {old!r}: plant the fault another way"
    path.write_text(text.replace(old, new, 1))


def test_wheel_is_the_folders(tree: Path) -> None:
    (tree / "train/data/example.yaml").write_text("a: 1\n")  # package data
    (tree / "recipes" / "example.yaml").write_text("a: 1\n")
    names = build_wheel(tree)
    assert "draftsmith/train/data/example.yaml" in names
    assert wheel_faults(tree, names) == []


def test_forgotten_subpackage_is_found(tree: Path) -> None:
    (tree / "eval" / "planted").mkdir()
    (tree / "eval" / "planted" / "__init__.py").touch()
    assert wheel_faults(tree, build_wheel(tree)) == ["missing: draftsmith/eval/planted/__init__.py"]


def test_leaked_top_level_names_are_found(tree: Path) -> None:
    """Top-level `tests` or `train` in a wheel overwrites another package's without a warning."""
    edit(tree / "pyproject.toml", '    "draftsmith.train",\n', '    "tests",\n    "train",\n')
    (tree / "tests" / "__init__.py").touch()
    faults = wheel_faults(tree, build_wheel(tree))
    assert "not ours: tests/test_packaging.py" in faults
    assert "not ours: train/__init__.py" in faults
    assert "missing: draftsmith/train/__init__.py" in faults


def test_missing_py_typed_is_found(tree: Path) -> None:
    (tree / "drafters" / "py.typed").unlink()
    assert wheel_faults(tree, build_wheel(tree)) == ["missing: draftsmith/drafters/py.typed"]


# ---------------------------------------------------------------- the imports


@cache
def imported(source: str, package: str) -> set[str]:
    """Every module that `source`, a module in `package`, imports anywhere: in functions and under
    TYPE_CHECKING too, relative names made absolute. `from a import b` counts as a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parts = parts[: len(parts) - node.level + 1]
                base = ".".join(parts + ([base] if base else []))
            found |= {base} | {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call):  # import_module("..."), __import__("...")
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func
            called = called.id if isinstance(called, ast.Name) else called
            if called in ("import_module", "__import__") and node.args:
                if isinstance(node.args[0], ast.Constant):
                    found.add(str(node.args[0].value))
    return found


def import_faults(tree: Path) -> list[str]:
    """`path imports module`, for each import that points up or that a light folder may not have."""
    faults = []
    for rank, folder in enumerate(FOLDERS):
        banned = [f"draftsmith.{up}" for up in FOLDERS[rank + 1 :]]
        banned += FOLDERS  # without the namespace: a second copy of the module
        banned += HEAVY if folder in LIGHT else ()
        for path in sorted((tree / folder).rglob("*.py")):
            where = path.relative_to(tree)
            package = ".".join(("draftsmith", *where.parent.parts))
            modules = imported(path.read_text(), package)
            faults += [
                f"{where.as_posix()} imports {bad}"
                for bad in banned
                if any(m == bad or m.startswith(bad + ".") for m in modules)
            ]
    return faults


def test_imports_run_one_way(tree: Path) -> None:
    assert import_faults(tree) == []


@pytest.mark.parametrize(
    ("path", "line", "bad"),
    [
        ("drafters/planted.py", "import draftsmith.eval.acceptance.replay", "draftsmith.eval"),
        ("drafters/planted.py", "from draftsmith import eval", "draftsmith.eval"),
        ("eval/planted.py", "from draftsmith.train.loop import fit", "draftsmith.train"),
        ("eval/decoder/planted.py", "from ...train import loop", "draftsmith.train"),
        ("eval/__init__.py", "from .. import recipes", "draftsmith.recipes"),
        ("train/planted.py", "def f():\n    from ..recipes.cli import main", "draftsmith.recipes"),
        (
            "train/planted.py",
            "m = importlib.import_module('draftsmith.recipes')",
            "draftsmith.recipes",
        ),
        ("recipes/planted.py", "import train", "train"),
        ("drafters/planted.py", "def f():\n    import wandb", "wandb"),
        ("eval/planted.py", "from datasets import load_dataset", "datasets"),
    ],
)
def test_planted_import_is_found(tree: Path, path: str, line: str, bad: str) -> None:
    (tree / path).write_text(line + "\n")
    assert f"{path} imports {bad}" in import_faults(tree)


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("recipes/planted.py", "from draftsmith import train, eval, drafters"),
        ("train/planted.py", "import datasets, wandb\nfrom ..eval.decoder import loop"),
        ("eval/decoder/planted.py", "from . import accept\nfrom ..stats import row_stats"),
        ("drafters/planted.py", "from .eval_table import x\nmodel.eval()"),
    ],
)
def test_lawful_import_passes(tree: Path, path: str, line: str) -> None:
    (tree / path).write_text(line + "\n")
    assert import_faults(tree) == []
