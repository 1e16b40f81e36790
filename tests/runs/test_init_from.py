"""`checkpoint.initFrom`: a training that begins from another run's weights, or from those of files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import spottrain
import torch
from safetensors.torch import save_file
from spottrain.contract import Env, ExitCode, Outcome, Reason

from tests.runs.conftest import SCRIPT, Lab
from tests.runs.foreign import LOADS, base_of
from tests.runs.test_custom_loop import SCRIPT as LOOP
from tests.runs.test_run_ranks import SCRIPT as RANKS
from tests.support.heavy import sample

LOADING = SCRIPT.replace("model = Model()\n", f"model = Model()\nmodel.{LOADS}\n")
AVERAGE = '{"emaDecay": 0.9}'
SEVERAL = """\
import os, time
import torch, spottrain

spottrain.seed(3)
gen, disc = torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
both = torch.nn.ModuleDict({"gen": gen, "disc": disc})
optimizers = {"gen": torch.optim.Adam(gen.parameters()), "disc": torch.optim.SGD(disc.parameters(), lr=0.1)}
average = spottrain.techniques.EMA(gen)
run = spottrain.Run(
    model={"gen": torch.compile(gen, backend="eager"), "disc": disc},
    optimizer=optimizers,
    extra={"average": average},
    max_steps=12,
    log_every=1,
)
while not run.done:
    time.sleep(float(os.environ.get("PAUSE", "0")))
    loss = disc(gen(torch.randn(8, 4))).square().mean()
    loss.backward()
    for each in optimizers.values():
        each.step()
        each.zero_grad()
    average.update(run.global_step + 1)
    run.step_completed(loss=loss)
run.finish()
"""
"""Two models, one of them compiled, and an average of it."""
BEGINS = """\
import os
import torch, spottrain

