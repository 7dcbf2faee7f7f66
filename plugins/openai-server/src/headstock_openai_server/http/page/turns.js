// The turns of a conversation on the page: what was said, reasoning, tool calls, and buttons.

const views = new Map(); // turn -> the function that shows it again, for the shown conversation

function make(tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.textContent = text;
  return node;
}

function makeButton(label, onClick) {
  const button = make("button", "", label);
  button.type = "button";
  button.addEventListener("click", onClick);
  return button;
}

function makeCopyButton(label, readText) {
  const button = makeButton("Copy", async () => {
    const isCopied = await copyText(readText());
    button.textContent = isCopied ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  button.setAttribute("aria-label", label);
  return button;
}

async function copyText(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(() => true, () => false);
  }
  // On plain HTTP from another machine there is no clipboard.
  const area = make("textarea", "copying");
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  return isCopied;
}

// What `change` adds comes into view, unless the reader has scrolled back.
function followEnd(change) {
  const log = element("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
  showWayToEnd();
}

function showWayToEnd() {
  const log = element("log");
  element("to-end").hidden = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
}

function addNode(node) {
  element("log").append(node);
  element("log").scrollTop = element("log").scrollHeight;
  return node;
}

function showError(text) {
  return addNode(make("div", "turn error", text));
}

function addTurn(turn) {
  return addNode(makeTurn(turn));
}

function makeTurn(turn) {
  const node = make("div", `turn ${turn.role}`);
  if (turn.role === "assistant") fillAnswer(node, turn);
  else fillQuestion(node, turn);
  return node;
}

function fillQuestion(node, turn) {
  if (turn.role === "tool") node.append(make("div", "facts", `Result of ${findCallName(turn)}`));
  // Never as HTML or Markdown: as it was written.
  const text = make("div", "text", turn.content);
  // A long one scrolls in its own place, by keys too.
  if (turn.content.length > 1000) text.tabIndex = 0;
  const actions = make("div", "actions");
  const edit = makeButton("Edit", () => openEditor(text, turn, "Ask again", askAgain));
  edit.classList.add("edit"); // hidden where the question was taken back
  const regenerate = makeButton("Ask again", () => askAgain(turn));
  regenerate.classList.add("regenerate"); // shown at the last turn
  const copy = makeCopyButton("Copy question", () => turn.content);
  actions.append(...makeVersionButtons(turn), copy, edit, regenerate);
  node.append(text, actions);
}

function findCallName({ tool_call_id }) {
  const calls = conversation.turns.flatMap((turn) => turn.tool_calls ?? []);
  return calls.find(({ id }) => id === tool_call_id)?.name ?? tool_call_id;
}

function fillAnswer(node, turn) {
  const thought = make("details", "thought");
  const reasoning = make("div", "text");
  thought.append(make("summary", "", "Reasoning"), reasoning);
  const text = make("div", "text");
  const calls = make("div", "calls");
  const facts = make("span", "facts");
  const progress = make("div", "progress");
  progress.setAttribute("aria-live", "off");
  const actions = make("div", "actions");
  actions.append(
    ...makeVersionButtons(turn),
    makeCopyButton("Copy answer", () => turn.content),
    makeButton("Edit", () => openEditor(text, turn, "Keep", keepEdit)),
  );
  const regenerate = makeButton("Regenerate", () => askAgain(turn));
  regenerate.classList.add("regenerate"); // shown at the last answer
  const more = makeButton("Continue", () => continueAnswer(turn));
  more.classList.add("regenerate");
  actions.append(regenerate, more, facts);
  node.append(thought, text, calls, progress, actions);
  const show = () => {
    thought.hidden = !turn.reasoning;
    reasoning.textContent = turn.reasoning;
    showMarkdown(text, turn.content);
    calls.replaceChildren(...turn.tool_calls.map(makeCall));
    facts.textContent = turn.facts;
    const run = findRunning();
    const isRunning = run?.turn === turn;
    progress.hidden = !isRunning;
    if (isRunning) progress.textContent = describeProgress(run.figures);
    actions.hidden = isRunning;
    more.hidden = !isUnfinished(turn);
  };
  views.set(turn, show);
  show();
}

function makeCall(call) {
  const details = make("details", "call");
  details.open = true;
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch {
    // as the model wrote it; it may still be writing
  }
  const code = make("pre", "", shown);
  code.tabIndex = 0;
  details.append(make("summary", "", `Call of ${call.name}`), code);
  return details;
}

// Edits a turn in its place; `finish` takes the turn with its new content.
function openEditor(text, turn, label, finish) {
  if (findRunning() || text.nextElementSibling?.className === "editor") return;
  const editor = make("div", "editor");
  const area = make("textarea");
  area.value = turn.content;
  area.rows = Math.min(12, turn.content.split("\n").length + 1);
  area.setAttribute("aria-label", "Edited text");
  const close = () => {
    editor.remove();
    text.hidden = false;
  };
  const save = makeButton(label, () => {
    if (findRunning()) return;
    close();
    finish(turn, area.value);
  });
  editor.append(area, save, makeButton("Cancel", close));
  editor.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
  });
  text.hidden = true;
  text.after(editor);
  area.focus();
}
