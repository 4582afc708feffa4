"""A headless Chromium: the requests and console messages of a page."""

from __future__ import annotations

import contextlib
import json
import shutil
import time

from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.by import By

SWITCHES = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # no name resolves
)


class Browser:
    """Chromium with an empty profile, driven through `driver`."""

    def __init__(self, profile):
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for switch in (*SWITCHES, f"--user-data-dir={profile}"):
            options.add_argument(switch)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
        self.driver.set_script_timeout(60)

    def open(self, address):
        """Load a page in a window of 1,280 x 900 pixels, and clear the logs."""
        self.driver.get_log("performance"), self.driver.get_log("browser")
        size = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.get(address)

    def find(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector):
        return self.driver.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def wait(self, condition, seconds=60):
        """Wait until a condition holds, and return its value; fail if it never does.

        Elements may appear late: Gradio builds a folded part when it is opened.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(NoSuchElementException, StaleElementReferenceException):
                found = condition()
                if found:
                    return found
            time.sleep(0.05)
        raise AssertionError(f"waited for {seconds} s; the console says {self.driver.get_log('browser')}")

    def requested(self):
        """Addresses that the page requested, over HTTP or as files."""
        entries = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [entry["params"] for entry in entries if entry["method"] == "Network.requestWillBeSent"]
        sockets = [entry["params"]["url"] for entry in entries if entry["method"] == "Network.webSocketCreated"]
        found = [entry["request"]["url"] for entry in sent] + sockets
        return [url for url in found if not url.startswith(("data:", "blob:", "chrome:", "about:"))]

    def complaints(self):
        """Errors and warnings on the console."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]
