import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("script", ["on_gpu.py", "blocks_on_gpu.py"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_device_agrees_with_the_torch_path(device, script):
    root = Path(__file__).parents[2]
    environment = os.environ | {"TRITON_INTERPRET": str(int(device == "cpu")), "PYTHONPATH": str(root)}
    command = [sys.executable, Path(__file__).with_name(script), device]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
