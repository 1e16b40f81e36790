"""What `spottrain sync` says of options that it cannot use."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest
from spottrain.cli import sync
from spottrain.contract import Env, SyncEnv, TerminationMessage


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["out", "--to", "/s", "--keep", "1"], "--keep 1 must be a whole number, at least 2"),
        (["out", "--to", "/s", "--when", "often"], "--when 'often' is not valid"),
        (["out", "--to", "/s", "--nope"], "unrecognized arguments: --nope"),
        (["out"], "no checkpoint URI is named"),
    ],
)
def test_a_bad_option_is_refused_once_and_by_its_name(
    words: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    for name in (*Env, *SyncEnv):
        monkeypatch.delenv(name, raising=False)
    message = tmp_path / "message"
    monkeypatch.setenv(Env.TERMINATION_MESSAGE, str(message))
    with patch.dict(os.environ):  # the options become variables
        assert sync.main(words) == 2, "as of every command"
    said = capsys.readouterr()
    assert said.err.count(says) == 1 and not said.out
    found = TerminationMessage.from_json(message.read_text())
    assert found is not None and says in found.message
