"""Where the project's files lie, from wherever a test lies."""

from pathlib import Path

ROOT = next(p for p in Path(__file__).resolve().parents if (p / "pyproject.toml").is_file())
RECIPES = ROOT / "recipes"
BENCHMARKS = ROOT / "benchmarks"
