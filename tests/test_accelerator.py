"""Test the package on an accelerator other than the CPU, emulated in host memory (`host_memory.cpp`): no GPU is needed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent / "support" / "on_host_memory.py"


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("c++") and shutil.which("ninja")), reason="needs a C++ compiler and ninja")
def test_an_accelerator_other_than_the_cpu() -> None:
    command = [sys.executable, "-m", "pytest", str(TESTS), "-q", "--numprocesses", "0", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == 0, done.stdout[-10000:]
