// Asks, shows the answer as it comes, and stops when told to.

// The answers that come, by the ids of their conversations: { controller, conversation, turn, figures }.
const running = new Map();
const BROKEN = "the connection ended before the answer did";

function findRunning() {
  return running.get(conversation.id);
}

// The fields of a request for what comes after `turns`, or for the rest of the answer `begun`.
function makeBody({ system, turns }, begun) {
  const messages = system.trim() ? [{ role: "system", content: system.trim() }] : [];
  // Templates refuse two questions in a row, so one without an answer is left out.
  const isAnswered = ({ role }, index) => role !== "user" || turns[index + 1]?.role !== "user";
  messages.push(...turns.filter(isAnswered).map(makeMessage));
  const options = { include_usage: true, include_timings: true, continuous_usage_stats: true };
  const fields = { messages, ...readSettings(), stream: true, stream_options: options };
  if (!begun) return fields;
  messages.push(makeMessage(begun));
  return { ...fields, add_generation_prompt: false, continue_final_message: true };
}

function makeMessage({ role, content, reasoning, tool_calls, tool_call_id }) {
  if (role === "tool") return { role, content, tool_call_id };
  const message = { role, content };
  if (tool_calls?.length) {
    message.tool_calls = tool_calls.map(({ id, ...call }) => ({ id, type: "function", function: call }));
    // Templates that take reasoning take it up to the last question, between calls.
    if (reasoning) message.reasoning = reasoning;
  }
  return message;
}

// Calls `onEvent` with the object of each event; a chunk may end within one.
async function readEvents(stream, onEvent) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Error(BROKEN);
    });
    if (done) return;
    buffer += decoder.decode(value, { stream: true });
    const blocks = buffer.split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      if (!block.startsWith("data: ") || block === "data: [DONE]") continue;
      onEvent(JSON.parse(block.slice(6)));
    }
  }
}

function addDelta(turn, delta) {
  turn.content += delta.content || "";
  turn.reasoning += delta.reasoning || "";
  for (const { index, id, function: part } of delta.tool_calls || []) {
    const call = (turn.tool_calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id || "";
    call.name += part?.name || "";
    call.arguments += part?.arguments || "";
  }
}

function makeAnswer(others) {
  const turn = { role: "assistant", content: "", reasoning: "", tool_calls: [], facts: "" };
  return others ? { ...turn, others } : turn;
}

// Asks for what comes after the turns of a conversation: `turn`, a new one or the rest of one that
// has begun. True if an answer came.
async function answer(of, turn = makeAnswer()) {
  const begun = turn.content ? { ...turn } : undefined;
  const figures = { usage: null, timings: null, begin: performance.now(), first: null, last: null };
  let reason = "";
  let failure = "";
  const run = { controller: new AbortController(), conversation: of, turn, figures };
  running.set(of.id, run);
  showRunning();
  const node = addTurn(turn);
  const paint = makePainter(turn);
  const clock = setInterval(() => {
    paint();
    keepPart(run);
  }, 1000);
  try {
    const response = await ask("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(makeBody(of, begun)),
      signal: run.controller.signal,
    });
    await readEvents(response.body, (event) => {
      if (event.error) throw new Error(event.error.message);
      figures.usage = event.usage || figures.usage;
      figures.timings = event.timings || figures.timings;
      for (const choice of event.choices) {
        addDelta(turn, choice.delta);
        reason = choice.finish_reason || reason;
        figures.last = performance.now();
        figures.first ??= figures.last;
      }
      paint();
    });
    if (!reason) failure = BROKEN;
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else failure = error.message;
  }
  if (failure) showModel();
  clearInterval(clock);
  running.delete(of.id);
  showRunning();
  turn.facts = listFacts(figures, reason || (turn.content ? "broken off" : ""));
  const hasEnded = reason && reason !== "stopped";
  const isKept = Boolean(turn.content || turn.tool_calls.length || hasEnded);
  if (isKept) of.turns.push(turn);
  else if (!turn.reasoning && !reason) node.remove();
  followEnd(() => views.get(turn)?.());
  if (failure && of === conversation) showError(failure);
  return isKept;
}

