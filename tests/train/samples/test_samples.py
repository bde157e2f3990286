"""Samples: stored as they were drawn, the same whatever the batches, refused when they are not.

.venv/bin/pytest tests/train/samples/test_samples.py
"""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.sampling import Sampler
from draftsmith.drafters.target.source import Source
from draftsmith.drafters.target.target import Target
from draftsmith.eval.decoder.text import Text
from draftsmith.train.data.chat_template import encode
from draftsmith.train.data.prompts import Prompt, asked
from draftsmith.train.samples import store
from draftsmith.train.samples.generate import generate
from draftsmith.train.samples.importing import import_answers
from draftsmith.train.samples.samples import Samples

WARM = Sampler(0.8, 10)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def questions(count: int = 12) -> list[Prompt]:
    """Prompts of 2 to 8 tokens, in no order of length; the last repeats the first."""
    out = [asked(" ".join(LETTERS[i : i + 1 + i * 5 % 7]), f"d{i % 2}") for i in range(count - 1)]
    return [*out, out[0]]


def rows(samples: Samples) -> list[tuple]:
    return [(s.ids, s.made, s.finish, s.domain, s.key) for s in samples]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve answers at WARM; read-only."""
    folder = tmp_path_factory.mktemp("stored") / "samples"
    generate(tiny.target(), questions(), WARM, 12, folder, batch_size=5)
    return folder


@pytest.fixture
def copy(stored: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stored, tmp_path / "copy")


def refused(folder: Path, *messages: str, target: Target | None = None, audit: int = 0) -> None:
    with pytest.raises(UserError) as error:
        Samples.open(folder, target or tiny.target(), audit)
    for message in (*messages, str(folder)):
        assert message in str(error.value)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- what is stored


def test_round_trip(stored: Path) -> None:
    target, asked_ = tiny.target(), questions()
    samples = Samples.open(stored, target, audit=12)
    assert len(samples) == 12 and samples.sampler == WARM and not samples.foreign
    for sample, prompt, ids in zip(samples, asked_, encode(asked_, target), strict=True):
        n = len(ids)
        assert sample.ids[:n] == ids and not any(sample.made[:n]) and all(sample.made[n:])
        assert len(sample.ids) == len(sample.made) > n
        assert (sample.key, sample.domain) == (prompt.key, prompt.domain)
        assert sample.finish == ("stop" if sample.ids[-1] == tiny.EOS else "length")
        assert sample.finish == "stop" or len(sample.ids) == n + 12
    manifest = samples.manifest
    assert manifest["state"] == "complete" and manifest["origin"] == "generated"
    assert manifest["target"] == target.identity()
    assert manifest["tokens_made"] == sum(sum(s.made) for s in samples)
    assert sum(manifest["finish"].values()) == manifest["samples"] == 12
    assert {p.name for p in stored.iterdir()} <= {"manifest.json", "samples", ".lock"}


def test_plain_datasets_reads_the_rows(stored: Path) -> None:
    import datasets

    plain = datasets.load_from_disk(str(stored / "samples"))
    assert plain.column_names == list(store.COLUMNS)
    assert plain.features["ids"].feature.dtype == "int32"


def test_counts_and_lengths(stored: Path) -> None:
    samples = Samples.open(stored, tiny.target(), audit=0)
    for some in (None, [3, 4, 11]):
        want = torch.zeros(tiny.VOCAB, dtype=torch.long)
        for i in range(12) if some is None else some:
            for token, made in zip(samples[i].ids, samples[i].made, strict=True):
                want[token] += made
        assert torch.equal(samples.token_counts(some), want)
    assert samples.lengths.tolist() == [len(s.ids) for s in samples]
    assert samples.first_made.tolist() == [s.made.index(True) for s in samples]


@pytest.mark.parametrize("sampler", [WARM, Sampler(0.0), Sampler(1.0, top_p=0.9)])
def test_batches_change_nothing(sampler: Sampler, tmp_path: Path) -> None:
    made = [
        generate(tiny.target(), questions(), sampler, 12, tmp_path / str(size), 3, batch_size=size)
        for size in (1, 5, 64)
    ]
    assert rows(made[0]) == rows(made[1]) == rows(made[2])
    assert len({m.manifest["content_hash"] for m in made}) == 1
    if not sampler.greedy:  # the first and the last prompt are one, their draws are not
        assert made[0][0].key == made[0][11].key and made[0][0].ids != made[0][11].ids
        other = generate(tiny.target(), questions(), sampler, 12, tmp_path / "seed", 4)
        assert rows(other) != rows(made[0])


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_greedy_answers_equal_transformers(family: str, tmp_path: Path) -> None:
    hf = tiny.hf_model(family)
    samples = generate(tiny.target(family), questions(), Sampler(0.0), 20, tmp_path / "s")
    for sample in samples:
        prompt = torch.tensor([sample.ids[: sample.made.index(True)]])
        want = hf.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)
        assert sample.ids == want[0].tolist()


def test_split(stored: Path, tmp_path: Path) -> None:
    samples = Samples.open(stored, tiny.target(), audit=0)
    train, held = samples.split(4, seed=0)
    assert sorted(train + held) == list(range(12)) and len(held) in (3, 4)
    assert not {samples[i].key for i in train} & {samples[i].key for i in held}
    assert samples.split(4, seed=0) == (train, held)
    assert len({tuple(samples.split(4, seed)[0]) for seed in range(8)}) == 8
    # Another order of rows, the same texts on each side in the same order.
    order = [7, 3, 11, 0, 1, 10, 2, 9, 8, 4, 6, 5]
    mixed = Samples(tmp_path, samples.manifest, samples._rows.select(order).flatten_indices())
    for seed in range(20):
        for one, two in zip(samples.split(4, seed), mixed.split(4, seed), strict=True):
            assert [samples[i].ids for i in one] == [mixed[i].ids for i in two]
    assert samples.split(0, 0)[1] == []
    for count in (12, -1):
        with pytest.raises(UserError, match=f"heldout: {count} of the 12 samples"):
            samples.split(count, 0)


# ---------------------------------------------------------------- what is refused


def test_another_target(stored: Path) -> None:
    def target(tokenizer: Any = None, revision: str = "none", **how: int) -> Target:
        source = Source("other", "other", revision, "folder")
        return Target(tiny.hf_model(**how), tokenizer or tiny.tokenizer(), source)

    template = tiny.tokenizer()
    template.chat_template = "a" + tiny.TEMPLATE
    refused(stored, "target's vocab_size is 48", target=target(vocab=60))
    refused(stored, "target's num_layers is 4, that of other is 3", target=target(layers=3))
    refused(stored, "target's tokenizer_hash", target=target(tiny.tokenizer(40)))
    refused(stored, "target's template_hash", target=target(template))
    refused(stored, "target's revision is none, that of other is v2", target=target(revision="v2"))
    # The same shape under the same name, other weights: only the audit can tell.
    refused(stored, "in 12 texts", "not this target's own", target=target(seed=1), audit=12)


def data_file(folder: Path) -> Path:
    (file,) = (folder / "samples").glob("*.arrow")
    return file


def cut_bytes(folder: Path) -> None:
    file = data_file(folder)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def cut_rows(folder: Path) -> None:
    short = store.load(folder / "samples", in_memory=True).select(range(11))
    store.save(short, folder / "samples")


def change_id(folder: Path) -> None:
    whole = store.load(folder / "samples", in_memory=True)
    changed = whole.map(lambda r, i: {"ids": [6, *r["ids"][1:]] if i == 3 else r["ids"]}, True)
    store.save(changed, folder / "samples")


def change_made(folder: Path) -> None:
    whole = store.load(folder / "samples", in_memory=True)
    store.save(whole.map(lambda r: {"made": [True] * len(r["made"])}), folder / "samples")


def manifest(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "manifest.json"
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))

    return edit


BROKEN = {
    "bytes cut": (cut_bytes, "samples"),
    "file emptied": (lambda f: data_file(f).write_bytes(b""), "cannot be read"),
    "file lost": (lambda f: data_file(f).unlink(), "cannot be read"),
    "rows cut": (cut_rows, "holds 11 rows where 12 were written"),
    "a token changed": (change_id, "its content is not what was written"),
    "flags changed": (change_made, "its content is not what was written"),
    "rows lost": (lambda f: shutil.rmtree(f / "samples"), "cannot be read"),
    "manifest lost": (lambda f: (f / "manifest.json").unlink(), "has no manifest.json"),
    "manifest cut": (lambda f: (f / "manifest.json").write_text('{"a'), "cannot be read"),
    "manifest empty": (lambda f: (f / "manifest.json").write_text("{}"), "cannot be read"),
    "field lost": (manifest(lambda m: m.pop("dtype")), "has no dtype"),
    "format": (manifest(lambda m: m.update(format=99)), "format 99"),
    "writing": (manifest(lambda m: m.update(state="writing")), "are still being written"),
    "folder lost": (shutil.rmtree, "no such folder"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_folder(copy: Path, name: str) -> None:
    fault, message = BROKEN[name]
    fault(copy)
    refused(copy, message)


def test_request_that_cannot_be_met(tmp_path: Path) -> None:
    target, one, folder = tiny.target(), questions(2), tmp_path / "s"
    faults = [
        (([], WARM, 4, folder), "prompts: there are none"),
        ((one, WARM, 0, folder), "max_new_tokens: 0"),
        ((one, WARM, 4, folder, 0, 0), "batch_size: 0"),
        (
            (one, WARM, 512, folder),
            "2 too long for the target's 512 positions .first: prompt 0: 2 tokens",
        ),
    ]
    for arguments, message in faults:
        with pytest.raises(UserError, match=message):
            generate(target, *arguments)
    assert not folder.exists()
    folder.mkdir()
    (folder / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"holds other files \(thesis.tex\)"):
        generate(target, one, WARM, 4, folder)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        generate(target, one, WARM, 4, tmp_path / "file")


def test_full_disk_is_told_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _: free)
    with pytest.raises(UserError, match="need up to .* MiB"):
        generate(tiny.target(), questions(2), WARM, 4, tmp_path / "s")


# ---------------------------------------------------------------- import


@cache
def written(sampler: Sampler, seed: int, count: int, of: Target) -> list[Text]:
    """Read-only: the same answers are read under many settings."""
    return tiny.texts(of, sampler, count, 24, seed)


def answers(sampler: Sampler, seed: int = 0, count: int = 32, of: Target | None = None) -> list:
    texts = written(sampler, seed, count, of or tiny.target())
    return [
        {
            "prompt_ids": [*t.prompt],
            "response_ids": [*t.tokens],
            "finish_reason": t.finish,
            "source": "q",
        }
        for t in texts
    ]


def imported(
    content: list, sampler: Sampler, folder: Path, target: Target | None = None, **how: Any
) -> Samples:
    folder.mkdir(exist_ok=True)
    file = folder / "answers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in content))
    return import_answers(file, target or tiny.target(), sampler, folder / "samples", **how)


def test_import(tmp_path: Path) -> None:
    content = answers(WARM)
    content[2]["key"] = "mine"
    samples = imported(content, WARM, tmp_path, audit=32)
    for sample, row in zip(samples, content, strict=True):
        assert sample.ids == row["prompt_ids"] + row["response_ids"]
        assert sample.made == [False] * len(row["prompt_ids"]) + [True] * len(row["response_ids"])
        assert (sample.finish, sample.domain) == (row["finish_reason"], "q")
    assert samples[2].key == "mine"
    assert samples[0].key == Prompt(None, tuple(content[0]["prompt_ids"]), "").key
    assert samples.manifest["origin"] == "imported"
    with pytest.raises(UserError, match="holds samples already"):
        imported(content, WARM, tmp_path)


def test_import_in_several_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.train.samples.importing._PART", 5)
    content = answers(WARM)
    samples = imported(content, WARM, tmp_path)
    assert [s.ids for s in samples] == [r["prompt_ids"] + r["response_ids"] for r in content]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": None}, "line 4: prompt_ids is no list"),
        ({"response_ids": []}, "line 4: response_ids is no list"),
        ({"response_ids": [1.5]}, "line 4: response_ids is no list"),
        ({"finish_reason": None}, "line 4: finish_reason is no text"),
        ({"response_ids": [48]}, "line 4: token 48 is outside the vocabulary"),
        ({"response_ids": [5] * 600}, "tokens exceed the target's 512 positions"),
        ({"min_p": 0.1, "repetition_penalty": 1.0}, "line 4: drawn with {'min_p': 0.1}, which"),
    ],
)
def test_import_faults_leave_nothing(tmp_path: Path, change: dict, message: str) -> None:
    content = answers(WARM)
    content[3] |= change
    with pytest.raises(UserError, match=message) as error:
        imported(content, WARM, tmp_path)
    assert "\n" not in str(error.value)
    assert {p.name for p in (tmp_path / "samples").iterdir()} <= {".lock"}
    del content[3]
    assert len(imported(content, WARM, tmp_path)) == 31


def test_import_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none.jsonl: cannot be read"):
        import_answers(tmp_path / "none.jsonl", tiny.target(), WARM, tmp_path / "s")


def test_foreign_only_by_name(tmp_path: Path) -> None:
    content = answers(Sampler(1.0), of=tiny.target(seed=1))
    with pytest.raises(UserError, match="foreign=True"):
        imported(content, Sampler(1.0), tmp_path)
    samples = imported(content, Sampler(1.0), tmp_path, foreign=True)
    assert samples.foreign and samples.manifest["foreign"] is True
    assert Samples.open(samples.folder, tiny.target()).foreign


# ---------------------------------------------------------------- the audit


@pytest.mark.parametrize(
    "sampler",
    [Sampler(), WARM, Sampler(0.0), Sampler(1.0, top_p=0.8), Sampler(1.3, 20, 0.9), Sampler(1, 1)],
)
def test_audit_passes_the_targets_own(sampler: Sampler, tmp_path: Path) -> None:
    for seed in range(5):
        family = tiny.FAMILIES[seed % 3]
        content = answers(sampler, seed, of=tiny.target(family))
        imported(content, sampler, tmp_path / str(seed), tiny.target(family), audit=32)


def unlikely(row: dict, place: int, sampler: Sampler) -> dict:
    """The row with the answer's token at `place` replaced by one just outside the support."""
    ids = row["prompt_ids"] + row["response_ids"][:place]
    logits = tiny.hf_model()(torch.tensor([ids])).logits[0, -1]
    order = logits.argsort(descending=True)
    kept = int((sampler.log_probs(logits) > -torch.inf).sum())
    response = list(row["response_ids"])
    response[place] = int(order[kept])
    return row | {"response_ids": response}


