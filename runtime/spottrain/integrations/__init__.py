"""Training loops of other libraries, kept from losing work. Each module imports its library; none is needed.

folder_checkpoints  what they have in common: checkpoints that the library itself writes and reads
transformers        `TransformersCallback` for Hugging Face's Trainer
accelerate          `Run` for a loop around an Accelerator
lightning           `LightningCallback` for Lightning's Trainer
"""
