// The settings of answers: samplers and tools, kept in this browser. An empty one is the model's own.

const SETTINGS = "headstock-settings";
const NUMBERS = {
  temperature: ["Temperature", 0, 2],
  top_p: ["Top p", 0, 1],
  top_k: ["Top k", 0, null],
  min_p: ["Min p", 0, 1],
  max_tokens: ["Max tokens", 1, null],
  seed: ["Seed", null, null],
  presence_penalty: ["Presence penalty", -2, 2],
  frequency_penalty: ["Frequency penalty", -2, 2],
  repetition_penalty: ["Repetition penalty", 0, null],
};
const TEXTS = {
  stop: ["Stop texts", "one a line; \\n is a line break"],
  tools: ["Tools (JSON)", "a list, as in the API"],
};

function showSettings() {
  const kept = readKept();
  const numbers = Object.entries(NUMBERS).map(([name, [title, min, max]]) => {
    const input = make("input");
    Object.assign(input, { type: "number", step: "any", placeholder: "model's" });
    if (min !== null) input.min = min;
    if (max !== null) input.max = max;
    return makeSetting(name, title, input, kept);
  });
  const texts = Object.entries(TEXTS).map(([name, [title, hint]]) => {
    const input = make("textarea");
    Object.assign(input, { rows: 2, placeholder: hint });
    return makeSetting(name, title, input, kept);
  });
  element("settings").replaceChildren(...numbers, ...texts);
}

function makeSetting(name, title, input, kept) {
  const label = make("label", "", title);
  input.id = `setting-${name}`;
  input.value = kept[name] ?? "";
  input.addEventListener("input", keepSettings);
  label.append(input);
  return label;
}

function readSetting(name) {
  return element(`setting-${name}`).value;
}

function settingNames() {
  return [...Object.keys(NUMBERS), ...Object.keys(TEXTS)];
}

function keepSettings() {
  const values = settingNames().map((name) => [name, readSetting(name)]);
  localStorage.setItem(SETTINGS, JSON.stringify(Object.fromEntries(values)));
}

function readKept() {
  try {
    return JSON.parse(localStorage.getItem(SETTINGS)) ?? {};
  } catch {
    return {}; // of another page under this origin
  }
}

function resetSettings() {
  for (const name of settingNames()) element(`setting-${name}`).value = "";
  keepSettings();
}

// The fields of a request that the settings make.   throws: Error for tools that are not JSON
function readSettings() {
  const fields = {};
  for (const name of Object.keys(NUMBERS)) {
    const value = readSetting(name);
    if (value !== "") fields[name] = Number(value);
  }
  const stop = readSetting("stop").split("\n").filter(Boolean);
  if (stop.length) fields.stop = stop.map((text) => text.replaceAll("\\n", "\n"));
  const tools = readSetting("tools").trim();
  if (tools) {
    try {
      fields.tools = JSON.parse(tools);
    } catch (error) {
      throw new Error(`tools: not JSON (${error.message})`);
    }
  }
  return fields;
}
