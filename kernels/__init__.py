"""Ops: one folder each, a plain PyTorch `reference.py` beside its kernels. Imported as `mimo_edge.kernels`."""

# `kernels` is also a Hugging Face package: importing this folder under that name would be an accident.
if __name__ == "kernels":
    raise ImportError("this folder is imported as mimo_edge.kernels")
