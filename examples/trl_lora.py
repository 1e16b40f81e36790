"""Fine-tuning with LoRA by TRL's SFTTrainer and PEFT, unchanged: spottrain run attaches to it.

spottrain run --checkpoint checkpoints/trl examples/trl_lora.py    # Ctrl-C saves; again: goes on

The base model is frozen, and no checkpoint holds it: each start makes it again, here with random weights.
Your own comes from the same place each time: AutoModelForCausalLM.from_pretrained("my-org/my-model").
"""

import os

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

STEPS = int(os.environ.get("STEPS", "300"))
WORDS = ["<pad>", "<end>", "<unknown>", "plus", "is"] + [str(number) for number in range(100)]


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unknown>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )


def main() -> None:
    set_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=1,
        )
    )
    sums = [{"text": f"{a} plus {b} is {a + b}"} for a in range(32) for b in range(32)]
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=os.environ.get("OUTPUT", "trl-output"),
            max_steps=STEPS,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            logging_steps=10,
            save_strategy="no",  # when to save is decided by --interval
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            bf16=torch.cuda.is_available(),  # True by default, and many CPUs are slow in it
        ),
        train_dataset=Dataset.from_list(sums),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()  # leaves the adapter in the checkpoint URI's final/, as PEFT reads it


if __name__ == "__main__":
    main()
