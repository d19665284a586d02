"""The pages as a person uses them, in a real browser before a live berth; see scripts/nightly pages.

Run by an interpreter of its own, not by berth's: it imports nothing of berth's. Each step names what it expects to see.
"""

from __future__ import annotations

import argparse
import base64
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.ui import WebDriverWait

WAIT_S = 60.0
SCRIPT_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
HOSTILE = "<script>document.title='owned'</script>\n\u202eevil"
# The names of elements for users who do not see them.
# The processor's time of the browser's main thread, which a busy machine does not change: for one movement of the
# pointer or one colouring (half a frame; a map that is drawn whole each time takes 13 ms), and for reading and drawing
# all hosts once.
FRAME_MS = 1000 / 60 / 2
LOAD_MS = 1000
NODES = 2  # of bare metal, which the pages count by themselves
QUALITY = 55  # of a picture, of 100
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
def berth_up(berth: str, hosts: int, directory: Path) -> Iterator[tuple[str, str, dict[str, str], Callable[[], None]]]:
    """A live berth; yields the address of `berth web`, the link that `berth up` has printed, its environment, and what
    stops all of it but the pages.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
    env |= {
        "BERTH_STATE_DIR": str(directory / "state"),
        "BERTH_UP__NODES": str(NODES),
        "BERTH_UP__REST": "false",
        "BERTH_UP__COMPUTES_PER_CELL": "1",
        "BERTH_COMPUTE__SIMULATED__HOSTS": str(max(1, hosts // 2)),
    }
    with (directory / "log").open("w") as log:
        up = subprocess.Popen([berth, "up"], env=env, cwd=directory, stdout=subprocess.PIPE, stderr=log, text=True)
        web = None
        try:
            link = line_starting_with(up, "  pages ").split()[-1]
            line_starting_with(up, "Ctrl-C")
            command = [berth, "serve", "web", "--listen", "127.0.0.1:0"]
            web = subprocess.Popen(command, env=env, cwd=directory, stdout=subprocess.PIPE, stderr=log, text=True)

            def stop() -> None:
                up.send_signal(signal.SIGSTOP)

            yield line_starting_with(web, "berth is at ").split()[-1], link, env, stop
        finally:
            for process in (web, up):
                if process is not None and process.poll() is None:
                    up.send_signal(signal.SIGCONT)  # without it neither would end
                    process.send_signal(signal.SIGTERM)
                    process.wait(STOP_TIMEOUT_S)


def line_starting_with(process: subprocess.Popen[str], start: str) -> str:
    """The line of its output that begins so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line
    raise Unexpected(f"{process.args} ended without saying {start!r}")


