"""Every way out of `spottrain run` has its exit code and a message that says what, where and what to do."""

from __future__ import annotations

import signal

import pytest
from spottrain.cli.output import WRONG_USAGE
from spottrain.contract import Env, ExitCode, Outcome

from tests.runs.conftest import SCRIPT, Lab, progress_of, served


@pytest.fixture
def lab(lab: Lab) -> Lab:
    lab.logs = "keep"
    return lab


def holding(lab: Lab, step: int, text: str) -> str:
    """The script, which waits after a step for a text in the log of the lab's first run."""
    log = str(lab.folder / "run-1.log")
    wait = f"while trainer.step == {step} and {text!r} not in open({log!r}).read(): time.sleep(0.01)"
    return SCRIPT.replace("time.sleep(PAUSE)", wait)


def test_a_script_that_is_not_there_is_named_with_the_folder_it_was_sought_in(lab: Lab) -> None:
    missing = lab.start(["nowhere/train.py"], {}).ends(WRONG_USAGE)
    assert missing.message.reason == "ScriptNotFound"
    assert "nowhere/train.py" in missing.message.message and str(lab.folder) in missing.message.message


def test_a_command_that_is_refused_says_why_once_and_has_the_message(lab: Lab) -> None:
    (lab.folder / "train.py").touch()
    for words, says in (
        (["--nope", "train.py"], "--nope"),
        (["--keep", "1", "train.py"], "--keep 1 must be a whole number, at least 2"),
        (["nowhere.py"], "nowhere.py is not a file"),
    ):
        run = lab.start(words, {}).ends(WRONG_USAGE)
        (line,) = [line for line in run.log.splitlines() if line.startswith("spottrain: ")]
        assert says in line and "event=" not in run.log and says in run.message.message


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("x = 1\nraise ValueError('two is odd')", "ValueError: two is odd (LAB/train.py:2)"),
        ("def f():\n    import json\n    json.loads('{')\nf()", "(LAB/train.py:3)"),
        ("x = 1\n\ny = = 2", "train.py:3"),
        ("import nowhere_to_be_found", "No module named 'nowhere_to_be_found'"),
    ],
)
def test_a_script_that_raises_is_a_failure_with_last_line_and_place(lab: Lab, script: str, says: str) -> None:
    run = lab.run(script).ends(ExitCode.FAILED)
    assert run.message.outcome is Outcome.FAILED and run.message.reason == "ScriptFailed"
    assert says.replace("LAB", str(lab.folder)) in run.message.message
    assert "Traceback" in run.log or "SyntaxError" in run.log


@pytest.mark.parametrize(
    ("script", "code", "outcome"),
    [
        ("print(1)", 0, Outcome.UNTRAINED),
        ("import sys; sys.exit()", 0, Outcome.UNTRAINED),
        ("import sys; print('no', 'data', file=sys.stderr); print('bye'); sys.exit(3)", 3, Outcome.FAILED),
        ("import sys; sys.exit('no data')", 1, Outcome.FAILED),
    ],
)
def test_a_script_that_ends_without_training_keeps_its_code(
    lab: Lab, script: str, code: int, outcome: Outcome
) -> None:
    run = lab.run(script).ends(code)
    assert run.message.outcome is outcome
    assert ("no data" in run.message.message) == (outcome is Outcome.FAILED), "the script's own last line"
    assert (run.message.reason == "NotTrained") == (outcome is Outcome.UNTRAINED)


def test_a_script_that_leaves_by_os_exit_is_done_once_its_weights_are_stored(lab: Lab) -> None:
    run = lab.run(f"{SCRIPT}\nimport os\nos._exit(0)").done()
    assert run.message.outcome is Outcome.DONE and run.message.outputURI.endswith("final/")


