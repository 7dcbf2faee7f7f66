// The frame: the key, the two views, the theme and the keyboard.

const KEY = "headstock-key";
const THEME = "headstock-theme";
const VIEWS = ["chat", "live"];

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
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
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

async function showModel() {
  try {
    const models = (await (await ask("/v1/models")).json()).data;
    element("model").textContent = models.map((model) => model.id).join(", ");
    element("login").hidden = true;
    showStatus("serving");
  } catch (error) {
    showStatus(error.message, true);
    if (element("login").hidden) setTimeout(showModel, 2000);
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

function showTheme(theme) {
  document.documentElement.dataset.theme = theme;
  draw();
}

function switchTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem(THEME, theme);
  showTheme(theme);
}

function takeKey(event) {
  const isTyping = ["INPUT", "TEXTAREA"].includes(event.target.tagName);
  if (event.key === "Escape") {
    stop();
  } else if (event.target === element("prompt") && event.key === "Enter" && !event.shiftKey) {
    // Enter that ends a composition (Japanese, Chinese) sends nothing.
    if (event.isComposing) return;
    event.preventDefault();
    send();
  } else if (event.target.role === "tab" && event.key.startsWith("Arrow")) {
    showView(element("chat").hidden ? "chat" : "live", true);
  } else if (!isTyping && !event.ctrlKey && !event.metaKey && !event.altKey) {
    const actions = { c: () => showView("chat"), l: () => showView("live"), d: switchTheme };
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
  element("clear").addEventListener("click", clearChat);
  element("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  element("login").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, element("key").value.trim());
    showModel();
  });
  document.addEventListener("keydown", takeKey);
  window.addEventListener("resize", draw);
  showModel();
  poll();
  element("prompt").focus();
}

start();