class Person:
    """The user of the pages."""

    def __init__(
        self,
        driver: WebDriver,
        url: str,
        link: str,
        hosts: int,
        *,
        berth: str,
        env: dict[str, str],
        stop: Callable[[], None],
    ) -> None:
        self.berth = berth
        self.stop = stop
        self.env = env
        self.driver = driver
        self.url = url
        self.link = link
        self.hosts = hosts
        self.measured: dict[str, Any] = {}

    def open(self, path: str) -> None:
        """Go to a page."""
        self.driver.get(self.url + path)

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        """Wait until it is to be seen. Raises Unexpected."""
        try:
            wait = WebDriverWait(self.driver, WAIT_S, 0.1, [WebDriverException])
            return wait.until(lambda _: condition())  # a page that is just being loaded anew is looked at again
        except Exception as error:
            shown = f"{self.driver.current_url}: {self.text()[:1500]}; the browser complains: {self.errors()}"
            raise Unexpected(f"{what}: {type(error).__name__} at {shown}") from error

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

    def put(self, path: str, body: Any) -> None:
        """Set an object over HTTP, as a program would."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"}, method="PUT")
        with urllib.request.urlopen(request, timeout=WAIT_S):
            pass

    def delete(self, path: str) -> None:
        """Delete an object over HTTP."""
        with urllib.request.urlopen(urllib.request.Request(self.url + path, method="DELETE"), timeout=WAIT_S):
            pass

    def publish_metric(self, host: str, reading: str) -> None:
        """Publish a number about a host with the command, as an operator's script would."""
        command = [self.berth, "host", "metrics", host, "--set", reading]
        subprocess.run(command, env=self.env, check=True, timeout=WAIT_S, stdout=subprocess.DEVNULL)

    def api(self, path: str) -> Any:
        """The HTTP API's answers, as a program reads them."""
        with urllib.request.urlopen(self.url + path, timeout=WAIT_S) as answer:
            return json.load(answer)

    def busy_ms(self) -> float:
        """The processor's time that the page's main thread has taken in tasks so far."""
        metrics = self.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return 1000 * next(float(one["value"]) for one in metrics if one["name"] == "TaskDuration")

    def paths(self) -> tuple[str, ...]:
        """Every page that is always there."""
        host = self.api("/api/v1/hosts?limit=1")[0]["uuid"]
        build = self.api("/api/v1/builds?state=active&limit=1")["builds"][0]["instance_uuid"]
        drain = self.api("/api/v1/drains")[0]["id"]
        return (
            "/", "/fleet", f"/fleet/{host}", f"/fleet/{host}/drain", "/builds", f"/builds/{build}", "/actions",
            f"/drains/{drain}", "/metal", "/objects", "/objects/flavors?name=m1.tiny",
            "/objects/groups?name=people/apart", "/objects/log", "/operations", "/quarantine", "/dead-letters",
            "/system",
        )  # fmt: skip

    def errors(self) -> list[str]:
        """The browser's complaints: a script's fault, or what its policy has stopped."""
        kinds = ("javascript", "security", "network")
        return [one["message"] for one in self.driver.get_log("browser") if one.get("source") in kinds]


def now_shows_what_happens(person: Person) -> None:
    """The first page counts a build that is asked for while it is open."""
    person.open("/")
    person.until(
        "the hosts are counted",
        lambda: f"{person.hosts - NODES:,} of {person.hosts - NODES:,}" in person.text("#hosts-ready"),
    )
    nothing = "Nothing waits for a person"
    person.until("nothing is wrong once every worker has reported", lambda: nothing in person.text("#status"))
    for _ in range(3):
        person.boot()
    person.until("a latency is shown", lambda: "half within" in person.text("#figures"))
    expect("three figures", len(person.driver.find_elements(By.CSS_SELECTOR, "#figures > div")) == 3)
    for figure in ("Latency p99", "Failed claims a second", "Retries a second", "Messages waiting", "Dead letters"):
        expect(f"{figure} is shown", figure in person.text("#messages"))
    expect("what is used is shown", "CPUs" in person.text("#capacity") and "in use" in person.text("#capacity"))
    for role in ("scheduler", "placement", "conductor", "compute"):
        person.until(f"the {role} workers are counted", lambda role=role: role in person.text("#workers"))
    expect("the plot is drawn", person.driver.find_elements(By.CSS_SELECTOR, "#rates canvas"))


def now_shows_a_failure(person: Person) -> None:
    """Builds that are refused appear by themselves, grouped by their reason, and lead to the newest one's timeline."""
    person.open("/")
    for _ in range(2):
        try:
            person.boot(flavor="nope")
        except urllib.error.HTTPError as error:
            expect("it is refused with its code", json.load(error)["code"] == "flavor.unknown")
    person.until("the failures are listed as one", lambda: "flavor.unknown" in person.text("#failures"))
    person.until("with their number and flavor", lambda: person.text("#failures tbody").startswith("2"))
    expect("and their flavor", "nope" in person.text("#failures"))
    person.driver.find_element(By.CSS_SELECTOR, "#failures td.name a").click()
    person.until("its timeline is shown", lambda: "there is no flavor nope" in person.text())


