"""transformers without the optional packages that take seconds to import and that no model here needs.

transformers imports some packages because they are installed, not because they are used: torchao alone takes 3 s, scipy.optimize 1 s.

    with lean_imports():
        from transformers import AutoModelForCausalLM

Knows how transformers asks whether a package is there. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_UNUSED = ("is_torchao_available", "is_scipy_available", "is_sklearn_available")


@contextmanager
def lean_imports() -> Iterator[None]:
    """What is imported inside takes these packages for absent, for as long as the process lives."""
    from transformers import utils

    there = {name: getattr(utils, name) for name in _UNUSED if hasattr(utils, name)}
    for name in there:
        setattr(utils, name, lambda *_, **__: False)
    try:
        yield
    finally:
        for name, asks in there.items():
            setattr(utils, name, asks)
