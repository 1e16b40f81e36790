"""Hugging Face's Trainer, unchanged: spottrain run attaches to it. A tiny model and random text.

spottrain run --checkpoint checkpoints/hf examples/hf_trainer.py       # Ctrl-C saves; again: goes on
"""

import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

STEPS = int(os.environ.get("STEPS", "300"))


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(64, (32,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    set_seed(1)
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    arguments = TrainingArguments(
        output_dir=os.environ.get("OUTPUT", "hf-output"),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        save_strategy="no",  # when to save is decided by --interval
        logging_steps=10,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=Text())
    trainer.train()  # leaves the model in the checkpoint URI's final/, as from_pretrained reads it


if __name__ == "__main__":
    main()
