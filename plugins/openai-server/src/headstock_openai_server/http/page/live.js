// The live view: asks for /live twice a second while it is shown, and draws what came.

const POLL_SECONDS = 0.5;
const LANE_SECONDS = 60;
const CHART_SECONDS = 120;
const LANE_HEIGHT = 7;
const PAGE_COLOURS = ["--free", "--cached", "--one", "--shared"];

const history = []; // of polls: the time, counts, and rates since the one before
const lanes = new Map(); // id -> { first, last, changes: [[time, state]] }

function stateOf(lane) {
  return lane.computed < lane.prompt ? "prefill" : "decode";
}

function noteLanes(view, now) {
  const seen = [
    ...view.waiting.map((lane) => [lane.id, "waiting"]),
    ...view.running.map((lane) => [lane.id, stateOf(lane)]),
  ];
  for (const [id, state] of seen) {
    let lane = lanes.get(id);
    if (!lane) lanes.set(id, (lane = { first: now, last: now, changes: [] }));
    lane.last = now;
    if (lane.changes.at(-1)?.[1] !== state) lane.changes.push([now, state]);
  }
  for (const [id, lane] of lanes) if (now - lane.last > LANE_SECONDS) lanes.delete(id);
}

function noteRates(view, now) {
  const before = history.at(-1);
  const point = { now, view, rates: {} };
  if (before) {
    const seconds = now - before.now;
    const rise = (name) => view.counts[name] - before.view.counts[name];
    const mean = (name) => {
      const [count, sum] = [0, 1].map((i) => view.times[name][i] - before.view.times[name][i]);
      return count > 0 ? sum / count : null;
    };
    point.rates = {
      "Output tokens/s": rise("output_tokens") / seconds,
      "Steps/s": rise("executed_steps") / seconds,
      "First token, ms": scale(mean("first_token")),
      "Between tokens, ms": scale(mean("token_gap")),
    };
  }
  history.push(point);
  while (now - history[0].now > CHART_SECONDS) history.shift();
}

function scale(seconds) {
  return seconds === null ? null : 1000 * seconds;
}

function showTiles(view) {
  const rates = history.at(-1).rates;
  const pages = view.counts.total_pages;
  const held = pages - view.counts.free_pages - view.counts.cached_pages;
  const replayed = view.counts.executed_steps
    ? (100 * view.counts.replayed_steps) / view.counts.executed_steps
    : 0;
  const tiles = {
    Running: view.num_running,
    Waiting: view.num_waiting,
    "Output tokens/s": number(rates["Output tokens/s"]),
    "Steps/s": number(rates["Steps/s"]),
    "First token": spell(latest("First token, ms"), " ms"),
    "Between tokens": spell(latest("Between tokens, ms"), " ms"),
    "KV pool in use": `${pages ? ((100 * held) / pages).toFixed(0) : 0} %`,
    "Steps replayed": `${replayed.toFixed(0)} %`,
    Preemptions: view.counts.preemptions,
    Failed: view.counts.failed,
  };
  element("tiles").replaceChildren(
    ...Object.entries(tiles).map(([name, value]) => {
      const tile = document.createElement("div");
      const title = document.createElement("dt");
      const text = document.createElement("dd");
      title.textContent = name;
      text.textContent = String(value ?? "–");
      tile.append(title, text);
      return tile;
    }),
  );
}

function latest(name) {
  for (let i = history.length - 1; i >= 0; i--) {
    const value = history[i].rates[name];
    if (value !== null && value !== undefined) return value;
  }
  return null;
}

function number(value) {
  return value === undefined ? "–" : value.toFixed(value < 10 ? 1 : 0);
}

function spell(value, unit) {
  return value === null ? "–" : number(value) + unit;
}

// A canvas of `height` CSS pixels, cleared, in device pixels.
function openCanvas(id, height) {
  const canvas = typeof id === "string" ? element(id) : id;
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return { context, width };
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name);
}

function drawLanes(view, now) {
  const shown = [...lanes.values()].sort((a, b) => a.first - b.first).slice(-64);
  const { context, width } = openCanvas("lanes", Math.max(60, shown.length * LANE_HEIGHT));
  const x = (time) => width * (1 - (now - time) / LANE_SECONDS);
  shown.forEach((lane, row) => {
    lane.changes.forEach(([time, state], i) => {
      const end = lane.changes[i + 1]?.[0] ?? lane.last + POLL_SECONDS;
      context.fillStyle = colour(`--${state}`);
      context.fillRect(x(time), row * LANE_HEIGHT, Math.max(1, x(end) - x(time)), LANE_HEIGHT - 2);
    });
  });
  const rest = view.num_running - view.running.length + view.num_waiting - view.waiting.length;
  element("lane-note").textContent = rest > 0 ? `and ${rest} more` : "";
}

