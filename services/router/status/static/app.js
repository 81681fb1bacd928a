"use strict";
// Shows what /ui/events sends. Every part is kept and drawn again when it changes.

const at = (id) => document.getElementById(id);
const parts = { turns: [], figures: [], workers: [], conversations: { shown: [], more: false }, ledger: { reachable: true, reason: "" } };
const KEY = "kvloop-api-key";

const count = (value) => Math.round(value).toLocaleString("en");
const percent = (value) => `${Math.round(value * 100)} %`;
function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds === 0) return "0";
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 2 : 0)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}
const clockTime = (seconds) => new Date(seconds * 1000).toLocaleTimeString();
const words = (name) => name.toLowerCase().replaceAll("_", " ");

function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

// Puts rows into a table. A cell is text, a node, or {text, title, class}.
function fill(id, rows) {
  const table = at(id);
  const labels = [...table.tHead.rows[0].cells].map((cell) => [cell.textContent, cell.className]);
  const focused = table.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  table.tBodies[0].replaceChildren(...rows.map((cells) => make("tr", {}, ...cells.map((cell, index) => {
    const given = cell instanceof Node || typeof cell !== "object" ? { node: cell } : cell;
    const element = make("td", { className: `${labels[index][1]} ${given.class ?? ""}`.trim() }, given.node ?? given.text);
    element.dataset.label = labels[index][0];
    if (given.title) element.title = given.title;
    return element;
  }))));
  table.hidden = !rows.length;
  table.nextElementSibling.hidden = rows.length > 0;
  if (focused !== undefined) {
    [...table.querySelectorAll("[data-key]")].find((element) => element.dataset.key === focused)?.focus();
  }
}

function bar(shares, label) {
  const total = shares.reduce((sum, [, value]) => sum + value, 0) || 1;
  const element = make("span", { className: "bar" });
  element.setAttribute("role", "img");
  element.setAttribute("aria-label", label);
  for (const [name, value] of shares) {
    const share = make("i", { className: name });
    share.style.width = `${(100 * value) / total}%`;
    element.append(share);
  }
  return element;
}

function source(turn) {
  const shares = [["pulled", turn.pulled], ["cached", turn.cached], ["computed", turn.recomputed]];
  const said = shares.filter(([, value]) => value).map(([name, value]) => `${count(value)} ${name}`).join(", ");
  const text = said || words(turn.miss_reason);
  const cell = make("span", {}, bar(shares, text), turn.miss_reason && said ? `${said} (${words(turn.miss_reason)})` : text);
  return { node: cell, title: text };
}

function drawTurns() {
  at("turns-count").textContent = parts.turns.length ? `${parts.turns.length}, newest first` : "";
  fill("turns", parts.turns.map((turn) => {
    const open = make("button", { type: "button", onclick: () => showTurn(turn) }, turn.conversation_id || "none");
    open.dataset.key = turn.turn_id;
    open.setAttribute("aria-haspopup", "dialog");
    const good = turn.outcome === "answered";
    return [clockTime(turn.started + turn.total_seconds), { node: open, title: turn.conversation_id }, turn.number || "–",
      count(turn.prompt_tokens), source(turn), duration(turn.ttft),
      { text: good ? turn.outcome : `${words(turn.outcome)}${turn.error ? `: ${turn.error}` : ""}`, class: turn.outcome === "failed" ? "bad" : "" }];
  }));
}

// While the ledger is away nobody says what workers retain.
function withLastKnown(workers) {
  const before = new Map(parts.workers.map((worker) => [worker.worker_id, worker]));
  return workers.map((worker) => (worker.retained_blocks === null
    ? { ...worker, retained_blocks: before.get(worker.worker_id)?.retained_blocks ?? 0,
        retained_conversations: before.get(worker.worker_id)?.retained_conversations ?? 0 }
    : worker));
}

