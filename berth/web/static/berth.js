// Keeps the pages up to date. Text from outside goes in as text, never as HTML.
"use strict";

const byId = (id) => document.getElementById(id);
const duration = (s) => (s < 1 ? (s * 1000).toFixed(1) + " ms" : s.toFixed(2) + " s");
const when = (at) => new Date(at * 1000).toISOString().slice(0, 19).replace("T", " ");
const moment = (at) => new Date(at * 1000).toISOString().slice(0, 23).replace("T", " ");

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

function listen(address, handlers) {
  const source = new EventSource(address);
  const stale = (is) => { const note = byId("stream"); if (note) note.hidden = !is; };
  source.onopen = () => stale(false);
  source.onerror = () => stale(true);
  for (const [name, take] of Object.entries(handlers)) source.addEventListener(name, (event) => take(JSON.parse(event.data), source));
  return source;
}

// On a phone each row is a card: its cells are named by the head of their column.
function nameCells(scope) {
  for (const table of scope.querySelectorAll("table.rows")) {
    const names = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
    for (const made of table.querySelectorAll("tbody tr:not(.none)")) [...made.children].forEach((cell, n) => { if (names[n] && !cell.querySelector(".state")) cell.dataset.label = names[n]; });
  }
}

// The parts of a page that move are rendered by the server alone: they are fetched anew and put in their place, unless
// their reader is typing or choosing there.
async function refreshParts() {
  if (document.hidden) return;
  const answer = await fetch(location.href, { headers: { accept: "text/html" } });
  if (answer.redirected) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of document.querySelectorAll("[data-live]")) {
    const made = fresh.getElementById(part.id);
    if (!made || part.contains(document.activeElement) || part.innerHTML === made.innerHTML) continue;
    part.replaceWith(made);
  }
  nameCells(document);
}

// --- the overview

const PARTS_EVERY_MS = 5000;

function startNow() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const box = byId("rates");
  const line = { stroke: colour("--line"), width: 1 }, axis = { stroke: colour("--soft"), grid: line, ticks: line };
  const clock = (_, ticks) => ticks.map((at) => when(at).slice(11, ticks[1] - ticks[0] < 60 ? 19 : 16));
  const plot = new uPlot({
    width: box.clientWidth, height: 180, axes: [{ ...axis, space: 90, values: clock }, axis], cursor: { show: false }, legend: { live: false },
    scales: { y: { range: (_, least, most) => [0, Math.max(1, most * 1.1)] } },
    series: [{}, { label: "started", stroke: colour("--good"), width: 2 }, { label: "failed", stroke: colour("--bad"), width: 2, dash: [4, 3] }],
  }, [[], [], []], box);
  new ResizeObserver(() => plot.setSize({ width: box.clientWidth, height: 180 })).observe(box);
  let refreshed = performance.now(), refreshing = false;
  const refresh = async () => {
    if (refreshing) return;
    refreshing = true;
    try { await refreshParts(); } catch { /* the stream says that the connection is lost */ }
    refreshing = false;
    refreshed = performance.now();
  };
  listen("/now/events", {
    now(now) {
      plot.setData([now.seconds.map((s) => s.at), now.seconds.map((s) => s.active), now.seconds.map((s) => s.failed)]);
      if (performance.now() - refreshed > PARTS_EVERY_MS) refresh();
    },
    failure() { setTimeout(refresh, 500); },
  });
}

// --- calls of Nova

function startNova() {
  const answer = (one) => one.hosts.join(", ") || one.reason;
  const about = (one) => link("/nova/calls/" + encodeURIComponent(one.request_id), one.request_id);
  const took = (s) => { const made = document.createElement("span"); made.textContent = duration(s); return made; };
  const put = (id, rows) => { if (rows.length) byId(id).replaceChildren(...rows); };
  listen("/nova/events", {
    nova(calls) {
      byId("age").hidden = calls.replica_age_s === null;
      byId("age-s").textContent = duration(calls.replica_age_s ?? 0);
      put("counts", Object.entries(calls.counts).sort().map((counted) => row(counted)));
      put("compared", calls.compared.map((one) => {
        const { difference, stock, berth, rule } = one.compared;
        return row([when(one.at), about(one), difference, answer(stock), answer(berth), rule, took(stock.took_s), took(berth.took_s)]);
      }));
      put("decisions", calls.decisions.map((one) => {
        const { event, count, hosts, reason } = one.decision;
        return row([when(one.at), about(one), event, count, [...hosts.map((of) => of[0] ?? ""), reason].join(" "), one.worker]);
      }));
    },
  });
}

