// The page as a whole: drawing, moving about, pointer, keys, theme.
const CHARTS = ["phases", "lanes-canvas", "prompt", "decode", "ms", "counts", "map"];

let pending = false;

function redraw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => { pending = false;
    draw(); });
}

function draw() {
  drawReadout();
  drawRequest();
  drawPhases();
  drawLanes();
  drawWork();
  drawLengths();
  drawCounts();
  drawMap();
  drawTree();
  for (const [id, unit] of [
      ["by-step", "step"],
      ["by-time", "time"]
    ]) el(id).setAttribute("aria-pressed", view.unit === unit);
}

function keys(id, entries) {
  el(id).replaceChildren(...entries.map(([name, text, share]) => {
    const span = document.createElement("span"),
      i = document.createElement("i");
    i.style.background = COLOURS[name];
    i.style.height = `${share}em`;
    span.append(i, text);
    return span;
  }));
}

function refresh() { // the theme, the window or the choice of lanes changed
  measure();
  placeLanes();
  treeNow = "";
  keys("phase-keys", PHASES.map((name, at) => [name, { queued: "queued",
    prefill: "prefill, to the next token", decode: "decode",
    stalled: "stalled: a row, but no part in the step",
    preempted: "preempted, waiting for a row" } [name], HEIGHTS[at]]));
  keys("page-keys", [
    ["cached", "cached: only the prefix index keeps it", .8],
    ["live", "live: one row holds it", .8],
    ["shared", "shared: several rows hold it", .8],
    ["free", "free (in the map)", .8]
  ]);
  redraw();
}

function remember() {
  const part = `#step=${Math.floor(view.step)}${view.lane === null ? "" : `&request=${view.lane}`}`;
  try { history.replaceState(null, "", part); } catch { /* a sandboxed page has no history */ }
}

function recall() {
  const wanted = new URLSearchParams(location.hash.slice(1)),
    step = parseInt(wanted.get("step") ?? "", 10),
    lane = parseInt(wanted.get("request") ?? "", 10);
  if (step >= 0 && step < N) view.step = step;
  if (lane >= 0 && lane < M) view.lane = lane;
}

function goTo(step) {
  if (!N) return;
  view.step = clamp(Math.floor(step), 0, LAST);
  view.hover = null;
  if (view.step < view.from || view.step >= view.to) {
    const half = (view.to - view.from) / 2;
    zoom(clamp(view.step + .5 - half, 0, Math.max(N - 2 * half, 0)), Math.min(view.step + .5 + half,
      N));
  }
  remember();
  redraw();
}

function zoom(from, to) {
  view.from = clamp(from, 0, Math.max(N - 2, 0));
  view.to = clamp(to, Math.min(view.from + 2, Math.max(N, 1)), Math.max(N, 1));
  rechoose();
}

function zoomBy(factor) {
  const centre = view.step >= view.from && view.step < view.to ? view.step + .5 : (view.from + view
      .to) / 2,
    half = (view.to - view.from) / 2 * factor;
  zoom(centre - half, centre + half);
}

function zoomToLane() {
  if (view.lane === null) return;
  const start = lanes.arrived[view.lane],
    end = stopOf(view.lane),
    margin = Math.max((end - start) * .08, 2);
  zoom(start - margin, end + margin);
  goTo(start);
}

function chooseLane(i) { view.lane = i; if (i !== null) showLane(i);
  remember();
  redraw(); }

function nextLane(by) {
  if (!chosen.length) return;
  const place = view.lane !== null && placeOf.has(view.lane) ? clamp(placeOf.get(view.lane) + by, 0,
    chosen.length - 1) : by > 0 ? 0 : chosen.length - 1;
  chooseLane(chosen[place]);
}
let lastSlow = null;

function nextSlow() {
  if (!slow.length) return;
  lastSlow = lastSlow === null ? figures.slowest : slow.find(s => s > lastSlow) ?? slow[0];
  goTo(lastSlow);
}

function setDense(dense) { view.dense = dense;
  placeLanes(); if (view.lane !== null) showLane(view.lane);
  redraw(); }

function setUnit(unit) { view.unit = unit;
  redraw(); }

function rechoose() { chooseLanes(el("filter").value);
  placeLanes();
  redraw(); }

function relist() { orderLanes(el("sort").value);
  el("lanes").scrollTop = 0;
  rechoose(); }

const THEMES = ["auto", "light", "dark"];
let theme = "auto";
try { theme = THEMES.includes(localStorage.getItem("headstock-theme")) ? localStorage.getItem(
    "headstock-theme") : "auto"; } catch { /* no storage here */ }

function setTheme(name) {
  theme = name;
  document.documentElement.dataset.theme = name;
  el("theme").textContent = `Theme: ${name}`;
  try { localStorage.setItem("headstock-theme", name); } catch { /* no storage here */ }
  refresh();
}

