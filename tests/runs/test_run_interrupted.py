"""SIGTERM at every moment of a run: it ends promptly, loses nothing that can be kept, and says so."""

from __future__ import annotations

import os
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from spottrain.contract import Env, ExitCode, Outcome

from tests.runs.conftest import SCRIPT, Lab
from tests.runs.launched import Run
from tests.support.heavy import sample


@pytest.fixture
def lab(lab: Lab) -> Lab:
    lab.logs = "keep"
    return lab


SLOW_STEPS = {"PAUSE": "0.05"}


def end_promptly(run: Run) -> int:
    """Long before the end of what it would wait for, which takes 60 s."""
    return run.send().end(40)


@pytest.mark.parametrize(
    "script",
    [
        "print('here', flush=True)\nimport time; time.sleep(60)",
        "print('here', flush=True)\nimport subprocess; subprocess.run(['sleep', '60'])",
        "print('here', flush=True)\ntry:\n  import time; time.sleep(60)\nexcept BaseException: pass",
    ],
)
def test_while_the_script_prepares_it_ends_with_75_at_once(lab: Lab, script: str) -> None:
    run = lab.run(script).until("here")
    assert end_promptly(run) == ExitCode.INTERRUPTED
    assert run.message.outcome is Outcome.INTERRUPTED
    assert run.message.signalledAt is not None
    assert not (lab.folder / "store" / "HEAD").exists()


def test_while_a_module_is_imported_it_ends_with_75_at_once(lab: Lab) -> None:
    (lab.folder / "heavy.py").write_text("print('here', flush=True)\nimport time; time.sleep(60)")
    assert end_promptly(lab.run("import heavy").until("here")) == ExitCode.INTERRUPTED


def test_in_the_first_step_as_in_a_compilation_it_gives_head_up_and_ends_with_75(lab: Lab) -> None:
    first = lab.run(attempt=1, env=SLOW_STEPS).until("step=5/").stopped()
    run = lab.run(attempt=2, env={"PAUSE": "60"}).until("event=restored")
    time.sleep(0.2)
    assert end_promptly(run) == ExitCode.INTERRUPTED
    assert lab.head["state"] == "released"
    assert run.message.startStep == run.message.step == run.message.durableStep == max(first.losses)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_between_steps_it_saves_the_step_it_is_at(lab: Lab, signum: signal.Signals) -> None:
    """SIGHUP: the terminal is gone, such as with a lost ssh session."""
    run = lab.run(env=SLOW_STEPS).until("step=5/").send(signum)
    assert run.end(40) == ExitCode.INTERRUPTED
    assert run.message.step == run.message.durableStep == max(run.losses)
    assert run.message.key.startswith("checkpoints/t000001-s00000000")
    assert run.message.durableSeconds is not None and run.message.durableSeconds >= 0
    assert lab.head["state"] == "released"


def test_inside_an_accumulation_the_partial_step_is_dropped(lab: Lab) -> None:
    run = lab.run(training='{"microBatchSize": 2}', env={"PAUSE": "0.1"}).until("step=2/")
    time.sleep(0.25)
    assert end_promptly(run) == ExitCode.INTERRUPTED
    assert run.message.durableStep == max(run.losses)


def test_in_an_evaluation_it_stops_after_the_batch(lab: Lab) -> None:
    run = lab.run(env={"EVAL": "1", "EVAL_PAUSE": "0.2"}).until("in-evaluation")
    assert end_promptly(run) == ExitCode.INTERRUPTED
    assert "event=evaluated" not in run.log
    assert run.message.durableStep == max(run.losses)
    again = lab.run(attempt=2, env={"EVAL": "1"}).done()
    assert f"event=evaluated step={run.message.step} " in again.log, "the evaluation cut short is done again"


