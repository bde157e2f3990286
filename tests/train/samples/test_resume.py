"""Generation that was killed goes on where it stopped: nothing lost, nothing twice, equal rows.

    .venv/bin/pytest tests/train/samples/test_resume.py

Run as a script, `test_resume.py FOLDER`, it is the driver of the kill test: one process
that imports everything once and forks the runs that are killed.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tiny
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.train.data.prompts import Prompt, asked
from draftsmith.train.samples import store
from draftsmith.train.samples.generate import generate
from draftsmith.train.samples.importing import import_answers
from draftsmith.train.samples.samples import Samples
from draftsmith.train.samples.writing import Parts

WARM = Sampler(0.8, 10)
BATCH, PROMPTS, TOKENS = 3, 11, 8  # four batches
SEEDS = range(4)


def questions() -> list[Prompt]:
    """Prompts of 2 to 8 tokens; two are asked twice."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    out = [asked(" ".join(letters[i : i + 1 + i * 5 % 7]), "d") for i in range(PROMPTS - 2)]
    return [*out, out[0], out[5]]


def run(folder: Path, batch_size: int = BATCH) -> Samples:
    return generate(tiny.target(), questions(), WARM, TOKENS, folder, 1, batch_size)


def content(folder: Path) -> list[tuple]:
    samples = Samples.open(folder, tiny.target(), audit=0)
    return [(s.ids, s.made, s.finish, s.domain, s.key) for s in samples]


# ---------------------------------------------------------------- the driver of the kills


def child(work: Callable[[], object], kill_after: float | None = None) -> int | None:
    """Runs work in a fork and, after a time, SIGKILLs it; its exit code, None when killed."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:  # the fork must never run on into its parent's code
            print(repr(error), file=sys.stderr)
            os._exit(1)
        os._exit(0)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    return None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def dies_at(call: int, after: bool, folder: Path) -> None:
    """Runs, and kills itself before or after its call-th rename or removal."""
    count = 0

    def deadly(name: str, original: Callable) -> Callable:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count == call and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            out = original(*args, **kwargs)
            if count == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return out

        return wrapped

    for name in ("rename", "replace", "rmdir"):
        setattr(os, name, deadly(name, getattr(os, name)))
    run(folder)


def drive(base: Path) -> None:
    """Prints, as JSON, what became of runs killed at every step and at seeded times."""
    store.library()  # what takes seconds, once for all forks
    tiny.target()
    whole = base / "whole"
    began = time.monotonic()
    assert child(lambda: run(whole)) == 0
    seconds = time.monotonic() - began
    report: dict[str, Any] = {"steps": 0, "timed": []}
    for call in range(1, 100):
        folder = base / f"step{call}"
        died = child(lambda: dies_at(call, call % 2 == 0, folder)) is None  # noqa: B023
        if not died:
            break
        report["steps"] += 1
        assert child(lambda: run(folder)) == 0  # noqa: B023
    for seed in SEEDS:
        folder = base / f"timed{seed}"
        draw = random.Random(seed)
        kills = 0
        while child(lambda: run(folder), draw.uniform(0, seconds)) is None:  # noqa: B023
            kills += 1
        assert child(lambda: run(folder)) == 0  # noqa: B023
        report["timed"].append(kills)
    print(json.dumps(report))


@pytest.mark.slow
def test_killed_runs_equal_an_uninterrupted_one(tmp_path: Path) -> None:
    # a fork after threads were started may hang; the script imports what tests share
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["steps"] >= 8  # two manifests, four parts, the rows, the parts' removal
    assert sum(report["timed"]) >= 1  # how many depends on the machine; every step is killed above
    want = content(tmp_path / "whole")
    assert [row[4] for row in want] == [p.key for p in questions()]
    manifest = (tmp_path / "whole" / "manifest.json").read_text()
    folders = [p for p in tmp_path.iterdir() if p.name[:4] in ("step", "time")]
    assert len(folders) >= report["steps"] + len(SEEDS)
    for folder in folders:
        assert content(folder) == want, folder.name
        assert (folder / "manifest.json").read_text() == manifest
        left = {p.name for p in folder.iterdir()}
        assert left <= {"manifest.json", "samples", ".lock"}, folder.name


# ---------------------------------------------------------------- what a resume accepts


class Stop(BaseException):
    """Ends a run in the middle, as Ctrl-C would."""


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two of four batches."""
    folder = tmp_path / "begun"
    add = Parts.add

    def once_more(self: Parts, rows: list[dict]) -> None:
        if len(self.indices) == 2 * BATCH:
            raise Stop
        add(self, rows)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Parts, "add", once_more)
        run(folder)
    return folder


