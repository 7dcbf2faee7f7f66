// A line for each request; when they do not fit, many of them in a line of pixels.
let laneHeight = 20,
  boxHeight = 200;
const HEIGHTS = [.34, .86, .62, .2, .34]; // of a lane, by phase: a shape beside the colour

function laneRoom() { return Math.round(clamp(window.innerHeight * 0.6, 220 * UNIT, 1100 * UNIT)); }

function placeLanes() {
  const room = laneRoom(),
    fits = chosen.length * px(20) <= room;
  el("densities").hidden = fits;
  const dense = view.dense && !fits;
  laneHeight = dense ? room / chosen.length : px(20);
  boxHeight = Math.max(Math.min(Math.ceil(laneHeight * chosen.length), room), px(20));
  el("lanes").style.height = boxHeight + 2 + "px";
  el("lanes-inner").style.height = Math.max(Math.ceil(laneHeight * chosen.length), boxHeight) +
  "px";
  el("all-lanes").setAttribute("aria-pressed", view.dense);
  el("each-lane").setAttribute("aria-pressed", !view.dense);
  const each = Math.ceil(chosen.length / boxHeight - 1e-9);
  el("lanes-note").textContent = !M ? "No request came." : [
    chosen.length === M ? plural(M, "request") :
    `${whole(chosen.length)} of ${plural(M, "request")}` + (matching < M ? " with this name" :
    "") + (chosen.length < matching ? ", those in view" : ""),
    dense && each > 1 ?
    `up to ${whole(each)} in a line of pixels: their colours are mixed, but one preempted request colours all of it` :
    dense ? "drag to zoom, which leaves out those that are not in view" : "",
  ].filter(Boolean).join("; ") + ".";
}

function drawLanes() {
  const canvas = el("lanes-canvas"),
    top = el("lanes").scrollTop,
    dense = laneHeight < px(12);
  canvas.style.width = WIDTH + "px";
  const g = chart("lanes-canvas", boxHeight, own => laneHeight < 2 ? mixLanes(own) : paintLanes(own,
    top), [top, laneHeight, chosen.length, el("sort").value, el("filter").value].join());
  if (view.lane !== null && placeOf.has(view.lane)) {
    const y = placeOf.get(view.lane) * laneHeight - top,
      room = dense ? 2.5 : -1; // around a thin line, inside a high one
    g.strokeStyle = COLOURS.accent;
    g.lineWidth = px(1.5);
    const left = dense ? GUTTER - 3 : 1;
    g.strokeRect(left, y - room, WIDTH - RIGHT + px(4) - left, laneHeight + 2 * room);
    if (dense) label(g, view.lane, clamp(y + laneHeight / 2, px(8), boxHeight - px(8)), true);
  }
  marks(g, boxHeight);
  const r = surface(el("lanes-ruler"), px(RULER));
  ruler(r, px(2));
}

function label(g, i, y, plate) {
  let text = lanes.ids[i];
  const room = GUTTER - 10;
  if (g.measureText(text).width > room) {
    let keep = text.length;
    while (keep > 2 && g.measureText(text.slice(0, keep >> 1) + "…" + text.slice(-(keep >> 1)))
      .width > room) keep--;
    text = text.slice(0, Math.max(keep >> 1, 1)) + "…" + text.slice(-Math.max(keep >> 1, 1));
  }
  if (plate) { g.fillStyle = COLOURS.back;
    g.fillRect(2, y - px(8), GUTTER - 6, px(16)); }
  g.fillStyle = COLOURS.ink;
  g.textAlign = "right";
  g.textBaseline = "middle";
  g.fillText(text, GUTTER - 6, y);
}

function paintLanes(g, top) {
  const labelled = laneHeight >= px(12),
    first = Math.max(Math.floor(top / laneHeight), 0);
  if (!labelled) {
    g.fillStyle = COLOURS.soft;
    g.textAlign = "right";
    g.textBaseline = "top";
    g.fillText("first", GUTTER - 6, 2);
    g.textBaseline = "bottom";
    g.fillText(whole(chosen.length), GUTTER - 6, boxHeight - 2);
  }
  for (let place = first; place < chosen.length && place * laneHeight - top < boxHeight; place++) {
    const i = chosen[place],
      y = place * laneHeight - top;
    if (labelled) {
      label(g, i, y + laneHeight / 2, false);
      g.fillStyle = COLOURS.line;
      g.globalAlpha = .5;
      g.fillRect(GUTTER, y + laneHeight - 1, plotWidth(), 1);
      g.globalAlpha = 1;
    }
    g.save();
    g.beginPath();
    g.rect(GUTTER, y, plotWidth(), laneHeight);
    g.clip();
    paintLane(g, i, y, labelled);
    g.restore();
  }
}

