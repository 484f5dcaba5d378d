"""The benchmark kit: one bench a file, run by `python -m lightning_sparse bench NAME`."""
