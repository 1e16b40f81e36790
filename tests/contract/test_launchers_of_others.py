"""What the operator knows of torchrun and accelerate launch is what their own parsers say."""

from __future__ import annotations

import argparse

import pytest
from accelerate.commands.launch import launch_command_parser
from spottrain_operator.api import injected
from torch.distributed.run import get_args_parser


@pytest.mark.parametrize(
    ("parser", "known"),
    [
        (get_args_parser(), injected.TORCHRUN_SWITCHES),
        (launch_command_parser(), injected.ACCELERATE_SWITCHES),
    ],
    ids=["torchrun", "accelerate"],
)
def test_the_flags_without_a_value_are_those_of_the_real_launchers(
    parser: argparse.ArgumentParser, known: frozenset[str]
) -> None:
    flags = {name for action in parser._actions if action.nargs == 0 for name in action.option_strings}
    assert flags - {"-h", "--help"} == known | injected.MODULE_FLAGS | (flags & injected.NO_SCRIPT_FLAGS)