// --- fleet

async function startFleet() {
  const canvas = byId("map"), picked = byId("picked"), colour = byId("colour"), whole = byId("whole"), spread = byId("spread");
  const side = (count, width) => Math.max(5, Math.min(22, Math.floor(Math.sqrt((width * 300) / Math.max(1, count)))));
  let map = null, shown = [], columns = 1, size = 10, at = -1;

  const split = (value) => { const at = value.indexOf(":"); return [value.slice(0, at), value.slice(at + 1)]; };
  const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // What a host has of what the colours show: a share of its capacity, an amount, or a number; null: nothing of it.
  const reading = (host) => {
    const [kind, name] = split(colour.value);
    if (kind === "failed") return map.failed_builds[host];
    if (kind === "metric") return (map.metrics[name] ?? [])[host] ?? null;
    const amount = (map.resources[name] ?? [])[host];
    if (!amount || !amount[1]) return null;
    return kind === "free" ? Math.max(0, amount[1] - amount[0]) : amount[0] / amount[1];
  };
  // The scale is relative to what is there, so that hosts differ at 1 % and at 99 % as well.
  let range = [0, 1], readings = [];
  const scale = () => {
    const [kind] = split(colour.value);
    readings = map.uuid.map((_, host) => reading(host));
    let least = Infinity, most = -Infinity;
    for (const one of readings) if (one !== null) { if (one < least) least = one; if (one > most) most = one; }
    range = kind === "failed" ? [0, 5] : kind === "used" && whole.checked ? [0, 1] : most < least ? [0, 0] : [least, most];
    whole.parentElement.hidden = kind !== "used";
    const percent = (share) => `${Number((100 * share).toPrecision(3))} %`;
    const texts = kind === "failed" ? ["0", "5 and more"] : most < least ? ["none", "none"] : range.map((n) => (kind === "used" ? percent(n) : n.toLocaleString("en")));
    byId("scale-from").textContent = texts[0];
    byId("scale-to").textContent = texts[1];
    drawSpread(texts);
  };
  // How many hosts are in each tenth of the scale.
  const drawSpread = (texts) => {
    const counts = Array(10).fill(0), width = range[1] - range[0];
    for (const one of readings) if (one !== null) counts[width > 0 ? Math.min(9, Math.max(0, Math.floor((10 * (one - range[0])) / width))) : 0]++;
    const most = Math.max(1, ...counts);
    const bars = spread.querySelector(".bins");
    if (!bars.children.length) bars.append(...counts.map(() => document.createElement("span")));
    counts.forEach((count, n) => { bars.children[n].style.height = `${(100 * count) / most}%`; bars.children[n].title = `${count} hosts`; });
    [...spread.querySelectorAll(".bins-axis span")].forEach((end, n) => { end.textContent = texts[n]; });
    spread.hidden = width <= 0;
  };
  const SHADES = 32;
  // What is little stays near the page's background: light or dark.
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const shadesOf = (isDark) => Array.from({ length: SHADES + 1 }, (_, n) => isDark ? `hsl(212 ${28 + (52 * n) / SHADES}% ${22 + (58 * n) / SHADES}%)` : `hsl(215 ${55 + (25 * n) / SHADES}% ${88 - (68 * n) / SHADES}%)`);
  let shades = shadesOf(dark.matches), marks = {};
  const colours = () => { marks = { bad: token("--bad"), held: token("--held"), warn: token("--warn"), bg: token("--bar-bg"), fg: token("--fg") }; };
  // Each state has the shape that it has in lists: a cross, a triangle, two bars, a square.
  const MARKS = {
    down: (x, y, s) => { pen.strokeStyle = marks.bad; pen.lineWidth = Math.max(1.5, s / 6); pen.beginPath(); pen.moveTo(x + 1, y + 1); pen.lineTo(x + s - 1, y + s - 1); pen.moveTo(x + s - 1, y + 1); pen.lineTo(x + 1, y + s - 1); pen.stroke(); },
    "not reported": (x, y, s) => { pen.fillStyle = marks.warn; pen.beginPath(); pen.moveTo(x + s / 2, y); pen.lineTo(x + s, y + s); pen.lineTo(x, y + s); pen.fill(); },
    fenced: (x, y, s) => { pen.fillStyle = marks.held; pen.fillRect(x + s * 0.1, y + s * 0.1, s * 0.8, s * 0.8); },
    disabled: (x, y, s) => { pen.fillStyle = marks.held; pen.fillRect(x + s * 0.2, y + s * 0.1, s * 0.22, s * 0.8); pen.fillRect(x + s * 0.58, y + s * 0.1, s * 0.22, s * 0.8); },
  };
  MARKS.maintenance = MARKS.disabled;
  MARKS["not in placement"] = MARKS["not reported"];
  const shade = (host) => {
    if (map.state[host] !== "up") return marks.bg;
    const one = readings[host];
    if (one === null || one === undefined) return null; // it has none of this class
    // Where all are alike, the shade is that of their share itself.
    const alike = split(colour.value)[0] === "used" ? Math.min(1, one) : 0.5;
    const share = range[1] > range[0] ? Math.min(1, Math.max(0, (one - range[0]) / (range[1] - range[0]))) : alike;
    return shades[Math.round(SHADES * share)];
  };
  const pen = canvas.getContext("2d");
  const place = (n) => [(n % columns) * size, Math.floor(n / columns) * size];
  const square = (n, inset = 0) => {
    const [x, y] = place(n), host = shown[n], style = shade(host), s = size - 1 - 2 * inset;
    pen.clearRect(x + inset, y + inset, s, s);
    if (style) { pen.fillStyle = style; pen.fillRect(x + inset, y + inset, s, s); }
    MARKS[map.state[host]]?.(x + inset, y + inset, s);
  };
  const mark = () => {
    if (at < 0 || at >= shown.length) return;
    const [x, y] = place(at);
    pen.fillStyle = marks.fg;
    pen.fillRect(x, y, size - 1, size - 1);
    square(at, size > 8 ? 2 : 1);
  };
  const draw = () => {
    colours();
    scale();
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    size = side(shown.length, width);
    columns = Math.max(1, Math.floor(width / size));
    const height = Math.max(size, Math.ceil(shown.length / columns) * size);
    canvas.style.height = height + "px";
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    const by = new Map(); // squares of one colour together: setting a colour costs more than a square
    shown.forEach((host, n) => { const style = shade(host); if (style) { if (!by.has(style)) by.set(style, []); by.get(style).push(n); } });
    for (const [style, squares] of by) {
      pen.fillStyle = style;
      for (const n of squares) pen.fillRect((n % columns) * size, Math.floor(n / columns) * size, size - 1, size - 1);
    }
    shown.forEach((host, n) => { if (MARKS[map.state[host]]) square(n); });
    mark();
  };
  const pick = (n) => {
    if (n < 0 || n >= shown.length || n === at) return;
    if (at >= 0 && at < shown.length) square(at);
    at = n;
    const host = shown[n];
    const used = Object.entries(map.resources).filter(([, all]) => all[host]).map(([name, all]) => `${name} ${all[host][0]}/${all[host][1]}`).join(", ");
    const numbers = Object.entries(map.metrics).filter(([, all]) => all[host] !== null).map(([name, all]) => `; ${name}: ${all[host]}`).join("");
    picked.textContent = printable(`${map.name[host]} (${map.cell[host] ?? "no cell"}), ${map.state[host]}: ${used}; failed builds: ${map.failed_builds[host]}${numbers}`);
    mark();
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
  whole.addEventListener("change", draw);
  dark.addEventListener("change", () => { shades = shadesOf(dark.matches); if (map) draw(); });
  new ResizeObserver(() => { if (map) draw(); }).observe(canvas.parentElement);
  const load = async () => {
    const answer = await fetch("/fleet/map" + location.search);
    if (!answer.ok) { picked.textContent = `The map cannot be read: ${answer.status}`; return; }
    map = await answer.json();
    shown = map.uuid.map((_, n) => n);
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
      byId("timeline").append(row([moment(event.at), event.cell ?? "", event.state, event.reason ?? ""]));
      if (event.terminal && (until === "end" || event.state !== "active")) { source.close(); location.reload(); }
    },
    build(build, source) { if (build.state !== byId("state").textContent) { source.close(); location.reload(); } },
  });
}

