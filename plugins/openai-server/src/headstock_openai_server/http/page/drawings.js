// The drawings of the live view, each on a canvas of its own.

const LANE_SECONDS = 60;
const CHART_SECONDS = 120;
const LANE_HEIGHT = 7;
const CHART_HEIGHT = 70;
const AXIS_HEIGHT = 16;
const PAGE_COLOURS = ["--free", "--cached", "--one", "--shared"];
const CHARTS = {
  output_rate: ["Output tokens/s", 1],
  step_rate: ["Steps/s", 1],
  first_token: ["First token, ms", 1000],
  token_gap: ["Between tokens, ms", 1000],
  running: ["Running requests", 1],
  pool_usage: ["KV pool in use, %", 100],
};

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

// Vertical lines at both ends and in the middle, and the times below them.
function drawTimeAxis(context, width, height, seconds) {
  context.font = "11px system-ui, sans-serif";
  [1, 0.5, 0].forEach((share) => {
    const x = Math.min(width - 0.5, Math.max(0.5, width * (1 - share)));
    context.fillStyle = colour("--line");
    context.fillRect(x - 0.5, 0, 1, height);
    context.fillStyle = colour("--soft");
    context.textAlign = { 1: "left", 0.5: "center", 0: "right" }[share];
    context.fillText(share ? `${spellAge(share * seconds)} ago` : "now", x, height + 12);
  });
  context.textAlign = "left";
}

function spellAge(seconds) {
  return seconds % 60 ? `${seconds} s` : `${seconds / 60} min`;
}

function drawLanes(view, now) {
  const shown = [...lanes.values()].sort((a, b) => a.first - b.first).slice(-64);
  const height = Math.max(60, shown.length * LANE_HEIGHT);
  const { context, width } = openCanvas("lanes", height + AXIS_HEIGHT);
  drawTimeAxis(context, width, height, LANE_SECONDS);
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

function openChart(name) {
  let figure = document.querySelector(`figure[data-name="${name}"]`);
  if (!figure) {
    figure = document.createElement("figure");
    figure.dataset.name = name;
    figure.append(document.createElement("figcaption"), document.createElement("canvas"));
    figure.lastChild.setAttribute("role", "img");
    element("charts").append(figure);
  }
  return figure;
}

function drawCharts({ ages, ...columns }) {
  for (const [name, [title, unit]] of Object.entries(CHARTS)) {
    const values = columns[name].map((value) => (value === null ? null : unit * value));
    const known = values.filter((value) => value !== null);
    const most = Math.max(1e-9, ...known);
    const figure = openChart(name);
    const range = known.length ? `${number(known.at(-1))}, at most ${number(most)}` : "–";
    figure.firstChild.textContent = `${title}: ${range}`;
    figure.lastChild.setAttribute("aria-label", `${title}, the last two minutes: ${range}`);
    const { context, width } = openCanvas(figure.lastChild, CHART_HEIGHT + AXIS_HEIGHT);
    drawTimeAxis(context, width, CHART_HEIGHT, CHART_SECONDS);
    context.fillStyle = context.strokeStyle = colour("--accent");
    context.lineWidth = 1.5;
    context.beginPath();
    values.forEach((value, i) => {
      if (value === null) return;
      const x = width * (1 - ages[i] / CHART_SECONDS);
      const y = CHART_HEIGHT - 2 - ((CHART_HEIGHT - 6) * value) / most;
      // Seconds without a value are gaps; a value alone is a point.
      const isFirst = (values[i - 1] ?? null) === null;
      if (isFirst) context.moveTo(x, y);
      else context.lineTo(x, y);
      if (isFirst && (values[i + 1] ?? null) === null) context.fillRect(x - 2, y - 2, 4, 4);
    });
    context.stroke();
  }
}
