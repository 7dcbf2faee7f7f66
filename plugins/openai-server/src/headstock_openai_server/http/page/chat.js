// The conversation: asks, shows the answer as it comes, and stops when told to.

let conversation = [];
let running = null;

function addTurn(kind, text) {
  const turn = document.createElement("div");
  turn.className = `turn ${kind}`;
  // Never as HTML: what a model writes may be anything.
  turn.textContent = text;
  element("log").append(turn);
  element("log").scrollTop = element("log").scrollHeight;
  return turn;
}

// What `change` adds comes into view, unless the reader has scrolled back.
function followEnd(change) {
  const log = element("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

function makeBody(messages) {
  const body = { messages, stream: true, stream_options: { include_usage: true, include_timings: true } };
  const temperature = element("temperature").value;
  const tokens = element("max-tokens").value;
  if (temperature !== "") body.temperature = Number(temperature);
  if (tokens !== "") body.max_tokens = Number(tokens);
  return body;
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

async function answer(question) {
  const turns = conversation; // Clear begins another one while this answer still ends
  const system = element("system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...turns] : turns;
  const turn = addTurn("assistant", "");
  const thought = document.createElement("div");
  const text = document.createElement("div");
  const facts = document.createElement("span");
  thought.className = "thought";
  facts.className = "facts";
  turn.append(thought, text, facts);
  let usage = null;
  let timings = null;
  let reason = "";
  running = new AbortController();
  setRunning(true);
  try {
    const response = await ask("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(makeBody(messages)),
      signal: running.signal,
    });
    await readEvents(response.body, (event) => {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage || usage;
      timings = event.timings || timings;
      followEnd(() => {
        for (const choice of event.choices) {
          text.append(choice.delta.content || "");
          thought.append(choice.delta.reasoning || "");
          reason = choice.finish_reason || reason;
        }
      });
    });
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else addTurn("error", error.message);
  }
  running = null;
  setRunning(false);
  const hasEnded = reason && reason !== "stopped";
  if (text.textContent || hasEnded) turns.push({ role: "assistant", content: text.textContent });
  else takeBack(turns, question);
  if (!text.textContent && !thought.textContent && !reason) turn.remove();
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
  followEnd(() => { facts.textContent = parts.join(" · "); });
}

// A question without an answer stays to be seen, and is no part of what is sent later: templates
// refuse two questions in a row. Enter asks it again.
function takeBack(turns, question) {
  const { content } = turns.pop();
  question.classList.add("unanswered");
  const isShown = turns === conversation; // not after New chat
  if (isShown && !element("prompt").value) element("prompt").value = content;
}

function setRunning(isRunning) {
  element("send").disabled = isRunning;
  element("stop").disabled = !isRunning;
}

function send() {
  const text = element("prompt").value.trim();
  if (!text || running) return;
  element("prompt").value = "";
  conversation.push({ role: "user", content: text });
  answer(addTurn("user", text));
}

function stop() {
  if (running) running.abort();
}

function clearChat() {
  stop();
  conversation = [];
  element("log").replaceChildren();
  element("prompt").focus();
}