def test_stored_prompts_are_not_answered_again(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: list[int] = []
    add = Parts.add

    def counted(self: Parts, rows: list[dict]) -> None:
        answered.extend(row["index"] for row in rows)
        add(self, rows)

    monkeypatch.setattr(Parts, "add", counted)
    run(begun, batch_size=4)
    assert len(answered) == PROMPTS - 2 * BATCH
    run(begun)  # complete: opened, nothing is answered
    assert len(answered) == PROMPTS - 2 * BATCH
    run(tmp_path / "whole")
    assert content(begun) == content(tmp_path / "whole")


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: Path) -> None:
    """One line; what was stored stays, and with room the run goes on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept = {part.name for part in (begun / store.PARTS).iterdir()}
    write = store.write_manifest
    monkeypatch.setattr(store, "write_manifest", lambda *given: None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(UserError, match="cannot be written.*run the same command again"):
            run(begun)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert {part.name for part in (begun / store.PARTS).iterdir()} == kept
    monkeypatch.setattr(store, "write_manifest", write)
    run(begun)
    run(tmp_path / "whole")
    assert content(begun) == content(tmp_path / "whole")


def test_open_refuses_an_unfinished_run(begun: Path) -> None:
    with pytest.raises(UserError, match="are still being written"):
        Samples.open(begun, tiny.target())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampler": Sampler(0.8, 11)}, "top_k: 10 then, 11 now"),
        ({"max_new_tokens": 9}, "max_new_tokens: 8 then, 9 now"),
        ({"seed": 2}, "seed: 1 then, 2 now"),
        ({"prompts": questions()[1:]}, "prompts: other ones, or in another order"),
        ({"prompts": questions()[::-1]}, "prompts: other ones, or in another order"),
        ({"target": ("Llama", 0, 3)}, "target num_layers: 4 then, 3 now"),
    ],
)
@pytest.mark.parametrize("complete", [False, True])
def test_other_settings(begun: Path, change: dict, message: str, complete: bool) -> None:
    if complete:
        run(begun)
    how = {"prompts": questions(), "sampler": WARM, "max_new_tokens": TOKENS, "seed": 1} | change
    target = tiny.target(*how.pop("target", ()))
    with pytest.raises(UserError) as error:
        generate(target, folder=begun, **how)
    assert message in str(error.value) and "\n" not in str(error.value)
    run(begun)


def test_broken_part_is_told_and_made_anew(begun: Path, tmp_path: Path) -> None:
    part = sorted((begun / "parts").iterdir())[0]
    (file,) = part.glob("*.arrow")
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(UserError, match=f"{part.name}: cannot be read .* delete it and run again"):
        run(begun)
    shutil.rmtree(part)
    run(begun)
    run(tmp_path / "whole")
    assert content(begun) == content(tmp_path / "whole")


def test_two_runs_at_once(begun: Path) -> None:
    with store.claimed(begun), pytest.raises(UserError, match="another run is writing there"):
        run(begun)


def test_too_little_memory_names_the_batch(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("draftsmith.train.samples.answers.Decoder.generate", full)
        with pytest.raises(UserError, match="batch_size: 3 answers at once do not fit"):
            run(begun)
    run(begun)


def test_killed_import_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.jsonl"
    texts = tiny.texts(tiny.target(), WARM, 6)
    rows = [
        {"prompt_ids": t.prompt, "response_ids": t.tokens, "finish_reason": t.finish} for t in texts
    ]
    file.write_text("\n".join(map(json.dumps, rows)))

    def stop(self: Parts) -> None:
        raise Stop

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Parts, "merge", stop)
        import_answers(file, tiny.target(), WARM, tmp_path / "s")
    with pytest.raises(UserError, match="origin: imported then, generated now"):
        run(tmp_path / "s")
    assert len(import_answers(file, tiny.target(), WARM, tmp_path / "s")) == 6


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
