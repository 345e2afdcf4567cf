"""A real browser for tests of pages, where there is one."""

from __future__ import annotations

import shutil

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
BROWSED = [
    pytest.mark.skipif(
        not (BROWSER and DRIVER), reason="no Chromium with its driver: apt-get install chromium chromium-driver"
    ),
    pytest.mark.xdist_group("browser"),
]
