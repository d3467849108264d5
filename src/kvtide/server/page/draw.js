// Pictures on canvases. All text about them is outside: in captions, labels and the table.

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The colour of a request: neighbouring numbers are far apart on the circle of hues.
const hue = (number) => ((number * 137.508) % 360).toFixed(1);
const colour = (number) => `oklch(${css("--shade")} ${hue(number)})`;

// A canvas whose unit is a CSS pixel, cleared; null while it has no size.
function cleared(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const scale = window.devicePixelRatio || 1;
  if (width < 1 || height < 1) return null;
  const [across, down] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== across || canvas.height !== down) [canvas.width, canvas.height] = [across, down];
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

// How squares for `pageCount` pages fill a width: at most so high, and each two pixels at least.
// Where there are more pages than such squares, a square stands for several pages, by its first.
function grid(pageCount, width, most = 300) {
  const columnsOf = (side) => Math.max(1, Math.floor(width / side));
  const fits = (side) => columnsOf(side) * Math.floor(most / side);
  let side = 34;
  while (side > 2 && fits(side) < pageCount) side -= 1;
  const columns = columnsOf(side), pages = Math.ceil(pageCount / fits(side));
  return { side, columns, pages, rows: Math.ceil(pageCount / pages / columns) };
}

function drawPool(canvas, state, chosen) {
  const { width: wide } = canvas.parentElement.getBoundingClientRect();
  const inner = canvas.clientWidth || wide;
  const { side, columns, pages, rows } = grid(state.holders.length, inner);
  canvas.style.height = `${rows * side}px`;
  const area = cleared(canvas);
  if (!area) return pages;
  const { pen } = area;
  const gap = side > 8 ? 2 : side > 3 ? 1 : 0;
  const paints = { free: css("--free"), edge: css("--edge"), ink: css("--ink"), card: css("--card"), text: css("--on-shade") };
  const colours = new Map();
  pen.font = `600 ${Math.round(side * 0.46)}px system-ui, sans-serif`;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (let square = 0; square * pages < state.holders.length; square++) {
    const holder = state.holders[square * pages];
    const x = (square % columns) * side, y = Math.floor(square / columns) * side, size = side - gap;
    if (holder > 0 && !colours.has(holder)) colours.set(holder, colour(holder));
    pen.globalAlpha = chosen && holder !== chosen && holder !== FREE ? 0.25 : 1;
    drawSquare(pen, x, y, size, holder, colours.get(holder), paints);
    const begins = holder !== state.holders[(square - 1) * pages] || square % columns === 0;
    if (holder > 0 && side >= 16 && begins) {
      pen.fillStyle = paints.text;
      pen.fillText(holder < 1000 ? holder : `…${holder % 100}`, x + size / 2, y + size / 2 + 0.5, size - 2);
    }
  }
  pen.globalAlpha = 1;
  return pages;
}

function drawSquare(pen, x, y, size, holder, own, paints) {
  pen.fillStyle = holder > 0 ? own : paints.free;
  if (holder === KEPT && size >= 6) {
    pen.strokeStyle = paints.edge;
    pen.lineWidth = 2;
    pen.strokeRect(x + 1, y + 1, size - 2, size - 2);
  } else if (holder < KEPT && size >= 6) {
    stripes(pen, x, y, size, paints);
  } else {
    if (holder < 0) pen.fillStyle = holder === KEPT ? paints.edge : paints.ink;
    pen.fillRect(x, y, size, size);
  }
}

function stripes(pen, x, y, size, { ink, card }) {
  pen.save();
  pen.beginPath();
  pen.rect(x, y, size, size);
  pen.clip();
  pen.fillStyle = card;
  pen.fillRect(x, y, size, size);
  pen.strokeStyle = ink;
  pen.lineWidth = 2.5;
  pen.beginPath();
  for (let offset = -size; offset < size; offset += 6) {
    pen.moveTo(x + offset, y + size);
    pen.lineTo(x + offset + size, y);
  }
  pen.stroke();
  pen.lineWidth = 1;
  pen.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
  pen.restore();
}

// One strip of what goes on over time; `across` gives the place of a time in seconds.
function drawStrip(canvas, from, to, at, paint) {
  const area = cleared(canvas);
  if (!area) return;
  const { pen, width, height } = area;
  const across = (t) => ((t - from) / Math.max(to - from, 1e-9)) * width;
  pen.strokeStyle = css("--line");
  pen.lineWidth = 1;
  pen.strokeRect(0.5, 0.5, width - 1, height - 1);
  paint(pen, across, width, height);
  if (at < to) {
    pen.fillStyle = css("--ink");
    pen.fillRect(Math.min(width - 1, across(at)), 0, 1, height);
  }
}

function drawLine(pen, points, across, height, value, { stroke, fill, dash = [], width = 2 }) {
  const down = (point) => height - 2 - value(point) * (height - 6);
  pen.beginPath();
  points.forEach((point, number) => pen[number ? "lineTo" : "moveTo"](across(point.t), down(point)));
  pen.setLineDash(dash);
  pen.strokeStyle = stroke;
  pen.lineWidth = width;
  pen.stroke();
  pen.setLineDash([]);
  if (!fill) return;
  pen.lineTo(across(points.at(-1).t), height);
  pen.lineTo(across(points[0].t), height);
  pen.globalAlpha = 0.18;
  pen.fillStyle = fill;
  pen.fill();
  pen.globalAlpha = 1;
}

// At most two points for each pixel, so that a long recording is drawn as fast as a short one.
function thinned(points, width) {
  const step = Math.ceil(points.length / Math.max(1, 2 * width));
  return step < 2 ? points : points.filter((_, number) => number % step === 0 || number === points.length - 1);
}

function drawRates(canvas, player, from, to, at) {
  const points = thinned(player.points, canvas.clientWidth);
  const top = points.reduce((most, { rate }) => Math.max(most, rate), 1);
  drawStrip(canvas, from, to, at, (pen, across, _, height) => {
    const accent = css("--accent");
    drawLine(pen, points, across, height, ({ rate }) => rate / top, { stroke: accent, fill: accent });
  });
  return top;
}

function drawFills(canvas, player, from, to, at) {
  const points = thinned(player.points, canvas.clientWidth);
  drawStrip(canvas, from, to, at, (pen, across, _, height) => {
    const accent = css("--accent");
    if (player.tail.values.disk_limit_bytes) {
      drawLine(pen, points, across, height, ({ disk }) => disk, { stroke: css("--soft"), dash: [2, 3] });
    }
    drawLine(pen, points, across, height, ({ host }) => host, { stroke: css("--ink"), dash: [7, 4] });
    drawLine(pen, points, across, height, ({ pool }) => pool, { stroke: accent, fill: accent });
  });
}

function drawLanes(canvas, player, from, to, at) {
  const { spans, ticks, count } = player.lanes;
  drawStrip(canvas, from, to, at, (pen, across, _, height) => {
    const step = Math.min(18, (height - 4) / Math.max(1, count));
    const colours = new Map();
    for (const { number, lane, from: begin, to: end, away } of spans) {
      if (!colours.has(number)) colours.set(number, colour(number));
      const thick = away ? Math.max(1, step * 0.14) : Math.max(1, step * 0.72);
      pen.fillStyle = colours.get(number);
      const left = across(begin), right = Math.max(across(end), left + 1);
      pen.fillRect(left, 2 + lane * step + (step - thick) / 2, right - left, thick);
    }
    pen.fillStyle = css("--ink");
    for (const { t, lane } of ticks) pen.fillRect(across(t) - 1, 2 + lane * step, 2, Math.max(2, step));
  });
}
