import { Ollama } from "ollama";

const [plain, caller] = process.argv.slice(2).map((host) => new Ollama({ host }));
const messages = [{ role: "user", content: "What is 2 + 3?" }];
const asked = { model: "demo", messages };
const parameters = { type: "object", properties: { a: { type: "integer" } } };
const tools = [{ type: "function", function: { name: "add", description: "", parameters } }];

const whole = await plain.chat(asked);
let streamed = "";
for await (const part of await plain.chat({ ...asked, stream: true })) streamed += part.message.content;
let call, thinking = "";
for await (const part of await caller.chat({ ...asked, tools, stream: true })) {
  call = part.message.tool_calls?.[0] ?? call;
  thinking += part.message.thinking ?? "";
}
const error = await plain.chat({ ...asked, model: "other" }).catch((error) => error);

console.log(
  JSON.stringify({
    whole: whole.message.content,
    streamed,
    call: { name: call.function.name, input: call.function.arguments },
    thinking,
    error: [error.status_code, error.message],
  }),
);
