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

// --- now

// What waits for a person, as the server renders it.
function statusOf(status) {
  const element = (name, text, kind) => {
    const made = document.createElement(name);
    made.textContent = printable(text);
    if (kind) made.className = kind;
    return made;
  };
  if (!status.rows.length) return [element("p", "Nothing waits for a person.", "fine")];
  return status.rows.map((row) => {
    const made = element("article", "", "problem " + row.severity);
    made.append(element("strong", row.what));
    if (row.since) made.append(" ", element("time", age(status.at - row.since)));
    made.append(" ", printable(row.detail ?? ""), " ");
    if (row.next) made.append(element("code", row.next));
    if (row.page) made.append(" ", link(row.page, "Show"));
    return made;
  });
}

function age(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  for (const [unit, length, most] of [["s", 1, 120], ["min", 60, 7200], ["h", 3600, 172800]]) {
    if (whole < most) return `${Math.floor(whole / length)} ${unit}`;
  }
  return `${Math.floor(whole / 86400)} d`;
}

function startNow() {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const box = byId("rates");
  const line = { stroke: colour("--line"), width: 1 }, axis = { stroke: colour("--soft"), grid: line, ticks: line };
  const clock = (_, ticks) => ticks.map((at) => when(at).slice(11, ticks[1] - ticks[0] < 60 ? 19 : 16));
  const plot = new uPlot({
    width: box.clientWidth, height: 220, axes: [{ ...axis, space: 90, values: clock }, axis], cursor: { show: false }, legend: { live: false },
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
      put("p95", now.latency.p95 === undefined ? "none yet" : duration(now.latency.p95));
      put("lost_per_s", now.lost_per_s.toFixed(1));
      put("retries_per_s", now.retries_per_s.toFixed(1));
      put("waiting", now.waiting);
      put("dead_letters", now.dead_letters);
      put("p99", now.latency.p99 === undefined ? "none yet" : duration(now.latency.p99));
      put("hosts", now.answered ? `${now.up} of ${now.hosts}` : "not known");
      plot.setData([now.seconds.map((s) => s.at), now.seconds.map((s) => s.active), now.seconds.map((s) => s.failed)]);
      byId("status").replaceChildren(...statusOf(now.status));
      byId("cells").replaceChildren(...Object.entries(now.cells).sort().map(([cell, [up, every]]) => row([link("/fleet?cell=" + encodeURIComponent(cell), cell), up, every])));
      byId("workers").replaceChildren(...Object.entries(now.workers).sort().map(([role, [up, every]]) => row([link("/system", role), up, every])));
      byId("queues").replaceChildren(...(now.queues.length ? now.queues.map((one) => row([one.bus, one.queue, one.waiting])) : [row(["None.", "", ""])]));
    },
    failure(event) {
      const rows = byId("failures");
      rows.querySelector(".none")?.remove();
      rows.prepend(row([when(event.at), link("/builds/" + event.instance_uuid, event.instance_uuid), event.code ?? "", event.reason ?? ""]));
      while (rows.children.length > 20) rows.lastElementChild.remove();
    },
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
  const canvas = byId("map"), picked = byId("picked"), colour = byId("colour");
  const side = (count, width) => Math.max(4, Math.min(22, Math.floor(Math.sqrt((width * 360) / Math.max(1, count)))));
  let map = null, shown = [], columns = 1, size = 10, at = -1;

  const split = (value) => { const at = value.indexOf(":"); return [value.slice(0, at), value.slice(at + 1)]; };
  // What the scale of the colours goes from and to: of what is free and of metrics by the hosts that are shown.
  let range = [0, 1];
  const scale = () => {
    const [kind, name] = split(colour.value);
    let [least, most] = kind === "metric" ? [Infinity, -Infinity] : [0, 0];
    for (const host of shown) {
      const number = kind === "metric" ? (map.metrics[name] ?? [])[host] : 0, amount = (map.resources[name] ?? [])[host];
      if (kind === "metric" && number !== null && number !== undefined) { least = Math.min(least, number); most = Math.max(most, number); }
      if (kind === "free" && amount) most = Math.max(most, amount[1] - amount[0]);
    }
    range = [least, most];
    const texts = kind === "failed" ? ["0", "5 and more"] : kind === "used" ? ["0 %", "100 %"] : most < least ? ["none", "none"] : [least, most].map((n) => n.toLocaleString("en"));
    byId("scale-from").textContent = texts[0];
    byId("scale-to").textContent = texts[1];
  };
  const SHADES = 32;
  // What is little stays near the page's background: light or dark.
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const shadesOf = (isDark) => Array.from({ length: SHADES + 1 }, (_, n) => isDark ? `hsl(212 ${28 + (52 * n) / SHADES}% ${22 + (58 * n) / SHADES}%)` : `hsl(215 ${55 + (25 * n) / SHADES}% ${88 - (68 * n) / SHADES}%)`);
  let shades = shadesOf(dark.matches);
  const share = (host) => {
    const [kind, name] = split(colour.value);
    if (kind === "failed") return Math.min(1, map.failed_builds[host] / 5);
    if (kind === "metric") {
      const number = (map.metrics[name] ?? [])[host];
      return number === null || number === undefined ? null : range[1] > range[0] ? (number - range[0]) / (range[1] - range[0]) : 0.5;
    }
    const amount = (map.resources[name] ?? [])[host];
    if (!amount || !amount[1]) return null;
    return kind === "free" ? Math.max(0, amount[1] - amount[0]) / (range[1] || 1) : Math.min(1, amount[0] / amount[1]);
  };
  const fill = (host) => {
    if (map.state[host] === "down") return "#b42318";
    if (map.state[host] === "disabled" || map.state[host] === "not reported") return "#8b949e";
    const used = share(host);
    return used === null ? null : shades[Math.round(SHADES * used)]; // null: it has none of this class
  };
  const pen = canvas.getContext("2d");
  const square = (n, style) => {
    const x = (n % columns) * size, y = Math.floor(n / columns) * size;
    if (style) { pen.fillStyle = style; pen.fillRect(x, y, size - 1, size - 1); } else pen.clearRect(x, y, size - 1, size - 1);
  };
  const mark = () => {
    if (at < 0 || at >= shown.length) return;
    square(at, getComputedStyle(document.documentElement).getPropertyValue("--fg").trim());
    const x = (at % columns) * size, y = Math.floor(at / columns) * size, style = fill(shown[at]);
    pen.clearRect(x + 2, y + 2, size - 5, size - 5);
    if (style) { pen.fillStyle = style; pen.fillRect(x + 2, y + 2, size - 5, size - 5); }
  };
  const draw = () => {
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
    shown.forEach((host, n) => { const style = fill(host); if (style) { if (!by.has(style)) by.set(style, []); by.get(style).push(n); } });
    for (const [style, squares] of by) {
      pen.fillStyle = style;
      for (const n of squares) pen.fillRect((n % columns) * size, Math.floor(n / columns) * size, size - 1, size - 1);
    }
    mark();
  };
  const pick = (n) => {
    if (n < 0 || n >= shown.length || n === at) return;
    if (at >= 0 && at < shown.length) square(at, fill(shown[at]));
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
    if (!field.name || field.tagName === "BUTTON" || (field.value === "" && field.type !== "checkbox")) continue;
    fields[field.name] = field.type === "checkbox" ? field.checked : field.type === "number" ? Number(field.value) : field.value;
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

// --- a decision about all rows that are chosen: one request

function startDecision(form) {
  const boxes = [...form.querySelectorAll("[data-item]")];
  form.querySelector("[data-all]")?.addEventListener("change", (event) => { for (const one of boxes) one.checked = event.target.checked; });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = event.submitter;
    const chosen = boxes.filter((one) => one.checked).map((one) => JSON.parse(one.dataset.item));
    if (!chosen.length) return showStatus(form, "None is chosen.", true);
    if (button?.dataset.confirm && !confirm(`${button.dataset.confirm} (${chosen.length})`)) return;
    for (const one of form.querySelectorAll("button")) one.disabled = true;
    try {
      const { ok, reply, sentence } = await request("POST", form.dataset.path, { ...fieldsOf(form, button), [form.dataset.list]: chosen });
      if (!ok) return showStatus(form, sentence, true);
      const left = reply.undecided ?? [...(reply.not_open ?? []), ...(reply.no_answer ?? [])];
      if (!left.length) return location.reload();
      showStatus(form, `${chosen.length - left.length} decided about; ${left.length} were left: ${left[0].code ?? "breaker.not_open"}`, true);
    } catch (fault) {
      showStatus(form, `The server does not answer: ${fault.message}`, true);
    } finally {
      for (const one of form.querySelectorAll("button")) one.disabled = false;
    }
  });
}

// --- an object: what would change is shown before it is changed

function startObject(form) {
  const table = byId("difference"), rows = table.querySelector("tbody"), set = form.querySelector("[value=set]");
  const path = () => `/api/v1/${form.dataset.section}/${encodeURIComponent(form.elements.name.value)}`;
  const control = (extra) => new URLSearchParams({ reason: form.elements.reason.value, force: form.elements.force.checked, if_version: form.dataset.version, ...extra });
  const show = (changed) => {
    rows.replaceChildren();
    for (const { before = {}, after = {} } of changed)
      for (const key of new Set([...Object.keys(before), ...Object.keys(after)]))
        if (JSON.stringify(before[key]) !== JSON.stringify(after[key])) rows.append(row([key, JSON.stringify(before[key]) ?? "", JSON.stringify(after[key]) ?? ""]));
    table.hidden = !rows.children.length;
  };
  form.addEventListener("input", () => { set.disabled = true; table.hidden = true; showStatus(form, "", false); });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const what = event.submitter?.value ?? "preview";
    let body;
    try { body = what === "delete" ? undefined : JSON.parse(form.elements.body.value); } catch (fault) { return showStatus(form, `This is no JSON: ${fault.message}`, true); }
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
      for (const [name, count] of [["moved", reply.moved.length], ["under-way", reply.under_way.length], ["not-started", reply.not_started.length], ["failed", reply.failed.length]]) byId("drain-" + name).textContent = count;
      byId("drain-progress").value = reply.moved.length;
      byId("drain-failures").replaceChildren(...reply.failed.map((one) => row([link("/builds/" + one.instance_uuid, one.instance_uuid), one.code, one.reason])));
      if (reply.state === "ended") return;
    } else if (answer.status === 404) return;  // the server that carried it out has been started anew
    await new Promise((go) => setTimeout(go, Math.max(1000, 5 * (Date.now() - asked))));
  }
}

document.addEventListener("DOMContentLoaded", () => {
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
    history.replaceState(null, "", location.pathname);
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