def fleet_shows_every_host(person: Person) -> None:
    """The map has a square for each host; the keyboard reaches it, and Enter opens the host."""
    person.open("/fleet")
    canvas = person.driver.find_element(By.ID, "map")
    person.until("all hosts are drawn", lambda: canvas.get_attribute("data-hosts") == str(person.hosts - NODES))
    canvas.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    person.until("a host is named", lambda: "failed builds: 0" in person.text("#picked"))
    canvas.send_keys(Keys.ENTER)
    person.until("the host's page is open", lambda: "/fleet/" in person.driver.current_url)
    person.until("it has its resources", lambda: "Resources" in person.text() and "VCPU" in person.text())


def fleet_is_searched(person: Person) -> None:
    """By name and by cell."""
    person.open("/fleet?cell=cell2&q=00000")
    expect("one host is found", "1 hosts" in person.text() and "cell2-c1-00000" in person.text())


def fleet_is_seen_by_zone_and_coloured(person: Person) -> None:
    """An aggregate with a zone, made here, narrows the map and the table; free room and a metric colour it."""
    hosts = [
        host
        for host in person.api("/api/v1/hosts?limit=1000")
        if host["cell"] == "cell1" and "VCPU" in host["resources"]
    ]
    names = [host["name"] for host in hosts if not any(used for used, _ in host["resources"].values())][:3]
    rack = {"uuid": "6f2ae4d2-6a0c-4a5c-8f0e-0c5ad8a7f3b1", "metadata": {"availability_zone": "east"}, "hosts": names}
    person.put("/api/v1/aggregates/rack-1", rack)
    person.publish_metric(names[0], "power.watts=301.5")
    person.until("the hosts have it", lambda: person.api(f"/api/v1/hosts/{names[0]}")["host"].get("zone") == "east")
    person.until("and the number", lambda: "metrics" in person.api(f"/api/v1/hosts/{names[0]}")["host"])
    canvas = "document.getElementById('map')"
    for query in ("zone=east", "aggregate=rack-1"):
        person.open(f"/fleet?{query}")
        expect("its hosts alone are in the table", "3 hosts" in person.text() and names[0] in person.text())
        person.until("and on the map", lambda: person.driver.execute_script(f"return {canvas}.dataset.hosts") == "3")
    colour = person.driver.find_element(By.ID, "colour")
    expect("the scale ends where the hosts do", person.text("#scale-to") != "100 %")
    person.driver.find_element(By.ID, "whole").click()
    person.until("or goes over all", lambda: person.text("#scale-to") == "100 %")
    for text, scale in (("VCPU: free", "256"), ("power.watts", "301.5"), ("failed builds", "5 and more")):
        colour.find_element(By.XPATH, f"option[text()='{text}']").click()
        person.until(f"the scale is that of {text}", lambda scale=scale: scale in person.text(".scale"))
    person.open(f"/fleet/{person.api(f'/api/v1/hosts/{names[0]}')['host']['uuid']}")
    expect("its page has zone and number", "east; rack-1" in person.text() and "301.5" in person.text())
    expect("and placement's changes of it", "its inventory, traits, aggregates" in person.text("#changes"))


def group_is_made_and_has_its_members(person: Person) -> None:
    """A server group from its form; its members are kept apart and listed; it cannot be deleted meanwhile."""
    person.open("/objects/groups")
    person.driver.find_element(By.NAME, "name").send_keys("people/apart")
    person.driver.find_element(By.CSS_SELECTOR, "button[value=preview]").click()
    person.until("what would change is shown", lambda: "anti-affinity" in person.text("#difference"))
    person.driver.find_element(By.CSS_SELECTOR, "button[value=set]").click()
    person.until("it is listed", lambda: person.text("h1") == "Objects" and "people/apart" in person.text())
    made = [person.boot(group="apart") for _ in range(2)]
    for instance in made:
        person.until("it is active", lambda i=instance: person.api(f"/api/v1/builds/{i}")["state"] == "active")
    hosts = {person.api(f"/api/v1/builds/{instance}")["host"] for instance in made}
    expect("they are on hosts of their own", len(hosts) == 2)
    person.open("/objects/groups?name=people/apart")
    for text in (*made, *hosts):
        expect(f"{text} is among its members", text in person.text("#members"))
    person.driver.find_element(By.CSS_SELECTOR, "button[value=delete]").click()
    person.driver.switch_to.alert.accept()
    person.until("it is in use", lambda: "object.in_use" in person.text("form [role=status]"))


