import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";

const [plain, caller, api] = process.argv.slice(2);
const connect = (url) =>
  api === "anthropic"
    ? createAnthropic({ baseURL: `${url}/v1`, apiKey: "any" })("demo")
    : createOpenAICompatible({ baseURL: `${url}/v1`, name: "headstock" })("demo");
const asked = { prompt: "What is 2 + 3?", maxRetries: 0 };
const inputSchema = jsonSchema({ type: "object", properties: { a: { type: "integer" } } });

const whole = await generateText({ ...asked, model: connect(plain) });
const stream = streamText({ ...asked, model: connect(plain) });
const called = streamText({ ...asked, model: connect(caller), tools: { add: tool({ inputSchema }) } });
const [call] = await called.toolCalls;

console.log(
  JSON.stringify({
    whole: whole.text,
    streamed: await stream.text,
    call: { name: call.toolName, input: call.input },
    thinking: await called.reasoningText,
  }),
);