def test_in_another_thread_than_the_main_one_it_saves_and_ends_the_process(lab: Lab) -> None:
    threaded = SCRIPT.replace(
        "trainer.fit()\n",
        "import threading\nworker = threading.Thread(target=trainer.fit)\nworker.start()\nworker.join()\n",
    )
    run = lab.run(threaded, env=SLOW_STEPS).until("step=5/")
    assert end_promptly(run) == ExitCode.INTERRUPTED
    assert run.message.durableStep == max(run.losses) and "Traceback" not in run.log


def test_during_an_upload_the_newest_step_is_saved(lab: Lab) -> None:
    run = lab.run(uploads="time.sleep(0.5)", interval="3steps", env=SLOW_STEPS).until("putting")
    assert end_promptly(run) == ExitCode.INTERRUPTED
    assert run.message.durableStep == max(run.losses)


@pytest.mark.heavy
def test_an_upload_that_takes_too_long_is_given_up_for_the_newest_step_and_waited_for_no_more(
    lab: Lab,
) -> None:
    slow = "time.sleep(60 if len(puts) == 1 else 0)"
    env = SLOW_STEPS | {Env.GRACE_SECONDS: "6"}
    run = lab.run(uploads=slow, interval="3steps", env=env).until("putting")
    assert end_promptly(run) == ExitCode.INTERRUPTED
    assert run.message.durableStep == max(run.losses) > 3
    assert lab.head["state"] == "released"
    order = [run.log.index(f"event={name}") for name in ("abandoning", "committed", "released", "end")]
    assert order == sorted(order)


def test_twice_changes_nothing(lab: Lab) -> None:
    run = lab.run(uploads="time.sleep(0.3)", env=SLOW_STEPS).until("step=5/").send().until("putting")
    run.send().send(signal.SIGINT)
    assert run.end() == ExitCode.INTERRUPTED
    assert run.log.count("event=sigterm") == 1


def test_a_signal_to_the_whole_group_leaves_the_loader_workers_alone(lab: Lab) -> None:
    run = lab.run(env=SLOW_STEPS | {"WORKERS": "2"}).until("step=5/")
    os.killpg(run.trainer, signal.SIGTERM)
    assert run.end() == ExitCode.INTERRUPTED, run.log
    assert run.message.durableStep == max(run.losses)
    assert "uploader-died" not in run.log, "nor does it end the uploader"