def build_without_a_host_shows_its_funnel(person: Person) -> None:
    """Each step with how many hosts it left, drawn."""
    instance = person.boot(flavor="m1.large", host="no-such-host")
    person.until("it has failed", lambda: person.api(f"/api/v1/builds/{instance}")["state"] in ("failed", "refused"))
    person.open(f"/builds/{instance}")
    expect("its steps are drawn", person.driver.find_elements(By.CSS_SELECTOR, "#funnel i"))
    expect("with what they rejected", "host.unknown" in person.text("#funnel"))


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


def fleet_does_not_stutter(person: Person) -> None:
    """However many hosts: pointing at the map and colouring it take half a frame each. Long tasks are printed."""
    person.driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    person.driver.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument",
        {
            "source": "window.longTasks = []; new PerformanceObserver((list) => window.longTasks.push("
            "...list.getEntries().map((one) => one.duration))).observe({type: 'longtask', buffered: true});"
        },
    )
    person.open("/")
    before = person.busy_ms()
    person.open("/fleet")
    canvas = person.driver.find_element(By.ID, "map")
    person.until("all hosts are drawn", lambda: canvas.get_attribute("data-hosts") == str(person.hosts - NODES))
    load_ms = person.busy_ms() - before
    loaded = person.driver.execute_script("return window.longTasks.splice(0)")
    box, before = canvas.rect, person.busy_ms()
    # As fast as a browser hands them on: the pointer goes over the whole map, then each colouring is chosen once.
    steps = person.driver.execute_async_script(
        """
        const [width, height, done] = arguments, canvas = document.getElementById("map");
        const colour = document.getElementById("colour"), frames = [];
        const frame = () => new Promise((go) => requestAnimationFrame(go));
        (async () => {
          for (let n = 0; n < 150; n++) {
            const at = { offsetX: (n * 37) % width, offsetY: (n * height) / 150 };
            const event = new MouseEvent("mousemove");
            for (const [key, value] of Object.entries(at)) Object.defineProperty(event, key, { value });
            canvas.dispatchEvent(event);
            frames.push(n);
            await frame();
          }
          for (const option of colour.options) {
            colour.value = option.value;
            colour.dispatchEvent(new Event("change"));
            frames.push(option);
            await frame();
          }
          done(frames.length);
        })();
        """,
        box["width"],
        box["height"],
    )
    used = person.driver.execute_script("return window.longTasks.splice(0)")
    person.measured["hosts"] = person.hosts
    person.measured["long_tasks_while_loading_ms"] = [round(one) for one in loaded]
    person.measured["long_tasks_while_used_ms"] = [round(one) for one in used]
    frame_ms = (person.busy_ms() - before) / steps
    person.measured["main_thread_ms_to_load"] = round(load_ms)
    person.measured["main_thread_ms_a_step"] = round(frame_ms, 2)
    sys.stdout.write(f"  {json.dumps(person.measured)}\n")
    expect("a host is named", "failed builds" in person.text("#picked"))
    expect(f"a step of its use takes half a frame at most, not {frame_ms:.1f} ms", frame_ms < FRAME_MS)
    expect(f"it is loaded in {LOAD_MS} ms, not {load_ms:.0f}", load_ms < LOAD_MS)


