// An agent: the Vercel AI SDK with two tools, streaming, asked twice in one conversation. API: chat or google.
// It is started in an empty folder, so the packages are looked up from the folder that MODULES names.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const require = createRequire(process.env.MODULES + "/");
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { streamText, tool, stepCountIs, jsonSchema } = await load("ai");
const google = async () =>
  (await load("@ai-sdk/google")).createGoogleGenerativeAI({
    baseURL: process.env.GOOGLE_GEMINI_BASE_URL + "/v1beta",
    apiKey: process.env.GEMINI_API_KEY,
  })(process.env.MODEL);
const openai = async () => {
  const made = (await load("@ai-sdk/openai")).createOpenAI({ baseURL: process.env.OPENAI_BASE_URL });
  return made.chat(process.env.MODEL);
};
const model = await (process.env.API === "google" ? google() : openai());
const schema = (properties) => jsonSchema({ type: "object", properties, required: Object.keys(properties) });
const tools = {
  add: tool({
    description: "Add two numbers.",
    inputSchema: schema({ a: { type: "number" }, b: { type: "number" } }),
    execute: async ({ a, b }) => a + b,
  }),
  weather: tool({
    description: "Get the weather.",
    inputSchema: schema({ city: { type: "string" } }),
    execute: async ({ city }) => `sunny in ${city}`,
  }),
};
const messages = [];
for (const content of [JSON.parse(process.env.TASK_JSON).prompt[0].content, "Once more?"]) {
  messages.push({ role: "user", content });
  const answer = streamText({ model, system: "You are helpful.", messages, tools, stopWhen: stepCountIs(6) });
  for await (const text of answer.textStream) process.stdout.write(text);
  messages.push(...(await answer.response).messages);
}