function startDelete(button) {
  button.addEventListener("click", async () => {
    if (!confirm(button.dataset.confirm)) return;
    button.disabled = true;
    const answer = await fetch("/api/v1/builds/" + button.dataset.delete, { method: "DELETE" });
    const body = await answer.json();
    byId("deleted").textContent = answer.ok ? "The delete is on record." : printable(`${body.code}: ${body.detail}`);
    if (answer.ok) followBuild(button.dataset.delete, "deleted");
    else button.disabled = false;
  });
}

// --- what an operator does: a form becomes one request to the API, after its question

const showStatus = (form, text, wrong) => {
  const status = form.querySelector("[role=status]");
  status.textContent = printable(text);
  status.className = wrong ? "down" : "up";
};

async function request(method, path, body, signal) {
  const options = { method, signal };
  if (body !== undefined) { options.body = JSON.stringify(body); options.headers = { "content-type": "application/json" }; }
  const answer = await fetch(path, options);
  const reply = await answer.json();
  return { ok: answer.ok, status: answer.status, reply, location: answer.headers.get("location") ?? "", sentence: answer.ok ? "" : `${reply.code}: ${reply.detail}` };
}

function fieldsOf(form, submitter) {
  const fields = {};
  for (const field of form.elements) {
    if (!field.name || field.tagName === "BUTTON" || "item" in field.dataset || (field.value === "" && field.type !== "checkbox")) continue;
    fields[field.name] = field.type === "checkbox" ? field.checked : field.type === "number" || "number" in field.dataset ? Number(field.value) : field.value;
  }
  if (submitter?.name) fields[submitter.name] = submitter.value;
  return fields;
}

