"""Medusa-2: what moves a target, what it is stored as, and that nothing of the old one passes for
the new one's.

    .venv/bin/pytest tests/train/test_medusa2.py
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM

pytest.importorskip("datasets")

import tiny
import training
from draftsmith.drafters import storage
from draftsmith.drafters.batch import align
from draftsmith.drafters.errors import UserError
from draftsmith.drafters.target.target import Target
from draftsmith.recipes import compare, export, report
from draftsmith.train import checkpoint, journal, loop, lora, medusa2, recipe
from draftsmith.train.loop import Run
from draftsmith.train.medusa2 import Medusa2
from draftsmith.train.objective import losses
from draftsmith.train.run import main
from draftsmith.train.samples.packing import collate
from draftsmith.train.samples.samples import Sample, Samples
from training import World

RANK, STEPS, WEIGHT, DECAY = 4, 8, 0.3, 0.8
KEYS: dict[str, Any] = {
    "adapt": RANK,
    "adapt_lr": 1e-2,
    "adapt_weight": WEIGHT,
    "draft_vocab": None,
    "decay": DECAY,
    "steps": STEPS,
    "save_every": 3,
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("adapt"))


@pytest.fixture(scope="module")
def run(world: World) -> Path:
    """A run that nobody disturbed."""
    assert main([str(adapting(world, "whole"))]) == 0
    return world.folder("whole")


def adapting(world: World, name: str, drafter: str = "medusa", **changes: Any) -> Path:
    return world.recipe(name, drafter, **KEYS | changes)


def begun(world: World, name: str, **changes: Any) -> Medusa2:
    """A run before its first step."""
    chosen = recipe.load(adapting(world, name, **changes))
    target = Target.load(chosen.target)
    samples = Samples.open(world.samples, target, audit=0)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    return Medusa2(chosen, target, samples, Accelerator(cpu=True))


# ---------------------------------------------------------------- the loss


class Reference:
    """Both losses of some texts in float64, text by text: plain HF models whose weights are
    W + 2 B A, no adapters, hooks, packing or chunks."""

    def __init__(self, folder: Path, of: Medusa2) -> None:
        self.hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        self.adapters = {n: self._leaf(p) for n, p in of.adapters.weights.items()}
        self.heads = {n: self._leaf(p) for n, p in of.drafter.named_parameters()}
        self.count = of.drafter.config.heads

    @staticmethod
    def _leaf(parameter: Tensor) -> Tensor:
        return parameter.detach().double().requires_grad_()

    def states(self, ids: list[int], adapted: bool) -> Tensor:
        """The normed states (T, H)."""
        weights = dict(self.hf.model.named_parameters())
        for name, down in self.adapters.items() if adapted else ():
            if "lora_A" in name:
                up = self.adapters[name.replace("lora_A", "lora_B")]
                plain = name.removeprefix("model.").replace(".lora_A.default", "")
                weights[plain] = weights[plain] + 2 * up @ down
        given = {"input_ids": torch.tensor([ids]), "use_cache": False}
        return functional_call(self.hf.model, weights, (), given).last_hidden_state[0]

    def law(self, states: Tensor) -> Tensor:
        return F.log_softmax(self.hf.lm_head(states), -1)

    def moved(self, sample: Sample) -> Tensor:
        """KL(old || new), summed over the tokens made."""
        where = [t for start, end in sample.spans for t in range(start - 1, end - 1)]
        with torch.no_grad():
            old = self.law(self.states(sample.ids, adapted=False))[where]
        new = self.law(self.states(sample.ids, adapted=True))[where]
        return (old.exp() * (old - new)).sum()

    def missed(self, sample: Sample) -> Tensor:
        """The heads' weighted KL from the new target's own law, which is held still."""
        g = self.states(sample.ids, adapted=True)
        p = self.law(g).detach()
        total = torch.zeros((), dtype=torch.float64)
        for start, end in sample.spans:
            for a in range(start - 1, end):
                for j in range(min(self.count, end - a - 2)):
                    at = f"blocks.{j}.0.linear"
                    inner = self.heads[f"{at}.weight"] @ g[a] + self.heads[f"{at}.bias"]
                    state = g[a] + F.silu(inner)
                    q = F.log_softmax(self.heads[f"lm_heads.{j}.weight"] @ state, -1)
                    law = p[a + 1 + j]
                    total = total + DECAY**j * (law.exp() * (law - q)).sum()
        return total


def check_gradients(world: World, patch: pytest.MonkeyPatch | None = None) -> None:
    """One micro-batch's gradients are the reference's, in adapters and in heads."""
    made = begun(world, "gradients", adapt_after=0, steps=2)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in (made.adapters.weights | dict(made.drafter.named_parameters())).items():
            if "lora_B" in name or "linear" in name:
                p.normal_(std=0.1)
    rows = [made.learn[:2], made.learn[2:3]]
    texts = [made.samples[i] for row in rows for i in row]
    batch = collate(made.samples, rows, 64)
    alignment, noise = align(batch, made.depths), made._noise([0, 1])
    made._micro(made.states.fill(batch, rows), alignment, noise, 10.0)
    reference = Reference(world.target, made)
    moved = torch.stack([reference.moved(text) for text in texts]).sum() / 10
    missed = torch.stack([reference.missed(text) for text in texts]).sum() / 10
    down = list(reference.adapters.values())
    wanted = torch.autograd.grad(moved + WEIGHT * missed, down, retain_graph=True)
    for parameter, grad in zip(made.adapters.weights.values(), wanted, strict=True):
        close(parameter.grad, grad)
    wanted = torch.autograd.grad(missed, list(reference.heads.values()))
    for parameter, grad in zip(made.drafter.parameters(), wanted, strict=True):
        close(parameter.grad, grad)


def close(ours: Tensor | None, wanted: Tensor) -> None:
    assert ours is not None and wanted.abs().max() > 1e-5
    gap = (ours.double() - wanted).abs().max() / wanted.abs().max()
    assert gap < 1e-3, float(gap)


def test_gradients(world: World) -> None:
    check_gradients(world)


def _heads_learn_the_old_law(patch: pytest.MonkeyPatch) -> None:
    read, before = Target.read, []

    def remember(self: Target, batch: Any, taps: Any, grad: bool = False) -> Any:
        out = read(self, batch, taps, grad)
        if not grad:
            before.append(out.final)
        return out

    def wrong(drafter: Any, batch: Any, *rest: Any) -> Any:
        return losses.backward(drafter, replace(batch, final=before[-1]), *rest)

    patch.setattr(Target, "read", remember)
    patch.setattr("draftsmith.train.learner.backward", wrong)


def _the_old_target_is_adapted_too(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(medusa2, "around_same_weights", lambda target: target)


def _kl_the_other_way(patch: pytest.MonkeyPatch) -> None:
    def wrong(target: Any, old: Tensor, new: Tensor, where: Tensor, rows: int) -> Any:
        leaf = new.detach().requires_grad_()
        q, p = (F.log_softmax(target.head(x)[where], -1) for x in (leaf, old))
        total = (q.exp() * (q - p)).sum()
        return float(total.detach()), torch.autograd.grad(total, leaf)[0]

    patch.setattr(medusa2, "divergence", wrong)


def _tokens_of_the_prompt_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(medusa2, "next_made", lambda batch: batch.segment >= 0)


def _across_texts(patch: pytest.MonkeyPatch) -> None:
    """The last token of a text judged by the next one's first."""
    patch.setattr(medusa2, "next_made", lambda batch: batch.made)


