"""A headless Chromium, and the requests of a page."""

import json
import shutil

from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.support.wait import WebDriverWait

SWITCHES = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,900"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # no name resolves
)


class Browser:
    """Chromium with an empty profile, driven through `driver`."""

    def __init__(self, profile):
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for switch in (*SWITCHES, f"--user-data-dir={profile}"):
            options.add_argument(switch)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))

    def open(self, address):
        """Load a page, and clear the log of requests."""
        self.driver.get_log("performance")
        self.driver.get(address)

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def text(self, selector):
        return self.driver.execute_script("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def wait(self, condition, seconds=60):
        """Wait until a condition holds. Elements may appear late: Gradio builds a folded part when it is opened."""
        late = (NoSuchElementException, StaleElementReferenceException)
        WebDriverWait(self.driver, seconds, ignored_exceptions=late).until(lambda driver: condition())

    def requested(self):
        """Addresses that the page requested, over HTTP or as files."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        sockets = [event["params"]["url"] for event in events if event["method"] == "Network.webSocketCreated"]
        urls = [event["request"]["url"] for event in sent] + sockets
        return [url for url in urls if not url.startswith(("data:", "blob:", "chrome:", "about:"))]