function tip(text, e) {
  const box = el("tip");
  box.style.display = text ? "block" : "none";
  if (!text) return;
  box.textContent = text;
  box.style.left = Math.max(Math.min(e.clientX + 14, window.innerWidth - box.offsetWidth - 8), 4) +
    "px";
  box.style.top = (e.clientY + 18 + box.offsetHeight > window.innerHeight ? e.clientY - box
    .offsetHeight - 10 : e.clientY + 18) + "px";
}
for (const id of CHARTS) {
  const canvas = el(id),
    inside = e => { const box = canvas.getBoundingClientRect(); return [e.clientX - box.left, e
        .clientY - box.top
      ]; };
  const isLanes = id === "lanes-canvas";
  canvas.addEventListener("pointerdown", e => { if (e.button === 0) { const [x] = inside(e);
      view.drag = [x, x];
      canvas.setPointerCapture(e.pointerId); } });
  canvas.addEventListener("pointermove", e => {
    const [x, y] = inside(e);
    view.hover = Math.floor(x2step(x));
    if (view.drag) view.drag[1] = x;
    tip(isLanes && !view.drag ? describeLanes(lanesAt(y), view.hover) : "", e);
    redraw();
  });
  canvas.addEventListener("pointerleave", () => { view.hover = null;
    tip("");
    redraw(); });
  canvas.addEventListener("pointercancel", () => { view.drag = view.hover = null;
    redraw(); });
  canvas.addEventListener("pointerup", e => {
    if (!view.drag) return;
    const [x, y] = inside(e), [a, b] = view.drag;
    view.drag = null;
    if (Math.abs(a - b) > 6) zoom(x2step(Math.min(a, b)), x2step(Math.max(a, b)));
    else { const hover = view.hover;
      goTo(x2step(x));
      view.hover = hover; if (isLanes) { const found = lanesAt(y); if (found.length) chooseLane(
          found[0]); } }
    redraw();
  });
  canvas.addEventListener("dblclick", () => zoom(0, N));
}
el("lanes").addEventListener("scroll", redraw);
el("tree").addEventListener("pointermove", e => { const box = el("tree").getBoundingClientRect();
  tip(blockAt(e.clientX - box.left, e.clientY - box.top), e); });
el("tree").addEventListener("pointerleave", () => tip(""));
el("slider").max = Math.max(0, data.trees.steps.length - 1);
el("slider").addEventListener("input", () => goTo(data.trees.steps[+el("slider").value] ?? 0));
el("request").addEventListener("click", e => { const step = e.target.dataset?.step; if (step !==
    undefined) goTo(+step); });
const press = {
  "by-step": () => setUnit("step"),
  "by-time": () => setUnit("time"),
  busiest: () => goTo(figures.busiest),
  whole: () => zoom(0, N),
  slow: nextSlow,
  "all-lanes": () => setDense(true),
  "each-lane": () => setDense(false),
  theme: () => setTheme(THEMES[(THEMES.indexOf(theme) + 1) % 3]),
  help: () => el("keys").showModal()
};
for (const [id, act] of Object.entries(press)) el(id).addEventListener("click", act);
el("sort").addEventListener("change", relist);
el("filter").addEventListener("input", relist);

const jump = e => e.shiftKey ? Math.max(Math.round((view.to - view.from) / 10), 1) : 1;
const KEYS = {
  ArrowLeft: e => goTo(view.step - jump(e)),
  ArrowRight: e => goTo(view.step + jump(e)),
  Home: () => goTo(0),
  End: () => goTo(LAST),
  b: press.busiest,
  o: nextSlow,
  j: () => nextLane(1),
  k: () => nextLane(-1),
  "/": () => { el("filter").focus();
    el("filter").select(); },
  l: () => setDense(!view.dense),
  t: () => setUnit(view.unit === "step" ? "time" : "step"),
  d: press.theme,
  Enter: zoomToLane,
  "+": () => zoomBy(.5),
  "=": () => zoomBy(.5),
  "-": () => zoomBy(2),
  0: press.whole,
  Escape: () => chooseLane(null),
  "?": press.help,
};
document.addEventListener("keydown", e => {
  const inside = e.target.closest?.("input, select, dialog"),
    act = KEYS[e.key];
  if (e.ctrlKey || e.altKey || e.metaKey || !act) return;
  if (inside) {
    if (inside.id === "filter" && (e.key === "Escape" || e.key === "Enter")) { inside
    .blur(); if (e.key === "Enter") nextLane(1);
      e.preventDefault(); }
    return;
  }
  if (e.key === "Enter" && e.target.closest?.("button")) return;
  e.preventDefault();
  act(e);
});
window.addEventListener("resize", refresh);
window.addEventListener("beforeprint", () => { document.documentElement.dataset.theme = "light";
  measure();
  placeLanes();
  treeNow = "";
  draw(); });
window.addEventListener("afterprint", () => setTheme(theme));
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refresh);
window.addEventListener("hashchange", () => { recall();
  redraw(); });
document.documentElement.classList.add("scripted");
orderLanes("arrived");
chooseLanes("");
recall();
describeCharts();
setTheme(theme);
