"""Sparse gradient and update exchange for PyTorch Lightning."""