@pytest.mark.parametrize("sampler", [WARM, Sampler(1.0, top_p=0.8)])
def test_one_token_outside_the_support(sampler: Sampler, tmp_path: Path) -> None:
    """At a text's end, so that nothing after it can look odd."""
    for seed in range(3):
        content = answers(sampler, seed)
        place = len(content[7]["response_ids"]) - 1
        content[7] = unlikely(content[7], place, sampler)
        position = len(content[7]["prompt_ids"]) + place
        with pytest.raises(UserError) as error:
            imported(content, sampler, tmp_path / str(seed), audit=32)
        assert "\n" not in str(error.value)
        assert f"1 of {total(content)} tokens in 32 texts cannot be drawn" in str(error.value)
        assert f"(first: sample 7, position {position})" in str(error.value)


def total(content: list) -> int:
    return sum(len(row["response_ids"]) for row in content)


def shifted(row: dict) -> dict:
    """The classic: prompt and answer split one token late."""
    ids = [token for token in row["response_ids"] if token != tiny.EOS] or [2]
    return row | {"response_ids": ids[1:] + ids[:1], "finish_reason": "length"}


def swapped(row: dict) -> dict:
    ids = list(row["response_ids"])
    middle = len(ids) // 2
    other = (ids[middle] + 7) % tiny.VOCAB
    ids[middle] = other if other != tiny.EOS else other + 1
    return row | {"response_ids": ids}


