"""`spottrain run -m package.module` runs a module as `python -m` does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from spottrain.cli.output import WRONG_USAGE
from spottrain.contract import Env, Outcome

from tests.runs.conftest import SCRIPT, Lab

FACTS = """\
import pickle, sys
from .beside import HERE


class Own:
    pass


assert type(pickle.loads(pickle.dumps(Own()))) is Own
print("facts", HERE, __name__, __package__, __spec__.name, __file__, sys.argv, sys.path[0])
print("main", sys.modules["__main__"].Own is Own)
"""
SPAWNED = """\
import torch, spottrain
from .beside import HERE


class Own(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([HERE, index])


def collate(samples):
    return torch.stack(samples)


if __name__ == "__main__":
    loader = spottrain.data.loader(
        Own(), 4, num_workers=1, collate_fn=collate, multiprocessing_context="spawn"
    )
    print("batches", [batch.tolist() for batch in loader])
"""


def package(lab: Lab, script: str, name: str = "train", *, init: str | None = "") -> None:
    """`package.inner.NAME` and `package.inner.beside`; with `init=None` no folder has an __init__.py."""
    inner = lab.folder / "package" / "inner"
    inner.mkdir(parents=True)
    (inner / "beside.py").write_text("HERE = 5")
    (inner / f"{name}.py").write_text(script)
    if init is not None:
        for folder in (inner, inner.parent):
            (folder / "__init__.py").write_text(init)


def lines(log: str, word: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith(word)]


@pytest.mark.parametrize("init", ["", None], ids=["package", "namespace"])
@pytest.mark.parametrize(
    ("name", "file"), [("package.inner.train", "train.py"), ("package.inner", "__main__.py")]
)
def test_a_module_finds_what_it_finds_under_python_m(
    lab: Lab, name: str, file: str, init: str | None
) -> None:
    package(lab, FACTS, Path(file).stem, init=init)
    words, path = ["-m", name, "--keep", "7", "-m", "x"], lab.folder / "package" / "inner" / file
    plain = subprocess.run(
        [sys.executable, *words], cwd=lab.folder, capture_output=True, text=True, timeout=60, check=True
    )
    run = lab.start(words, {})
    assert run.end() == 0 and run.message.outcome is Outcome.UNTRAINED, run.log
    spec = f"package.inner.{path.stem}"
    facts = f"facts 5 __main__ package.inner {spec} {path} {[str(path), *words[2:]]} {lab.folder}"
    assert lines(plain.stdout, "facts") == lines(run.log, "facts") == [facts]
    assert lines(plain.stdout, "main") == lines(run.log, "main") == ["main True"]


def test_spawned_workers_import_the_module_again(lab: Lab) -> None:
    package(lab, SPAWNED)
    run = lab.start(["-m", "package.inner.train"], {}).ends(0)
    assert "batches [[[5, 0], [5, 1], [5, 2], [5, 3]], [[5, 4]," in run.log


def test_each_rank_runs_the_module(lab: Lab) -> None:
    package(lab, FACTS + "import os; print('rank', os.environ['RANK'], sys.argv[1:])")
    run = lab.start(["--nproc", "2", "-m", "package.inner.train", "--lr", "1"], {}).ends(0)
    ranks = sorted(line.partition("rank ")[2] for line in run.log.splitlines() if "rank " in line)
    assert ranks == ["0 ['--lr', '1']", "1 ['--lr', '1']"], run.log


def test_a_training_is_interrupted_and_resumed(lab: Lab) -> None:
    package(lab, SCRIPT)
    first = lab.start(["-m", "package.inner.train"], {"PAUSE": "0.05"}).until("step=5/").stopped()
    second = lab.start(["-m", "package.inner.train"], {}).done()
    assert min(second.losses) == max(first.losses) + 1
    assert (lab.folder / "checkpoints" / "train" / "final" / "model.safetensors").exists()


def test_a_packages_own_main_has_the_packages_name(lab: Lab) -> None:
    package(lab, SCRIPT, "__main__")
    lab.start(["-m", "package.inner"], {Env.TRAINING: '{"maxSteps": 1}'}).done()
    assert (lab.folder / "checkpoints" / "inner" / "final" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "name", ["package.inner.typo", "package.typo.train", "typo", "package", "train.py", ".x"]
)
def test_a_module_that_is_not_there_is_named_and_nothing_is_imported(lab: Lab, name: str) -> None:
    package(lab, SCRIPT, init="print('imported')")
    run = lab.start(["-m", name], {}).ends(WRONG_USAGE)
    assert run.message.reason == "ScriptNotFound" and "imported" not in run.log
    assert f"-m {name}: there is no such module" in run.message.message
    assert str(lab.folder) in run.message.message and not (lab.folder / "checkpoints").exists()
