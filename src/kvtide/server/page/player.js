// The events of a recording, and what was so at any moment of it. kvtide/server/events.py says what
// an event is: the first one has everything, a later one what changed.

const FREE = 0, KEPT = -1;

// What is so after some events.
class State {
  constructor(pageCount) {
    this.values = { running: [], retracted: [] };
    this.holders = new Int32Array(pageCount);
    this.counts = new Map();  // holder → pages
  }

  copy() {
    const other = new State(0);
    Object.assign(other.values, this.values);
    other.holders = this.holders.slice();
    other.counts = new Map(this.counts);
    return other;
  }

  apply(event) {
    Object.assign(this.values, event);
    for (const [first, count, holder] of event.pages ?? []) {
      for (let page = first; page < first + count; page++) {
        this.#count(this.holders[page], -1);
        this.#count(holder, 1);
        this.holders[page] = holder;
      }
    }
  }

  pagesOf(holder) { return this.counts.get(holder) ?? 0; }

  // Pages that requests hold; KEPT ones can be had at any time.
  get used() {
    let used = 0;
    for (const [holder, count] of this.counts) if (holder !== KEPT) used += count;
    return used;
  }

  get shared() {
    let shared = 0;
    for (const [holder, count] of this.counts) if (holder < KEPT) shared += count;
    return shared;
  }

  #count(holder, change) {
    if (holder === FREE) return;
    const count = this.pagesOf(holder) + change;
    if (count) this.counts.set(holder, count); else this.counts.delete(holder);
  }
}

const share = (part, whole) => (whole ? Math.min(1, part / whole) : 0);

// All events so far, and a moment among them that is looked at: the last one while `follows`.
class Player {
  static WINDOW_S = 5;   // over which tokens a second are counted
  static MOST = 7000;    // events that are kept
  static CUT = 1000;

  // `rests` says that nothing is told while nothing happens; otherwise events are merged over time.
  constructor(first, rests = false) {
    this.rests = rests;
    this.base = new State(first.page_count);  // before the first event that is kept
    this.tail = this.base.copy();
    this.view = this.tail;
    this.events = [];
    this.points = [];    // what the strips draw, one for each event
    this.lanes = new Lanes();
    this.at = -1;
    this.follows = true;
    this.add(first);
  }

  get end() { return this.points.at(-1).t; }
  get begin() { return this.points[0].t; }

  add(event) {
    if (this.rests && this.events.length && event.t > this.end + 2 * Player.WINDOW_S) {
      this.add({ t: this.end + Player.WINDOW_S });
    }
    this.events.push(event);
    this.tail.apply(event);
    const { values } = this.tail;
    this.points.push({
      t: event.t,
      tokens: values.new_tokens,
      away: values.retracted_count,
      pool: share(this.tail.used, values.page_count),
      host: share(values.host_bytes, values.host_limit_bytes),
      disk: share(values.disk_bytes, values.disk_limit_bytes),
    });
    this.points.at(-1).rate = this.rateAt(this.points.length - 1, event.t);
    this.lanes.add(event, values);
    if (this.events.length > Player.MOST) this.#forget(Player.CUT);
    if (this.follows) this.at = this.events.length - 1;
  }

  // Tokens a second in the seconds before `now`, as far as is known at event number `last`.
  rateAt(last, now) {
    let first = last;
    while (first > 0 && this.points[first].t > now - Player.WINDOW_S) first -= 1;
    const seconds = now - this.points[first].t;
    return seconds > 0 ? (this.points[last].tokens - this.points[first].tokens) / seconds : 0;
  }

  // The event at which most happens: the most requests are retracted, or the pool is fullest.
  get busiest() {
    const rank = ({ away, pool }) => away + pool / 2;
    return this.points.reduce((best, point, at) => (rank(point) > rank(this.points[best]) ? at : best), 0);
  }

  seek(number) {
    const { length } = this.events;
    const target = Math.max(0, Math.min(length - 1, number));
    if (target < this.at || this.view === this.tail) {
      this.view = this.base.copy();
      this.at = -1;
    }
    while (this.at < target) this.view.apply(this.events[++this.at]);
  }

  follow() {
    this.follows = true;
    this.view = this.tail;
    this.at = this.events.length - 1;
  }

  pause() {
    this.follows = false;
    this.seek(this.at);
  }

  #forget(count) {
    for (const event of this.events.splice(0, count)) this.base.apply(event);
    this.points.splice(0, count);
    this.lanes.forget(this.begin);
    if (this.follows) return;
    this.at = Math.max(-1, this.at - count);
    if (this.at < 0) this.seek(0);
  }
}

// When each request ran and when it was retracted. A lane is free again when its request has ended.
class Lanes {
  constructor() {
    this.spans = [];       // {number, lane, from, to, away}; `to` grows while it goes on
    this.ticks = [];       // {t, lane}: a request gave its pages up
    this.live = new Map(); // number → {span, retractions}
    this.free = [];
    this.count = 0;
  }

  add(event, values) {
    if (event.running || event.retracted) {
      const here = new Set();
      const places = [...values.running.map((row) => [row, false]), ...values.retracted.map((row) => [row, true])];
      for (const [[number, retractions], away] of places) {
        here.add(number);
        this.#note(event.t, number, retractions, away);
      }
      for (const [number, { span }] of this.live) if (!here.has(number)) this.#end(number, span, event.t);
    }
    for (const { span } of this.live.values()) span.to = event.t;
  }

  forget(before) {
    this.spans = this.spans.filter((span) => span.to >= before);
    this.ticks = this.ticks.filter((tick) => tick.t >= before);
  }

  #note(t, number, retractions, away) {
    const known = this.live.get(number);
    if (known?.span.away !== away) {
      const lane = known ? known.span.lane : this.#lane();
      if (known) known.span.to = t;
      const span = { number, lane, from: t, to: t, away };
      this.spans.push(span);
      this.live.set(number, { span, retractions });
    }
    if (known && retractions > known.retractions) {
      this.ticks.push({ t, lane: known.span.lane });
      this.live.get(number).retractions = retractions;
    }
  }

  #lane() {
    if (!this.free.length) return this.count++;
    return this.free.splice(this.free.indexOf(Math.min(...this.free)), 1)[0];
  }

  #end(number, span, t) {
    span.to = t;
    this.free.push(span.lane);
    this.live.delete(number);
  }
}