model = torch.nn.Sequential(torch.nn.Linear(2, 3, dtype=torch.bfloat16), torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = spottrain.Run(model=model, optimizer=optimizer, max_steps=1)
for name, each in model.state_dict().items():
    print("begins", name, each.dtype, each.float().sum().item(), flush=True)
print("optimizer state", len(optimizer.state), "step", run.global_step, flush=True)
while not run.done:
    run.step_completed()
run.finish()
"""


def weights(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    """Weights of the model of `BEGINS`: all ones, but one bias."""
    found = {"0.weight": torch.ones(3, 2), "0.bias": torch.full((3,), 2.0)}
    return found | {"1.weight": torch.ones(1, 3), "1.bias": torch.ones(1)} | more


trained = base_of(SCRIPT)


@pytest.fixture
def base(lab: Lab, trained: Path) -> Path:
    return Path(shutil.copytree(trained, lab.folder / "base"))


def begins_as_if_the_script_loaded_the_weights(
    lab: Lab, script: str, loading: str, base: Path, nproc: int = 1, env: dict[str, str] | None = None
) -> None:
    """`loading`: the script with `LOADS` of its model, which reads the base's weights itself.

    It is interrupted once, after which the base is gone: only the first start reads it.
    """
    env = env or {}
    plain = lab.run(loading, at="plain", attempt=1, nproc=nproc, env=env | {"BASE": str(base)}).done(300)
    env |= {Env.INIT_FROM: str(base)}
    first = lab.run(script, attempt=1, nproc=nproc, env=env | {"PAUSE": "0.05"})
    first.until("step=5/", seconds=300).stopped()
    shutil.rmtree(base)
    second = lab.run(script, attempt=2, nproc=nproc, env=env).done(300)
    assert first.losses | second.losses == plain.losses
    assert second.digest == plain.digest
    assert first.log.count("event=initialized") == 1 and "event=initialized" not in second.log


def made(lab: Lab, script: str) -> Path:
    lab.run(script, at="base", attempt=1, interval="1h").done()
    return lab.folder / "base"


def test_a_trainer_begins_from_the_final_weights_of_another_run(lab: Lab, base: Path) -> None:
    begins_as_if_the_script_loaded_the_weights(lab, SCRIPT, LOADING, base)
    newest = lab.head["checkpoints"][0]["key"]
    progress = json.loads((lab.folder / "store" / newest / "manifest.json").read_text())["tree"]["progress"]
    assert progress["initialized"] == {
        "source": f"final/ of {base}",
        "step": 24,
        "tensors": 9,
        "left_out": 0,
    }, "kept over the resume"


def test_a_kill_before_the_first_checkpoint_has_them_read_again_and_no_later_one(
    lab: Lab, base: Path
) -> None:
    env: dict[str, str] = {Env.INIT_FROM: str(base)}
    plain = lab.run(at="plain", attempt=1, env=env).done()
    slow = env | {"PAUSE": "0.05"}
    first = lab.run(attempt=1, interval="1h", env=slow).until("step=3/").killed()
    second = lab.run(attempt=2, interval="4steps", env=slow).until("event=committed").killed()
    shutil.rmtree(base)
    third = lab.run(attempt=3, env=env).done()
    assert ["event=initialized" in run.log for run in (first, second, third)] == [True, True, False]
    assert first.losses | second.losses | third.losses == plain.losses
    assert third.digest == plain.digest


def test_a_loop_of_ones_own_does(lab: Lab) -> None:
    loading = LOOP.replace("\noptimizer =", f"\nmodel.{LOADS}\noptimizer =", 1)
    begins_as_if_the_script_loaded_the_weights(lab, LOOP, loading, made(lab, LOOP))


@pytest.mark.heavy
def test_a_loop_with_several_models_and_an_average_does(lab: Lab) -> None:
    loading = SEVERAL.replace("\noptimizers =", f"\nboth.{LOADS}\noptimizers =", 1)
    begins_as_if_the_script_loaded_the_weights(lab, SEVERAL, loading, made(lab, SEVERAL))


@pytest.mark.parametrize("kind", sample(["DDP", "FSDP2"]))
def test_two_ranks_do(lab: Lab, kind: str) -> None:
    loading = RANKS.replace("model = Model()\n", f"model = Model()\nmodel.{LOADS}\n", 1)
    assert loading != RANKS
    env = {"SHARD": "1"} if kind == "FSDP2" else {}
    base = made(lab, RANKS)
    begins_as_if_the_script_loaded_the_weights(lab, RANKS, loading, base, nproc=2, env=env)


@pytest.mark.heavy
def test_of_a_run_that_is_not_done_it_is_the_newest_checkpoint_with_its_average(lab: Lab) -> None:
    base = lab.run(at="base", attempt=1, training=AVERAGE, env={"PAUSE": "0.05"}).until("step=9/").stopped()
    file = lab.folder / "downloaded"
    words = ["download", str(lab.folder / "base"), "--to", str(file)]
    lab.start(words, {}, verb="checkpoints").done()
    plain = lab.run(at="plain", attempt=1, env={Env.INIT_FROM: str(file)}).done()
    run = lab.run(attempt=1, env={Env.INIT_FROM: f"file://{lab.folder}/base"}).done()
    assert f"step={base.message.step} tensors=9" in run.log
    assert run.losses == plain.losses and run.digest == plain.digest
    assert '"released"' in (lab.folder / "base" / "HEAD").read_text(), "its HEAD is only read"


@pytest.mark.heavy
def test_a_damaged_checkpoint_is_left_out_for_the_one_before(lab: Lab) -> None:
    lab.run(at="base", attempt=1, env={"PAUSE": "0.05"}).until("step=16/").stopped()
    newest, before, *_ = json.loads((lab.folder / "base" / "HEAD").read_text())["checkpoints"]
    next(
        (lab.folder / "base" / newest["key"]).glob("*.safetensors")
    ).unlink()  # or a run that goes on drops it
    run = lab.run(attempt=1, env={Env.INIT_FROM: str(lab.folder / "base")}).done()
    assert f"event=damaged step={newest['step']}" in run.log
    assert f"step={before['step']} tensors=9" in run.log


def begins(lab: Lab, source: Path, ignore: str = "", code: int = ExitCode.DONE) -> str:
    env: dict[str, str] = {Env.INIT_FROM: str(source), Env.INIT_IGNORE: ignore}
    run = lab.run(BEGINS, env=env, at=f"store-{source.name}-{ignore}", attempt=1).ends(code)
    if code == ExitCode.BAD_CONFIGURATION:
        assert run.message.outcome is Outcome.BAD_CONFIGURATION
        return run.message.message
    return run.log


def test_files_of_weights_begin_a_training_and_are_cast(lab: Lab) -> None:
    torch.save(weights(), lab.folder / "state.pt")
    save_file(weights(), lab.folder / "one.safetensors")
    (lab.folder / "sharded").mkdir()
    save_file({n: t for n, t in weights().items() if n[0] == "0"}, lab.folder / "sharded/a.safetensors")
    save_file({n: t for n, t in weights().items() if n[0] == "1"}, lab.folder / "sharded/b.safetensors")
    shutil.copytree(lab.folder / "sharded", lab.folder / "indexed")
    save_file({"unrelated": torch.ones(1)}, lab.folder / "indexed/c.safetensors")
    index = {"weight_map": {n: "a.safetensors" if n[0] == "0" else "b.safetensors" for n in weights()}}
    (lab.folder / "indexed/model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("state.pt", "one.safetensors", "sharded", "indexed"):
        log = begins(lab, lab.folder / name)
        assert "begins 0.weight torch.bfloat16 6.0" in log and "begins 0.bias torch.bfloat16 6.0" in log
        assert "begins 1.weight torch.float32 3.0" in log and "optimizer state 0 step 0" in log
        assert "event=initialized" in log


def test_a_new_head_begins_as_the_script_makes_it(lab: Lab) -> None:
    found = {name: each for name, each in weights().items() if name[0] == "0"}
    torch.save(found | {"1.weight": torch.ones(10, 3), "old.bias": torch.ones(1)}, lab.folder / "base.pt")
    log = begins(lab, lab.folder / "base.pt", "1.*,old.*")
    assert "begins 0.weight torch.bfloat16 6.0" in log and "begins 1.weight torch.float32 3.0" not in log
    assert "tensors=2 left_out=2" in log


def test_what_ignores_everything_is_refused(lab: Lab) -> None:
    torch.save(weights(), lab.folder / "base.pt")
    said = begins(lab, lab.folder / "base.pt", "*", code=ExitCode.BAD_CONFIGURATION)
    assert "ignore leaves nothing to load" in said


def test_weights_that_do_not_fit_name_what_differs_and_what_to_do(lab: Lab) -> None:
    found = weights(other=torch.ones(1)) | {"1.weight": torch.ones(10, 3)}
    del found["0.bias"]
    torch.save(found | {"0.weight": torch.ones(3, 2, dtype=torch.int8)}, lab.folder / "base.pt")
    said = begins(lab, lab.folder / "base.pt", "haed.*", code=ExitCode.BAD_CONFIGURATION)
    assert said.startswith(f"checkpoint.initFrom {lab.folder}/base.pt: it does not fit the model: ")
    for words in (
        "1 missing there (0.bias)",
        "1 there and not in the model (other)",
        "0.weight: torch.int8 there, torch.bfloat16 here",
        "1.weight: shape (10, 3) there, (1, 3) here",
        "1 in ignore and match nothing (haed.*)",
        "checkpoint.initFrom.ignore (--init-ignore)",
    ):
        assert words in said, words


def test_what_cannot_be_read_is_said(lab: Lab) -> None:
    (lab.folder / "empty").mkdir()
    (lab.folder / "cut.safetensors").write_bytes(spottrain.__file__.encode())
    torch.save({"model": weights()}, lab.folder / "nested.pt")
    torch.save(lab.folder, lab.folder / "pickled.pt")
    (lab.folder / "half").mkdir()
    (lab.folder / "half/model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "absent.safetensors"}}'
    )
    for name, words in {
        "absent": "there is no",
        "empty": "has no *.safetensors file",
        "cut.safetensors": "is no safetensors file",
        "nested.pt": "holds no state_dict: its 'model' is a dict",
        "pickled.pt": "torch.load(weights_only=True)",
        "half": "names absent.safetensors, which is not in that folder",
    }.items():
        assert words in begins(lab, lab.folder / name, code=ExitCode.BAD_CONFIGURATION), name


def test_another_run_that_has_nothing_to_give_is_said(lab: Lab, base: Path) -> None:
    def refused(uri: str, **env: str) -> str:
        run = lab.run(at="new", attempt=1, env={Env.INIT_FROM: uri, **env}).ends(ExitCode.BAD_CONFIGURATION)
        return run.message.message

    assert "there is no HEAD object" in refused(f"file://{lab.folder}/nothing")
    assert "not valid" in refused("s3:/bucket/prefix")
    assert "the checkpoint URI of this run itself" in refused(f"file://{lab.folder}/new/")
    lost = shutil.copytree(base, lab.folder / "lost")
    (lost / "HEAD").unlink()
    for uri in (str(lost), f"file://{lost}"):
        assert "but no HEAD object" in refused(uri) and not (lost / "HEAD").exists()
    final = base / "final" / "model.safetensors"
    final.write_bytes(final.read_bytes()[:-1] + b"x")
    said = refused(str(base))
    assert "the final weights in final/ are damaged" in said and "does not match its checksum" in said
    shutil.rmtree(base / "final")
    shutil.rmtree(base / "checkpoints")
    said = refused(str(base))
    assert "none of its" in said and "can be read" in said
    assert "1 missing there" not in said


def test_of_two_ranks_both_end_where_the_weights_do_not_fit(lab: Lab) -> None:
    torch.save(weights(), lab.folder / "base.pt")
    run = lab.run(RANKS, nproc=2, attempt=1, env={Env.INIT_FROM: str(lab.folder / "base.pt")})
    run.ends(ExitCode.BAD_CONFIGURATION, 300)
    assert run.message.reason == Reason.CHECKPOINT_INCOMPATIBLE
    assert "does not fit the model" in run.message.message


def test_the_flags_of_a_laptop_are_enough(lab: Lab) -> None:
    torch.save(weights(), lab.folder / "base.pt")
    (lab.folder / "train.py").write_text(BEGINS)
    words = ["--init-from", "base.pt", "--init-ignore", "1.*", "train.py"]
    run = lab.start(words, {Env.CHECKPOINT_URI: "store"}).done()
    assert "begins 0.weight torch.bfloat16 6.0" in run.log and "tensors=2 left_out=2" in run.log