function drawWorkers() {
  const alive = parts.workers.length;
  at("workers-count").textContent = alive ? `${alive}` : "";
  fill("workers", parts.workers.map((worker) => {
    const share = worker.kv_blocks ? worker.retained_blocks / worker.kv_blocks : 0;
    const text = worker.role === "decode" ? `${count(worker.retained_blocks)} blocks, ${percent(share)}` : "–";
    const held = worker.role === "decode"
      ? make("span", {}, bar([["pulled", share], ["", 1 - share]], text), `${text}, ${count(worker.retained_conversations)} conversations`) : "–";
    return [worker.worker_id, worker.role, worker.model, { text: worker.state, class: worker.state === "active" ? "" : "bad" },
      worker.in_flight, held, worker.vllm_version];
  }));
}

function drawConversations() {
  const { shown, more } = parts.conversations;
  const wanted = at("filter").value.trim().toLowerCase();
  const found = shown.filter((one) => !wanted
    || [one.conversation_id, one.model, one.worker_id, one.state].some((text) => text.toLowerCase().includes(wanted)));
  at("conversations-count").textContent = !shown.length ? ""
    : `${wanted ? `${found.length} of ` : ""}${more ? `the last ${shown.length}` : shown.length}, most recent first`;
  fill("conversations", found.map((one) => [{ text: one.conversation_id, title: `${one.conversation_id} (${one.model})` },
    one.state, one.turn, count(one.tokens), count(one.blocks), one.worker_id,
    one.state === "available" || one.state === "taken" ? duration(one.remaining) : "–"]));
  at("conversations").nextElementSibling.textContent = shown.length
    ? "No conversation matches." : "The ledger knows no conversation.";
}

function drawFigures() {
  const series = parts.figures, sum = (name) => series.reduce((total, one) => total + one[name], 0);
  const ended = series.filter((one) => one.turns);
  const minutes = Math.max(1, Math.round((series.length * 10) / 60));
  at("window").textContent = ended.length ? `Of the last ${minutes} min, in this router process.` : "";
  const follow = parts.turns.filter((turn) => turn.is_followup), hits = follow.filter((turn) => turn.handle_hit);
  at("tile-hits").textContent = follow.length ? percent(hits.length / follow.length) : "–";
  at("tile-hits-of").textContent = follow.length ? `${hits.length} of the last ${follow.length} follow-up turns` : "no follow-up turn yet";
  const ttfts = parts.turns.map((turn) => turn.ttft).filter((value) => value !== null).sort((a, b) => a - b);
  at("tile-ttft").textContent = ttfts.length ? duration(ttfts[Math.floor(ttfts.length / 2)]) : "–";
  at("tile-ttft-p90").textContent = ttfts.length ? `90th percentile ${duration(ttfts[Math.floor((ttfts.length - 1) * 0.9)])}` : "";
  const pulled = sum("pulled"), cached = sum("cached"), all = pulled + cached + sum("recomputed");
  at("tile-saved").textContent = all ? percent((pulled + cached) / all) : "–";
  at("tile-saved-of").textContent = all ? `${count(pulled)} pulled, ${count(cached)} cached` : "";
  const decode = parts.workers.filter((worker) => worker.role === "decode");
  const blocks = decode.reduce((total, worker) => total + worker.retained_blocks, 0);
  const capacity = decode.reduce((total, worker) => total + worker.kv_blocks, 0);
  at("tile-retained").textContent = capacity ? percent(blocks / capacity) : "–";
  at("tile-retained-of").textContent = capacity ? `${count(blocks)} of ${count(capacity)} blocks on decode` : "";
  if (!series.length) return;
  const times = series.map((one) => one.end);
  drawLines(at("chart-hits"), times, [{ class: "a", values: series.map((one) => one.hit_rate) }],
    { top: 1, format: percent, label: `Hit rate over time. Now ${at("tile-hits").textContent}.` });
  drawLines(at("chart-ttft"), times, [{ class: "b", values: series.map((one) => one.ttft_p90) }, { class: "a", values: series.map((one) => one.ttft_p50) }],
    { format: duration, label: `Time to first token over time. Median now ${at("tile-ttft").textContent}.` });
}