// One of the two buttons is shown, in one place; the keyboard stays there.
function showRunning() {
  const isRunning = Boolean(findRunning());
  const hasFocus = ["send", "stop"].includes(document.activeElement.id);
  element("send").disabled = isRunning;
  element("stop").disabled = !isRunning;
  if (hasFocus) element(isRunning ? "stop" : "send").focus();
  element("log").setAttribute("aria-busy", String(isRunning));
  showList();
}

// The first call of the last answer that has no result yet.
function findOpenCall({ turns }) {
  const last = turns.findLastIndex((turn) => turn.role === "assistant");
  if (turns[last + 1]?.role === "user") return undefined;
  const known = turns.slice(last + 1).map((turn) => turn.tool_call_id);
  return turns[last]?.tool_calls.find((call) => !known.includes(call.id));
}

function showHint() {
  const call = findOpenCall(conversation);
  element("prompt").placeholder = call
    ? `Result of ${call.name}`
    : hasKeyboard()
      ? "Message (Enter sends, Shift+Enter breaks the line, Esc stops)"
      : "Message";
}

async function send() {
  const text = element("prompt").value.trim();
  if (!text || findRunning()) return;
  const of = conversation;
  const call = findOpenCall(of);
  const turn = call
    ? { role: "tool", content: text, tool_call_id: call.id }
    : { role: "user", content: text };
  setPrompt("");
  of.turns.push(turn);
  if (!conversations.includes(of)) conversations.push(of);
  const node = addTurn(turn);
  // Before the answer, so that a tab that closes loses no question.
  touchConversation(of);
  if (!findOpenCall(of) && !(await answer(of))) takeBack(of, turn, node);
  finish(of);
}

function finish(of) {
  if (!of.turns.length) {
    conversations = conversations.filter((other) => other !== of);
    forgetConversation(of);
    showList();
  } else if (conversations.includes(of)) {
    touchConversation(of);
  }
  if (of === conversation) showHint();
}

// A question without an answer stays to be seen, and is no part of what is sent later: templates
// refuse two questions in a row. Enter asks it again.
function takeBack(of, turn, node) {
  // In a conversation that is not shown it stays, so that it is seen there.
  if (of !== conversation) return;
  of.turns.splice(of.turns.indexOf(turn), 1);
  node.classList.add("unanswered");
  if (!element("prompt").value) setPrompt(turn.content);
}

// Another answer: to a question, or in place of an answer. What it replaces stays as a version.
async function askAgain(turn, content = turn.content) {
  if (findRunning()) return;
  const of = conversation;
  const old = of.turns.splice(of.turns.indexOf(turn));
  const others = old.length > 1 || turn.role === "assistant" ? joinVersions(old) : turn.others;
  if (turn.role !== "assistant") of.turns.push({ ...turn, content, others });
  openConversation(of);
  const isAnswer = turn.role === "assistant";
  if (!findOpenCall(of) && !(await answer(of, makeAnswer(isAnswer ? others : undefined)))) {
    // Without an answer, what there was stays; the error is shown below it.
    if (!isAnswer) of.turns.pop();
    of.turns.push(...old);
    const errors = [...document.querySelectorAll(".turn.error")];
    if (of === conversation) openConversation(of);
    errors.forEach(addNode);
  }
  finish(of);
}

// An answer that was cut. One that reasoned or called tools would go on in no way that templates know.
function isUnfinished({ content, reasoning, tool_calls, facts }) {
  const isCut = /(?:^| · )(?:stopped|broken off|length)$/.test(facts);
  return Boolean(isCut && content && !reasoning && !tool_calls.length);
}

// The rest of the last answer, in its place.
async function continueAnswer(turn) {
  if (findRunning()) return;
  const of = conversation;
  of.turns.pop();
  openConversation(of);
  await answer(of, turn);
  finish(of);
}

function keepEdit(turn, content) {
  turn.content = content;
  views.get(turn)?.();
  touchConversation(conversation);
}

function stop() {
  findRunning()?.controller.abort();
}