def test_the_script_gets_its_arguments_and_its_folder(lab: Lab) -> None:
    (lab.folder / "beside.py").write_text("HERE = 5")
    run = lab.run(
        "import sys, beside; print(sys.argv[1:], beside.HERE, __name__)", args=("--lr", "0.1")
    ).ends(0)
    assert "['--lr', '0.1'] 5 __main__" in run.log


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({Env.TRAINING: '{"warmup": 3}'}, "spec.training.warmup is not a field"),
        ({Env.CHECKPOINT_URI: "ftp://x"}, "ftp://x"),
        ({Env.CHECKPOINT_URI: "/proc/nope"}, "/proc/nope cannot store checkpoints"),
        ({Env.KNOWN_DURABLE_STEP: "5"}, "step 5 of job is known to be durable"),
        ({Env.TRAINING: '{"globalBatchSize": 51}'}, "has 50 sample(s), fewer than a global batch of 51"),
        ({Env.CHECKPOINT_URI: "s3://b/p", "AWS_PROFILE": "nobody"}, "nobody"),
        ({Env.CHECKPOINT_URI: "s3://b/p", Env.CHECKPOINT_ENDPOINT: "not a url"}, "not a url"),
    ],
)
def test_a_bad_value_ends_the_run_with_a_sentence(lab: Lab, env: dict[str, str], says: str) -> None:
    run = lab.run(env=env).ends(ExitCode.BAD_CONFIGURATION)
    assert run.message.outcome is Outcome.BAD_CONFIGURATION
    assert says in run.message.message
    assert not run.losses and "Traceback" not in run.log


BAD = [
    ("eval_dataset=[]", "eval_dataset=...) is empty"),
    ("eval_dataset=iter([1])", "Trainer(eval_dataset=...) is a list_iterator without len() or [i]"),
    ("global_batch_size='8'", "Trainer(global_batch_size='8'): must be a whole number"),
    ("log_every=0", "log_every=0): must be at least 1"),
    ("log_every='10'", "Trainer(log_every='10'): must be a whole number"),
    ("eval_every=-1", "eval_every=-1): must be at least 1"),
    ("model=None", "Trainer(model=...) is a NoneType: give it a torch Module"),
    (
        "optimizer='adam'",
        "Trainer(optimizer='adam'): give it a torch Optimizer, or a name: adamw, sgd, adafactor",
    ),
    (
        "optimizer=torch.optim.AdamW(Model().parameters())",
        "Trainer(optimizer=...) has none of the model's parameters, so it would train nothing",
    ),
]


def test_bad_arguments_are_named_before_anything_is_trained(lab: Lab) -> None:
    trains = SCRIPT.split("trainer = ")[1].split("trainer.fit()")[0].replace("spottrain.Trainer(", "dict(")
    attempt = (
        f"usual = {trains}def attempt(text): spottrain.Trainer(**usual | eval(f'dict({{text}})')).fit()\n"
    )
    said = lab.refusals(SCRIPT.split("trainer = ")[0] + attempt, [text for text, _ in BAD])
    for (text, says), refusal in zip(BAD, said, strict=True):
        assert says in refusal, text
    assert "event=claimed" not in (lab.folder / "run-1.log").read_text()


def test_a_second_fit_is_refused(lab: Lab) -> None:
    run = lab.run(SCRIPT.replace("trainer.fit()", "trainer.fit(); trainer.fit()")).ends(
        ExitCode.BAD_CONFIGURATION
    )
    assert "a second training in one run" in run.message.message


def test_a_fit_that_fails_again_after_its_first_error_was_caught_gives_head_up(lab: Lab) -> None:
    failing = SCRIPT.replace(
        "trainer.fit()",
        "trainer.loss_fn = None\ntry:\n    trainer.fit()\nexcept TypeError:\n    trainer.fit()",
    )
    run = lab.run(failing).ends(ExitCode.FAILED)
    assert run.log.count("event=claimed") == run.log.count("event=released") == 2


