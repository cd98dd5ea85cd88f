"""Debian's Chromium, without a window, by Selenium: what the tests of the page have in common.

Nothing is downloaded: browser and driver are those of the system, or there are none.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from wired import wait_until

SCREENSHOTS = Path(__file__).parents[2] / "screenshots"
MISSING = "no Chromium with chromedriver: `apt-get install chromium chromium-driver`"
WIDE, NARROW = (1440, 900), (380, 780)

_ARGUMENTS = ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--lang=en")

# For each text that can be seen, the contrast between it and what it stands on.
_FAINT = """
const parse = (text) => {
  const found = text.match(/[\\d.]+/g).map(Number);
  return {rgb: found.slice(0, 3), alpha: found.length > 3 ? found[3] : 1};
};
const light = (rgb) => {
  const [r, g, b] = rgb.map((c) => c / 255)
    .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const colour = parse(getComputedStyle(at).backgroundColor);
    if (colour.alpha > 0.99) return colour.rgb;
  }
  return [255, 255, 255];
};
const faint = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  const seen = element.checkVisibility({opacityProperty: true});
  if (!seen || !walker.currentNode.data.trim()) continue;
  const two = [light(parse(getComputedStyle(element).color).rgb), light(ground(element))].sort();
  const contrast = (Math.max(...two) + 0.05) / (Math.min(...two) + 0.05);
  if (contrast < 4.5) faint.push(`${contrast.toFixed(2)} ${walker.currentNode.data.trim()}`);
}
return faint;
"""


def found() -> tuple[str, str] | None:
    """Browser and driver."""
    browser, driver = shutil.which("chromium"), shutil.which("chromedriver")
    return None if browser is None or driver is None else (browser, driver)


def start() -> webdriver.Chrome:
    """A browser that notes what it asks for and what its console says."""
    place = found()
    assert place is not None, MISSING
    options = webdriver.ChromeOptions()
    options.binary_location = place[0]
    for argument in _ARGUMENTS:
        options.add_argument(argument)
    if os.geteuid() == 0:
        # its sandbox does not work for root
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(place[1]))


class Page:
    """The page in the browser, as somebody sees it who uses it."""

    def __init__(self, driver: webdriver.Chrome, address: str) -> None:
        self.driver = driver
        self.address = address

    def open(self, size: tuple[int, int] = WIDE, dark: bool = False) -> None:
        """Anew, with nothing kept."""
        self.resize(size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(f"{self.address}/static/icon.svg")
        self.run("localStorage.clear(); sessionStorage.clear()")
        self.driver.get_log("browser")
        self.driver.get_log("performance")
        self.driver.get(self.address)

    def resize(self, size: tuple[int, int]) -> None:
        width, height = size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def type(self, *keys: str) -> None:
        """To whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str = "body") -> str:
        return str(self.run(f"return document.querySelector({json.dumps(selector)}).innerText"))

    def wait(self, condition: Callable[[], object]) -> None:
        wait_until(condition)

    def wait_text(self, text: str, selector: str = "body") -> None:
        wait_until(lambda: text in self.text(selector))

    def focus(self) -> str:
        """The id of what has it."""
        return str(self.run("return document.activeElement.id"))

    def picture(self, name: str) -> None:
        SCREENSHOTS.mkdir(exist_ok=True)
        self.driver.save_screenshot(str(SCREENSHOTS / f"{name}.png"))

    # what must hold whatever has been done

    def is_wider_than_the_window(self) -> bool:
        return bool(self.run("return document.documentElement.scrollWidth > innerWidth"))

    def faint(self) -> list[str]:
        """Texts whose contrast is too small."""
        return list(self.run(_FAINT))

    def complaints(self) -> list[str]:
        """What the console says; not what is there for people who look into it."""
        entries = self.driver.get_log("browser")
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def strangers(self) -> list[str]:
        """What was asked of others than the server."""
        asked = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                asked.append(message["params"]["request"]["url"])
        assert f"{self.address}/static/app.js" in asked
        return [url for url in asked if not url.startswith(f"{self.address}/")]