@pytest.mark.parametrize(
    "fault",
    [
        _heads_learn_the_old_law,
        _the_old_target_is_adapted_too,
        _kl_the_other_way,
        _tokens_of_the_prompt_count,
        _across_texts,
    ],
)
def test_gradients_planted(world: World, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_gradients(world)


def test_what_moves(world: World) -> None:
    """Adapters and heads do, not a bit of the old weights; without the heads' pull the adapters
    stay where they are, bit for bit: nothing draws the target away from itself."""
    old = dict(AutoModelForCausalLM.from_pretrained(world.target).named_parameters())
    for weight in (WEIGHT, 0.0):
        made = begun(world, "moves", adapt_after=0, adapt_weight=weight, warmup=0)
        heads = [p.clone() for p in made.drafter.parameters()]
        for _ in range(3):
            made.advance(made.states)
        ups = [p for n, p in made.adapters.weights.items() if "lora_B" in n]
        assert all(bool(p.any()) == bool(weight) for p in ups)
        assert all(
            not torch.equal(a, b) for a, b in zip(heads, made.drafter.parameters(), strict=True)
        )
        for name, parameter in made.target.hf.named_parameters():
            if "lora" not in name:
                assert torch.equal(parameter, old[name.replace(".base_layer", "")]), name


def test_the_target_given_stays(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run to its end changes nothing of the caller's: not a weight, a module, a name, nor what
    the samples are. Planted fault: adapters on the caller's own modules."""

    def check() -> None:
        shutil.rmtree(world.folder("given"), ignore_errors=True)
        given = Target.load(str(world.target))
        samples = Samples.open(world.samples, given, audit=0)
        weights = {n: p.clone() for n, p in given.named_parameters()}
        about, names = given.identity(), [n for n, _ in given.named_modules()]
        chosen = recipe.load(adapting(world, "given", adapt_after=0, steps=2))
        with checkpoint.claimed(chosen):
            assert Run(Medusa2(chosen, given, samples, Accelerator(cpu=True))).run() == 0
        assert given.identity() == about and not samples.foreign
        assert [n for n, _ in given.named_modules()] == names
        assert all(torch.equal(p, weights[n]) for n, p in given.named_parameters())

    check()
    monkeypatch.setattr(medusa2, "around_same_weights", lambda target: target)
    with pytest.raises(AssertionError):
        check()


def test_heads_begin_alone(world: World) -> None:
    made = begun(world, "alone", adapt_after=0.5, warmup=0)
    adapters = list(made.adapters.weights.values())
    for _ in range(STEPS // 2):
        made.advance(made.states)
        assert all(p.grad is None for p in adapters)
    made.advance(made.states)
    assert all(p.grad is not None for p in adapters)
    assert [group["lr"] for group in made.optimizer.param_groups] != [0.0, 0.0]
    assert any(p.any() for n, p in made.adapters.weights.items() if "lora_B" in n)


# ---------------------------------------------------------------- the new target


def logits(target: Target, samples: Samples) -> Tensor:
    batch = target.read(collate(samples, [[0], [1]], 64), ())
    assert batch.final is not None
    return target.head(batch.final)[batch.made].detach()


def test_the_folder_holds_the_adapted_target(world: World, run: Path) -> None:
    """Its logits are those of the adapters in the last checkpoint, its KL is what a float64
    computation finds, and it is the old one in all else."""
    made = begun(world, "again")
    plain = logits(made.target, made.samples)
    made.adapters.load(training.state(run, STEPS)["adapters"])
    new = Target.load(str(run / "target"))
    torch.testing.assert_close(
        logits(new, made.samples), logits(made.target, made.samples), rtol=0, atol=1e-4
    )
    assert (logits(new, made.samples) - plain).abs().max() > 0.05, "it has moved"

    reference = Reference(world.target, made)
    held = [made.samples[i] for i in made.heldout]
    with torch.no_grad():
        kl = sum(float(reference.moved(text)) for text in held)
    tokens = sum(sum(text.made[1:]) for text in held)
    record = new.identity()["adapted_from"]
    old = Target.load(str(world.target)).identity()
    assert record["kl"] == pytest.approx(kl / tokens, rel=1e-3) and kl / tokens > 1e-4
    assert (record["spec"], record["revision"]) == (old["spec"], old["revision"])
    assert (record["rank"], record["steps"], record["kl_tokens"]) == (RANK, STEPS, tokens)
    assert record["tokens"] == journal.learned(run, STEPS)
    same = ("tokenizer_hash", "template_hash", "vocab_size", "hidden_size", "num_layers")
    assert [new.identity()[key] for key in same] == [old[key] for key in same]
    assert new.eos_ids == [tiny.EOS]


def test_the_old_target_passes_nowhere_for_the_new(world: World, run: Path) -> None:
    new, old = Target.load(str(run / "target")), Target.load(str(world.target))
    with pytest.raises(UserError, match=r"their target's revision is .* or sample again"):
        Samples.open(world.samples, new)
    storage.load(run / "best", new)
    for place, target in ((run / "best", old), (run / "checkpoint-3", new)):
        with pytest.raises(UserError, match="adapting a target makes another one") as error:
            storage.load(place, target)
        assert "\n" not in str(error.value)


def test_pages_say_so(world: World, run: Path, tmp_path: Path) -> None:
    """Report, comparison and card; and the report rests on text that the new target wrote."""
    said = f"Target adapted from {world.target} by LoRA: its outputs are not {world.target}'s"
    asked = report.Report(
        run, prompts=str(world.prompts), limit=3, decode_limit=2, max_new_tokens=10, k=2
    )
    found = report.report(asked)
    assert found["target"]["spec"] == str(run / "target")
    assert [row["step"] for row in found["by_checkpoint"]] == [STEPS]
    assert all(decoded["parity"]["holds"] for decoded in found["decode"].values())
    pages = [run / "report" / "report.md", run / "report" / "report.html"]
    with_it = compare.Compare(
        [str(run)], prompts=str(world.prompts), limit=2, decode_limit=1, max_new_tokens=6, k=2,
        output=tmp_path / "cmp",
    )  # fmt: skip
    assert compare.compare(with_it)["drafters"]["whole"]["curve"] is None
    pages += [tmp_path / "cmp" / "compare.md", tmp_path / "cmp" / "compare.html"]
    shown, _ = export.export_checkpoint(export.Export(run / "best", "vllm", tmp_path / "vllm"))
    pages.append(shown / "README.md")
    for page in pages:
        assert said in page.read_text().replace("&#39;", "'"), page
    card = json.loads((shown / "card.json").read_text())
    assert card["target"]["adapted_from"]["spec"] == str(world.target)
    assert "tau" not in card["measured"], "that of the log is on the old target's text"


# ---------------------------------------------------------------- stopped and killed


def same_target(a: Path, b: Path) -> bool:
    """Bytes of every file."""
    files = sorted(p.name for p in (a / "target").iterdir())
    assert files == sorted(p.name for p in (b / "target").iterdir())
    return all((a / "target" / f).read_bytes() == (b / "target" / f).read_bytes() for f in files)


def test_it_goes_on_bit_for_bit(
    world: World, run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Stopped while the heads are alone, and later: the same weights, log and target. Planted
    fault: adapters that begin anew."""
    path, place = adapting(world, "thirds"), world.folder("thirds")
    for step in (1, 6):
        with monkeypatch.context() as patch:
            training.stop_after(patch, step)
            assert main([str(path)]) == loop.STOPPED
    shutil.copytree(place, tmp_path / "kept")
    with monkeypatch.context() as patch:
        patch.setattr(lora.Adapters, "load", lambda self, state: None)
        assert main([str(path)]) == 0
    assert not same_target(run, place)
    shutil.rmtree(place)
    shutil.copytree(tmp_path / "kept", place)
    assert main([str(path)]) == 0
    assert training.differences(run, place, STEPS) == []
    assert same_target(run, place)


def test_killed_before_the_target_has_its_name(world: World, run: Path, tmp_path: Path) -> None:
    """The last checkpoint is there, the new target still beside its place; or it was removed."""
    path, place = adapting(world, "whole", runs=str(tmp_path)), tmp_path / "whole"
    shutil.copytree(run, place, symlinks=True)
    (place / "target").rename(place / ".writing-target")
    assert main([str(path)]) == 0
    assert same_target(run, place) and not (place / ".writing-target").exists()
    shutil.rmtree(place / "target")
    assert main([str(path)]) == 0
    assert same_target(run, place), "made again from the adapters"
    assert training.differences(run, place, STEPS) == []


@pytest.mark.slow
def test_killed_while_the_target_is_written(world: World, run: Path) -> None:
    path, place = adapting(world, "killed"), world.folder("killed")
    scratch = place / ".writing-target"
    training.kill_when(path, scratch.exists, training.slowed)
    assert not (place / "target").exists()
    process = training.fork(path)
    process.join()
    assert process.exitcode == 0 and not scratch.exists()
    assert same_target(run, place) and training.differences(run, place, STEPS) == []


def test_nan_is_named(world: World) -> None:
    made = begun(world, "nan", adapt_after=0)
    made.adapters.layers["model.layers.1.mlp.up_proj"].lora_A["default"].weight.data[0] = torch.nan
    with pytest.raises(UserError, match=r"step 1: .* is not finite; nothing was stored"):
        made.advance(made.states)


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"drafter": "hydra"}, "adapt: trains a target with Medusa heads .* not with hydra"),
        ({"lora": 2, "start": "x"}, "adapt: lora would freeze the heads"),
        ({"per": "sequence"}, "adapt: .* leave per out"),
        ({"patience": 2}, "adapt: .* leave patience out"),
        ({"adapt": 0}, "adapt: Input should be greater"),
        ({"adapt_weight": -1}, "adapt_weight: Input should be greater"),
    ],
)
def test_recipes_that_make_no_sense(world: World, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line) as error:
        recipe.load(adapting(world, "wrong", **changes))
    assert "\n" not in str(error.value)


def test_targets_that_cannot_be_adapted() -> None:
    target = tiny.target("Llama")
    with pytest.raises(UserError, match="adapt: 999 is above 32, the widest layer's rank"):
        lora.check_target(target, 999)
    hf = tiny.hf_model("Qwen3")
    quantised = Target(hf, tiny.tokenizer(), tiny.source("q4"))
    hf.config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    with pytest.raises(UserError, match="adapt: the weights of target q4 are quantised"):
        lora.check_target(quantised, RANK)
    del hf.config.quantization_config
    hf.generation_config.temperature = 0.5  # without do_sample, as some checkpoints are published
    with pytest.raises(UserError, match="adapt: transformers refuses to store q4's generation_co"):
        lora.check_target(quantised, RANK)
    for layer in quantised.layers:
        for name, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear):
                parent, _, child = name.rpartition(".")
                setattr(layer.get_submodule(parent), child, nn.Identity())
    with pytest.raises(UserError, match="adapt: target q4 has no linear layers to adapt"):
        lora.check_target(quantised, RANK)


def test_a_folder_that_is_there(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither before the run nor while it is stopped is somebody's folder taken for the target."""
    (world.folder("taken") / "target").mkdir(parents=True)
    assert main([str(adapting(world, "taken"))]) == 2
    assert "taken: not empty and no run of draftsmith; give another" in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patch:
        training.stop_after(patch, 3)
        assert main([str(adapting(world, "later"))]) == loop.STOPPED
    with pytest.raises(UserError, match="later: its new target is not finished; run the same"):
        report.read_run(world.folder("later"))
    (world.folder("later") / "target").mkdir()
    capsys.readouterr()
    assert main([str(adapting(world, "later"))]) == 2
    assert "later/target: is there already, and this run has not made" in capsys.readouterr().err