def test_the_manifest_wins_over_the_script_and_says_so(lab: Lab) -> None:
    run = lab.run(training='{"maxSteps": 3, "globalBatchSize": 4, "seed": 9, "clipGradNorm": 1}').ends(
        ExitCode.DONE
    )
    assert max(run.losses) == 3
    assert "event=override setting=max_steps manifest=3 script=24" in run.log
    assert "event=override setting=global_batch_size manifest=4 script=8" in run.log


def test_a_periodic_save_that_fails_does_not_end_the_training_and_is_told(lab: Lab) -> None:
    broken = "if len(puts) == 1: raise StoreUnavailable('the store answers 503')"
    run = lab.run(holding(lab, 12, "event=save-failed"), uploads=broken).done()
    assert "event=save-failed step=7" in run.log and "event=committed step=14" in run.log
    assert "1 save(s) failed on the way, the last with: the store answers 503" in run.message.message


def test_a_failing_script_gives_head_up_and_keeps_what_was_saved(lab: Lab) -> None:
    run = lab.run(SCRIPT.replace("time.sleep(PAUSE)", "assert trainer.step < 10, 'broken data'")).ends(
        ExitCode.FAILED
    )
    assert "AssertionError: broken data" in run.message.message
    assert run.message.durableStep == 7
    assert lab.head["state"] == "released"


def test_progress_and_metrics_are_served(lab: Lab) -> None:
    run = lab.run(env={Env.PROGRESS_PORT: "0", "PAUSE": "0.1"}).until("step=3/")
    progress = progress_of(run)
    assert progress.state == "Training" and progress.step >= 2 and progress.totalSteps == 24
    assert progress.attempt == 1 and progress.loss is not None and progress.etaSeconds is not None
    assert progress.jobUID.startswith("uid-") and progress.worker == 0, "by which the operator knows it"
    assert "spottrain_total_steps 24" in served(run, "metrics")


def test_on_a_laptop_the_same_command_goes_on_from_ctrl_c(lab: Lab) -> None:
    (lab.folder / "train.py").write_text(SCRIPT)
    first = (
        lab.start(["--interval", "90s", "train.py"], {"PAUSE": "0.05"})
        .until("step=5/")
        .send(signal.SIGINT)
        .ends(ExitCode.INTERRUPTED)
    )
    assert "the same command resumes from there" in first.log
    second = lab.start(["--interval", "90s", "train.py"], {}).done()
    assert "attempt=2" in second.log and min(second.losses) == max(first.losses) + 1
    assert (lab.folder / "checkpoints" / "train" / "final" / "model.safetensors").exists()


def test_a_script_that_changes_its_folder_still_finds_its_checkpoints(lab: Lab) -> None:
    (lab.folder / "elsewhere").mkdir()
    moved = SCRIPT.replace("trainer.fit()", "os.chdir('elsewhere'); trainer.fit()")
    (lab.folder / "train.py").write_text(moved)
    first = lab.start(["train.py"], {"PAUSE": "0.05"}).until("step=5/").stopped()
    second = lab.start(["train.py"], {}).done()
    assert min(second.losses) == max(first.losses) + 1
    assert not list((lab.folder / "elsewhere").iterdir())


def test_a_save_that_an_upload_is_in_the_way_of_is_told_once_and_made_after_it(lab: Lab) -> None:
    log = str(lab.folder / "run-1.log")
    slow = f"while 's000000003' in key and ' step=9/' not in open({log!r}).read(): time.sleep(0.01)"
    script = holding(lab, 10, "event=committed step=3")
    run = lab.run(script, uploads=slow, interval="3steps").done()
    assert run.log.count("event=save-skipped step=6 uploading=3") == 1
    assert run.log.count("uploading=3") == 1
    saved = [
        int(line.split("step=")[1].split()[0]) for line in run.log.splitlines() if "event=saving" in line
    ]
    assert saved[0] == 3 and 9 <= saved[1] < 12, "as soon as the way is free"


