// Markdown as elements. What a model writes may be anything: its HTML stays text, DOMPurify lets only
// the elements below pass, and the page's policy loads and runs nothing of others.

const ALLOWED_TAGS = [
  ..."h1 h2 h3 h4 h5 h6 p br hr blockquote ul ol li pre code em strong del a".split(" "),
  ..."table thead tbody tr th td div span #text".split(" "),
];
const PLAIN_ATTRIBUTES = ["align", "start", "data-language", "data-math", "data-tex"];
const MAX_COLOURED = 20000; // characters of code; more is shown in one colour
const PURIFY_OPTIONS = {
  ALLOWED_TAGS,
  ALLOWED_ATTR: ["href", ...PLAIN_ATTRIBUTES],
  ADD_URI_SAFE_ATTR: PLAIN_ATTRIBUTES,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?:\/\/|mailto:)/i,
  RETURN_DOM_FRAGMENT: true,
};
const renderer = {
  html: ({ text }) => make("span", "", text).innerHTML,
  // No image is loaded; its address is a link, which someone may follow.
  image({ href, text }) {
    const link = make("a", "", text || href);
    link.setAttribute("href", href);
    return link.outerHTML;
  },
  checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  code({ text, lang }) {
    const language = (lang || "").match(/^\S*/)[0];
    const code = make("code", "", text);
    code.dataset.language = language;
    return `<pre>${code.outerHTML}</pre>`;
  },
};
const markdown = new marked.Marked({ gfm: true, renderer, extensions: mathExtensions });

// The elements of blocks, one for each. All at once, since each call of DOMPurify is slow.
function makeBlocks(tokens) {
  const html = tokens.map((token) => `<div>${markdown.parser([token])}</div>`).join("");
  const fragment = DOMPurify.sanitize(html, PURIFY_OPTIONS);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
    if (!link.hasAttribute("href")) link.replaceWith(...link.childNodes); // DOMPurify took it
  }
  for (const formula of fragment.querySelectorAll("[data-tex]")) showMath(formula);
  for (const block of fragment.querySelectorAll("pre")) addCopyButton(block);
  for (const table of fragment.querySelectorAll("table")) makeScrollable(table);
  return [...fragment.children];
}

function addCopyButton(block) {
  const code = block.querySelector("code");
  const frame = make("div", "code");
  const head = make("div", "code-head");
  const text = code.textContent;
  head.append(make("span", "", code.dataset.language), makeCopyButton("Copy code", () => text));
  showColours(code, text);
  block.replaceWith(frame);
  block.tabIndex = 0; // so that the keyboard can scroll it
  frame.append(head, block);
}

// Of the words of code, where its language is known.
function showColours(code, text) {
  const { language } = code.dataset;
  if (!language || text.length > MAX_COLOURED || !hljs.getLanguage(language)) return;
  const html = hljs.highlight(text, { language, ignoreIllegals: true }).value;
  const options = { ALLOWED_TAGS: ["span", "#text"], ALLOWED_ATTR: ["class"], RETURN_DOM_FRAGMENT: true };
  const fragment = DOMPurify.sanitize(html, options);
  // A parser that lost something would show wrong code.
  if (fragment.textContent === text) code.replaceChildren(fragment);
}

function makeScrollable(table) {
  const frame = make("div", "table");
  frame.tabIndex = 0;
  table.replaceWith(frame);
  frame.append(table);
}

// Shows `text` in `target`. Blocks that are as before stay, so that a stream costs what it adds, and
// a selection in earlier blocks survives.
function showMarkdown(target, text) {
  const blocks = target.blocks ?? [];
  try {
    const tokens = markdown.lexer(text);
    let same = 0;
    while (same < tokens.length && blocks[same]?.raw === tokens[same].raw) same++;
    const nodes = makeBlocks(tokens.slice(same));
    if (!same) target.replaceChildren();
    for (const { node } of blocks.slice(same)) node.remove();
    target.append(...nodes);
    const added = nodes.map((node, index) => ({ raw: tokens[same + index].raw, node }));
    target.blocks = [...blocks.slice(0, same), ...added];
  } catch {
    target.textContent = text; // nested too deeply
    target.blocks = [];
  }
}
