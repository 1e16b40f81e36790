"""Training loops of other libraries, kept from being lost. Each module imports its library; none is needed.

folder.py        what they have in common: checkpoints that the library itself writes and reads
transformers.py  `SpotCallback` for Hugging Face's Trainer
accelerate.py    `Guard` for a loop around an Accelerator
lightning.py     `SpotCallback` for Lightning's Trainer
"""
