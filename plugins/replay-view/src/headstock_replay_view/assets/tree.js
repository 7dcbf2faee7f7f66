// The prefix index at one step.
let blocks = [],
  treeNow = "";

function treeOf(step) {
  const steps = data.trees.steps;
  let which = 0;
  while (which + 1 < steps.length && steps[which + 1] <= step) which++;
  return which;
}

function layout(segments) { // leaves get lines of their own, a parent spans its children
  const children = segments.map(() => []),
    roots = [],
    at = [];
  segments.forEach(([parent], i) => (parent < 0 ? roots : children[parent]).push(i));
  const size = segments.map(s => s[1]),
    lines = segments.map(() => 1);
  for (let i = segments.length - 1; i >= 0; i--) lines[i] = Math.max(1, children[i].reduce((n, c) =>
    n + lines[c], 0));
  const order = list => list.sort((a, b) => lines[b] - lines[a] || size[b] - size[a]),
    open = [
      [roots, 0, 0]
    ];
  while (open.length) { // no recursion: a chain of blocks may be deep
    let [list, x, y] = open.pop();
    for (const i of order(list)) { at[i] = [x, y];
      open.push([children[i], x + size[i], y]);
      y += lines[i]; }
  }
  return { at, size, lines, rows: roots.reduce((n, c) => n + lines[c], 0), most: at.reduce((m, [x],
      i) => Math.max(m, x + size[i]), 1) };
}

function drawTree() {
  const steps = data.trees.steps;
  if (!steps.length) return;
  const which = treeOf(view.hover ?? view.step),
    now = [epoch, which].join();
  if (now === treeNow) return;
  treeNow = now;
  blocks = [];
  if (document.activeElement !== el("slider")) el("slider").value = which;
  const all = data.trees.segments[which],
    segments = all.slice(0, -1),
    [, restTokens, , , rest] = all[all.length - 1];
  const count = segments.reduce((n, s) => n + s[4], rest),
    tokens = segments.reduce((n, s) => n + s[1] * s[4], restTokens);
  el("tree-note").textContent =
    `At step ${whole(steps[which])}: ${plural(tokens, "token")} in ${plural(count, "block")}` + (
      rest ?
      `, of which ${whole(rest)} small ones with ${whole(restTokens)} tokens are not drawn.` : ".");
  const { at, size, lines, rows, most: widest } = layout(segments), line = px(rows > 120 ? 9 :
    rows > 40 ? 15 : 21), width = Math.max(el("tree-box").clientWidth, 100);
  el("tree").style.width = width + "px";
  const g = surface(el("tree"), Math.max(rows * line + px(22), px(40))),
    scale = (width - 16) / widest;
  g.textBaseline = "middle";
  g.textAlign = "left";
  segments.forEach(([, n, refs, used, same], i) => {
    const [x, y] = [8 + at[i][0] * scale, at[i][1] * line], w = size[i] * scale, h = lines[i] *
      line, step = steps[which];
    const idle = Math.min(1, (step - used) / Math.max(1, N / 4)),
      kind = refs > 1 ? "shared" : refs ? "live" : "cached";
    g.globalAlpha = refs ? 1 : 1 - .55 * idle;
    g.fillStyle = COLOURS[kind];
    g.fillRect(x, y, Math.max(w - 1, 1), h - 1);
    g.globalAlpha = 1;
    if (same > 1) { g.fillStyle = COLOURS.back; for (const edge of [3, 7])
        if (w > edge + 4) g.fillRect(x + edge, y, 1.5, h - 1); }
    const held = refs ? plural(refs, "row") : `last used at step ${whole(used)}`,
      many = same > 1 ? `${whole(same)} × ` : "",
      inset = same > 1 ? 12 : 4;
    const full = `${many}${plural(n, "token")}, ${held}${same > 1 && refs ? " each" : ""}`;
    const text = [full, `${many}${whole(n)} tok, ${refs ? refs + "×" : "@" + used}`,
      `${many}${whole(n)}`, many.trim()
    ].find(t => t && g.measureText(t).width + inset + 4 < w);
    if (line >= px(15) && text) { g.fillStyle = COLOURS[refs ? "on-block" : idle > .5 ? "ink" :
        "on-cached"];
      g.fillText(text, x + inset, y + h / 2); }
    blocks.push([x, y, Math.max(w, 2), h, full]);
  });
  g.fillStyle = COLOURS.soft;
  g.textBaseline = "top";
  g.fillText("0 tokens", 8, rows * line + px(6));
  g.textAlign = "right";
  g.fillText(`${whole(widest)} tokens from the root`, width - 8, rows * line + px(6));
}

function blockAt(x, y) { return blocks.find(([bx, by, w, h]) => x >= bx && x < bx + w && y >= by &&
    y < by + h)?.[4] ?? ""; }
