// Formulas in TeX as MathML. Temml makes the elements, and those of the lists below alone pass: a
// formula of a model may be anything.

const MAX_TEX = 5000; // characters
const MATH_OPTIONS = { throwOnError: true, trust: false, maxExpand: 100, maxSize: [20, 50] };
const MATH_TAGS = new Set([
  ..."math mrow mi mn mo ms mtext mspace mfrac msqrt mroot msup msub msubsup munder mover".split(" "),
  ..."munderover mmultiscripts mprescripts none mtable mtr mtd mstyle mpadded mphantom".split(" "),
]);
const MATH_ATTRIBUTES = new Set([
  ..."display displaystyle scriptlevel mathvariant stretchy fence separator form lspace".split(" "),
  ..."rspace minsize maxsize largeop movablelimits symmetric accent accentunder width".split(" "),
  ..."linethickness height depth voffset columnspan rowspan mathcolor style".split(" "),
]);
// An amount of money begins with a sign too, so a formula in $ has no space within its signs, no
// digit behind them, and no code in it.
const INLINE_MATH = [
  [/^\$\$([^$]+)\$\$/, "block"],
  [/^\\\[([^]+?)\\\]/, "block"],
  [/^\\\(([^]+?)\\\)/, "inline"],
  [/^\$(?!\s)((?:\\.|[^\\$\n`])+)(?<!\s)\$(?!\d)/, "inline"],
];
const BLOCK_MATH = [
  [/^\$\$([^$]+)\$\$ *(?:\n|$)/, "block"],
  [/^\\\[([^]+?)\\\] *(?:\n|$)/, "block"],
];

// `begin` finds where a formula may begin: a block only begins a line, since marked cuts the text there.
function makeMathExtension(name, level, begin, patterns) {
  return {
    name,
    level,
    start(text) {
      const match = begin.exec(text);
      return match ? match.index + match[0].length : undefined;
    },
    tokenizer(text) {
      for (const [pattern, display] of patterns) {
        const match = pattern.exec(text);
        if (match) return { type: name, raw: match[0], text: match[1].trim(), display };
      }
      return undefined;
    },
    renderer({ raw, text, display }) {
      const node = make("span", "", raw.trim());
      node.dataset.math = display;
      node.dataset.tex = text;
      return node.outerHTML;
    },
  };
}

const mathExtensions = [
  makeMathExtension("blockMath", "block", /\n(?=\$\$|\\\[)/, BLOCK_MATH),
  makeMathExtension("inlineMath", "inline", /(?=\$|\\[[(])/, INLINE_MATH),
];

// Shows the formula of an element; as it was written, if it is no formula.
function showMath(node) {
  const { tex, math: display } = node.dataset;
  delete node.dataset.tex;
  if (tex.length > MAX_TEX) return;
  const target = document.createElement("div");
  try {
    temml.render(tex, target, { ...MATH_OPTIONS, displayMode: display === "block" });
    node.replaceChildren(checkMath(target.firstElementChild));
  } catch {
    return;
  }
  if (display === "block") node.tabIndex = 0; // so that the keyboard can scroll it
}

// throws: Error for an element that is no part of a formula
function checkMath(math) {
  for (const node of [math, ...math.querySelectorAll("*")]) {
    if (!MATH_TAGS.has(node.localName)) throw new Error(`no part of a formula: ${node.localName}`);
    for (const { name } of [...node.attributes])
      if (!MATH_ATTRIBUTES.has(name)) node.removeAttribute(name);
  }
  return math;
}
