// The agent of sdk_agents.py with the `openai` package on Node: node openai_agent.cjs BASE_URL whole|streamed
// Prints what the policy says in the end. NODE_PATH names the folder with the package.

const { OpenAI } = require("openai");

async function main(baseURL, stream) {
  const client = new OpenAI({ baseURL, apiKey: "any" });
  const parameters = { type: "object", properties: { q: { type: "string" } }, required: ["q"] };
  const tools = [{ type: "function", function: { name: "weather", description: "", parameters } }];
  const messages = [{ role: "user", content: "what is the weather in Paris?" }];
  for (let turn = 0; turn < 2; turn++) {
    const asked = { model: "m", messages, tools, temperature: 0, max_completion_tokens: 100 };
    const answer = stream
      ? await client.chat.completions.stream(asked).finalChatCompletion()
      : await client.chat.completions.create(asked);
    const message = answer.choices[0].message;
    if (!message.tool_calls?.length) {
      console.log(message.content);
      return;
    }
    messages.push(message);
    for (const call of message.tool_calls) {
      JSON.parse(call.function.arguments);
      messages.push({ role: "tool", tool_call_id: call.id, content: "21 degrees" });
    }
  }
  throw new Error("no answer");
}

main(process.argv[2], process.argv[3] === "streamed").catch((error) => {
  console.error(error);
  process.exit(1);
});
