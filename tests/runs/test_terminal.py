"""What a person sees of a training in a terminal: sentences."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from spottrain.contract import LOG_FORMAT, Env, ExitCode

from tests.runs.launched import BASE
from tests.support.terminal import Terminal

TRAINS = """\
import os, sys, time
import torch, spottrain


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, i):
        return torch.full((4,), i / 50), torch.ones(1)


def loss(model, batch):
    if trainer.step == 3:
        print("of the script")
        print("of the script, as an error", file=sys.stderr)
        while not os.path.exists("go"):
            time.sleep(0.01)
        print("not a whole", end=" ", flush=True)
        print("line")
    if trainer.step > 3:
        time.sleep(0.05)
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


model = torch.nn.Linear(4, 1)
trainer = spottrain.Trainer(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
    train_dataset=Numbers(),
    loss_fn=loss,
    max_steps=100_000,
    global_batch_size=8,
    log_every=1,
)
trainer.fit()
"""
SENTENCE = r"(\^C)?\d\d:\d\d:\d\d (\[rank \d\] )?(Warning: )?[A-Z0-9]"


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(script: str, *flags: str, **env: str) -> Terminal:
        (tmp_path / "train.py").write_text(script)
        command = [sys.executable, "-m", "spottrain", "run", *flags, "train.py"]
        env = {Env.CHECKPOINT_URI: str(tmp_path / "store"), Env.CHECKPOINT_INTERVAL: "2steps", **env}
        opened.append(Terminal(tmp_path, command, env))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def test_a_training_shows_sentences_until_ctrl_c(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    it = terminal(TRAINS)
    it.until_rows(r"Step 3/100000: loss \S+, lr 0.001, samples per second \S+, epoch 0, eta ", 1)
    it.until_rows("Saved step 2 in", 1)  # no event comes after it before the next step
    (tmp_path / "go").touch()
    it.until_rows(r"Step ([5-9]|\d\d+)/100000", 1)
    it.type("\x03")
    assert it.end() == ExitCode.INTERRUPTED
    rows = [row for row in it.rows if row]
    assert [row for row in rows if not re.match(SENTENCE, row)] == [
        "of the script",
        "of the script, as an error",
        "not a whole line",
    ]
    text = "\n".join(rows)
    assert re.search(r"^\d\d:\d\d:\d\d Saved step 2 in \S+ m?s, \S+ kB$", text, re.M)
    assert re.search(r"^(\^C)?\d\d:\d\d:\d\d Interrupted: saving, then it stops, within 30 s$", text, re.M)
    assert re.search(r"^\d\d:\d\d:\d\d Interrupted at step \d+, which is saved; the same", rows[-1])
    assert not re.search(r"event=|step=|Warning", text)


@pytest.mark.heavy
def test_a_training_whose_terminal_is_gone_saves_and_ends_although_its_script_prints(
    terminal: Callable[..., Terminal], tmp_path: Path
) -> None:
    prints = TRAINS.replace("    if trainer.step == 3:\n", "    print('step of the script')\n    if False:\n")
    it = terminal(prints)
    it.until_rows(r"Step ([5-9]|\d\d+)/100000", 1)
    it.hang_up()
    assert it.process.wait(60) == ExitCode.INTERRUPTED
    head = json.loads((tmp_path / "store" / "HEAD").read_text())
    assert head["state"] == "released" and head["checkpoints"][0]["step"] >= 5


@pytest.mark.heavy
def test_ranks_share_a_terminal_and_rank_0_speaks_for_all(terminal: Callable[..., Terminal]) -> None:
    prints = 'for number in range(50):\n    print("line", number, "of", rank)\n    time.sleep(0.02)\n'
    it = terminal(
        BASE + prints + "wait()\nsession.end(Ending(Outcome.INTERRUPTED, 'Saved.'))\n",
        "--nproc",
        "2",
    )
    it.until_rows("^ready-", 2)
    it.type("\x03")
    assert it.end() == ExitCode.INTERRUPTED
    others = [row for row in it.rows if row and not re.match(SENTENCE, row)]
    assert sorted(others) == sorted(
        [f"line {number} of {rank}" for number in range(50) for rank in range(2)]
        + [row for row in others if re.fullmatch(r"ready-[01] pid=\d+\.", row)]
    )
    assert not any("[rank" in row for row in it.rows), "rank 0 speaks for all"


@pytest.mark.parametrize(("chosen", "begin"), [("json", '{"time"'), ("logfmt", "20")])
def test_a_machine_format_is_written_to_a_terminal_without_a_control_sequence(
    terminal: Callable[..., Terminal], chosen: str, begin: str
) -> None:
    it = terminal(BASE + "session.end(Ending(Outcome.INTERRUPTED, 'Saved.'))\n", "--log-format", chosen)
    assert it.end() == ExitCode.INTERRUPTED
    assert "\x1b" not in it.sent
    assert all(row.startswith(begin) for row in it.rows if row) and "Saved." in it.rows[-2]


def test_an_unknown_format_ends_the_run_with_those_that_are_known(terminal: Callable[..., Terminal]) -> None:
    it = terminal(BASE, **{LOG_FORMAT: "xml"})
    assert it.end() == 2
    assert "SPOTTRAIN_LOG_FORMAT='xml': must be one of auto, text, logfmt, json" in "\n".join(it.rows)
