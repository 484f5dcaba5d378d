"""Turns Triton's interpreter on before anything can import triton; CPU tensors still take the torch path."""

import os

os.environ["TRITON_INTERPRET"] = "1"
