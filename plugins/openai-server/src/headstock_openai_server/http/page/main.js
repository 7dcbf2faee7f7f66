// The frame: the key, the two views, the theme and the keyboard.

const KEY = "headstock-key";
const THEME = "headstock-theme";
const VIEWS = ["chat", "live"];
const ASIDES = ["sidebar", "panel"];

function element(id) {
  return document.getElementById(id);
}

function milliseconds(seconds) {
  return `${(1000 * seconds).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
}

function showStatus(text, isBad = false) {
  element("status").textContent = text;
  element("status").classList.toggle("bad", isBad);
}

// The response of a call that went well; an error with the server's own words otherwise.
async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(BASE + path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    showStatus("the server cannot be reached", true);
    retryLater();
    throw new Error("the server cannot be reached");
  }
  if (response.ok) return response;
  if (response.status === 401) {
    element("login").hidden = false;
    element("key").focus();
  }
  let text = `the server said ${response.status}`;
  try {
    text = (await response.json()).error.message;
  } catch {
    // no body of ours: something between answered
  }
  throw new Error(text);
}

let retry = null; // the timer of the next attempt to reach the server

function retryLater() {
  retry ??= setTimeout(showModel, 2000);
}

// The model's name, and whether the server serves; asks again until it does.
async function showModel() {
  clearTimeout(retry);
  retry = null;
  try {
    const models = (await (await ask("/v1/models")).json()).data;
    element("model").textContent = models.map((model) => model.id).join(", ");
    element("login").hidden = true;
    showStatus("serving");
  } catch (error) {
    showStatus(error.message, true);
    if (element("login").hidden) retryLater();
  }
}

function showView(name, takesFocus = false) {
  for (const view of VIEWS) {
    const tab = element(`tab-${view}`);
    element(view).hidden = view !== name;
    tab.setAttribute("aria-selected", String(view === name));
    tab.tabIndex = view === name ? 0 : -1;
    if (view === name && takesFocus) tab.focus();
  }
  if (name === "chat" && !takesFocus) element("prompt").focus();
  draw();
}

// Without one, Enter is the only key that breaks a line, and a button sends.
function hasKeyboard() {
  return !matchMedia("(hover: none) and (pointer: coarse)").matches;
}

function isNarrow() {
  return matchMedia("(max-width: 45rem)").matches;
}

function showAside(name, isShown) {
  element(name).hidden = !isShown;
  element(`show-${name}`).setAttribute("aria-expanded", String(isShown));
}

function switchAside(name) {
  const isShown = element(name).hidden;
  if (isShown && isNarrow()) ASIDES.forEach((other) => showAside(other, false));
  showAside(name, isShown);
  // Where it covers the chat, the keyboard follows it.
  if (isShown && isNarrow()) element(name).querySelector("button").focus();
}

function showTheme(theme) {
  document.documentElement.dataset.theme = theme;
  draw();
}

function switchTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem(THEME, theme);
  showTheme(theme);
}

// Keys that work in the field of messages too.   returns: whether it was one of them
function takeShortcut(event) {
  if (!event.ctrlKey && !event.metaKey) return false;
  if (event.key.toLowerCase() === "o" && event.shiftKey) {
    showView("chat");
    startConversation();
  } else if (event.key.toLowerCase() === "k" && !event.shiftKey) {
    showView("chat");
    showAside("sidebar", true);
    element("search").select();
  } else {
    return false;
  }
  event.preventDefault();
  return true;
}

function takeKey(event) {
  if (takeShortcut(event)) return;
  const isTyping = ["INPUT", "TEXTAREA"].includes(event.target.tagName);
  if (event.key === "Escape") {
    stop();
    if (isNarrow()) ASIDES.forEach((name) => showAside(name, false));
  } else if (event.target === element("prompt") && event.key === "Enter" && !event.shiftKey) {
    if (!hasKeyboard()) return;
    // Enter that ends a composition (Japanese, Chinese) sends nothing.
    if (event.isComposing) return;
    event.preventDefault();
    send();
  } else if (event.target.role === "tab" && event.key.startsWith("Arrow")) {
    showView(element("chat").hidden ? "chat" : "live", true);
  } else if (!isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) {
    const actions = {
      c: () => showView("chat"),
      l: () => showView("live"),
      d: switchTheme,
      n: () => {
        showView("chat");
        startConversation();
      },
    };
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }
}

function start() {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  showTheme(localStorage.getItem(THEME) || (isDark ? "dark" : "light"));
  for (const view of VIEWS) element(`tab-${view}`).addEventListener("click", () => showView(view));
  element("theme").addEventListener("click", switchTheme);
  element("stop").addEventListener("click", stop);
  element("new").addEventListener("click", startConversation);
  element("export").addEventListener("click", () => exportConversations(conversations));
  element("import").addEventListener("click", () => element("import-file").click());
  element("import-file").addEventListener("change", importFile);
  element("system").addEventListener("input", keepSystem);
  element("search").addEventListener("input", showList);
  addFileInputs();
  element("reset").addEventListener("click", resetSettings);
  for (const name of ASIDES) {
    element(`show-${name}`).addEventListener("click", () => switchAside(name));
    element(`close-${name}`).addEventListener("click", () => {
      showAside(name, false);
      element(`show-${name}`).focus();
    });
    showAside(name, name === "sidebar" && !isNarrow());
  }
  element("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  element("login").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, element("key").value.trim());
    showModel();
  });
  element("prompt").addEventListener("input", () => {
    fitPrompt();
    keepDraft();
  });
  element("log").addEventListener("scroll", showWayToEnd);
  element("to-end").addEventListener("click", () => {
    element("log").scrollTop = element("log").scrollHeight;
    element("prompt").focus();
  });
  document.addEventListener("keydown", takeKey);
  window.addEventListener("pagehide", () => running.forEach(keepPart));
  document.addEventListener("visibilitychange", refreshConversations);
  channel.addEventListener("message", refreshConversations);
  window.addEventListener("resize", draw);
  showSettings();
  loadConversations();
  showModel();
  poll();
  element("prompt").focus();
}

start();
