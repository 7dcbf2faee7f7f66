// Conversations in the browser's database; in memory where it has none, as in some private windows.
//
// A conversation: { id, title, system, created, updated, turns }. A turn: { role, content } of a
// user; with { reasoning, tool_calls, facts } of the assistant; with { tool_call_id } of a tool.

// A proxy may show the server under a path of its own.
const BASE = location.pathname.replace(/\/$/, "");
const STORE = "conversations";
let database = null;
// Tells other tabs of a change.
const channel = new BroadcastChannel(`headstock${BASE}`);

function wait(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

function open(mode) {
  return database.transaction(STORE, mode).objectStore(STORE);
}

// All conversations.
async function readConversations() {
  try {
    // A proxy may show several servers under one origin.
    const opening = indexedDB.open(`headstock${BASE}`, 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
    database = await wait(opening);
    return await wait(open("readonly").getAll());
  } catch (error) {
    showStatus(`conversations are not kept: ${error.message}`, true);
    return [];
  }
}

async function keepConversation(conversation) {
  await write((store) => store.put(conversation));
}

async function forgetConversation(conversation) {
  await write((store) => store.delete(conversation.id));
}

async function write(change) {
  if (!database) return;
  try {
    await wait(change(open("readwrite")));
    channel.postMessage("kept");
  } catch (error) {
    showStatus(`conversations are not kept: ${error.message}`, true);
  }
}

function makeConversation(system = "") {
  const now = Date.now();
  // crypto.randomUUID is absent on plain HTTP from another machine.
  const id = [...crypto.getRandomValues(new Uint8Array(16))]
    .map((byte) => byte.toString(16).padStart(2, "0"))
    .join("");
  return { id, title: "", system, created: now, updated: now, turns: [] };
}
