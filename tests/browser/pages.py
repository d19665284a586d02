"""What a person sees and does on the pages, in a real browser before a live berth; see scripts/pages.

Run by an interpreter of its own, not by berth's: it imports nothing of berth's. Each step says what it expects to see.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

START_TIMEOUT_S = 180.0
WAIT_S = 60.0
STOP_TIMEOUT_S = 60.0
HOSTILE = "<script>document.title='owned'</script>\n\u202eevil"
SIZES = {"wide": (1280, 900), "narrow": (390, 844)}
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


class Unexpected(Exception):
    """A page did not show what it should."""


def expect(what: str, holds: Any) -> None:
    """Raises Unexpected."""
    if not holds:
        raise Unexpected(what)


@contextmanager
def berth_up(berth: str, hosts: int, directory: Path) -> Iterator[tuple[str, str]]:
    """A live berth; yields the address of `berth web`, and the link to the pages that `berth up` has printed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    env |= {
        "BERTH_STATE_DIR": str(directory / "state"),
        "BERTH_UP__NODES": "2",
        "BERTH_UP__REST": "false",
        "BERTH_UP__COMPUTES_PER_CELL": "1",
        "BERTH_COMPUTE__HOSTS": str(max(1, hosts // 2)),
    }
    with (directory / "log").open("w") as log:
        up = subprocess.Popen([berth, "up"], env=env, cwd=directory, stdout=subprocess.PIPE, stderr=log, text=True)
        web = None
        try:
            link = said(up, "  pages ").split()[-1]
            said(up, "Ctrl-C")
            command = [berth, "web", "--listen", "127.0.0.1:0"]
            web = subprocess.Popen(command, env=env, cwd=directory, stdout=subprocess.PIPE, stderr=log, text=True)
            yield said(web, "berth is at ").split()[-1], link
        finally:
            for process in (web, up):
                if process is not None:
                    process.send_signal(signal.SIGTERM)
                    process.wait(STOP_TIMEOUT_S)


def said(process: subprocess.Popen[str], start: str) -> str:
    """The line of its output that begins so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line
    raise Unexpected(f"{process.args} ended without saying {start!r}")


class Person:
    """Who looks at the pages."""

    def __init__(self, driver: WebDriver, url: str, link: str, hosts: int) -> None:
        self.driver = driver
        self.url = url
        self.link = link
        self.hosts = hosts

    def open(self, path: str) -> None:
        """Go to a page."""
        self.driver.get(self.url + path)

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        """Wait until it is to be seen. Raises Unexpected."""
        try:
            wait = WebDriverWait(self.driver, WAIT_S, 0.1, [StaleElementReferenceException, NoSuchElementException])
            return wait.until(lambda _: condition())  # a page that has just been loaded anew is looked at again
        except Exception as error:
            raise Unexpected(f"{what}: {type(error).__name__}") from error

    def text(self, selector: str = "main") -> str:
        """The text of one element."""
        return str(self.driver.find_element(By.CSS_SELECTOR, selector).text)

    def boot(self, **fields: Any) -> str:
        """Ask for a machine over HTTP, as a program would."""
        body = json.dumps({"flavor": "m1.tiny", "project_id": "people", **fields}).encode()
        request = urllib.request.Request(
            f"{self.url}/api/v1/builds", body, {"content-type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return str(json.load(answer)["instance_uuid"])

    def errors(self) -> list[str]:
        """What the browser complains of: a script's fault, or what its policy has stopped."""
        kinds = ("javascript", "security", "network")
        return [one["message"] for one in self.driver.get_log("browser") if one.get("source") in kinds]


def now_shows_what_happens(person: Person) -> None:
    """The first page counts a build that is asked for while it is open."""
    person.open("/")
    person.until("the hosts are counted", lambda: f"{person.hosts} of {person.hosts}" in person.text(".tiles"))
    expect("nothing is wrong", not person.text("#troubles"))
    for _ in range(3):
        person.boot()
    person.until("a latency is shown", lambda: "none yet" not in person.text(".tiles"))
    expect("the plot is drawn", person.driver.find_elements(By.CSS_SELECTOR, "#rates canvas"))


def now_shows_a_failure(person: Person) -> None:
    """A build that is refused appears by itself, and leads to its timeline."""
    person.open("/")
    try:
        person.boot(flavor="nope")
    except urllib.error.HTTPError as error:
        expect("it is refused with its code", json.load(error)["code"] == "flavor.unknown")
    person.until("the failure is listed", lambda: "flavor.unknown" in person.text("#failures"))
    person.driver.find_element(By.CSS_SELECTOR, "#failures a").click()
    person.until("its timeline is shown", lambda: "there is no flavor nope" in person.text())


def fleet_shows_every_host(person: Person) -> None:
    """The map has a square for each host; the keyboard reaches it, and Enter opens the host."""
    person.open("/fleet")
    canvas = person.driver.find_element(By.ID, "map")
    person.until("all hosts are drawn", lambda: canvas.get_attribute("data-hosts") == str(person.hosts))
    canvas.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    person.until("a host is named", lambda: "failed builds: 0" in person.text("#picked"))
    canvas.send_keys(Keys.ENTER)
    person.until("the host's page is open", lambda: "/fleet/" in person.driver.current_url)
    person.until("it has its resources", lambda: "Resources" in person.text() and "Capacity" in person.text())


def fleet_is_searched(person: Person) -> None:
    """By name and by cell."""
    person.open("/fleet?cell=cell2&q=00000")
    expect("one host is found", "1 hosts" in person.text() and "cell2-c1-00000" in person.text())


def build_is_followed_and_deleted(person: Person) -> None:
    """A timeline, its waterfall, and the delete with its question asked first."""
    instance = person.boot(name="mine")
    person.open(f"/builds/{instance}")
    person.until("it becomes active", lambda: person.text("#state") == "active")
    person.until("the waterfall is drawn", lambda: "Where the time went" in person.text())
    button = person.driver.find_element(By.CSS_SELECTOR, "[data-delete]")
    button.click()
    person.driver.switch_to.alert.dismiss()
    expect("dismissed, it is not deleted", person.text("#state") == "active")
    button.click()
    person.driver.switch_to.alert.accept()
    person.until("it is deleted", lambda: person.text("#state") == "deleted")


def builds_are_searched(person: Person) -> None:
    """By project, state and instance."""
    instance = person.boot(project_id="searched", name="wanted")
    person.until("it is listed", lambda: (person.open("/builds?project=searched"), "wanted" in person.text())[1])
    field = person.driver.find_element(By.NAME, "uuid")
    field.send_keys(instance, Keys.ENTER)
    person.until("its page opens", lambda: person.driver.current_url.endswith(f"/builds/{instance}"))


def hostile_name_is_text(person: Person) -> None:
    """Neither a script nor a mark that turns the writing does anything."""
    instance = person.boot(name=HOSTILE)
    for path in (f"/builds/{instance}", "/builds", "/"):
        person.open(path)
        expect(f"{path} keeps its title", person.driver.title != "owned")
    person.open(f"/builds/{instance}")
    expect("the name is shown as text", "<script>" in person.text("h1") and "\\u202eevil" in person.text("h1"))


def keyboard_and_reader_find_their_way(person: Person) -> None:
    """The first tab skips to the content; every field has a name; each page has one heading of its own."""
    for path in ("/", "/fleet", "/builds"):
        person.open(path)
        person.driver.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
        expect(f"{path}: skip link", person.driver.switch_to.active_element.get_attribute("class") == "skip")
        expect(f"{path}: one h1", len(person.driver.find_elements(By.TAG_NAME, "h1")) == 1)
        for field in person.driver.find_elements(By.CSS_SELECTOR, "input, select, #map"):
            expect(f"{path}: {field.get_attribute('outerHTML')} has a name", field.accessible_name)


def nothing_is_wider_than_a_telephone(person: Person) -> None:
    """A narrow window scrolls down, not sideways."""
    person.driver.set_window_size(*SIZES["narrow"])
    for path in ("/", "/fleet", "/builds"):
        person.open(path)
        wide = person.driver.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
        expect(f"{path} is {wide} pixels too wide", wide <= 0)
    person.driver.set_window_size(*SIZES["wide"])


def link_of_up_logs_in(person: Person) -> None:
    """The link logs in by itself and leaves no token in the address; without it there is the login page alone."""
    address, _, token = person.link.partition("/login#")
    person.driver.get(f"{address}/fleet")
    expect("a token is asked for", "Log in" in person.text("h1"))
    person.driver.get("about:blank")  # else only what is behind the # changes, and nothing is loaded
    person.driver.get(person.link)
    person.until("it is logged in", lambda: person.text("h1") == "Now")
    expect("the token is not in the address", token not in person.driver.current_url)
    person.driver.find_element(By.CSS_SELECTOR, "header form button").click()
    person.until("it is logged out", lambda: person.text("h1") == "Log in")


STEPS = (
    now_shows_what_happens,
    now_shows_a_failure,
    fleet_shows_every_host,
    fleet_is_searched,
    build_is_followed_and_deleted,
    builds_are_searched,
    hostile_name_is_text,
    keyboard_and_reader_find_their_way,
    nothing_is_wider_than_a_telephone,
    link_of_up_logs_in,
)


def take_pictures(person: Person, directory: Path) -> None:
    """Screenshots of all pages, wide and narrow, light and dark."""
    directory.mkdir(parents=True, exist_ok=True)
    instance = person.boot(name="web-1")
    person.open(f"/builds/{instance}")
    person.until("it is active", lambda: person.text("#state") == "active")
    pages = {"now": "/", "fleet": "/fleet", "builds": "/builds", "build": f"/builds/{instance}"}
    for size, (width, height) in SIZES.items():
        for scheme in ("light", "dark"):
            person.driver.execute_cdp_cmd(
                "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            )
            person.driver.set_window_size(width, height)
            for name, path in pages.items():
                person.open(path)
                time.sleep(1.5)  # for the picture alone: the plot and the map are drawn by then
                person.driver.save_screenshot(str(directory / f"{name}-{size}-{scheme}.png"))


def main() -> int:
    """Every step; the number of the first that fails is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--berth", required=True)
    parser.add_argument("--hosts", type=int, default=400)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pictures", type=Path)
    asked = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="berth-pages-"))
    directory.chmod(0o755)
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in (*FLAGS, f"--user-data-dir={directory}/chromium", "--window-size=1280,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    done: list[str] = []
    failed = ""
    try:
        with berth_up(asked.berth, asked.hosts, directory) as (url, link):
            service = webdriver.ChromeService(shutil.which("chromedriver") or "chromedriver")
            driver = webdriver.Chrome(options=options, service=service)
            try:
                person = Person(driver, url, link, asked.hosts // 2 * 2 + 2)
                for step in STEPS:
                    began = time.monotonic()
                    step(person)
                    done.append(step.__name__)
                    sys.stdout.write(f"{step.__name__}: {time.monotonic() - began:.1f} s\n")
                    sys.stdout.flush()
                complaints = [one for one in person.errors() if "422" not in one]  # the build of no flavor
                expect(f"the browser complains: {complaints}", not complaints)
                if asked.pictures:
                    take_pictures(person, asked.pictures)
            finally:
                driver.quit()
    except Unexpected as error:
        failed = str(error)
        sys.stderr.write(f"{STEPS[min(len(done), len(STEPS) - 1)].__name__}: {failed}\n")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if asked.json:
        asked.json.write_text(json.dumps({"steps": len(done), "passed": not failed, "failed": failed}))
    sys.stdout.write(f"{len(done)} of {len(STEPS)} steps passed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
