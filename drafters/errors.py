"""A user's mistake, in one line."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

# What writing weights raises on a full disk; torch.save hides the reason in a RuntimeError.
NOT_WRITTEN = (OSError, SafetensorError, RuntimeError)
# What transformers raises for a model that it cannot load: ImportError where quantised weights need
# a package that is missing.
LOAD_ERRORS = (
    OSError, ValueError, LookupError, TypeError, RuntimeError, ImportError, AttributeError,
    EOFError, pickle.PickleError, SafetensorError,
)  # fmt: skip


class UserError(ValueError):
    """One line naming file, field and remedy; the command line prints it and exits with code 2."""


def model_error(spec: str, text: str) -> UserError:
    return UserError(f"model {spec!r}: {text}")


def reason(error: BaseException) -> str:
    """The error as part of one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def said(error: BaseException) -> str:
    """Its words alone, as part of one line."""
    return " ".join(str(error).split())[:200]


def cannot_write(path: Path, error: BaseException, remedy: str) -> UserError:
    return UserError(f"{path}: cannot be written ({reason(error)}); {remedy}")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within it the line of a UserError starts with the file that it is about."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Within it, what transformers raises for a model that it cannot load is a UserError."""
    try:
        yield
    except UserError:
        raise
    except LOAD_ERRORS as error:
        raise UserError(f"{what}: transformers cannot load it ({reason(error)})") from None
