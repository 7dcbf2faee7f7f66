import OpenAI from "openai";

const [plain, caller] = process.argv
  .slice(2)
  .map((url) => new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0 }));
const messages = [{ role: "user", content: "What is 2 + 3?" }];
const asked = { model: "demo", messages };
const parameters = { type: "object", properties: { a: { type: "integer" } } };
const tools = [{ type: "function", function: { name: "add", parameters } }];

const whole = await plain.chat.completions.create(asked);
const stream = plain.chat.completions.stream(asked);
const called = await caller.chat.completions.stream({ ...asked, tools }).finalMessage();
// A field that the helper does not know: it keeps the last part alone.
const thought = await caller.chat.completions.create({ ...asked, tools });
const response = await plain.responses.create({ model: "demo", input: messages });
const error = await plain.chat.completions
  .create({ ...asked, model: "other" })
  .catch((error) => error);

console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    streamed: await stream.finalContent(),
    response: response.output_text,
    call: {
      name: called.tool_calls[0].function.name,
      input: JSON.parse(called.tool_calls[0].function.arguments),
    },
    thinking: thought.choices[0].message.reasoning_content,
    error: [error.status, error.code],
  }),
);
