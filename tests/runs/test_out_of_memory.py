"""A rank of two runs out of memory in a step: all go on from the last checkpoint, with less at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from spottrain.contract import ExitCode, Outcome, Reason

from tests.runs.conftest import Lab
from tests.runs.launched import Launched, Run
from tests.runs.test_launcher_of_others import TORCHRUN
from tests.runs.test_run_ranks import KINDS, SCRIPT, ends, logged
from tests.support.heavy import sample

FULL = "max_steps=20,"
SHORT = (
    SCRIPT.replace(FULL, "max_steps=12,")
    .replace("    micro_batch_size=2,\n", '    micro_batch_size="auto",\n')
    .replace(
        "    time.sleep(PAUSE)\n",
        "    import torch.distributed as dist\n"
        "    mine = dist.is_initialized() and str(dist.get_rank()) in os.environ.get('SHORT', '1')\n"
        "    at = int(os.environ.get('AT', '5'))\n"
        "    if mine and trainer.step >= at and len(batch[0]) > int(os.environ['FITS']):\n"
        "        raise torch.OutOfMemoryError('CUDA out of memory (as a test says it)')\n"
        "    time.sleep(PAUSE)\n",
    )
    .replace("    global_batch_size=8,\n", "    global_batch_size=16,\n")
)
"""Each rank's share is 8 samples. From step `AT` on ranks `SHORT` have room for `FITS` at a time."""
PLAIN = {"FITS": "999"}


def run(lab: Lab, fits: int, **env: str) -> Run:
    return lab.run(SHORT, nproc=2, attempt=1, interval="2steps", env={"FITS": str(fits)} | env)


def sizes(of: Run) -> list[int]:
    return [
        int(line.split("micro_batch_size=")[1].split()[0]) for line in of.log.splitlines() if "tried=" in line
    ]


def whole(lab: Lab, kind: str) -> Run:
    """The same training with room enough, on ranks without a launcher."""
    plain = lab.ranks(2, SHORT, at="plain", attempt=1, env=PLAIN | KINDS[kind])
    assert ends(plain) == [ExitCode.DONE] * 2, plain[0].log
    return plain[0]


@pytest.mark.parametrize(
    ("kind", "short"),
    sample([("DDP", "0"), ("DDP", "1"), ("DDP", "01"), ("FSDP2", "1")], ("DDP", "0")),
)
def test_the_launcher_starts_all_again_and_they_go_on_from_the_last_checkpoint_smaller(
    lab: Lab, kind: str, short: str
) -> None:
    it = run(lab, 2, SHORT=short, **KINDS[kind]).done(300)
    assert it.message.outcome is Outcome.DONE and it.message.step == 12
    assert it.log.count("event=restarted") == 2, "with 8, with 4, and then with 2"
    assert it.log.count("micro_batch_size=4 was=8") and it.log.count("micro_batch_size=2 was=4")
    assert 'most=2 why="a step of this job ran out of memory with 4"' in it.log
    assert sorted(it.losses) == list(range(1, 13))
    assert it.log.count("event=restored") >= 2, "not from the beginning"
    plain = whole(lab, kind)
    assert logged(it.losses) == pytest.approx(logged(plain.losses), rel=1e-3), "the batch is what it was"
    assert lab.head["state"] == "done" and lab.head["attempt"] == 1


@pytest.mark.heavy
def test_a_rank_that_runs_out_in_a_trial_that_all_are_in_is_a_case_for_the_launcher_too(lab: Lab) -> None:
    it = run(lab, 4, AT="0", **KINDS["FSDP2"]).done(300)
    assert it.log.count("event=restarted") == 1 and "event=restored" not in it.log
    assert 'most=4 why="a step of this job ran out of memory with 8"' in it.log
    assert sorted(it.losses) == list(range(1, 13))