def prompt_lost(row: dict) -> dict:
    return row | {"prompt_ids": row["prompt_ids"][-1:]}


FAULTS = {
    "colder than said": (Sampler(0.6), Sampler(1.0), None, "z = "),
    "hotter than said": (Sampler(1.0), Sampler(0.6), None, "z = -"),
    "top-k left out": (Sampler(1.0), Sampler(1.0, 5), None, "cannot be drawn"),
    "top-k not told": (Sampler(1.0, 5), Sampler(1.0), None, "z = "),
    "top-p not told": (Sampler(1.0, top_p=0.6), Sampler(1.0), None, "z = "),
    "greedy, said to be sampled": (Sampler(0.0), Sampler(1.0), None, "z = "),
    "sampled, said to be greedy": (Sampler(1.0), Sampler(0.0), None, "not the target's argmax"),
    "ids shifted by one": (Sampler(1.0), Sampler(1.0), shifted, "z = -"),
    "greedy ids shifted": (Sampler(0.0), Sampler(0.0), shifted, "not the target's argmax"),
    "prompt lost": (Sampler(1.0), Sampler(1.0), prompt_lost, "z = -"),
    "a wrong token": (Sampler(0.0), Sampler(0.0), swapped, "not the target's argmax"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_audit_catches(name: str, tmp_path: Path) -> None:
    drawn, said, change, message = FAULTS[name]
    for seed in range(3):
        content = [change(row) if change else row for row in answers(drawn, seed)]
        # Into a folder that nobody audited: opening does it.
        samples = imported(content, said, tmp_path / str(seed), audit=0)
        refused(samples.folder, message, "not this target's own at temperature", audit=32)


def test_one_wrong_token_in_a_greedy_set(tmp_path: Path) -> None:
    """The text after it is the argmax of another prefix, which gives it away."""
    content = answers(Sampler(0.0))
    content[5] = swapped(content[5])
    with pytest.raises(UserError, match="are not the target's argmax"):
        imported(content, Sampler(0.0), tmp_path, audit=32)


def test_half_precision_passes_by_its_own_tolerance(tmp_path: Path) -> None:
    """bfloat16 logits differ between a batched round and a teacher-forced pass."""
    hf = tiny.hf_model("Qwen3").to(torch.bfloat16)
    target = Target(hf, tiny.tokenizer(), tiny.source())
    for i, sampler in enumerate((Sampler(0.0), Sampler(1.0, 5), Sampler(1.0, top_p=0.8))):
        samples = generate(target, questions(), sampler, 24, tmp_path / str(i))
        assert samples.manifest["dtype"] == "bfloat16"
        Samples.open(samples.folder, target, audit=12)


def test_audit_reads_a_seeded_few(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []

    def record(target: Target, texts: list, *rest: Any) -> Any:
        seen.append([number for number, _, _ in texts])
        return audit(target, texts, *rest)

    from draftsmith.train.samples import samples as samples_module

    audit = samples_module.audit
    monkeypatch.setattr(samples_module, "audit", record)
    for count in (5, 5, 100, 0):
        Samples.open(stored, tiny.target(), audit=count)
    assert seen[0] == seen[1] and len(seen[0]) == 5
    assert sorted(seen[2]) == list(range(12)) and len(seen) == 3


@pytest.mark.real
def test_smollm2_answers_and_passes(tmp_path: Path) -> None:
    """Six of our prompts at T 0.8, top-k 50; then one token changed, which must not pass."""
    from draftsmith.train.data.prompts import product_prompts

    target = Target.load("smollm2")
    sampler = Sampler(0.8, 50)
    samples = generate(target, product_prompts("train")[:6], sampler, 32, tmp_path / "s")
    samples = Samples.open(samples.folder, target, audit=6)
    content = []
    for sample in samples:
        cut = sample.made.index(True)
        prompt, response = sample.ids[:cut], sample.ids[cut:]
        content.append(
            {"prompt_ids": prompt, "response_ids": response, "finish_reason": sample.finish}
        )
    content[2]["response_ids"][-1] = 40_000
    with pytest.raises(UserError, match="1 of .* cannot be drawn by their sampler"):
        imported(content[2:3], sampler, tmp_path, target)
