"""What a loader worker comes to hold of its own, for sets of many kinds: estimated, and as Linux says.

Each kind in an interpreter of its own, one worker, one epoch in random order.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy
import torch
from spottrain.data.worker_copies import copy_of
from spottrain.diagnostics.loader_memory import private_bytes
from torch.utils.data import DataLoader

MIB: Final = 2**20
PATH: Final = "/data/images/{:09d}/with-a-longer-name.jpeg"
SHARED: Final = "vocabulary"
"""Key of what the records have in common; samples do not read it."""


def common(count: int) -> list[Any]:
    words = {f"word{number}": number for number in range(20_000)}
    return [{"text": f"row {number} " * 6, "tags": ["a"], SHARED: words} for number in range(count)]


def fields(count: int, large: int) -> list[Any]:
    """Returns records of eight fields, the one at `large` a list of 20 strings."""
    names = [f"field{place}" for place in range(8)]
    return [
        {name: words(number) if place == large else number % 9 for place, name in enumerate(names)}
        for number in range(count)
    ]


def words(number: int) -> list[str]:
    return [f"{number} word {word}" for word in range(20)]


class Coco:
    """As pycocotools' COCO holds what it has read: the same annotations three times."""

    def __init__(self, images: int, *, flat: bool = True) -> None:
        text = json.dumps([annotation(number, number % images) for number in range(7 * images)])
        found = json.loads(text)
        named = [{"id": number, "file_name": PATH.format(number)} for number in range(images)]
        self.of_image: dict[int, list[Any]] = defaultdict(list)
        for each in found:
            self.of_image[each["image_id"]].append(each)
        if flat:
            self.dataset = {"images": named, "annotations": found}
            self.anns, self.imgs = ({each["id"]: each for each in rows} for rows in (found, named))
        self.ids = list(range(images))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> list[Any]:
        return [sum(map(sum, each["segmentation"])) + sum(each["bbox"]) for each in self.of_image[index]]


def annotation(number: int, image: int) -> dict[str, Any]:
    outline = [random.random() * 600 for _ in range(2 * random.randrange(3, 20))]
    box = [random.random() * 600 for _ in range(4)]
    named = {"segmentation": [outline], "area": random.random(), "iscrowd": 0, "image_id": image}
    return named | {"id": number, "bbox": box, "category_id": number % 80}


def pool(count: int, users: int) -> list[Any]:
    """Returns records that refer to one of `users` others."""
    people = [{"name": f"user {number} " * 5} for number in range(users)]
    return [(f"text {number}", random.choice(people)) for number in range(count)]


def renumbered(count: int) -> tuple[list[str], list[str]]:
    """Returns the same paths in another order."""
    found = [PATH.format(number) for number in range(count)]
    return found, random.sample(found, count)


KINDS: Final[dict[str, Callable[[], Any]]] = {
    "coco": lambda: Coco(20_000),
    "byimage": lambda: Coco(20_000, flat=False),
    "pool": lambda: pool(500_000, 50_000),
    "field0": partial(fields, 100_000, 0),
    "field7": partial(fields, 100_000, 7),
    "array": lambda: numpy.random.rand(200_000, 60),
    "tensor": lambda: torch.rand(200_000, 60),
    "paths": lambda: [PATH.format(number) for number in range(1_000_000)],
    "objects": lambda: numpy.array([PATH.format(number) for number in range(1_000_000)], dtype=object),
    "pairs": lambda: [(f"/data/{number:09d}.jpeg", number % 10) for number in range(500_000)],
    "dicts": lambda: [{"text": f"text {number} " * 5, "tags": [f"t{number}"]} for number in range(200_000)],
    "tokens": lambda: [[random.randrange(1000, 50_000) for _ in range(100)] for _ in range(20_000)],
    "common": lambda: common(200_000),
    "bytes": lambda: [os.urandom(50_000) for _ in range(2000)],
    "tensors": lambda: [torch.rand(100) for _ in range(100_000)],
    "arrays": lambda: [numpy.random.rand(100) for _ in range(100_000)],
    "orders": lambda: renumbered(500_000),
}


class Rows:
    """The set as a loader sees it; a sample reads all of its record but what all share."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows[0] if isinstance(self.rows, tuple) else self.rows)

    def __getitem__(self, index: int) -> float:
        if isinstance(self.rows, tuple):
            return sum(read(each[index]) for each in self.rows)
        return read(self.rows[index])


def read(row: Any) -> float:
    if isinstance(row, dict):
        return sum(read(value) for name, value in row.items() if name != SHARED)
    if isinstance(row, list | tuple):
        return sum(map(read, row))
    if isinstance(row, str | bytes):
        return float(len(row))
    return float(row) if isinstance(row, int | float) else float(row.sum())


def probe(kind: str, method: str) -> dict[str, float]:
    """Estimates, then trains for an epoch and asks Linux."""
    rows = Rows(KINDS[kind]())
    began = time.process_time()
    found = copy_of(rows, method=method)
    took = time.process_time() - began
    loader: DataLoader[Any] = DataLoader(
        rows,  # type: ignore[arg-type]
        batch_size=2000,
        shuffle=True,
        num_workers=1,
        multiprocessing_context=method,
    )
    stream: Any = iter(loader)
    private = 0
    for _ in range(len(loader)):
        next(stream)
        private = private_bytes(stream._workers[0].pid) or private
    megabytes = {"estimated_mib": found.bytes / MIB, "found_mib": private / MIB, "seconds": took}
    return {name: round(value, 2) for name, value in megabytes.items()}


def measure(method: str, kinds: list[str]) -> dict[str, dict[str, float]]:
    figures: dict[str, dict[str, float]] = {}
    for kind in kinds or KINDS:
        command = [sys.executable, "-m", "bench.loader_memory", method, kind]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        figures[kind] = json.loads(done.stdout.splitlines()[-1])
        print(kind, figures[kind], flush=True)
    return figures


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[2], sys.argv[1])))
