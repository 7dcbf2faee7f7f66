// The list of conversations: open, new, rename, delete, export and import.

const CONVERSATION = "headstock-conversation"; // of this tab, for when it is loaded again

let conversations = [];
let conversation = makeConversation();

function nameConversation({ title, turns }) {
  return title || turns[0]?.content.slice(0, 60) || "New chat";
}

async function loadConversations() {
  conversations = await readConversations();
  const id = sessionStorage.getItem(CONVERSATION);
  // One without a turn is not kept, but what was written there is.
  if (id && conversation.id !== id && !conversation.turns.length) conversation.id = id;
  openConversation(conversations.find((each) => each.id === id) ?? conversation);
  if (!element("prompt").value) showDraft();
}

// What another tab has kept since; not during an answer, whose turns are here.
async function refreshConversations() {
  if (document.hidden || running.size || !database) return;
  const found = await readConversations();
  if (running.size) return;
  conversations = found;
  const kept = conversations.find(({ id }) => id === conversation.id);
  if (kept && kept.updated > conversation.updated) openConversation(kept);
  else if (kept) conversations[conversations.indexOf(kept)] = conversation;
  showList();
}

function touchConversation(each) {
  each.updated = Date.now();
  keepConversation(each);
  showList();
}

// The latest first; those with all words of the search in their names or turns.
function showList() {
  conversations.sort((a, b) => b.updated - a.updated);
  const words = element("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const found = words.length ? conversations.filter((each) => hasWords(each, words)) : conversations;
  element("conversations").replaceChildren(...found.map(makeItem));
}

function hasWords({ title, turns }, words) {
  const text = [title, ...turns.map(({ content }) => content)].join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}

function makeItem(each) {
  const item = make("li");
  const name = nameConversation(each);
  const opener = makeButton(name, () => {
    openConversation(each);
    if (isNarrow()) showAside("sidebar", false);
  });
  opener.className = "name";
  opener.title = name;
  if (each === conversation) opener.setAttribute("aria-current", "true");
  if (running.has(each.id)) opener.setAttribute("aria-busy", "true");
  const rename = makeButton("✎", () => openRename(item, each));
  rename.setAttribute("aria-label", `Rename ${name}`);
  const remove = makeButton("✕", () => removeConversation(each));
  remove.setAttribute("aria-label", `Delete ${name}`);
  const tools = make("span", "tools");
  tools.append(rename, remove);
  item.append(opener, tools);
  return item;
}

function openRename(item, each) {
  const input = make("input");
  input.value = nameConversation(each);
  input.setAttribute("aria-label", "Name of the conversation");
  item.replaceChildren(input);
  input.select();
  let isOpen = true; // the list is shown again at the end, which blurs the field
  const finish = (isKept) => {
    if (!isOpen) return;
    isOpen = false;
    if (isKept) {
      each.title = input.value.trim().slice(0, 200);
      keepConversation(each);
    }
    showList();
  };
  input.addEventListener("blur", () => finish(true));
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") finish(true);
    if (event.key === "Escape") finish(false);
  });
  input.focus();
}

async function removeConversation(each) {
  if (!confirm(`Delete "${nameConversation(each)}"?`)) return;
  running.get(each.id)?.controller.abort();
  conversations = conversations.filter((other) => other !== each);
  sessionStorage.removeItem(DRAFT + each.id);
  await forgetConversation(each);
  if (each === conversation) startConversation();
  showList();
}

// Shows a conversation, at its end or at its turn number `at`.
function openConversation(each, at = each.turns.length) {
  const isOther = each.id !== conversation.id;
  conversation = each;
  sessionStorage.setItem(CONVERSATION, each.id);
  if (isOther) showDraft();
  element("system").value = each.system;
  views.clear();
  // At once: the page is laid out anew for each turn that comes alone.
  element("log").replaceChildren(...each.turns.map(makeTurn));
  element("log").scrollTop = element("log").scrollHeight;
  element("log").children[at]?.scrollIntoView({ block: "nearest" });
  const run = running.get(each.id);
  if (run && !each.turns.includes(run.turn)) addTurn(run.turn);
  showHint();
  showRunning();
  showWayToEnd();
}

// Another one begins; an answer that still comes is kept with its own.
function startConversation() {
  openConversation(makeConversation(element("system").value));
  if (isNarrow()) showAside("sidebar", false);
  element("prompt").focus();
}

function keepSystem() {
  conversation.system = element("system").value;
  if (conversations.includes(conversation)) keepConversation(conversation);
}

async function importFile() {
  const [file] = element("import-file").files;
  element("import-file").value = ""; // so that the same file can be chosen again
  if (!file) return;
  try {
    const found = await readExport(file);
    for (const each of found) await keepConversation(each);
    conversations.push(...found);
    if (found.length) openConversation(found[0]);
    showList();
  } catch (error) {
    showError(error.message);
  }
}