async function followAction(form, id) {
  for (;;) {
    const { ok, reply, sentence } = await request("GET", "/api/v1/actions/" + id);
    if (!ok) return showStatus(form, sentence, true);
    showStatus(form, reply.state, reply.state === "failed" || reply.state === "refused");
    if (reply.terminal) {
      if (reply.code) showStatus(form, `${reply.state}: ${reply.code}: ${reply.reason ?? ""}`, true);
      else location.reload();
      return;
    }
    await new Promise((go) => setTimeout(go, 500));
  }
}

// Another scheduler may answer than the one that decided: a page is loaded anew once that scheduler knows it.
async function hostKnows(decision) {
  for (let n = 0; n < 20; n++) {
    const { ok, reply } = await request("GET", "/api/v1/hosts/" + decision.host_uuid);
    if (ok && (reply.host.admin?.version ?? 0) >= decision.version) return;
    await new Promise((go) => setTimeout(go, 250));
  }
}

// A fence is lifted when its cell says so: until then the host is fenced, and the decision waits.
async function followPending(uuid) {
  for (;;) {
    await new Promise((go) => setTimeout(go, 1000));
    if (document.hidden || document.querySelector("form.action [name=reason]")?.value) continue; // what is being typed stays
    let answer = { ok: false };
    try { answer = await request("GET", "/api/v1/hosts/" + uuid, undefined, AbortSignal.timeout(5000)); } catch { /* again */ }
    if (answer.ok && !answer.reply.host.admin?.pending) return location.reload();
    if (answer.status === 404) return;
  }
}

function startAction(form) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = event.submitter;
    if (button?.dataset.confirm && !confirm(button.dataset.confirm)) return;
    for (const one of form.querySelectorAll("button")) one.disabled = true;
    try {
      const body = form.dataset.method === "DELETE" ? undefined : fieldsOf(form, button);
      const { ok, reply, location: where, sentence } = await request(form.dataset.method, form.dataset.path, body);
      if (!ok) return showStatus(form, sentence, true);
      showStatus(form, "Done.", false);
      if (form.dataset.then === "host") await hostKnows(reply);
      if (form.dataset.then === "action") await followAction(form, reply.request_id);
      else if (form.dataset.then === "fleet") location.href = "/fleet";
      else if (form.dataset.then === "location") location.href = where.replace("/api/v1", "");
      else location.reload();
    } catch (fault) {
      showStatus(form, `The server does not answer: ${fault.message}`, true);
    } finally {
      for (const one of form.querySelectorAll("button")) one.disabled = false;
    }
  });
}

