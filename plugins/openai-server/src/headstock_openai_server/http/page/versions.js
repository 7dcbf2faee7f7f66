// Versions of turns. Where a question is asked in other words, or an answer made again, the turns
// from there on stay: the first turn of the new ones has them in `others`, those made before it and
// those made after it, each a list of turns. Their own first turns have no `others`.

const MAX_NESTING = 100; // of versions within versions, in a file that is imported

function countVersions({ others }) {
  if (!others) return { number: 1, total: 1 };
  const { before, after } = others;
  return { number: before.length + 1, total: before.length + 1 + after.length };
}

// The `others` of a turn that takes the place of `turns`.
function joinVersions(turns) {
  const [first, ...rest] = turns;
  if (!first) return undefined;
  const { others, ...plain } = first;
  return {
    before: [...(others?.before ?? []), [plain, ...rest], ...(others?.after ?? [])],
    after: [],
  };
}

// Shows the version before a turn (-1), or the one after it (1), with all that followed it.
function showVersion(turn, step) {
  if (findRunning()) return;
  const of = conversation;
  const turns = of.turns.splice(of.turns.indexOf(turn));
  const { others, ...plain } = turns[0];
  const { before, after } = others;
  const shown = [plain, ...turns.slice(1)];
  const next = step < 0 ? before.at(-1) : after[0];
  next[0].others = step < 0
    ? { before: before.slice(0, -1), after: [shown, ...after] }
    : { before: [...before, shown], after: after.slice(1) };
  const at = of.turns.push(...next) - next.length;
  openConversation(of, at);
  touchConversation(of);
}

// Buttons that go through the versions of a turn; nothing where there is one.
function makeVersionButtons(turn) {
  const { number, total } = countVersions(turn);
  if (total === 1) return [];
  const back = makeButton("‹", () => showVersion(turn, -1));
  const forth = makeButton("›", () => showVersion(turn, 1));
  back.setAttribute("aria-label", "Version before");
  forth.setAttribute("aria-label", "Version after");
  back.disabled = number === 1;
  forth.disabled = number === total;
  return [back, make("span", "version", `${number} of ${total}`), forth];
}