function paintLane(g, i, y, shaped) {
  const segments = lanes.segments[i];
  for (let at = 0; at < segments.length; at += 2) {
    const phase = segments[at + 1],
      end = at + 2 < segments.length ? segments[at + 2] : Math.max(N, 1);
    if (phase === GONE || end <= view.from || segments[at] >= view.to) continue;
    const x = step2x(Math.max(segments[at], view.from)),
      w = Math.max(step2x(Math.min(end, view.to)) - x, 1);
    const h = phase === PREEMPTED && !shaped ? laneHeight : Math.max(laneHeight * HEIGHTS[phase],
    1);
    g.fillStyle = COLOURS[PHASES[phase]];
    g.fillRect(x, y + (laneHeight - h) / 2, w, h);
    if (phase === PREEMPTED) g.fillRect(x, y, Math.min(Math.max(px(2), 1), w + 1), laneHeight);
  }
  if (!shaped) return;
  g.fillStyle = COLOURS.ink;
  if (lanes.first[i] >= 0) { // the first token
    const x = step2x(lanes.first[i]),
      r = px(3);
    g.beginPath();
    g.moveTo(x - r, y + 1);
    g.lineTo(x + r, y + 1);
    g.lineTo(x, y + 1 + r * 1.3);
    g.fill();
  }
  const x = step2x(stopOf(i)),
    middle = y + laneHeight / 2,
    r = px(3.5);
  g.lineWidth = px(1.6);
  g.strokeStyle = lanes.ended[i] < 0 ? COLOURS.ink : COLOURS.bad;
  g.beginPath();
  if (lanes.ended[i] < 0) { g.moveTo(x - r * 2, middle - r);
    g.lineTo(x - r, middle);
    g.lineTo(x - r * 2, middle + r);
    g.stroke(); } else if (!["stop", "length"].includes(lanes.reasons[i])) {
    g.moveTo(x - r, middle - r);
    g.lineTo(x + r, middle + r);
    g.moveTo(x - r, middle + r);
    g.lineTo(x + r, middle - r);
    g.stroke();
  }
}

function rgb(colour) { return [1, 3, 5].map(at => parseInt(colour.slice(at, at + 2), 16)); }

function mixLanes(g) {
  const width = plotWidth(),
    height = boxHeight,
    size = width * height,
    weights = PHASES.map(() => new Float32Array(size));
  for (let place = 0; place < chosen.length; place++) {
    const segments = lanes.segments[chosen[place]],
      row = Math.min(Math.floor(place * laneHeight), height - 1) * width;
    for (let at = 0; at < segments.length; at += 2) {
      const phase = segments[at + 1],
        end = at + 2 < segments.length ? segments[at + 2] : Math.max(N, 1);
      if (phase === GONE || end <= view.from || segments[at] >= view.to) continue;
      const x = step2x(Math.max(segments[at], view.from)) - GUTTER,
        stop = step2x(Math.min(end, view.to)) - GUTTER;
      const a = clamp(Math.floor(x), 0, width - 1),
        b = clamp(Math.ceil(stop), a + 1, width),
        list = weights[phase];
      for (let p = a; p < b; p++) list[row + p] += Math.min(p + 1, Math.max(stop, a + .2)) - Math
        .max(p, x);
    }
  }
  const image = document.createElement("canvas");
  image.width = width;
  image.height = height;
  const own = image.getContext("2d"),
    pixels = own.createImageData(width, height),
    colours = PHASES.map(name => rgb(COLOURS[name]));
  const perRow = chosen.length / height;
  for (let p = 0; p < size; p++) {
    let total = 0,
      r = 0,
      gr = 0,
      b = 0;
    for (let phase = 0; phase < PHASES.length; phase++) {
      const weight = weights[phase][p];
      if (!weight) continue;
      total += weight;
      r += weight * colours[phase][0];
      gr += weight * colours[phase][1];
      b += weight * colours[phase][2];
    }
    if (!total) continue;
    const away = weights[PREEMPTED][p] > 0,
      [pr, pg, pb] = colours[PREEMPTED],
      to = pixels.data;
    to[4 * p] = away ? pr : r / total;
    to[4 * p + 1] = away ? pg : gr / total;
    to[4 * p + 2] = away ? pb : b / total;
    to[4 * p + 3] = away ? 255 : 70 + 185 * Math.min(total / perRow, 1);
  }
  own.putImageData(pixels, 0, 0);
  g.drawImage(image, GUTTER, 0);
  g.fillStyle = COLOURS.soft;
  g.textAlign = "right";
  g.textBaseline = "top";
  g.fillText("first", GUTTER - 6, 2);
  g.textBaseline = "bottom";
  g.fillText(whole(chosen.length), GUTTER - 6, boxHeight - 2);
}

function lanesAt(y) { // the places of the lanes at a height of the box
  const at = (y + el("lanes").scrollTop) / laneHeight,
    first = Math.floor(at),
    last = Math.floor((y + 1 + el("lanes").scrollTop) / laneHeight - 1e-9);
  return laneHeight >= 1 ? chosen.slice(first, first + 1) : chosen.slice(first, Math.max(last,
    first) + 1);
}

function describeLanes(found, step) {
  if (!found.length) return "";
  if (found.length === 1) {
    const i = found[0],
      now = phaseAt(i, step);
    const doing = now ?
      `${PHASES[now.phase]} for ${plural(now.end - now.start, "step")}, ${between(now.start, now.end)}` :
      step < lanes.arrived[i] ? "not there yet" : `ended: ${lanes.reasons[i]}`;
    return `${lanes.ids[i]}\nstep ${whole(step)}: ${doing}`;
  }
  const counts = PHASES.map((_, phase) => found.filter(i => phaseAt(i, step)?.phase === phase)
    .length);
  return `${lanes.ids[found[0]]} and ${plural(found.length - 1, "other")}\nstep ${whole(step)}: ` +
    (PHASES.map((name, phase) => counts[phase] ? `${counts[phase]} ${name}` : "").filter(Boolean)
      .join(", ") || "none is there");
}

function showLane(i) { // scroll to it
  if (!placeOf.has(i)) return;
  const box = el("lanes"),
    y = placeOf.get(i) * laneHeight;
  if (y < box.scrollTop) box.scrollTop = y - laneHeight;
  else if (y + laneHeight > box.scrollTop + boxHeight) box.scrollTop = y + 2 * laneHeight -
    boxHeight;
}
