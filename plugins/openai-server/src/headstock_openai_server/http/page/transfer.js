// Export and import of conversations as JSON. A file may be anything: all of it is checked, fields
// that are not ours are dropped, and nothing that is kept here is replaced.

const FORMAT = "headstock-conversations";
const MAX_FILE_BYTES = 50e6;
const TURN_FIELDS = {
  user: ["content"],
  assistant: ["content", "reasoning", "facts"],
  tool: ["content", "tool_call_id"],
};

function exportConversations(conversations) {
  const text = JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = `headstock-${new Date().toISOString().slice(0, 10)}.json`;
  link.click();
  // Later, since some browsers read it after the click.
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

// The conversations of a file, as new ones.
async function readExport(file) {
  if (file.size > MAX_FILE_BYTES) throw new Error("import: the file has more than 50 MB");
  let content;
  try {
    content = JSON.parse(await file.text());
  } catch {
    throw new Error("import: the file is not JSON; choose one that Export made");
  }
  if (!isObject(content) || content.format !== FORMAT || content.version !== 1)
    throw new Error("import: the file is no export of version 1; choose one that Export made");
  if (!Array.isArray(content.conversations))
    throw new Error("import: conversations must be a list");
  return content.conversations.map((each, index) => readConversation(each, `conversations[${index}]`));
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function readConversation(value, place) {
  if (!isObject(value)) throw new Error(`import: ${place} must be an object`);
  const conversation = makeConversation(readText(value, "system", place));
  // A time to come would stay above all others.
  if (Number.isFinite(value.updated))
    conversation.updated = Math.min(value.updated, conversation.updated);
  conversation.title = readText(value, "title", place).slice(0, 200);
  if (!Array.isArray(value.turns)) throw new Error(`import: ${place}.turns must be a list`);
  conversation.turns = readTurns(value.turns, `${place}.turns`);
  return conversation;
}

function readTurns(value, place, nesting = 0) {
  if (nesting > MAX_NESTING)
    throw new Error(`import: ${place} has more than ${MAX_NESTING} versions within versions`);
  return value.map((turn, index) => readTurn(turn, `${place}[${index}]`, nesting));
}

// The versions of a turn, each a list of turns.
function readVersions(value, place, nesting) {
  const read = (name) => {
    const versions = isObject(value) ? value[name] : undefined;
    if (!Array.isArray(versions) || !versions.every((each) => Array.isArray(each) && each.length))
      throw new Error(`import: ${place}.${name} must be a list of lists of turns`);
    return versions.map((each, index) => readTurns(each, `${place}.${name}[${index}]`, nesting + 1));
  };
  return { before: read("before"), after: read("after") };
}

function readTurn(value, place, nesting) {
  const isTurn = isObject(value) && typeof value.role === "string";
  if (!isTurn || !Object.hasOwn(TURN_FIELDS, value.role))
    throw new Error(`import: ${place}.role must be user, assistant or tool`);
  const turn = { role: value.role };
  for (const name of TURN_FIELDS[turn.role]) turn[name] = readText(value, name, place);
  if (turn.role === "assistant") {
    const calls = value.tool_calls ?? [];
    if (!Array.isArray(calls)) throw new Error(`import: ${place}.tool_calls must be a list`);
    turn.tool_calls = calls.map((call, index) => {
      const where = `${place}.tool_calls[${index}]`;
      if (!isObject(call)) throw new Error(`import: ${where} must be an object`);
      const names = ["id", "name", "arguments"];
      return Object.fromEntries(names.map((name) => [name, readText(call, name, where)]));
    });
  }
  if (Object.hasOwn(value, "others"))
    turn.others = readVersions(value.others, `${place}.others`, nesting);
  return turn;
}

function readText(value, name, place) {
  const text = Object.hasOwn(value, name) ? value[name] : "";
  if (typeof text !== "string") throw new Error(`import: ${place}.${name} must be a text`);
  return text;
}