// --- a decision about all rows that are chosen: one request, after the count of what it is about

function startDecision(form) {
  const boxes = [...form.querySelectorAll("[data-item]")];
  form.querySelector("[data-all]")?.addEventListener("change", (event) => { for (const one of boxes) one.checked = event.target.checked; });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = event.submitter;
    const chosen = boxes.filter((one) => one.checked).map((one) => JSON.parse(one.dataset.item));
    if (!chosen.length) return showStatus(form, "None is chosen.", true);
    const hosts = new Set(chosen.map((one) => one.host_uuid).filter(Boolean)).size;
    const plan = `${chosen.length} of ${boxes.length} here are chosen${hosts ? `, on ${hosts} host${hosts === 1 ? "" : "s"}` : ""}.`;
    if (button?.dataset.confirm && !confirm(`${button.dataset.confirm}\n${plan}`)) return;
    for (const one of form.querySelectorAll("button")) one.disabled = true;
    try {
      const { ok, reply, sentence } = await request("POST", form.dataset.path, { ...fieldsOf(form, button), [form.dataset.list]: chosen });
      if (!ok) return showStatus(form, sentence, true);
      const left = reply.undecided ?? [...(reply.not_open ?? []), ...(reply.no_answer ?? []), ...(reply.too_old ?? []), ...Object.values(reply.blocked ?? {}).map((code) => ({ code }))];
      if (!left.length && !reply.fault) return location.reload();
      const why = reply.fault || left[0]?.code || (reply.too_old ? "dead_letter.too_old" : "breaker.not_open");
      showStatus(form, `${chosen.length - left.length} decided about; ${left.length} were left: ${why}`, true);
    } catch (fault) {
      showStatus(form, `The server does not answer: ${fault.message}`, true);
    } finally {
      for (const one of form.querySelectorAll("button")) one.disabled = false;
    }
  });
}

// --- an object: what would change is shown before it is changed

// A value that cannot stand as it is (a line's end, a mark that turns the writing) is written as JSON.
const unquoted = (text) => (text.startsWith('"') ? String(JSON.parse(text)) : text);
const linesOf = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

function pairOf(line) {
  const quoted = line.match(/^("(?:[^"\\]|\\.)*")\s*=(.*)$/);
  const at = line.indexOf("=");
  if (!quoted && at < 0) throw new Error(`${line}: KEY = VALUE is expected`);
  const [key, value] = quoted ? [quoted[1], quoted[2]] : [line.slice(0, at), line.slice(at + 1)];
  return [unquoted(key.trim()), unquoted(value.trim())];
}

function amountOf([key, value]) {
  const number = Number(value);
  if (value === "" || Number.isNaN(number)) throw new Error(`${key}: ${value || "nothing"} is no number`);
  return [key, number];
}

const READ = {
  number: (text) => (text === "" ? undefined : Number(text)),
  text: (text) => (text.trim() === "" ? undefined : unquoted(text.trim())),
  choice: (text) => text,
  lines: (text) => linesOf(text).map(unquoted),
  pairs: (text) => Object.fromEntries(linesOf(text).map(pairOf)),
  amounts: (text) => Object.fromEntries(linesOf(text).map(pairOf).map(amountOf)),
};

// The body of an object, of the fields of its form. Raises Error for a line that cannot be read.
function bodyOf(form) {
  const body = {};
  for (const field of form.querySelectorAll("[data-field]")) {
    const given = form.querySelector(`[data-given="${field.name}"]`);
    if (given && !given.checked) continue;
    const value = field.dataset.field === "flag" ? field.checked || undefined : READ[field.dataset.field](field.value);
    if (value === undefined) continue;
    const [outer, inner] = field.name.split(".");
    if (inner) (body[outer] ??= {})[inner] = value;
    else body[outer] = value;
  }
  return body;
}

