// The page: shows the moment that the player is at, and keeps a conversation.

const $ = (id) => document.getElementById(id);
const write = (id, text) => { const node = $(id); if (node.textContent !== text) node.textContent = text; };
const number = (value) => Math.round(value).toLocaleString("en");
const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;
const percent = (value) => `${Math.round(100 * value)} %`;

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit++) value /= 1024;
  return `${value.toFixed(value < 10 && unit ? 1 : 0)} ${units[unit]}`;
}

function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const [h, m, s] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  const two = (part) => String(part).padStart(2, "0");
  return h ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

let player = null;
let heardAt = 0;         // when the last event came, by this machine's clock
let isLive = false;
let isPlaying = false;   // a recording that plays
let chosen = 0;          // the request whose pages stand out
const LIVE_S = 600;      // the time that the strips of a live page show
const calm = matchMedia("(prefers-reduced-motion: reduce)");

// ---- the moment ------------------------------------------------------------------------------

// The present in the recording's seconds: it goes on while a live engine rests.
const present = () => (isLive ? player.end + Math.max(0, (performance.now() - heardAt) / 1000 - 0.2) : player.end);

function show() {
  if (!player) return;
  const { view, at } = player;
  const now = player.follows ? present() : player.points[at].t;
  showFigures(view.values, player.rateAt(at, now));
  showPool(view);
  showMemory(view);
  showTime(now);
  showRequests(view);
}

function showFigures(values, rate) {
  write("rate", rate < 10 && rate > 0 ? rate.toFixed(1) : number(rate));
  write("tokens-note", `${number(values.new_tokens)} so far`);
  write("running", number(values.running_count));
  write("waiting-note", `${number(values.waiting)} wait`);
  write("retracted", number(values.retracted_count));
  write("retracted-note", `${plural(values.retractions, "time")} so far, ${number(values.resumes)} restored`);
  write("done", number(values.done));
  write("failed-note", values.failed ? `and ${number(values.failed)} failed` : "none failed");
  write("reused", percent(share(values.cached_tokens, values.prompt_tokens)));
  write("reused-note", `${number(values.cached_tokens)} of ${number(values.prompt_tokens)}`);
}

function showPool(view) {
  const pages = drawPool($("pool"), view, chosen);
  write("pool-scale", pages > 1 ? `a square stands for ${pages} pages` : "");
  const { page_count: all } = view.values;
  const kept = view.pagesOf(KEPT), { used, shared } = view;
  $("pool").setAttribute("aria-label", `${all} pages: ${used} held by requests, ${shared} of them read by several, ` +
    `${kept} kept for later, ${all - used - kept} free. The table of requests says who has how many.`);
}

function showMemory(view) {
  const { values } = view;
  const tokens = view.used * values.page_tokens, all = values.page_count * values.page_tokens;
  showMeter("pool", tokens / all, `${number(tokens)} of ${number(all)} tokens`);
  showMeter("host", share(values.host_bytes, values.host_limit_bytes), `${bytes(values.host_bytes)} of ${bytes(values.host_limit_bytes)}`);
  showMeter("disk", share(values.disk_bytes, values.disk_limit_bytes), `${bytes(values.disk_bytes)} of ${bytes(values.disk_limit_bytes)}`);
  $("disk-row").hidden = $("disk-key").hidden = !values.disk_limit_bytes;
  write("moved", `${bytes(values.offloaded_bytes)} moved off the pool, ${bytes(values.restored_bytes)} back, ` +
    `${plural(values.recomputed_tokens, "token")} computed again.`);
}

function showMeter(name, part, text) {
  const meter = $(`${name}-meter`);
  write(`${name}-text`, text);
  meter.firstElementChild.style.width = `${100 * part}%`;
  meter.setAttribute("aria-valuenow", Math.round(100 * part));
  meter.setAttribute("aria-valuetext", text);
}

