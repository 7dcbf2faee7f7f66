// The data, unpacked, and where on the horizontal axis a step lies.
const el = id => document.getElementById(id);
const data = JSON.parse(el("data").textContent);
const figures = data.headline,
  lanes = data.lanes;
const PHASES = ["queued", "prefill", "decode", "stalled", "preempted"],
  QUEUED = 0,
  PREFILL = 1,
  DECODE = 2,
  STALLED = 3,
  PREEMPTED = 4,
  GONE = 5;
const KINDS = ["free", "cached", "live", "shared"];
const whole = n => n.toLocaleString("en");
const clamp = (v, low, high) => Math.max(low, Math.min(high, v));
const sums = list => { let at = 0; return Float64Array.from(list, v => at += v); };
const S = Object.fromEntries(Object.entries(data.series).map(([name, list]) => [name, sums(list)]));
const N = S.at.length,
  LAST = Math.max(N - 1, 0),
  M = lanes.ids.length;
const ran = i => S.prefill[i] + S.decode[i] > 0;
S.ms = Float64Array.from(S.at, (t, i) => i + 1 < N && ran(i) ? (S.at[i + 1] - t) / 1000 : 0);
S.evicted = Float64Array.from(S.preempted, (v, i) => v - (i ? S.preempted[i - 1] : 0));
const mapSteps = sums(data.map.steps);

// What is shown: `from` and `to` are steps with fractions, whatever the unit of the axis.
const view = { unit: "step", from: 0, to: Math.max(N, 1), step: figures.busiest, hover: null,
  lane: null, dense: true, drag: null };

// Microseconds at a step with a fraction. The last step has no length, so the median's is drawn.
const lastLength = Math.max((figures.step_ms ? figures.step_ms[0] : 1) * 1000, 1);

function timeAt(s) {
  const i = clamp(Math.floor(s), 0, LAST);
  const start = N ? S.at[i] : 0,
    end = i < LAST ? S.at[i + 1] : start + lastLength;
  return start + (s - i) * (end - start);
}

function stepAt(time) {
  let low = 0,
    high = LAST;
  while (low < high) { const mid = (low + high + 1) >> 1; if (S.at[mid] <= time) low = mid;
    else high = mid - 1; }
  const start = N ? S.at[low] : 0,
    end = low < LAST ? S.at[low + 1] : start + lastLength;
  return low + (end > start ? clamp((time - start) / (end - start), 0, 1) : 0);
}
const unitOf = s => view.unit === "step" ? s : timeAt(s);
const stepOf = u => view.unit === "step" ? u : stepAt(u);

function duration(us) {
  if (us >= 1e8) return `${whole(Math.round(us / 1e6))} s`;
  if (us >= 1e6) return `${(us / 1e6).toPrecision(3)} s`;
  return us >= 1000 ? `${(us / 1000).toPrecision(3)} ms` : `${Math.round(us)} µs`;
}
const between = (a, b) => duration(timeAt(b) - timeAt(a));
const stopOf = i => lanes.ended[i] < 0 ? Math.max(N, 1) : lanes.ended[i];
const plural = (n, word) => `${whole(n)} ${word}${n === 1 ? "" : "s"}`;

// What lane `i` does at a step, with the steps between which it does it; null before and after.
function phaseAt(i, step) {
  const segments = lanes.segments[i];
  for (let at = 0; at < segments.length; at += 2) {
    const end = at + 2 < segments.length ? segments[at + 2] : Math.max(N, 1);
    if (segments[at] <= step && step < end && segments[at + 1] !== GONE) return { phase: segments[
        at + 1], start: segments[at], end };
  }
  return null;
}

// The lanes that are shown, in their order.
const ORDERS = {
  arrived: () => 0,
  ttft: i => lanes.first[i] < 0 ? Infinity : timeAt(lanes.first[i]) - timeAt(lanes.arrived[i]),
  total: i => timeAt(stopOf(i)) - timeAt(lanes.arrived[i]),
  preemptions: i => lanes.preemptions[i],
  stalled: i => lanes.stalled[i],
};
let ordered = [],
  matching = 0,
  chosen = [],
  placeOf = new Map();

function orderLanes(order) {
  const key = ORDERS[order] ?? ORDERS.arrived,
    keys = lanes.ids.map((_, i) => key(i));
  ordered = lanes.ids.map((_, i) => i).sort((a, b) => keys[a] === keys[b] ? a - b : keys[b] > keys[
    a] ? 1 : -1);
}

function chooseLanes(
text) { // those of the name, and of these those that are there in the steps in view
  const wanted = text.trim().toLowerCase(),
    named = ordered.filter(i => !wanted || lanes.ids[i].toLowerCase().includes(wanted));
  matching = named.length;
  chosen = named.filter(i => lanes.arrived[i] < view.to && Math.max(stopOf(i), lanes.arrived[i] +
    1) > view.from);
  placeOf = new Map(chosen.map((lane, place) => [lane, place]));
}
