"""What a loader worker comes to hold of its own, for sets of many kinds: estimated, and as Linux says.

    python bench/loader_memory.py [fork|spawn] [kind ...]

Each kind in an interpreter of its own, one worker, one epoch in random order. The last line is JSON.
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


def common(count: int) -> list[Any]:
    words = {f"word{number}": number for number in range(20_000)}
    return [{"text": f"row {number} " * 6, "tags": ["a"], "words": words} for number in range(count)]


def fields(count: int, large: int) -> list[Any]:
    """Records of eight fields, the one at `large` a list of 20 strings."""
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
    return {
        "segmentation": [outline],
        "area": random.random(),
        "iscrowd": 0,
        "image_id": image,
        "id": number,
        "bbox": [random.random() * 600 for _ in range(4)],
        "category_id": number % 80,
    }


def pool(count: int, users: int) -> list[Any]:
    """Records that refer to one of `users` others."""
    people = [{"name": f"user {number} " * 5} for number in range(users)]
    return [(f"text {number}", random.choice(people)) for number in range(count)]


def renumbered(count: int) -> tuple[list[str], list[str]]:
    """The same paths in another order."""
    found = [PATH.format(number) for number in range(count)]
    return found, random.sample(found, count)


KINDS: Final[dict[str, Callable[[], Any]]] = {
    "array": lambda: numpy.random.rand(200_000, 60),
    "tensor": lambda: torch.rand(200_000, 60),
    "paths": lambda: [PATH.format(number) for number in range(1_000_000)],
    "objects": lambda: numpy.array([PATH.format(number) for number in range(1_000_000)], dtype=object),
    "pairs": lambda: [(f"/data/{number:09d}.jpeg", number % 10) for number in range(500_000)],
    "dicts": lambda: [
        {"text": f"text number {number} " * 4, "tags": [f"t{number}", "x"]} for number in range(200_000)
    ],
    "tokens": lambda: [[random.randrange(1000, 50_000) for _ in range(100)] for _ in range(20_000)],
    "common": lambda: common(200_000),
    "bytes": lambda: [os.urandom(50_000) for _ in range(2000)],
    "tensors": lambda: [torch.rand(100) for _ in range(100_000)],
    "arrays": lambda: [numpy.random.rand(100) for _ in range(100_000)],
    **{f"field{place}": partial(fields, 100_000, place) for place in (0, 1, 7)},
    "coco": lambda: Coco(20_000),
    "byimage": lambda: Coco(20_000, flat=False),
    "pool": lambda: pool(500_000, 50_000),
    "orders": lambda: renumbered(500_000),
}


class Rows:
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows[0] if isinstance(self.rows, tuple) else self.rows)

    def __getitem__(self, index: int) -> float:
        if isinstance(self.rows, tuple):
            return float(sum(len(each[index]) for each in self.rows))
        row = self.rows[index]
        if isinstance(row, dict) and "field0" in row:
            return float(
                sum(sum(map(len, each)) if isinstance(each, list) else each for each in row.values())
            )
        if isinstance(row, tuple) and isinstance(row[1], dict):
            return float(len(row[0]) + len(row[1]["name"]))
        if isinstance(row, dict):
            return float(len(row["text"]) + len(row["tags"]))
        if isinstance(row, tuple | str | bytes):
            return float(len(row))
        return float(sum(row)) if isinstance(row, list) else float(row.sum())


def probe(kind: str, method: str) -> dict[str, float]:
    rows = Rows(KINDS[kind]())
    began = time.perf_counter()
    found = copy_of(rows, method=method)
    took = time.perf_counter() - began
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
    return {
        "estimated_mib": round(found.bytes / MIB, 1),
        "found_mib": round(private / MIB, 1),
        "seconds": round(took, 2),
    }


def main() -> None:
    method, *kinds = sys.argv[1:] or ["fork"]
    figures: dict[str, dict[str, float]] = {}
    if len(kinds) == 1:
        figures = {kinds[0]: probe(kinds[0], method)}
    else:
        for kind in kinds or KINDS:
            command = [sys.executable, __file__, method, kind]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            print(done.stdout, end="", flush=True)
            figures |= json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
