"""Integrations that make training loops of other libraries survive interruptions. All are optional.

Each module imports its own library.

folder_checkpoints  shared base: checkpoints that the library itself writes and reads
transformers        `TransformersCallback` for Hugging Face's Trainer
accelerate          `AccelerateRun` for a loop around an Accelerator
lightning           `LightningCallback` for Lightning's Trainer
loader_position     plain DataLoaders in Lightning, resumed within an epoch
attach              the same for scripts that know nothing of it
"""
