// What is seen of an answer while it comes: how long it has taken, and how fast it is.

// What an answer says of itself while it comes: the wait for its first token, then its rate.
function describeProgress({ begin, first, last, usage }) {
  if (!first) return `waits, ${((performance.now() - begin) / 1000).toFixed(0)} s`;
  const tokens = usage?.completion_tokens;
  if (!tokens) return "answers";
  const seconds = (last - first) / 1000;
  const rate = seconds > 0.5 ? ` · ${((tokens - 1) / seconds).toFixed(0)} tokens/s` : "";
  return `${tokens} tokens${rate}`;
}

// The figures of an answer that has ended. `first` and `last` are times of this side, for an answer
// that was cut before the server told its own.
function listFacts({ usage, timings, first, last }, reason) {
  const parts = [];
  if (timings?.ttft) parts.push(`first token ${milliseconds(timings.ttft)}`);
  if (usage) {
    parts.push(`${usage.completion_tokens} tokens`);
    // The server's times: what came in one piece took no time here.
    const seconds = timings ? timings.total - timings.ttft : (last - first) / 1000;
    if (seconds > 0) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(0)} tokens/s`);
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${usage.prompt_tokens} in the prompt${cached ? `, ${cached} cached` : ""}`);
  }
  if (reason) parts.push(reason);
  return parts.join(" · ");
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

// Keeps what has come of an answer, so that a tab that closes loses little of it.
function keepPart({ conversation: of, turn }) {
  if (!conversations.includes(of) || !(turn.content || turn.tool_calls.length)) return;
  const part = { ...turn, facts: "broken off" };
  keepConversation({ ...of, updated: Date.now(), turns: [...of.turns, part] });
}

// The field of messages is as high as its text, up to a third of the window.
function fitPrompt() {
  const area = element("prompt");
  area.style.height = "auto";
  const borders = area.offsetHeight - area.clientHeight;
  area.style.height = `${Math.min(area.scrollHeight + borders, innerHeight / 3)}px`;
}

function setPrompt(text) {
  element("prompt").value = text;
  fitPrompt();
  keepDraft();
}

// What is written and not sent stays in its tab, for each conversation.
const DRAFT = "headstock-draft-";

function keepDraft() {
  const text = element("prompt").value;
  try {
    if (text) sessionStorage.setItem(DRAFT + conversation.id, text);
    else sessionStorage.removeItem(DRAFT + conversation.id);
  } catch {
    // more than the browser keeps for a tab: it stays in the field alone
  }
}

function showDraft() {
  element("prompt").value = sessionStorage.getItem(DRAFT + conversation.id) ?? "";
  fitPrompt();
}