def host_is_disabled_and_enabled(person: Person) -> None:
    """With a reason and a question first; the decision, its person and reason are shown."""
    host = person.api("/api/v1/hosts?limit=1")[0]
    person.open(f"/fleet/{host['uuid']}")
    disable = person.driver.find_element(By.CSS_SELECTOR, "button[value=disabled]")
    disable.click()
    expect("without a reason nothing is asked", not person.api(f"/api/v1/hosts/{host['uuid']}")["host"].get("admin"))
    person.driver.find_element(By.NAME, "reason").send_keys(f"fan 2 {HOSTILE.splitlines()[0]}")
    disable.click()
    person.driver.switch_to.alert.dismiss()
    expect("dismissed, nothing is decided", person.text("#admin") == "nothing")
    for state in ("disabled", "maintenance", "fenced", "enabled"):
        field = person.driver.find_element(By.NAME, "reason")
        field.clear()
        field.send_keys(f"fan 2 {HOSTILE.splitlines()[0]}")
        if state == "fenced":
            person.driver.find_element(By.NAME, "force").click()
        person.driver.find_element(By.CSS_SELECTOR, f"button[value={state}]").click()
        person.driver.switch_to.alert.accept()
        person.until(f"it is {state}", lambda state=state: person.text("#admin").startswith(f"{state} by "))
        expect("the reason is text", "<script>" in person.text("#admin") and person.driver.title != "owned")


def host_is_drained_by_its_plan(person: Person) -> None:
    """The plan is shown, the drain asked for and followed to its end; its instance is elsewhere then."""
    instance = person.boot(name="to move")
    person.until("it is active", lambda: person.api(f"/api/v1/builds/{instance}")["state"] == "active")
    name = person.api(f"/api/v1/builds/{instance}")["host"]
    host = person.api(f"/api/v1/hosts/{name}")["host"]
    person.open(f"/fleet/{host['uuid']}")
    expect("the instance is on its page", instance in person.text("#consumers"))
    person.driver.find_element(By.LINK_TEXT, "Drain this host").click()
    person.until("the plan is shown", lambda: instance[:8] in person.text("#plan"))
    expect("nothing is begun by it", person.api(f"/api/v1/builds/{instance}")["host"] == name)
    person.driver.find_element(By.NAME, "reason").send_keys("firmware")
    person.driver.find_element(By.CSS_SELECTOR, "form.action button").click()
    person.driver.switch_to.alert.accept()
    person.until("its progress is shown", lambda: "/drains/" in person.driver.current_url)
    drain = "/api/v1/drains/" + person.driver.current_url.rpartition("/")[2]
    person.until("it ends", lambda: person.api(drain)["state"] == "ended")
    person.until("its page shows it", lambda: person.text("#drain-state") == "ended")
    expect("nothing failed", person.text("#drain-failed") == "0")
    expect("it is elsewhere", person.api(f"/api/v1/builds/{instance}")["host"] != name)
    person.open("/operations")
    expect("it is listed", name in person.text("#drains") and "ended" in person.text("#drains"))
    person.until("its host is held", lambda: (person.open("/operations"), name in person.text("#held"))[1])
    person.open("/actions")
    expect("the move is listed", instance[:8] in person.text() and "live-migrate" in person.text())


def instance_is_stopped_and_started(person: Person) -> None:
    """From its page; what was asked is listed there."""
    instance = person.boot(name="power")
    person.until("it is active", lambda: person.api(f"/api/v1/builds/{instance}")["state"] == "active")
    for kind, condition in (("stop", "stopped"), ("start", "active")):
        person.open(f"/builds/{instance}")
        kinds = person.driver.find_element(By.NAME, "kind")
        kinds.find_element(By.XPATH, f"option[text()='{kind}']").click()
        person.driver.find_element(By.CSS_SELECTOR, "form.action button").click()
        person.driver.switch_to.alert.accept()
        person.until(f"it is {condition}", lambda c=condition: c in person.text(".title").lower())
    expect("why here is shown", "chosen" in person.text("#scores"))