def test_when_it_is_killed_its_uploader_ends_as_well(lab: Lab) -> None:
    run = lab.run(env=SLOW_STEPS).until("step=3/")
    children = Path(f"/proc/{run.trainer}/task/{run.trainer}/children").read_text().split()
    uploaders = [pid for pid in children if b"checkpoint.upload" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(uploaders) == 1
    run.killed()
    give_up = time.monotonic() + 20
    while b"checkpoint.upload" in _command(uploaders[0]):
        assert time.monotonic() < give_up, f"the uploader {uploaders[0]} goes on"
        time.sleep(0.01)


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_save_that_does_not_finish_is_cut_off_before_the_deadline_with_79(lab: Lab) -> None:
    stuck = "time.sleep(60 if len(puts) > 1 else 0)"
    run = lab.run(uploads=stuck, interval="3steps", env=SLOW_STEPS | {Env.GRACE_SECONDS: "3"})
    run.until("event=committed").until("step=5/")
    run.send().ends(ExitCode.INTERRUPTED_LOST)
    forced = run.log.split("forced_exit=")[1].split()[0]
    (ended,) = [line.split()[0] for line in run.log.splitlines() if "event=end " in line]
    assert ended >= forced, "it had all its time"
    assert run.message.outcome is Outcome.INTERRUPTED_LOST
    assert run.message.durableStep == 3
    again = lab.run(attempt=2)
    assert again.end() == ExitCode.DONE and min(again.losses) == 4


def test_a_store_that_fails_for_a_while_is_tried_again_until_it_holds(lab: Lab) -> None:
    failing = "if len(puts) < 4: raise StoreUnavailable('the store answers 503')"
    run = lab.run(uploads=failing, interval="1h", env=SLOW_STEPS).until("step=5/")
    assert end_promptly(run) == ExitCode.INTERRUPTED
    assert "event=save-failed" in run.log and run.message.durableStep == max(run.losses)


def test_without_a_checkpoint_uri_an_interruption_loses_the_run_and_says_so(lab: Lab) -> None:
    run = lab.run(at="", env=SLOW_STEPS).until("step=5/")
    assert end_promptly(run) == ExitCode.INTERRUPTED_LOST
    assert "no checkpoint URI" in run.message.message


def test_a_time_in_the_deadline_file_is_a_stop_signal(lab: Lab) -> None:
    file = lab.folder / "deadline"
    file.write_text("")
    run = lab.run(env=SLOW_STEPS | {Env.DEADLINE_FILE: str(file)}).until("step=5/")
    time.sleep(0.5)
    assert run.code is None, "an empty file says nothing"
    file.write_text((datetime.now(UTC) + timedelta(seconds=20)).isoformat())
    assert run.end() == ExitCode.INTERRUPTED
    assert "event=deadline source=deadline-file" in run.log


def test_a_deadline_that_was_written_before_the_start_ends_the_run_before_it_trains(lab: Lab) -> None:
    file: Path = lab.folder / "deadline"
    file.write_text("2026-01-02T03:04:05.678901+00:00")
    run = lab.run("import time; time.sleep(60)", env={Env.DEADLINE_FILE: str(file)})
    assert run.end(40) == ExitCode.INTERRUPTED


@pytest.mark.heavy
def test_the_earlier_of_deadline_and_grace_holds(lab: Lab) -> None:
    file = lab.folder / "deadline"
    env = SLOW_STEPS | {Env.DEADLINE_FILE: str(file), Env.GRACE_SECONDS: "60"}
    run = lab.run(uploads="time.sleep(60)", interval="1h", env=env).until("step=3/").send().until("putting")
    file.write_text((datetime.now(UTC) + timedelta(seconds=2)).isoformat())
    assert run.end(40) == ExitCode.INTERRUPTED_LOST


def test_at_the_gate_it_ends_with_75_and_claims_nothing(lab: Lab) -> None:
    lab.run(attempt=1, env={"PAUSE": "0.3"}).until("event=claimed")
    waiting = lab.run(attempt=2, env={Env.GATE_UNTIL: str(time.time() + 60)}).until("event=device")
    time.sleep(0.5)
    assert "event=claimed" not in waiting.log
    assert end_promptly(waiting) == ExitCode.INTERRUPTED
    assert lab.head["attempt"] == 1


def test_after_the_training_it_is_done(lab: Lab) -> None:
    run = lab.run(SCRIPT + "time.sleep(60)\n").until("after fit")
    assert end_promptly(run) == ExitCode.DONE
    assert run.message.outcome is Outcome.DONE


def test_the_finally_blocks_of_the_script_run_after_the_save(lab: Lab) -> None:
    guarded = "try:\n    trainer.fit()\nfinally:\n    print('closing', flush=True)"
    script = SCRIPT.replace("trainer.fit()", guarded)
    run = lab.run(script, env=SLOW_STEPS).until("step=5/").stopped()
    assert run.log.index("event=released") < run.log.index("closing")


FORKING = """\
import multiprocessing
def double(n):
    return 2 * n
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print("doubled", pool.map(double, range(3)), flush=True)
    pool.join()
    print("pool ended", flush=True)
"""


def test_signals_to_forked_children_are_their_own_and_end_them(lab: Lab) -> None:
    run = lab.run(FORKING + SCRIPT).done()
    assert "pool ended" in run.log and "event=sigterm" not in run.log


TELLS_OF_WORKERS = """\
import torch.utils.data.dataloader as dl
end = dl._MultiProcessingDataLoaderIter._shutdown_workers
def told(self):
    print("ending workers", flush=True)
    end(self)
dl._MultiProcessingDataLoaderIter._shutdown_workers = told
"""


def test_the_loader_workers_are_ended_only_after_the_save(lab: Lab) -> None:
    env = SLOW_STEPS | {"WORKERS": "1"}
    run = lab.run(TELLS_OF_WORKERS + SCRIPT, env=env).until("step=5/").stopped()
    assert run.log.index("event=released") < run.log.index("ending workers")


@pytest.mark.heavy
def test_nor_are_those_of_an_evaluation_ended_before_it(lab: Lab) -> None:
    env = SLOW_STEPS | {"WORKERS": "1", "EVAL": "1", "EVAL_PAUSE": "0.3"}
    log = lab.run(TELLS_OF_WORKERS + SCRIPT, env=env).until("in-evaluation").stopped().log
    assert "ending workers" not in log or log.index("event=released") < log.index("ending workers")


@pytest.mark.parametrize("workers", sample(["0", "1"], "1"))
def test_while_it_waits_for_data_that_do_not_come_it_saves_and_ends_all_the_same(
    lab: Lab, workers: str
) -> None:
    stalled = SCRIPT.replace(
        "    def __getitem__(self, i):\n",
        "    def __getitem__(self, i):\n"
        "        with open('fetched', 'a') as file: file.write('x')\n"
        "        if 'STALL' in os.environ and os.path.getsize('fetched') > 40: time.sleep(60)\n",
    )
    env = {"WORKERS": workers, "STALL": "1"}
    run = lab.run(stalled, interval="1h", env=env).until("step=4/")
    time.sleep(0.3)
    assert end_promptly(run) == ExitCode.INTERRUPTED
    assert lab.head["state"] == "released"
    assert run.message.durableStep == run.message.step == max(run.losses)
    (lab.folder / "fetched").unlink()
    plain = lab.run(stalled, at="plain", attempt=1)
    again = lab.run(stalled, attempt=2)
    assert plain.end() == again.end() == ExitCode.DONE
    assert again.digest == plain.digest


@pytest.mark.heavy
def test_a_last_evaluation_that_was_cut_short_is_done_by_the_successor(lab: Lab) -> None:
    script = SCRIPT.replace("trainer.fit()", "print('best', trainer.fit().best is not None)")
    env = {"EVAL": "1", "EVAL_PAUSE": "0.2"}
    run = lab.run(script, training='{"maxSteps": 3}', env=env).until("in-evaluation").stopped()
    assert run.message.durableStep == 3
    again = lab.run(script, training='{"maxSteps": 3}', env={"EVAL": "1"}).done()
    assert not again.losses and "event=evaluated step=3 " in again.log and "best True" in again.log


DEAF = """\
import os, sys
reader, writer = os.pipe()
os.dup2(writer, 1)
os.close(writer)
os.close(reader)
"""


@pytest.mark.heavy
def test_when_nobody_reads_its_output_any_more_it_saves_all_the_same(lab: Lab) -> None:
    shown = SCRIPT.replace(
        "    time.sleep(PAUSE)\n", "    time.sleep(PAUSE)\n    print('at', trainer.step, file=sys.stderr)\n"
    )
    run = lab.run(DEAF + shown, interval="1h", env=SLOW_STEPS).until("at 5\n").stopped()
    assert run.message.outcome is Outcome.INTERRUPTED
    assert (run.message.durableStep or 0) == (run.message.step or 0) >= 5
    assert lab.head["state"] == "released"
    again = lab.run(DEAF + shown.replace('print("after fit")', "")).done()
    assert again.message.outcome is Outcome.DONE and again.message.startStep == run.message.durableStep


@pytest.mark.heavy
def test_an_upload_whose_answer_was_lost_is_taken_as_it_is_by_the_next_try(lab: Lab) -> None:
    lost = "if len(puts) == 1: upload(self, key, body, **more); raise StoreUnavailable('the answer was lost')"
    run = lab.run(uploads=lost, interval="1h", env=SLOW_STEPS).until("step=5/").stopped()
    assert "the answer was lost" in run.log and run.message.durableStep == run.message.step
    again = lab.run(attempt=2).done()
    assert min(again.losses) == (run.message.step or 0) + 1