def test_a_loss_that_is_no_number_ends_the_training_and_what_was_saved_before_is_whole(lab: Lab) -> None:
    sick = SCRIPT.replace(
        "    return torch.nn",
        "    if 'SICK' in os.environ and trainer.step == 9: batch[1].fill_(torch.nan)\n    return torch.nn",
    )
    run = lab.run(sick, interval="4steps", env={"SICK": "1"}).ends(ExitCode.FAILED)
    assert run.message.outcome is Outcome.FAILED and run.message.reason == "TrainingFailed"
    assert "the loss is nan at step 10; nothing was saved since. Lower the" in run.message.message
    assert 4 <= (run.message.durableStep or 0) < 10 and "Traceback" not in run.log
    healed = lab.run(sick).done()
    assert min(healed.losses) == (run.message.durableStep or 0) + 1


def test_weights_that_are_no_numbers_after_a_loss_that_is_one_end_the_training_unsaved(lab: Lab) -> None:
    sick = SCRIPT.replace(
        "trainer.fit()",
        "model.last.bias.register_hook(lambda g: g * torch.nan if trainer.step == 7 else g)\ntrainer.fit()",
    )
    run = lab.run(sick, interval="4steps", training='{"maxSteps": 8}').ends(ExitCode.FAILED)
    assert run.message.reason == "TrainingFailed" and run.message.durableStep == 4
    assert "last.bias holds NaN after step 8, which is not saved" in run.message.message
    head = lab.head
    assert head["state"] == "released" and [each["step"] for each in head["checkpoints"]] == [4]


def test_a_notice_too_short_for_a_save_is_told_while_there_is_time_to_mend_it(lab: Lab) -> None:
    run = lab.run(env={Env.GRACE_SECONDS: "2"}).done()
    told = next(line for line in run.log.splitlines() if "event=emergency-budget" in line)
    assert "grace=2.000" in told and 'warning="a save at a notice is estimated to take ' in told
    assert run.log.count("event=emergency-budget") == 1, "and not at each save, with other numbers"
    assert "of 2 s of notice: an interruption may lose the steps" in run.message.warning
    assert run.message.graceSeconds == 2 and (run.message.emergencySeconds or 0) > 2


def test_a_notice_that_is_long_enough_is_told_without_a_warning(lab: Lab) -> None:
    run = lab.run(env={Env.GRACE_SECONDS: "600"}).done()
    told = next(line for line in run.log.splitlines() if "event=emergency-budget" in line)
    assert "warning" not in told and not run.message.warning
    assert run.message.graceSeconds == 600 and (run.message.emergencySeconds or 600) < 480


FULL = """\
def fill():  # from now on nobody reads what is printed
    import os, select, threading, time
    kept = os.dup(1)
    global ends
    ends = os.pipe()
    os.dup2(ends[1], 1)
    threading.Thread(target=print, args=["x" * 200_000], daemon=True).start()
    while select.select([], [ends[1]], [], 0)[1]:
        time.sleep(0.01)
    os.write(kept, b"full\\n")
"""
BLOCKED = {
    "before the training": FULL + "fill()\nimport time\ntime.sleep(60)\n",
    "while it trains": FULL + SCRIPT.replace("    time.sleep(PAUSE)\n", "    trainer.step == 3 and fill()\n"),
    "at its end": FULL + "fill()\nraise SystemExit(3)\n",
}


@pytest.mark.parametrize("when", BLOCKED)
def test_a_log_that_nobody_reads_holds_up_neither_the_termination_message_nor_the_end(
    lab: Lab, when: str
) -> None:
    run = lab.run(BLOCKED[when], env={Env.GRACE_SECONDS: "3"}).until("full")
    if when != "at its end":
        run.send()
    code = run.end()
    expected = {
        "before the training": (Outcome.INTERRUPTED, ExitCode.INTERRUPTED),
        "while it trains": (Outcome.INTERRUPTED_LOST, ExitCode.INTERRUPTED_LOST),
        "at its end": (Outcome.FAILED, 3),
    }
    assert (run.message.outcome, code) == expected[when]