def object_is_changed_after_a_look(person: Person) -> None:
    """A flavor: first what would change, then the change; its log; and it is deleted."""
    person.open("/objects/flavors")
    person.driver.find_element(By.NAME, "name").send_keys("m1.page")
    set_ = person.driver.find_element(By.CSS_SELECTOR, "button[value=set]")
    expect("it cannot be made unseen", not set_.is_enabled())
    person.driver.find_element(By.CSS_SELECTOR, "button[value=preview]").click()
    person.until("what would change is shown", lambda: "memory_mb" in person.text("#difference"))
    expect("nothing is changed by it", "m1.page" not in json.dumps(person.api("/api/v1/flavors")))
    set_.click()
    person.until("it is listed", lambda: person.text("h1") == "Objects" and "m1.page" in person.text())
    person.driver.find_element(By.LINK_TEXT, "m1.page").click()
    person.until("its form is open", lambda: "Version" in person.text())
    specs = person.driver.find_element(By.NAME, "extra_specs")
    for text, shown in (("no pair", "KEY = VALUE"), ("resources:VCPU = many", "flavor.invalid")):
        specs.clear()
        specs.send_keys(text)
        person.driver.find_element(By.CSS_SELECTOR, "button[value=preview]").click()
        person.until(f"what is wrong is shown: {shown}", lambda shown=shown: shown in person.text("form [role=status]"))
    person.driver.find_element(By.CSS_SELECTOR, "button[value=delete]").click()
    person.driver.switch_to.alert.accept()
    person.until("it is gone", lambda: person.text("h1") == "Objects" and "m1.page" not in person.text())
    expect("from the flavors", "m1.page" not in json.dumps(person.api("/api/v1/flavors")))
    person.open("/objects/log")
    for sentence in ("local created flavor m1.page", "local deleted flavor m1.page"):
        expect(f"the log has {sentence}", sentence in person.text("#log"))


def form_gives_back_what_it_was_given(person: Person) -> None:
    """Each object's form makes the body that is on record of its fields, whatever characters it has."""
    specs = {"a=b": "x = y", "trait:HW_CPU_X86_AVX2": "required", "odd": '"quoted" \u202e\nline', "empty": ""}
    person.put("/api/v1/flavors/m1.round", {"vcpus": 3, "extra_specs": specs, "projects": ["people", "shop"]})
    person.put("/api/v1/rules/default", {"multipliers": {"cpu": 0.5}, "host_subset_size": 2})
    person.put("/api/v1/quotas/round", {"limits": {"INSTANCES": 5}})
    for path in ("flavors?name=m1.round", "rules", "quotas?name=round", "aggregates?name=rack-1"):
        person.open(f"/objects/{path}")
        person.driver.find_element(By.CSS_SELECTOR, "button[value=preview]").click()
        person.until(
            f"{path}: nothing would change", lambda: "Nothing would change" in person.text("form [role=status]")
        )
    person.delete("/api/v1/rules/default")


def metal_shows_what_is_held_back(person: Person) -> None:
    """Ironic's nodes by provision state."""
    person.open("/metal")
    expect("the nodes are counted", "2 nodes" in person.text())
    expect("their class is shown", "available" in person.text().lower())
    person.open("/fleet")
    expect("they are a part of their own of the fleet", "Bare metal" in person.text("#main"))


def system_shows_its_parts(person: Person) -> None:
    """Cells, services, workers; no dead letters."""
    person.open("/system")
    for what in ("cell1", "cell2", "scheduler", "placement"):
        expect(f"{what} is shown", what in person.text())
    person.open("/dead-letters")
    expect("none is shown", "None." in person.text("#dead-letters"))