function startObject(form) {
  const table = byId("difference"), rows = table.querySelector("tbody"), set = form.querySelector("[value=set]");
  const path = () => `/api/v1/${form.dataset.section}/${encodeURIComponent(form.elements.name.value)}`;
  const control = (extra) => new URLSearchParams({ reason: form.elements["change-reason"].value, force: form.elements["change-force"].checked, if_version: form.dataset.version, ...extra });
  const shown = (value) => (value === undefined ? "" : typeof value === "string" ? value : JSON.stringify(value));
  const show = (changed) => {
    rows.replaceChildren();
    for (const { before = {}, after = {} } of changed)
      for (const key of new Set([...Object.keys(before), ...Object.keys(after)]))
        if (JSON.stringify(before[key]) !== JSON.stringify(after[key])) rows.append(row([key, shown(before[key]), shown(after[key])]));
    table.hidden = !rows.children.length;
  };
  form.addEventListener("input", () => { set.disabled = true; table.hidden = true; showStatus(form, "", false); });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const what = event.submitter?.value ?? "preview";
    let body;
    try { body = what === "delete" ? undefined : bodyOf(form); } catch (fault) { return showStatus(form, fault.message, true); }
    if (event.submitter?.dataset.confirm && !confirm(event.submitter.dataset.confirm)) return;
    const query = control(what === "preview" ? { dry_run: true } : {});
    try {
      const { ok, reply, sentence } = await request(what === "delete" ? "DELETE" : "PUT", `${path()}?${query}`, body);
      if (!ok) return showStatus(form, sentence, true);
      if (what !== "preview") { location.href = "/objects"; return; }
      show(reply.changed ?? []);
      showStatus(form, table.hidden ? "Nothing would change." : "This would change:", false);
      set.disabled = table.hidden;
    } catch (fault) {
      showStatus(form, `The server does not answer: ${fault.message}`, true);
    }
  });
}

// --- a drain

async function followDrain(id) {
  for (;;) {
    let answer = { ok: false };
    const asked = Date.now();
    // An answer that does not come is asked for again; a request that hangs is given up.
    try { answer = await request("GET", "/api/v1/drains/" + id, undefined, AbortSignal.timeout(5000)); } catch { /* again */ }
    const { ok, reply } = answer;
    if (ok) {
      byId("drain-state").textContent = reply.state;
      byId("drain-state").className = "state " + reply.state;
      for (const [name, count] of [["moved", reply.moved.length], ["under-way", reply.under_way.length], ["not-started", reply.not_started.length], ["failed", reply.failed.length]]) byId("drain-" + name).textContent = count;
      byId("drain-progress").value = reply.moved.length;
      byId("drain-failures").replaceChildren(...reply.failed.map((one) => row([link("/builds/" + one.instance_uuid, one.instance_uuid), one.code, one.reason])));
      if (reply.state === "ended") return;
    } else if (answer.status === 404) return;  // the server that carried it out has been started anew
    await new Promise((go) => setTimeout(go, Math.max(1000, 5 * (Date.now() - asked))));
  }
}

document.addEventListener("DOMContentLoaded", () => {
  nameCells(document);
  // A phone shows states first; what one may choose from is a touch away.
  const choices = document.querySelector("details.choices");
  if (choices && !location.search && matchMedia("(max-width: 40rem)").matches) choices.open = false;
  if (byId("rates")) startNow();
  if (byId("map")) startFleet();
  if (byId("compared")) startNova();
  const followed = document.querySelector("[data-follow]")?.dataset.follow;
  if (followed) followBuild(followed);
  // A link to the login page may carry the token behind the #, which no browser sends or logs.
  const login = document.querySelector("form.login");
  const signIn = () => {
    if (location.hash.length < 2) return;
    login.elements.token.value = decodeURIComponent(location.hash.slice(1));
    history.replaceState(null, "", location.pathname + location.search);
    login.submit();
  };
  if (login) {
    signIn();
    // The link opened in a tab that shows the page already changes what is behind the #, and loads nothing.
    addEventListener("hashchange", signIn);
  }
  document.querySelectorAll("form.action").forEach(startAction);
  document.querySelectorAll("form.object").forEach(startObject);
  document.querySelectorAll("form.decide").forEach(startDecision);
  const pending = document.querySelector("[data-pending]");
  if (pending) followPending(pending.dataset.pending);
  const drain = document.querySelector("[data-drain]");
  if (drain && byId("drain-state").textContent !== "ended") followDrain(drain.dataset.drain);
  const button = document.querySelector("[data-delete]");
  if (button) startDelete(button);
});
