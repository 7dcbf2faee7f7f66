// Drawing on canvases that share one horizontal axis.
const NAMES = [...PHASES, ...KINDS, "ink", "soft", "line", "bar", "back", "accent", "bad",
  "on-block", "on-cached"
];
let COLOURS = {},
  UNIT = 1,
  GUTTER = 64,
  RIGHT = 20,
  WIDTH = 600,
  epoch = 0;

function measure() { // what depends on the theme and the window
  const style = getComputedStyle(document.documentElement);
  COLOURS = Object.fromEntries(NAMES.map(name => [name, style.getPropertyValue("--" + name)
  .trim()]));
  UNIT = parseFloat(style.fontSize) / 14;
  WIDTH = Math.max(el("phases").clientWidth, 200);
  GUTTER = Math.round(clamp(WIDTH * 0.1, 52 * UNIT, 130 * UNIT));
  RIGHT = Math.round(20 * UNIT);
  epoch++;
}
const plotWidth = () => WIDTH - GUTTER - RIGHT;
const px = n => Math.round(n * UNIT);
const font = size => `${(size * UNIT).toFixed(1)}px system-ui, "DejaVu Sans", sans-serif`;

function surface(canvas, height) {
  const scale = window.devicePixelRatio || 1,
    width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
  canvas.style.height = height + "px";
  const g = canvas.getContext("2d");
  g.setTransform(scale, 0, 0, scale, 0, 0);
  g.clearRect(0, 0, width, height);
  g.font = font(11);
  return g;
}

function step2x(s) {
  const a = unitOf(view.from),
    b = unitOf(view.to);
  return GUTTER + (b > a ? (unitOf(s) - a) / (b - a) : 0) * plotWidth();
}

function x2step(x) {
  const a = unitOf(view.from),
    b = unitOf(view.to);
  return clamp(stepOf(a + clamp((x - GUTTER) / plotWidth(), 0, 1) * (b - a)), 0, Math.max(N - 1e-6,
    0));
}

function eachStep(visit) { // visit(step, x, end of it) for every step in view
  const a = unitOf(view.from),
    scale = plotWidth() / Math.max(unitOf(view.to) - a, 1e-9);
  const stop = Math.min(Math.ceil(view.to), N);
  let x = GUTTER + (unitOf(Math.floor(view.from)) - a) * scale;
  for (let s = Math.floor(view.from); s < stop; s++) {
    const end = GUTTER + (unitOf(s + 1) - a) * scale;
    visit(s, x, end);
    x = end;
  }
}

function highest(list) { // for each column of pixels, the highest value of the steps in it
  const most = new Float64Array(plotWidth());
  eachStep((s, x, end) => {
    const value = list[s],
      stop = Math.min(Math.max(Math.ceil(end - GUTTER), Math.floor(x - GUTTER) + 1), most
        .length);
    for (let p = Math.max(Math.floor(x - GUTTER), 0); p < stop; p++)
      if (value > most[p]) most[p] = value;
  });
  return most;
}
const number = n => n >= 10 || n === Math.round(n) ? whole(Math.round(n)) : n.toFixed(n >= 1 ? 1 :
  2);

function axis(g, top, height, most, unit = "") {
  g.strokeStyle = COLOURS.line;
  g.lineWidth = 1;
  g.beginPath();
  g.moveTo(GUTTER, top + height + .5);
  g.lineTo(GUTTER + plotWidth(), top + height + .5);
  g.moveTo(GUTTER, top + .5);
  g.lineTo(GUTTER + plotWidth(), top + .5);
  g.stroke();
  g.fillStyle = COLOURS.soft;
  g.textAlign = "right";
  g.textBaseline = "top";
  g.fillText(number(most) + unit, GUTTER - 6, top);
  g.textBaseline = "bottom";
  g.fillText("0", GUTTER - 6, top + height + 2);
}

function bars(g, top, height, list, most, colour) {
  g.fillStyle = colour;
  highest(list).forEach((value, p) => {
    const h = height * Math.min(value / most, 1);
    if (value > 0) g.fillRect(GUTTER + p, top + height - Math.max(h, 1), 1, Math.max(h, 1));
  });
}