def keyboard_and_reader_find_their_way(person: Person) -> None:
    """The first tab skips to the content; every field has a name; each page has one heading of its own."""
    for path in person.paths():
        person.open(path)
        person.driver.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
        expect(f"{path}: skip link", person.driver.switch_to.active_element.get_attribute("class") == "skip")
        expect(f"{path}: one h1", len(person.driver.find_elements(By.TAG_NAME, "h1")) == 1)
        person.driver.execute_script("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        for field in person.driver.find_elements(
            By.CSS_SELECTOR, "input:not([type=hidden]), select, textarea, meter, progress, #map"
        ):
            expect(f"{path}: {field.get_attribute('outerHTML')} has a name", field.accessible_name)


def nothing_is_wider_than_a_telephone(person: Person) -> None:
    """A narrow window scrolls down, not sideways."""
    person.driver.set_window_size(*SIZES["narrow"])
    for path in person.paths():
        person.open(path)
        wide = person.driver.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
        expect(f"{path} is {wide} pixels too wide", wide <= 0)
    person.driver.set_window_size(*SIZES["wide"])


def link_of_up_logs_in(person: Person) -> None:
    """The link logs in by itself and leaves no token in the address; without it there is the login page alone."""
    address, _, token = person.link.partition("/login#")
    person.driver.get(f"{address}/fleet")
    expect("a token is asked for", "Log in" in person.text("h1"))
    person.driver.get(person.link)  # in the tab that shows the page: only what is behind the # changes
    person.until("it is logged in", lambda: person.text("h1") == "Overview")
    expect("the token is not in the address", token not in person.driver.current_url)
    person.driver.find_element(By.CSS_SELECTOR, "header form button").click()
    person.until("it is logged out", lambda: person.text("h1") == "Log in")
    person.driver.get(f"{address}/fleet?cell=cell1")
    field = person.driver.find_element(By.NAME, "token")
    field.send_keys(token, Keys.ENTER)
    wanted = f"{address}/fleet?cell=cell1"
    person.until("a pasted link lands where it pointed", lambda: person.driver.current_url == wanted)


def pages_work_without_a_scheduler(person: Person) -> None:
    """Nothing answers any more: pages are there, say so, and show the last answers with their age."""
    paths = ("/fleet", "/builds", "/objects", "/")
    for path in paths:
        person.open(path)
    person.stop()
    for path in paths:
        # What was read a moment ago is still shown as it is.
        says_it = "#status" if path == "/" else "#unanswered"
        person.until(f"{path} says it", lambda p=path, s=says_it: (person.open(p), "answer" in person.text(s))[1])
        expect(f"{path} names the pages", person.driver.find_elements(By.CSS_SELECTOR, "header nav a"))
    person.open("/fleet")
    expect("the hosts are shown", f"{person.hosts - NODES:,} hosts" in person.text())
    expect("with their age", "as of" in person.text("#unanswered"))


STEPS = (
    now_shows_what_happens,
    now_shows_a_failure,
    fleet_shows_every_host,
    fleet_is_searched,
    fleet_is_seen_by_zone_and_coloured,
    group_is_made_and_has_its_members,
    build_without_a_host_shows_its_funnel,
    fleet_does_not_stutter,
    host_is_disabled_and_enabled,
    host_is_drained_by_its_plan,
    instance_is_stopped_and_started,
    object_is_changed_after_a_look,
    form_gives_back_what_it_was_given,
    metal_shows_what_is_held_back,
    system_shows_its_parts,
    build_is_followed_and_deleted,
    builds_are_searched,
    hostile_name_is_text,
    keyboard_and_reader_find_their_way,
    nothing_is_wider_than_a_telephone,
    link_of_up_logs_in,
)
LAST_STEPS = (pages_work_without_a_scheduler,)


