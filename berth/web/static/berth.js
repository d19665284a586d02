// Keeps the pages up to date. Text from outside goes in as text, never as HTML.
"use strict";

const byId = (id) => document.getElementById(id);
const duration = (s) => (s < 1 ? (s * 1000).toFixed(1) + " ms" : s.toFixed(2) + " s");
const when = (at) => new Date(at * 1000).toISOString().slice(0, 19).replace("T", " ");

// What turns writing around or breaks a line is shown by its number, as the server does.
const printable = (text) => String(text).replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (c) => "\\u" + c.codePointAt(0).toString(16).padStart(4, "0"));

function row(cells) {
  const made = document.createElement("tr");
  for (const cell of cells) {
    const td = document.createElement("td");
    if (cell instanceof Node) td.append(cell);
    else td.textContent = printable(cell);
    if (typeof cell === "number") td.className = "number";
    made.append(td);
  }
  return made;
}

function link(address, text) {
  const made = document.createElement("a");
  made.href = address;
  made.textContent = printable(text);
  return made;
}

function listen(address, heard) {
  const source = new EventSource(address);
  const stale = (is) => { const note = byId("stream"); if (note) note.hidden = !is; };
  source.onopen = () => stale(false);
  source.onerror = () => stale(true);
  for (const [name, take] of Object.entries(heard)) source.addEventListener(name, (event) => take(JSON.parse(event.data), source));
  return source;
}

// --- now

function startNow() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const box = byId("rates");
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line") } };
  const plot = new uPlot({
    width: box.clientWidth, height: 220, axes: [axis, axis], cursor: { show: false }, legend: { live: false },
    series: [{}, { label: "active a second", stroke: colour("--good"), width: 2 }, { label: "failed a second", stroke: colour("--bad"), width: 2 }],
  }, [[], [], []], box);
  new ResizeObserver(() => plot.setSize({ width: box.clientWidth, height: 220 })).observe(box);
  const put = (name, text) => { document.querySelector(`[data-now="${name}"]`).textContent = text; };
  listen("/now/events", {
    now(now) {
      put("active_per_s", now.active_per_s.toFixed(1));
      put("in_flight", now.in_flight);
      put("failed_per_s", now.failed_per_s.toFixed(1));
      put("p50", now.latency.p50 === undefined ? "none yet" : duration(now.latency.p50));
      put("p99", now.latency.p99 === undefined ? "none yet" : duration(now.latency.p99));
      put("hosts", `${now.up} of ${now.hosts}`);
      plot.setData([now.seconds.map((s) => s.at), now.seconds.map((s) => s.active), now.seconds.map((s) => s.failed)]);
      byId("troubles").replaceChildren(...now.troubles.map((trouble) => {
        const made = document.createElement("p");
        made.className = "trouble";
        const what = document.createElement("strong");
        what.textContent = printable(trouble.what);
        made.append(what, " ", printable(trouble.detail));
        if (trouble.more) made.append(" ", link(trouble.more, "Show"));
        return made;
      }));
      byId("cells").replaceChildren(...Object.entries(now.cells).sort().map(([cell, [up, every]]) => row([link("/fleet?cell=" + encodeURIComponent(cell), cell), up, every])));
    },
    failure(event) {
      const rows = byId("failures");
      rows.querySelector(".none")?.remove();
      rows.prepend(row([when(event.at), link("/builds/" + event.instance_uuid, event.instance_uuid), event.code ?? "", event.reason ?? ""]));
      while (rows.children.length > 20) rows.lastElementChild.remove();
    },
  });
}

// --- fleet

