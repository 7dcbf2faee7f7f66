// Text files in messages: chosen, dropped or pasted, each as a block with its name.

const MAX_TEXT_BYTES = 1e6;

// The text of a file.   throws: Error for one that is too large or no text
async function readTextFile(file) {
  if (file.size > MAX_TEXT_BYTES) throw new Error(`${file.name}: the file has more than 1 MB`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch {
    // bytes that are no text
  }
  throw new Error(`${file.name}: no text in UTF-8; the chat takes text files alone`);
}

// A block of Markdown that ends where the text does, whatever fences the text has in it.
function quoteFile(name, text) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}\n`;
}

async function addFiles(files) {
  for (const file of files) {
    const of = conversation;
    try {
      const block = quoteFile(file.name, await readTextFile(file));
      if (of !== conversation) return;
      const before = element("prompt").value;
      setPrompt(`${before}${before && !before.endsWith("\n") ? "\n" : ""}${block}`);
    } catch (error) {
      showError(error.message);
    }
  }
  element("prompt").focus();
}

function addFileInputs() {
  const input = element("files");
  element("attach").addEventListener("click", () => input.click());
  input.addEventListener("change", async () => {
    await addFiles([...input.files]);
    input.value = ""; // so that the same file can be chosen again
  });
  element("prompt").addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length || event.clipboardData.getData("text/plain")) return;
    event.preventDefault();
    addFiles([...event.clipboardData.files]);
  });
  for (const name of ["dragover", "drop"]) {
    element("talk").addEventListener(name, (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault(); // or the browser would open the file in place of the page
      if (name === "drop") addFiles([...event.dataTransfer.files]);
    });
  }
}