def take_steps(person: Person, steps: Iterable[Callable[[Person], None]], done: list[str], only: str | None) -> None:
    """These steps, or those of them that are named; those that were taken are added to `done`."""
    for step in steps:
        if only and step.__name__ not in only.split(","):
            continue
        began = time.monotonic()
        step(person)
        done.append(step.__name__)
        sys.stdout.write(f"{step.__name__}: {time.monotonic() - began:.1f} s\n")
        sys.stdout.flush()


def take_pictures(person: Person, directory: Path, looks: tuple[str, ...]) -> None:
    """Screenshots of all pages, each as wide and as light as is asked for, in files of some tens of kilobytes."""
    directory.mkdir(parents=True, exist_ok=True)
    instance = person.boot(name="web-1")
    person.open(f"/builds/{instance}")
    person.until("it is active", lambda: person.text("#state") == "active")
    host = person.api(f"/api/v1/hosts/{person.api(f'/api/v1/builds/{instance}')['host']}")["host"]["uuid"]
    pages = {
        "overview": "/",
        "fleet": "/fleet",
        "host": f"/fleet/{host}",
        "drain-plan": f"/fleet/{host}/drain",
        "drain": f"/drains/{person.api('/api/v1/drains')[0]['id']}",
        "instances": "/builds",
        "instance": f"/builds/{instance}",
        "operations": "/operations",
        "actions": "/actions",
        "metal": "/metal",
        "objects": "/objects",
        "object": "/objects/flavors?name=m1.tiny",
        "group": "/objects/groups?name=people/apart",
        "log": "/objects/log",
        "quarantine": "/quarantine",
        "system": "/system",
    }
    for size, (width, height) in SIZES.items():
        for scheme in (one.partition("-")[2] for one in looks if one.startswith(size)):
            person.driver.execute_cdp_cmd(
                "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            )
            person.driver.set_window_size(width, height)
            for name, path in pages.items():
                person.open(path)
                time.sleep(1.5)  # for the picture alone: the plot and the map are drawn by then
                taken = person.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "webp", "quality": QUALITY})
                (directory / f"{name}-{size}-{scheme}.webp").write_bytes(base64.b64decode(taken["data"]))


def main() -> int:
    """Every step; the number of the first that fails is printed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--berth", required=True)
    parser.add_argument("--hosts", type=int, default=400)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--looks", default="wide-light,narrow-dark", help="of the pictures: (wide|narrow)-(light|dark)")
    parser.add_argument("--only", help="so many steps by name, by commas; for who looks for a mistake")
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="berth-pages-"))
    directory.chmod(0o755)
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for flag in (*FLAGS, f"--user-data-dir={directory}/chromium", "--window-size=1280,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    done: list[str] = []
    failed = ""
    person: Person | None = None
    try:
        with berth_up(arguments.berth, arguments.hosts, directory) as (url, link, env, stop):
            service = webdriver.ChromeService(shutil.which("chromedriver") or "chromedriver")
            driver = webdriver.Chrome(options=options, service=service)
            try:
                driver.set_script_timeout(SCRIPT_TIMEOUT_S)
                hosts = arguments.hosts // 2 * 2 + NODES
                person = Person(driver, url, link, hosts, berth=arguments.berth, env=env, stop=stop)
                take_steps(person, STEPS, done, arguments.only)
                complaints = [one for one in person.errors() if "422" not in one and "/groups/" not in one]  # meant
                expect(f"the browser complains: {complaints}", not complaints)
                if arguments.pictures:
                    take_pictures(person, arguments.pictures, tuple(arguments.looks.split(",")))
                take_steps(person, LAST_STEPS, done, arguments.only)
            finally:
                driver.quit()
    except Unexpected as error:
        failed = str(error)
        sys.stderr.write(f"after {done[-1] if done else 'nothing'}: {failed}\n")
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if arguments.json:
        measured = {} if person is None else person.measured
        arguments.json.write_text(json.dumps({"steps": len(done), "passed": not failed, "failed": failed, **measured}))
    sys.stdout.write(f"{len(done)} of {len(STEPS) + len(LAST_STEPS)} steps passed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
