"""One process of the group `loops`: GPT-2 by a loop of one's own, by Hugging Face's Trainer or by Lightning.

spottrain run bench/gpu/loops.py TIMES STEPS [tiny] KIND [STOP]

It writes the Unix time of each step, sends itself SIGTERM in step STOP, and prints the weights' digest.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import spottrain
import torch
from spottrain.checkpoint.final_weights import digest
from transformers import GPT2Config, GPT2LMHeadModel

from bench.gpu.model import GPT_124M, SMALL, Shape, Windows
from bench.gpu.trainings import CUDA, DEVICE, adamw

ROWS: Final = 8
"""Of a batch."""
Done = Callable[[], None]


class Texts(Windows):
    """The same windows, as Hugging Face's models take them."""

    def __getitem__(self, index: int) -> Any:
        tokens = super().__getitem__(index)[:-1]
        return {"input_ids": tokens, "labels": tokens}


def gpt(shape: Shape) -> Any:
    """With dropout, so that the device's random state counts."""
    sizes: dict[str, Any] = {"n_embd": shape.width, "n_layer": shape.layers, "n_head": shape.heads}
    config = GPT2Config(vocab_size=shape.vocabulary, n_positions=shape.context, **sizes)
    return GPT2LMHeadModel(config)


def run(shape: Shape, steps: int, folder: str, done: Done) -> Any:
    spottrain.job_settings(deterministic=True)
    spottrain.seed(1)
    model = gpt(shape).to(DEVICE)
    optimizer = adamw(model)
    loader = spottrain.data.loader(Texts(shape, 64), batch_size=ROWS, shuffle=True)
    run = spottrain.Run(model=model, optimizer=optimizer, data=loader, max_steps=steps)
    for batch in run.batches(loader):
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = model(**{name: each.to(DEVICE) for name, each in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done()
        run.step_completed(loss=loss)
    run.finish()
    return model


def transformers(shape: Shape, steps: int, folder: str, done: Done) -> Any:
    from spottrain.integrations.transformers import TransformersCallback
    from transformers import Trainer, TrainerCallback, TrainingArguments, enable_full_determinism

    class Marked(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            done()

    enable_full_determinism(1)
    spot = TransformersCallback()
    trainer = Trainer(
        model=gpt(shape),
        args=TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=ROWS // 2,
            gradient_accumulation_steps=2,
            bf16=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not CUDA,
        ),
        train_dataset=Texts(shape, 64),
        callbacks=[Marked(), spot],
    )
    trainer.train(resume_from_checkpoint=spot.resume(trainer))
    return trainer.model


def lightning(shape: Shape, steps: int, folder: str, done: Done) -> Any:
    import lightning.pytorch as pl
    from spottrain.integrations.lightning import LightningCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = gpt(shape)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.inner(**batch).loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            done()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self.inner)

    spottrain.seed(1)
    spot = LightningCallback(folder=folder)
    trainer = pl.Trainer(
        max_steps=steps,
        devices=1,
        precision="bf16-mixed",
        deterministic=True,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        callbacks=[spot],
    )
    module = Module()
    loader = spottrain.data.loader(Texts(shape, 64), batch_size=ROWS, shuffle=True)
    trainer.fit(module, loader, ckpt_path=spot.resume())
    return module.inner


KINDS: Final = {each.__name__: each for each in (run, transformers, lightning)}


def main(times: str, steps: str, *words: str) -> None:
    tiny, (kind, *stop) = words[0] == "tiny", [word for word in words if word != "tiny"]
    number = 0

    def done() -> None:
        nonlocal number
        number += 1
        with Path(times).open("a") as file:
            file.write(f"{time.time()}\n")
        if stop and number == int(stop[0]):
            os.kill(os.getpid(), signal.SIGTERM)

    model = KINDS[kind](SMALL if tiny else GPT_124M, int(steps), f"{times}.folder", done)
    print(f"digest {digest(model.state_dict())}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
