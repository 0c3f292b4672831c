// The AI SDK against the server at SERVER_URL, whose engine repeats the last message. Run in the folder of its packages.
import assert from 'node:assert/strict';
import { createRequire } from 'node:module';
import { pathToFileURL } from 'node:url';

const require = createRequire(`${process.cwd()}/package.json`);
const load = (name) => import(pathToFileURL(require.resolve(name)));
const [{ createOpenAICompatible }, { generateText, streamText, stepCountIs, tool, Output }, { z }] = await Promise.all(
  ['@ai-sdk/openai-compatible', 'ai', 'zod'].map(load),
);

const baseURL = `${process.env.SERVER_URL}/v1`;
const model = createOpenAICompatible({ name: 'tgis', baseURL, supportsStructuredOutputs: true, includeUsage: true })('any');
const CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 3, "b": 4}}\n</tool_call></s>';
const asked = { model, maxRetries: 0, maxOutputTokens: 200 };

const stream = streamText({ ...asked, prompt: 'hello</s>' });
let text = '';
for await (const part of stream.textStream) text += part;
assert.equal(text, 'hello');
assert.ok((await stream.usage).outputTokens > 0);

// Tools beside a schema: the tool's result is the last message, which the answer repeats.
const multiply = tool({
  description: 'Multiply two numbers.',
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => ({ n: a * b }),
});
const output = Output.object({ schema: z.object({ n: z.number() }) });
const answer = await generateText({ ...asked, prompt: CALL, tools: { multiply }, output, stopWhen: stepCountIs(3) });
assert.deepEqual(answer.output, { n: 12 });
assert.equal(answer.steps.length, 2);

await assert.rejects(generateText({ ...asked, prompt: 'a', temperature: -1 }), /temperature must be >= 0/);