async function startFleet() {
  const canvas = byId("map"), picked = byId("picked"), colour = byId("colour");
  const cell = new URLSearchParams(location.search).get("cell");
  const side = (count, width) => Math.max(4, Math.min(22, Math.floor(Math.sqrt((width * 360) / Math.max(1, count)))));
  let map = null, shown = [], columns = 1, size = 10, at = -1;

  const share = (host) => {
    if (colour.value === "*failed") return Math.min(1, map.failed_builds[host] / 5);
    const amount = (map.resources[colour.value] ?? [])[host];
    return amount && amount[1] ? Math.min(1, amount[0] / amount[1]) : null;
  };
  const fill = (host) => {
    if (map.state[host] === "down") return "#b42318";
    if (map.state[host] === "disabled") return "#8b949e";
    const used = share(host);
    if (used === null) return "transparent"; // it has none of this class
    return `hsl(215 ${55 + 25 * used}% ${88 - 68 * used}%)`;
  };
  const draw = () => {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    size = side(shown.length, width);
    columns = Math.max(1, Math.floor(width / size));
    const height = Math.max(size, Math.ceil(shown.length / columns) * size);
    canvas.style.height = height + "px";
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    shown.forEach((host, n) => {
      pen.fillStyle = fill(host);
      pen.fillRect((n % columns) * size, Math.floor(n / columns) * size, size - 1, size - 1);
    });
    if (at >= 0) {
      pen.lineWidth = 2;
      pen.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--fg");
      pen.strokeRect((at % columns) * size, Math.floor(at / columns) * size, size - 1, size - 1);
    }
  };
  const pick = (n) => {
    if (n < 0 || n >= shown.length) return;
    at = n;
    const host = shown[n];
    const used = Object.entries(map.resources).filter(([, all]) => all[host]).map(([name, all]) => `${name} ${all[host][0]}/${all[host][1]}`).join(", ");
    picked.textContent = printable(`${map.name[host]} (${map.cell[host] ?? "no cell"}), ${map.state[host]}: ${used}; failed builds: ${map.failed_builds[host]}`);
    draw();
  };
  const open = () => { if (at >= 0) location.href = "/fleet/" + map.uuid[shown[at]]; };
  const under = (event) => Math.floor(event.offsetY / size) * columns + Math.floor(event.offsetX / size);
  canvas.addEventListener("mousemove", (event) => pick(under(event)));
  canvas.addEventListener("click", (event) => { pick(under(event)); open(); });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (step) { event.preventDefault(); pick(Math.max(0, at + step)); }
    if (event.key === "Enter") open();
  });
  colour.addEventListener("change", draw);
  new ResizeObserver(() => { if (map) draw(); }).observe(canvas.parentElement);
  const load = async () => {
    const answer = await fetch("/fleet/map");
    if (!answer.ok) { picked.textContent = `The map cannot be read: ${answer.status}`; return; }
    map = await answer.json();
    shown = map.uuid.map((_, n) => n).filter((n) => !cell || map.cell[n] === cell);
    draw();
    canvas.dataset.hosts = shown.length;
  };
  await load();
  setInterval(() => { if (!document.hidden) load(); }, 5000);
}

// --- a build

function followBuild(uuid, until = "end") {
  listen(`/api/v1/builds/${uuid}/events?until=${until}`, {
    event(event, source) {
      byId("state").textContent = event.state;
      byId("state").className = "state " + event.state;
      byId("timeline").append(row([when(event.at), event.cell ?? "", event.state, event.reason ?? ""]));
      if (event.terminal && (until === "end" || event.state !== "active")) { source.close(); location.reload(); }
    },
    build(build, source) { if (build.state !== byId("state").textContent) { source.close(); location.reload(); } },
    lagged() { location.reload(); },
  });
}

function startDelete(button) {
  button.addEventListener("click", async () => {
    if (!confirm("Delete this instance? Its machine is destroyed.")) return;
    button.disabled = true;
    const answer = await fetch("/api/v1/builds/" + button.dataset.delete, { method: "DELETE" });
    const body = await answer.json();
    byId("deleted").textContent = answer.ok ? "The delete is on record." : printable(`${body.code}: ${body.detail}`);
    if (answer.ok) followBuild(button.dataset.delete, "deleted");
    else button.disabled = false;
  });
}

document.addEventListener("DOMContentLoaded", () => {
  if (byId("rates")) startNow();
  if (byId("map")) startFleet();
  const followed = document.querySelector("[data-follow]")?.dataset.follow;
  if (followed) followBuild(followed);
  // A link to the login page may carry the token behind the #, which no browser sends or logs.
  const login = document.querySelector("form.login");
  if (login && location.hash.length > 1) {
    login.elements.token.value = decodeURIComponent(location.hash.slice(1));
    history.replaceState(null, "", location.pathname);
    login.submit();
  }
  const button = document.querySelector("[data-delete]");
  if (button) startDelete(button);
});
