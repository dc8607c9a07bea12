"""A real browser for tests of pages; they are skipped, with the reason, where there is none."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 60.0


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Any]:
    """Headless Chromium (Debian: packages chromium and chromium-driver) with an empty profile."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver_path = shutil.which("chromedriver")
    if binary is None or driver_path is None:
        pytest.skip("no browser: install chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in (
        "--headless=new",
        # Tests run as root in containers, with little shared memory.
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--no-proxy-server",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--window-size=1200,860",
        f"--user-data-dir={profile}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=driver_path)
    driver = webdriver.Chrome(options=options, service=service)
    try:
        driver.set_script_timeout(WAIT_S)
        driver.set_page_load_timeout(WAIT_S)
        yield driver
    finally:
        driver.quit()


def wait(driver: Any, condition: Callable[[Any], Any], what: str) -> Any:
    """Until `condition(driver)` is true; fails with `what` and the page's text."""
    from selenium.common.exceptions import TimeoutException
    from selenium.webdriver.support.ui import WebDriverWait

    try:
        return WebDriverWait(driver, WAIT_S, poll_frequency=0.05).until(condition)
    except TimeoutException:
        text = driver.execute_script("return document.body.innerText")
        raise AssertionError(f"{what}: not within {WAIT_S:g} s; the page says:\n{text}") from None