function niceGap(rough) {
  const unit = Math.pow(10, Math.floor(Math.log10(rough)));
  return [1, 2, 5, 10].map(k => k * unit).find(k => k >= rough);
}
const RULER = 34;

function ruler(g, top) { // the axis' own unit, and below it the other one at the same places
  const a = unitOf(view.from),
    b = unitOf(view.to),
    byStep = view.unit === "step";
  const gap = Math.max(niceGap((b - a) / Math.max(plotWidth() / (90 * UNIT), 1)), 1),
    least = byStep ? 1 : 0.001;
  g.textAlign = "center";
  g.textBaseline = "top";
  g.font = font(11);
  for (let u = Math.ceil(a / gap) * gap; u <= b + gap * 1e-6; u += Math.max(gap, least)) {
    const s = stepOf(u),
      x = GUTTER + (u - a) / Math.max(b - a, 1e-9) * plotWidth();
    if (x > GUTTER + plotWidth() + 1 || (byStep && u > N)) break;
    const time = timeText(timeAt(s), byStep ? (timeAt(view.to) - timeAt(view.from)) / 200 : gap),
      step = `step ${whole(Math.floor(s + 1e-6))}`;
    g.fillStyle = COLOURS.line;
    g.fillRect(Math.round(x), top, 1, px(4));
    const inside = text => clamp(x, g.measureText(text).width / 2 + 1, WIDTH - g.measureText(text)
        .width / 2 - 1),
      [upper, lower] = byStep ? [step, time] : [time, step];
    g.fillStyle = COLOURS.ink;
    g.fillText(upper, inside(upper), top + px(5));
    g.fillStyle = COLOURS.soft;
    g.fillText(lower, inside(lower), top + px(18));
  }
}

function timeText(us, gap) {
  if (us === 0) return "0 s";
  const digits = clamp(-Math.floor(Math.log10(gap / 1e6)), 0, 6);
  return gap < 1000 ? `${(us / 1000).toFixed(Math.max(digits - 3, 0))} ms` :
    `${(us / 1e6).toFixed(digits)} s`;
}

function marks(g,
height) { // the chosen step, the one under the pointer, and what is being dragged over
  if (view.drag) {
    g.fillStyle = COLOURS.accent;
    g.globalAlpha = .18;
    g.fillRect(Math.min(...view.drag), 0, Math.abs(view.drag[1] - view.drag[0]), height);
    g.globalAlpha = 1;
  }
  for (const [at, alpha] of [
      [view.step, .95],
      [view.hover, .45]
    ]) {
    if (at === null || at + 1 <= view.from || at >= view.to || !N) continue;
    const x = step2x(at),
      end = step2x(at + 1);
    g.fillStyle = COLOURS.ink;
    g.globalAlpha = alpha * .12;
    g.fillRect(x, 0, Math.max(end - x, 1), height);
    g.globalAlpha = alpha;
    g.fillRect(Math.round((x + Math.max(end, x + 1)) / 2 - .5), 0, 1, height);
    g.globalAlpha = 1;
  }
}
const layers = new Map();

function chart(id, height, paint, key =
"") { // paint() again only what changed, then the marks over it
  const canvas = el(id),
    g = surface(canvas, height),
    scale = window.devicePixelRatio || 1;
  const now = [epoch, height, canvas.width, view.from, view.to, view.unit, key].join();
  let layer = layers.get(id);
  if (!layer || layer.now !== now) {
    const back = layer?.back ?? document.createElement("canvas");
    back.width = canvas.width;
    back.height = canvas.height;
    const own = back.getContext("2d");
    own.setTransform(scale, 0, 0, scale, 0, 0);
    own.font = font(11);
    paint(own);
    layers.set(id, layer = { now, back });
  }
  if (canvas.width && canvas.height) { g.setTransform(1, 0, 0, 1, 0, 0);
    g.drawImage(layer.back, 0, 0);
    g.setTransform(scale, 0, 0, scale, 0, 0); }
  return g;
}
