// The live view: asks for /live twice a second while it is shown, and draws what came.

const POLL_SECONDS = 0.5;

let latestView = null; // the latest view, and the time when it came
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

function showTiles(view) {
  const { output_rate, step_rate, first_token, token_gap } = view.history;
  const pages = view.counts.total_pages;
  const held = pages - view.counts.free_pages - view.counts.cached_pages;
  const replayed = view.counts.executed_steps
    ? (100 * view.counts.replayed_steps) / view.counts.executed_steps
    : 0;
  const tiles = {
    Running: view.num_running,
    Waiting: view.num_waiting,
    "Output tokens/s": number(latest(output_rate)),
    "Steps/s": number(latest(step_rate)),
    "First token": spellTime(latest(first_token)),
    "Between tokens": spellTime(latest(token_gap)),
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
      text.textContent = String(value);
      tile.append(title, text);
      return tile;
    }),
  );
}

function spellTime(seconds) {
  return seconds === undefined ? "–" : milliseconds(seconds);
}

// The last known value of a column of the history.
function latest(column) {
  return column.findLast((value) => value !== null);
}

function number(value) {
  return value === undefined ? "–" : value.toFixed(value < 10 && !Number.isInteger(value) ? 1 : 0);
}

function draw() {
  if (!latestView || element("live").hidden) return;
  const { now, view } = latestView;
  showTiles(view);
  drawLanes(view, now);
  drawPages(view);
  drawTree(view);
  drawCharts(view.history);
}

async function poll() {
  if (!element("live").hidden && !document.hidden) {
    try {
      const view = await (await ask("/live")).json();
      const now = performance.now() / 1000;
      noteLanes(view, now);
      latestView = { now, view };
      showStatus("serving");
      draw();
    } catch (error) {
      showStatus(error.message, true);
    }
  }
  setTimeout(poll, 1000 * POLL_SECONDS);
}