BLOCKS = (
    SHORT.replace(
        "        self.last = torch.nn.Linear(15, 1)\n",
        "        self.last = torch.nn.Linear(15, 1)\n"
        "        parts = [torch.nn.Sequential(torch.nn.Linear(15, 15), torch.nn.Tanh()) for _ in range(4)]\n"
        "        self.blocks = torch.nn.ModuleList(parts)\n",
    )
    .replace(
        "        return self.last(self.drop(self.norm(self.first(x)).relu())).squeeze(-1)\n",
        "        x = self.drop(self.norm(self.first(x)).relu())\n"
        "        for block in self.blocks:\n"
        "            x = block(x)\n"
        "        return self.last(x).squeeze(-1)\n",
    )
    .replace(
        "trainer.step >= at and len(batch[0]) > int(os.environ['FITS'])",
        "sum('forward' in vars(each) for each in model.modules()) < int(os.environ['FITS'])",
    )
)
"""Rank 1 has room for a step only where at least `FITS` of the four blocks are recomputed."""


@pytest.mark.heavy
def test_a_policy_that_a_trial_of_all_ranks_runs_out_with_is_passed_over_by_the_next_start(lab: Lab) -> None:
    wanted = json.dumps({"activationCheckpointing": {"policy": "auto"}})
    env = {"FITS": "2", **KINDS["FSDP2"]}
    it = lab.run(BLOCKS, nproc=2, attempt=1, training=wanted, env=env).done(300)
    assert it.log.count("event=restarted") == 1
    assert "wanted=auto chosen=every-3" in it.log
    assert "most=" not in it.log, "no size was too large"


@pytest.mark.heavy
def test_where_not_even_one_sample_fits_any_more_the_run_fails_and_names_the_ways_out(lab: Lab) -> None:
    it = run(lab, 0).ends(ExitCode.BAD_CONFIGURATION, seconds=300)
    assert it.log.count("event=restarted") == 3, "8, 4, 2, and then 1"
    assert (
        "micro-batches of 1 samples do not fit into memory, and no smaller size divides" in it.message.message
    )


@pytest.mark.parametrize("kind", sample(KINDS))
def test_without_our_launcher_they_end_and_the_next_attempt_goes_on_smaller(lab: Lab, kind: str) -> None:
    env = {"FITS": "4"} | KINDS[kind]
    first = lab.ranks(2, SHORT, attempt=1, interval="2steps", env=env)
    codes = ends(first)
    lost = {ExitCode.INTERRUPTED, ExitCode.INTERRUPTED_LOST}
    assert set(codes) <= lost, first[0].log + first[1].log
    words = first[1].message
    assert words.reason == Reason.OUT_OF_MEMORY and words.outcome is not Outcome.FAILED
    assert "rank 1 ran out of memory with micro-batches of 8 samples at step 6" in words.message
    assert "resumes from the last checkpoint with at most 4" in words.message
    second = lab.ranks(2, SHORT, attempt=2, env=env)
    assert ends(second) == [ExitCode.DONE] * 2, second[0].log
    assert sizes(second[0]) == [4] and min(second[0].losses) > 1
    plain = {step: loss for step, loss in whole(lab, kind).losses.items() if step in second[0].losses}
    assert logged(second[0].losses) == pytest.approx(logged(plain), rel=1e-3)


@pytest.mark.heavy
def test_under_torchrun_it_ends_and_says_that_it_has_to_be_started_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHORT)
    run = Launched(tmp_path, (*TORCHRUN, "train.py"), FITS="4", OMP_NUM_THREADS="1")
    try:
        assert run.end(300) == ExitCode.FAILED, run.log  # torchrun's, whatever its processes do
    finally:
        run.close()
    assert run.message.reason == Reason.OUT_OF_MEMORY
    assert run.message.message.endswith(
        "with at most 4: start it again (spottrain run --nproc does that by itself)"
    )


@pytest.mark.parametrize(
    ("training", "at"),
    [({"microBatchSize": 8}, "store"), ({}, "")],
    ids=["a given size", "no checkpoint URI"],
)
def test_with_a_size_that_is_given_or_nowhere_to_keep_it_the_attempt_fails_with_advice(
    lab: Lab, training: dict[str, Any], at: str
) -> None:
    it = lab.ranks(2, SHORT, at=at, attempt=1, training=json.dumps(training), env={"FITS": "4"})
    codes = ends(it)
    assert codes[1] == ExitCode.FAILED, it[1].log
    assert "event=advice" in it[1].log and "about=memory micro_batch_size=8" in it[1].log
    assert it[1].message.outcome is Outcome.FAILED
