// What steps did, and what pages were.
const COUNTED = { queued: S.queued, prefill: S.prefilling, decode: S.decoding, stalled: S.stalled,
  preempted: S.away };
const most = list => list.reduce((m, v) => v > m ? v : m, 0);
const mostRequests = Math.max(1, most(S.running.map((v, i) => v + S.waiting[i])));
const mostPages = Math.max(1, most(S.live.map((v, i) => v + S.shared[i] + S.cached[i])));
const slowFrom = figures.slow_from,
  slowest = most(S.ms);
const slow = figures.slow;

function stacked(g, top, height, total,
layers) { // layers from the bottom: [list, colour]; of a pixel's steps, the one with most
  const sum = S.at.map((_, s) => layers.reduce((n, [list]) => n + list[s], 0)),
    best = new Int32Array(plotWidth()).fill(-1);
  eachStep((s, x, end) => {
    const stop = Math.min(Math.max(Math.ceil(end - GUTTER), Math.floor(x - GUTTER) + 1), best
      .length);
    for (let p = Math.max(Math.floor(x - GUTTER), 0); p < stop; p++)
      if (best[p] < 0 || sum[s] > sum[best[p]]) best[p] = s;
  });
  best.forEach((s, p) => {
    let y = top + height;
    if (s < 0) return;
    for (const [list, colour] of layers) {
      const h = height * list[s] / total;
      if (h <= 0) continue;
      y -= h;
      g.fillStyle = colour;
      g.fillRect(GUTTER + p, y, 1, h + .3);
    }
  });
}

function drawPhases() {
  const height = px(84),
    g = chart("phases", height + px(12), own => {
      axis(own, 0, height, mostRequests);
      stacked(own, 0, height, mostRequests, ["decode", "stalled", "prefill", "preempted",
        "queued"].map(name => [COUNTED[name], COLOURS[name]]));
      own.fillStyle = COLOURS.preempted;
      eachStep((s, x, end) => { if (S.evicted[s]) own.fillRect(x, height + px(3), Math.max(end -
          x, px(2)), px(7)); });
    });
  marks(g, height);
}

function drawWork() {
  const height = px(64);
  for (const [id, list, colour] of [
      ["prompt", S.prefill, "prefill"],
      ["decode", S.decode, "decode"]
    ]) {
    const top = Math.max(most(list), 1);
    marks(chart(id, height + px(4), own => { axis(own, 0, height, top);
      bars(own, 0, height, list, top, COLOURS[colour]); }), height);
  }
}

function drawLengths() {
  const height = px(72),
    head = px(12),
    top = Math.max(slowFrom ?? 1, 1e-6),
    g = chart("ms", head + height + px(RULER + 4), own => {
      axis(own, head, height, top, " ms");
      bars(own, head, height, S.ms, top, COLOURS.bar);
      own.fillStyle = COLOURS.bad;
      let last = -9;
      for (const s of slow) { // cut off at the top, with a mark over each
        if (s + 1 <= view.from || s >= view.to) continue;
        const x = Math.round((step2x(s) + step2x(s + 1)) / 2),
          r = px(4);
        if (x - last < 2) continue;
        own.beginPath();
        own.moveTo(x - r, head - 2);
        own.lineTo(x + r, head - 2);
        own.lineTo(x, head - 2 - r * 1.6);
        own.fill();
        own.fillRect(x - 1, head, 2, px(6));
        last = x;
      }
      ruler(own, head + height + px(2));
    });
  marks(g, head + height);
}

function describeCharts() {
  const end = figures.steps >= 100 ? "p99" : "the longest step but one";
  el("phases-note").textContent =
    `(at most ${whole(mostRequests)} at once${most(S.evicted) ? "; marks below: a preemption" : ""})`;
  el("ms-note").textContent = !N || slowFrom === null ? "Milliseconds until the next step" :
    "Milliseconds until the next step. " + (slow.length ?
      `The axis ends at ${end}, ${number(slowFrom)} ms; ▲ ${plural(slow.length, "step")} took ` +
      `longer, at most ${number(slowest)} ms (step ${whole(figures.slowest)}).` :
      `No step took longer than ${number(slowFrom)} ms.`);
  el("slow").hidden = !slow.length;
  const pool = data.limits.pages;
  el("counts-note").textContent =
    `Pages in use by what they are. The axis ends at the most in use, ${whole(mostPages)} of ` +
    `${whole(pool)} (${(100 * mostPages / pool).toFixed(mostPages * 100 < pool ? 2 : 0)} %).`;
  el("map-note").textContent = !data.map.rows ? "" :
    "The page map, page 1 at the bottom, up to the highest page that was used" +
    (data.map.pages > 1 ?
      `; a row stands for ${whole(data.map.pages)} pages and shows what most of them are.` :
      "; a row is a page.");
}

function drawCounts() {
  const height = px(92);
  marks(chart("counts", height + px(4), own => {
    axis(own, 0, height, mostPages);
    stacked(own, 0, height, mostPages, ["shared", "live", "cached"].map(kind => [S[kind],
      COLOURS[kind]
    ]));
  }), height);
}
const bits = Uint8Array.from(atob(data.map.kinds), c => c.charCodeAt(0));
const kindAt = i => bits[i >> 2] >> (i & 3) * 2 & 3;
let mapImage = null,
  mapEpoch = -1;

function makeMap() {
  const rows = data.map.rows,
    columns = mapSteps.length;
  mapImage = document.createElement("canvas");
  mapImage.width = columns;
  mapImage.height = rows;
  mapEpoch = epoch;
  const g = mapImage.getContext("2d"),
    image = g.createImageData(columns, rows),
    colours = KINDS.map(kind => rgb(COLOURS[kind]));
  for (let c = 0; c < columns; c++)
    for (let r = 0; r < rows; r++) {
      const [red, green, blue] = colours[kindAt(c * rows + r)], at = 4 * ((rows - 1 - r) * columns +
        c), to = image.data;
      to[at] = red;
      to[at + 1] = green;
      to[at + 2] = blue;
      to[at + 3] = 255;
    }
  g.putImageData(image, 0, 0);
}

function drawMap() {
  const rows = data.map.rows,
    columns = mapSteps.length,
    height = Math.round(clamp(rows * 4, 120, 384) * UNIT);
  if (!rows || !columns) { surface(el("map"), 1); return; }
  if (mapEpoch !== epoch) makeMap();
  marks(chart("map", height + px(RULER + 4), own => {
    const stride = columns > 1 ? mapSteps[1] - mapSteps[0] : 1;
    own.imageSmoothingEnabled = false;
    own.save();
    own.beginPath();
    own.rect(GUTTER, 0, plotWidth(), height);
    own.clip();
    for (let c = 0; c < columns; c++) {
      const end = Math.min(mapSteps[c] + stride, N);
      if (end <= view.from || mapSteps[c] >= view.to) continue;
      const x = step2x(mapSteps[c]),
        w = step2x(end) - x;
      own.drawImage(mapImage, c, 0, 1, rows, x, 0, Math.max(w, 1) + .5, height);
    }
    own.restore();
    own.fillStyle = COLOURS.soft;
    own.textAlign = "right";
    own.textBaseline = "top";
    own.fillText(whole(Math.min(rows * data.map.pages, data.limits.pages)), GUTTER - 6, 0);
    own.textBaseline = "bottom";
    own.fillText("page 1", GUTTER - 6, height);
    ruler(own, height + px(2));
  }), height);
}