function drawPages(view) {
  const cell = 9;
  const maps = view.page_maps;
  const { width } = openCanvas("pages", 1);
  const columns = Math.max(1, Math.floor(width / cell));
  const heights = maps.map((map) => Math.ceil(map.length / columns) * cell + 6);
  const { context } = openCanvas("pages", heights.reduce((a, b) => a + b, 0));
  const fills = PAGE_COLOURS.map(colour);
  let top = 0;
  maps.forEach((map, group) => {
    for (let i = 0; i < map.length; i++) {
      context.fillStyle = fills[Number(map[i])];
      context.fillRect((i % columns) * cell, top + Math.floor(i / columns) * cell, cell - 1, cell - 1);
    }
    top += heights[group];
  });
  const cells = maps.reduce((sum, map) => sum + map.length, 0);
  const pages = view.counts.total_pages;
  element("page-note").textContent =
    `${pages} pages of ${view.page_size} tokens` + (pages > cells ? ", several a cell" : "");
}

// Each node is as wide as its share of its parent's requests; its text is its pages.
function drawTree(view) {
  const level = 22;
  const depths = [];
  for (const node of view.tree) depths.push(node.parent < 0 ? 0 : depths[node.parent] + 1);
  const depth = Math.max(0, ...depths) + 1;
  const { context, width } = openCanvas("tree", view.tree.length ? depth * level : 20);
  const shared = view.tree.filter((node) => node.requests > 1);
  const saved = shared.reduce((sum, node) => sum + node.pages * (node.requests - 1), 0);
  element("tree-note").textContent = view.tree.length
    ? `${view.num_running} requests save ${saved * view.page_size} tokens of KV by sharing; ` +
      "a box is pages in a row, as wide as the share of requests that hold it"
    : "nothing runs";
  const roots = view.tree.filter((node) => node.parent < 0);
  const total = roots.reduce((sum, node) => sum + node.requests, 0);
  const lefts = [];
  const filled = new Map();
  context.font = "11px system-ui, sans-serif";
  view.tree.forEach((node, i) => {
    const start = node.parent < 0 ? 0 : lefts[node.parent];
    const used = filled.get(node.parent) ?? 0;
    filled.set(node.parent, used + node.requests);
    lefts[i] = start + (used / total) * width;
    const size = (node.requests / total) * width;
    context.fillStyle = colour(node.requests > 1 ? "--shared" : "--one");
    context.fillRect(lefts[i], depths[i] * level, Math.max(1, size - 1), level - 3);
    if (size > 40) {
      context.fillStyle = colour("--accent-ink");
      context.fillText(`${node.pages} × ${node.requests}`, lefts[i] + 5, depths[i] * level + 14);
    }
  });
}

function drawCharts(now) {
  for (const name of Object.keys(history.at(-1).rates)) {
    let figure = document.querySelector(`figure[data-name="${name}"]`);
    if (!figure) {
      figure = document.createElement("figure");
      figure.dataset.name = name;
      figure.append(document.createElement("figcaption"), document.createElement("canvas"));
      figure.lastChild.setAttribute("role", "img");
      element("charts").append(figure);
    }
    const points = history
      .map((point) => [point.now, point.rates[name]])
      .filter(([, value]) => value !== null && value !== undefined);
    const most = Math.max(1e-9, ...points.map(([, value]) => value));
    const range = points.length ? `, at most ${number(most)}` : "";
    figure.firstChild.textContent = `${name}: ${spell(latest(name), "")}${range}`;
    figure.lastChild.setAttribute("aria-label", figure.firstChild.textContent);
    const { context, width } = openCanvas(figure.lastChild, 70);
    context.strokeStyle = colour("--accent");
    context.lineWidth = 1.5;
    context.beginPath();
    points.forEach(([time, value], i) => {
      const x = width * (1 - (now - time) / CHART_SECONDS);
      const y = 66 - (62 * value) / most;
      if (i) context.lineTo(x, y);
      else context.moveTo(x, y);
    });
    context.stroke();
  }
}

function draw() {
  if (!history.length || element("live").hidden) return;
  const { now, view } = history.at(-1);
  showTiles(view);
  drawLanes(view, now);
  drawPages(view);
  drawTree(view);
  drawCharts(now);
}

async function poll() {
  if (!element("live").hidden && !document.hidden) {
    try {
      const view = await (await ask("/live")).json();
      const now = performance.now() / 1000;
      noteLanes(view, now);
      noteRates(view, now);
      showStatus("serving");
      draw();
    } catch (error) {
      showStatus(error.message, true);
    }
  }
  setTimeout(poll, 1000 * POLL_SECONDS);
}
