"""What the end-to-end tests share: the browser."""

from __future__ import annotations

import os
import shutil

import pytest


@pytest.fixture(scope="module")
def chromium() -> str:
    """Path of the browser. `.ci/run` installs it and requires it; elsewhere its absence is said."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        reason = "no Chromium on this machine: apt-get install chromium"
        if os.environ.get("STREAMRT_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return path
