"""Integrations that make training loops of other libraries survive interruptions. All are optional.

Each module imports its own library.

folder_checkpoints  shared base: checkpoints that the library itself writes and reads
transformers        `TransformersCallback` for Hugging Face's Trainer
accelerate          `AccelerateRun` for a loop around an Accelerator
lightning           `LightningCallback` for Lightning's Trainer
pass_position       a pass over a loader of Accelerate, for the two that use it
generators          random state that the batches of a loader follow from
saved_models        what a script saves of its model, into a folder of its pod
attach              the same for scripts that know nothing of it
"""
