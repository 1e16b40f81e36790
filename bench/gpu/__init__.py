"""Figures that only a GPU can give; see `__main__`."""