function showTurn(turn) {
  at("detail-title").textContent = turn.conversation_id
    ? `${turn.conversation_id}${turn.number ? `, turn ${turn.number}` : ""}` : "Turn without a conversation";
  const total = Math.max(turn.total_seconds, 0.001);
  const lane = (name, ...spans) => {
    const track = make("div", { className: "track" });
    for (const [kind, start, length, text] of spans) {
      const span = make("span", { className: kind, title: `${text} ${duration(length)}` }, `${text} ${duration(length)}`);
      span.style.left = `${(100 * Math.max(start, 0)) / total}%`;
      span.style.width = `${(100 * Math.max(length, 0)) / total}%`;
      track.append(span);
    }
    return make("div", { className: "lane" }, make("span", { className: "quiet" }, name), track);
  };
  const lanes = [];
  if (turn.prefill_start !== null) {
    lanes.push(lane("prefill leg", ["prefill", turn.prefill_start, turn.prefill_seconds, "prefill"]));
    if (turn.pull_seconds) lanes.push(lane("of which pull", ["pull", turn.prefill_start, turn.pull_seconds, "pull"]));
  }
  if (turn.decode_start !== null) {
    const first = turn.ttft ?? turn.total_seconds;
    lanes.push(lane("decode leg", ["first", turn.decode_start, first - turn.decode_start, "to first token"],
      ["answer", first, turn.total_seconds - first, "answer"]));
  }
  at("timeline").replaceChildren(...lanes, make("p", { className: "quiet" }, `${duration(turn.total_seconds)} in all, from ${clockTime(turn.started)}`));
  const facts = {
    "Turn id": turn.turn_id, Model: turn.model, "Prefill worker": turn.prefill_worker_id || "left out", "Decode worker": turn.decode_worker_id || "–",
    "Handle": turn.handle_hit ? "given out by the ledger" : "none", "Miss reason": turn.miss_reason ? words(turn.miss_reason) : "none, KV was pulled",
    "Prompt tokens": count(turn.prompt_tokens), "Proven": count(turn.proven), "Pulled": count(turn.pulled), "Cached on prefill": count(turn.cached),
    "Recomputed": count(turn.recomputed), "Answer tokens": count(turn.completion_tokens), "Retained for the next turn": count(turn.retained),
    "TTFT": duration(turn.ttft), "Outcome": turn.error ? `${words(turn.outcome)}: ${turn.error}` : words(turn.outcome),
  };
  at("receipt").replaceChildren(...Object.entries(facts).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  at("detail").showModal();
}

function draw(name) {
  if (name === "turns") drawTurns();
  if (name === "workers") drawWorkers();
  if (name === "conversations") drawConversations();
  if (name === "ledger") {
    at("ledger").hidden = parts.ledger.reachable;
    at("ledger").textContent = "kvmeta does not answer. Turns go on and recompute their whole prompt; conversations and retained KV are shown as last known.";
  }
  drawFigures();
}

function link(state, text) {
  at("link").dataset.state = state;
  at("link").textContent = text;
}

// EventSource cannot carry a credential, so the feed is read by fetch.
async function watch() {
  const key = sessionStorage.getItem(KEY);
  const reply = await fetch("events", { headers: key ? { authorization: `Bearer ${key}` } : {} });
  if (reply.status === 401) {
    sessionStorage.removeItem(KEY);
    at("main").hidden = true;
    at("door").hidden = false;
    at("door-error").textContent = key ? "This key is not known." : "";
    link("lost", "an API key is needed");
    at("key").focus();
    return false;
  }
  if (!reply.ok) throw new Error(`the router answers ${reply.status}`);
  at("door").hidden = true;
  at("main").hidden = false;
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return true;
    link("live", "live");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const [, name, data] = /^event: (\w+)\ndata: (.*)$/.exec(event) ?? [];
      if (!(name in parts)) continue;
      parts[name] = name === "workers" ? withLastKnown(JSON.parse(data)) : JSON.parse(data);
      draw(name);
    }
  }
}

async function run() {
  for (let pause = 1; ; pause = Math.min(pause * 2, 15)) {
    try {
      if (!(await watch())) return;
      pause = 0.5;
    } catch {
      // said below; the browser's own text names no cause
    }
    link("lost", "the router does not answer; trying again");
    await new Promise((resolve) => setTimeout(resolve, pause * 1000));
  }
}

at("filter").addEventListener("input", drawConversations);
addEventListener("resize", drawFigures);
at("door").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key").value);
  at("key").value = "";
  run();
});
for (const name of Object.keys(parts)) draw(name);
run();
