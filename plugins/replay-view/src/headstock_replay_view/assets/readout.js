// What is written of the chosen step and the chosen request.
function field(list, name, value, step = null) {
  const box = document.createElement("div"),
    dt = document.createElement("dt"),
    dd = document.createElement("dd");
  dt.textContent = name;
  if (step === null) dd.textContent = value;
  else {
    const link = document.createElement("button");
    link.type = "button";
    link.className = "link";
    link.dataset.step = step;
    link.textContent = value;
    dd.append(link);
  }
  box.append(dt, dd);
  list.append(box);
}

function drawReadout() {
  const at = Math.floor(view.hover ?? view.step),
    facts = !N ? [
      ["no step", ""]
    ] : [
      ["step", `${whole(at)}${at === figures.busiest ? " (busiest)" : ""}`],
      ["at", duration(S.at[at] - S.at[0])],
      ["took", S.ms[at] ? duration(S.ms[at] * 1000) : "–"],
      ["prompt tokens", whole(S.prefill[at])],
      ["decode rows", whole(S.decode[at])],
      ["running", whole(S.running[at])],
      ["waiting", whole(S.waiting[at])],
      ["preempted now", whole(S.evicted[at])],
      ["pages live", whole(S.live[at])],
      ["shared", whole(S.shared[at])],
      ["cached", whole(S.cached[at])],
      ["free", whole(S.free[at])]
    ];
  el("readout").setAttribute("aria-live", view.hover === null ? "polite" : "off");
  el("readout").replaceChildren(...facts.map(([name, value]) => {
    const box = document.createElement("div"),
      span = document.createElement("span"),
      b = document.createElement("b");
    span.textContent = name + " ";
    b.textContent = value;
    box.append(span, b);
    return box;
  }));
}
let shownLane;

function drawRequest() {
  if (shownLane === view.lane) return;
  shownLane = view.lane;
  const box = el("request"),
    i = view.lane;
  if (i === null) {
    const hint = document.createElement("span");
    hint.textContent = M ?
      "Choose a request: click a line, or press j. ▾ marks the first token, × an end by abort or failure, › no end in the recording." :
      "";
    box.hidden = !M;
    box.replaceChildren(hint);
    return;
  }
  const title = document.createElement("h3"),
    list = document.createElement("dl"),
    tools = document.createElement("span");
  title.textContent = lanes.ids[i];
  list.className = "request";
  tools.className = "tools";
  const { arrived, admitted, first, ended } = lanes;
  field(list, "arrived", `step ${whole(arrived[i])}, ${duration(timeAt(arrived[i]) - timeAt(0))}`,
    arrived[i]);
  if (admitted[i] >= 0) field(list, "admitted",
    `step ${whole(admitted[i])}, after ${between(arrived[i], admitted[i])}`, admitted[i]);
  else field(list, "admitted", "never");
  if (first[i] >= 0) field(list, "first token",
    `step ${whole(first[i])}, after ${between(arrived[i], first[i])}`, first[i]);
  else field(list, "first token", "never");
  field(list, "prompt",
    `${plural(lanes.prompt[i], "token")}, ${whole(lanes.cached[i])} from the index`);
  field(list, "output", plural(lanes.output[i], "token"));
  if (lanes.output[i] > 1) field(list, "a token every", duration((timeAt(lanes.ended[i] < 0 ? LAST : ended[
    i]) - timeAt(first[i])) / (lanes.output[i] - 1)));
  if (lanes.preemptions[i]) field(list, "preempted",
    `${plural(lanes.preemptions[i], "time")}, ${plural(lanes.recomputed[i], "token")} computed again`
    );
  if (lanes.stalled[i]) field(list, "stalled", plural(lanes.stalled[i], "step"));
  if (lanes.priority[i] !== "0") field(list, "priority", lanes.priority[i]);
  if (ended[i] >= 0) field(list, "ended",
    `step ${whole(ended[i])}, after ${between(arrived[i], ended[i])}: ${lanes.reasons[i]}`, ended[
      i]);
  else field(list, "ended", "not in this recording");
  for (const [name, act] of [
      ["Zoom to it", zoomToLane],
      ["Previous", () => nextLane(-1)],
      ["Next", () => nextLane(1)]
    ]) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", act);
    tools.append(button);
  }
  box.hidden = false;
  box.replaceChildren(title, list, tools);
}
