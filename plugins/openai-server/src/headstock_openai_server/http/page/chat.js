// Asks, shows the answer as it comes, and stops when told to.

let running = null; // { controller, conversation, turn } of the answer that comes

// The fields of a request for what comes after `turns`.
function makeBody({ system, turns }) {
  const messages = system.trim() ? [{ role: "system", content: system.trim() }] : [];
  for (const turn of turns) messages.push(makeMessage(turn));
  const options = { include_usage: true, include_timings: true };
  return { messages, ...readSettings(), stream: true, stream_options: options };
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
    const { done, value } = await reader.read();
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

// Shows a turn that grows, at most once for each picture on the screen. Text that is slow to show is
// shown less often, so that the page stays awake.
function makePainter(turn) {
  let isPlanned = false;
  let delay = 0;
  const paint = () => {
    const begin = performance.now();
    followEnd(() => views.get(turn)?.());
    delay = 4 * (performance.now() - begin);
    isPlanned = false;
  };
  return () => {
    if (isPlanned) return;
    isPlanned = true;
    if (delay < 50) requestAnimationFrame(paint);
    else setTimeout(paint, Math.min(delay, 4000));
  };
}

// Asks for what comes after the turns of a conversation; true if an answer came.
async function answer(of) {
  const turn = { role: "assistant", content: "", reasoning: "", tool_calls: [], facts: "" };
  const controller = new AbortController();
  let usage = null;
  let timings = null;
  let reason = "";
  let failure = "";
  running = { controller, conversation: of, turn };
  setRunning(true);
  const node = addTurn(turn);
  const paint = makePainter(turn);
  try {
    const response = await ask("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(makeBody(of)),
      signal: controller.signal,
    });
    await readEvents(response.body, (event) => {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      timings = event.timings || timings;
      for (const choice of event.choices) {
        addDelta(turn, choice.delta);
        reason = choice.finish_reason || reason;
      }
      paint();
    });
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else failure = error.message;
  }
  running = null;
  setRunning(false);
  turn.facts = listFacts(usage, timings, reason);
  const hasEnded = reason && reason !== "stopped";
  const isKept = Boolean(turn.content || turn.tool_calls.length || hasEnded);
  if (isKept) of.turns.push(turn);
  else if (!turn.reasoning && !reason) node.remove();
  followEnd(() => views.get(turn)?.());
  if (failure && of === conversation) showError(failure);
  return isKept;
}

function listFacts(usage, timings, reason) {
  const parts = [];
  if (timings?.ttft) parts.push(`first token ${milliseconds(timings.ttft)}`);
  if (usage) {
    parts.push(`${usage.completion_tokens} tokens`);
    // The server's times: what came in one piece took no time here.
    const seconds = timings?.total - timings?.ttft;
    if (seconds > 0) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(0)} tokens/s`);
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${usage.prompt_tokens} in the prompt${cached ? `, ${cached} cached` : ""}`);
  }
  if (reason) parts.push(reason);
  return parts.join(" · ");
}

function setRunning(isRunning) {
  element("send").disabled = isRunning;
  element("stop").disabled = !isRunning;
  element("log").setAttribute("aria-busy", String(isRunning));
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
    ? `Result of ${call.name} (Enter sends it)`
    : "Message (Enter sends, Shift+Enter breaks the line, Esc stops)";
}

async function send() {
  const text = element("prompt").value.trim();
  if (!text || running) return;
  const of = conversation;
  const call = findOpenCall(of);
  const turn = call
    ? { role: "tool", content: text, tool_call_id: call.id }
    : { role: "user", content: text };
  element("prompt").value = "";
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
  of.turns.splice(of.turns.indexOf(turn), 1);
  node.classList.add("unanswered");
  if (of === conversation && !element("prompt").value) element("prompt").value = turn.content;
}

// Another answer: to a question, or in place of an answer. What came after it goes.
async function askAgain(turn, content = turn.content) {
  if (running) return;
  const of = conversation;
  const before = turn.content;
  const rest = of.turns.splice(of.turns.indexOf(turn) + (turn.role === "assistant" ? 0 : 1));
  turn.content = content;
  openConversation(of);
  if (!findOpenCall(of) && !(await answer(of))) {
    // Without an answer, what there was stays; the error is shown below it.
    turn.content = before;
    of.turns.push(...rest);
    const errors = [...document.querySelectorAll(".turn.error")];
    if (of === conversation) openConversation(of);
    errors.forEach(addNode);
  }
  finish(of);
}

function keepEdit(turn, content) {
  turn.content = content;
  views.get(turn)?.();
  touchConversation(conversation);
}

function stop() {
  if (running) running.controller.abort();
}
