import Anthropic from "@anthropic-ai/sdk";

const [plain, caller] = process.argv
  .slice(2)
  .map((baseURL) => new Anthropic({ baseURL, apiKey: "any", maxRetries: 0 }));
const messages = [{ role: "user", content: "What is 2 + 3?" }];
const asked = { model: "demo", max_tokens: 200, messages };
const tools = [{ name: "add", input_schema: { type: "object", properties: { a: { type: "integer" } } } }];

const whole = await plain.messages.create(asked);
const stream = plain.messages.stream(asked);
const called = await caller.messages.stream({ ...asked, tools }).finalMessage();
const error = await plain.messages.create({ ...asked, model: "other" }).catch((error) => error);

console.log(
  JSON.stringify({
    whole: whole.content[0].text,
    streamed: await stream.finalText(),
    call: called.content.at(-1),
    thinking: called.content[0].thinking,
    error: [error.status, error.error.error.type],
  }),
);