function showTime(now) {
  const to = Math.max(present(), player.begin + 1);
  const from = isLive ? Math.max(player.begin, to - LIVE_S) : player.begin;
  const top = drawRates($("rates"), player, from, to, now);
  drawFills($("fills"), player, from, to, now);
  drawLanes($("lanes"), player, from, to, now);
  write("rate-top", `up to ${number(top)}`);
  const point = player.points[player.at], { values } = player.view, span = `from ${clock(from)} to ${clock(to)}`;
  $("rates").setAttribute("aria-label", `Tokens a second ${span}: at most ${number(top)}`);
  $("fills").setAttribute("aria-label", `How full, ${span}: pool ${percent(point.pool)}, host memory ${percent(point.host)}, ` +
    `disk ${percent(point.disk)} at ${clock(now)}`);
  $("lanes").setAttribute("aria-label", `Requests ${span}: ${plural(values.retractions, "retraction")}, ${number(values.resumes)} restored`);
  const moment = $("moment");
  moment.max = player.points.length - 1;
  moment.value = player.at;
  write("moment-text", `${clock(now)} of ${clock(to)}`);
  moment.setAttribute("aria-valuetext", $("moment-text").textContent);
  write("play", isLive ? (player.follows ? "Pause" : "Go live") : isPlaying ? "Pause" : "Play");
}

// ---- the table -------------------------------------------------------------------------------

const PLACES = { host: "retracted, in host memory", below: "retracted, in a lower tier", nowhere: "retracted, without KV" };

function showRequests(view) {
  const { values } = view;
  const rows = [
    ...values.running.map(([id, times]) => [id, "runs", view.pagesOf(id), times, false]),
    ...values.retracted.map(([id, times, place]) => [id, PLACES[place] ?? place, 0, times, true]),
  ];
  const body = $("requests");
  const known = new Map([...body.rows].map((row) => [Number(row.dataset.id), row]));
  rows.forEach(([id, ...cells], place) => {
    const row = known.get(id) ?? madeRow(id);
    known.delete(id);
    fillRow(row, cells);
    if (body.rows[place] !== row) body.insertBefore(row, body.rows[place] ?? null);
  });
  for (const row of known.values()) row.remove();
  const others = values.running_count + values.retracted_count - rows.length;
  write("requests-note", rows.length ? (others > 0 ? `and ${number(others)} more` : "") : "No request runs.");
}

function madeRow(id) {
  const row = document.createElement("tr");
  row.dataset.id = id;
  const head = document.createElement("th");
  head.scope = "row";
  const swatch = document.createElement("span");
  swatch.className = "swatch";
  swatch.style.setProperty("--hue", hue(id));
  head.append(swatch, String(id));
  row.append(head, ...["", "number", "number"].map((kind) => Object.assign(document.createElement("td"), { className: kind })));
  row.addEventListener("pointerenter", () => { chosen = id; draw(); });
  row.addEventListener("pointerleave", () => { chosen = 0; draw(); });
  return row;
}

function fillRow(row, [state, pages, times, away]) {
  [state, pages, times].forEach((text, place) => {
    const cell = row.cells[place + 1];
    if (cell.textContent !== String(text)) cell.textContent = text;
  });
  row.className = away ? "away" : "";
}

// ---- when it is drawn ------------------------------------------------------------------------

let isDue = false;

function draw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => { isDue = false; show(); });
}

function take(event) {
  heardAt = performance.now();
  if (event.page_count !== undefined) {  // a connection, or a server, that is new
    player = new Player(event, isLive);
    chosen = 0;
    $("requests").replaceChildren();
  } else if (player) {
    player.add(event);
  }
  if (!calm.matches) draw();
}

function step() {
  if (!isPlaying) return;
  const share = performance.now() - step.began;
  const seconds = step.from + (share / 1000) * Math.max(1, (player.end - player.begin) / 30);
  let next = player.at;
  while (next < player.points.length - 1 && player.points[next + 1].t <= seconds) next++;
  player.seek(next);
  if (next === player.points.length - 1) isPlaying = false;
  show();
  setTimeout(step, calm.matches ? 1000 : 50);
}

function play() {
  if (isLive) return player.follows ? player.pause() : player.follow();
  isPlaying = !isPlaying;
  if (!isPlaying) return undefined;
  player.follows = false;
  if (player.at === player.points.length - 1) player.seek(0);
  [step.began, step.from] = [performance.now(), player.points[player.at].t];
  return step();
}

