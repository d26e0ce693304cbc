"""A language model starts without packages that only other stages use."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from stages.lean import lean_imports
with lean_imports():
    from transformers import modeling_utils
from transformers import utils
print({"torchao", "scipy.optimize"} & set(sys.modules), utils.is_torchao_available())
"""


@pytest.mark.slow
def test_what_no_language_model_needs_is_not_imported_and_stays_known() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "set() True\n"
