"""What `spottrain profile` shows of a stored profile, and when it is the runtime's verb."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from spottrain.cli import entry
from spottrain.contract import SERIES_PREFIX, TimeSplit, profile_key
from spottrain.core.series import Attempt, Series
from spottrain.storage.open import open_store
from spottrain_cli import profiles
from spottrain_cli.app import main

TABLE = """ share      time   calls  operation
 72.2%     44 ms       3  aten::mm
  1.8%    1.1 ms      12  aten::sum
"""
WORDS = "data-bound: the device waits for data 40% of the time. Set training.data.numWorkers to 4."


@pytest.fixture
def uri(tmp_path: Path) -> str:
    store = open_store(str(tmp_path / "run"))
    stem = f"rank-00000.{1_764_071_000_000_000_000}"
    store.upload(profile_key(1, 0, f"{stem}.top.txt"), memoryview(b"old"))
    store.upload(profile_key(2, 1, f"{stem}.top.txt"), memoryview(b"another rank"))
    store.upload(profile_key(2, 0, f"{stem}.top.txt"), memoryview(f"{WORDS}\n\n{TABLE}".encode()))
    split = TimeSplit(productive=80.0, dataWait=15.0, startup=5.0)
    last = Attempt(term=2, job="bert", jobUID="u", number=2, bornTime=0.0, writtenTime=1.0, timeSplit=split)
    store.upload(f"{SERIES_PREFIX}t000002.jsonl.gz", memoryview(Series(attempt=last, points=()).to_bytes()))
    return store.uri


def test_the_newest_profile_of_rank_0_is_shown_with_what_to_change(
    uri: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", uri]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].endswith(", attempt 2, rank 0, profiled 2025-11-25 11:43 UTC") and shown[1] == WORDS
    assert shown[3:6] == TABLE.splitlines()
    assert shown[-1] == "The time of attempt 2: 80% training, 5% starting, 15% waiting for data."
    assert main(["profile", uri, "-o", "json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["profile"]["operations"] == TABLE.splitlines()
    assert facts["attempt"]["shares"]["dataWait"] == 0.15


def test_without_a_profile_a_sentence_says_how_to_make_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["profile", str(tmp_path / "empty")]) == 3
    assert "make one with `spottrain profile train.py`" in capsys.readouterr().err


def test_a_profile_with_nothing_to_change_is_its_table_alone() -> None:
    found = profiles.of_text(TABLE, profile_key(1, 0, "rank-00000.1.top.txt"), "/x")
    assert (found.words, found.operations) == ("", tuple(TABLE.splitlines()))


@pytest.mark.parametrize(
    ("words", "trains"),
    [
        ("run x.py", True),
        ("sync out --to s3://b/p", True),
        ("profile train.py", True),
        ("profile --wait 3 missing.py --lr 1", True),
        ("profile -m package.train", True),
        ("profile bert", False),
        ("profile -n ml bert", False),
        ("profile s3://bucket/bert", False),
        ("profile --help", False),
        ("list", False),
        ("", False),
    ],
)
def test_profile_is_the_runtimes_where_it_names_a_script(words: str, trains: bool) -> None:
    assert entry.trains(words.split()) is trains