// ---- the conversation ------------------------------------------------------------------------

const messages = [];
let asking = null;

function said(kind, text) {
  const line = document.createElement("p");
  line.className = kind;
  line.textContent = text;
  $("talk").append(line);
  $("talk").hidden = false;
  return line;
}

async function ask(prompt, most) {
  messages.push({ role: "user", content: prompt });
  said("asked", prompt);
  const line = said("answered", "");
  const began = performance.now();
  let facts = "";
  asking = new AbortController();
  setAsking(true, "The answer is being written.");
  try {
    for await (const part of answerTo(messages, most, asking.signal)) {
      if (part.text) line.append(part.text);
      if (part.usage) facts = describe(part.usage, (performance.now() - began) / 1000);
      $("talk").scrollTop = $("talk").scrollHeight;
    }
    setAsking(false, `The answer has ended: ${facts || "done"}.`);
  } catch (error) {
    const stopped = asking.signal.aborted;
    if (!stopped) line.classList.add("error");
    if (!stopped && !line.textContent) line.textContent = error.message;
    setAsking(false, stopped ? "You stopped the answer." : `There is no answer: ${error.message}`);
  }
  const answer = line.classList.contains("error") ? "" : line.textContent;
  if (answer) messages.push({ role: "assistant", content: answer }); else messages.pop();
}

function describe(usage, seconds) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0, away = usage.kvtide?.retractions ?? 0;
  return [
    `${plural(usage.completion_tokens, "token")} in ${seconds.toFixed(1)} s`,
    `${number(cached)} of ${plural(usage.prompt_tokens, "prompt token")} reused`,
    ...(away ? [`retracted ${plural(away, "time")}`] : []),
  ].join(", ");
}

function setAsking(busy, text) {
  if (!busy) asking = null;
  $("send").disabled = busy;
  $("stop").disabled = !busy;
  $("clear").disabled = busy || !messages.length;
  write("ask-state", text);
}

function send(event) {
  event.preventDefault();
  const prompt = $("prompt").value;
  if (asking || !prompt.trim() || !$("ask-form").reportValidity()) return;
  $("prompt").value = "";
  ask(prompt, $("most").valueAsNumber);
}

function clear() {
  messages.length = 0;
  $("talk").replaceChildren();
  $("talk").hidden = true;
  setAsking(false, "");
  $("prompt").focus();
}

// ---- the beginning ---------------------------------------------------------------------------

function tell(kind, text) {
  $("connection").dataset.kind = kind;
  write("connection", text);
}

function showSubject(text) {
  write("subject", text);
  document.title = `${text} · kvtide`;
}

function askForKey() {
  $("unlock").hidden = false;
  $("key").focus();
  return new Promise((resume) => {
    $("unlock").onsubmit = (event) => {
      event.preventDefault();
      apiKey = $("key").value;
      $("key").value = "";
      $("unlock").hidden = true;
      resume();
    };
  });
}

function begin() {
  const record = JSON.parse($("record").textContent || "null");
  $("play").addEventListener("click", () => { if (player) { play(); draw(); } });
  $("moment").addEventListener("input", () => {
    if (!player) return;
    player.follows = isPlaying = false;
    player.seek($("moment").valueAsNumber);
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  new ResizeObserver(draw).observe($("pool").parentElement);
  if (record) return beginRecord(record);
  isLive = true;
  setInterval(draw, 1000);  // the present goes on while nothing is told
  $("ask-form").addEventListener("submit", send);
  $("prompt").addEventListener("keydown", (event) => { if (event.key === "Enter" && event.ctrlKey) send(event); });
  $("stop").addEventListener("click", () => asking?.abort());
  $("clear").addEventListener("click", clear);
  return listen(take, tell, showSubject, askForKey);
}

function beginRecord({ title, events }) {
  $("ask").hidden = true;
  showSubject(title);
  events.forEach(take);
  tell("good", player ? "recording" : "nothing was recorded");
  if (!player) return;
  player.pause();
  player.seek(player.busiest);
  draw();
}

begin();
