"""The launcher stands where torchrun and accelerate launch expect the script, by their own parsers."""

from __future__ import annotations

import argparse

import pytest
from accelerate.commands.launch import launch_command_parser
from spottrain_operator.api.injected import LAUNCHER, launched
from torch.distributed.run import get_args_parser

TORCHRUN, ACCELERATE = get_args_parser(), launch_command_parser()


@pytest.mark.parametrize(
    ("parser", "command"),
    [
        (TORCHRUN, "torchrun --standalone train.py --config a.py"),
        (TORCHRUN, "torchrun --nnodes 2 --rdzv_backend=c10d --virtual-local-rank train.py"),
        (TORCHRUN, "torchrun --log-dir /logs --standalone -m package.train a.py"),
        (ACCELERATE, "accelerate launch --multi_gpu --num_processes 2 train.py --cpu"),
        (ACCELERATE, "accelerate launch --config_file a.yaml --use-fsdp train.py a.py"),
        (ACCELERATE, "accelerate launch --mixed_precision bf16 -q --module package.train"),
    ],
)
def test_the_launcher_is_the_script(parser: argparse.ArgumentParser, command: str) -> None:
    words = command.split()
    flags = words.index("launch") + 1 if "launch" in words else 1
    found = parser.parse_args(launched(words)[flags:])
    assert found.training_script == LAUNCHER and not found.module
